//! How well a model predicts a text, and how far its predictions are from another model's.
//!
//! The text is read in windows, each from an empty context, and every token of a window but its
//! first few is predicted. Windows are what the 95% intervals take to be independent of each other.

use crate::error::Error;
use crate::target::LanguageModel;
use serde::Serialize;

/// Rows of logits that are held at a time.
const ROWS: usize = 32;
/// Tokens at a window's start that are read and not predicted, or half the window where that is less.
/// A text cut anywhere has no beginning: after a token or two of it a model may say one thing or
/// quite another for the least difference, which tells nothing of what it does in use.
const START: usize = 16;
/// Standard deviations on either side of its mean that 95% of a normal distribution lie within.
const NORMAL_95: f64 = 1.959_964;
/// Windows below which there is no interval: the spread of two tells next to nothing.
const FEWEST: usize = 3;

/// A value and half the width of its 95% interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// The value.
    pub value: f64,
    /// Half the width of the interval, by Student's distribution over the windows; `None` where there
    /// were fewer than three of them.
    pub half: Option<f64>,
}

/// What a text says of a model.
#[derive(Clone, Debug, Serialize)]
pub struct Evaluation {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// Windows that they lie in.
    pub windows: usize,
    /// Exponential of the mean negative log-likelihood of a token.
    pub perplexity: Figure,
    /// The model beside its reference.
    pub against: Option<Comparison>,
}

/// A model beside a reference, on the same text.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The reference's perplexity.
    pub perplexity: Figure,
    /// The model's perplexity by the reference's, less 1.
    pub change: Figure,
    /// Kullback-Leibler divergence of the model from the reference, nats a token.
    pub kl: Figure,
    /// Share of positions at which both give the same token the highest chance.
    pub same_top: Figure,
}

/// What was added up over the tokens of one window.
#[derive(Clone, Copy, Default)]
struct Sums {
    tokens: usize,
    loss: f64,
    reference_loss: f64,
    kl: f64,
    same_top: f64,
}

/// Evaluates `model` on `tokens` in windows of `window` tokens, each after `first`, and predicts all
/// but a window's first 16; `against` is the reference. `progress` hears of every window that is done.
///
/// # Errors
/// If a pass fails, or the text has less than two tokens.
pub fn evaluate<M: LanguageModel>(
    model: &M,
    against: Option<&M>,
    first: Option<u32>,
    tokens: &[u32],
    window: usize,
    progress: &mut dyn FnMut(usize),
) -> Result<Evaluation, Error> {
    let windows = tokens
        .chunks(window.max(2))
        .filter(|window| window.len() > 1)
        .enumerate()
        .map(|(index, window)| {
            let read: Vec<u32> = first.into_iter().chain(window.iter().copied()).collect();
            let start = START.min(window.len() / 2).max(1);
            let sums = sums(model, against, &read, window.len() - start)?;
            progress(index + 1);
            Ok(sums)
        })
        .collect::<Result<Vec<Sums>, Error>>()?;
    if windows.is_empty() {
        return Err(Error::Evaluation(
            "the text has less than two tokens: give a longer one".to_string(),
        ));
    }
    let mean = |of: &dyn Fn(&Sums) -> f64| mean(&windows, of);
    let loss = mean(&|sums| sums.loss);
    let comparison = against.map(|_| Comparison {
        perplexity: exponential(mean(&|sums| sums.reference_loss), 0.0),
        change: exponential(mean(&|sums| sums.loss - sums.reference_loss), -1.0),
        kl: mean(&|sums| sums.kl),
        same_top: mean(&|sums| sums.same_top),
    });
    Ok(Evaluation {
        tokens: windows.iter().map(|sums| sums.tokens).sum(),
        windows: windows.len(),
        perplexity: exponential(loss, 0.0),
        against: comparison,
    })
}

