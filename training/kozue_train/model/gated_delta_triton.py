"""Triton kernels for the three stages of `gated_delta` that plain PyTorch does badly.

Same arguments and results as the functions of the same name there; inputs must be contiguous.
`tests/test_triton.py` runs them in Triton's interpreter, `kozue-train check-device` on a GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 32


@triton.jit
def _prepare_kernel(k_ptr, v_ptr, cum_ptr, beta_ptr, t_ptr, u_ptr, w_ptr, C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, C)
    dk = tl.arange(0, DK)
    dv = tl.arange(0, DV)
    k = tl.load(k_ptr + chunk * C * DK + rows[:, None] * DK + dk[None, :])
    cum = tl.load(cum_ptr + chunk * C + rows)
    beta = tl.load(beta_ptr + chunk * C + rows)
    gram = tl.dot(k, tl.trans(k)).to(tl.float32)
    strict = rows[:, None] > rows[None, :]
    # The exponent is masked first: above the diagonal it is positive and could overflow.
    decay = tl.exp(tl.where(strict, cum[:, None] - cum[None, :], 0.0))
    t = tl.where(strict, -beta[:, None] * decay * gram, 0.0)
    for i in range(1, C):
        row = tl.sum(tl.where((rows == i)[:, None], t, 0.0), 0)
        row = row + tl.sum(row[:, None] * t, 0) * (rows < i)
        t = tl.where((rows == i)[:, None], row[None, :], t)
    t = t + tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    tc = t.to(k.dtype)
    tl.store(t_ptr + chunk * C * C + rows[:, None] * C + rows[None, :], tc)
    v = tl.load(v_ptr + chunk * C * DV + rows[:, None] * DV + dv[None, :])
    bv = (v.to(tl.float32) * beta[:, None]).to(k.dtype)
    tl.store(u_ptr + chunk * C * DV + rows[:, None] * DV + dv[None, :], tl.dot(tc, bv).to(k.dtype))
    bk = (k.to(tl.float32) * (beta * tl.exp(cum))[:, None]).to(k.dtype)
    tl.store(w_ptr + chunk * C * DK + rows[:, None] * DK + dk[None, :], tl.dot(tc, bk).to(k.dtype))


@triton.jit
def _scan_kernel(
    k_ptr, u_ptr, w_ptr, cum_ptr, s_ptr, vn_ptr, final_ptr, N,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, C)
    dk = tl.arange(0, DK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    state = tl.zeros((DK, BV), dtype=tl.float32)
    for n in range(N):
        chunk = head * N + n
        tl.store(s_ptr + chunk * DK * DV + dk[:, None] * DV + dv[None, :], state.to(s_ptr.dtype.element_ty))
        w = tl.load(w_ptr + chunk * C * DK + rows[:, None] * DK + dk[None, :])
        u = tl.load(u_ptr + chunk * C * DV + rows[:, None] * DV + dv[None, :])
        new = u.to(tl.float32) - tl.dot(w, state.to(w.dtype))
        new_c = new.to(w.dtype)
        tl.store(vn_ptr + chunk * C * DV + rows[:, None] * DV + dv[None, :], new_c)
        cum = tl.load(cum_ptr + chunk * C + rows)
        last = tl.load(cum_ptr + chunk * C + C - 1)
        k = tl.load(k_ptr + chunk * C * DK + rows[:, None] * DK + dk[None, :])
        kd = (k.to(tl.float32) * tl.exp(last - cum)[:, None]).to(w.dtype)
        state = state * tl.exp(last) + tl.dot(tl.trans(kd), new_c)
    tl.store(final_ptr + head * DK * DV + dk[:, None] * DV + dv[None, :], state)


@triton.jit
def _scan_backward_kernel(
    q_ptr, k_ptr, w_ptr, cum_ptr, do_ptr, dvl_ptr, dvn_ptr, ds_ptr, N,
    C: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BV: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, C)
    dk = tl.arange(0, DK)
    dv = tl.program_id(0) * BV + tl.arange(0, BV)
    carry = tl.zeros((DK, BV), dtype=tl.float32)
    for back in range(N):
        chunk = head * N + (N - 1 - back)
        wide = chunk * C * DK + rows[:, None] * DK + dk[None, :]
        narrow = chunk * C * DV + rows[:, None] * DV + dv[None, :]
        k = tl.load(k_ptr + wide)
        carry_c = carry.to(k.dtype)
        tl.store(ds_ptr + chunk * DK * DV + dk[:, None] * DV + dv[None, :], carry_c)
        cum = tl.load(cum_ptr + chunk * C + rows)
        last = tl.load(cum_ptr + chunk * C + C - 1)
        kd = (k.to(tl.float32) * tl.exp(last - cum)[:, None]).to(k.dtype)
        dvn = tl.load(dvl_ptr + narrow).to(tl.float32) + tl.dot(kd, carry_c)
        dvn_c = dvn.to(k.dtype)
        tl.store(dvn_ptr + narrow, dvn_c)
        q = tl.load(q_ptr + wide)
        qa = (q.to(tl.float32) * tl.exp(cum)[:, None]).to(k.dtype)
        do = tl.load(do_ptr + narrow)
        w = tl.load(w_ptr + wide)
        carry = carry * tl.exp(last) + tl.dot(tl.trans(qa), do) - tl.dot(tl.trans(w), dvn_c)


def prepare(k: Tensor, v: Tensor, cum: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """T, U, W; see `gated_delta.prepare`."""
    b, h, n, c, dk = k.shape
    dv = v.shape[-1]
    t = torch.empty((b, h, n, c, c), dtype=k.dtype, device=k.device)
    u, w = torch.empty_like(v), torch.empty_like(k)
    _prepare_kernel[(b * h * n,)](k, v, cum, beta, t, u, w, C=c, DK=dk, DV=dv, num_warps=4)
    return t, u, w


def scan(k: Tensor, u: Tensor, w: Tensor, cum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """States, Vn, final state; see `gated_delta.scan` (no initial state here)."""
    b, h, n, c, dk = k.shape
    dv = u.shape[-1]
    bv = min(BLOCK_V, dv)
    states = torch.empty((b, h, n, dk, dv), dtype=k.dtype, device=k.device)
    final = torch.empty((b, h, dk, dv), dtype=torch.float32, device=k.device)
    vn = torch.empty_like(u)
    _scan_kernel[(dv // bv, b * h)](k, u, w, cum, states, vn, final, n, C=c, DK=dk, DV=dv, BV=bv, num_warps=4, num_stages=2)
    return states, vn, final


def scan_backward(q: Tensor, k: Tensor, w: Tensor, cum: Tensor, do: Tensor, dvn_local: Tensor) -> tuple[Tensor, Tensor]:
    """dVn and the gradients of the outgoing states; see `gated_delta.scan_backward`."""
    b, h, n, c, dk = k.shape
    dv = do.shape[-1]
    bv = min(BLOCK_V, dv)
    dvn = torch.empty_like(dvn_local)
    ds = torch.empty((b, h, n, dk, dv), dtype=k.dtype, device=k.device)
    _scan_backward_kernel[(dv // bv, b * h)](
        q, k, w, cum, do, dvn_local, dvn, ds, n, C=c, DK=dk, DV=dv, BV=bv, num_warps=4, num_stages=2
    )
    return dvn, ds
