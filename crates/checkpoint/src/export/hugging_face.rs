//! Directories as transformers saves them: codes become floats, rotations are undone.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use super::Floats;
use crate::destination::{WRITER, WRITER_KEY, write_file};
use crate::error::Error;
use crate::fields::pretty;
use crate::layout::Role;
use crate::quantize::input::Input;
use crate::quantize::{Report, Run, TensorReport};
use crate::safetensors::Dtype;
use crate::writer::{Planned, Writer};

/// See [`super::Plan`].
pub(super) struct Plan<'a> {
    input: &'a Input,
    floats: Floats,
    steps: Vec<Step>,
    weights: u64,
}

struct Step {
    planned: Planned,
    from: String,
}

impl<'a> Plan<'a> {
    pub fn new(input: &'a Input, floats: Floats) -> Plan<'a> {
        let mut steps: Vec<Step> = input
            .tensors()
            .into_iter()
            .map(|(slot, info)| Step {
                planned: Planned {
                    name: slot.name,
                    // What was stored in 32 bits beside 16-bit weights (decays, norms) needs them.
                    dtype: if slot.role == Role::Vector && info.format == "F32" {
                        Dtype::F32
                    } else {
                        floats.dtype()
                    },
                    shape: slot.shape,
                },
                from: info.format,
            })
            .collect();
        // Wider values first, so that every tensor is aligned without padding.
        steps.sort_by_key(|step| 8 - step.planned.dtype.size());
        let size = |step: &Step| step.planned.shape.iter().product::<usize>() as u64;
        Plan {
            input,
            floats,
            weights: steps.iter().map(size).sum(),
            steps,
        }
    }
}

impl super::Plan for Plan<'_> {
    fn values(&self) -> u64 {
        self.weights
    }

    fn writer(&self, path: &Path) -> Result<Writer, Error> {
        let metadata = [("format", "pt"), (WRITER_KEY, WRITER)]
            .map(|(key, value)| (key.to_owned(), value.to_owned()));
        let planned: Vec<&Planned> = self.steps.iter().map(|step| &step.planned).collect();
        Writer::create(path, &planned, &BTreeMap::from(metadata))
    }

    fn write(&self, mut run: Run) -> Result<Report, Error> {
        let mut report = Report {
            tensors: Vec::new(),
            notes: Vec::new(),
            bytes_before: self.input.bytes(),
            bytes_after: self.steps.iter().map(|step| step.planned.bytes()).sum(),
            weights: self.weights,
        };
        for step in &self.steps {
            let Planned { name, dtype, shape } = &step.planned;
            let error = run.keep(name, shape, *dtype)?;
            run.input.release(name);
            report.tensors.push(TensorReport {
                name: name.clone(),
                shape: shape.clone(),
                from: step.from.clone(),
                to: dtype.name().to_owned(),
                bytes: step.planned.bytes(),
                relative_error: Some(error.relative_rms()).filter(|&error| error > 0.0),
                note: None,
            });
        }
        run.writer.finish()?;
        Ok(report)
    }

    /// config.json, tokenizer, template and defaults.
    fn write_texts(&self, dir: &Path) -> Result<(), Error> {
        let (mut config, texts) = self.input.texts();
        let dtype = match self.floats {
            Floats::Bf16 => "bfloat16",
            Floats::F16 => "float16",
            Floats::F32 | Floats::Q8_0 => "float32",
        };
        config.insert("dtype".to_owned(), json!(dtype));
        write_file(&dir.join("config.json"), &pretty(config))?;
        for (name, text) in texts {
            write_file(&dir.join(name), &text)?;
        }
        Ok(())
    }
}
