"""The Triton kernels in Triton's interpreter (its own process: the switch is read at import)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

SCRIPT = """
import torch, torch.nn.functional as F
import kozue_train.model.gated_delta as G, kozue_train.model.gated_delta_triton as T
torch.manual_seed(0)
shape = (1, 2, 2, 16, 32)
q = F.normalize(torch.randn(shape), dim=-1); k = F.normalize(torch.randn(shape) + .5, dim=-1)
v = torch.randn(shape); cum = (-torch.rand(shape[:-1])).cumsum(-1); beta = torch.rand(shape[:-1])
def same(a, b):
    for x, y in zip(a, b):
        assert (x - y).abs().max() < 1e-5, (x - y).abs().max()
want = G.prepare(k, v, cum, beta); same(want, T.prepare(k, v, cum, beta))
_, u, w = want
same(G.scan(k, u, w, cum), T.scan(k, u, w, cum))
do, local = torch.randn_like(v), torch.randn_like(v)
same(G.scan_backward(q, k, w, cum, do, local), T.scan_backward(q, k, w, cum, do, local))
print("same")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton here")
def test_kernels_equal_plain_pytorch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "same" in done.stdout
