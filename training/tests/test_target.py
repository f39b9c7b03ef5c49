"""Training on toy sizes: the loss falls, a run resumes, exported files load in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kozue_train.batches import Mixer, RowSource, load_sets
from kozue_train.checkpoint import join_parts, load_hf, pack, unpack, write_parts
from kozue_train.log import plot, read_log
from kozue_train.loss import tied_cross_entropy
from kozue_train.model.config import TargetConfig
from kozue_train.optim import Optimizer, newton_schulz, schedule
from kozue_train.stages.target import TargetOptions, run

TINY = TargetConfig(
    vocab_size=1200, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=32, linear_value_head_dim=32,
)


def test_cross_entropy_equals_pytorch() -> None:
    gen = torch.Generator().manual_seed(0)
    h = torch.randn(37, 16, generator=gen).requires_grad_()
    w = torch.randn(50, 16, generator=gen).requires_grad_()
    t = torch.randint(0, 50, (37,), generator=gen)
    t[5] = -1
    want = torch.nn.functional.cross_entropy(h @ w.t(), t, ignore_index=-1)
    got = tied_cross_entropy(h, w, t, chunk=10)
    assert abs(float(want) - float(got)) < 1e-5
    for a, b in zip(torch.autograd.grad(3 * got, (h, w)), torch.autograd.grad(3 * want, (h, w))):
        assert (a - b).abs().max() < 1e-5


def test_newton_schulz_flattens_singular_values() -> None:
    g = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(1))
    s = torch.linalg.svdvals(newton_schulz(g).float())
    assert s.min() > 0.4 and s.max() < 1.4


def test_schedule() -> None:
    assert schedule(0.0, 0.1, 0.6) == 0.01 and schedule(0.05, 0.1, 0.6) == 0.5
    assert schedule(0.3, 0.1, 0.6) == 1.0 and schedule(1.0, 0.1, 0.6) == 0.05


def test_rows_begin_with_documents_and_use_all() -> None:
    import numpy as np

    tokens = np.array(([7, 8, 9, 0] * 40), dtype=np.uint16)
    aligned = RowSource(tokens, 10, False, 0)
    assert all(aligned.take()[0] == 7 for _ in range(30))
    streamed = RowSource(tokens, 10, True, 0)
    rows = [streamed.take() for _ in range(len(tokens) // 10 - 1)]
    assert all(len(r) == 11 for r in rows)


def test_target_trains_resumes_and_exports(data: Path, tmp_path: Path) -> None:
    options = TargetOptions(data=data, out=tmp_path, config=TINY, planned_seconds=10_000, call_seconds=600, max_steps=25, rows=4, length=128,
                            matrix_lr=0.01, other_lr=0.01, warmup=1e-9, device="cpu", fast=False, eval_every=20)
    run(options)
    run(options)
    lines = read_log(tmp_path / "target.jsonl")
    losses = [r["loss"] for r in lines if "loss" in r]
    assert losses[0] > 6.0 and losses[-1] < 4.6, losses
    starts = [r["step"] for r in lines if r.get("event") == "start"]
    assert starts == [0, 25]
    plot(tmp_path / "target.jsonl", tmp_path / "loss.svg")
    assert "polyline" in (tmp_path / "loss.svg").read_text()
    folder = tmp_path / "kozue-nano-bf16"
    ours = load_hf(folder)
    ids = torch.randint(10, 1200, (1, 70), generator=torch.Generator().manual_seed(0))
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(hf).__name__ == "Qwen3_5ForCausalLM"
    with torch.no_grad():
        assert (hf(ids).logits - ours.logits(ours(ids)[0])).abs().max() < 1e-4


def test_packing_round_trip(tmp_path: Path) -> None:
    raw = torch.randn(30_001, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint8).numpy().tobytes()
    assert unpack(pack(raw)) == raw and len(pack(raw)) < 0.8 * len(raw)
    (tmp_path / "w.bin").write_bytes(raw + b"x")
    write_parts(tmp_path / "w.bin", tmp_path / "parts", "w", raw=20_000)
    join_parts(tmp_path / "parts", "w", tmp_path / "back.bin")
    assert (tmp_path / "back.bin").read_bytes() == raw + b"x"


def test_mixture_changes(data: Path) -> None:
    train, val = load_sets(data / "shards", ["tasks", "maths", "code"])
    assert set(train) == {"tasks", "maths", "code"} and set(val) == set(train)
    assert Mixer(train, 64, 0).batch(8, 0.9).shape == (8, 65)
    with pytest.raises(FileNotFoundError, match="kozue-train data"):
        load_sets(data / "nothing", ["tasks"])
    assert json.loads((data / "shards" / "tasks.json").read_text())["tokens"] == len(train["tasks"])


def test_optimizer_uses_muon_for_matrices_only() -> None:
    from kozue_train.model.qwen3_5 import Target

    model = Target(TINY)
    model.initialise(0)
    opt = Optimizer(list(model.named_parameters()), 0.01, 0.01)
    names = {n for n, _ in opt.matrices}
    assert "model.layers.0.mlp.up_proj.weight" in names and "model.embed_tokens.weight" not in names
    assert not any("conv1d" in n or "in_proj_a" in n or n.endswith("norm.weight") for n in names)
