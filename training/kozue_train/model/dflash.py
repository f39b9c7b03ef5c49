"""The DFlash drafter (arXiv 2602.06036) in z-lab's checkpoint format.

One forward pass turns [last token, MASK x 15] into 15 proposals. Every layer attends to keys and
values made from the target's hidden states (`fc` over the tapped layers, then `hidden_norm`) and to
its own block, without a causal mask. Embedding and head are the target's and not part of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from kozue_train.packed import load_weights


def default_taps(target_layers: int, count: int) -> list[int]:
    """z-lab's choice: evenly from the second to the third-last layer."""
    if count == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count)]


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes; `hidden_size` and `vocab_size` are the target's."""

    hidden_size: int
    vocab_size: int
    num_target_layers: int
    mask_token_id: int
    target_layer_ids: list[int] = field(default_factory=list)
    intermediate_size: int = 1024
    num_hidden_layers: int = 3
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 4096

    def to_hf(self) -> dict[str, Any]:
        """config.json as z-lab's checkpoints have it."""
        own = asdict(self)
        mask, taps = own.pop("mask_token_id"), own.pop("target_layer_ids")
        return {
            "architectures": ["DFlashDraftModel"], "model_type": "qwen3", **own, "hidden_act": "silu", "attention_bias": False,
            "attention_dropout": 0.0, "rope_scaling": None, "tie_word_embeddings": False, "dtype": "bfloat16",
            "layer_types": ["full_attention"] * self.num_hidden_layers, "sliding_window": None, "use_sliding_window": False,
            "is_causal": False, "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
        }

    @staticmethod
    def from_hf(path: Path) -> DFlashConfig:
        raw = json.loads(Path(path).read_text())
        inner = raw["dflash_config"]
        names = set(DFlashConfig.__dataclass_fields__)
        return DFlashConfig(**{k: v for k, v in raw.items() if k in names}, mask_token_id=inner["mask_token_id"], target_layer_ids=inner["target_layer_ids"])


class RMSNorm(nn.Module):
    """x / rms(x) * weight, float32 inside."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


def rotary(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate-half RoPE over the whole head. x [B, H, N, D], positions [B, N]."""
    d = x.shape[-1]
    inv = 1.0 / (theta ** (torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d))
    angle = positions[:, None, :, None].float() * inv
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)
    xf = x.float()
    half = torch.cat((-xf[..., d // 2 :], xf[..., : d // 2]), -1)
    return (xf * cos + half * sin).to(x.dtype)


class Product:
    """How an input meets a matrix of the drafter or the Weaver; see `quantise`."""

    fn: Callable[[Tensor, Tensor], Tensor] = staticmethod(lambda x, w: x @ w.to(x.dtype).t())


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    """The layer in x's dtype (parameters stay float32)."""
    y = Product.fn(x, layer.weight)
    return y if layer.bias is None else y + layer.bias.to(x.dtype)


class Attention(nn.Module):
    """Attention whose keys and values come from the target's features and from the block."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.c = c
        h, kv, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, h * d, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, kv * d, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, kv * d, bias=False)
        self.o_proj = nn.Linear(h * d, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(d, c.rms_norm_eps), RMSNorm(d, c.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        c = self.c
        b, n, _ = x.shape
        both = torch.cat((context, x), 1)
        where = torch.cat((torch.arange(context.shape[1], device=x.device).expand(b, -1), positions), 1)
        q = self.q_norm(linear(x, self.q_proj).view(b, n, -1, c.head_dim)).transpose(1, 2)
        k = self.k_norm(linear(both, self.k_proj).view(b, both.shape[1], -1, c.head_dim)).transpose(1, 2)
        v = linear(both, self.v_proj).view(b, both.shape[1], -1, c.head_dim).transpose(1, 2)
        q, k = rotary(q, positions, c.rope_theta), rotary(k, where, c.rope_theta)
        rep = c.num_attention_heads // c.num_key_value_heads
        o = F.scaled_dot_product_attention(q, k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1), attn_mask=mask)
        return linear(o.transpose(1, 2).reshape(b, n, -1), self.o_proj)


class MLP(nn.Module):
    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class Layer(nn.Module):
    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, positions, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlash(nn.Module):
    """`forward` gives the drafter's final hidden states of many blocks at once."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def initialise(self, seed: int) -> None:
        """Normal(0, 0.02), residual outputs scaled by depth."""
        gen = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    p.copy_(torch.empty(p.shape).normal_(0.0, 0.02, generator=gen))
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        p.div_(math.sqrt(2 * self.config.num_hidden_layers))

    def forward(self, taps: Tensor, tokens: Tensor, anchors: Tensor, embedding: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, A, block, D].

        taps [B, T, n * D]: the target's residual after each tapped layer; tokens [B, A]: the clean
        first token of each block; anchors [B, A]: its position (features before it are visible);
        embedding [V, D]: the target's.
        """
        c = self.config
        b, a = anchors.shape
        w, t = c.block_size, taps.shape[1]
        context = self.hidden_norm(linear(taps, self.fc))
        ids = torch.full((b, a, w), c.mask_token_id, device=taps.device)
        ids[:, :, 0] = tokens
        x = F.embedding(ids.view(b, a * w), embedding).to(taps.dtype)
        positions = (anchors[:, :, None] + torch.arange(w, device=taps.device)).view(b, a * w)
        start = anchors.repeat_interleave(w, 1)
        seen = torch.arange(t, device=taps.device)[None, None] < start[:, :, None]
        block = torch.arange(a * w, device=taps.device) // w
        own = (block[:, None] == block[None, :]).expand(b, -1, -1)
        mask = torch.cat((seen, own), -1).unsqueeze(1)
        for layer in self.layers:
            x = layer(x, context, positions, mask)
        out: Tensor = self.norm(x).view(b, a, w, -1)
        return out


def save_dflash(model: DFlash, folder: Path) -> None:
    """config.json and model.safetensors (bfloat16) that z-lab's loaders read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n")
    save_file({n: p.detach().to(torch.bfloat16).cpu().contiguous() for n, p in model.named_parameters()}, folder / "model.safetensors", metadata={"format": "pt"})


def load_dflash(folder: Path) -> DFlash:
    """Inverse of `save_dflash`, float32; packed folders too."""
    model = DFlash(DFlashConfig.from_hf(Path(folder) / "config.json"))
    model.load_state_dict({k: v.float() for k, v in load_weights(folder).items()})
    return model
