"""The engine's weight and activation arithmetic in PyTorch, with straight-through gradients.

With signs s and the orthonormal 32 x 32 Hadamard matrix H, codes stand for rotated rows w' = H (s * w),
and w . x = w' . H (s * x). Rows are coded by groups of 64 inputs: 4 bits with a zero point
(scale * (code - zero)) or 8 bits around 128; a group's range is the one of least squared error among a
few, its scale rounded to float16 first. Inputs are rounded, after rotation, to symmetric int8 by row and
group, scale = max|x| / 127. docs/checkpoint.md describes the same from the engine's side.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kozue_train.model import dflash, qwen3_5

BLOCK = 32
GROUP = 64
SEED = 0x6B6F_7A75_6500_0001
_WORD = (1 << 64) - 1


def _mix(counter: int) -> int:
    z = (counter + 0x9E37_79B9_7F4A_7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _WORD
    return z ^ (z >> 31)


@lru_cache
def _signs(width: int) -> tuple[int, ...]:
    return tuple(1 if _mix((SEED + _mix(i // 64)) & _WORD) >> (i % 64) & 1 == 0 else -1 for i in range(width))


@lru_cache
def signs(width: int, device: str = "cpu") -> Tensor:
    """The signs that `kozue quantize` gives to every matrix of `width` inputs, float32."""
    return torch.tensor(_signs(width), dtype=torch.float32, device=device)


@lru_cache
def hadamard(device: str = "cpu") -> Tensor:
    """Sylvester's 32 x 32 matrix divided by sqrt(32): symmetric and its own inverse."""
    h = torch.ones(1, 1)
    while h.shape[0] < BLOCK:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)), 0)
    return (h / BLOCK**0.5).to(device)


def rotate(x: Tensor) -> Tensor:
    """H (s * x) over blocks of 32 of the last axis, float32."""
    device = str(x.device)
    y = (x.float() * signs(x.shape[-1], device)).unflatten(-1, (-1, BLOCK))
    return (y @ hadamard(device)).flatten(-2)


def rotate_back(x: Tensor) -> Tensor:
    """s * (H x), the inverse of `rotate`."""
    device = str(x.device)
    return (x.float().unflatten(-1, (-1, BLOCK)) @ hadamard(device)).flatten(-2) * signs(x.shape[-1], device)


def fit(groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Scale (rounded to float16) and zero of each group [..., 64] -> [..., 1], as the engine chooses them."""
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    top = float(2**bits - 1)
    tries, step = (14, 0.025) if bits == 4 else (3, 0.01)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for i in range(tries):
        part = 1.0 - step * i
        if bits == 8:
            half = (top - 1) / 2
            scale = (part * torch.maximum(high, -low) / half).half().float()
            zero = torch.full_like(scale, half + 1)
        else:
            scale = (part * (high - low) / top).half().float()
            zero = torch.where(scale == 0, torch.zeros_like(scale), -part * low / scale).round().clamp(0, top)
        error = (coded(groups, scale, zero, bits) - groups).pow(2).sum(-1, keepdim=True)
        if best is None:
            best = scale, zero, error
        else:
            better = error < best[2]
            best = tuple(torch.where(better, new, old) for new, old in zip((scale, zero, error), best))  # type: ignore[assignment]
    assert best is not None
    return best[0], best[1]


def coded(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """What the codes of the groups stand for."""
    inverse = torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)
    code = (groups * inverse + zero).clamp(0, float(2**bits - 1)).round()
    return scale * (code - zero)


def round_inputs(x: Tensor) -> Tensor:
    """The values that the int8 codes of x' [..., k] stand for."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    top = groups.abs().amax(-1, keepdim=True)
    code = torch.where(top > 0, (groups * (127 / top.clamp(min=1e-30))).round(), torch.zeros_like(groups))
    return (code * (top / 127)).flatten(-2)


class _Straight(torch.autograd.Function):
    """Forward: the rounded value; backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` with the gradient of `x`."""
    out: Tensor = _Straight.apply(x, rounded.to(x.dtype))  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class Format:
    """Size M (4 bits) or L (8 bits); whether inputs are rounded as in the engine."""

    bits: int
    inputs: bool = True


def is_packed(name: str, p: Tensor) -> bool:
    """Whether the engine packs this tensor: matrices called .weight with at least 32 rows, of whole groups."""
    return p.ndim == 2 and name.endswith(".weight") and p.shape[1] % GROUP == 0 and not name.endswith(("in_proj_a.weight", "in_proj_b.weight"))


class Rounded(nn.Module):
    """Runs `inner` with its matrices as the engine would store them. Ranges are chosen anew every `refit` calls."""

    def __init__(self, inner: nn.Module, form: Format, refit: int = 8) -> None:
        super().__init__()
        self.inner, self.form, self.refit, self.calls = inner, form, refit, 0
        self.fits: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def config(self) -> Any:
        return self.inner.config

    def weights(self) -> dict[str, Tensor]:
        """Effective weights, in the unrotated basis, with straight-through gradients."""
        out: dict[str, Tensor] = {}
        for name, p in self.inner.named_parameters():
            if not is_packed(name, p):
                out[name] = p
                continue
            with torch.no_grad():
                groups = rotate(p.detach()).unflatten(-1, (-1, GROUP))
                if name not in self.fits or self.calls % self.refit == 0:
                    self.fits[name] = fit(groups, self.form.bits)
                rounded = rotate_back(coded(groups, *self.fits[name], self.form.bits).flatten(-2))
            out[name] = straight(p, rounded)
        self.calls += 1
        return out

    def forward(self, *args: Any, weights: dict[str, Tensor] | None = None, **kwargs: Any) -> Any:
        """The inner forward pass; `weights`: what `weights()` gave, where the caller needs them too."""
        with rounded_inputs(self.form.inputs):
            return functional_call(self.inner, weights or self.weights(), args, kwargs)


def _rounded_product(h: Tensor, w: Tensor) -> Tensor:
    if h.shape[-1] % GROUP:
        return h @ w.to(h.dtype).t()
    with torch.no_grad():
        back = rotate_back(round_inputs(rotate(h)))
    return straight(h, back) @ w.to(h.dtype).t()


@contextmanager
def rounded_inputs(on: bool = True) -> Iterator[None]:
    """Within it, all projections of the models here round their inputs as the engine does."""
    before = qwen3_5.Project.fn, dflash.Product.fn
    if on:
        qwen3_5.Project.fn = dflash.Product.fn = staticmethod(_rounded_product)
    try:
        yield
    finally:
        qwen3_5.Project.fn, dflash.Product.fn = (staticmethod(f) for f in before)