/// Reads `read` from the start and adds up over its last `scored` tokens.
fn sums<M: LanguageModel>(
    model: &M,
    against: Option<&M>,
    read: &[u32],
    scored: usize,
) -> Result<Sums, Error> {
    let vocab_size = model.vocab_size();
    let mut state = model.new_state();
    let mut reference = against.map(|model| (model, model.new_state()));
    let mut sums = Sums::default();
    // The last token is predicted, not read.
    let rows = read.len() - 1;
    for start in (0..rows).step_by(ROWS) {
        let end = (start + ROWS).min(rows);
        let tokens = &read[start..end];
        let logits = model.advance(&mut state, tokens, tokens.len())?;
        let beside = match &mut reference {
            Some((model, state)) => model.advance(state, tokens, tokens.len())?,
            None => Vec::new(),
        };
        for (row, logits) in (start..end).zip(logits.chunks_exact(vocab_size)) {
            if row < rows - scored {
                continue;
            }
            let target = read[row + 1] as usize;
            let total = log_total(logits, row)?;
            sums.tokens += 1;
            sums.loss += total - f64::from(logits[target]);
            let Some(other) = beside
                .get((row - start) * vocab_size..)
                .filter(|o| !o.is_empty())
            else {
                continue;
            };
            let other = &other[..vocab_size];
            let other_total = log_total(other, row)?;
            sums.reference_loss += other_total - f64::from(other[target]);
            sums.kl += other
                .iter()
                .zip(logits)
                .map(|(&other, &logit)| {
                    let expected = f64::from(other) - other_total;
                    expected.exp() * (expected - (f64::from(logit) - total))
                })
                .sum::<f64>();
            sums.same_top += f64::from(u8::from(top(logits) == top(other)));
        }
    }
    Ok(sums)
}

/// Logarithm of the sum of exponentials; an error where they are no distribution.
fn log_total(logits: &[f32], row: usize) -> Result<f64, Error> {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from(x - most).exp()).sum();
    let total = f64::from(most) + sum.ln();
    if total.is_finite() {
        return Ok(total);
    }
    let bad = logits
        .iter()
        .position(|x| x.is_nan() || *x == f32::INFINITY);
    Err(Error::BadLogits {
        position: row as u64 + 1,
        token: bad.unwrap_or(0) as u32,
    })
}

/// The first of the highest logits.
fn top(logits: &[f32]) -> usize {
    (0..logits.len()).fold(
        0,
        |best, at| if logits[at] > logits[best] { at } else { best },
    )
}

/// Mean over tokens, with the spread between windows of a token's mean.
fn mean(windows: &[Sums], of: &dyn Fn(&Sums) -> f64) -> Figure {
    let tokens: f64 = windows.iter().map(|sums| sums.tokens as f64).sum();
    let value = windows.iter().map(of).sum::<f64>() / tokens;
    let count = windows.len() as f64;
    // The ratio estimator's standard error: windows may differ in length.
    let squares: f64 = windows
        .iter()
        .map(|sums| (of(sums) - value * sums.tokens as f64).powi(2))
        .sum();
    let error = (squares * count / (count - 1.0)).sqrt() / tokens;
    Figure {
        value,
        half: (windows.len() >= FEWEST).then(|| student_95(count - 1.0) * error),
    }
}

