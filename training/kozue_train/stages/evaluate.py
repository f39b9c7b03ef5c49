"""Stage `eval`: tokens per verify pass on the target's own text, by category, method, budget, temperature.

The text is what the target chose, so walking it through a drafted tree gives the number of accepted
tokens of real speculative decoding; no second run of the target is needed. A pass yields the
accepted tokens and one more.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kozue_train.frozen import Frozen, load_frozen
from kozue_train.log import JsonLog
from kozue_train.model.dflash import DFlash, load_dflash
from kozue_train.model.weaver import Weaver, load_weaver
from kozue_train.stages.generate import Texts
from kozue_train.trees import Tree, chain, ddtree, shortlist, woven


@dataclass
class EvalOptions:
    target: Path
    texts: Path
    drafter: Path
    out: Path
    weaver: Path | None = None
    budgets: tuple[int, ...] = (8, 16, 32, 64)
    per_category: int = 24
    length: int = 512
    width: int = 8
    group: int = 16
    device: str = "cpu"


@dataclass
class Drafted:
    """What one row needs for every method, for each anchor of its answer."""

    row: list[int]
    start: int
    top: Tensor
    logp: Tensor
    pool: Tensor | None
    prior: Tensor | None
    states: Tensor | None


@torch.no_grad()
def draft_row(target: Frozen, drafter: DFlash, row: np.ndarray, start: int, temperature: float, group: int, pool_size: int) -> Drafted:
    """Drafts at every position of the answer, some anchors at a time."""
    device = target.head.device
    ids = torch.from_numpy(row).to(device)[None]
    features = target.features(ids, drafter.config.target_layer_ids)
    tops, logps, pools, priors, states = [], [], [], [], []
    anchors = torch.arange(start, len(row) - 1, device=device)
    for at in range(0, len(anchors), group):
        some = anchors[at : at + group]
        hidden = drafter(features.taps, ids[0, some][None], some[None], target.embedding)[0]
        logits = (hidden[:, 1:] @ target.head.to(hidden.dtype).t()).float()
        index, values = shortlist(logits, 64, temperature)
        tops.append(index.cpu())
        logps.append(values.cpu())
        if pool_size:
            prior, pool = logits.topk(pool_size, -1)
            priors.append(prior)
            pools.append(pool)
            before = features.hidden[0, some - 1]
            states.append(torch.cat((before[:, None], hidden[:, 1:]), 1))
    join = lambda parts: torch.cat(parts) if parts else None
    return Drafted(row.tolist(), start, torch.cat(tops), torch.cat(logps), join(pools), join(priors), join(states))


def weave(weaver: Weaver, target: Frozen, drafted: list[Drafted], anchors: list[int], budget: int, width: int, temperature: float) -> list[Tree]:
    """One woven tree for each (row, anchor)."""
    device = target.head.device
    spots = [a - d.start for d, a in zip(drafted, anchors)]
    states = torch.stack([d.states[s] for d, s in zip(drafted, spots)])  # type: ignore[index]
    pools = torch.stack([d.pool[s] for d, s in zip(drafted, spots)])  # type: ignore[index]
    priors = torch.stack([d.prior[s] for d, s in zip(drafted, spots)])  # type: ignore[index]

    @torch.no_grad()
    def expand(which: list[int], paths: list[list[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, paths))
        tokens = torch.tensor([p + [0] * (longest - len(p)) for p in paths], device=device)
        depth = torch.tensor([len(p) - 1 for p in paths], device=device)
        index = torch.tensor(which, device=device)
        query = weaver(states[index], target.embedding[tokens].to(states.dtype))
        query = query[torch.arange(len(paths), device=device), depth]
        pool, prior = pools[index, depth], priors[index, depth]
        logits = prior + torch.einsum("nd,nkd->nk", query, target.head[pool].to(query.dtype)).float()
        best, logp = shortlist(logits, width, temperature)
        return pool.gather(1, best), logp

    roots = [d.row[a] for d, a in zip(drafted, anchors)]
    return woven(roots, budget, weaver.config.K, expand)


def passes(drafted: list[Drafted], build: Any, depth: int) -> list[float]:
    """Tokens per pass of each row; `build(rows, anchors)` gives their trees."""
    anchors = [d.start for d in drafted]
    counts = [0] * len(drafted)
    active = [i for i, d in enumerate(drafted) if d.start < len(d.row) - 1]
    while active:
        trees = build([drafted[i] for i in active], [anchors[i] for i in active])
        for i, tree in zip(active, trees):
            d = drafted[i]
            anchors[i] += 1 + tree.accepted(d.row[anchors[i] + 1 : anchors[i] + 1 + depth])
            counts[i] += 1
        active = [i for i in active if anchors[i] < len(drafted[i].row) - 1]
    return [(len(d.row) - 1 - d.start) / c for d, c in zip(drafted, counts) if c]


def interval(values: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean and a 95% bootstrap interval."""
    a = np.array(values)
    draws = np.random.default_rng(seed).choice(a, size=(1000, len(a))).mean(1)
    return float(a.mean()), float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))


