"""Drafter, Weaver and evaluation on toy sizes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from kozue_train.checkpoint import save_hf
from kozue_train.frozen import Features, load_frozen
from kozue_train.log import read_log
from kozue_train.loss import frozen_cross_entropy
from kozue_train.model.config import TargetConfig
from kozue_train.model.dflash import DFlash, DFlashConfig, default_taps, load_dflash
from kozue_train.model.qwen3_5 import Target
from kozue_train.model.weaver import Weaver, WeaverConfig, load_weaver
from kozue_train.stages import dflash, evaluate, generate, weaver
from kozue_train.trees import Tree, chain, ddtree, woven

TOY = TargetConfig(
    vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=16, linear_value_head_dim=16,
)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    model = Target(TOY)
    model.initialise(0)
    save_hf(model, folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Counting sequences: the next token is always the last plus a step that the prompt shows."""
    rows, starts = [], []
    for i in range(96):
        step, first = 1 + i % 3, 7 + i % 11
        rows.append(np.array([8 + (first + step * k) % 50 for k in range(48)]))
        starts.append(6)
    path = tmp_path_factory.mktemp("texts") / "t.npz"
    generate.Texts(rows, np.array(starts), ["code" if i % 2 else "chat" for i in range(96)], np.array([float(i % 4 == 0) for i in range(96)])).save(path)
    return path


def options(toy: Path, texts: Path, out: Path, **more: object) -> dflash.DrafterOptions:
    base: dict[str, object] = dict(
        target=toy, texts=texts, out=out, rows=8, length=64, anchors=4, steps=60, device="cpu", layers=2, intermediate=64, heads=2, kv_heads=1,
        head_dim=32, taps=2, block=8, mask_id=5, matrix_lr=0.02, other_lr=0.01, rank=64, weaver_heads=2, mlp=64, pool=16,
    )
    return dflash.DrafterOptions(**{**base, **more})  # type: ignore[arg-type]


def test_default_taps_are_z_labs() -> None:
    assert default_taps(36, 5) == [1, 9, 17, 25, 33]
    assert default_taps(32, 5) == [1, 8, 15, 22, 29]
    assert default_taps(64, 5) == [1, 16, 31, 46, 61]


def test_features_are_taken_after_layers(toy: Path) -> None:
    pytest.importorskip("transformers")
    from kozue_train.frozen import HfTarget

    cpu = torch.device("cpu")
    ours, hf = load_frozen(toy, cpu, torch.float32), HfTarget(toy, cpu, torch.float32)
    ids = torch.randint(0, 64, (2, 70), generator=torch.Generator().manual_seed(0))
    a, b = ours.features(ids, [1, 2]), hf.features(ids, [1, 2])
    assert a.taps.shape == (2, 70, 128)
    assert (a.taps - b.taps).abs().max() < 1e-4 and (a.hidden - b.hidden).abs().max() < 1e-4
    prompts = [[7, 8, 9], [10, 11, 12]]
    assert ours.generate(prompts, 5, [0.0, 0.0], (0, 2)) == hf.generate(prompts, 5, [0.0, 0.0], (0, 2))


def test_blocks_see_only_what_came_before() -> None:
    config = DFlashConfig(hidden_size=32, vocab_size=50, num_target_layers=4, mask_token_id=5, target_layer_ids=[1, 2], intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16, block_size=4)
    model = DFlash(config)
    model.initialise(0)
    gen = torch.Generator().manual_seed(0)
    taps, embedding = torch.randn(1, 20, 64, generator=gen), torch.randn(50, 32, generator=gen)
    tokens, anchors = torch.tensor([[9, 11]]), torch.tensor([[6, 12]])
    with torch.no_grad():
        both = model(taps, tokens, anchors, embedding)
        alone = model(taps, tokens[:, 1:], anchors[:, 1:], embedding)
        changed = taps.clone()
        changed[:, 6:] += 1.0
        later = model(changed, tokens, anchors, embedding)
    assert (both[:, 1] - alone[:, 0]).abs().max() < 1e-5  # blocks do not see each other
    assert (both[:, 0] - later[:, 0]).abs().max() < 1e-6  # features from the anchor on are invisible
    assert (both[:, 1] - later[:, 1]).abs().max() > 1e-3


