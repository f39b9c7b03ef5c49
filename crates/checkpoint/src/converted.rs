//! Models of other programs whose matrices are converted when they are asked for.

use kozue_kernels::Matrix;

use crate::description::Description;
use crate::error::Error;
use crate::placed::Placed;
use crate::shards::Shards;
use crate::source::{CodeRows, Note, Source, TensorInfo};
use crate::stored::Found;

/// An opened model's directory.
pub(crate) struct Converted {
    description: Description,
    placed: Placed,
}

impl Converted {
    pub fn new(description: Description, shards: Shards, found: Found) -> Result<Converted, Error> {
        Ok(Converted {
            description,
            placed: Placed::new(shards, found)?,
        })
    }
}

impl Source for Converted {
    fn description(&self) -> &Description {
        &self.description
    }

    fn tensors(&self) -> Vec<TensorInfo> {
        self.placed.tensors()
    }

    fn matrix(&self, name: &str, n: usize, k: usize) -> Result<Matrix, Error> {
        self.placed.matrix(name, n, k)
    }

    fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        self.placed.vector(name, len)
    }

    fn rows(&self, name: &str, k: usize, first: usize, out: &mut [f32]) -> Result<(), Error> {
        self.placed.rows(name, k, first, out)
    }

    fn codes(&self, name: &str) -> Option<Box<dyn CodeRows + '_>> {
        self.placed.codes(name)
    }

    fn release(&self, name: &str) {
        self.placed.release(name);
    }

    fn notes(&self) -> Vec<Note> {
        self.placed.notes()
    }
}
