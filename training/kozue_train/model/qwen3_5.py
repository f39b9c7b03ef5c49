"""The target for training: transformers' Qwen3_5ForCausalLM, same names, same function, faster.

Parameters are float32 and keep transformers' names, so `state_dict()` is a checkpoint. The forward
pass is made of a few pure functions of tensors, each small enough for torch.compile, around the
chunked Gated DeltaNet of `gated_delta`. Matrix products run in `dtype` (bfloat16 in training).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kozue_train.model.config import TargetConfig
from kozue_train.model.gated_delta import CHUNK, chunk_gated_delta


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Zero-centred RMSNorm: x / rms(x) * (1 + weight), in float32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).to(x.dtype)


class Project:
    """How an input meets a packed matrix; quantisation-aware training swaps in the engine's rounding."""

    fn: Callable[[Tensor, Tensor], Tensor] = staticmethod(lambda h, w: h @ w.to(h.dtype).t())


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last axis, float32."""
    y = x.float()
    return y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6)


def causal_conv_silu(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise causal convolution over time, then SiLU. x [B, T, C], weight [C, 1, K]."""
    taps = weight.shape[-1]
    w = weight.float()
    xf = x.float()
    acc = xf * w[:, 0, taps - 1]
    for back in range(1, taps):
        shifted = F.pad(xf, (0, 0, back, 0))[:, : x.shape[1]]
        acc = acc + shifted * w[:, 0, taps - 1 - back]
    return F.silu(acc).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the first cos.shape[-1] of the last axis (rotate-half). x [B, T, H, D], cos [T, R]."""
    r = cos.shape[-1]
    head, rest = x[..., :r], x[..., r:]
    half = torch.cat((-head[..., r // 2 :], head[..., : r // 2]), -1)
    turned = head.float() * cos[:, None] + half.float() * sin[:, None]
    return torch.cat((turned.to(x.dtype), rest), -1)


def rope_table(length: int, dim: int, theta: float, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos and sin [length, dim] in float32."""
    inv = 1.0 / (theta ** (torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim))
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inv
    full = torch.cat((angle, angle), -1)
    return full.cos(), full.sin()


