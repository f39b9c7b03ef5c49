"""The engine's rounding: codes by hand, rotation, and distillation on toy sizes."""

from __future__ import annotations

from pathlib import Path

import torch
from test_target import TINY

from kozue_train.checkpoint import load_hf, save_hf
from kozue_train.model.dflash import DFlash, DFlashConfig
from kozue_train.model.qwen3_5 import Target
from kozue_train.quantise import (
    Format,
    Rounded,
    coded,
    fit,
    hadamard,
    is_packed,
    rotate,
    rotate_back,
    round_inputs,
    rounded_inputs,
    signs,
)
from kozue_train.stages import distill


def test_rotation_is_orthonormal_and_signs_are_fixed() -> None:
    h = hadamard()
    assert (h @ h - torch.eye(32)).abs().max() < 1e-6 and h[3, 5] < 0 < h[3, 4]
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    assert (rotate_back(rotate(x)) - x).abs().max() < 1e-6
    assert set(signs(768).tolist()) == {1.0, -1.0} and 300 < float((signs(768) > 0).sum()) < 468
    assert signs(768)[:512].equal(signs(512))  # a sign depends on its place, not on the width


def test_codes_of_a_group_by_hand() -> None:
    g = torch.zeros(1, 64)
    g[0, :16] = torch.arange(16.0) * 0.5 - 2.0  # -2 .. 5.5 in steps of 0.5: 4 bits hold it exactly
    scale, zero = fit(g, 4)
    assert float(scale) == 0.5 and float(zero) == 4.0
    assert coded(g, scale, zero, 4).equal(g)
    s8, z8 = fit(torch.tensor([[12.7] + [-12.7] * 63]), 8)
    assert float(z8) == 128.0 and abs(float(s8) - 0.1) < 1e-4
    assert fit(torch.zeros(1, 64), 4)[0].item() == 0.0


def test_inputs_round_half_even_by_group() -> None:
    x = torch.zeros(1, 128)
    x[0, 0], x[0, 1], x[0, 2], x[0, 64] = 127.0, 2.5, -3.5, 1e-3
    assert round_inputs(x)[0, :3].tolist() == [127.0, 2.0, -4.0]
    assert abs(float(round_inputs(x)[0, 64]) - 1e-3) < 1e-9


def test_what_is_packed() -> None:
    packed = {n for n, p in Target(TINY).named_parameters() if is_packed(n, p)}
    assert "model.embed_tokens.weight" in packed and "model.layers.0.linear_attn.in_proj_z.weight" in packed
    assert not any(n.endswith(("in_proj_a.weight", "conv1d.weight", "norm.weight")) for n in packed)


def test_rounded_model_is_near_and_has_gradients() -> None:
    model = Target(TINY)
    model.initialise(0)
    ids = torch.randint(0, 1200, (1, 64), generator=torch.Generator().manual_seed(1))
    exact = model(ids)[0].detach()
    eight, four = (Rounded(model, Format(b)) for b in (8, 4))
    e8, e4 = (float((r(ids)[0].detach() - exact).norm() / exact.norm()) for r in (eight, four))
    assert 0 < e8 < 0.03 and e8 < e4 < 0.4
    four(ids)[0].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if n.endswith("up_proj.weight"))
    assert (model(ids)[0] - exact).abs().max() == 0  # nothing is left swapped


def test_drafters_round_too() -> None:
    model = DFlash(DFlashConfig(hidden_size=64, vocab_size=50, num_target_layers=4, mask_token_id=5, target_layer_ids=[1, 2], intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32, block_size=4))
    model.initialise(0)
    gen = torch.Generator().manual_seed(0)
    args = torch.randn(1, 20, 128, generator=gen), torch.tensor([[9]]), torch.tensor([[6]]), torch.randn(50, 64, generator=gen)
    with torch.no_grad():
        a, b = model(*args), Rounded(model, Format(4))(*args)
        with rounded_inputs():
            c = model(*args)
    assert 0 < (a - b).norm() / a.norm() < 0.3 and 0 < (a - c).norm() / a.norm() < 0.05


def test_distillation_closes_part_of_the_gap(data: Path, tmp_path: Path) -> None:
    model = Target(TINY)
    model.initialise(0)
    with torch.no_grad():  # larger weights: rounding has something to break
        for n, p in model.named_parameters():
            if p.ndim == 2:
                p.mul_(4.0)
    save_hf(model, tmp_path / "m")
    options = distill.DistillOptions(target=tmp_path / "m", data=data, out=tmp_path / "d", bits=4, rows=8, length=64, steps=24, matrix_lr=2e-4, other_lr=2e-4, device="cpu", check_rows=2)
    summary = distill.run(options)
    assert summary["kl"] < 0.95 * summary["kl_before"], summary
    assert load_hf(tmp_path / "d" / "distilled").config == TINY
