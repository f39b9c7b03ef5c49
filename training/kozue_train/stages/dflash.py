"""Stage `dflash`: trains a drafter for a frozen target on the target's own text.

Each step takes rows of text and random anchors inside the answers. An anchor's token is clean, the
15 after it are masked; the block sees the target's features of the tokens before the anchor only.
Loss: cross entropy on rows 1..15, weight exp(-(k - 1) / gamma) (arXiv 2602.06036, section 2.3).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kozue_train.checkpoint import load_resume, save_resume
from kozue_train.frozen import Frozen, Remembered, load_frozen, product_dtype
from kozue_train.log import JsonLog
from kozue_train.loss import frozen_cross_entropy
from kozue_train.model.dflash import (
    DFlash,
    DFlashConfig,
    default_taps,
    load_dflash,
    save_dflash,
)
from kozue_train.optim import Optimizer, schedule
from kozue_train.quantise import Format, Rounded
from kozue_train.stages.generate import Texts


CHECK_EVERY, CHECK_BATCHES = 500, 8


@dataclass
class DrafterOptions:
    """Shared by `dflash` and `weaver`."""

    target: Path
    texts: Path
    out: Path
    rows: int = 64
    length: int = 384
    anchors: int = 16
    steps: int = 4000
    call_seconds: float = 1e9
    planned_seconds: float = 0.0  # 0: the schedule runs on steps, else on training seconds
    matrix_lr: float = 3e-3
    other_lr: float = 1e-3
    gamma: float = 7.0
    seed: int = 0
    device: str = "cuda"
    dtype: str = "auto"
    held_out: Path | None = None  # texts that are not trained on: their figures are logged every `CHECK_EVERY` steps
    keep_features: bool = False  # batches of fixed texts, whose features are computed once
    # dflash
    layers: int = 3
    intermediate: int = 1024
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 128
    taps: int = 5
    block: int = 16
    mask_id: int = 5
    rope_theta: float = 10000.0
    # distillation: train with weights and inputs rounded to these bits (0: not)
    bits: int = 0
    # the drafter to go on from, or that a Weaver is trained for
    drafter: Path | None = None
    # weaver; `weaver` is the one to go on from
    weaver: Path | None = None
    rank: int = 384
    weaver_heads: int = 3
    mlp: int = 768
    pool: int = 128
    mix: float = 0.5


@dataclass
class Anchors:
    """A batch: ids [B, T], anchor positions [B, A], block tokens [B, A, W] and which of them exist."""

    ids: Tensor
    anchors: Tensor
    blocks: Tensor
    valid: Tensor


class AnchorBatches:
    """Draws rows and anchors; rows longer than `length` are cut."""

    def __init__(self, texts: Texts, options: DrafterOptions, device: torch.device, block: int, seed: int) -> None:
        self.options, self.device, self.block = options, device, block
        self.rng = np.random.default_rng(seed)
        usable = [i for i, r in enumerate(texts.rows) if min(len(r), options.length) - texts.starts[i] >= 3]
        if not usable:
            raise ValueError(f"{options.texts}: no answer of at least 3 tokens within {options.length} tokens; generate longer answers or raise the length")
        # Sorted by size, so that a batch needs little padding.
        self.usable = sorted(usable, key=lambda i: len(texts.rows[i]))
        self.texts = texts

    def next(self) -> Anchors:
        """One batch; its T is the longest row rounded up to 64."""
        o, rng = self.options, self.rng
        at = int(rng.integers(0, max(1, len(self.usable) - o.rows + 1)))
        if o.keep_features:
            at -= at % o.rows
        picked = [self.usable[(at + j) % len(self.usable)] for j in range(o.rows)]
        sizes = [min(len(self.texts.rows[i]), o.length) for i in picked]
        width = -(-max(sizes) // 64) * 64
        ids = np.zeros((o.rows, width), dtype=np.int64)
        anchors = np.zeros((o.rows, o.anchors), dtype=np.int64)
        blocks = np.zeros((o.rows, o.anchors, self.block), dtype=np.int64)
        valid = np.zeros((o.rows, o.anchors, self.block), dtype=bool)
        for b, (i, n) in enumerate(zip(picked, sizes)):
            row = self.texts.rows[i][:n]
            ids[b, :n] = row
            anchors[b] = np.sort(rng.integers(self.texts.starts[i], n - 1, size=o.anchors))
            place = anchors[b][:, None] + np.arange(self.block)
            valid[b] = place < n
            blocks[b] = row[np.minimum(place, n - 1)]
        put = lambda a: torch.from_numpy(a).to(self.device, non_blocking=True)
        return Anchors(put(ids), put(anchors), put(blocks), put(valid))


def drafter_config(options: DrafterOptions, target: Frozen) -> DFlashConfig:
    return DFlashConfig(
        hidden_size=target.hidden_size, vocab_size=target.head.shape[0], num_target_layers=target.layers, mask_token_id=options.mask_id,
        target_layer_ids=default_taps(target.layers, options.taps), intermediate_size=options.intermediate, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, num_key_value_heads=options.kv_heads, head_dim=options.head_dim, block_size=options.block, rope_theta=options.rope_theta,
    )


def row_weights(block: int, gamma: float, device: torch.device) -> Tensor:
    """exp(-(k - 1) / gamma) for k = 1..block-1."""
    return torch.exp(-torch.arange(block - 1, device=device, dtype=torch.float32) / gamma)


def drafter_loss(model: DFlash | Rounded, target: Frozen, batch: Anchors, gamma: float) -> tuple[Tensor, Tensor]:
    """Weighted mean cross entropy, and the mean number of leading greedy hits (accepted tokens of a chain)."""
    features = target.features(batch.ids, model.config.target_layer_ids)
    hidden = model(features.taps, batch.blocks[:, :, 0], batch.anchors, target.embedding)[:, :, 1:]
    labels, valid = batch.blocks[:, :, 1:], batch.valid[:, :, 1:]
    weight = row_weights(model.config.block_size, gamma, hidden.device) * valid
    total, best = frozen_cross_entropy(hidden.reshape(-1, hidden.shape[-1]), target.head, labels.reshape(-1), weight.reshape(-1))
    right = (best.view(labels.shape) == labels) & valid
    # Blocks cut short by the end of the text are left out of the count.
    whole = valid.all(-1)
    run = right.int().cumprod(-1).sum(-1).float()
    accepted = (run * whole).sum() / whole.sum().clamp(min=1)
    return total / weight.sum().clamp(min=1e-6), accepted


def training_loop(
    options: DrafterOptions, stage: str, model: torch.nn.Module, batches: AnchorBatches, device: torch.device,
    step_loss: Any, export: Any,
) -> dict[str, Any]:
    """Shared loop: schedule on steps or seconds, resume from state.pt, JSON lines log, export at the end."""
    held = AnchorBatches(Texts.load(options.held_out), options, device, batches.block, 0) if options.held_out else None
    began = time.time()
    log = JsonLog(options.out / f"{stage}.jsonl")
    optimizer = Optimizer([(n, p) for n, p in model.named_parameters()], options.matrix_lr, options.other_lr, weight_decay=0.05)
    state, step, spent = options.out / "state.pt", 0, 0.0
    if state.exists():
        saved = load_resume(state, device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent = saved["step"], saved["spent"]
    batches.rng = np.random.default_rng(options.seed + step)
    log.write(stage=stage, event="start", step=step, parameters=sum(p.numel() for p in model.parameters()))
    window: list[dict[str, Tensor]] = []
    first, last, clock = step, time.time(), time.time()
    while time.time() - began < options.call_seconds:
        progress = spent / options.planned_seconds if options.planned_seconds else step / options.steps
        if progress >= 1:
            break
        figures = step_loss(batches.next())
        figures["loss"].backward()
        scale = schedule(progress, 0.04, 0.5, 0.02)
        figures["norm"] = optimizer.step(scale)
        window.append({k: v.detach() for k, v in figures.items()})
        step += 1
        now = time.time()
        spent, clock = spent + (now - clock if step - first > 2 else 0.0), now
        if step - first <= 2 or step % 50 == 0 or step == options.steps:
            means = {k: round(float(torch.stack([w[k] for w in window]).float().mean()), 4) for k in window[0]}
            now = time.time()
            log.write(stage=stage, step=step, lr=round(scale, 4), ms=round(1000 * (now - last) / len(window), 1), **means)
            if not np.isfinite(means["loss"]):
                raise FloatingPointError(f"loss is {means['loss']} at step {step}; lower the learning rate")
            window, last = [], now
        if held and (step == 1 or step % CHECK_EVERY == 0):
            log.write(stage=stage, step=step, **held_figures(held, step_loss))
            last = clock = time.time()
    save_resume(state, model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, spent=spent)
    export()
    log.write(stage=stage, event="end", step=step, seconds=round(time.time() - began, 1))
    return {"step": step}


@torch.no_grad()
def held_figures(held: AnchorBatches, step_loss: Any) -> dict[str, float]:
    """Means over the same few batches of texts that training does not see; every name begins with `held_`."""
    held.rng = np.random.default_rng(0)
    seen = [step_loss(held.next()) for _ in range(CHECK_BATCHES)]
    return {f"held_{k}": round(float(torch.stack([s[k] for s in seen]).float().mean()), 4) for k in seen[0]}


def prepare(options: DrafterOptions) -> tuple[torch.device, torch.dtype, Frozen]:
    """Device, type of the products and the frozen target (with Triton kernels for ours on a GPU)."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    dtype = product_dtype(options.dtype, device)
    if dtype is torch.bfloat16 and device.type == "cpu":
        torch.set_float32_matmul_precision("medium")  # float32 products too may use the matrix units
    if device.type == "cuda":
        from kozue_train.model import gated_delta

        torch.set_float32_matmul_precision("high")
        gated_delta.use_fast(compile_products=False)
    target = load_frozen(options.target, device, dtype)
    return device, dtype, Remembered(target) if options.keep_features else target


def run(options: DrafterOptions) -> dict[str, Any]:
    """Trains or goes on training; writes `out/dflash` in z-lab's format."""
    options.out.mkdir(parents=True, exist_ok=True)
    device, _, target = prepare(options)
    if options.drafter:
        model = load_dflash(options.drafter)
    else:
        model = DFlash(drafter_config(options, target))
        model.initialise(options.seed)
    model.to(device)
    runner = Rounded(model, Format(options.bits)) if options.bits else model
    batches = AnchorBatches(Texts.load(options.texts), options, device, model.config.block_size, options.seed)
    # Start with outputs of the size that the head is used to: the RMS of the target's final hidden states.
    seen = target.features(batches.next().ids, model.config.target_layer_ids[:1]).hidden
    with torch.no_grad():
        if not options.drafter:
            model.norm.weight.copy_(0.5 * seen.float().pow(2).mean((0, 1)).sqrt())

    def step_loss(batch: Anchors) -> dict[str, Tensor]:
        loss, accepted = drafter_loss(runner, target, batch, options.gamma)
        return {"loss": loss, "accepted": accepted}

    return training_loop(options, "dflash", model, batches, device, step_loss, lambda: save_dflash(model, options.out / "dflash"))