def linear_inputs(
    x: Tensor, norm: Tensor, qkv_w: Tensor, z_w: Tensor, b_w: Tensor, a_w: Tensor, conv_w: Tensor,
    a_log: Tensor, dt_bias: Tensor, heads_k: int, heads_v: int, dim_k: int, dim_v: int, chunk: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Everything before the delta rule: q, k, v [B,H,N,C,D], g, beta [B,H,N,C], z [B,T,Hv,Dv]."""
    bsz, length, _ = x.shape
    h = rms_norm(x, norm, eps)
    dt = h.dtype
    mixed = causal_conv_silu(Project.fn(h, qkv_w), conv_w)
    z = (Project.fn(h, z_w)).view(bsz, length, heads_v, dim_v)
    ba = h @ torch.cat((b_w, a_w), 0).to(dt).t()
    b, a = ba.float().split(heads_v, -1)
    beta = b.sigmoid()
    g = -a_log.float().exp() * F.softplus(a + dt_bias.float())
    q, k, v = mixed.split((heads_k * dim_k, heads_k * dim_k, heads_v * dim_v), -1)
    n = length // chunk
    rep = heads_v // heads_k

    def lay(t: Tensor, dim: int) -> Tensor:
        return t.reshape(bsz, n, chunk, -1, dim).permute(0, 3, 1, 2, 4)

    qn = lay((l2_norm(q.view(bsz, length, heads_k, dim_k)) * dim_k**-0.5).to(dt), dim_k)
    kn = lay(l2_norm(k.view(bsz, length, heads_k, dim_k)).to(dt), dim_k)
    if rep > 1:
        qn, kn = qn.repeat_interleave(rep, 1), kn.repeat_interleave(rep, 1)
    gl = g.view(bsz, n, chunk, heads_v).permute(0, 3, 1, 2).contiguous()
    bl = beta.view(bsz, n, chunk, heads_v).permute(0, 3, 1, 2).contiguous()
    return qn.contiguous(), kn.contiguous(), lay(v, dim_v).contiguous(), gl, bl, z


def mlp(x: Tensor, norm: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor, eps: float) -> Tensor:
    """x + down(silu(gate h) * up h) with h = norm(x)."""
    h = rms_norm(x, norm, eps)
    return x + Project.fn(F.silu(Project.fn(h, gate_w)) * Project.fn(h, up_w), down_w)


def linear_outputs(
    x: Tensor, o: Tensor, z: Tensor, onorm: Tensor, out_w: Tensor,
    norm: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor, eps: float,
) -> Tensor:
    """Gated norm, output projection and the MLP of a linear layer. o [B,H,N,C,D]."""
    bsz, heads, n, c, dim = o.shape
    y = o.permute(0, 2, 3, 1, 4).float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = (y.to(x.dtype) * onorm.to(x.dtype)).float().reshape(bsz, n * c, heads, dim) * F.silu(z.float())
    x = x + Project.fn(y.to(x.dtype).reshape(bsz, n * c, heads * dim), out_w)
    return mlp(x, norm, gate_w, up_w, down_w, eps)


def attention_layer(
    x: Tensor, norm: Tensor, q_w: Tensor, k_w: Tensor, v_w: Tensor, o_w: Tensor, qn: Tensor, kn: Tensor,
    cos: Tensor, sin: Tensor, heads: int, kv_heads: int, dim: int,
    norm2: Tensor, gate_w: Tensor, up_w: Tensor, down_w: Tensor, eps: float,
) -> Tensor:
    """A whole gated attention layer, MLP included."""
    bsz, length, _ = x.shape
    h = rms_norm(x, norm, eps)
    q, gate = (Project.fn(h, q_w)).view(bsz, length, heads, 2 * dim).chunk(2, -1)
    k = (Project.fn(h, k_w)).view(bsz, length, kv_heads, dim)
    v = (Project.fn(h, v_w)).view(bsz, length, kv_heads, dim)
    q = rotate(rms_norm(q, qn, eps), cos, sin).transpose(1, 2)
    k = rotate(rms_norm(k, kn, eps), cos, sin).transpose(1, 2)
    rep = heads // kv_heads
    k = k.repeat_interleave(rep, 1)
    v = v.transpose(1, 2).repeat_interleave(rep, 1)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    o = o.transpose(1, 2) * torch.sigmoid(gate)
    x = x + Project.fn(o.reshape(bsz, length, heads * dim), o_w)
    return mlp(x, norm2, gate_w, up_w, down_w, eps)


class _Node(nn.Module):
    """A name space of parameters (transformers' module tree without its code)."""

    def add(self, name: str, shape: tuple[int, ...]) -> None:
        """Adds `name` (dots allowed) as a float32 parameter."""
        head, _, rest = name.partition(".")
        if not rest:
            self.register_parameter(head, nn.Parameter(torch.empty(shape)))
            return
        if head not in self._modules:
            self.add_module(head, _Node())
        child = self._modules[head]
        assert isinstance(child, _Node)
        child.add(rest, shape)


def parameter_shapes(c: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint."""
    d, f = c.hidden_size, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, d)}
    for i, kind in enumerate(c.layer_types):
        p = f"model.layers.{i}."
        if kind == "linear_attention":
            shapes |= {
                p + "linear_attn.in_proj_qkv.weight": (c.conv_dim, d),
                p + "linear_attn.in_proj_z.weight": (c.value_dim, d),
                p + "linear_attn.in_proj_b.weight": (c.linear_num_value_heads, d),
                p + "linear_attn.in_proj_a.weight": (c.linear_num_value_heads, d),
                p + "linear_attn.conv1d.weight": (c.conv_dim, 1, c.linear_conv_kernel_dim),
                p + "linear_attn.A_log": (c.linear_num_value_heads,),
                p + "linear_attn.dt_bias": (c.linear_num_value_heads,),
                p + "linear_attn.norm.weight": (c.linear_value_head_dim,),
                p + "linear_attn.out_proj.weight": (d, c.value_dim),
            }
        else:
            hd = c.head_dim
            shapes |= {
                p + "self_attn.q_proj.weight": (2 * c.num_attention_heads * hd, d),
                p + "self_attn.k_proj.weight": (c.num_key_value_heads * hd, d),
                p + "self_attn.v_proj.weight": (c.num_key_value_heads * hd, d),
                p + "self_attn.o_proj.weight": (d, c.num_attention_heads * hd),
                p + "self_attn.q_norm.weight": (hd,),
                p + "self_attn.k_norm.weight": (hd,),
            }
        shapes |= {
            p + "input_layernorm.weight": (d,),
            p + "post_attention_layernorm.weight": (d,),
            p + "mlp.gate_proj.weight": (f, d),
            p + "mlp.up_proj.weight": (f, d),
            p + "mlp.down_proj.weight": (d, f),
        }
    shapes["model.norm.weight"] = (d,)
    return shapes


class Pieces:
    """The pure functions of the forward pass; `compile_pieces` replaces them by compiled ones."""

    linear_inputs: Callable[..., tuple[Tensor, ...]] = staticmethod(linear_inputs)
    linear_outputs: Callable[..., Tensor] = staticmethod(linear_outputs)
    attention_layer: Callable[..., Tensor] = staticmethod(attention_layer)
    rms_norm: Callable[..., Tensor] = staticmethod(rms_norm)


def compile_pieces() -> None:
    """Compiles each piece once (the layers share the compiled code: same shapes)."""
    for name, fn in (
        ("linear_inputs", linear_inputs), ("linear_outputs", linear_outputs),
        ("attention_layer", attention_layer), ("rms_norm", rms_norm),
    ):
        setattr(Pieces, name, staticmethod(torch.compile(fn, dynamic=False)))


class Target(_Node):
    """The model. `forward` returns final-norm hidden states; logits are hidden @ embed^T."""

    def __init__(self, config: TargetConfig, dtype: torch.dtype = torch.float32, chunk: int = CHUNK) -> None:
        super().__init__()
        self.config, self.dtype, self.chunk = config, dtype, chunk
        for name, shape in parameter_shapes(config).items():
            self.add(name, shape)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Normal(0, 0.02) matrices, residual outputs scaled by 1/sqrt(2L), slow decays."""
        gen = torch.Generator().manual_seed(seed)
        depth = 1.0 / math.sqrt(2 * self.config.num_hidden_layers)
        for name, p in self.named_parameters():
            if name.endswith("A_log"):
                p.copy_(torch.empty(p.shape).uniform_(1.0, 16.0, generator=gen).log())
            elif name.endswith("dt_bias"):
                dt = torch.exp(torch.rand(p.shape, generator=gen) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif name.endswith("linear_attn.norm.weight"):
                p.fill_(1.0)
            elif p.ndim == 1:
                p.zero_()
            elif name.endswith("conv1d.weight"):
                p.copy_(torch.empty(p.shape).uniform_(-0.5, 0.5, generator=gen))
            else:
                p.copy_(torch.empty(p.shape).normal_(0.0, 0.02, generator=gen))
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    p.mul_(depth)

    def tensor(self, name: str) -> Tensor:
        """A parameter, or what was put in its place (see `quantise.Rounded`)."""
        module, _, last = name.rpartition(".")
        found = getattr(self.get_submodule(module), last)
        assert isinstance(found, Tensor)
        return found

    def embed(self, ids: Tensor) -> Tensor:
        weight = self.tensor("model.embed_tokens.weight")
        return F.embedding(ids, weight).to(self.dtype)

    def forward(self, ids: Tensor, taps: list[int] | None = None) -> tuple[Tensor, list[Tensor]]:
        """ids [B, T] -> hidden [B, T, D] after the final norm, and the residual after each tapped layer."""
        c = self.config
        length = ids.shape[1]
        pad = -length % self.chunk
        if pad:
            ids = F.pad(ids, (0, pad))
        cos, sin = rope_table(ids.shape[1], c.rotary_dim, c.rope_theta, ids.device)
        x = self.embed(ids)
        tapped: list[Tensor] = []
        for i, kind in enumerate(c.layer_types):
            p = dict(self.get_submodule(f"model.layers.{i}").named_parameters())
            ffn = (
                p["post_attention_layernorm.weight"], p["mlp.gate_proj.weight"],
                p["mlp.up_proj.weight"], p["mlp.down_proj.weight"], c.rms_norm_eps,
            )
            if kind == "linear_attention":
                a = "linear_attn."
                q, k, v, g, beta, z = Pieces.linear_inputs(
                    x, p["input_layernorm.weight"], p[a + "in_proj_qkv.weight"], p[a + "in_proj_z.weight"],
                    p[a + "in_proj_b.weight"], p[a + "in_proj_a.weight"], p[a + "conv1d.weight"],
                    p[a + "A_log"], p[a + "dt_bias"], c.linear_num_key_heads, c.linear_num_value_heads,
                    c.linear_key_head_dim, c.linear_value_head_dim, self.chunk, c.rms_norm_eps,
                )
                o = chunk_gated_delta(q, k, v, g, beta)
                x = Pieces.linear_outputs(x, o, z, p[a + "norm.weight"], p[a + "out_proj.weight"], *ffn)
            else:
                a = "self_attn."
                x = Pieces.attention_layer(
                    x, p["input_layernorm.weight"], p[a + "q_proj.weight"], p[a + "k_proj.weight"],
                    p[a + "v_proj.weight"], p[a + "o_proj.weight"], p[a + "q_norm.weight"], p[a + "k_norm.weight"],
                    cos, sin, c.num_attention_heads, c.num_key_value_heads, c.head_dim, *ffn,
                )
            if taps is not None and i in taps:
                tapped.append(x[:, :length])
        x = Pieces.rms_norm(x, self.tensor("model.norm.weight"), c.rms_norm_eps)
        return x[:, :length], tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., D] -> logits [..., V] in hidden's dtype (tied head)."""
        return hidden @ self.tensor("model.embed_tokens.weight").to(hidden.dtype).t()
