//! A conversion whose codes may be chosen elsewhere.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use kozue_kernels::{Cpu, PackedSpec, QuantError, Quantizer, Rotation};

use super::input::Input;
use super::plan::{Action, Plan, Step};
use super::report::write_texts;
use super::{Options, Progress, Report, Run, read_rows, wrong};
use crate::Checkpoint;
use crate::destination::{Destination, check_apart, check_target, is_kozue};
use crate::error::Error;
use crate::writer::{Planned, Writer};

/// A matrix whose codes somebody else has chosen.
#[derive(Clone, Debug)]
pub struct Rounded {
    /// In the order of [`kozue_kernels::pack`], with the spec of [`Conversion::packed`].
    pub bytes: Vec<u8>,
    /// What was lost.
    pub error: QuantError,
}

/// A source and what is to be done with each of its tensors.
pub struct Conversion {
    path: PathBuf,
    options: Options,
    input: Input,
    plan: Plan,
}

impl Conversion {
    /// Open and check a source, as [`crate::quantize`] does.
    ///
    /// # Errors
    /// If it is damaged or already quantised by Kozue.
    pub fn open(source: &Path, options: Options) -> Result<Conversion, Error> {
        if is_kozue(source) {
            return Err(Error::file(
                source,
                "is already quantised by Kozue; quantise the model that it was made from",
            ));
        }
        let input = Input::open(source)?;
        if options.head.is_some() && matches!(input, Input::Drafter { .. }) {
            return Err(Error::file(
                source,
                "is a drafter, which has no embedding table of its own; leave --head out",
            ));
        }
        let plan = Plan::new(source, &input, options)?;
        Ok(Conversion {
            path: source.to_path_buf(),
            options,
            input,
            plan,
        })
    }

    /// The model; none if the source is a drafter.
    pub fn model(&self) -> Option<&Checkpoint> {
        match &self.input {
            Input::Model(checkpoint) => Some(checkpoint),
            Input::Drafter { .. } => None,
        }
    }

    /// How a matrix is quantised.
    pub fn quantizer(&self, name: &str) -> &Quantizer {
        self.plan.quantizer(name)
    }

    fn step(&self, name: &str) -> Option<&Step> {
        self.plan.steps.iter().find(|step| step.name == name)
    }

    /// Weights of all matrices whose codes are chosen.
    pub fn packed_weights(&self) -> u64 {
        let packed = |step: &&Step| matches!(step.action, Action::Pack(_));
        let sizes = self.plan.steps.iter().filter(packed);
        sizes
            .map(|step| step.shape.iter().product::<usize>() as u64)
            .sum()
    }

    /// Whether a tensor is a matrix whose codes are chosen: not one that is kept or moved.
    pub fn packs(&self, name: &str) -> bool {
        let step = self.step(name);
        step.is_some_and(|step| matches!(step.action, Action::Pack(_)))
    }

    /// Shape and rotation of a matrix whose codes are chosen.
    ///
    /// # Errors
    /// If there is none of this name.
    pub fn packed(&self, name: &str) -> Result<(PackedSpec, &Rotation), Error> {
        match self.step(name).map(|step| (&step.action, step)) {
            Some((Action::Pack(signs), step)) => {
                Ok((self.plan.spec(step), &self.plan.rotations[signs]))
            }
            _ => Err(Error::missing(&self.path, name)),
        }
    }

    /// An error unless `target` may be written.
    ///
    /// # Errors
    /// If something that must not be replaced is there.
    pub fn check_target(&self, target: &Path) -> Result<(), Error> {
        check_apart(&self.path, target)?;
        check_target(target, self.options.force)
    }

    /// Rows `first ..` of a matrix of `k` inputs, as many as `rows` holds, on all threads.
    ///
    /// # Errors
    /// If there is no such matrix or it is damaged.
    pub fn read(
        &self,
        cpu: &Cpu,
        name: &str,
        k: usize,
        first: usize,
        rows: &mut [f32],
    ) -> Result<(), Error> {
        read_rows(cpu, &self.input, name, k, first, rows)
    }

    /// Let go of the memory behind a tensor that was read; it can be read again.
    pub fn release(&self, name: &str) {
        self.input.release(name);
    }

    /// An error about a tensor; `first` is the row from which `error` counts.
    pub fn wrong(&self, name: &str, first: usize, error: kozue_kernels::Error) -> Error {
        wrong(&self.path, name, first, error)
    }

    /// Write the new directory `target`. A packed matrix has the codes that `rounded` gives for its
    /// name, else each weight is rounded to the nearest.
    ///
    /// # Errors
    /// As [`crate::quantize`], and those of `rounded`.
    pub fn write(
        &self,
        cpu: &Cpu,
        target: &Path,
        rounded: &mut dyn FnMut(&str) -> Result<Option<Rounded>, Error>,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Report, Error> {
        let plan = &self.plan;
        let destination = Destination::create(target, self.options.force)?;
        let path = destination.dir().join("model.safetensors");
        let tensors = plan.tensors();
        let planned: Vec<&Planned> = tensors.iter().collect();
        let writer = Writer::create(&path, &planned, &plan.metadata())?;
        let mut run = Run::new(cpu, &self.path, &self.input, writer, plan.weights, progress);
        let mut reports = Vec::new();
        for step in &plan.steps {
            reports.push(run.tensor(step, plan, rounded(&step.name)?)?);
        }
        for (name, rotation) in &plan.rotations {
            let signs: Vec<u8> = rotation
                .signs()
                .iter()
                .map(|&sign| sign as i8 as u8)
                .collect();
            run.progress(name)?;
            run.writer.data(&signs)?;
        }
        run.writer.finish()?;
        let report = Report {
            tensors: reports,
            notes: Vec::new(),
            bytes_before: self.input.bytes(),
            bytes_after: tensors.iter().map(Planned::bytes).sum(),
            weights: plan.weights,
        };
        let (dir, options) = (destination.dir(), self.options);
        write_texts(&self.input, &self.path, dir, options, &report)?;
        destination.finish()?;
        Ok(report)
    }
}
