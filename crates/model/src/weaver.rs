//! Weaver ("Trees from Marginals", arXiv 2607.06763): a small autoregressive adapter that makes
//! the drafter's independent shortlists agree with each other.
//!
//! ```text
//! prefix    u_0 = proposal_in(norm(target's final hidden state)),  u_i = proposal_in(norm(drafter's row i))
//! node      x   = token_in(norm(embed(token)));  attends to the prefix, its ancestors and itself
//! score     logit_c = drafter_logit_c + <head row c, lm_head_query_in(norm(x))>   for c of the shortlist
//! ```
//!
//! Two generations are published: learned positions with a two-matrix GELU MLP, and rotary
//! positions with SwiGLU.

use kozue_checkpoint::{Drafter, DrafterKind, Tensors, WeaverConfig};
use kozue_kernels::{
    Cpu, Heads, KvCache, KvType, Linear, Rope, Scratch, Visible, add_assign, attention, linear,
    rms_norm, silu_mul,
};

use crate::layer::projection;
use crate::{Error, Model};

/// RMS norms of Weaver use this epsilon; it is not in its configuration.
const EPS: f32 = 1e-6;

/// The weights of a Weaver.
pub struct Weaver {
    config: WeaverConfig,
    embed_norm: BiasedNorm,
    hidden_norm: BiasedNorm,
    out_norm: BiasedNorm,
    token_in: Linear,
    proposal_in: Linear,
    query: Linear,
    blocks: Vec<Block>,
    positions: Positions,
    q_at: Heads,
    k_at: Heads,
    v_at: Heads,
}

/// x / rms(x) * weight + bias.
struct BiasedNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
}

enum Positions {
    /// One row for each depth, added to proposals and tokens.
    Learned(Vec<f32>),
    Rotary(Rope),
}

struct Block {
    norm_attn: BiasedNorm,
    qkv: Linear,
    output: Linear,
    norm_mlp: BiasedNorm,
    up: Linear,
    down: Linear,
}

/// A node to be expanded.
#[derive(Clone, Debug)]
pub struct WeaveNode {
    /// Its token.
    pub token: u32,
    /// Nodes that lie on its path, root first, by the order of their expansion: expanded before, or
    /// earlier in the same call.
    pub ancestors: Vec<u32>,
}

/// What one round of drafting remembers.
pub struct Weave {
    prefix: usize,
    expanded: usize,
    caches: Vec<KvCache>,
}

impl Weaver {
    /// Reads the tensors.
    ///
    /// # Errors
    /// If a tensor is missing, extra or misshapen, or Weaver was made for another target.
    pub fn load(drafter: &Drafter, target: &Model) -> Result<Self, Error> {
        let mismatch = |reason: String| Error::Drafter {
            path: drafter.path().to_path_buf(),
            reason,
        };
        let DrafterKind::Weaver(config) = drafter.kind().clone() else {
            return Err(mismatch("is no Weaver".to_string()));
        };
        let (width, hidden) = (config.rank, config.hidden_size);
        if hidden != target.config().hidden_size {
            return Err(mismatch(format!(
                "made for a target of width {hidden}, this one has {}",
                target.config().hidden_size
            )));
        }
        if config.candidates > target.config().vocab_size {
            return Err(mismatch(format!(
                "chooses among {} tokens, more than this target's vocabulary of {}",
                config.candidates,
                target.config().vocab_size
            )));
        }
        let norm = |name: &str, len: usize| -> Result<BiasedNorm, Error> {
            Ok(BiasedNorm {
                weight: drafter.vector(&format!("{name}.weight"), len)?,
                bias: drafter.vector(&format!("{name}.bias"), len)?,
            })
        };
        let blocks = (0..config.layers)
            .map(|index| {
                let prefix = format!("blocks.{index}");
                let (up, down): (&[(&str, usize)], _) = if config.gated {
                    (
                        &[("gate_up_proj", 2 * config.intermediate_size)],
                        "down_proj",
                    )
                } else {
                    (&[("fc1", config.intermediate_size)], "fc2")
                };
                let qkv: &[(&str, usize)] = if config.fused {
                    &[("qkv_proj", 3 * width)]
                } else {
                    &[("q_proj", width), ("k_proj", width), ("v_proj", width)]
                };
                Ok(Block {
                    norm_attn: norm(&format!("{prefix}.norm_attn"), width)?,
                    qkv: projection(drafter, &prefix, qkv, width, false)?,
                    output: projection(drafter, &prefix, &[("o_proj", width)], width, false)?,
                    norm_mlp: norm(&format!("{prefix}.norm_mlp"), width)?,
                    up: projection(drafter, &prefix, up, width, true)?,
                    down: projection(
                        drafter,
                        &prefix,
                        &[(down, width)],
                        config.intermediate_size,
                        true,
                    )?,
                })
            })
            .collect::<Result<_, Error>>()?;
        let dim = width / config.heads;
        let at = |part: usize| Heads {
            row: 3 * width,
            offset: part * width,
            pitch: dim,
            count: config.heads,
            dim,
        };
        let loaded = Self {
            embed_norm: norm("embed_norm", hidden)?,
            hidden_norm: norm("output_norm", hidden)?,
            out_norm: norm("out_norm", width)?,
            token_in: projection(drafter, "", &[("token_in", width)], hidden, true)?,
            proposal_in: projection(drafter, "", &[("proposal_in", width)], hidden, true)?,
            query: projection(drafter, "", &[("lm_head_query_in", hidden)], width, false)?,
            blocks,
            positions: match config.rope_base {
                Some(base) => Positions::Rotary(Rope::new(
                    (0..dim / 2)
                        .map(|i| base.powf(-2.0 * i as f64 / dim as f64))
                        .collect(),
                    config.depth + 1,
                )),
                None => Positions::Learned(drafter.vector("pos_emb", config.depth * width)?),
            },
            q_at: at(0),
            k_at: at(1),
            v_at: at(2),
            config,
        };
        drafter.finish()?;
        Ok(loaded)
    }

