//! The gated MLP: down(silu(gate(x)) * up(x)), as in Llama and every family since.

use kozue_checkpoint::{Tensors, description::ModelConfig};
use kozue_kernels::{Cpu, Linear, Scratch, linear, silu_mul};

use crate::Error;
use crate::model::projection;

pub(crate) struct Mlp {
    gate_up: Linear,
    down: Linear,
}

impl Mlp {
    pub(crate) fn load(
        tensors: &impl Tensors,
        config: &ModelConfig,
        prefix: &str,
    ) -> Result<Self, Error> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let bias = config.mlp_bias;
        Ok(Self {
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
        silu_mul(cpu, &gate_up, self.down.inputs(), &mut inner);
        let mut out = cpu.scratch(rows * self.down.outputs());
        linear(cpu, &self.down, &inner, &mut out);
        out
    }
}