def test_drafter_and_weaver_train_export_and_evaluate(toy: Path, texts: Path, tmp_path: Path) -> None:
    dflash.run(options(toy, texts, tmp_path / "d", steps=30, held_out=texts))
    dflash.run(options(toy, texts, tmp_path / "d", steps=100))
    lines = read_log(tmp_path / "d" / "dflash.jsonl")
    assert [r["step"] for r in lines if r.get("event") == "start"] == [0, 30]
    held = [r for r in lines if "held_loss" in r]
    assert [r["step"] for r in held] == [1] and held[0]["held_loss"] > 3.9 and held[0]["held_accepted"] < 1
    losses = [r["loss"] for r in lines if "loss" in r]
    assert losses[0] > 3.9 and losses[-1] < 0.85 * losses[0], losses
    folder = tmp_path / "d" / "dflash"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 8
    assert config["dflash_config"] == {"mask_token_id": 5, "target_layer_ids": [1, 3]} and config["num_target_layers"] == 6
    tensors = {k: tuple(v.shape) for k, v in load_file(folder / "model.safetensors").items()}
    per_layer = {
        "input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,), "self_attn.q_proj.weight": (64, 64), "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64), "self_attn.o_proj.weight": (64, 64), "self_attn.q_norm.weight": (32,), "self_attn.k_norm.weight": (32,),
        "mlp.gate_proj.weight": (64, 64), "mlp.up_proj.weight": (64, 64), "mlp.down_proj.weight": (64, 64),
    }
    assert tensors == {"fc.weight": (64, 128), "hidden_norm.weight": (64,), "norm.weight": (64,), **{f"layers.{i}.{k}": v for i in range(2) for k, v in per_layer.items()}}
    weaver.run(options(toy, texts, tmp_path / "w", steps=40, drafter=folder))
    logged = [r for r in read_log(tmp_path / "w" / "weaver.jsonl") if "tv" in r]
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert abs(logged[0]["tv"] - logged[0]["tv_draft"]) < 1e-3  # a zero query starts at the drafter
    loaded = load_weaver(tmp_path / "w" / "weaver")
    assert loaded.config == WeaverConfig(d_model=64, d_embed=64, d_rank=64, num_layers=1, num_heads=2, mlp_dim=64, K=7, candidate_pool_size=16)
    names = set(torch.load(tmp_path / "w" / "weaver" / "weaver.pth", weights_only=True)["state_dict"])
    assert {"embed_norm.bias", "token_in.weight", "proposal_in.bias", "blocks.0.qkv_proj.weight", "blocks.0.gate_up_proj.bias", "lm_head_query_in.weight", "out_norm.weight"} <= names
    assert set(load_file(tmp_path / "w" / "weaver" / "model.safetensors")) == names
    assert json.loads((tmp_path / "w" / "weaver" / "config.json").read_text())["d_rank"] == 64
    assert "blocks.0.qkv_proj.bias" not in names and "lm_head_query_in.bias" not in names
    results = evaluate.run(evaluate.EvalOptions(target=toy, texts=texts, drafter=folder, weaver=tmp_path / "w" / "weaver", out=tmp_path, budgets=(4, 8), per_category=3, group=8))
    by = {(r["category"], r["temperature"], r["method"]): r["tokens_per_pass"] for r in results}
    assert by[("code", 0.0, "plain")] == 1.0
    assert by[("code", 0.0, "ddtree 8")] > 1.0
    assert by[("code", 0.0, "ddtree 8")] >= by[("code", 0.0, "ddtree 4")]