    /// Deepest edge that it scores.
    pub fn depth(&self) -> usize {
        self.config.depth
    }

    /// Tokens of each depth that it chooses among.
    pub fn candidates(&self) -> usize {
        self.config.candidates
    }

    /// Starts a round: `hidden` is the target's final hidden state (after the output norm) of the
    /// row that chose the newest token, `proposals` the drafter's rows after the first, rows x
    /// hidden size; both unscaled as the head reads them.
    pub fn begin(&self, cpu: &Cpu, hidden: &[f32], proposals: &[f32]) -> Weave {
        let cache = || KvCache::new(self.k_at.count, self.k_at.dim, KvType::F32);
        let mut weave = Weave {
            prefix: 0,
            expanded: 0,
            caches: self.blocks.iter().map(|_| cache()).collect(),
        };
        self.restart(cpu, &mut weave, hidden, proposals);
        weave
    }

    /// As [`Weaver::begin`], in the memory of an earlier round.
    pub fn restart(&self, cpu: &Cpu, weave: &mut Weave, hidden: &[f32], proposals: &[f32]) {
        let width = self.config.rank;
        let depth = (proposals.len() / hidden.len()).min(self.config.depth);
        let rows = depth + 1;
        let mut states = cpu.scratch(rows * hidden.len());
        states[..hidden.len()].copy_from_slice(hidden);
        states[hidden.len()..].copy_from_slice(&proposals[..depth * hidden.len()]);
        let normed = self.hidden_norm.apply(cpu, &states);
        let mut x = cpu.scratch(rows * width);
        linear(cpu, &self.proposal_in, &normed, &mut x);
        if let Positions::Learned(table) = &self.positions {
            // The target's own row comes before the first position.
            for (x, position) in x[width..].iter_mut().zip(table) {
                *x += position;
            }
        }
        weave.prefix = rows;
        weave.expanded = 0;
        let positions: Vec<u32> = (0..rows as u32).collect();
        let visible: Vec<Visible<'_>> = (1..=rows)
            .map(|prefix| Visible {
                first: 0,
                prefix,
                tail: &[],
            })
            .collect();
        let last = self.blocks.len() - 1;
        for (index, cache) in weave.caches.iter_mut().enumerate() {
            let block = &self.blocks[index];
            let qkv = self.read(cpu, block, cache, 0, &x, &positions);
            // Of the last block only keys and values are ever looked at.
            if index < last {
                self.finish(cpu, block, cache, &qkv, &visible, &mut x);
            }
        }
    }

