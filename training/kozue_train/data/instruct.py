"""Tasks and documented functions as conversations: writing, completing, explaining, editing, repairing code."""

from __future__ import annotations

import ast
import random
import re
from typing import Any

from kozue_train.data.chat import Chat
from kozue_train.data.functions import Exercise
from kozue_train.data.tasks import ALIASES, Task, call, hint

WRITE = [
    "Write a Python function that {does}.", "Write a function that {does}.", "Write a Python function to {do}.", "Write a function to {do}.",
    "Write a python function to {do}", "write a function to {do}", "Can you write a Python function that {does}?", "Please write a function which {does}.",
    "Implement a Python function that {does}.", "Implement a function to {do}.", "Create a function that {does}.", "I need a Python function that {does}.",
    "How do I {do} in Python?", "How can I {do} in Python? Write a function.", "Give me a Python function to {do}.", "Define a function that {does}.",
    "Python function to {do}", "Show me how to {do} in Python.", "Could you write some Python code to {do}?", "Make a function that {does}.",
]
NAMED = [
    "Write a Python function `{name}({args})` that {does}.", "Write a function called `{name}` that {does}.", "Implement `{name}({args})`. It should {do}.",
    "Write a function named {name} that takes {arglist} and {does}.", "Define `{name}({args})` so that it {does}.", "Please implement a function {name} to {do}.",
    "Create a Python function {name}({args}) which {does}.", "Write `{name}`, a function that {does}.", "Implement a function {name}({args}) to {do}.",
]
TAKES = ["Write a function that takes {arglist} and {does}.", "Write a Python function that takes {arglist} and {does}.", "Given {arglist}, write a function to {do}."]
INTROS = ["Here is the function:\n\n", "Here is a Python function that {does}:\n\n", "Sure! Here is the code:\n\n", "You can do it like this:\n\n", "", "", "", "", ""]
OUTROS = ["", "", "", "", "\n\nThis function {does}.", "\n\nFor example, `{call}` returns `{value}`.", "\n\n`{call}` gives `{value}`."]
KIND_WORDS = {
    "list[int]": ["a list of numbers", "a list of integers", "a list"], "sorted": ["a sorted list"], "list[str]": ["a list of words", "a list of strings"], "str": ["a string"], "word": ["a string", "a word"],
    "sentence": ["a sentence", "a string"], "dict[str,int]": ["a dictionary"], "matrix": ["a matrix", "a list of lists"], "square": ["a matrix"], "posint": ["a number"], "int": ["an integer", "a number"], "smallint": ["a number"],
    "pairs_list": ["a list of pairs"], "int_pairs": ["a list of tuples"], "records": ["a list of dictionaries"], "graph": ["a graph"], "letter": ["a character"], "name": ["a name"],
}


SYNONYMS = {
    "largest": ["biggest", "greatest", "highest", "maximum"], "smallest": ["lowest", "minimum", "least"], "in a list": ["in a list", "of a list", "in an array", "in a given list"], "in a string": ["of a string", "in a text", "in a given string"],
    "compute": ["calculate", "work out", "determine"], "return": ["give back", "produce", "output", "find", "get"], "check whether": ["check if", "test whether", "determine if", "tell whether", "see if", "find out if"], "elements": ["items", "entries", "values"],
    "a number": ["an integer", "a given number", "a value"], "a string": ["a text", "a given string", "a piece of text"], "a list of": ["the list of", "a list with"], "number of": ["count of", "amount of"], "a dictionary": ["a dict", "a given dictionary", "a mapping"],
    "a sentence": ["a text", "a phrase", "a given sentence"], "replace every": ["replace each", "substitute every", "swap every"], "remove the": ["delete the", "drop the", "strip the", "take out the"], "a matrix": ["a 2D list", "a list of lists", "a grid"],
    "average": ["mean"], "characters": ["chars", "letters"], "or None if there is none": ["or None if none exists", "or None when there is none"], "convert": ["turn", "change", "transform"], "contains": ["has", "includes"], "sum of": ["total of"],
}


def paraphrase(r: random.Random, text: str) -> str:
    """Some words of a description replaced by others of the same meaning."""
    for word, others in SYNONYMS.items():
        if word in text and r.random() < 0.22:
            other = r.choice(others)
            if word == "convert" and (" to " not in text or other in ("turn", "change", "transform")):
                text = re.sub(r"\bconvert\b(.*?)\bto\b", rf"{other}\1into", text, count=1)
                continue
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", other, text, count=1)
    return text


