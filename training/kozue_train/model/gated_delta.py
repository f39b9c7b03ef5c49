"""Chunked Gated DeltaNet with a hand-derived backward pass.

Per head, with decay a_t = exp(g_t), the layer is the recurrence (arXiv 2412.06464)

    S_t = a_t S_{t-1} + k_t beta_t (v_t - a_t k_t^T S_{t-1})^T,      o_t = S_t^T q_t

Inside a chunk of C tokens, with G the running sum of g, it becomes matrix products (WY form):

    A  = tril(beta_i exp(G_i - G_j) k_i.k_j, -1)       T = (I + A)^-1
    U  = T (beta V)         W = T (beta exp(G) K)      Vn = U - W S
    O  = (exp(G) Q) S + tril(exp(G_i - G_j) q_i.k_j) Vn
    S' = exp(G_C) S + (exp(G_C - G) K)^T Vn

Only Vn and S depend on the chunk before, so three stages are sequential or awkward in plain
PyTorch (the inverse, the state scan and its reverse) and have Triton kernels in
`gated_delta_triton`; the rest are batched products. Shapes: q, k, v [B, H, N, C, D];
g (log decay), beta [B, H, N, C] in float32; N chunks of C tokens.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

CHUNK = 64


def decay_matrix(cum: Tensor) -> Tensor:
    """exp(G_i - G_j) for j <= i, zero above the diagonal. cum [..., C] -> [..., C, C]."""
    diff = cum.unsqueeze(-1) - cum.unsqueeze(-2)
    return diff.tril().exp().tril()


def _mm(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


def unit_lower_inverse(a: Tensor) -> Tensor:
    """(I + a)^-1 for strictly lower a [..., C, C], by forward substitution."""
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    return torch.linalg.solve_triangular(a, eye, upper=False, unitriangular=True)


def prepare(k: Tensor, v: Tensor, cum: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """T, U and W of every chunk (plain PyTorch form)."""
    kf = k.float()
    gram = _mm(kf, kf.transpose(-1, -2))
    a = (beta.unsqueeze(-1) * decay_matrix(cum) * gram).tril(-1)
    t = unit_lower_inverse(a)
    u = _mm(t, beta.unsqueeze(-1) * v.float())
    w = _mm(t, (beta * cum.exp()).unsqueeze(-1) * kf)
    return t.to(k.dtype), u.to(k.dtype), w.to(k.dtype)


def scan(k: Tensor, u: Tensor, w: Tensor, cum: Tensor, initial: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """States before each chunk [B,H,N,D,D] (key-major), Vn, and the final state in float32."""
    n = k.shape[2]
    last = cum[..., -1]
    kd = k.float() * (last.unsqueeze(-1) - cum).exp().unsqueeze(-1)
    shape = (*k.shape[:2], k.shape[-1], u.shape[-1])
    state = torch.zeros(shape, device=k.device, dtype=torch.float32) if initial is None else initial.float()
    states, fresh = [], []
    for c in range(n):
        states.append(state.to(k.dtype))
        new = u[:, :, c].float() - _mm(w[:, :, c].float(), state)
        fresh.append(new.to(k.dtype))
        state = last[:, :, c, None, None].exp() * state + _mm(kd[:, :, c].transpose(-1, -2), new)
    return torch.stack(states, 2), torch.stack(fresh, 2), state


def scan_backward(
    q: Tensor, k: Tensor, w: Tensor, cum: Tensor, do: Tensor, dvn_local: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs the chunks in reverse: dVn, and the gradient of each chunk's outgoing state."""
    n = k.shape[2]
    last = cum[..., -1]
    kd = k.float() * (last.unsqueeze(-1) - cum).exp().unsqueeze(-1)
    qa = q.float() * cum.exp().unsqueeze(-1)
    carry = torch.zeros((*k.shape[:2], k.shape[-1], do.shape[-1]), device=k.device, dtype=torch.float32)
    out_dvn: list[Tensor] = []
    out_ds: list[Tensor] = []
    for c in range(n - 1, -1, -1):
        out_ds.append(carry.to(k.dtype))
        dvn = dvn_local[:, :, c].float() + _mm(kd[:, :, c], carry)
        out_dvn.append(dvn.to(k.dtype))
        carry = (
            last[:, :, c, None, None].exp() * carry
            + _mm(qa[:, :, c].transpose(-1, -2), do[:, :, c].float())
            - _mm(w[:, :, c].float().transpose(-1, -2), dvn)
        )
    return torch.stack(out_dvn[::-1], 2), torch.stack(out_ds[::-1], 2)


def read_out(q: Tensor, k: Tensor, cum: Tensor, states: Tensor, vn: Tensor) -> Tensor:
    """O of every chunk."""
    p = (_mm(q, k.transpose(-1, -2)).float() * decay_matrix(cum)).to(q.dtype)
    qa = (q.float() * cum.exp().unsqueeze(-1)).to(q.dtype)
    return _mm(qa, states) + _mm(p, vn)


def local_dvn(q: Tensor, k: Tensor, cum: Tensor, do: Tensor) -> Tensor:
    """The part of dVn that comes from the same chunk's outputs."""
    p = (_mm(q, k.transpose(-1, -2)).float() * decay_matrix(cum)).to(q.dtype)
    return _mm(p.transpose(-1, -2), do)


