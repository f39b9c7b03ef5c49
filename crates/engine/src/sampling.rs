//! The options that decide how a token is drawn from logits.

use crate::error::Error;
use kozue_checkpoint::description::GenerationDefaults;

/// How to draw a token. Steps apply in the order of the fields: bias, penalties, temperature,
/// filters.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Added to the logits of single tokens; `-inf` rules a token out.
    pub logit_bias: Vec<(u32, f32)>,
    /// Divides positive and multiplies negative logits of tokens of the prompt and the answer
    /// (CTRL, arXiv 1909.05858); 1 = off.
    pub repetition_penalty: f32,
    /// Taken once from tokens of the answer; 0 = off.
    pub presence_penalty: f32,
    /// Taken from tokens of the answer as often as they occurred; 0 = off.
    pub frequency_penalty: f32,
    /// How many of the last tokens the penalties look at; `None` = all.
    pub penalty_window: Option<usize>,
    /// Divides the logits; 0 = always the best token.
    pub temperature: f32,
    /// Keep this many best tokens; `None` = all.
    pub top_k: Option<usize>,
    /// Keep the fewest best tokens with at least this share of the mass; 1 = all.
    pub top_p: f32,
    /// Keep tokens with at least this share of the best token's probability; 0 = all.
    pub min_p: f32,
    /// Seed of the noise.
    pub seed: u64,
}

impl Sampling {
    /// Always the best token, nothing else.
    pub fn greedy() -> Sampling {
        Sampling {
            logit_bias: Vec::new(),
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: None,
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
        }
    }

    /// What a model's makers recommend; temperature 0.7 with the best 95% of the mass where
    /// they state no temperature.
    pub fn recommended(defaults: &GenerationDefaults, seed: u64) -> Sampling {
        let silent = defaults.temperature.is_none();
        Sampling {
            temperature: defaults.temperature.unwrap_or(0.7),
            top_k: defaults.top_k.map(|k| k as usize).filter(|k| *k > 0),
            top_p: defaults.top_p.unwrap_or(if silent { 0.95 } else { 1.0 }),
            min_p: defaults.min_p.unwrap_or(0.0),
            repetition_penalty: defaults.repetition_penalty.unwrap_or(1.0),
            seed,
            ..Sampling::greedy()
        }
    }

    /// Whether any penalty changes logits.
    pub fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Checks every option against its range and every biased token against the vocabulary.
    pub fn validate(&self, vocab_size: usize) -> Result<(), Error> {
        let check = |fine: bool, option, range, value: f32| {
            if fine {
                Ok(())
            } else {
                Err(Error::Sampling {
                    option,
                    range,
                    value: value.to_string(),
                })
            }
        };
        let finite = |x: f32| x.is_finite();
        check(
            finite(self.temperature) && self.temperature >= 0.0,
            "temperature",
            "0 or more",
            self.temperature,
        )?;
        check(
            self.top_p > 0.0 && self.top_p <= 1.0,
            "top-p",
            "above 0 and at most 1",
            self.top_p,
        )?;
        check(
            self.min_p >= 0.0 && self.min_p <= 1.0,
            "min-p",
            "between 0 and 1",
            self.min_p,
        )?;
        check(
            finite(self.repetition_penalty) && self.repetition_penalty > 0.0,
            "repetition penalty",
            "above 0",
            self.repetition_penalty,
        )?;
        check(
            finite(self.presence_penalty),
            "presence penalty",
            "a number",
            self.presence_penalty,
        )?;
        check(
            finite(self.frequency_penalty),
            "frequency penalty",
            "a number",
            self.frequency_penalty,
        )?;
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab_size {
                return Err(Error::UnknownToken { token, vocab_size });
            }
            check(
                finite(bias) || bias == f32::NEG_INFINITY,
                "logit bias",
                "a number or -inf",
                bias,
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_option_is_checked() {
        let spoil: [fn(&mut Sampling); 10] = [
            |s| s.temperature = -0.1,
            |s| s.temperature = f32::NAN,
            |s| s.top_p = 0.0,
            |s| s.top_p = 1.5,
            |s| s.min_p = -1.0,
            |s| s.min_p = f32::NAN,
            |s| s.repetition_penalty = 0.0,
            |s| s.presence_penalty = f32::INFINITY,
            |s| s.frequency_penalty = f32::NAN,
            |s| s.logit_bias = vec![(0, f32::INFINITY)],
        ];
        for change in spoil {
            let mut sampling = Sampling::greedy();
            change(&mut sampling);
            let error = sampling.validate(10).unwrap_err().to_string();
            assert!(
                error.contains("must be") && !error.contains('\n'),
                "{error}"
            );
        }
        let mut sampling = Sampling::greedy();
        sampling.logit_bias = vec![(10, 1.0)];
        assert!(matches!(
            sampling.validate(10),
            Err(Error::UnknownToken {
                token: 10,
                vocab_size: 10
            })
        ));
        sampling.logit_bias = vec![(9, f32::NEG_INFINITY)];
        sampling.validate(10).unwrap();
    }

    #[test]
    fn recommendations_are_taken_over() {
        let defaults = GenerationDefaults {
            temperature: Some(0.6),
            top_k: Some(20),
            repetition_penalty: Some(1.1),
            ..Default::default()
        };
        let sampling = Sampling::recommended(&defaults, 3);
        assert_eq!(sampling.temperature, 0.6);
        assert_eq!(sampling.top_k, Some(20));
        assert_eq!(sampling.top_p, 1.0);
        assert_eq!(sampling.repetition_penalty, 1.1);
        assert_eq!(sampling.seed, 3);
        let silent = Sampling::recommended(&GenerationDefaults::default(), 0);
        assert_eq!(
            (silent.temperature, silent.top_p, silent.top_k),
            (0.7, 0.95, None)
        );
    }
}