def third_person(do: str) -> str:
    """"return the sum" -> "returns the sum" (first word only)."""
    head, _, rest = do.partition(" ")
    if head.endswith(("s", "sh", "ch", "x")):
        head += "es"
    elif head.endswith("y") and head[-2] not in "aeiou":
        head = head[:-1] + "ies"
    else:
        head += "s"
    rest = re.sub(r"\band return\b", "and returns", rest)
    return f"{head} {rest}"


def restyle(rng: random.Random, task: Task, code: str) -> tuple[str, list[str], str]:
    """Renames arguments, locals and the function: (name, argument names, whole source)."""
    name = rng.choice(task.names)
    source = task.source(code, name)
    mapping: dict[str, str] = {}
    used = set(re.findall(r"\b[a-z_]+\d?\b", source))
    for canonical, choices in ALIASES.items():
        if canonical in used and rng.random() < 0.5:
            new = rng.choice(choices)
            if new not in used and new not in mapping.values() and not re.search(rf"[.\"']{canonical}\b", source):
                mapping[canonical] = new
    for old, new in mapping.items():
        source = re.sub(rf"\b{old}\b", new, source)
    return name, [mapping.get(a, a) for a, _ in task.args], source


def annotate(rng: random.Random, task: Task, source: str, names: list[str], do: str, types: bool, doc: bool) -> str:
    """Adds type hints and a docstring to a function's source."""
    head, _, body = source.partition("\n")
    if types:
        args = ", ".join(f"{n}: {hint(k)}" for n, (_, k) in zip(names, task.args))
        head = head[: head.index("(")] + f"({args}):"
        if task.examples:
            value = task.examples[0][1]
            result = {bool: "bool", int: "int", str: "str", float: "float", list: "list", dict: "dict", tuple: "tuple", set: "set"}.get(type(value))
            if result and all(type(v) is type(value) for _, v in task.examples):
                head = head[:-1] + f" -> {result}:"
    if doc:
        sentence = (third_person(do) if rng.random() < 0.3 else do).strip()
        body = f'    """{sentence[0].upper()}{sentence[1:]}."""\n' + body
    return head + "\n" + body


def show_call(name: str, args: tuple[Any, ...]) -> str:
    """Source text of a call."""
    return f"{name}({', '.join(map(repr, args))})"


def statement_plan(source: str) -> list[str]:
    """The steps of a function in words, read off its syntax tree."""
    steps: list[str] = []

    def walk(body: list[ast.stmt], depth: int) -> None:
        for node in body:
            pad = "  " * depth
            if isinstance(node, ast.Assign):
                steps.append(f"{pad}- set {ast.unparse(node.targets[0])} to {ast.unparse(node.value)}")
            elif isinstance(node, ast.AugAssign):
                steps.append(f"{pad}- update {ast.unparse(node.target)} with {ast.unparse(node)}")
            elif isinstance(node, ast.For):
                steps.append(f"{pad}- for each {ast.unparse(node.target)} in {ast.unparse(node.iter)}:")
                walk(node.body, depth + 1)
            elif isinstance(node, ast.While):
                steps.append(f"{pad}- while {ast.unparse(node.test)}:")
                walk(node.body, depth + 1)
            elif isinstance(node, ast.If):
                steps.append(f"{pad}- if {ast.unparse(node.test)}:")
                walk(node.body, depth + 1)
                if node.orelse:
                    steps.append(f"{pad}- otherwise:")
                    walk(node.orelse, depth + 1)
            elif isinstance(node, ast.Return):
                steps.append(f"{pad}- return {ast.unparse(node.value) if node.value else 'None'}")
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                steps.append(f"{pad}- call {ast.unparse(node.value)}")

    fn = ast.parse(source).body[0]
    assert isinstance(fn, ast.FunctionDef)
    walk(fn.body, 0)
    return steps


def fence(code: str) -> str:
    return f"```python\n{code}\n```"


