//! Quantising a model by what it does with a text.
//!
//! Layer by layer: the text's residual stream, which has gone through the layers that are already
//! quantised, goes through the next one as the source has it; the inputs of its matrices are added
//! up; its matrices are rounded so that their outputs for such inputs change least
//! (`kozue_kernels::quantizer::rounding`); and the stream goes on through what came out. The head
//! comes last. One layer is held at a time, and what is done is kept on disk: a run that was cut
//! goes on after its last whole layer.

mod packing;
mod store;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use kozue_checkpoint::{
    Checkpoint, Conversion, Description, EMBED, HEAD, Options, Progress, Report, Rounded,
    fingerprint,
};
use kozue_kernels::{Cpu, Gram, Quadratic};
use kozue_model::Walk;
use xxhash_rust::xxh3::xxh3_64;

use crate::error::Error;
use crate::tokenizer::{Control, Tokenizer};
use packing::{Calibrated, Preview, Work};
use store::Store;

/// The text that stands for what a model is used for where no other is given.
pub const TEXT: &str = include_str!("calibration/text.txt");

/// Tokens of a window of the text, which starts from an empty context.
const WINDOW: usize = 512;
/// Rows seen below which inputs tell too little of a matrix: its weights are rounded to the nearest.
const LEAST: usize = 64;
/// How much the rows of a table that is also the head count as embeddings, beside the head's inputs.
const EMBEDDING: f32 = 0.2;
/// Counts the changes of this method that give other codes.
const METHOD: u32 = 1;

