"""Stage `data`: packages on disk -> manifest, tokenizer, token shards, held-out sets.

Everything is a function of the packages (listed with sha256 in the manifest) and a seed. Each set
is written as it is finished, and a set whose shards exist is not made again, so the stage resumes.
"""

from __future__ import annotations

import json
import lzma
import multiprocessing
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from kozue_train.data import corpus, heldout, instruct, maths, questions, talk
from kozue_train.data.chat import Chat, prompt_text
from kozue_train.data.compose import composed
from kozue_train.data.functions import Exercise, exercises
from kozue_train.data.grids import all_grids
from kozue_train.data.shards import encode, save_tokenizer, train_tokenizer, write_shard
from kozue_train.data.singles import single_tasks
from kozue_train.data.tasks import Task, find_examples, load_families
from kozue_train.log import JsonLog

SAMPLES_PER_JOB = 2000
FAVOUR = {"transformers": 9_000_000, "homeassistant": 5_000_000}


@dataclass
class DataOptions:
    """Sizes of the stage. `chats` are numbers of conversations per set."""

    raw: Path
    out: Path
    vocab_size: int = 16384
    seed: int = 0
    tasks: int = 400_000
    maths: int = 200_000
    talk: int = 100_000
    shard_tokens: int = 8_000_000
    processes: int = 2
    prompts: int = 4000
    compositions: int = 30_000
    families_only: bool = False
    compress: bool = True


class Pool:
    """Tasks grouped so that a draw is even over families and kinds of grid."""

    def __init__(self, tasks: list[Task]) -> None:
        self.families = [t for t in tasks if t.key.split("/")[0] in ("numbers", "strings", "lists", "tables")]
        self.composed = [t for t in tasks if t.key.startswith("compose/")]
        groups: dict[str, list[Task]] = defaultdict(list)
        for t in tasks:
            parts = t.key.split("/")
            if parts[0] not in ("numbers", "strings", "lists", "tables", "compose"):
                groups["/".join(parts[:2])].append(t)
        self.groups = list(groups.values())
        self.weights = [len(g) ** 0.5 for g in self.groups]

    def draw(self, r: random.Random) -> Task:
        """A family (0.3), a composition (0.4), or a task of a grid."""
        share = r.random()
        if not self.groups or share < 0.3:
            return r.choice(self.families)
        if self.composed and share < 0.7:
            return r.choice(self.composed)
        return r.choice(r.choices(self.groups, self.weights)[0])


def every_task(options: DataOptions) -> list[Task]:
    """The families, and unless told otherwise all grids, single tasks and compositions."""
    tasks = load_families()
    if not options.families_only:
        tasks += all_grids() + single_tasks() + composed(random.Random(options.seed + 1), options.compositions)
    return tasks


def usable_tasks(options: DataOptions, log: JsonLog) -> list[Task]:
    """All tasks that no held-out prompt asks for; the decision is cached in dropped.json."""
    tasks = every_task(options)
    cache = options.out / "dropped.json"
    if cache.exists():
        dropped = set(json.loads(cache.read_text()))
    else:
        dropped = {t.key for t in tasks if heldout.solves(t) is not None}
        cache.write_text(json.dumps(sorted(dropped), indent=0))
    log.write(stage="data", step="tasks", all=len(tasks), dropped=len(dropped))
    return [t for t in tasks if t.key not in dropped]


def task_chat(r: random.Random, pool: Pool) -> Chat:
    """One conversation about a task."""
    task = pool.draw(r)
    if not task.examples:
        find_examples(task, r, 6)
    kind = r.random()
    made: Chat | None = None
    if kind < 0.08:
        made = instruct.repair_chat(r, task)
    elif kind < 0.25:
        made = instruct.edit_chat(r, task)
    elif kind < 0.30:
        made = instruct.two_step_chat(r, task)
    return made or instruct.write_chat(r, task)


_STATE: dict[str, object] = {}


def _start(out: str, tasks: list[Task], found: list[Exercise], talks: list[list[str]]) -> None:
    _STATE.update(tok=Tokenizer.from_file(str(Path(out) / "tokenizer" / "tokenizer.json")), pool=Pool(tasks), exercises=found, talks=talks)


def chats_of(name: str, seed: int, count: int, state: dict[str, object]) -> Iterator[str]:
    """`count` conversations of one set, as text."""
    r = random.Random(f"{name}/{seed}")
    pool, found, talks = state["pool"], state["exercises"], state["talks"]
    assert isinstance(pool, Pool) and isinstance(found, list) and isinstance(talks, list)
    for _ in range(count):
        if name == "tasks":
            yield task_chat(r, pool).text()
        elif name == "maths":
            yield maths.maths_chat(r).text()
        elif name == "talk":
            chat = talk.conversation_chat(r, r.choice(talks)) if talks and r.random() < 0.25 else None
            yield (chat or talk.talk_chat(r)).text()
        else:
            yield instruct.exercise_chat(r, r.choice(found)).text()


