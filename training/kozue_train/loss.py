"""Cross entropy with a tied head, in row chunks, gradients made in the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _chunk(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the losses of rows with target >= 0, and d(sum)/d(logits)."""
    z = logits.float()
    top = z.amax(-1, keepdim=True)
    e = (z - top).exp()
    s = e.sum(-1, keepdim=True)
    keep = (targets >= 0).unsqueeze(-1)
    hot = torch.arange(z.shape[-1], device=z.device).unsqueeze(0) == targets.unsqueeze(-1)
    picked = torch.where(hot, z, torch.zeros_like(z)).sum(-1)
    losses = torch.where(keep.squeeze(-1), (top + s.log()).squeeze(-1) - picked, torch.zeros_like(picked))
    grad = torch.where(keep, e / s - hot.float(), torch.zeros_like(z))
    return losses.sum(), grad.to(logits.dtype)


class Chunk:
    """The pointwise part; compiled on a GPU."""

    fn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = staticmethod(_chunk)


class TiedCrossEntropy(torch.autograd.Function):
    """Mean over valid rows of CE(hidden @ weight^T, targets); logits never exist for all rows at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        w = weight.to(hidden.dtype)
        dh = torch.empty_like(hidden)
        dw = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        count = (targets >= 0).sum().clamp(min=1)
        for at in range(0, hidden.shape[0], chunk):
            h, t = hidden[at : at + chunk], targets[at : at + chunk]
            loss, grad = Chunk.fn(h @ w.t(), t)
            total += loss
            dh[at : at + chunk] = grad @ w
            dw += (grad.t() @ h).float()
        ctx.save_for_backward(dh, dw, count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dh, dw, count = ctx.saved_tensors
        scale = grads[0] / count
        return dh * scale.to(dh.dtype), dw * scale, None, None


def tied_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int = 16384) -> Tensor:
    """hidden [N, D], weight [V, D], targets [N] (negative: ignored) -> scalar mean loss."""
    out: Tensor = TiedCrossEntropy.apply(hidden, weight, targets, chunk)  # type: ignore[no-untyped-call]
    return out


class FrozenCrossEntropy(torch.autograd.Function):
    """Sum of weight * CE(hidden @ head^T, target) where the head is not trained, and the greedy choice of each row.

    The gradient is made in the forward pass from bfloat16 probabilities: (sum of p_j head_j over the others) minus
    (their mass) * head_target, which stays exact where the target is nearly certain.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
        w = head.to(hidden.dtype)
        dh = torch.empty_like(hidden)
        total = torch.zeros((), device=hidden.device)
        best = torch.empty_like(targets)
        for at in range(0, hidden.shape[0], chunk):
            some = slice(at, at + chunk)
            t = targets[some, None]
            logits = hidden[some] @ w.t()
            best[some] = logits.argmax(-1)
            p = logits.softmax(-1)
            total -= (p.gather(1, t).squeeze(1).float().clamp(min=1e-30).log() * weights[some]).sum()
            p.scatter_(1, t, 0.0)
            others = p.sum(-1, keepdim=True, dtype=torch.float32)
            dh[some] = ((p @ w).float() - others * w[t.squeeze(1)].float()).mul_(weights[some, None]).to(dh.dtype)
        ctx.save_for_backward(dh)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (dh,) = ctx.saved_tensors
        return dh * grads[0].to(dh.dtype), None, None, None, None


def frozen_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int = 8192) -> tuple[Tensor, Tensor]:
    """hidden [N, D], head [V, D], targets [N], weights [N] -> scalar sum, greedy choices [N]."""
    out: tuple[Tensor, Tensor] = FrozenCrossEntropy.apply(hidden, head, targets, weights, chunk)  # type: ignore[no-untyped-call]
    return out


def compile_loss() -> None:
    """Compiles the pointwise part."""
    Chunk.fn = staticmethod(torch.compile(_chunk, dynamic=False))
