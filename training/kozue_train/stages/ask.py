"""Stage `ask`: questions that the target itself writes, as prompts for `generate`.

A chat model that is given its template up to where the user speaks goes on with a question of the kind that it was
trained on (arXiv 2406.08464): as many different ones as are wanted, and follow-up questions to its own answers.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from kozue_train.frozen import load_frozen, product_dtype
from kozue_train.log import JsonLog
from kozue_train.stages.generate import Texts

QUESTION, ANSWER, SECOND = "QUESTION-1", "ANSWER-1", "QUESTION-2"


@dataclass
class AskOptions:
    """`count` questions are drawn, fewer are kept. `after`: follow-ups to these texts instead of first questions. `avoid`: prompts that must not come out.

    `borrow`: questions that another model asked, its folder in `borrow_from`, for a model that asks too little by itself.
    """

    target: Path
    out: Path
    count: int
    after: Path | None = None
    avoid: tuple[Path, ...] = ()
    borrow: Path | None = None
    borrow_from: Path | None = None
    temperature: float = 1.0
    new_tokens: int = 96
    max_row: int = 320
    batch: int = 16384
    stops: tuple[int, ...] = (0, 2)
    seed: int = 0
    device: str = "cuda"
    dtype: str = "auto"


@dataclass
class Frame:
    """The chat template around a question: before the first one, between an answer and the next one, after it."""

    before: str
    between: str
    after: str

    @staticmethod
    def of(tokenizer: Any) -> Frame:
        one = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], tokenize=False, add_generation_prompt=True)
        turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": SECOND}]
        two = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, after = one.split(QUESTION)
        return Frame(before, two[two.index(ANSWER) + len(ANSWER) : two.index(SECOND)], after)


def plain(question: str) -> str:
    """What two questions that differ in case, spaces and marks alone have in common."""
    return re.sub(r"\W+", " ", question).strip().lower()


def beginnings(options: AskOptions, frame: Frame, tok: Tokenizer) -> list[list[int]]:
    """Token rows up to where the user speaks."""
    first = tok.encode(frame.before).ids
    if options.after is None:
        return [first] * options.count
    end, *rest = tok.encode(frame.between).ids
    texts = Texts.load(options.after)
    usable = [i for i, row in enumerate(texts.rows) if row[-1] == end and len(row) <= options.max_row]
    if not usable:
        raise ValueError(f"{options.after}: no finished answer within {options.max_row} tokens; generate longer answers")
    order = torch.randperm(len(usable), generator=torch.Generator().manual_seed(options.seed)).tolist()
    return [texts.rows[usable[i]].tolist() + rest for i in order[: options.count]]


def questions_of(path: Path, frame: Frame) -> list[str]:
    """The questions of a prompts file, out of their template."""
    return [p.removeprefix(frame.before).removesuffix(frame.after) for ps in json.loads(path.read_text()).values() for p in ps]


def drawn(options: AskOptions, frame: Frame, seen: set[str]) -> list[str]:
    """New questions of the target in their template; none that is in `seen`, which grows."""
    began = time.time()
    log = JsonLog(options.out.with_suffix(".jsonl"))
    device = torch.device(options.device)
    torch.manual_seed(11 + options.seed)
    tok = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    begun = beginnings(options, frame, tok)
    target = load_frozen(options.target, device, product_dtype(options.dtype, device))
    kept: list[str] = []
    for at in range(0, len(begun), options.batch):
        part = begun[at : at + options.batch]
        asked = target.generate(part, options.new_tokens, [options.temperature] * len(part), options.stops)
        for start, ids in zip(part, asked):
            question = tok.decode(ids[:-1], skip_special_tokens=False).strip()
            key = plain(question)
            if not ids or ids[-1] not in options.stops or len(key) < 6 or "<|" in question or "\ufffd" in question or key in seen:
                continue
            seen.add(key)
            kept.append(tok.decode(start, skip_special_tokens=False) + question + frame.after)
        log.write(stage="ask", asked=at + len(part), kept=len(kept), seconds=round(time.time() - began, 1))
    return kept


def run(options: AskOptions) -> list[str]:
    """Writes `out`, prompts of one category: `own`, with `after` `follow-up`, with `borrow` `borrowed`."""
    from transformers import AutoTokenizer

    if (options.borrow is None) != (options.borrow_from is None):
        raise ValueError("questions of another model need its prompts file and its folder; give both --borrow and --borrow-from")
    frame = Frame.of(AutoTokenizer.from_pretrained(options.target))
    seen = {plain(q) for path in options.avoid for q in questions_of(path, frame)}
    if options.borrow and options.borrow_from:
        asked = questions_of(options.borrow, Frame.of(AutoTokenizer.from_pretrained(options.borrow_from)))[: options.count]
        category, kept = "borrowed", [frame.before + q + frame.after for q in asked if plain(q) not in seen]
    else:
        category, kept = "own" if options.after is None else "follow-up", drawn(options, frame, seen)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({category: kept}))
    return kept