def _job(job: tuple[str, int, int]) -> np.ndarray:
    name, seed, count = job
    tok = _STATE["tok"]
    assert isinstance(tok, Tokenizer)
    return np.concatenate(list(encode(tok, chats_of(name, seed, count, _STATE))))


def _encode_job(texts: list[str]) -> np.ndarray:
    tok = _STATE["tok"]
    assert isinstance(tok, Tokenizer)
    return np.concatenate(list(encode(tok, texts)))


def _write_set(options: DataOptions, log: JsonLog, name: str, arrays: Iterator[np.ndarray]) -> None:
    """Streams arrays into shards; up to 300k tokens of its start become its validation shard."""
    folder = options.out / "shards"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / f"{name}.json"
    began, total, size, index = time.time(), 0, 0, 0
    buffer: list[np.ndarray] = []
    held = 0

    def store(index: int, parts: list[np.ndarray]) -> int:
        return write_shard(folder / f"{name}.{index:03d}{'.xz' if options.compress else '.npy'}", np.concatenate(parts))

    for a in arrays:
        if index == 0 and not held:
            # Whole texts, at most half of what there is: a small set must leave some to train on.
            ends = np.flatnonzero(a == 0) + 1
            held = int(ends[max(int(np.searchsorted(ends, min(300_000, len(a) // 2), side="right")) - 1, 0)])
            write_shard(folder / f"{name}.val.xz", a[:held])
            a = a[held:]
        buffer.append(a)
        if sum(map(len, buffer)) >= options.shard_tokens:
            total, index, size = total + sum(map(len, buffer)), index + 1, size + store(index, buffer)
            buffer = []
    if buffer:
        total, index, size = total + sum(map(len, buffer)), index + 1, size + store(index, buffer)
    facts = {"tokens": total, "bytes": size, "shards": index, "validation_tokens": held}
    done.write_text(json.dumps(facts))
    log.write(stage="data", step="set", name=name, seconds=round(time.time() - began, 1), **facts)


def _tokenizer_texts(docs: list[corpus.Document], tasks: list[Task], found: list[Exercise], talks: list[list[str]], r: random.Random) -> Iterator[str]:
    state: dict[str, object] = {"pool": Pool(tasks), "exercises": found, "talks": talks}
    for name, count in (("tasks", 20_000), ("maths", 6_000), ("talk", 8_000), ("exercises", min(4_000, 4 * len(found)))):
        yield from chats_of(name, 10**6, count, state)
    budget = {"code": 16_000_000, "prose": 12_000_000}
    for d in r.sample(docs, len(docs)):
        if budget[d.kind] > 0:
            budget[d.kind] -= len(d.text)
            yield d.text


@dataclass
class Sources:
    """What was taken out of the packages."""

    documents: list[corpus.Document]
    exercises: list[Exercise]
    conversations: list[list[str]]


def save_sources(path: Path, sources: Sources) -> None:
    """One xz file of JSON lines, so that the packages are read once (and the rest can be made elsewhere)."""
    with lzma.open(path, "wt", preset=2) as f:
        for name, items in (("document", sources.documents), ("exercise", sources.exercises)):
            for item in items:
                f.write(json.dumps([name, asdict(item)]) + "\n")  # type: ignore[call-overload]
        for turns in sources.conversations:
            f.write(json.dumps(["conversation", turns]) + "\n")


def load_sources(path: Path) -> Sources:
    """Inverse of `save_sources`."""
    out = Sources([], [], [])
    with lzma.open(path, "rt") as f:
        for line in f:
            name, item = json.loads(line)
            if name == "document":
                out.documents.append(corpus.Document(**item))
            elif name == "exercise":
                out.exercises.append(Exercise(**item))
            else:
                out.conversations.append(item)
    return out


def read_packages(options: DataOptions) -> Sources:
    """Documents, documented functions and conversations of all packages; writes the manifest."""
    manifest, docs = corpus.collect(options.raw, favour=FAVOUR)
    (options.out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    random.Random(options.seed).shuffle(docs)
    found: dict[str, Exercise] = {}
    for d in docs:
        if d.kind == "code":
            for e in exercises(d.text):
                if not heldout.NAMES.match(e.name):
                    found.setdefault(re.sub(r"\s+", "", e.code_without_doc), e)
    chat_wheel = next(iter(sorted((options.raw / "wheels").glob("chitchat_dataset-*.whl"))), None)
    return Sources(docs, list(found.values()), list(corpus.conversations(chat_wheel)) if chat_wheel else [])


def run(options: DataOptions) -> None:
    """The whole stage."""
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    log = JsonLog(out / "data.jsonl")
    packed = out / "sources.jsonl.xz"
    if packed.exists():
        sources = load_sources(packed)
    else:
        sources = read_packages(options)
        save_sources(packed, sources)
    docs, listed, talks = sources.documents, sources.exercises, sources.conversations
    r = random.Random(options.seed)
    log.write(stage="data", step="sources", documents=len(docs), code_bytes=sum(len(d.text) for d in docs if d.kind == "code"),
              prose_bytes=sum(len(d.text) for d in docs if d.kind == "prose"), exercises=len(listed), conversations=len(talks))
    tasks = usable_tasks(options, log)
    if not (out / "tokenizer" / "tokenizer.json").exists():
        tok = train_tokenizer(_tokenizer_texts(docs, tasks, listed, talks, r), options.vocab_size)
        save_tokenizer(tok, out / "tokenizer")
        log.write(stage="data", step="tokenizer", vocab=tok.get_vocab_size())
    (out / "heldout.json").write_text(json.dumps([{"prompt": p.text, "tests": p.tests} for p in heldout.CODE], indent=1))
    with multiprocessing.get_context("fork").Pool(options.processes, _start, (str(out), tasks, listed, talks)) as workers:
        for kind in ("prose", "code"):
            if not (out / "shards" / f"{kind}.json").exists():
                texts = [d.text for d in docs if d.kind == kind]
                step = max(1, min(100, len(texts) // 4))  # the first batch becomes the validation shard
                _write_set(options, log, kind, workers.imap(_encode_job, [texts[i : i + step] for i in range(0, len(texts), step)]))
        for name, count in (("tasks", options.tasks), ("maths", options.maths), ("talk", options.talk), ("exercises", 4 * len(listed))):
            if count and not (out / "shards" / f"{name}.json").exists():
                jobs = [(name, i, min(SAMPLES_PER_JOB, count)) for i in range(max(2, -(-count // SAMPLES_PER_JOB)))]
                _write_set(options, log, name, workers.imap(_job, jobs))
    save_prompts(out, tasks, sources, options.prompts)


def save_prompts(out: Path, tasks: list[Task], sources: Sources, count: int) -> None:
    """Prompts (up to the answer) for the target's own generations, by category, and held-out ones for evaluation."""
    found = sources.exercises
    state: dict[str, object] = {"pool": Pool(tasks), "exercises": found, "talks": sources.conversations}
    kept: dict[str, dict[str, list[str]]] = {}
    for split, seed, n in (("train", 77, count), ("eval", 991, 256)):
        sets: dict[str, list[str]] = {}
        for category, name in (("code", "tasks"), ("maths", "maths"), ("chat", "talk"), ("functions", "exercises")):
            if name == "exercises" and not found:
                continue
            texts = chats_of(name, seed, n, state)
            sets[category] = [t[: t.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n<think>\n")] + ("" if "<think>\n\n</think>" not in t else "\n</think>\n\n") for t in texts]
        prose = prose_texts(sources, split == "eval")
        r = random.Random(f"prose/{seed}")
        sets["prose"] = [questions.passage(r, r.choice(prose), 260) for _ in range(n)] if prose else []
        if split == "eval":
            sets["heldout"] = [prompt_text(p.text) for p in heldout.CODE]
        kept[split] = sets
    write_prompts(out, kept["train"], kept["eval"])


def write_prompts(out: Path, train: dict[str, list[str]], held_out: dict[str, list[str]]) -> None:
    """prompts.train.json without any prompt that is in prompts.eval.json (short ones come up in both), and the latter."""
    for name, asked in train.items():
        taken = set(held_out.get(name, []))
        train[name] = [t for t in asked if t not in taken]
    (out / "prompts.train.json").write_text(json.dumps(train))
    (out / "prompts.eval.json").write_text(json.dumps(held_out))


def prose_texts(sources: Sources, held_out: bool) -> list[str]:
    """Prose documents; every twentieth is kept for evaluation prompts."""
    texts = [d.text for d in sources.documents if d.kind == "prose" and len(d.text) > 600]
    return [t for i, t in enumerate(texts) if (i % 20 == 19) == held_out]


def save_questions(data: Path, target: Path, out: Path, count: int) -> None:
    """Stage `prompts`: prompts.train.json and prompts.eval.json for any chat model, in its own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    sources = load_sources(data / "sources.jsonl.xz")
    dropped = set(json.loads((data / "dropped.json").read_text()))
    pool = Pool([t for t in every_task(DataOptions(raw=data, out=data)) if t.key not in dropped])
    out.mkdir(parents=True, exist_ok=True)
    kept: dict[str, dict[str, list[str]]] = {}
    for split, seed, n in (("train", 5, count), ("eval", 6, 256)):
        held_out = split == "eval"
        made = questions.question_sets(n, seed, held_out, lambda r: instruct.write_chat(r, pool.draw(r)), sources.exercises, prose_texts(sources, held_out))
        kept[split] = {
            name: [tokenizer.apply_chat_template([{"role": "user", "content": q}], tokenize=False, add_generation_prompt=True) for q in asked]
            for name, asked in made.items()
        }
    write_prompts(out, kept["train"], kept["eval"])
