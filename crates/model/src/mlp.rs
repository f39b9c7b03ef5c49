//! What follows a layer's mixer: the gated MLP, down(silu(gate(x)) * up(x)), as in Llama and every
//! family since, or a mixture of such MLPs.

use kozue_checkpoint::{Tensors, description::ModelConfig};
use kozue_kernels::{Cpu, Linear, Scratch, gelu_mul, linear, silu_mul};

use crate::Error;
use crate::experts::Experts;
use crate::layer::projection;

pub(crate) enum FeedForward {
    Mlp(Mlp),
    Experts(Box<Experts>),
}

impl FeedForward {
    /// That of a layer.
    pub(crate) fn load(
        tensors: &impl Tensors,
        config: &ModelConfig,
        layer: usize,
        prefix: &str,
    ) -> Result<Self, Error> {
        Ok(match config.feed_forward(layer) {
            Ok(shape) => {
                let experts = Experts::load(tensors, config, shape, prefix)?;
                Self::Experts(Box::new(experts))
            }
            Err(inner) => Self::Mlp(Mlp::load(tensors, config, prefix, inner)?),
        })
    }

    /// x: rows x hidden size; the same shape comes back.
    pub(crate) fn forward<'c>(&self, cpu: &'c Cpu, x: &[f32], rows: usize) -> Scratch<'c, f32> {
        match self {
            FeedForward::Mlp(mlp) => mlp.forward(cpu, x, rows),
            FeedForward::Experts(experts) => experts.forward(cpu, x, rows),
        }
    }
}

pub(crate) struct Mlp {
    /// GELU in place of SiLU.
    gelu: bool,
    gate_up: Linear,
    down: Linear,
}

impl Mlp {
    /// An MLP that is `inner` wide inside.
    pub(crate) fn load(
        tensors: &impl Tensors,
        config: &ModelConfig,
        prefix: &str,
        inner: usize,
    ) -> Result<Self, Error> {
        let (hidden, bias) = (config.hidden_size, config.mlp_bias);
        Ok(Self {
            gelu: config.gelu,
            gate_up: projection(
                tensors,
                prefix,
                &[("gate_proj", inner), ("up_proj", inner)],
                hidden,
                bias,
            )?,
            down: projection(tensors, prefix, &[("down_proj", hidden)], inner, bias)?,
        })
    }

    /// x: rows x hidden size; the same shape comes back.
    pub(crate) fn forward<'c>(&self, cpu: &'c Cpu, x: &[f32], rows: usize) -> Scratch<'c, f32> {
        let mut gate_up = cpu.scratch(rows * self.gate_up.outputs());
        linear(cpu, &self.gate_up, x, &mut gate_up);
        let mut inner = cpu.scratch(rows * self.down.inputs());
        let gated = if self.gelu { gelu_mul } else { silu_mul };
        gated(cpu, &gate_up, self.down.inputs(), &mut inner);
        let mut out = cpu.scratch(rows * self.down.outputs());
        linear(cpu, &self.down, &inner, &mut out);
        out
    }
}
