"""Rows of tokens out of shards: which set a row comes from follows weights that change with progress."""

from __future__ import annotations

import json
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from kozue_train.data.shards import read_shard

STREAMED = ("code", "prose")

# Share of rows by set: in the first part of a run, and in its last.
EARLY = {"code": 0.40, "prose": 0.10, "tasks": 0.26, "maths": 0.10, "talk": 0.07, "exercises": 0.07}
LATE = {"code": 0.14, "prose": 0.05, "tasks": 0.51, "maths": 0.13, "talk": 0.12, "exercises": 0.05}


def load_sets(folder: Path, names: list[str]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Training and validation tokens of each set that is there."""
    jobs: list[tuple[str, Path]] = []
    train: dict[str, np.ndarray] = {}
    val: dict[str, np.ndarray] = {}
    for name in names:
        jobs += [(name, p) for p in sorted(folder.glob(f"{name}.[0-9]*.*"))]
        if (folder / f"{name}.val.xz").exists():
            val[name] = read_shard(folder / f"{name}.val.xz")
    with ThreadPoolExecutor(16) as pool:
        parts = list(pool.map(lambda j: (j[0], read_shard(j[1])), jobs))
    for name in names:
        own = [a for n, a in parts if n == name]
        if own:
            train[name] = np.concatenate(own)
    if not train:
        raise FileNotFoundError(f"{folder}: no token shards there; run `kozue-train data` first")
    return train, val


class RowSource:
    """Rows of length + 1 tokens of one set; a new order, and new cuts, every epoch."""

    def __init__(self, tokens: np.ndarray, length: int, streamed: bool, seed: int) -> None:
        self.tokens, self.length, self.streamed = tokens, length, streamed
        self.rng = np.random.default_rng(seed)
        self.starts = np.zeros(0, dtype=np.int64) if streamed else np.concatenate(([0], np.flatnonzero(tokens == 0)[:-1] + 1))
        self.epoch = -1
        self.order: np.ndarray = np.zeros(0, dtype=np.int64)
        self.at = 0

    def _refill(self) -> None:
        n, length = len(self.tokens), self.length
        if n < length + 1:
            raise ValueError(f"a set has {n} tokens, fewer than one row of {length + 1}; use a shorter row or more data")
        self.epoch += 1
        first = int(self.rng.integers(0, min(length, n - length)))
        if self.streamed:
            rows = np.arange(first, n - length, length)
        else:
            # Each row begins with a document; the rest of the document that a row cuts off is skipped.
            rows_list = []
            i = int(np.searchsorted(self.starts, first))
            while i < len(self.starts) and self.starts[i] + length + 1 <= n:
                rows_list.append(self.starts[i])
                i = int(np.searchsorted(self.starts, self.starts[i] + length))
            rows = np.array(rows_list or [0], dtype=np.int64)
        self.order = self.rng.permutation(rows)
        self.at = 0

    def take(self) -> np.ndarray:
        """The next row."""
        if self.at >= len(self.order):
            self._refill()
        s = int(self.order[self.at])
        self.at += 1
        return self.tokens[s : s + self.length + 1]


class Mixer:
    """Batches [rows, length + 1] drawn from the sets by weights."""

    def __init__(self, train: dict[str, np.ndarray], length: int, seed: int, late_from: float = 2 / 3) -> None:
        self.late_from = late_from
        self.sources = {n: RowSource(t, length, n in STREAMED, seed * 100 + i) for i, (n, t) in enumerate(train.items())}
        self.rng = np.random.default_rng(seed)

    def batch(self, rows: int, progress: float) -> np.ndarray:
        weights = EARLY if progress < self.late_from else LATE
        names = list(self.sources)
        p = np.array([weights.get(n, 0.05) for n in names])
        picked = self.rng.choice(len(names), size=rows, p=p / p.sum())
        return np.stack([self.sources[names[i]].take() for i in picked]).astype(np.int64)

    def epochs(self) -> dict[str, float]:
        """How often each set was gone through."""
        return {n: round(s.epoch + s.at / max(1, len(s.order)), 2) for n, s in self.sources.items()}


class Prefetch:
    """Runs `make()` in a thread, some batches ahead; batches arrive as pinned int64 tensors."""

    def __init__(self, make: object, device: torch.device, depth: int = 8) -> None:
        self.make, self.device = make, device
        self.queue: queue.Queue[torch.Tensor] = queue.Queue(depth)
        self.stop = False
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while not self.stop:
            t = torch.from_numpy(self.make())  # type: ignore[operator]
            if self.device.type == "cuda":
                t = t.pin_memory()
            while not self.stop:
                try:
                    self.queue.put(t, timeout=0.2)
                    break
                except queue.Full:
                    continue

    def next(self) -> torch.Tensor:
        return self.queue.get().to(self.device, non_blocking=True)

    def close(self) -> None:
        self.stop = True


def shard_facts(folder: Path) -> dict[str, object]:
    """Sizes of all sets, from the files that the data stage wrote."""
    return {p.stem: json.loads(p.read_text()) for p in sorted(Path(folder).glob("*.json"))}