/// What [`NORMAL_95`] is for Student's distribution with so many degrees of freedom, two at least: the
/// first terms of its series in 1/n (Abramowitz and Stegun, 26.7.5).
fn student_95(n: f64) -> f64 {
    let z = NORMAL_95;
    let terms = [
        (z.powi(3) + z) / 4.0,
        (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0,
        (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0,
    ];
    terms.iter().rev().fold(0.0, |sum, term| (sum + term) / n) + z
}

/// The exponential of a figure, and `shift`; the interval is the wider side's.
fn exponential(figure: Figure, shift: f64) -> Figure {
    let value = figure.value.exp();
    Figure {
        value: value + shift,
        half: figure.half.map(|half| value * half.exp_m1()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kozue_model::{Footprint, Outputs, PassOutput, Segment};
    use std::io::{self, Write};

    /// Gives every token the same logits, after any text.
    struct Constant(Vec<f32>);

    impl LanguageModel for Constant {
        type State = ();
        fn vocab_size(&self) -> usize {
            self.0.len()
        }
        fn max_position(&self) -> usize {
            1 << 20
        }
        fn new_state(&self) {}
        fn footprint(&self, (): &()) -> Footprint {
            Footprint::default()
        }

        fn write_state((): &(), _: &mut dyn Write) -> io::Result<()> {
            Ok(())
        }

        fn read_state(&self, _: &[u8]) -> Result<(), Error> {
            Ok(())
        }
        fn pass(
            &self,
            _: &mut [Segment<'_, ()>],
            _: Outputs<'_>,
        ) -> Result<PassOutput<'_, ()>, Error> {
            Err(Error::Model("only advances".to_string()))
        }
        fn commit(&self, (): &mut (), _: &[usize]) -> Result<(), Error> {
            Ok(())
        }
        fn advance(&self, (): &mut (), tokens: &[u32], rows: usize) -> Result<Vec<f32>, Error> {
            assert_eq!(tokens.len(), rows);
            Ok(self.0.repeat(rows))
        }
    }

    #[test]
    fn figures_are_those_of_the_distributions() {
        // Chances 1/2, 1/4, 1/4 and 1/4, 1/4, 1/2, as logits with any offset.
        let model = Constant(vec![2.0f32.ln() + 3.0, 3.0, 3.0]);
        let other = Constant(vec![0.0, 0.0, 2.0f32.ln()]);
        let tokens = [0, 1, 2, 0, 0, 1, 2, 0, 0, 2, 2];
        let found = evaluate(&model, Some(&other), None, &tokens, 4, &mut |_| ()).unwrap();
        // Windows 0 1 2 0, again, and 0 2 2: predicted are 2 0, 2 0 and 2 2.
        assert_eq!((found.tokens, found.windows), (6, 3));
        let loss = (4.0 * 4f64.ln() + 2.0 * 2f64.ln()) / 6.0;
        assert!((found.perplexity.value - loss.exp()).abs() < 1e-6);
        let against = found.against.unwrap();
        let reference = (2.0 * 4f64.ln() + 4.0 * 2f64.ln()) / 6.0;
        assert!((against.perplexity.value - reference.exp()).abs() < 1e-6);
        assert!((against.change.value - ((loss - reference).exp() - 1.0)).abs() < 1e-6);
        let kl = 0.25 * 0.5f64.ln() + 0.5 * 2f64.ln();
        assert!((against.kl.value - kl).abs() < 1e-6, "{}", against.kl.value);
        assert_eq!(against.same_top.value, 0.0);
        assert!(against.kl.half.unwrap() < 1e-9);
        assert!(found.perplexity.half.unwrap() > 0.0);
    }

    #[test]
    fn intervals_are_students() {
        // From a printed table.
        for (n, printed) in [(2.0, 4.303), (4.0, 2.776), (10.0, 2.228), (30.0, 2.042)] {
            let found = student_95(n);
            assert!((found / printed - 1.0f64).abs() < 0.04, "{n}: {found}");
        }
        assert!((student_95(10.0) - 2.228).abs() < 1e-3);
    }

    #[test]
    fn outputs_that_are_no_numbers_are_no_result() {
        let (model, broken) = (Constant(vec![0.0, 1.0]), Constant(vec![0.0, f32::NAN]));
        let tokens = [0, 1, 0, 1];
        let error = |model: &Constant, other: &Constant| {
            let found = evaluate(model, Some(other), None, &tokens, 4, &mut |_| ());
            found.unwrap_err().to_string()
        };
        let expected = "the model's output at position 2 is not a number (token 1)";
        assert!(error(&broken, &model).starts_with(expected));
        assert!(error(&model, &broken).starts_with(expected));
    }

    #[test]
    fn a_model_is_no_different_from_itself_and_first_tokens_are_not_predicted() {
        let model = Constant(vec![0.0, 1.0, 5.0]);
        let tokens: Vec<u32> = (0..100).map(|i| i % 3).collect();
        let alone = evaluate(&model, None, Some(2), &tokens, 64, &mut |_| ()).unwrap();
        // Windows of 64 and 36.
        assert_eq!(alone.tokens, 48 + 20);
        let both = evaluate(&model, Some(&model), Some(2), &tokens, 64, &mut |_| ()).unwrap();
        assert_eq!(both.perplexity, alone.perplexity);
        let against = both.against.unwrap();
        assert_eq!(against.change.value, 0.0);
        assert_eq!(against.same_top.value, 1.0);
        assert!(against.kl.value.abs() < 1e-12);
        assert!(evaluate(&model, None, None, &[1], 64, &mut |_| ()).is_err());
    }
}
