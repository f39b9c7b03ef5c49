//! One forward pass for several sequences.

use crate::error::Error;
use crate::sequence::{Sequence, Taken};
use crate::session::Event;
use crate::target::LanguageModel;
use kozue_model::Outputs;
use std::time::Instant;

/// Takes the next rows of all `sequences` through the model together, and gives each its part.
/// The bits of a sequence do not depend on the others. `events` hears which sequence it is.
///
/// Errors: of the whole pass, after which no sequence is of use; or, one for each sequence, its
/// own failure, which leaves the others as they should be.
pub fn run_pass<M: LanguageModel>(
    model: &M,
    sequences: &mut [&mut Sequence<'_, M::State>],
    events: &mut dyn FnMut(usize, Event),
) -> Result<Vec<Result<(), Error>>, Error> {
    let mut planned = vec![0; sequences.len()];
    for index in 0..sequences.len() {
        // Those that plan later have one row at least.
        let others = planned
            .iter()
            .map(|rows: &usize| (*rows).max(1))
            .sum::<usize>()
            - 1;
        planned[index] = sequences[index].plan(others)?;
    }
    let decoding = sequences.iter().all(|sequence| !sequence.prefilling());
    // One drafter serves all sequences, so they want the same.
    let (taps, hidden) = sequences
        .iter()
        .fold((Vec::new(), false), |wanted, sequence| {
            let wants = sequence.wants();
            if wants.taps.is_empty() && !wants.hidden {
                wanted
            } else {
                (wants.taps.to_vec(), wants.hidden)
            }
        });
    let wanted = Outputs {
        taps: &taps,
        hidden,
    };
    let start = Instant::now();
    let mut segments: Vec<_> = sequences.iter_mut().map(|s| s.segment()).collect();
    let logit_rows: Vec<usize> = segments.iter().map(|s| s.logit_rows).collect();
    let mut output = model.pass(&mut segments, wanted)?;
    drop(segments);
    let milliseconds = start.elapsed().as_secs_f64() * 1e3;

    let rows: usize = planned.iter().sum();
    let all_logit_rows: usize = logit_rows.iter().sum();
    let vocab_size = model.vocab_size();
    let feature_size = output.features.len() / rows.max(1);
    let hidden_size = output.hidden.len() / all_logit_rows.max(1);
    let (mut row, mut logit_row) = (0, 0);
    let mut results = Vec::with_capacity(sequences.len());
    for (index, sequence) in sequences.iter_mut().enumerate() {
        let (ends, logit_ends) = (row + planned[index], logit_row + logit_rows[index]);
        let taken = Taken {
            logits: &output.logits[logit_row * vocab_size..logit_ends * vocab_size],
            features: &output.features[row * feature_size..ends * feature_size],
            hidden: &output.hidden[logit_row * hidden_size..logit_ends * hidden_size],
            rows,
            milliseconds,
            decoding,
        };
        let snapshots = std::mem::take(&mut output.snapshots[index]);
        results.push(sequence.take(model, taken, snapshots, &mut |event| events(index, event)));
        (row, logit_row) = (ends, logit_ends);
    }
    Ok(results)
}