def gradients(
    q: Tensor, k: Tensor, v: Tensor, cum: Tensor, beta: Tensor, t: Tensor, u: Tensor, w: Tensor,
    states: Tensor, vn: Tensor, do: Tensor, dvn: Tensor, ds_next: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, d(log decay), dbeta once the sequential parts are known."""
    dt = q.dtype
    gamma = decay_matrix(cum)
    ea = cum.exp()
    last = cum[..., -1:]
    tail = (last - cum).exp()

    # O = (a Q) S + P Vn
    qk = _mm(q, k.transpose(-1, -2)).float()
    dp = _mm(do, vn.transpose(-1, -2)).float() * gamma
    dqk = dp.to(dt)
    dgp = dp * qk
    dqa = _mm(do, states.transpose(-1, -2)).float()
    dq = dqa * ea.unsqueeze(-1) + _mm(dqk, k).float()
    dcum = dgp.sum(-1) - dgp.sum(-2) + ea * (dqa * q.float()).sum(-1)

    # Vn = U - W S ;  S' = exp(last) S + Kd^T Vn
    dw = _mm(dvn, states.transpose(-1, -2)).neg()
    dkd = _mm(vn, ds_next.transpose(-1, -2)).float()
    kdot = tail * (dkd * k.float()).sum(-1)
    dlast = kdot.sum(-1) + last.squeeze(-1).exp() * (ds_next.float() * states.float()).sum((-1, -2))
    dcum = dcum - kdot

    # U = T (beta V) ;  W = T (beta a K)
    tt = t.transpose(-1, -2)
    dbv = _mm(tt, dvn)
    dbk = _mm(tt, dw)
    da = -(_mm(dbv, u.transpose(-1, -2)).float() + _mm(dbk, w.transpose(-1, -2)).float()).tril(-1)
    gram = _mm(k, k.transpose(-1, -2)).float()
    da_gamma = da * gamma
    dbeta = (da_gamma * gram).sum(-1)
    dkk = (da_gamma * beta.unsqueeze(-1)).to(dt)
    dga = da_gamma * gram * beta.unsqueeze(-1)
    dbk_f, dbv_f = dbk.float(), dbv.float()
    bk_dot = ea * (dbk_f * k.float()).sum(-1)
    dbeta = dbeta + (dbv_f * v.float()).sum(-1) + bk_dot
    dcum = dcum + dga.sum(-1) - dga.sum(-2) + beta * bk_dot
    dv = dbv_f * beta.unsqueeze(-1)
    dk = (
        _mm(dqk.transpose(-1, -2), q).float()
        + _mm(dkk + dkk.transpose(-1, -2), k).float()
        + dkd * tail.unsqueeze(-1)
        + dbk_f * (beta * ea).unsqueeze(-1)
    )
    dcum = torch.cat([dcum[..., :-1], dcum[..., -1:] + dlast.unsqueeze(-1)], -1)
    dg = dcum.flip(-1).cumsum(-1).flip(-1)
    return dq.to(dt), dk.to(dt), dv.to(dt), dg, dbeta


class Stages:
    """The functions that make up the layer; a run may swap in faster equals (see `use_fast`)."""

    prepare = staticmethod(prepare)
    scan: Callable[..., tuple[Tensor, Tensor, Tensor]] = staticmethod(scan)
    scan_backward = staticmethod(scan_backward)
    read_out = staticmethod(read_out)
    local_dvn = staticmethod(local_dvn)
    gradients = staticmethod(gradients)


class ChunkGatedDelta(torch.autograd.Function):
    """autograd wrapper of the stages above; saves T, U, W, states and Vn for the backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        cum = g.cumsum(-1)
        t, u, w = Stages.prepare(k, v, cum, beta)
        states, vn, _ = Stages.scan(k, u, w, cum)
        ctx.save_for_backward(q, k, v, cum, beta, t, u, w, states, vn)
        return Stages.read_out(q, k, cum, states, vn)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        q, k, v, cum, beta, t, u, w, states, vn = ctx.saved_tensors
        do = grads[0].contiguous()
        dvn_local = Stages.local_dvn(q, k, cum, do)
        dvn, ds_next = Stages.scan_backward(q, k, w, cum, do, dvn_local)
        return Stages.gradients(q, k, v, cum, beta, t, u, w, states, vn, do, dvn, ds_next)


def chunk_gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Output [B, H, N, C, D]; q already scaled, q and k already normalised."""
    out: Tensor = ChunkGatedDelta.apply(q, k, v, g, beta)  # type: ignore[no-untyped-call]
    return out


def recurrent_gated_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The plain recurrence, one token. q, k, v [B, H, D]; g, beta [B, H]; state [B, H, Dk, Dv]."""
    state = state * g.exp()[..., None, None]
    delta = (v - torch.einsum("bhk,bhkv->bhv", k, state)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    return torch.einsum("bhk,bhkv->bhv", q, state), state


def use_fast(compile_products: bool = True) -> None:
    """Swaps in the Triton kernels and compiles the batched products. CUDA only."""
    from kozue_train.model import gated_delta_triton as fast

    Stages.prepare = staticmethod(fast.prepare)
    Stages.scan = staticmethod(fast.scan)
    Stages.scan_backward = staticmethod(fast.scan_backward)
    if compile_products:
        Stages.read_out = staticmethod(torch.compile(read_out, dynamic=False))
        Stages.local_dvn = staticmethod(torch.compile(local_dvn, dynamic=False))
        Stages.gradients = staticmethod(torch.compile(gradients, dynamic=False))


def use_plain() -> None:
    """Back to plain PyTorch for every stage."""
    for name, fn in (
        ("prepare", prepare), ("scan", scan), ("scan_backward", scan_backward),
        ("read_out", read_out), ("local_dvn", local_dvn), ("gradients", gradients),
    ):
        setattr(Stages, name, staticmethod(fn))
