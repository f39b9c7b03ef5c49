"""Stage `target`: trains kozue-nano. Resumes from `state.pt`; the schedule runs on training seconds.

A run of `planned_seconds` may be cut into any number of calls: learning rate and data mix depend on
the share of the planned seconds that was spent, so a slower or faster machine needs no new numbers.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from kozue_train import loss as losses
from kozue_train.batches import EARLY, Mixer, Prefetch, load_sets
from kozue_train.checkpoint import load_hf, load_resume, save_hf, save_resume
from kozue_train.data import heldout
from kozue_train.data.chat import prompt_text
from kozue_train.log import JsonLog
from kozue_train.model import gated_delta, qwen3_5
from kozue_train.model.config import TargetConfig
from kozue_train.model.decode import generate
from kozue_train.model.qwen3_5 import Target
from kozue_train.optim import Optimizer, schedule


@dataclass
class TargetOptions:
    """Where, how long and how big."""

    data: Path
    out: Path
    config: TargetConfig
    planned_seconds: float = 1200.0
    call_seconds: float = 540.0
    max_steps: int = 10**9
    rows: int = 64
    length: int = 1024
    matrix_lr: float = 3e-3
    other_lr: float = 3e-3
    warmup: float = 0.015
    decay_from: float = 0.6
    late_from: float = 2 / 3
    seed: int = 0
    start_from: Path | None = None
    device: str = "cuda"
    fast: bool = True
    eval_every: int = 500
    stable_copy: bool = False


def setup(options: TargetOptions) -> tuple[torch.device, torch.dtype]:
    """Device, type of the products, and the fast pieces where asked for."""
    device = torch.device(options.device)
    torch.manual_seed(options.seed)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.set_float32_matmul_precision("high")
    if options.fast:
        gated_delta.use_fast()
        qwen3_5.compile_pieces()
        losses.compile_loss()
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def validation(model: Target, val: dict[str, np.ndarray], length: int, rows: int, device: torch.device) -> dict[str, float]:
    """Mean loss per token on the first rows of every validation set."""
    out = {}
    weight = model.get_parameter("model.embed_tokens.weight")
    for name, tokens in val.items():
        n = min(rows, (len(tokens) - 1) // length)
        if n < 1:
            continue
        batch = np.stack([tokens[i * length : (i + 1) * length + 1] for i in range(n)]).astype(np.int64)
        if n < rows:
            batch = np.concatenate([batch, np.zeros((rows - n, length + 1), dtype=np.int64)])
        t = torch.from_numpy(batch).to(device)
        targets = t[:, 1:].clone()
        targets[n:] = -1
        # With gradients on, although none is used: without them every compiled piece would be compiled again.
        hidden, _ = model(t[:, :-1])
        value = losses.tied_cross_entropy(hidden.reshape(-1, hidden.shape[-1]), weight, targets.reshape(-1))
        out[name] = round(float(value.detach()), 4)
    return out


def run_tests(answer: str, prompt: heldout.Prompt) -> bool:
    """True where the last top-level function of an answer passes the prompt's tests."""
    match = re.search(r"```(?:python)?\n(.*?)(```|$)", answer, re.DOTALL)
    code = match.group(1) if match else answer
    names = re.findall(r"^def (\w+)", code, re.MULTILINE)
    if not names:
        return False
    try:
        for args, want in prompt.tests:
            with contextlib.redirect_stdout(io.StringIO()):
                if not heldout.equal(heldout._timed(code, names[-1], args, 1.0), want):
                    return False
    except (Exception, heldout._Slow, SystemExit):  # noqa: BLE001 - whatever a model writes may fail in any way
        return False
    return True


def code_score(model: Target, tok: Tokenizer, dtype: torch.dtype, new_tokens: int = 220) -> tuple[float, list[dict[str, Any]]]:
    """Share of held-out prompts solved by greedy answers, and the answers."""
    prompts = [tok.encode(prompt_text(p.text)).ids for p in heldout.CODE]
    answers = [tok.decode(a, skip_special_tokens=True) for a in generate(model, prompts, new_tokens, [0.0] * len(prompts), dtype=dtype)]
    rows = [{"prompt": p.text, "answer": a, "pass": run_tests(a, p)} for p, a in zip(heldout.CODE, answers)]
    return sum(bool(r["pass"]) for r in rows) / len(rows), rows


SAMPLES = [
    "Write a Python function to merge two sorted lists.", "Who are you?", "What is 37 + 58?", "Name three fruits.", "What is the capital of France?",
    'Extract name and age as JSON from this text: "Hugo is 41 years old and lives in Rome."', "Write a short story about a fox.", "Explain what a list comprehension is.",
]


