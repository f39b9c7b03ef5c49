//! `kozue bench`: what a model costs on this machine, in passes ([`passes`]) or in whole answers
//! by what drafts them ([`drafts`]).

mod drafts;
mod passes;
pub mod prompts;

use crate::cli::BenchArgs;
use crate::default_model::model_path;
use crate::failure::Failure;
use kozue_engine::Loaded;

/// Runs the command.
pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    let path = model_path(args.model.as_deref())?;
    let mut loaded = Loaded::open(&path, args.machine.cpu(), args.machine.kv.into())?;
    if !args.drafts && (args.draft.is_one_way() || args.draft.draft_model.is_some()) {
        return Err(Failure::Usage(
            "--draft and its like are measured with --drafts: add it".into(),
        ));
    }
    if args.drafts {
        drafts::run(args, &path, &mut loaded)
    } else {
        passes::run(args, &loaded)
    }
}

/// The middle value; NaN where there is none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }
}
