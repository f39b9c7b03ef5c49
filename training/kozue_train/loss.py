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


def compile_loss() -> None:
    """Compiles the pointwise part."""
    Chunk.fn = staticmethod(torch.compile(_chunk, dynamic=False))