def write_chat(rng: random.Random, task: Task) -> Chat:
    """Question for a function and the function as the answer."""
    plain = rng.choice(task.descriptions)
    do = paraphrase(rng, plain) if rng.random() < 0.6 else plain
    does = third_person(do)
    code = rng.choice(task.codes)
    name, names, source = restyle(rng, task, code)
    types, doc = rng.random() < 0.2, rng.random() < 0.25
    kinds = [KIND_WORDS.get(k, [None])[0] and rng.choice(KIND_WORDS[k]) for _, k in task.args]
    style = rng.random()
    arglist = " and ".join(f"`{n}`" for n in names) if len(names) < 3 else ", ".join(f"`{n}`" for n in names)
    if style < 0.45:
        question = rng.choice(WRITE).format(do=do, does=does)
    elif style < 0.55 and len(task.args) == 1 and kinds[0]:
        question = rng.choice(TAKES).format(arglist=kinds[0], do=do, does=does)
    elif style < 0.85:
        question = rng.choice(NAMED).format(name=name, args=", ".join(names), arglist=arglist, do=do, does=does)
    else:
        do = plain  # the answer repeats the docstring
        stub = annotate(rng, task, f"def {name}({', '.join(names)}):\n", names, do, types, True).rstrip()
        question = rng.choice(["Complete this function:", "Complete the following Python function.", "Finish the function:", "Fill in the body of this function."]) + f"\n\n{fence(stub)}"
        doc = True
    if task.examples and rng.random() < 0.25:
        args, value = rng.choice(task.examples)
        question += rng.choice([" For example, `{c}` should return `{v}`.", " Example: {c} -> {v}", "\n\nExample:\n{c} == {v}", " `{c}` must give `{v}`."]).format(c=show_call(name, args), v=repr(value))
    final = annotate(rng, task, source, names, do, types, doc)
    answer = rng.choice(INTROS).format(does=third_person(do)) + fence(final)
    outro = rng.choice(OUTROS)
    if outro and ("{call}" not in outro or task.examples):
        args, value = rng.choice(task.examples) if task.examples else ((), None)
        answer += outro.format(does=does, call=show_call(name, args), value=repr(value))
    thought = None
    if rng.random() < 0.15:
        thought = rng.choice([f"I need a function that {does}.", f"The function should {do}.", f"The task: {do}."]) + "\n" + "\n".join(statement_plan(source))
        if task.examples and rng.random() < 0.5:
            args, value = rng.choice(task.examples)
            thought += f"\nCheck: {show_call(name, args)} gives {value!r}."
    return Chat([(question, answer)], thought=thought)


MUTATIONS = [("<", "<="), (">", ">="), ("<=", "<"), (">=", ">"), ("==", "!="), (" + ", " - "), (" - ", " + "), ("= 0", "= 1"), ("= 1", "= 0"), (" and ", " or "), ("append", "extend"), ("True", "False"), ("max(", "min("), ("min(", "max("), ("i + 1", "i"), ("n + 1", "n")]


def repair_chat(rng: random.Random, task: Task) -> Chat | None:
    """A function with one wrong token that fails an example, and the repaired one."""
    if not task.examples:
        return None
    name, names, source = restyle(rng, task, rng.choice(task.codes))
    for old, new in rng.sample(MUTATIONS, len(MUTATIONS)):
        spots = [m.start() for m in re.finditer(re.escape(old), source) if m.start() > source.index("\n")]
        if not spots or "while" in source:
            continue
        at = rng.choice(spots)
        broken = source[:at] + new + source[at + len(old) :]
        args, value = rng.choice(task.examples)
        try:
            got: Any = call(broken, name, args)
        except Exception as error:  # noqa: BLE001 - the message is part of the question
            got = error
        if repr(got) == repr(value) or len(repr(got)) > 100:
            continue
        result = f"it raises {type(got).__name__}" if isinstance(got, Exception) else f"`{show_call(name, args)}` returns `{got!r}` instead of `{value!r}`"
        question = rng.choice(["This function should {do}, but {r}. Fix it.", "Fix the bug: the function should {do}, but {r}.", "Find and fix the mistake. The function must {do}; {r}."]).format(do=task.descriptions[0], r=result)
        wrong, right = (text[: len(text)].split("\n")[source[:at].count("\n")].strip() for text in (broken, source))
        answer = f"The line `{wrong}` should be `{right}`.\n\n{fence(source)}"
        return Chat([(f"{question}\n\n{fence(broken)}", answer)])
    return None