    /// Reads `nodes` and returns for each the query whose product with a row of the target's head
    /// is added to the drafter's logit of that token, nodes x hidden size. Slots of later
    /// ancestors count on from the nodes expanded before.
    ///
    /// # Errors
    /// If a token is outside the vocabulary.
    pub fn expand(
        &self,
        cpu: &Cpu,
        target: &Model,
        weave: &mut Weave,
        nodes: &[WeaveNode],
    ) -> Result<Vec<f32>, Error> {
        let (width, hidden) = (self.config.rank, self.config.hidden_size);
        let mut embedded = cpu.scratch(nodes.len() * hidden);
        for (node, row) in nodes.iter().zip(embedded.chunks_exact_mut(hidden)) {
            target.embed(node.token, row)?;
        }
        let normed = self.embed_norm.apply(cpu, &embedded);
        let mut x = cpu.scratch(nodes.len() * width);
        linear(cpu, &self.token_in, &normed, &mut x);
        if let Positions::Learned(table) = &self.positions {
            for (node, x) in nodes.iter().zip(x.chunks_exact_mut(width)) {
                let depth = node.ancestors.len().min(self.config.depth - 1);
                for (x, position) in x.iter_mut().zip(&table[depth * width..]) {
                    *x += position;
                }
            }
        }
        let first = weave.prefix + weave.expanded;
        let tails: Vec<Vec<u32>> = nodes
            .iter()
            .enumerate()
            .map(|(row, node)| {
                let ancestors = node
                    .ancestors
                    .iter()
                    .map(|&slot| weave.prefix as u32 + slot);
                ancestors.chain([(first + row) as u32]).collect()
            })
            .collect();
        let visible: Vec<Visible<'_>> = tails
            .iter()
            .map(|tail| Visible {
                first: 0,
                prefix: weave.prefix,
                tail,
            })
            .collect();
        let positions: Vec<u32> = nodes
            .iter()
            .map(|node| node.ancestors.len().min(self.config.depth - 1) as u32 + 1)
            .collect();
        for (block, cache) in self.blocks.iter().zip(&mut weave.caches) {
            let qkv = self.read(cpu, block, cache, first, &x, &positions);
            self.finish(cpu, block, cache, &qkv, &visible, &mut x);
        }
        weave.expanded += nodes.len();
        let normed = self.out_norm.apply(cpu, &x);
        let mut queries = vec![0.0; nodes.len() * hidden];
        linear(cpu, &self.query, &normed, &mut queries);
        Ok(queries)
    }

    /// Queries, keys and values of rows; keys and values go to the slots from `first` on.
    fn read<'c>(
        &self,
        cpu: &'c Cpu,
        block: &Block,
        cache: &mut KvCache,
        first: usize,
        x: &[f32],
        positions: &[u32],
    ) -> Scratch<'c, f32> {
        let normed = block.norm_attn.apply(cpu, x);
        let mut qkv = cpu.scratch(positions.len() * block.qkv.outputs());
        linear(cpu, &block.qkv, &normed, &mut qkv);
        if let Positions::Rotary(rope) = &self.positions {
            rope.apply(cpu, &mut qkv, self.q_at, positions);
            rope.apply(cpu, &mut qkv, self.k_at, positions);
        }
        cache.write_rows(cpu, first, (&qkv, self.k_at), (&qkv, self.v_at));
        qkv
    }

    /// Attention and MLP of a block, added to the rows `x`.
    fn finish(
        &self,
        cpu: &Cpu,
        block: &Block,
        cache: &KvCache,
        qkv: &[f32],
        visible: &[Visible<'_>],
        x: &mut [f32],
    ) {
        let rows = visible.len();
        let scale = (self.k_at.dim as f32).powf(-0.5);
        let mut mixed = cpu.scratch(x.len());
        attention(cpu, cache, (qkv, self.q_at), visible, scale, &mut mixed);
        let mut out = cpu.scratch(x.len());
        linear(cpu, &block.output, &mixed, &mut out);
        add_assign(cpu, x, &out);
        let normed = block.norm_mlp.apply(cpu, x);
        let mut up = cpu.scratch(rows * block.up.outputs());
        linear(cpu, &block.up, &normed, &mut up);
        if self.config.gated {
            let mut inner = cpu.scratch(rows * block.down.inputs());
            silu_mul(cpu, &up, block.down.inputs(), &mut inner);
            linear(cpu, &block.down, &inner, &mut out);
        } else {
            up.iter_mut().for_each(|x| *x = gelu(*x));
            linear(cpu, &block.down, &up, &mut out);
        }
        add_assign(cpu, x, &out);
    }
}

impl BiasedNorm {
    fn apply<'c>(&self, cpu: &'c Cpu, x: &[f32]) -> Scratch<'c, f32> {
        let mut out = cpu.scratch(x.len());
        rms_norm(cpu, x, &self.weight, EPS, &mut out);
        for row in out.chunks_exact_mut(self.bias.len()) {
            row.iter_mut()
                .zip(&self.bias)
                .for_each(|(x, bias)| *x += bias);
        }
        out
    }
}

/// The tanh form, x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). A draft may differ in a bit
/// between platforms; what is accepted does not depend on it.
fn gelu(x: f32) -> f32 {
    const ROOT: f32 = 0.797_884_6;
    0.5 * x * (1.0 + (ROOT * (x + 0.044_715 * x * x * x)).tanh())
}
