"""Stage `generate`: the target's own answers to prompts, the text that drafters are trained and measured on."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from kozue_train.frozen import load_frozen, product_dtype
from kozue_train.log import JsonLog


@dataclass
class Texts:
    """Token rows: prompt and answer, where the answer starts, category, temperature."""

    rows: list[np.ndarray]
    starts: np.ndarray
    categories: list[str]
    temperatures: np.ndarray

    def save(self, path: Path) -> None:
        flat = np.concatenate(self.rows) if self.rows else np.zeros(0, dtype=np.uint32)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, tokens=flat.astype(np.uint32), sizes=np.array([len(r) for r in self.rows]), starts=self.starts,
                            categories=np.array(self.categories), temperatures=self.temperatures)

    @staticmethod
    def load(path: Path) -> Texts:
        """One file, or all `.npz` files of a folder."""
        if Path(path).is_dir():
            files = sorted(Path(path).glob("*.npz"))
            if not files:
                raise FileNotFoundError(f"{path}: no .npz file there; run `kozue-train generate` first")
            parts = [Texts.load(f) for f in files]
            return Texts(
                [r for p in parts for r in p.rows], np.concatenate([p.starts for p in parts]), [c for p in parts for c in p.categories],
                np.concatenate([p.temperatures for p in parts]),
            )
        if not Path(path).exists():
            raise FileNotFoundError(f"{path}: not there; run `kozue-train generate` first")
        with np.load(path) as archive:  # each access to an archive member decompresses it: read them once
            f = {name: archive[name] for name in archive.files}
        ends = np.cumsum(f["sizes"])
        return Texts([f["tokens"][e - s : e].astype(np.int64) for s, e in zip(f["sizes"], ends)], f["starts"], [str(c) for c in f["categories"]], f["temperatures"])


@dataclass
class GenerateOptions:
    """`categories` picks some (none: all), `per_category` limits the prompts of each (0: all); `part` of `parts` takes every `parts`-th."""

    target: Path
    prompts: Path
    out: Path
    new_tokens: int = 220
    max_prompt: int = 300
    batch: int = 2048
    categories: tuple[str, ...] = ()
    per_category: int = 0
    part: int = 0
    parts: int = 1
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.7, 1.0)
    stops: tuple[int, ...] = (0, 2)
    device: str = "cuda"
    seconds: float = 1e9
    dtype: str = "auto"


def in_rounds(todo: list[tuple[list[int], str, float]], size: int) -> list[tuple[list[int], str, float]]:
    """A random order, then by length within each `size` prompts: batches need little padding, and a run cut short has prompts of every kind."""
    todo = random.Random(0).sample(todo, len(todo))
    return [x for at in range(0, len(todo), size) for x in sorted(todo[at : at + size], key=lambda x: len(x[0]) // 16)]


def run(options: GenerateOptions) -> Texts:
    """Answers all prompts; stops early (with what is done) when `seconds` are over."""
    began = time.time()
    log = JsonLog(options.out.with_suffix(".jsonl"))
    device = torch.device(options.device)
    torch.manual_seed(7 + options.part)
    target = load_frozen(options.target, device, product_dtype(options.dtype, device))
    tok = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    todo: list[tuple[list[int], str, float]] = []
    sets = json.loads(options.prompts.read_text())
    if unknown := sorted(set(options.categories) - set(sets)):
        raise ValueError(f"{options.prompts}: no category {unknown[0]}; it has {', '.join(sets)}")
    for category, prompts in sets.items():
        if options.categories and category not in options.categories:
            continue
        for i, text in enumerate(prompts[: options.per_category or None]):
            ids = tok.encode(text).ids
            if 1 <= len(ids) <= options.max_prompt and i // len(options.temperatures) % options.parts == options.part:
                todo.append((ids, category, options.temperatures[i % len(options.temperatures)]))
    todo = in_rounds(todo, 4 * options.batch)
    rows: list[np.ndarray] = []
    kept: list[tuple[int, str, float]] = []
    order = list(range(0, len(todo), options.batch))
    for n, at in enumerate(order):
        part = todo[at : at + options.batch]
        answers = target.generate([p for p, _, _ in part], options.new_tokens, [t for _, _, t in part], options.stops)
        for (prompt, category, temperature), answer in zip(part, answers):
            if len(answer) >= 4:
                rows.append(np.array(prompt + answer))
                kept.append((len(prompt), category, temperature))
        log.write(stage="generate", batch=n + 1, of=len(order), rows=len(rows), tokens=sum(len(a) for a in answers), seconds=round(time.time() - began, 1))
        if time.time() - began > options.seconds:
            break
    texts = Texts(rows, np.array([k[0] for k in kept]), [k[1] for k in kept], np.array([k[2] for k in kept]))
    texts.save(options.out)
    return texts
