"""The Weaver adapter: couples a drafter's independent proposals along a path (arXiv 2607.06763).

Prefix rows: the target's final hidden state at the last processed token, then the drafter's hidden
states of the block; causal among themselves, positions 0..15. A node at depth d holds the token
chosen there, sits at position d + 1, sees the whole prefix, its ancestors and itself, and adds
<head row of c, query> to the drafter's logit of every candidate c of depth d + 1.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from kozue_train.model.dflash import linear, rotary
from kozue_train.packed import load_weights


@dataclass(frozen=True)
class WeaverConfig:
    """Names as in the reference checkpoints; K is the largest depth (edges)."""

    d_model: int
    d_embed: int
    d_rank: int = 384
    num_layers: int = 1
    num_heads: int = 3
    mlp_dim: int = 768
    K: int = 15
    candidate_pool_size: int = 128
    rope_base: float = 10000.0


class BiasNorm(nn.Module):
    """RMSNorm with a bias, eps 1e-6, float32 inside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * self.weight.float() + self.bias.float()).to(x.dtype)


class Block(nn.Module):
    def __init__(self, c: WeaverConfig) -> None:
        super().__init__()
        self.heads, self.base = c.num_heads, c.rope_base
        self.norm_attn, self.norm_mlp = BiasNorm(c.d_rank), BiasNorm(c.d_rank)
        self.qkv_proj = nn.Linear(c.d_rank, 3 * c.d_rank, bias=False)
        self.o_proj = nn.Linear(c.d_rank, c.d_rank, bias=False)
        self.gate_up_proj = nn.Linear(c.d_rank, 2 * c.mlp_dim)
        self.down_proj = nn.Linear(c.mlp_dim, c.d_rank)

    def heads_of(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, k and v [B, H, N, d] of rows x [B, N, R]."""
        b, n, r = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in linear(self.norm_attn(x), self.qkv_proj).chunk(3, -1))
        return rotary(q, positions, self.base), rotary(k, positions, self.base), v

    def finish(self, x: Tensor, o: Tensor) -> Tensor:
        """Output projection, residuals and MLP; o [B, H, N, d]."""
        x = x + linear(o.transpose(1, 2).reshape(x.shape), self.o_proj)
        gate, up = linear(self.norm_mlp(x), self.gate_up_proj).chunk(2, -1)
        return x + linear(F.silu(gate) * up, self.down_proj)


class Weaver(nn.Module):
    def __init__(self, config: WeaverConfig) -> None:
        super().__init__()
        self.config = config
        r = config.d_rank
        self.embed_norm, self.output_norm, self.out_norm = BiasNorm(config.d_embed), BiasNorm(config.d_model), BiasNorm(r)
        self.token_in, self.proposal_in = nn.Linear(config.d_embed, r), nn.Linear(config.d_model, r)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.lm_head_query_in = nn.Linear(r, config.d_model, bias=False)

    def initialise(self, seed: int) -> None:
        """Normal(0, 0.02); a zero query, so that training starts at the drafter's own distribution."""
        gen = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    p.copy_(torch.empty(p.shape).normal_(0.0, 0.02, generator=gen))
                elif name.endswith("bias"):
                    p.zero_()
            self.lm_head_query_in.weight.zero_()

    def prefix(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of each layer for prefix rows [B, P, D]."""
        x = linear(self.output_norm(states), self.proposal_in)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        out = []
        for block in self.blocks:
            assert isinstance(block, Block)
            q, k, v = block.heads_of(x, positions)
            out.append((k, v))
            if len(out) < len(self.blocks):
                x = block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Queries [B, N, D] of a chain of nodes at depths 0..N-1 (teacher forcing).

        states [B, P, D]: prefix rows; embeddings [B, N, E]: target embedding rows of the nodes' tokens.
        """
        caches = self.prefix(states)
        x = linear(self.embed_norm(embeddings), self.token_in)
        b, n, _ = x.shape
        positions = torch.arange(1, n + 1, device=x.device).expand(b, -1)
        mask = torch.cat((
            torch.ones(n, states.shape[1], dtype=torch.bool, device=x.device), torch.ones(n, n, dtype=torch.bool, device=x.device).tril(),
        ), 1)
        for block, (pk, pv) in zip(self.blocks, caches):
            assert isinstance(block, Block)
            q, k, v = block.heads_of(x, positions)
            o = F.scaled_dot_product_attention(q, torch.cat((pk, k), 2), torch.cat((pv, v), 2), attn_mask=mask)
            x = block.finish(x, o)
        return linear(self.out_norm(x), self.lm_head_query_in)


def save_weaver(model: Weaver, folder: Path) -> None:
    """weaver.pth ({config, state_dict}), and the same as model.safetensors with config.json for the engine."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: p.detach().to(torch.bfloat16).cpu().contiguous() for n, p in model.named_parameters()}
    torch.save({"config": asdict(model.config), "state_dict": state}, folder / "weaver.pth")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(asdict(model.config), indent=2) + "\n")


def load_weaver(folder: Path) -> Weaver:
    """Inverse of `save_weaver` (its safetensors form), float32; packed folders too."""
    raw = json.loads((Path(folder) / "config.json").read_text())
    model = Weaver(WeaverConfig(**{k: v for k, v in raw.items() if k in WeaverConfig.__dataclass_fields__}))
    model.load_state_dict({k: v.float() for k, v in load_weights(folder).items()})
    return model
