"""Tasks composed from small operations: noun phrases and expressions grow together, by type.

`the sum of {L}` over `the elements of a list except the first` becomes `sum(nums[1:])`. This is what
teaches a small model to put a request together instead of recalling the nearest whole function.
"""

from __future__ import annotations

import ast
import random
from dataclasses import dataclass

from kozue_train.data.tasks import Task

# Types: N number, L list of numbers, S string, W list of strings, B truth value.
Op = tuple[str, str, str, str]  # argument type, result type, phrase with {x}, expression with {x}

OPS: list[Op] = [
    # list -> list
    ("L", "L", "{x} except the first", "{x}[1:]"), ("L", "L", "{x} except the first two", "{x}[2:]"), ("L", "L", "{x} except the last two", "{x}[:-2]"), ("L", "L", "{x} without the first and the last", "{x}[1:-1]"),
    ("L", "L", "the first three of {x}", "{x}[:3]"), ("L", "L", "the first two of {x}", "{x}[:2]"), ("L", "L", "the last two of {x}", "{x}[-2:]"), ("L", "L", "the last three of {x}", "{x}[-3:]"), ("L", "L", "every second one of {x}", "{x}[::2]"),
    ("L", "L", "those of {x} at odd positions (index 1, 3, 5, ...)", "{x}[1::2]"), ("L", "L", "every third one of {x}", "{x}[::3]"), ("L", "L", "{x} in reverse order", "{x}[::-1]"), ("L", "L", "{x} in ascending order", "sorted({x})"),
    ("L", "L", "{x} in descending order", "sorted({x}, reverse=True)"), ("L", "L", "the distinct values of {x} in ascending order", "sorted(set({x}))"), ("L", "L", "the squares of {x}", "[v * v for v in {x}]"), ("L", "L", "the cubes of {x}", "[v ** 3 for v in {x}]"),
    ("L", "L", "the triples of {x}", "[v * 3 for v in {x}]"), ("L", "L", "the halves of {x}", "[v / 2 for v in {x}]"), ("L", "L", "the negatives of {x}", "[-v for v in {x}]"), ("L", "L", "the absolute values of {x}", "[abs(v) for v in {x}]"),
    ("L", "L", "{x}, each increased by one", "[v + 1 for v in {x}]"), ("L", "L", "{x}, each decreased by one", "[v - 1 for v in {x}]"), ("L", "L", "{x}, each increased by ten", "[v + 10 for v in {x}]"), ("L", "L", "{x}, each plus its index", "[v + i for i, v in enumerate({x})]"),
    ("L", "L", "{x}, each minus its index", "[v - i for i, v in enumerate({x})]"), ("L", "L", "{x} with every second sign changed", "[v if i % 2 == 0 else -v for i, v in enumerate({x})]"), ("L", "L", "the positive ones of {x}", "[v for v in {x} if v > 0]"), ("L", "L", "the even ones of {x}", "[v for v in {x} if v % 2 == 0]"),
    ("L", "L", "the odd ones of {x}", "[v for v in {x} if v % 2 == 1]"), ("L", "L", "the negative ones of {x}", "[v for v in {x} if v < 0]"), ("L", "L", "those of {x} that are greater than 10", "[v for v in {x} if v > 10]"), ("L", "L", "those of {x} that are not zero", "[v for v in {x} if v != 0]"),
    ("L", "L", "those of {x} that occur only once", "[v for v in {x} if {x}.count(v) == 1]"), ("L", "L", "those of {x} that are larger than the average", "[v for v in {x} if v > sum({x}) / len({x})]"), ("L", "L", "{x} repeated twice", "{x} * 2"),
    ("L", "L", "{x} followed by their sum", "{x} + [sum({x})]"), ("L", "L", "{x} followed by a zero", "{x} + [0]"), ("L", "L", "a zero followed by {x}", "[0] + {x}"),
    # list -> number
    ("L", "N", "the sum of {x}", "sum({x})"), ("L", "N", "the largest of {x}", "max({x})"), ("L", "N", "the smallest of {x}", "min({x})"), ("L", "N", "the number of {x}", "len({x})"), ("L", "N", "the average of {x}", "sum({x}) / len({x})"),
    ("L", "N", "the first of {x}", "{x}[0]"), ("L", "N", "the last of {x}", "{x}[-1]"), ("L", "N", "the second of {x}", "{x}[1]"), ("L", "N", "the second to last of {x}", "{x}[-2]"), ("L", "N", "the middle one of {x}", "{x}[len({x}) // 2]"), ("L", "N", "the number of distinct values among {x}", "len(set({x}))"),
    ("L", "N", "the index of the largest of {x}", "{x}.index(max({x}))"), ("L", "N", "the number of times the largest of {x} occurs", "{x}.count(max({x}))"), ("L", "N", "the number of times the first of {x} occurs", "{x}.count({x}[0])"), ("L", "N", "the number of zeros among {x}", "{x}.count(0)"),
    # list -> truth
    ("L", "B", "there are no {x}", "len({x}) == 0"), ("L", "B", "{x} are in ascending order", "{x} == sorted({x})"), ("L", "B", "{x} are all different", "len(set({x})) == len({x})"), ("L", "B", "{x} are all equal", "len(set({x})) <= 1"), ("L", "B", "there are more than three {x}", "len({x}) > 3"),
    ("L", "B", "the first of {x} equals the last", "{x}[0] == {x}[-1]"), ("L", "B", "zero is among {x}", "0 in {x}"), ("L", "B", "{x} add up to zero", "sum({x}) == 0"), ("L", "B", "{x} are all even", "all(v % 2 == 0 for v in {x})"), ("L", "B", "{x} are all smaller than 100", "all(v < 100 for v in {x})"),
    ("L", "B", "any of {x} is larger than 10", "any(v > 10 for v in {x})"), ("L", "B", "one of {x} is odd", "any(v % 2 == 1 for v in {x})"), ("L", "B", "the number of {x} is even", "len({x}) % 2 == 0"),
    # list -> strings
    ("L", "S", "{x} as a string with commas between them", '", ".join(str(v) for v in {x})'), ("L", "S", "{x} written one after the other as a string", '"".join(str(v) for v in {x})'), ("L", "W", "the string forms of {x}", "[str(v) for v in {x}]"),
    # number -> number, truth, text
    ("N", "N", "the square of {x}", "({x}) ** 2"), ("N", "N", "twice {x}", "2 * ({x})"), ("N", "N", "half of {x}", "({x}) / 2"), ("N", "N", "{x} plus one", "{x} + 1"), ("N", "N", "{x} minus one", "{x} - 1"), ("N", "N", "the absolute value of {x}", "abs({x})"), ("N", "N", "the remainder of {x} divided by 10", "({x}) % 10"),
    ("N", "N", "the remainder of {x} divided by 7", "({x}) % 7"), ("N", "N", "{x} times ten", "({x}) * 10"), ("N", "N", "the negative of {x}", "-({x})"), ("N", "N", "{x} rounded to an integer", "round({x})"),
    ("N", "B", "{x} is even", "({x}) % 2 == 0"), ("N", "B", "{x} is positive", "{x} > 0"), ("N", "B", "{x} is greater than 10", "{x} > 10"), ("N", "B", "{x} is less than 100", "{x} < 100"), ("N", "B", "{x} is divisible by 3", "({x}) % 3 == 0"), ("N", "B", "{x} is divisible by 2 or by 5", "({x}) % 2 == 0 or ({x}) % 5 == 0"),
    ("N", "B", "{x} is divisible by both 2 and 7", "({x}) % 2 == 0 and ({x}) % 7 == 0"), ("N", "B", "{x} is between 1 and 10", "1 <= {x} <= 10"), ("N", "B", "{x} is not zero", "{x} != 0"), ("N", "S", "{x} as a string", "str({x})"), ("N", "L", "a list that contains only {x}", "[{x}]"),
    # string -> string
    ("S", "S", "{x} in upper case", "{x}.upper()"), ("S", "S", "{x} in lower case", "{x}.lower()"), ("S", "S", "{x} reversed", "{x}[::-1]"), ("S", "S", "{x} without its first character", "{x}[1:]"), ("S", "S", "{x} without its last character", "{x}[:-1]"), ("S", "S", "the first three characters of {x}", "{x}[:3]"),
    ("S", "S", "the last two characters of {x}", "{x}[-2:]"), ("S", "S", "the first character of {x}", "{x}[0]"), ("S", "S", "the last character of {x}", "{x}[-1]"), ("S", "S", "{x} repeated three times", "{x} * 3"), ("S", "S", "the first half of {x}", "{x}[:len({x}) // 2]"), ("S", "S", "the second half of {x}", "{x}[len({x}) // 2:]"),
    ("S", "S", "{x} with spaces replaced by dashes", '{x}.replace(" ", "-")'), ("S", "S", "{x} with every a replaced by o", '{x}.replace("a", "o")'), ("S", "S", "{x} with commas replaced by semicolons", '{x}.replace(",", ";")'), ("S", "S", "{x} with underscores replaced by spaces", '{x}.replace("_", " ")'), ("S", "S", "{x} without the letter e", '{x}.replace("e", "")'),
    ("S", "S", "{x} without spaces at its ends", "{x}.strip()"), ("S", "S", "the characters of {x} in sorted order as a string", '"".join(sorted({x}))'), ("S", "S", "{x} with an exclamation mark at the end", '{x} + "!"'), ("S", "S", "{x} in quotation marks", "'\"' + {x} + '\"'"), ("S", "S", "every second character of {x}", "{x}[::2]"),
    ("S", "S", "the first character of {x} in lower case followed by the rest", "{x}[0].lower() + {x}[1:]"), ("S", "S", "the last character of {x} in upper case", "{x}[-1].upper()"), ("S", "S", "{x} with its last letter moved to the front", "{x}[-1] + {x}[:-1]"),
    # string -> number, truth, words
    ("S", "N", "the length of {x}", "len({x})"), ("S", "N", "the number of distinct characters in {x}", "len(set({x}))"), ("S", "N", "the number of times the letter a occurs in {x}", '{x}.count("a")'), ("S", "N", "the number of spaces in {x}", '{x}.count(" ")'), ("S", "N", "the number of letters in {x}", "sum(c.isalpha() for c in {x})"),
    ("S", "N", "the position of the first letter e in {x}", '{x}.find("e")'), ("S", "N", "the number of times the first character of {x} occurs in it", "{x}.count({x}[0])"), ("S", "B", "{x} is empty", '{x} == ""'), ("S", "B", "{x} starts with the letter a", '{x}.startswith("a")'), ("S", "B", "{x} ends with the letter e", '{x}.endswith("e")'),
    ("S", "B", "{x} contains a space", '" " in {x}'), ("S", "B", "{x} contains the letter o", '"o" in {x}'), ("S", "B", "{x} has more than five characters", "len({x}) > 5"), ("S", "B", "{x} consists of letters only", "{x}.isalpha()"), ("S", "B", "{x} consists of lowercase letters only", "{x}.islower()"), ("S", "B", "{x} contains a digit", "any(c.isdigit() for c in {x})"),
    ("S", "B", "{x} starts with a capital letter", "{x}[:1].isupper()"), ("S", "B", "{x} has an even number of characters", "len({x}) % 2 == 0"), ("S", "W", "the words of {x}", "{x}.split()"), ("S", "W", "the characters of {x}", "list({x})"), ("S", "W", "the distinct characters of {x} in sorted order", "sorted(set({x}))"),
    ("S", "W", "the parts of {x} between commas", '{x}.split(",")'), ("S", "L", "the character codes of {x}", "[ord(c) for c in {x}]"),
    # words -> words, text, numbers, truth
    ("W", "W", "{x} in upper case", "[w.upper() for w in {x}]"), ("W", "W", "{x} in lower case", "[w.lower() for w in {x}]"), ("W", "W", "{x}, each capitalized", "[w.capitalize() for w in {x}]"), ("W", "W", "{x}, each reversed", "[w[::-1] for w in {x}]"), ("W", "W", "{x} in alphabetical order", "sorted({x})"),
    ("W", "W", "{x} ordered by length", "sorted({x}, key=len)"), ("W", "W", "{x} in reverse order", "{x}[::-1]"), ("W", "W", "the distinct ones of {x} in alphabetical order", "sorted(set({x}))"), ("W", "W", "the first letters of {x}", "[w[0] for w in {x}]"), ("W", "W", "the last letters of {x}", "[w[-1] for w in {x}]"),
    ("W", "W", "the first two of {x}", "{x}[:2]"), ("W", "W", "{x} except the first", "{x}[1:]"), ("W", "W", "{x} except the last", "{x}[:-1]"), ("W", "W", "those of {x} that have more than three letters", "[w for w in {x} if len(w) > 3]"), ("W", "W", "those of {x} that contain the letter a", '[w for w in {x} if "a" in w]'),
    ("W", "W", "those of {x} that end with the letter e", '[w for w in {x} if w.endswith("e")]'), ("W", "W", "those of {x} that start with a vowel", '[w for w in {x} if w[0] in "aeiou"]'), ("W", "W", "those of {x} that are not empty", "[w for w in {x} if w]"), ("W", "W", "{x}, each with a dot at the end", '[w + "." for w in {x}]'),
    ("W", "W", "{x}, each without its first letter", "[w[1:] for w in {x}]"), ("W", "S", "{x} joined with spaces", '" ".join({x})'), ("W", "S", "{x} joined with dashes", '"-".join({x})'), ("W", "S", "{x} joined without separator", '"".join({x})'), ("W", "S", "the shortest of {x}", "min({x}, key=len)"),
    ("W", "S", "the first of {x}", "{x}[0]"), ("W", "S", "the second of {x}", "{x}[1]"), ("W", "S", "the longest of {x}", "max({x}, key=len)"), ("W", "S", "the one of {x} that comes first in the alphabet", "min({x})"), ("W", "S", "the one of {x} that comes last in the alphabet", "max({x})"),
    ("W", "L", "the lengths of {x}", "[len(w) for w in {x}]"), ("W", "N", "the total length of {x}", "sum(len(w) for w in {x})"), ("W", "N", "the number of distinct strings among {x}", "len(set({x}))"), ("W", "N", "the length of the shortest of {x}", "min(len(w) for w in {x})"), ("W", "N", "the length of the first of {x}", "len({x}[0])"),
    ("W", "B", "{x} are all different", "len(set({x})) == len({x})"), ("W", "B", "{x} are in alphabetical order", "{x} == sorted({x})"), ("W", "B", "any of {x} is longer than five letters", "any(len(w) > 5 for w in {x})"), ("W", "B", "{x} all have the same length", "len(set(len(w) for w in {x})) <= 1"), ("W", "B", "all of {x} contain the letter e", 'all("e" in w for w in {x})'),
]