def run(options: EvalOptions) -> list[dict[str, Any]]:
    """Measures every method; writes eval.json and prints a table."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = load_frozen(options.target, device, dtype)
    drafter = load_dflash(options.drafter).to(device)
    weaver = load_weaver(options.weaver).to(device) if options.weaver else None
    texts = Texts.load(options.texts)
    log = JsonLog(options.out / "eval.jsonl", echo=False)
    groups: dict[tuple[str, float], list[int]] = defaultdict(list)
    for i, row in enumerate(texts.rows):
        key = (texts.categories[i], float(texts.temperatures[i]))
        if len(row) - texts.starts[i] >= 8 and texts.starts[i] >= 1 and len(groups[key]) < options.per_category:
            groups[key].append(i)
    depth = drafter.config.block_size - 1
    results: list[dict[str, Any]] = []
    for (category, temperature), members in sorted(groups.items()):
        pool = weaver.config.candidate_pool_size if weaver else 0
        drafted = [draft_row(target, drafter, texts.rows[i][: options.length], int(texts.starts[i]), temperature, options.group, pool) for i in members]
        methods: dict[str, Any] = {
            "plain": lambda ds, xs: [Tree() for _ in ds],
            f"dflash chain {depth + 1}": lambda ds, xs: [chain(d.top[a - d.start], depth + 1) for d, a in zip(ds, xs)],
        }
        for budget in options.budgets:
            methods[f"ddtree {budget}"] = lambda ds, xs, n=budget: [ddtree(d.top[a - d.start], d.logp[a - d.start], n) for d, a in zip(ds, xs)]
            if weaver:
                methods[f"weaver {budget}"] = lambda ds, xs, n=budget: weave(weaver, target, ds, xs, n, options.width, temperature)
        for name, build in methods.items():
            mean, low, high = interval(passes(drafted, build, depth))
            results.append({"category": category, "temperature": temperature, "method": name, "tokens_per_pass": round(mean, 3), "low": round(low, 3), "high": round(high, 3), "texts": len(members)})
            log.write(stage="eval", **results[-1])
    (options.out / "eval.json").write_text(json.dumps(results, indent=1))
    print(table(results))
    return results


def table(results: list[dict[str, Any]]) -> str:
    """Methods down, category and temperature across; mean with the half width of its interval."""
    columns = sorted({(r["category"], r["temperature"]) for r in results})
    methods = list(dict.fromkeys(r["method"] for r in results))
    cell = {(r["method"], r["category"], r["temperature"]): f"{r['tokens_per_pass']:.2f} ±{(r['high'] - r['low']) / 2:.2f}" for r in results}
    head = "| tokens per pass | " + " | ".join(f"{c} T={t:g}" for c, t in columns) + " |"
    lines = [head, "|" + "---|" * (len(columns) + 1)]
    lines += ["| " + m + " | " + " | ".join(cell.get((m, c, t), "") for c, t in columns) + " |" for m in methods]
    return "\n".join(lines)
