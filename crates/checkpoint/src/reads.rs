//! Which tensors there are, and which of them somebody has read.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use kozue_kernels::{Gram, Matrix};

use crate::error::Error;
use crate::source::TensorInfo;

/// Where a model's layers get their tensors from.
pub trait Tensors {
    /// The matrix `name` with `n` outputs and `k` inputs.
    ///
    /// # Errors
    /// If it is missing or of another shape or type.
    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error>;

    /// The tensor `name` of `len` values, flattened, as f32.
    ///
    /// # Errors
    /// If it is missing or of another size or type.
    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error>;

    /// Where the inputs that these matrices are multiplied with are to be added up, if anybody
    /// wants to know them. Asked once for all matrices that share their inputs.
    fn watch(&self, _names: &[String]) -> Option<Arc<Gram>> {
        None
    }
}

/// The tensors of a checkpoint and which were read.
pub(crate) struct Reads {
    path: PathBuf,
    tensors: HashMap<String, TensorInfo>,
    read: Mutex<HashSet<String>>,
}

impl Reads {
    pub fn new(path: &Path, tensors: impl IntoIterator<Item = TensorInfo>) -> Reads {
        Reads {
            path: path.to_path_buf(),
            tensors: tensors
                .into_iter()
                .map(|info| (info.name.clone(), info))
                .collect(),
            read: Mutex::default(),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Every tensor, sorted by name.
    pub fn all(&self) -> Vec<&TensorInfo> {
        let mut all: Vec<_> = self.tensors.values().collect();
        all.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// Notes that `name` is being read; an error where there is no such tensor.
    pub fn mark(&self, name: &str) -> Result<(), Error> {
        if !self.tensors.contains_key(name) {
            return Err(Error::missing(&self.path, name));
        }
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        read.insert(name.to_owned());
        Ok(())
    }

    /// Error unless every tensor was read, save those set aside.
    pub fn finish(&self) -> Result<(), Error> {
        let read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let mut unread: Vec<&str> = self
            .tensors
            .values()
            .filter(|info| !info.aside && !read.contains(&info.name))
            .map(|info| info.name.as_str())
            .collect();
        unread.sort_unstable();
        match unread.first() {
            None => Ok(()),
            Some(first) => Err(Error::Unexpected {
                path: self.path.clone(),
                count: unread.len(),
                first: (*first).to_owned(),
            }),
        }
    }
}
