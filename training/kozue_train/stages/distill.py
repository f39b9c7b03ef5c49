"""Stage `distill`: the target (or a drafter, or a Weaver) learns to live with the engine's rounding.

The student runs with the weights and inputs that the engine would use (`quantise`); its teacher is
the same model before rounding. Loss for the target: KL(teacher || student) over the whole vocabulary
on text of the data stage. Drafter and Weaver go on with their own loss, their weights rounded.
The result is an ordinary bfloat16 checkpoint that `kozue quantize` then rounds with less damage.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kozue_train.batches import LATE, Mixer, load_sets
from kozue_train.checkpoint import (
    copy_beside,
    load_hf,
    load_resume,
    save_hf,
    save_resume,
)
from kozue_train.log import JsonLog
from kozue_train.model.qwen3_5 import Target
from kozue_train.optim import Optimizer, schedule
from kozue_train.quantise import Format, Rounded, _rounded_product


@dataclass
class DistillOptions:
    target: Path
    data: Path
    out: Path
    bits: int = 4
    rows: int = 16
    length: int = 512
    steps: int = 1000
    call_seconds: float = 1e9
    planned_seconds: float = 0.0  # 0: the schedule runs on steps, else on training seconds
    matrix_lr: float = 1e-4
    other_lr: float = 1e-4
    seed: int = 0
    device: str = "cuda"
    check_rows: int = 16


def student_logits(student: Rounded, ids: Tensor) -> Tensor:
    """Logits with rounded weights, hidden state and head."""
    weights = student.weights()
    hidden, _ = student(ids, weights=weights)
    head = weights["model.embed_tokens.weight"]
    return _rounded_product(hidden, head) if student.form.inputs else hidden @ head.to(hidden.dtype).t()


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Mean over tokens of KL(teacher || student), from logits."""
    log_p, log_q = teacher.float().log_softmax(-1), student.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


@torch.no_grad()
def perplexities(teacher: Target, student: Rounded, val: dict[str, np.ndarray], length: int, rows: int, device: torch.device) -> dict[str, tuple[float, float, float]]:
    """Perplexity of teacher and student, and KL between them, on the first rows of each validation set."""
    out = {}
    for name, tokens in val.items():
        n = min(rows, (len(tokens) - 1) // length)
        if n < 1:
            continue
        t = torch.from_numpy(np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(n)]).astype(np.int64)).to(device)
        sums = [0.0, 0.0, 0.0]
        for row in t.split(4):
            both = teacher.logits(teacher(row[:, :-1])[0]), student_logits(student, row[:, :-1])
            for k, logits in enumerate(both):
                sums[k] += float(torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), row[:, 1:].flatten(), reduction="sum"))
            sums[2] += float(kl(*both)) * len(row) * length
        out[name] = (math.exp(sums[0] / (n * length)), math.exp(sums[1] / (n * length)), sums[2] / (n * length))
    return out


def loss_in_percent(figures: dict[str, tuple[float, float, float]]) -> float:
    """By how many percent the student's perplexity is above the teacher's, geometric mean over the sets."""
    return 100 * (math.exp(sum(math.log(b / a) for a, b, _ in figures.values()) / len(figures)) - 1)


def mean_kl(figures: dict[str, tuple[float, float, float]]) -> float:
    return round(sum(k for _, _, k in figures.values()) / len(figures), 6)


def run(options: DistillOptions) -> dict[str, Any]:
    """Trains or goes on; writes `out/distilled` (HF folder) and figures before and after."""
    began = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    log = JsonLog(options.out / "distill.jsonl")
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(options.seed)
    if device.type == "cuda":
        from kozue_train.model import gated_delta

        torch.set_float32_matmul_precision("high")
        gated_delta.use_fast(compile_products=False)
    teacher = load_hf(options.target, dtype).to(device).requires_grad_(False)
    model = copy.deepcopy(teacher).requires_grad_(True)
    student = Rounded(model, Format(options.bits))
    optimizer = Optimizer(list(model.named_parameters()), options.matrix_lr, options.other_lr, weight_decay=0.0)
    state, step, spent = options.out / "state.pt", 0, 0.0
    if state.exists():
        saved = load_resume(state, device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent = saved["step"], saved["spent"]
    train, val = load_sets(options.data / "shards", list(LATE))
    before = perplexities(teacher, student, val, options.length, options.check_rows, device)
    log.write(stage="distill", event="before", step=step, loss_percent=round(loss_in_percent(before), 3), perplexities_and_kl=before)
    mixer = Mixer(train, options.length, options.seed + step)
    window: list[Tensor] = []
    clock = time.time()
    while time.time() - began < options.call_seconds:
        progress = spent / options.planned_seconds if options.planned_seconds else step / options.steps
        if progress >= 1:
            break
        ids = torch.from_numpy(mixer.batch(options.rows, 0.9)[:, :-1]).to(device)
        with torch.no_grad():
            wanted = teacher.logits(teacher(ids)[0])
        value = kl(wanted, student_logits(student, ids))
        value.backward()
        scale = schedule(progress, 0.05, 0.3, 0.02)
        optimizer.step(scale)
        window.append(value.detach())
        step += 1
        now = time.time()
        spent, clock = spent + now - clock, now
        if step % 20 == 0 or step == options.steps:
            log.write(stage="distill", step=step, loss=round(float(torch.stack(window).mean()), 5), lr=round(scale, 4), seconds=round(time.time() - began, 1))
            window = []
    student.calls = 0
    after = perplexities(teacher, student, val, options.length, options.check_rows, device)
    summary = {"step": step, "loss_percent_before": round(loss_in_percent(before), 3), "loss_percent": round(loss_in_percent(after), 3), "kl_before": mean_kl(before), "kl": mean_kl(after)}
    log.write(stage="distill", event="end", **summary, perplexities_and_kl=after)
    save_resume(state, model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, spent=spent)
    save_hf(model, options.out / "distilled")
    copy_beside(options.target, options.out / "distilled")
    return summary