def run(options: TargetOptions) -> dict[str, Any]:
    """Trains until the call's seconds, the plan or max_steps is used up; saves; returns a summary."""
    began_call = time.time()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    log = JsonLog(out / "target.jsonl")
    device, dtype = setup(options)
    train, val = load_sets(options.data / "shards", list(EARLY))
    log.write(stage="target", event="data", tokens={k: len(v) for k, v in train.items()}, seconds=round(time.time() - began_call, 1))
    model = Target(options.config, dtype)
    model.initialise(options.seed)
    if options.start_from:
        model.load_state_dict(load_hf(options.start_from).state_dict())
    model.to(device)
    optimizer = Optimizer(list(model.named_parameters()), options.matrix_lr, options.other_lr)
    step, spent, tokens = 0, 0.0, 0
    state = out / "state.pt"
    if state.exists():
        saved = load_resume(state, device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent, tokens = saved["step"], saved["spent"], saved["tokens"]
    mixer = Mixer(train, options.length, options.seed + step, options.late_from)
    plan = {"progress": spent / options.planned_seconds}
    feed = Prefetch(lambda: mixer.batch(options.rows, plan["progress"]), device)
    weight = model.get_parameter("model.embed_tokens.weight")
    log.write(stage="target", event="start", step=step, spent=round(spent, 1), parameters=sum(p.numel() for p in model.parameters()), ready=round(time.time() - began_call, 1))
    window: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    steps_here = 0
    copied = False
    clock = last = time.time()
    while steps_here < options.max_steps and spent < options.planned_seconds and time.time() - began_call < options.call_seconds:
        progress = plan["progress"] = spent / options.planned_seconds
        scale = schedule(progress, options.warmup, options.decay_from)
        if options.stable_copy and not copied and progress >= options.decay_from:
            save_hf(model, out / "stable")
            copied = True
        t = feed.next()
        hidden, _ = model(t[:, :-1])
        value = losses.tied_cross_entropy(hidden.reshape(-1, hidden.shape[-1]), weight, t[:, 1:].reshape(-1))
        value.backward()
        norms.append(optimizer.step(scale))
        window.append(value.detach())
        step, steps_here, tokens = step + 1, steps_here + 1, tokens + t[:, 1:].numel()
        if steps_here <= 3 or step % 20 == 0:
            mean = float(torch.stack(window).mean())
            now = time.time()
            rate = len(window) * options.rows * options.length / (now - last)
            log.write(stage="target", step=step, loss=round(mean, 4), norm=round(float(norms[-1]), 3), lr=round(scale, 4), tokens=tokens, tokens_per_s=round(rate), spent=round(spent, 1))
            if not np.isfinite(mean):
                raise FloatingPointError(f"loss is {mean} at step {step}; lower the learning rate")
            window, norms, last = [], [], now
        # Compilation (the first steps of a call) is not training time.
        now = time.time()
        if steps_here > 3:
            spent += now - clock
        clock = now
        if options.eval_every and step % options.eval_every == 0:
            log.write(stage="target", event="validation", step=step, loss_by_set=validation(model, val, options.length, options.rows, device))
            clock = last = time.time()
    feed.close()
    if device.type == "cuda":
        torch.cuda.synchronize()
    save_resume(state, model=model.state_dict(), optimizer=optimizer.state_dict(), step=step, spent=spent, tokens=tokens)
    save_hf(model, out / "kozue-nano-bf16")
    summary: dict[str, Any] = {"step": step, "tokens": tokens, "spent": round(spent, 1), "epochs": mixer.epochs(), "validation": validation(model, val, options.length, options.rows, device)}
    if device.type == "cuda":
        summary["memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    log.write(stage="target", event="end", **summary, call_seconds=round(time.time() - began_call, 1))
    tokenizer = options.data / "tokenizer" / "tokenizer.json"
    if tokenizer.exists() and options.config.vocab_size > 1000:
        tok = Tokenizer.from_file(str(tokenizer))
        score, rows = code_score(model, tok, dtype)
        asked = [tok.encode(prompt_text(s)).ids for s in SAMPLES]
        texts = [tok.decode(a, skip_special_tokens=True) for a in generate(model, asked, 200, [0.0] * len(asked), dtype=dtype)]
        summary["heldout_code"] = score
        log.write(stage="target", event="samples", step=step, heldout_code=score, samples=dict(zip(SAMPLES, texts)), seconds=round(time.time() - began_call, 1))
        (out / "heldout_answers.json").write_text(json.dumps(rows, indent=1))
    return summary
