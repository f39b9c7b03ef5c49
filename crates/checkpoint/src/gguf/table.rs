//! The tensor table, as the description needs it.

use std::collections::HashMap;

use super::config::Table;
use super::dequantise::dequantise;
use super::format::Format;
use super::parse::Tensor;
use crate::error::Error;
use crate::mapping::Mapping;

/// The tensors of a file by name.
pub(super) struct Tensors<'a> {
    file: &'a Mapping,
    tensors: &'a HashMap<String, Tensor>,
}

impl<'a> Tensors<'a> {
    pub fn new(file: &'a Mapping, tensors: &'a HashMap<String, Tensor>) -> Tensors<'a> {
        Tensors { file, tensors }
    }
}

impl Table for Tensors<'_> {
    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    fn vocab_size(&self) -> Result<usize, Error> {
        const NAME: &str = "token_embd.weight";
        let tensor = self
            .tensors
            .get(NAME)
            .ok_or_else(|| Error::missing(self.file.path(), NAME))?;
        match tensor.shape[..] {
            [rows, _] if rows <= 1 << 24 => Ok(rows),
            _ => {
                let what = format!("shape {:?} is no embedding", tensor.shape);
                Err(Error::tensor(self.file.path(), NAME, what))
            }
        }
    }

    fn rope_factors(&self) -> Result<Option<Vec<f32>>, Error> {
        let Some(tensor) = self.tensors.get("rope_freqs.weight") else {
            return Ok(None);
        };
        let count = tensor.row_len().saturating_mul(tensor.row_count().max(1));
        if tensor.format != Format::F32 || count > 1 << 16 {
            let what = "a short list of F32 is needed";
            return Err(Error::tensor(self.file.path(), &tensor.name, what));
        }
        let mut factors = vec![0.0; count];
        dequantise(
            tensor.format,
            &self.file[tensor.bytes.clone()],
            &mut factors,
        )
        .map_err(|what| Error::tensor(self.file.path(), &tensor.name, what))?;
        Ok(Some(factors))
    }
}
