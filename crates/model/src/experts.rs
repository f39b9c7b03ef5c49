//! A mixture of experts (Shazeer et al., arXiv 1701.06538), as Qwen3-MoE and Qwen3.5-MoE have it:
//!
//! ```text
//! p    = softmax(gate(x));  T = the experts with the largest p
//! y    = sum of p_e mlp_e(x) over e in T, by index     p divided by its sum over T if normalised
//! y   += sigmoid(shared_expert_gate(x)) shared_expert(x)          where the family has one
//! ```
//!
//! Rows that take the same expert share its products, and only the experts that some row takes are
//! read. A row's sum runs over its own experts in order of their indices, so it has the same bits
//! whatever rows are beside it.

use kozue_checkpoint::Tensors;
use kozue_checkpoint::description::{ExpertsConfig, ModelConfig};
use kozue_kernels::{Choice, Cpu, Linear, Scratch, add_weighted, linear, route, sigmoid};

use crate::Error;
use crate::layer::projection;
use crate::mlp::Mlp;

pub(crate) struct Experts {
    shape: ExpertsConfig,
    router: Linear,
    experts: Vec<Mlp>,
    shared: Option<Shared>,
}

/// The expert that every row takes, and its gate of one output.
struct Shared {
    expert: Mlp,
    gate: Linear,
}

impl Experts {
    pub(crate) fn load(
        tensors: &impl Tensors,
        config: &ModelConfig,
        shape: &ExpertsConfig,
        prefix: &str,
    ) -> Result<Self, Error> {
        let hidden = config.hidden_size;
        let gate = |name: &str, outputs: usize| {
            projection(tensors, prefix, &[(name, outputs)], hidden, false)
        };
        let expert = |index: usize| {
            let prefix = format!("{prefix}.experts.{index}");
            Mlp::load(tensors, config, &prefix, config.intermediate_size)
        };
        let shared = match shape.shared {
            None => None,
            Some(inner) => Some(Shared {
                expert: Mlp::load(tensors, config, &format!("{prefix}.shared_expert"), inner)?,
                gate: gate("shared_expert_gate", 1)?,
            }),
        };
        Ok(Self {
            shape: shape.clone(),
            router: gate("gate", shape.count)?,
            experts: (0..shape.count).map(expert).collect::<Result<_, _>>()?,
            shared,
        })
    }

    /// x: rows x hidden size; the same shape comes back.
    pub(crate) fn forward<'c>(&self, cpu: &'c Cpu, x: &[f32], rows: usize) -> Scratch<'c, f32> {
        let (hidden, shape) = (self.router.inputs(), &self.shape);
        let mut logits = cpu.scratch(rows * shape.count);
        linear(cpu, &self.router, x, &mut logits);
        let choices = route(cpu, &logits, shape.count, shape.chosen, shape.normalised);
        let mut out = cpu.scratch(rows * hidden);
        out.fill(0.0);
        let mut taken = cpu.scratch(rows * hidden);
        for group in choices.chunk_by(|a, b| a.expert == b.expert) {
            let taken = &mut taken[..group.len() * hidden];
            for (choice, to) in group.iter().zip(taken.chunks_exact_mut(hidden)) {
                to.copy_from_slice(&x[choice.row * hidden..][..hidden]);
            }
            let made = self.experts[group[0].expert].forward(cpu, taken, group.len());
            let to = group
                .iter()
                .map(|&Choice { row, weight, .. }| (row, weight));
            add_weighted(cpu, &mut out, hidden, &made, to);
        }
        if let Some(shared) = &self.shared {
            let mut gates = cpu.scratch(rows);
            linear(cpu, &shared.gate, x, &mut gates);
            sigmoid(cpu, &mut gates);
            let made = shared.expert.forward(cpu, x, rows);
            let to = gates.iter().copied().enumerate();
            add_weighted(cpu, &mut out, hidden, &made, to);
        }
        out
    }
}