@pytest.mark.parametrize("dtype, near", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_cross_entropy_of_a_frozen_head(dtype: torch.dtype, near: float) -> None:
    gen = torch.Generator().manual_seed(2)
    head, start = torch.randn(40, 16, generator=gen).to(dtype), torch.randn(21, 16, generator=gen).to(dtype)
    targets, weights = torch.randint(0, 40, (21,), generator=gen), torch.rand(21, generator=gen)
    start[3], targets[3] = 4 * head[7], 7  # nearly certain
    start[4], targets[4] = 4 * head[7], 8  # and wrong
    ours, theirs = start.clone().requires_grad_(), start.float().requires_grad_()
    total, best = frozen_cross_entropy(ours, head, targets, weights, chunk=8)
    logits = theirs @ head.float().t()
    wanted = (torch.nn.functional.cross_entropy(logits, targets, reduction="none") * weights).sum()
    (3 * total).backward()
    (3 * wanted).backward()
    assert ours.grad is not None and theirs.grad is not None
    assert abs(total.item() - wanted.item()) < near * wanted.item() and torch.equal(best, logits.argmax(-1))
    assert (ours.grad.float() - theirs.grad).abs().max() < near * theirs.grad.abs().max()
    assert (ours.grad[3].float() - theirs.grad[3]).abs().max() < 1e-4


def test_weaver_without_drafter_says_so(toy: Path, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--drafter"):
        weaver.run(options(toy, texts, tmp_path))


def test_weaver_nodes_are_causal() -> None:
    model = Weaver(WeaverConfig(d_model=16, d_embed=16, d_rank=32, num_heads=2, mlp_dim=16, K=5, num_layers=2))
    model.initialise(0)
    gen = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(model.lm_head_query_in.weight, generator=gen)
    states, tokens = torch.randn(1, 6, 16, generator=gen), torch.randn(1, 5, 16, generator=gen)
    with torch.no_grad():
        a = model(states, tokens)
        tokens[:, 3:] += 1.0
        b = model(states, tokens)
    assert (a[:, :3] - b[:, :3]).abs().max() < 1e-6 and (a[:, 3] - b[:, 3]).abs().max() > 1e-3


def test_trees() -> None:
    top = torch.tensor([[10, 11], [20, 21], [30, 31]])
    logp = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.5, 0.5]]).log()
    tree = chain(top, 3)
    assert tree.tokens == [-1, 10, 20] and tree.accepted([10, 20, 30]) == 2 and tree.accepted([11]) == 0
    best = ddtree(top, logp, 5)
    # In falling probability: 10 (.6), 10-20 (.54), 11 (.4), 11-20 (.36).
    assert list(zip(best.parents, best.tokens))[1:] == [(0, 10), (1, 20), (0, 11), (3, 20)]
    assert best.accepted([11, 20, 9]) == 2

    def expand(which: list[int], paths: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [[1, 2] if p[-1] != 1 else [3, 4] for p in paths]
        return torch.tensor(rows), torch.tensor([[0.7, 0.3]] * len(rows)).log()

    one = woven([9, 9], 4, 7, expand)[1]
    assert one.tokens == [9, 1, 3, 1] and one.parents == [-1, 0, 1, 2]
    assert Tree().accepted([1]) == 0


def test_generation_stage_keeps_prompts_and_answers_apart(data: Path, tmp_path: Path) -> None:
    tok = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    model = Target(TargetConfig(**{**TOY.__dict__, "vocab_size": tok.get_vocab_size()}))
    model.initialise(1)
    save_hf(model, tmp_path / "m")
    tok.save(str(tmp_path / "m" / "tokenizer.json"))
    prompts = json.loads((data / "prompts.eval.json").read_text())
    assert set(prompts) == {"code", "maths", "chat", "functions", "prose", "heldout"} and len(prompts["heldout"]) == 50
    made = generate.run(generate.GenerateOptions(target=tmp_path / "m", prompts=data / "prompts.eval.json", out=tmp_path / "t.npz", new_tokens=6, per_category=2, batch=8, device="cpu"))
    again = generate.Texts.load(tmp_path / "t.npz")
    assert [r.tolist() for r in made.rows] == [r.tolist() for r in again.rows]
    asked = {tuple(tok.encode(p).ids) for ps in prompts.values() for p in ps[:2]}
    assert all(tuple(r[:s].tolist()) in asked and 4 <= len(r) - s <= 6 for r, s in zip(again.rows, again.starts))
    only = generate.GenerateOptions(target=tmp_path / "m", prompts=data / "prompts.eval.json", out=tmp_path / "c.npz", new_tokens=6, per_category=2, categories=("chat",), device="cpu")
    assert set(generate.run(only).categories) == {"chat"}
    with pytest.raises(ValueError, match="no category letters; it has code, maths"):
        generate.run(dataclasses.replace(only, categories=("letters",)))
    assert isinstance(Features(torch.zeros(1), torch.zeros(1)), Features) and load_dflash is not None


def test_a_smaller_tree_is_the_beginning_of_a_larger() -> None:
    gen = torch.Generator().manual_seed(3)
    table = torch.randn(9, 9, generator=gen).log_softmax(-1)

    def expand(which: list[int], paths: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        values, index = table[[p[-1] for p in paths]].topk(4, -1)
        return index, values

    large, small = woven([1], 20, 5, expand)[0], woven([1], 7, 5, expand)[0]
    assert large.first(7) == small and len(large.tokens) == 20
    logp, top = torch.randn(5, 6, generator=gen).log_softmax(-1).sort(-1, descending=True)
    assert ddtree(top, logp, 20).first(7) == ddtree(top, logp, 7)


def test_texts_of_a_folder_are_joined(texts: Path, tmp_path: Path) -> None:
    whole = generate.Texts.load(texts)
    for i, half in enumerate((slice(0, 40), slice(40, None))):
        generate.Texts(whole.rows[half], whole.starts[half], whole.categories[half], whole.temperatures[half]).save(tmp_path / f"{i}.npz")
    joined = generate.Texts.load(tmp_path)
    assert [r.tolist() for r in joined.rows] == [r.tolist() for r in whole.rows]
    assert joined.starts.tolist() == whole.starts.tolist() and joined.categories == whole.categories
    with pytest.raises(FileNotFoundError, match="kozue-train generate"):
        generate.Texts.load(tmp_path / "empty.npz")


def test_gains_are_geometric_means() -> None:
    rows = [{"category": c, "temperature": 0.0, "method": m, "tokens_per_pass": v} for c, m, v in (
        ("code", "dflash chain 16", 2.0), ("code", "ddtree 16", 4.0), ("code", "weaver 16", 4.0), ("chat", "dflash chain 16", 1.0), ("chat", "ddtree 16", 2.0), ("chat", "weaver 16", 8.0))]
    assert evaluate.gains(rows, 16) == "T=0: weaver 16 over ddtree 16: +100.0%\nT=0: weaver 16 over dflash chain 16: +300.0%"


def test_kept_features_train_the_same(toy: Path, texts: Path, tmp_path: Path) -> None:
    """With every text in one batch, the only difference is that the target runs once."""
    for name, keep in (("a", False), ("b", True)):
        dflash.run(options(toy, texts, tmp_path / name, rows=96, anchors=2, steps=3, keep_features=keep))
    a, b = (read_log(tmp_path / name / "dflash.jsonl") for name in "ab")
    assert [r["loss"] for r in a if "loss" in r] == [r["loss"] for r in b if "loss" in r]
    dflash.run(options(toy, texts, tmp_path / "c", steps=60))
    dflash.run(options(toy, texts, tmp_path / "d", steps=2, drafter=tmp_path / "c" / "dflash"))
    first = lambda name: next(r["loss"] for r in read_log(tmp_path / name / "dflash.jsonl") if "loss" in r)
    assert first("d") < 0.9 * first("c")  # it goes on from what was there


def test_prompts_in_rounds_are_all_there() -> None:
    todo = [([1] * (1 + i % 90), "code", 0.0) for i in range(250)]
    ordered = generate.in_rounds(todo, 100)
    assert sorted(len(p) for p, _, _ in ordered) == sorted(len(p) for p, _, _ in todo)
    assert all(len(a[0]) // 16 <= len(b[0]) // 16 for a, b in itertools.pairwise(ordered[:100]))
    assert max(len(p) for p, _, _ in ordered[:100]) > 80 and min(len(p) for p, _, _ in ordered[:100]) < 10
