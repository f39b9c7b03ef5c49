"""What gets into the data and what stays out."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from conftest import CODE
from tokenizers import Tokenizer

from kozue_train.data import corpus, heldout, questions
from kozue_train.data.chat import SPECIAL, Chat
from kozue_train.data.functions import exercises
from kozue_train.data.instruct import (
    edit_chat,
    repair_chat,
    third_person,
    two_step_chat,
    write_chat,
)
from kozue_train.data.maths import add_steps, maths_chat, multiply_steps
from kozue_train.data.shards import read_shard
from kozue_train.data.talk import talk_chat
from kozue_train.data.tasks import Task, find_examples, load_families, parse_families
from kozue_train.stages.data import save_questions


@pytest.mark.parametrize(("licence", "ok"), [
    ("MIT", True), ("BSD-3-Clause", True), ("Apache-2.0 OR BSD-3-Clause", True), ("GPL-3.0", False), ("LGPLv3", False), ("MPL-2.0", False),
    ("", False), ("Apache-2.0 AND GPL-2.0", False), ("GNU GENERAL PUBLIC LICENSE v2", False), ("MIT-CMU", True), ("Other/Proprietary License", False),
])
def test_licences(licence: str, ok: bool) -> None:
    assert corpus.is_permissive(licence) is ok


def test_manifest_lists_used_and_skipped(data: Path) -> None:
    entries = {e["name"]: e for e in json.loads((data / "manifest.json").read_text())}
    assert entries["goodpkg"]["used"] and entries["goodpkg"]["version"] == "1.0" and len(entries["goodpkg"]["sha256"]) == 64
    assert not entries["gplpkg"]["used"] and "licence" in entries["gplpkg"]["why"]


def test_stand_alone_functions_only() -> None:
    found = {e.name: e for e in exercises(CODE)}
    assert set(found) == {"circle", "count_vowels"}  # helper_user needs a private helper
    assert found["circle"].imports == ["import math"]
    assert found["circle"].code_without_doc == "def circle(radius):\n    return 2 * math.pi * radius"
    assert heldout.NAMES.match("count_vowels") and not heldout.NAMES.match("circle")


def test_shards_round_trip_and_special_tokens(data: Path) -> None:
    tok = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    assert [tok.id_to_token(i) for i in range(len(SPECIAL))] == SPECIAL
    shard = read_shard(data / "shards" / "tasks.000.npy")
    first = shard[: int((shard == 0).argmax())].tolist()
    text = tok.decode(first, skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\n") and text.endswith("<|im_end|>\n") and "def " in text
    assert tok.encode("12345").ids == [tok.token_to_id(c) for c in "12345"]
    assert tok.decode(tok.encode("héllo\n\tworld  x").ids) == "héllo\n\tworld  x"


def test_template_equals_training_text(data: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tok = transformers.AutoTokenizer.from_pretrained(data / "tokenizer")
    chat = Chat([("Hi", "Hello!"), ("Bye", "Goodbye!")])
    messages = [{"role": r, "content": c} for q, a in chat.turns for r, c in (("user", q), ("assistant", a))]
    assert tok.apply_chat_template(messages, tokenize=False) == chat.text()
    asked = tok.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    assert chat.text().startswith(asked)
    assert tok.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, enable_thinking=True).endswith("<think>\n")


def test_families_run_and_agree() -> None:
    r = random.Random(0)
    tasks = load_families()
    assert len(tasks) > 300 and len({t.key for t in tasks}) == len(tasks)
    for t in tasks:
        assert find_examples(t, r, 3), f"{t.key}: a body fails or two bodies disagree"


def test_bad_family_is_named() -> None:
    with pytest.raises(ValueError, match="broken.*unknown argument kinds"):
        parse_families("# broken\nx: nonsense\nreturn x\n    return x\n", "file")


def test_heldout_filter_sees_through_wording() -> None:
    hidden = Task("x/y", ["tally"], [("s", "str")], ["do something else"], ['    return len([c for c in s if c in "aeiou"])'])
    assert heldout.solves(hidden) == 0
    assert heldout.solves(Task("x/y", ["tally"], [("s", "str")], ["count the vowels"], ["    return len(s)"])) is None
    assert len(heldout.CODE) == 50 and all(len(p.tests) >= 3 for p in heldout.CODE)
    assert not heldout.equal(True, 1) and heldout.equal(0.1 + 0.2, 0.3)


def test_merge_of_sorted_lists_stays_in() -> None:
    merge = next(t for t in load_families() if "merge_sorted_lists" in t.names)
    assert heldout.solves(merge) is None


def test_conversations_are_well_formed() -> None:
    r = random.Random(5)
    tasks = load_families()
    for i in range(300):
        t = r.choice(tasks)
        find_examples(t, r, 3)
        for chat in (write_chat(r, t), edit_chat(r, t), repair_chat(r, t), two_step_chat(r, t), maths_chat(r), talk_chat(r)):
            if chat:
                text = chat.text()
                assert "{" + "do}" not in text and "None }" not in text
                assert text.count("<|im_start|>") == text.count("<|im_end|>")


def test_worked_steps_are_right() -> None:
    assert add_steps(95, 17) == ["ones: 5 + 7 = 12, write 2, carry 1", "tens: 9 + 1 + 1 = 11, write 1, carry 1", "hundreds: 0 + 0 + 1 = 1"]
    assert multiply_steps(12, 34) == ["34 = 30 + 4", "12 * 30 = 360", "12 * 4 = 48", "360 + 48 = 408"]


def test_third_person() -> None:
    assert third_person("return the sum and return it") == "returns the sum and returns it"
    assert third_person("multiply two numbers") == "multiplies two numbers"
    assert third_person("compress a string") == "compresses a string"


def test_questions_keep_evaluation_apart() -> None:
    assert not set(questions.topics(True)) & set(questions.topics(False)) and len(questions.topics(True)) > 40
    tasks = load_families()
    sets = questions.question_sets(30, 1, True, lambda r: write_chat(r, r.choice(tasks)), exercises(CODE), ["One sentence here. Another follows it. " * 40])
    assert {k: len(v) for k, v in sets.items()} == {"code": 30, "maths": 30, "chat": 30, "prose": 30}
    assert any(t in " ".join(sets["chat"]) for t in questions.topics(True)) and not any("{" + "t}" in q for q in sets["chat"])
    piece = questions.passage(random.Random(0), "One sentence here. Another follows it. " * 40, 120)
    assert piece.endswith(".") and len(piece) <= 120


def test_prompts_of_any_chat_model(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    save_questions(data, data / "tokenizer", tmp_path, 5)
    made = json.loads((tmp_path / "prompts.train.json").read_text())
    held = json.loads((tmp_path / "prompts.eval.json").read_text())
    assert set(made) == {"code", "maths", "chat", "prose"} and all(len(v) <= 5 for v in made.values()) and all(len(v) == 256 for v in held.values())
    assert not any(set(made[k]) & set(held.get(k, [])) for k in made) and made["chat"]
    assert all(t.startswith("<|im_start|>user\n") and t.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for ts in made.values() for t in ts)