/// As [`kozue_checkpoint::quantize`], with codes chosen for `text`.
///
/// The same source, options and text give the same bytes, whatever the threads. Beside the target
/// `.NAME.calibration` holds the layers that are done, and the text's stream after the last of them,
/// until the target is whole; it stays when `progress` breaks, the process is killed or the disk is
/// full ([`Error::Unfinished`]).
///
/// # Errors
/// Those of quantising, and if the source is no model or the text is too short
/// ([`Error::Evaluation`]).
pub fn calibrate(
    cpu: &Cpu,
    source: &Path,
    target: &Path,
    options: Options,
    text: &str,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Report, Error> {
    let conversion = Conversion::open(source, options).map_err(failed)?;
    conversion.check_target(target).map_err(failed)?;
    let model = conversion.model().ok_or_else(|| {
        Error::Model(format!(
            "{}: is a drafter; only models are calibrated, so leave --calibrate out",
            source.display()
        ))
    })?;
    let windows = windows(model.description(), text)?;
    let identity = format!(
        "{} {METHOD} {:016x} {:?} {:?} {} {:016x}",
        env!("CARGO_PKG_VERSION"),
        fingerprint(source).map_err(failed)?,
        options.size,
        options.head.unwrap_or(options.size),
        options.group,
        xxh3_64(text.as_bytes()),
    );
    let mut store = Store::open(target, &identity)?;
    let mut work = Work::new(cpu, &conversion, progress);
    let made = parts(&mut work, &conversion, model, windows, &mut store).and_then(|()| {
        let mut matrix = |name: &str| store.matrix(name);
        let report = conversion.write(cpu, target, &mut matrix, &mut |written| work.write(written));
        report.map_err(failed)
    });
    match made {
        Ok(report) => {
            store.remove();
            Ok(report)
        }
        Err(error) => Err(store.leave(error)),
    }
}

/// Takes the text through the model; afterwards `store` has every matrix whose codes are chosen here.
fn parts(
    work: &mut Work<'_>,
    conversion: &Conversion,
    model: &Checkpoint,
    windows: Vec<Vec<u32>>,
    store: &mut Store,
) -> Result<(), Error> {
    let config = &model.description().config;
    let (cpu, width) = (work.cpu, config.hidden_size);
    let embed = |token, row: &mut [f32]| model.rows(EMBED, width, token as usize, row);
    let mut walk = Walk::new(config, windows, embed).map_err(failed)?;
    let head = config.layers.len();
    for index in resumed(work, store, &mut walk, head)?..head {
        let done = match store.part(index)? {
            Some(done) => {
                work.skip(&names(&done)).map_err(failed)?;
                done
            }
            None => {
                let done = layer(work, conversion, model, &walk, index)?;
                store.put(index, &done)?;
                done
            }
        };
        let stage = format!("layer {index}: outputs");
        work.stage(&stage).map_err(failed)?;
        let calibrated = Calibrated::new(conversion, model, &done).map_err(failed)?;
        let layer = walk.load(&calibrated, index).map_err(failed)?;
        let stepped = walk.step(cpu, &layer, &mut || work.stage(&stage));
        stepped.map_err(failed)?;
        store.put_stream(index + 1, &walk)?;
    }

    let name = if config.tied { EMBED } else { HEAD };
    if conversion.packs(name) && store.part(head)?.is_none() {
        work.stage("head: inputs").map_err(failed)?;
        let rows = walk.finish(cpu, model).map_err(failed)?;
        let gram = Gram::new(width);
        gram.add(cpu, &rows);
        if config.tied {
            as_embedding(&gram, &rows);
        }
        drop(rows);
        let done = round(work, conversion, &[name.to_string()], gram)?;
        store.put(head, &done)?;
    }
    Ok(())
}

/// Puts the text to where it came the last time; gives the number of layers behind it, all of whose
/// matrices are in `store`.
fn resumed(
    work: &mut Work<'_>,
    store: &mut Store,
    walk: &mut Walk,
    layers: usize,
) -> Result<usize, Error> {
    let Some((reached, stream)) = store.stream()?.filter(|(reached, _)| *reached <= layers) else {
        return Ok(0);
    };
    let mut skipped = Vec::new();
    for index in 0..reached {
        let Some(done) = store.part(index)? else {
            return Ok(0);
        };
        skipped.extend(names(&done));
    }
    if walk.read_from(&stream).is_none() {
        return Ok(0);
    }
    work.skip(&skipped).map_err(failed)?;
    Ok(reached)
}

fn names(done: &[(String, Rounded)]) -> Vec<String> {
    done.iter().map(|(name, _)| name.clone()).collect()
}

/// The matrices of a layer, rounded for what comes to it.
fn layer(
    work: &mut Work<'_>,
    conversion: &Conversion,
    model: &Checkpoint,
    walk: &Walk,
    index: usize,
) -> Result<Vec<(String, Rounded)>, Error> {
    let stage = format!("layer {index}: inputs");
    work.stage(&stage).map_err(failed)?;
    let preview = Preview::new(work.cpu, conversion, model);
    let layer = walk.load(&preview, index).map_err(failed)?;
    let shown = walk.show(work.cpu, &layer, &mut || work.stage(&stage));
    shown.map_err(failed)?;
    // What it watches with goes back.
    drop(layer);
    let mut done = Vec::new();
    for (names, gram) in preview.watched() {
        let gram = Arc::into_inner(gram).ok_or_else(|| failed("inputs are still watched"))?;
        done.extend(round(work, conversion, &names, gram)?);
    }
    Ok(done)
}

/// Rounds the matrices that share the inputs of `gram`.
fn round(
    work: &mut Work<'_>,
    conversion: &Conversion,
    names: &[String],
    gram: Gram,
) -> Result<Vec<(String, Rounded)>, Error> {
    let mut form = None;
    if gram.rows() >= LEAST
        && let Some(first) = names.first()
    {
        let (spec, rotation) = conversion.packed(first).map_err(failed)?;
        // Inputs that were all zero say nothing of what to keep either.
        form = Quadratic::new(work.cpu, &gram, Some(rotation), spec.group).ok();
    }
    drop(gram);
    let rounded = names.iter().map(|name| {
        let rounded = work.round(name, form.as_ref()).map_err(failed)?;
        Ok((name.clone(), rounded))
    });
    rounded.collect()
}

/// Rows of an embedding table go into the residual stream as they are, where no input counts more
/// than another.
fn as_embedding(gram: &Gram, rows: &[f32]) {
    let square: f64 = rows.iter().map(|x| f64::from(x * x)).sum();
    gram.add_each((f64::from(EMBEDDING) * square / gram.k() as f64).sqrt() as f32);
}

/// The text's tokens in windows, each after the token that the model starts with.
fn windows(of: &Description, text: &str) -> Result<Vec<Vec<u32>>, Error> {
    let tokens = Tokenizer::new(&of.tokenizer)?.encode(text, Control::Recognised)?;
    if tokens.len() < 2 * LEAST {
        return Err(Error::Evaluation(format!(
            "the text to calibrate with has {} tokens, too few to tell anything: give a longer one",
            tokens.len()
        )));
    }
    let first = of.generation.bos;
    let longest = WINDOW.min(of.config.max_position.saturating_sub(1)).max(1);
    let windows = tokens.chunks(longest);
    Ok(windows
        .map(|window| first.into_iter().chain(window.iter().copied()).collect())
        .collect())
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Model(error.to_string())
}
