"""Proposal trees: chains, DDTree from marginals (arXiv 2604.12989), best-first trees with a Weaver.

A tree is a list of nodes (parent, token); node 0 is the root, the last token of the text so far.
The budget counts the root, as the rows of the verify pass do.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Tree:
    """parents[i] < i; tokens[0] is the root's."""

    parents: list[int] = field(default_factory=lambda: [-1])
    tokens: list[int] = field(default_factory=lambda: [-1])

    def add(self, parent: int, token: int) -> int:
        self.parents.append(parent)
        self.tokens.append(token)
        return len(self.tokens) - 1

    def first(self, budget: int) -> Tree:
        """The tree of its first `budget` nodes."""
        return Tree(self.parents[:budget], self.tokens[:budget])

    def accepted(self, path: list[int]) -> int:
        """How many tokens of `path` (what the target chose after the root) lie in the tree."""
        children = {(p, t): i for i, (p, t) in enumerate(zip(self.parents, self.tokens)) if i}
        node = count = 0
        for token in path:
            nxt = children.get((node, token))
            if nxt is None:
                break
            node, count = nxt, count + 1
        return count


def chain(top: Tensor, budget: int) -> Tree:
    """The drafter's argmax at every depth. top [depth, k] token ids in falling order of probability."""
    tree, node = Tree(), 0
    for token in top[: budget - 1, 0].tolist():
        node = tree.add(node, token)
    return tree


def ddtree(top: Tensor, logp: Tensor, budget: int) -> Tree:
    """The `budget - 1` most probable prefixes under independent positions. logp [depth, k] falling."""
    depth, width = top.shape
    table, tokens = logp.tolist(), top.tolist()
    tree = Tree()
    heap: list[tuple[float, int, int, int, int]] = []
    order = 0
    if depth:
        heap.append((-table[0][0], order, 0, 0, 0))  # cost, tie-break, parent node, depth, rank
    while heap and len(tree.tokens) < budget:
        cost, _, parent, d, rank = heapq.heappop(heap)
        node = tree.add(parent, tokens[d][rank])
        if rank + 1 < width:
            order += 1
            heapq.heappush(heap, (cost + table[d][rank] - table[d][rank + 1], order, parent, d, rank + 1))
        if d + 1 < depth:
            order += 1
            heapq.heappush(heap, (cost - table[d + 1][0], order, node, d + 1, 0))
    return tree


# Given the index of each sample and the tokens of a path from the root (root included), the
# candidates [n, width] and their log-probabilities for the next token.
Expand = Callable[[list[int], list[list[int]]], tuple[Tensor, Tensor]]


def woven(roots: list[int], budget: int, max_depth: int, expand: Expand) -> list[Tree]:
    """Best-first trees for many samples at once; one node of every tree is expanded a round."""
    trees = [Tree(tokens=[r]) for r in roots]
    paths: list[list[list[int]]] = [[[r]] for r in roots]
    heaps: list[list[tuple[float, int, int, int]]] = [[] for _ in roots]  # cost, tie-break, parent, token
    orders = [0] * len(roots)
    fresh = [(i, 0, 0.0) for i in range(len(roots))]
    while fresh:
        ready = [(i, node, cost) for i, node, cost in fresh if len(paths[i][node]) <= max_depth]
        if ready:
            tokens, logp = expand([i for i, _, _ in ready], [paths[i][node] for i, node, _ in ready])
            for (i, node, cost), row, values in zip(ready, tokens.tolist(), logp.tolist()):
                for token, value in zip(row, values):
                    orders[i] += 1
                    heapq.heappush(heaps[i], (cost - min(value, 0.0), orders[i], node, token))
        fresh = []
        for i, tree in enumerate(trees):
            if heaps[i] and len(tree.tokens) < budget:
                cost, _, parent, token = heapq.heappop(heaps[i])
                node = tree.add(parent, token)
                paths[i].append(paths[i][parent] + [token])
                if len(tree.tokens) < budget:
                    fresh.append((i, node, cost))
    return trees


def shortlist(logits: Tensor, width: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Indices and log-probabilities of the `width` best of each row; the tree assumes T = 1 for greedy decoding."""
    logp = (logits / (temperature if temperature > 0 else 1.0)).log_softmax(-1)
    values, index = logp.topk(min(width, logits.shape[-1]), -1)
    return index, values
