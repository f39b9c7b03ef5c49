"""Small programming tasks: what the function does, in words, and correct bodies for it.

Hand-written families live in `families/*.tasks` (a block: names, typed arguments, descriptions,
bodies separated by `---`); `grids.py` adds combinations. Everything here is run on sample inputs
when a data set is built, so a body that raises or disagrees with its siblings is found.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORDS = ["apple", "banana", "cherry", "river", "stone", "cloud", "garden", "silver", "window", "yellow", "planet", "basket", "candle", "dragon", "forest", "guitar", "hammer", "island", "jacket", "kitten", "lemon", "market", "needle", "orange", "pencil", "rabbit", "summer", "ticket", "violet", "winter", "zebra", "book", "tree", "level", "noon", "cat", "dog", "sun", "moon", "star", "rain", "snow", "wind", "fire", "lake", "bird", "fish", "door", "lamp", "road", "ship", "song", "game", "hill", "king", "leaf", "milk", "nest", "open", "paper", "queen", "radar", "school", "train", "umbrella", "voice", "water", "xenon", "yard", "bread", "chair", "dance", "eagle", "flute", "grape", "horse", "igloo", "juice"]
NAMES = ["Ana", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Paul", "Quinn", "Rosa", "Sam", "Tina", "Uma", "Victor", "Wendy", "Yara", "Zoe"]


def _ints(r: random.Random, low: int, high: int, n: int) -> list[int]:
    return [r.randint(low, high) for _ in range(n)]


def _deep(r: random.Random, depth: int = 0) -> list[Any]:
    return [_deep(r, depth + 1) if depth < 2 and r.random() < 0.35 else r.randint(0, 9) for _ in range(r.randint(1, 4))]


GENERATORS: dict[str, Callable[[random.Random], Any]] = {
    "int": lambda r: r.randint(-20, 40),
    "posint": lambda r: r.choice([r.randint(1, 12), r.randint(1, 60), r.randint(10, 200)]),
    "smallint": lambda r: r.randint(1, 8),
    "zero": lambda r: 0,
    "idx": lambda r: r.randint(0, 3),
    "base": lambda r: r.choice([2, 3, 8, 16]),
    "year": lambda r: r.choice([1900, 1996, 2000, 2019, 2023, 2024, 2100]),
    "month": lambda r: r.randint(1, 12),
    "percent": lambda r: r.choice([5, 10, 15, 20, 25, 50]),
    "meters": lambda r: r.choice([1.6, 1.7, 1.75, 1.8, 2.0]),
    "float": lambda r: r.choice([0.5, 1.5, 2.0, 2.5, 3.0, 10.0, 12.5]),
    "score": lambda r: r.randint(40, 100),
    "bool": lambda r: r.random() < 0.5,
    "coins": lambda r: r.choice([[1, 2, 5], [1, 5, 10], [2, 5]]),
    "list[int]": lambda r: _ints(r, -9, 20, r.randint(4, 7)),
    "list[bool]": lambda r: [r.random() < 0.5 for _ in range(r.randint(3, 5))],
    "digits": lambda r: _ints(r, 0, 9, r.randint(3, 5)),
    "shortlist": lambda r: _ints(r, 1, 9, 3),
    "sorted": lambda r: sorted(_ints(r, 0, 30, r.randint(3, 6))),
    "paired": lambda r: (lambda xs: r.sample(xs[:3] * 2 + [xs[3]], 7))(r.sample(range(1, 20), 4)),
    "str": lambda r: r.choice([r.choice(WORDS), "Hello World", "Python 3", "banana", "Level", "a1b2c3", r.choice(WORDS).capitalize() + " " + r.choice(WORDS)]),
    "word": lambda r: r.choice(WORDS),
    "short": lambda r: r.choice(["abc", "ab", "cat", "dog"]),
    "name": lambda r: r.choice(NAMES),
    "letter": lambda r: r.choice("aeiounrst"),
    "sep": lambda r: r.choice([",", "-", " ", ", "]),
    "bits": lambda r: bin(r.randint(1, 60))[2:],
    "digitstr": lambda r: "".join(r.choice(string.digits) for _ in range(r.randint(8, 12))),
    "roman": lambda r: r.choice(["III", "IV", "IX", "XIV", "XL", "XC", "MCMXCIV"]),
    "sentence": lambda r: " ".join(r.choice(WORDS) for _ in range(r.randint(3, 5))),
    "mixed": lambda r: f"{r.choice(WORDS)} {r.randint(1, 99)} {r.choice(WORDS)} {r.randint(1, 99)}",
    "brackets": lambda r: r.choice(["(a + b) * (c)", "(()", "([]{})", "((a))", "([)]"]),
    "email": lambda r: f"{r.choice(NAMES).lower()}@{r.choice(['example.com', 'mail.org', 'site.net'])}",
    "filename": lambda r: r.choice(WORDS) + r.choice([".txt", ".py", ".tar.gz", ""]),
    "pairs": lambda r: ",".join(f"{k}={r.randint(1, 9)}" for k in r.sample("abcxyz", 3)),
    "clock": lambda r: f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}",
    "camel": lambda r: r.choice(WORDS) + r.choice(WORDS).capitalize() + r.choice(WORDS).capitalize(),
    "snake": lambda r: r.choice(WORDS) + "_" + r.choice(WORDS) + "_" + r.choice(WORDS),
    "list[str]": lambda r: [r.choice(WORDS) for _ in range(r.randint(3, 5))],
    "dict[str,int]": lambda r: {k: r.randint(1, 20) for k in r.sample(WORDS, r.randint(2, 4))},
    "dict[str,list]": lambda r: {k: _ints(r, 50, 100, 3) for k in r.sample(NAMES, 2)},
    "matrix": lambda r: (lambda c: [_ints(r, -5, 9, c) for _ in range(r.randint(2, 3))])(r.randint(2, 3)),
    "square": lambda r: [_ints(r, 0, 9, 2) for _ in range(2)],
    "deep": _deep,
    "pairs_list": lambda r: [(r.choice(WORDS), r.randint(1, 20)) for _ in range(3)],
    "int_pairs": lambda r: [(r.randint(0, 9), r.randint(0, 9)) for _ in range(r.randint(2, 4))],
    "records": lambda r: [{"name": n, "age": r.randint(8, 60)} for n in r.sample(NAMES, 3)],
    "graph": lambda r: r.choice([
        {"A": ["B", "C"], "B": ["D"], "C": ["D"], "D": []}, {"A": ["B"], "B": ["C"], "C": ["A"], "D": ["A"]},
    ]),
    "start": lambda r: "A",
    "end": lambda r: r.choice("BCD"),
    "mixed_list": lambda r: r.choice([[1, "a", 0, "", 2], [0, 3, "b"], [[], 1, [2]], [2.5, "x", -1, 0], ["", "c"], [5, 6]]),
    "numstrs": lambda r: [str(r.randint(1, 99)) for _ in range(3)],
}


def _missing(r: random.Random) -> list[int]:
    n = r.randint(4, 7)
    xs = list(range(n + 1))
    xs.pop(r.randint(0, n))
    r.shuffle(xs)
    return xs


GENERATORS["permutation"] = _missing

HINTS = {
    "list[int]": "list[int]", "digits": "list[int]", "shortlist": "list[int]", "sorted": "list[int]", "permutation": "list[int]",
    "paired": "list[int]", "coins": "list[int]", "list[str]": "list[str]", "numstrs": "list[str]", "list[bool]": "list[bool]",
    "dict[str,int]": "dict[str, int]", "dict[str,list]": "dict[str, list[int]]", "matrix": "list[list[int]]", "square": "list[list[int]]",
    "deep": "list", "pairs_list": "list[tuple[str, int]]", "int_pairs": "list[tuple[int, int]]", "records": "list[dict]", "graph": "dict[str, list[str]]",
    "mixed_list": "list", "bool": "bool", "meters": "float", "float": "float",
}
STRING_TYPES = {
    "str", "word", "short", "name", "letter", "sep", "bits", "digitstr", "roman", "sentence", "mixed", "brackets", "email",
    "filename", "pairs", "clock", "camel", "snake", "start", "end",
}

ALIASES: dict[str, list[str]] = {
    "nums": ["nums", "numbers", "nums", "lst", "values", "arr", "numbers", "data", "xs"],
    "num": ["num", "n", "x", "value", "num", "number"],
    "s": ["s", "text", "s", "string", "s"],
    "char": ["char", "c", "ch", "char", "letter"],
    "words": ["words", "strings", "items", "words", "names"],
    "word": ["word", "w", "word", "item"],
    "d": ["d", "data", "mapping", "dictionary", "counts_by_name"],
    "total": ["total", "result", "total", "acc", "total_sum"],
    "result": ["result", "result", "output", "res", "out"],
    "count": ["count", "total", "count", "counter"],
    "matrix": ["matrix", "grid", "matrix", "rows_list"],
    "n": ["n", "n", "number", "num"],
}


@dataclass
class Task:
    """One task. `codes` are bodies (indented by four) that may use the canonical argument names."""

    key: str
    names: list[str]
    args: list[tuple[str, str]]
    descriptions: list[str]
    codes: list[str]
    sentence_end: str = ""
    examples: list[tuple[tuple[Any, ...], Any]] = field(default_factory=list)

    def source(self, code: str, name: str | None = None) -> str:
        """The whole function under `name` (default: the first name, which recursive bodies call)."""
        text = f"def {self.names[0]}({', '.join(a for a, _ in self.args)}):\n{code}"
        return re.sub(rf"\b{self.names[0]}\b", name, text) if name else text


def hint(kind: str) -> str:
    """Type hint of an argument kind."""
    return HINTS.get(kind, "str" if kind in STRING_TYPES else "int")


def parse_families(text: str, origin: str) -> list[Task]:
    """Reads a `.tasks` file; raises ValueError with the block that is wrong."""
    tasks = []
    for block in re.split(r"\n(?=# )", "\n" + text.strip()):
        if not block.strip():
            continue
        lines = block.strip("\n").split("\n")
        try:
            names = lines[0][2:].split("|")
            args = [(p.split(":")[0].strip(), p.split(":", 1)[1].strip()) for p in re.split(r",(?![^\[]*\])", lines[1])]
            unknown = [k for _, k in args if k not in GENERATORS]
            if unknown:
                raise ValueError(f"unknown argument kinds {unknown}")
            codes = ["\n".join(lines[3:])] if "---" not in lines else "\n".join(lines[3:]).split("\n---\n")
            tasks.append(Task(f"{origin}/{names[0]}/{'-'.join(k for _, k in args)}", names, args, lines[2].split("|"), [c.rstrip() for c in codes]))
        except (IndexError, ValueError) as error:
            raise ValueError(f"{origin}.tasks, block {lines[0]!r}: {error}") from error
    return tasks


def load_families() -> list[Task]:
    """All hand-written families."""
    folder = Path(__file__).parent / "families"
    return [t for f in sorted(folder.glob("*.tasks")) for t in parse_families(f.read_text(), f.stem)]


def call(source: str, name: str, args: tuple[Any, ...]) -> Any:
    """Runs one of our own functions on copies of the arguments."""
    import copy

    scope: dict[str, Any] = {}
    exec(compile(source, "<task>", "exec"), scope)  # our own templates, never package code
    return scope[name](*copy.deepcopy(args))


def find_examples(task: Task, rng: random.Random, wanted: int = 4) -> bool:
    """Fills task.examples; False where bodies raise or disagree."""
    tries = 0
    while len(task.examples) < wanted and tries < 25:
        tries += 1
        args = tuple(GENERATORS[kind](rng) for _, kind in task.args)
        try:
            values = [call(task.source(code), task.names[0], args) for code in task.codes]
        except (IndexError, ValueError, ZeroDivisionError, TypeError, KeyError):
            continue
        if any(repr(v) != repr(values[0]) and v != values[0] for v in values[1:]):
            if any(isinstance(v, set) or "most" in task.names[0] or task.names[0] in ("mode",) for v in values):
                continue
            return False
        if len(repr(values[0])) <= 90 and len(repr(args)) <= 120:
            task.examples.append((args, values[0]))
    return len(task.examples) > 0