@dataclass(frozen=True)
class Base:
    """Where a composition starts: arguments, type, phrase, expression."""

    args: tuple[tuple[str, str], ...]
    kind: str
    phrase: str
    expr: str


BASES = [
    Base((("nums", "list[int]"),), "L", "the numbers in a list", "nums"), Base((("nums", "list[int]"),), "L", "the elements of a list", "nums"), Base((("s", "str"),), "S", "a string", "s"), Base((("s", "sentence"),), "S", "a sentence", "s"),
    Base((("s", "sentence"),), "W", "the words of a sentence", "s.split()"), Base((("words", "list[str]"),), "W", "the words in a list", "words"), Base((("words", "list[str]"),), "W", "the strings in a list", "words"),
    Base((("d", "dict[str,int]"),), "L", "the values of a dictionary", "list(d.values())"), Base((("d", "dict[str,int]"),), "W", "the keys of a dictionary", "list(d)"), Base((("matrix", "matrix"),), "L", "the numbers in a matrix", "[v for row in matrix for v in row]"),
    Base((("matrix", "matrix"),), "L", "the row sums of a matrix", "[sum(row) for row in matrix]"), Base((("matrix", "matrix"),), "L", "the elements in the first row of a matrix", "matrix[0]"), Base((("matrix", "matrix"),), "L", "the elements in the first column of a matrix", "[row[0] for row in matrix]"),
    Base((("pairs", "int_pairs"),), "L", "the first elements of the pairs in a list", "[a for a, b in pairs]"), Base((("pairs", "int_pairs"),), "L", "the second elements of the pairs in a list", "[b for a, b in pairs]"), Base((("pairs", "int_pairs"),), "L", "the products of the pairs in a list", "[a * b for a, b in pairs]"),
    Base((("n", "posint"),), "L", "the digits of a number", "[int(c) for c in str(n)]"), Base((("n", "smallint"),), "L", "the numbers from 1 to n", "list(range(1, n + 1))"), Base((("n", "smallint"),), "L", "the numbers from 0 to n - 1", "list(range(n))"), Base((("n", "posint"),), "L", "the divisors of n", "[i for i in range(1, n + 1) if n % i == 0]"),
    Base((("n", "posint"),), "N", "a number", "n"), Base((("n", "posint"),), "N", "n", "n"), Base((("a", "int"), ("b", "int")), "N", "the sum of a and b", "a + b"), Base((("a", "int"), ("b", "int")), "N", "the product of a and b", "a * b"), Base((("a", "int"), ("b", "int")), "N", "the difference a - b", "a - b"),
    Base((("a", "int"), ("b", "int")), "N", "the larger of a and b", "max(a, b)"), Base((("a", "int"), ("b", "int")), "N", "the smaller of a and b", "min(a, b)"), Base((("a", "int"), ("b", "int")), "N", "the sum of the squares of a and b", "a * a + b * b"), Base((("start", "smallint"), ("end", "posint")), "L", "the numbers from start to end", "list(range(start, end + 1))"),
    Base((("first", "list[int]"), ("second", "list[int]")), "L", "the numbers in two lists together", "first + second"), Base((("first", "list[int]"), ("second", "list[int]")), "L", "the sums of the matching elements of two lists", "[x + y for x, y in zip(first, second)]"),
    Base((("first", "list[int]"), ("second", "list[int]")), "L", "the products of the matching elements of two lists", "[x * y for x, y in zip(first, second)]"), Base((("first", "list[int]"), ("second", "list[int]")), "L", "the smaller elements at each position of two lists", "[min(x, y) for x, y in zip(first, second)]"),
    Base((("first", "list[int]"), ("second", "list[int]")), "L", "the numbers of the first list that also occur in the second", "[x for x in first if x in second]"), Base((("a", "word"), ("b", "word")), "S", "two strings joined together", "a + b"), Base((("a", "word"), ("b", "word")), "S", "the longer of two strings", "max(a, b, key=len)"),
    Base((("words", "numstrs"),), "L", "the numbers that a list of strings stands for", "[int(w) for w in words]"), Base((("s", "digitstr"),), "L", "the digits of a string of digits", "[int(c) for c in s]"), Base((("s", "mixed"),), "S", "a text", "s"),
    Base((("s", "email"),), "S", "the name before the @ of an email address", 's.split("@")[0]'), Base((("s", "filename"),), "S", "a file name", "s"),
]

