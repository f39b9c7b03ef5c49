"""Stage `check-device`: are the fast kernels right on this GPU, and how fast is a step?"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from torch import Tensor

from kozue_train.model import gated_delta as plain
from kozue_train.model import gated_delta_triton as fast


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in float32."""
    return float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12))


def inputs(rows: int, length: int, heads: int, dim: int, dtype: torch.dtype, device: str = "cuda") -> tuple[Tensor, ...]:
    """Random q, k, v, g, beta in the layout of `gated_delta`."""
    shape = (rows, heads, length // plain.CHUNK, plain.CHUNK, dim)
    gen = torch.Generator(device=device).manual_seed(1)
    q = (F.normalize(torch.randn(shape, device=device, generator=gen), dim=-1) * dim**-0.5).to(dtype)
    k = F.normalize(torch.randn(shape, device=device, generator=gen) + 0.5, dim=-1).to(dtype)
    v = torch.randn(shape, device=device, generator=gen).to(dtype)
    g = -torch.rand(shape[:-1], device=device, generator=gen) * 0.3
    beta = torch.rand(shape[:-1], device=device, generator=gen)
    return q, k, v, g, beta


def compare(rows: int, length: int) -> dict[str, dict[str, float]]:
    """Relative error of each stage's results against float32 on the same bfloat16 inputs."""
    q, k, v, g, beta = inputs(rows, length, 4, 128, torch.bfloat16)
    cum = g.cumsum(-1)
    out: dict[str, dict[str, float]] = {}
    ref = plain.prepare(k.float(), v.float(), cum, beta)
    got = fast.prepare(k, v, cum, beta)
    out["prepare"] = {n: relative(a, b) for n, a, b in zip("TUW", got, ref)}
    _, u, w = got
    ref = plain.scan(k.float(), u.float(), w.float(), cum)
    got = fast.scan(k, u, w, cum)
    out["scan"] = {n: relative(a, b) for n, a, b in zip(("states", "vn", "final"), got, ref)}
    do = torch.randn_like(v)
    local = torch.randn_like(v)
    ref2 = plain.scan_backward(q.float(), k.float(), w.float(), cum, do.float(), local.float())
    got2 = fast.scan_backward(q, k, w, cum, do, local)
    out["scan_backward"] = {n: relative(a, b) for n, a, b in zip(("dvn", "ds"), got2, ref2)}
    return out


def whole(rows: int, length: int) -> dict[str, float]:
    """Relative error of output and gradients of the whole layer, fast in bfloat16 against plain in float32."""
    leaves = [t.detach().requires_grad_() for t in inputs(rows, length, 4, 128, torch.bfloat16)]
    plain.use_fast()
    o = plain.chunk_gated_delta(*leaves)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, leaves, do)
    plain.use_plain()
    full = [t.detach().float().requires_grad_() for t in leaves]
    o2 = plain.chunk_gated_delta(*full)
    grads2 = torch.autograd.grad(o2, full, do.float())
    return {"o": relative(o, o2), **{n: relative(a, b) for n, a, b in zip(("dq", "dk", "dv", "dg", "dbeta"), grads, grads2)}}


def time_stages(rows: int, length: int) -> dict[str, float]:
    """Milliseconds of each stage."""
    import triton

    q, k, v, g, beta = inputs(rows, length, 4, 128, torch.bfloat16)
    cum = g.cumsum(-1)
    _, u, w = fast.prepare(k, v, cum, beta)
    do = torch.randn_like(v)
    calls = {
        "prepare": lambda: fast.prepare(k, v, cum, beta), "scan": lambda: fast.scan(k, u, w, cum),
        "scan_backward": lambda: fast.scan_backward(q, k, w, cum, do, do),
    }
    return {n: round(float(triton.testing.do_bench(f, warmup=10, rep=50)), 3) for n, f in calls.items()}


def run(rows: int, length: int) -> None:
    """Prints all figures; raises ValueError where an error is too large for bfloat16."""
    stages = compare(rows, length)
    print(json.dumps({"stages": stages}), flush=True)
    print(json.dumps({"milliseconds": time_stages(64, length)}), flush=True)
    layer = whole(rows, length)
    print(json.dumps({"layer": layer}), flush=True)
    worst = max(max(max(d.values()) for d in stages.values()), max(layer.values()))
    if not worst < 0.03:
        raise ValueError(f"a kernel is wrong on this device: relative error {worst:.3g} (bfloat16 should stay under 0.03)")
