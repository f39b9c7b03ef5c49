"""Documented functions out of code, as question and answer.

A function becomes an exercise only where it stands alone: everything it names is its own, a
builtin, or imported from the standard library or numpy (the import is then part of the answer).
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from dataclasses import dataclass

BUILTINS = set(dir(builtins))
STDLIB = (set(sys.stdlib_module_names) - {"antigravity", "this"}) | {"numpy"}


@dataclass
class Exercise:
    """One documented function: signature, first sentence of its docstring, imports and code."""

    name: str
    signature: str
    summary: str
    doc: str
    imports: list[str]
    code: str
    code_without_doc: str


def _imports(tree: ast.Module) -> dict[str, str]:
    """Name bound at module level -> the import line that binds it, standard library and numpy only."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for a in node.names:
                if a.name.split(".")[0] in STDLIB and ("." not in a.name or a.asname):
                    line = f"import {a.name}" + (f" as {a.asname}" if a.asname else "")
                    found[a.asname or a.name] = line
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] in STDLIB:
            if node.module == "__future__":
                continue
            for a in node.names:
                found[a.asname or a.name] = f"from {node.module} import {a.name}" + (f" as {a.asname}" if a.asname else "")
    return found


def _free_names(fn: ast.FunctionDef) -> set[str]:
    bound = {fn.name}
    for node in ast.walk(fn):
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            bound.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound.update((a.asname or a.name).split(".")[0] for a in node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return {n.id for n in ast.walk(fn) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - bound


def summary_of(doc: str) -> str | None:
    """First sentence of a docstring as plain words, or None where it says too little."""
    first = re.split(r"\n\s*\n", doc.strip())[0]
    first = re.sub(r"\s+", " ", first)
    sentence = re.split(r"(?<=[a-z)`'\"])\.(\s|$)", first)[0].strip()
    sentence = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("``", "`").rstrip(".: ")
    if not 20 <= len(sentence) <= 220 or sentence.count(" ") < 3 or re.search(r"[:\\@]\w|>>>|https?:|deprecated", sentence, re.IGNORECASE):
        return None
    return sentence


def exercises(text: str) -> list[Exercise]:
    """All stand-alone documented functions of a Python file, at most 40 lines each."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    imports = _imports(tree)
    lines = text.split("\n")
    out = []
    for fn in tree.body:
        if not isinstance(fn, ast.FunctionDef) or fn.decorator_list or fn.name.startswith("__"):
            continue
        doc = ast.get_docstring(fn)
        if not doc or fn.end_lineno is None or fn.end_lineno - fn.lineno > 60 or len(fn.body) < 2:
            continue
        summary = summary_of(doc)
        if summary is None:
            continue
        free = _free_names(fn) - BUILTINS
        if any(n not in imports for n in free):
            continue
        body = fn.body[1]
        code = "\n".join(lines[fn.lineno - 1 : fn.end_lineno])
        head = "\n".join(lines[fn.lineno - 1 : fn.body[0].lineno - 1])
        bare = head + "\n" + "\n".join(lines[body.lineno - 1 : fn.end_lineno])
        if bare.count("\n") > 40 or bare.count("\n") < 1:
            continue
        try:
            ast.parse(bare)
        except SyntaxError:
            continue
        signature = f"{fn.name}({ast.unparse(fn.args)})"
        if len(signature) > 140:
            continue
        out.append(Exercise(fn.name, signature, summary, doc, sorted({imports[n] for n in free}), code, bare))
    return out