# Two numbers made of the same thing: phrase, expression.
JOIN = [
    ("the sum of {a} and {b}", "{x} + {y}"), ("the product of {a} and {b}", "({x}) * ({y})"), ("{a} minus {b}", "{x} - ({y})"), ("the difference between {a} and {b}", "{x} - ({y})"), ("the larger of {a} and {b}", "max({x}, {y})"), ("{a} as well as {b}, as a tuple", "{x}, {y}"),
    ("the average of {a} and {b}", "({x} + {y}) / 2"),
]
COMPARE = [("{a} is greater than {b}", "{x} > {y}"), ("{a} equals {b}", "{x} == {y}"), ("{a} is at most {b}", "{x} <= {y}")]
LOCALS = {"L": ["chosen", "values", "numbers", "selected"], "S": ["text", "result", "part"], "W": ["parts", "chosen", "selected"], "N": ["value", "result", "number"]}
VERBS = {"N": ["return", "compute", "find", "calculate"], "L": ["return", "return a list of", "get", "compute"], "S": ["return", "build", "get"], "W": ["return", "return a list of", "get"], "B": ["check whether", "return True if", "determine whether", "test if"]}
BY_TYPE = {t: [op for op in OPS if op[0] == t] for t in "LNSW"}


def compose(r: random.Random) -> Task:
    """One random composition of two or three operations (sometimes one)."""
    base = r.choice(BASES)
    kind, phrase, expr = base.kind, base.phrase, base.expr
    steps: list[tuple[str, str]] = [(kind, expr)]
    for _ in range(r.choice([1, 1, 2, 2, 2, 3])):
        if kind == "B":
            break
        _, new, p, e = r.choice(BY_TYPE[kind])
        phrase = p.format(x=phrase)
        # A long expression that is used more than once gets a name, in the step-wise form.
        steps.append((new, e))
        expr = e.format(x=expr if expr.isidentifier() or e.count("{x}") == 1 and not e.startswith("{x}") else wrap(expr))
        kind = new
    lines: list[str] = []
    if kind == "N" and r.random() < 0.35:
        second = r.choice([op for op in BY_TYPE[base.kind] if op[1] == "N"])
        other_phrase = second[2].format(x=base.phrase)
        other = second[3].format(x=wrap(base.expr))
        if other_phrase != phrase:
            if r.random() < 0.3:
                p, e = r.choice(COMPARE)
                kind = "B"
            else:
                p, e = r.choice(JOIN)
            phrase, expr, steps = p.format(a=phrase, b=other_phrase), e.format(x=expr, y=other), []
    bodies = [f"    return {expr}"]
    if len(steps) > 2:
        taken, current = {a for a, _ in base.args}, steps[0][1]
        for at, (new, e) in enumerate(steps[1:-1]):
            name = next((n for n in LOCALS.get(steps[at + 1][0], ["value"]) if n not in taken), f"step{at}")
            taken.add(name)
            lines.append(f"    {name} = {e.format(x=wrap(current))}")
            current = name
        lines.append(f"    return {steps[-1][1].format(x=current)}")
        bodies.append("\n".join(lines))
    verb = VERBS[kind]
    words = [w for w in phrase.replace(",", "").replace("(", "").replace(")", "").lower().split() if w.isalpha() and w not in STOP]
    name = "_".join(words[:5]) or "compute"
    prefix = {"B": ["is_", "has_", "check_"], "N": ["", "get_", "compute_"], "L": ["", "get_"], "S": ["", "get_", "make_"], "W": ["", "get_"]}[kind]
    tidied = [tidy(b) for b in bodies]
    return Task(f"compose/{kind}/{phrase}", [r.choice(prefix) + name], list(base.args), [f"{v} {phrase}" for v in verb], list(dict.fromkeys(tidied)))