def edit_chat(rng: random.Random, task: Task) -> Chat | None:
    """Renaming, docstrings, type hints, rewriting, predicting a result, tests, explaining."""
    do = rng.choice(task.descriptions)
    name, names, source = restyle(rng, task, rng.choice(task.codes))
    kind = rng.choice(["rename", "doc", "types", "predict", "predict", "tests", "explain", "explain", "rewrite", "argument"])
    if kind == "rename":
        new = rng.choice([f"my_{name}", f"{name}_fast", f"do_{name}", f"{name}2", f"compute_{name}", f"run_{name}"])
        q = rng.choice(["Rename the function to `{n}`.", "Rename `{o}` to `{n}`.", "Change the name of this function to {n}."]).format(o=name, n=new)
        return Chat([(f"{q}\n\n{fence(source)}", fence(re.sub(rf"\b{name}\b", new, source)))])
    if kind == "argument":
        old, new = names[0], rng.choice(["values", "items", "data", "arg", "value", "source", "thing"])
        if re.search(rf"\b{new}\b", source):
            return None
        q = rng.choice(["Rename the argument `{o}` to `{n}`.", "Use `{n}` instead of `{o}` in this function.", "Rename the variable {o} to {n}."]).format(o=old, n=new)
        return Chat([(f"{q}\n\n{fence(source)}", fence(re.sub(rf"\b{old}\b", new, source)))])
    if kind in ("doc", "types"):
        q = rng.choice(["Add a docstring to this function.", "Document this function."] if kind == "doc" else ["Add type hints to this function.", "Annotate the types of this function."])
        return Chat([(f"{q}\n\n{fence(source)}", fence(annotate(rng, task, source, names, do, kind == "types", kind == "doc")))])
    if kind == "rewrite" and len(task.codes) > 1:
        a, b = rng.sample(task.codes, 2)
        if ("for " in a) and (" for " in b) and "\n" not in b.strip():
            q = rng.choice(["Rewrite this function in one line.", "Can you write this shorter?", "Simplify this function.", "Rewrite the loop as a comprehension or a built-in call."])
            return Chat([(f"{q}\n\n{fence(task.source(a, name))}", fence(task.source(b, name)))])
        return None
    if kind == "explain":
        q = rng.choice(["What does this function do?", "Explain this code.", "Explain what this function does.", "Describe this function in one sentence."])
        answer = rng.choice(["This function {d}.", "`{n}` {d}.", "The function {d}.", "It {d}."]).format(d=third_person(do), n=name)
        if rng.random() < 0.4:
            answer += "\n\nStep by step:\n" + "\n".join(statement_plan(source))
        return Chat([(f"{q}\n\n{fence(source)}", answer)])
    if not task.examples:
        return None
    if kind == "predict":
        args, value = rng.choice(task.examples)
        q = rng.choice(["What does `{c}` return?", "What is the result of {c}?", "What does this code give for `{c}`?"]).format(c=show_call(name, args))
        return Chat([(f"{fence(source)}\n\n{q}", rng.choice(["`{v}`", "It returns `{v}`.", "The result is `{v}`."]).format(v=repr(value)))])
    if kind == "tests":
        lines = [f"assert {show_call(name, args)} == {value!r}" for args, value in task.examples[:3]]
        q = rng.choice(["Write tests for this function.", "Write a few assert statements for this function.", "Test this function with assert."])
        return Chat([(f"{q}\n\n{fence(source)}", fence("\n".join(lines)))])
    return None


def two_step_chat(rng: random.Random, task: Task) -> Chat:
    """A request, its answer, and a follow-up about the same function."""
    first = write_chat(rng, task)
    match = re.search(r"```python\n(.*?)\n```", first.turns[0][1], re.DOTALL)
    assert match is not None
    code = match.group(1)
    name = re.search(r"def (\w+)", code).group(1)  # type: ignore[union-attr]
    if task.examples and rng.random() < 0.6:
        args, value = rng.choice(task.examples)
        follow = (rng.choice(["What does `{c}` return?", "And what is `{c}`?", "How do I call it?"]), f"`{show_call(name, args)}` returns `{value!r}`.")
        follow = (follow[0].format(c=show_call(name, args)), follow[1])
    else:
        new = f"{name}_v2"
        follow = (f"Rename it to {new}.", fence(re.sub(rf"\b{name}\b", new, code)))
    return Chat([first.turns[0], follow])


def exercise_chat(rng: random.Random, e: Exercise) -> Chat:
    """A documented function from a package as question and answer."""
    do = e.summary[0].lower() + e.summary[1:]
    head = do.split(" ")[0]
    does = do if head.endswith("s") and not head.endswith("ss") else third_person(do)
    sig = e.signature
    question = rng.choice([
        f"Write a Python function `{sig}`. {e.summary}.", f"Implement `{sig}` in Python: {do}.", f"Write the function `{e.name}` that {does}.", f"Write a Python function `{sig}` that {does}.",
        f"Complete this function:\n\n{fence(f'def {sig}:' + chr(10) + '    ' + chr(34) * 3 + e.summary + '.' + chr(34) * 3)}",
    ])
    code = e.code if rng.random() < 0.4 else e.code_without_doc
    return Chat([(question, fence("\n".join(e.imports) + ("\n\n\n" if e.imports else "") + code))])
