"""Muon for matrices, AdamW for the rest; one learning-rate scale for both.

Muon (Jordan 2024) orthogonalises the momentum of a matrix by a Newton-Schulz iteration; the update
is scaled by 0.2 sqrt(max(rows, columns)) so that its RMS matches AdamW's (arXiv 2502.16982).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn


def newton_schulz(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T of the stacked matrices g [n, r, c] with r <= c; bfloat16 on a GPU."""
    x = g.bfloat16() if g.is_cuda else g.float()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.transpose(-2, -1)
        b = -4.7750 * a + 2.0315 * (a @ a)
        x = 3.4445 * x + b @ x
    return x


def is_matrix(name: str, p: Tensor) -> bool:
    """True for weights that Muon updates: 2-D, not an embedding or a head, at least 32 rows and columns."""
    return p.ndim == 2 and min(p.shape) >= 32 and "embed" not in name and "lm_head" not in name


class Optimizer:
    """Holds the state of both methods; `step(scale)` uses lr * scale."""

    def __init__(
        self, named: list[tuple[str, nn.Parameter]], matrix_lr: float, other_lr: float, weight_decay: float = 0.1,
        momentum: float = 0.95, betas: tuple[float, float] = (0.9, 0.95), clip: float = 1.0,
    ) -> None:
        self.matrix_lr, self.other_lr, self.decay = matrix_lr, other_lr, weight_decay
        self.momentum, self.betas, self.clip = momentum, betas, clip
        self.named = [(n, p) for n, p in named if p.requires_grad]
        self.matrices = [(n, p) for n, p in self.named if is_matrix(n, p)]
        self.others = [(n, p) for n, p in self.named if not is_matrix(n, p)]
        self.count = 0
        self.state: dict[str, Tensor] = {}
        for n, p in self.matrices:
            self.state[n + "/m"] = torch.zeros_like(p)
        for n, p in self.others:
            self.state[n + "/m"], self.state[n + "/v"] = torch.zeros_like(p), torch.zeros_like(p)

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """One update; returns the gradient norm before clipping (a tensor, no synchronisation)."""
        grads = [p.grad for _, p in self.named if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        torch._foreach_mul_(grads, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        self.count += 1
        self._muon(scale)
        self._adamw(scale)
        for _, p in self.named:
            p.grad = None
        return norm

    def _muon(self, scale: float) -> None:
        names = [(n, p) for n, p in self.matrices if p.grad is not None]
        if not names:
            return
        grads = [p.grad for _, p in names if p.grad is not None]
        moments = [self.state[n + "/m"] for n, _ in names]
        torch._foreach_lerp_(moments, grads, 1 - self.momentum)
        mixed = torch._foreach_lerp(grads, moments, self.momentum)
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, (_, p) in enumerate(names):
            r, c = p.shape
            groups[(min(r, c), max(r, c))].append(i)
        lr = self.matrix_lr * scale
        torch._foreach_mul_([p for _, p in names], 1 - lr * self.decay)
        for (_, wide), members in groups.items():
            stack = torch.stack([mixed[i] if names[i][1].shape[0] <= names[i][1].shape[1] else mixed[i].t() for i in members])
            out = newton_schulz(stack).float() * (-lr * 0.2 * wide**0.5)
            for j, i in enumerate(members):
                p = names[i][1]
                p.add_(out[j] if p.shape[0] <= p.shape[1] else out[j].t())

    def _adamw(self, scale: float) -> None:
        names = [(n, p) for n, p in self.others if p.grad is not None]
        if not names:
            return
        params: list[Tensor] = [p for _, p in names]
        grads = [p.grad for p in params if p.grad is not None]
        m = [self.state[n + "/m"] for n, _ in names]
        v = [self.state[n + "/v"] for n, _ in names]
        b1, b2 = self.betas
        torch._foreach_lerp_(m, grads, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, grads, grads, 1 - b2)
        denom = torch._foreach_sqrt(torch._foreach_div(v, 1 - b2**self.count))
        torch._foreach_add_(denom, 1e-8)
        lr = self.other_lr * scale / (1 - b1**self.count)
        torch._foreach_addcdiv_(params, m, denom, value=-lr)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on."""
        return {"count": self.count, "state": self.state}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.count = saved["count"]
        for k, v in saved["state"].items():
            self.state[k].copy_(v)


def schedule(progress: float, warmup: float, decay_from: float, floor: float = 0.05) -> float:
    """Warmup, stable, then 1 - sqrt decay (WSD). `progress` in 0..1."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    if progress < decay_from:
        return 1.0
    x = min(1.0, (progress - decay_from) / (1 - decay_from))
    return max(floor, 1.0 - x**0.5)