def tidy(body: str) -> str:
    """Drops parentheses that Python does not need; double quotes, as everywhere here."""
    lines = []
    for line in body.split("\n"):
        if any(isinstance(node, ast.GeneratorExp) for node in ast.walk(ast.parse("def f():\n" + line))):
            lines.append(line)  # unparse would put a second pair of parentheses around it
            continue
        clean = ast.unparse(ast.parse(line.strip() if not line.strip().startswith("return") else line.strip().replace("return ", "x = ", 1)))
        if line.strip().startswith("return"):
            clean = clean.replace("x = ", "return ", 1)
            if clean.startswith("return (") and ", " in clean and line.strip().startswith("return") and isinstance(ast.parse(clean[7:], mode="eval").body, ast.Tuple):
                clean = "return " + clean[8:-1]
        lines.append("    " + (clean.replace("'", '"') if '"' not in clean else clean))
    return "\n".join(lines)


STOP = {"the", "of", "a", "an", "in", "and", "that", "are", "is", "to", "at", "as", "by", "its", "it", "one", "ones", "those", "there", "if", "each", "with", "from", "true", "return", "class", "for", "or", "not", "than"}


def wrap(expr: str) -> str:
    """Parentheses where an expression is not one operand (a name, a call, a bracket, a subscript)."""
    depth = 0
    for i, c in enumerate(expr):
        depth += c in "([{"
        depth -= c in ")]}"
        if depth == 0 and (c in " +-*/<>=%,") and i > 0:
            return f"({expr})"
    return f"({expr})" if expr.startswith("-") else expr


def composed(r: random.Random, count: int) -> list[Task]:
    """`count` different compositions whose first body runs on some sample input."""
    from kozue_train.data.tasks import find_examples

    found: dict[str, Task] = {}
    tries = 0
    while len(found) < count and tries < 20 * count:
        tries += 1
        task = compose(r)
        if task.key not in found and len(task.descriptions[0]) < 170 and len(task.codes[0]) < 200 and find_examples(task, r, 4):
            found[task.key] = task
    return list(found.values())
