"""Stage `eval`: tokens per verify pass on the target's own text, by category, method, budget, temperature.

The text is what the target chose, so walking it through a drafted tree gives the number of accepted
tokens of real speculative decoding; no second run of the target is needed. A pass yields the
accepted tokens and one more. Woven trees are grown once per position, to the largest budget: they
grow best first, so the tree of a smaller budget is the beginning of that of a larger one.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kozue_train.frozen import Frozen, load_frozen, product_dtype
from kozue_train.log import JsonLog
from kozue_train.model.dflash import DFlash, load_dflash
from kozue_train.model.weaver import Weaver, load_weaver
from kozue_train.stages.generate import Texts
from kozue_train.trees import Tree, chain, ddtree, shortlist, woven


@dataclass
class EvalOptions:
    """`chunk` trees are woven side by side; `processes` share the device, each with its categories."""

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
    chunk: int = 1024
    processes: int = 1
    device: str = "cpu"
    dtype: str = "auto"


@dataclass
class Drafted:
    """What one row needs for every method, for each anchor of its answer; `woven` is filled by `weave`."""

    row: list[int]
    start: int
    top: Tensor
    logp: Tensor
    pool: Tensor | None
    prior: Tensor | None
    states: Tensor | None
    woven: list[Tree]


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
    return Drafted(row.tolist(), start, torch.cat(tops), torch.cat(logps), join(pools), join(priors), join(states), [])


@torch.no_grad()
def weave(weaver: Weaver, target: Frozen, drafted: list[Drafted], budget: int, width: int, temperature: float, chunk: int) -> None:
    """A woven tree for every anchor of every row."""
    device = target.head.device
    join = lambda parts: torch.cat(list(parts))
    all_states, all_pools, all_priors = (join(getattr(d, n) for d in drafted) for n in ("states", "pool", "prior"))
    roots = [token for d in drafted for token in d.row[d.start : -1]]
    trees: list[Tree] = []
    for at in range(0, len(roots), chunk):
        states, pools, priors = (t[at : at + chunk] for t in (all_states, all_pools, all_priors))

        def expand(which: list[int], paths: list[list[int]], states: Tensor = states, pools: Tensor = pools, priors: Tensor = priors) -> tuple[Tensor, Tensor]:
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

        trees += woven(roots[at : at + chunk], budget, weaver.config.K, expand)
    for d in drafted:
        d.woven, trees = trees[: len(d.row) - 1 - d.start], trees[len(d.row) - 1 - d.start :]


def passes(drafted: list[Drafted], build: Callable[[Drafted, int], Tree], depth: int) -> list[float]:
    """Tokens per pass of each row; `build(row, anchor)` gives the tree, the anchor counted from the answer's start."""
    out = []
    for d in drafted:
        at, count = d.start, 0
        while at < len(d.row) - 1:
            at += 1 + build(d, at - d.start).accepted(d.row[at + 1 : at + 1 + depth])
            count += 1
        if count:
            out.append((len(d.row) - 1 - d.start) / count)
    return out


def interval(values: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean and a 95% bootstrap interval."""
    a = np.array(values)
    draws = np.random.default_rng(seed).choice(a, size=(1000, len(a))).mean(1)
    return float(a.mean()), float(np.quantile(draws, 0.025)), float(np.quantile(draws, 0.975))


def measure(options: EvalOptions, cells: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Every method on the texts of some (category, temperature)."""
    device = torch.device(options.device)
    target = load_frozen(options.target, device, product_dtype(options.dtype, device))
    drafter = load_dflash(options.drafter).to(device)
    weaver = load_weaver(options.weaver).to(device) if options.weaver else None
    texts = Texts.load(options.texts)
    groups = cells_of(texts, options.per_category)
    depth = drafter.config.block_size - 1
    results: list[dict[str, Any]] = []
    for category, temperature in cells:
        members = groups[(category, temperature)]
        pool = weaver.config.candidate_pool_size if weaver else 0
        drafted = [draft_row(target, drafter, texts.rows[i][: options.length], int(texts.starts[i]), temperature, options.group, pool) for i in members]
        methods: dict[str, Callable[[Drafted, int], Tree]] = {"plain": lambda d, a: Tree(), f"dflash chain {depth + 1}": lambda d, a: chain(d.top[a], depth + 1)}
        if weaver:
            weave(weaver, target, drafted, max(options.budgets), options.width, temperature, options.chunk)
        for budget in options.budgets:
            methods[f"ddtree {budget}"] = lambda d, a, n=budget: ddtree(d.top[a], d.logp[a], n)  # type: ignore[misc]
            if weaver:
                methods[f"weaver {budget}"] = lambda d, a, n=budget: d.woven[a].first(n)  # type: ignore[misc]
        for name, build in methods.items():
            mean, low, high = interval(passes(drafted, build, depth))
            results.append({"category": category, "temperature": temperature, "method": name, "tokens_per_pass": round(mean, 3), "low": round(low, 3), "high": round(high, 3), "texts": len(members)})
    return results


def cells_of(texts: Texts, per_category: int) -> dict[tuple[str, float], list[int]]:
    """The texts of each (category, temperature) that are measured: the first `per_category` of at least 8 tokens."""
    groups: dict[tuple[str, float], list[int]] = defaultdict(list)
    for i, row in enumerate(texts.rows):
        key = (texts.categories[i], float(texts.temperatures[i]))
        if len(row) - texts.starts[i] >= 8 and texts.starts[i] >= 1 and len(groups[key]) < per_category:
            groups[key].append(i)
    return groups


def run(options: EvalOptions) -> list[dict[str, Any]]:
    """Measures every method; writes eval.json and prints a table."""
    texts = Texts.load(options.texts)
    groups = cells_of(texts, options.per_category)
    # The longest cells first, dealt out in turn.
    cells = sorted(groups, key=lambda c: -sum(len(texts.rows[i]) - int(texts.starts[i]) for i in groups[c]))
    if not cells:
        raise ValueError(f"{options.texts}: no answer of at least 8 tokens there; generate longer answers")
    n = min(options.processes, len(cells))
    if n > 1:
        with torch.multiprocessing.get_context("spawn").Pool(n) as pool:
            parts = pool.starmap(measure, [(options, cells[i::n]) for i in range(n)])
    else:
        parts = [measure(options, cells)]
    results = sorted((r for p in parts for r in p), key=lambda r: (r["category"], r["temperature"]))
    log = JsonLog(options.out / "eval.jsonl", echo=False)
    for r in results:
        log.write(stage="eval", **r)
    (options.out / "eval.json").write_text(json.dumps(results, indent=1))
    print(table(results))
    print(gains(results, 16 if 16 in options.budgets else options.budgets[0]))
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


def gains(results: list[dict[str, Any]], budget: int) -> str:
    """By how many percent the Weaver tree is above chain and DDTree: geometric means over the categories."""
    value = {(r["method"], r["category"], r["temperature"]): r["tokens_per_pass"] for r in results}
    lines = []
    for t in sorted({r["temperature"] for r in results}):
        for other in sorted({m for m, _, _ in value if m.startswith("dflash chain")} | {f"ddtree {budget}"}):
            ratios = [value[(f"weaver {budget}", c, t)] / value[(other, c, t)] for m, c, u in value if m == other and u == t and (f"weaver {budget}", c, t) in value]
            if ratios:
                lines.append(f"T={t:g}: weaver {budget} over {other}: {100 * (math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1):+.1f}%")
    return "\n".join(lines)
