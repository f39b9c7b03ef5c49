"""Combinations: condition x transformation x reduction over numbers, characters, words, ranges, tables."""

from __future__ import annotations

import itertools
import random
import string
from dataclasses import dataclass

from kozue_train.data.tasks import Task


@dataclass(frozen=True)
class Condition:
    """A test on one item `{v}`: plural phrase, singular phrase, adjective, name part, expression, extra argument."""

    plural: str
    one: str
    is_: str
    name: str
    expr: str
    arg: tuple[str, str] | None = None


def number_conditions() -> list[Condition]:
    """Conditions on an integer."""
    out = [
        Condition("even numbers", "even number", "even", "even", "{v} % 2 == 0"),
        Condition("odd numbers", "odd number", "odd", "odd", "{v} % 2 == 1"),
        Condition("positive numbers", "positive number", "positive", "positive", "{v} > 0"),
        Condition("negative numbers", "negative number", "negative", "negative", "{v} < 0"),
        Condition("non-negative numbers", "non-negative number", "non-negative", "non_negative", "{v} >= 0"),
        Condition("non-zero numbers", "non-zero number", "not zero", "nonzero", "{v} != 0"),
        Condition("two-digit numbers", "two-digit number", "two digits long", "two_digit", "10 <= {v} <= 99"),
        Condition("one-digit numbers", "one-digit number", "between 0 and 9", "one_digit", "0 <= {v} <= 9"),
        Condition("perfect squares", "perfect square", "a perfect square", "square_numbers", "{v} >= 0 and int({v} ** 0.5) ** 2 == {v}"),
        Condition("prime numbers", "prime number", "prime", "prime", "{v} > 1 and all({v} % i for i in range(2, int({v} ** 0.5) + 1))"),
        Condition("palindromic numbers", "palindromic number", "a palindrome", "palindromic", "str({v}) == str({v})[::-1]"),
        Condition("numbers greater than a limit", "number greater than a limit", "greater than a limit", "above_limit", "{v} > limit", ("limit", "int")),
        Condition("numbers less than a limit", "number less than a limit", "less than a limit", "below_limit", "{v} < limit", ("limit", "int")),
        Condition("numbers that are at least a minimum", "number that is at least a minimum", "at least a minimum", "at_least", "{v} >= minimum", ("minimum", "int")),
        Condition("multiples of k", "multiple of k", "a multiple of k", "multiples_of_k", "{v} % k == 0", ("k", "posint")),
        Condition("numbers that do not equal a given value", "number that does not equal a given value", "different from a given value", "other_than", "{v} != other", ("other", "int")),
    ]
    for k in (3, 4, 5, 6, 7, 9, 10):
        out.append(Condition(f"numbers divisible by {k}", f"number divisible by {k}", f"divisible by {k}", f"divisible_by_{k}", f"{{v}} % {k} == 0"))
    for k in (3, 5, 10):
        out.append(Condition(f"numbers not divisible by {k}", f"number not divisible by {k}", f"not divisible by {k}", f"not_divisible_by_{k}", f"{{v}} % {k} != 0"))
    for k in (0, 5, 7, 10, 50, 100):
        out.append(Condition(f"numbers greater than {k}", f"number greater than {k}", f"greater than {k}", f"greater_than_{k}", f"{{v}} > {k}"))
    for k in (5, 8, 10, 100):
        out.append(Condition(f"numbers less than {k}", f"number less than {k}", f"less than {k}", f"less_than_{k}", f"{{v}} < {k}"))
    for a, b in ((1, 10), (0, 100), (10, 20), (5, 15)):
        out.append(Condition(f"numbers between {a} and {b}", f"number between {a} and {b}", f"between {a} and {b}", f"between_{a}_and_{b}", f"{a} <= {{v}} <= {b}"))
    for digit in (0, 3, 5, 7):
        out.append(Condition(f"numbers that end in {digit}", f"number that ends in {digit}", f"a number ending in {digit}", f"ending_in_{digit}", f"abs({{v}}) % 10 == {digit}"))
    both = [("even", "greater than 10", "{v} % 2 == 0 and {v} > 10"), ("odd", "positive", "{v} % 2 == 1 and {v} > 0"), ("even", "negative", "{v} % 2 == 0 and {v} < 0"),
            ("divisible by 3", "even", "{v} % 3 == 0 and {v} % 2 == 0"), ("odd", "less than 10", "{v} % 2 == 1 and {v} < 10"), ("positive", "divisible by 5", "{v} > 0 and {v} % 5 == 0")]
    for x, y, e in both:
        n = f"{x}_and_{y}".replace(" ", "_")
        out.append(Condition(f"numbers that are both {x} and {y}", f"number that is both {x} and {y}", f"both {x} and {y}", n, e))
    either = [("divisible by 3", "divisible by 5", "{v} % 3 == 0 or {v} % 5 == 0"), ("negative", "even", "{v} < 0 or {v} % 2 == 0"), ("less than 0", "greater than 10", "{v} < 0 or {v} > 10")]
    for x, y, e in either:
        n = f"{x}_or_{y}".replace(" ", "_")
        out.append(Condition(f"numbers that are {x} or {y}", f"number that is {x} or {y}", f"{x} or {y}", n, e))
    return out


# Transformation of a number: phrase before "of", name part, expression.
MAPS = [
    ("squares", "squares", "{v} * {v}"), ("squares", "squares", "{v} ** 2"), ("cubes", "cubes", "{v} ** 3"), ("absolute values", "absolute", "abs({v})"),
    ("doubles", "doubled", "{v} * 2"), ("triples", "tripled", "{v} * 3"), ("halves", "halves", "{v} / 2"), ("negatives", "negated", "-{v}"),
    ("last digits", "last_digits", "abs({v}) % 10"), ("remainders modulo 3", "remainders", "{v} % 3"), ("successors", "successors", "{v} + 1"),
    ("digit sums", "digit_sums", "sum(int(digit) for digit in str(abs({v})))"), ("string forms", "strings", "str({v})"),
]

# Reduction: descriptions with {what}, names, closed expression over a generator, and a loop (start, step, end).
REDUCE = {
    "sum": (["return the sum of {what}", "compute the sum of {what}", "add up {what}"], ["sum_{n}", "sum_of_{n}", "total_{n}"], "sum({e} for {v} in {it}{c})", ("total = 0", "total += {e}", "total")),
    "product": (["return the product of {what}", "multiply {what} together"], ["product_{n}", "product_of_{n}", "multiply_{n}"], None, ("result = 1", "result *= {e}", "result")),
    "list": (["return a list of {what}", "return {what} as a list", "list {what}", "collect {what} in a list"], ["{n}", "get_{n}", "list_{n}"], "[{e} for {v} in {it}{c}]", ("result = []", "result.append({e})", "result")),
    "max": (["return the largest of {what}, or None if there are none", "find the maximum of {what} (None if there are none)"], ["max_{n}", "largest_{n}"], "max(({e} for {v} in {it}{c}), default=None)", None),
    "min": (["return the smallest of {what}, or None if there are none", "find the minimum of {what} (None if there are none)"], ["min_{n}", "smallest_{n}"], "min(({e} for {v} in {it}{c}), default=None)", None),
    "average": (["return the average of {what}, or 0 if there are none", "compute the mean of {what} (0 if there are none)"], ["average_{n}", "mean_{n}"], None, None),
    "sorted": (["return {what} in ascending order", "return a sorted list of {what}"], ["sorted_{n}", "sort_{n}"], "sorted({e} for {v} in {it}{c})", None),
    "set": (["return the set of {what}", "return {what} as a set"], ["set_of_{n}", "unique_{n}"], "{{{e} for {v} in {it}{c}}}", None),
    "count": (["count {what}", "return the number of {what}", "return how many {whatof} there are"], ["count_{n}", "number_of_{n}"], "sum(1 for {v} in {it}{c})", ("count = 0", "count += 1", "count")),
}


def reduction_codes(kind: str, it: str, v: str, cond: str | None, expr: str, before: str = "") -> list[str]:
    """Bodies for one reduction over `it`."""
    closed, loop = REDUCE[kind][2], REDUCE[kind][3]
    c = f" if {cond}" if cond else ""
    codes = []
    if loop:
        start, step, end = loop
        lines = [start, f"for {v} in {it}:"]
        if cond:
            lines += [f"    if {cond}:", "        " + step.format(e=expr)]
        else:
            lines += ["    " + step.format(e=expr)]
        codes.append("\n".join("    " + x for x in [*lines, f"return {end}"]))
    if closed:
        codes.append("    return " + closed.format(e=expr, v=v, it=it, c=c))
    if kind == "count" and cond:
        codes.append(f"    return len([{v} for {v} in {it}{c}])")
    if kind == "average":
        codes.append(f"    chosen = [{expr} for {v} in {it}{c}]\n    if not chosen:\n        return 0\n    return sum(chosen) / len(chosen)")
    return [before + code for code in codes]


def _args(base: list[tuple[str, str]], cond: Condition | None) -> list[tuple[str, str]]:
    return base + ([cond.arg] if cond and cond.arg else [])


def reduce_tasks(where: str, phrase: str, it: str, v: str, base: list[tuple[str, str]], conds: list[Condition | None], maps: list[tuple[str, str, str]],
                 kinds: list[str], noun: str, before: str = "") -> list[Task]:
    """Every condition x map x reduction over one kind of sequence. `phrase` ends the description ("in a list")."""
    out = []
    for cond, mp, kind in itertools.product(conds, [("", "", "{v}"), *maps], kinds):
        if kind == "count" and (mp[0] or cond is None):
            continue
        if cond is None and not mp[0] and kind in ("list", "set"):
            continue
        if kind in ("sum", "product", "average") and mp[1] == "strings":
            continue
        plural = cond.plural if cond else f"{noun}s"
        what = (f"the {mp[0]} of " if mp[0] else "") + f"the {plural} {phrase}"
        n = "_of_".join(x for x in (mp[1], cond.name if cond else ("" if mp[1] else noun + "s")) if x) or noun + "s"
        descs = [d.format(what=what, whatof=f"{plural} {phrase}") if "{whatof}" not in d else d.format(whatof=f"{plural}") + f" {phrase}" for d in REDUCE[kind][0]]
        expr = mp[2].format(v=v)
        codes = reduction_codes(kind, it, v, cond.expr.format(v=v) if cond else None, expr, before)
        if codes:
            suffix = "" if noun in n or not cond or cond.name.endswith("numbers") or noun == "number" and kind != "sum" else f"_{noun}s"
            out.append(Task(f"{where}/{kind}/{mp[1]}:{mp[2]}/{cond.name if cond else ''}", [x.format(n=n) for x in REDUCE[kind][1]] + [x.format(n=n + suffix) for x in REDUCE[kind][1][:1]], _args(base, cond), descs, codes))
    return out


def selection_tasks(where: str, phrase: str, v: str, base: list[tuple[str, str]], conds: list[Condition], noun: str, plural: str) -> list[Task]:
    """any, all, none, first, last, index, indices, remove, keep, replace, split, for each condition."""
    it = base[0][0]
    out = []
    for c in conds:
        e = c.expr.format(v=v)
        a = _args(base, c)

        def add(kind: str, names: list[str], descs: list[str], codes: list[str], args: list[tuple[str, str]] = a, c: Condition = c) -> None:
            out.append(Task(f"{where}/{kind}/{c.name}", names, args, descs, codes))

        article = "an" if c.one[0] in "aeiou" else "a"
        add("any", [f"has_{c.name}", f"contains_{c.name}", f"any_{c.name}"], [f"check whether {phrase.replace('in ', '', 1)} contains {article} {c.one}", f"return True if any {noun} {phrase} is {c.is_}", f"return True if there is at least one {c.one} {phrase}"],
            [f"    return any({e} for {v} in {it})", f"    for {v} in {it}:\n        if {e}:\n            return True\n    return False"])
        add("all", [f"all_{c.name}", f"are_all_{c.name}"], [f"check whether all {plural} {phrase} are {c.is_}" if not c.is_.startswith(("a ", "an ")) else f"check whether every {noun} {phrase} is {c.is_}", f"return True if every {noun} {phrase} is {c.is_}"],
            [f"    return all({e} for {v} in {it})", f"    for {v} in {it}:\n        if not ({e}):\n            return False\n    return True"])
        add("none", [f"no_{c.name}", f"has_no_{c.name}"], [f"check that there is no {c.one} {phrase}", f"return True if no {noun} {phrase} is {c.is_}"], [f"    return not any({e} for {v} in {it})"])
        add("first", [f"first_{c.name}", f"find_first_{c.name}"], [f"return the first {c.one} {phrase}, or None if there is none", f"find the first {c.one} {phrase} (None if there is none)"],
            [f"    for {v} in {it}:\n        if {e}:\n            return {v}\n    return None", f"    return next(({v} for {v} in {it} if {e}), None)"])
        add("last", [f"last_{c.name}", f"find_last_{c.name}"], [f"return the last {c.one} {phrase}, or None if there is none", f"find the last {c.one} {phrase} (None if there is none)"],
            [f"    for {v} in reversed({it}):\n        if {e}:\n            return {v}\n    return None", f"    result = None\n    for {v} in {it}:\n        if {e}:\n            result = {v}\n    return result"])
        add("index", [f"index_of_first_{c.name}", f"first_{c.name}_index"], [f"return the index of the first {c.one} {phrase}, or -1", f"find the position of the first {c.one} {phrase} (-1 if there is none)"],
            [f"    for i, {v} in enumerate({it}):\n        if {e}:\n            return i\n    return -1"])
        add("indices", [f"{c.name}_indices", f"indices_of_{c.name}"], [f"return the indices of the {c.plural} {phrase}", f"list the positions of all {c.plural} {phrase}"],
            [f"    return [i for i, {v} in enumerate({it}) if {e}]", f"    result = []\n    for i, {v} in enumerate({it}):\n        if {e}:\n            result.append(i)\n    return result"])
        add("remove", [f"remove_{c.name}", f"drop_{c.name}", f"without_{c.name}"], [f"remove the {c.plural} from {phrase.replace('in ', '', 1)}", f"return {phrase.replace('in ', '', 1)} without its {c.plural}"],
            [f"    return [{v} for {v} in {it} if not ({e})]", f"    result = []\n    for {v} in {it}:\n        if not ({e}):\n            result.append({v})\n    return result"])
        add("split", [f"split_by_{c.name}", f"partition_{c.name}"], [f"split {phrase.replace('in ', '', 1)} into the {c.plural} and the rest", f"return two lists: the {c.plural} {phrase} and the other {plural}"],
            [f"    chosen = []\n    rest = []\n    for {v} in {it}:\n        if {e}:\n            chosen.append({v})\n        else:\n            rest.append({v})\n    return chosen, rest"])
        add("fraction", [f"fraction_{c.name}", f"share_of_{c.name}"], [f"return the fraction of {plural} {phrase} that are {c.is_}, or 0 for an empty list"], [f"    if not {it}:\n        return 0\n    return sum(1 for {v} in {it} if {e}) / len({it})"])
    return out


def number_list_tasks() -> list[Task]:
    """Lists of integers."""
    conds = number_conditions()
    base = [("nums", "list[int]")]
    out: list[Task] = []
    for phrase in ("in a list",):
        out += reduce_tasks("list", phrase, "nums", "num", base, [None, *conds], MAPS, list(REDUCE), "number")
        out += selection_tasks("list", phrase, "num", base, conds, "number", "numbers")
    for c, (mphrase, mname, mexpr) in itertools.product(conds, [("zero", "zero", "0"), ("None", "none", "None"), ("double its value", "double", "{v} * 2"), ("its square", "square", "{v} ** 2"), ("its negative", "negative", "-{v}")]):
        e, m = c.expr.format(v="num"), mexpr.format(v="num")
        out.append(Task(f"list/replace/{mname}/{c.name}", [f"replace_{c.name}_with_{mname}", f"{mname}_{c.name}"], _args(base, c), [f"replace every {c.one} in a list with {mphrase}", f"return a list in which each {c.one} is replaced by {mphrase} and the others stay"],
                        [f"    return [{m} if {e} else num for num in nums]", f"    result = []\n    for num in nums:\n        if {e}:\n            result.append({m})\n        else:\n            result.append(num)\n    return result"]))
    plain = [c for c in conds if not c.arg]
    for a, b in itertools.permutations(plain[:6], 2):
        ea, eb = a.expr.format(v="num"), b.expr.format(v="num")
        out.append(Task(f"list/more/{a.name}/{b.name}", [f"more_{a.name}_than_{b.name}"], base, [f"check whether a list contains more {a.plural} than {b.plural}", f"return True if there are more {a.plural} than {b.plural} in a list"],
                        [f"    first = sum(1 for num in nums if {ea})\n    second = sum(1 for num in nums if {eb})\n    return first > second"]))
        out.append(Task(f"list/sumdiff/{a.name}/{b.name}", [f"{a.name}_minus_{b.name}", f"sum_difference_{a.name}_{b.name}"], base, [f"return the sum of the {a.plural} minus the sum of the {b.plural} in a list", f"compute the difference between the sum of the {a.plural} and the sum of the {b.plural}"],
                        [f"    first = sum(num for num in nums if {ea})\n    second = sum(num for num in nums if {eb})\n    return first - second"]))
    return out


def range_tasks() -> list[Task]:
    """Numbers from 1 to n, and between two bounds; the digits of a number."""
    conds = [c for c in number_conditions() if c.name not in ("non_negative", "nonzero", "positive", "negative") and "negative" not in c.name]
    kinds = ["sum", "product", "list", "count", "average"]
    maps = [m for m in MAPS if m[1] not in ("absolute", "strings")]
    out = reduce_tasks("range", "from 1 to n", "range(1, n + 1)", "i", [("n", "smallint")], [None, *conds], maps, kinds, "number")
    out += reduce_tasks("between", "from start to end, both included", "range(start, end + 1)", "i", [("start", "smallint"), ("end", "posint")], [None, *conds], maps[:5], kinds, "number")
    digit = [c for c in conds if c.name in ("even", "odd", "prime", "divisible_by_3", "greater_than_5", "less_than_5", "above_limit", "less_than_8", "nonzero")]
    digit = [Condition(c.plural.replace("number", "digit"), c.one.replace("number", "digit"), c.is_, c.name + "_digits", c.expr, c.arg) for c in digit]
    out += reduce_tasks("digits", "of a number", "(int(char) for char in str(n))", "digit", [("n", "posint")], [None, *digit], [m for m in MAPS if m[1] in ("squares", "cubes", "doubled")], ["sum", "product", "list", "count", "max", "min"], "digit")
    return out


def char_conditions() -> list[Condition]:
    """Conditions on a character."""
    out = [
        Condition("vowels", "vowel", "a vowel", "vowels", '{v}.lower() in "aeiou"'),
        Condition("consonants", "consonant", "a consonant", "consonants", '{v}.isalpha() and {v}.lower() not in "aeiou"'),
        Condition("uppercase letters", "uppercase letter", "an uppercase letter", "uppercase", "{v}.isupper()"),
        Condition("lowercase letters", "lowercase letter", "a lowercase letter", "lowercase", "{v}.islower()"),
        Condition("digits", "digit", "a digit", "digits", "{v}.isdigit()"),
        Condition("letters", "letter", "a letter", "letters", "{v}.isalpha()"),
        Condition("spaces", "space", "a space", "spaces", '{v} == " "'),
        Condition("letters and digits", "letter or digit", "a letter or a digit", "alphanumeric", "{v}.isalnum()"),
        Condition("punctuation marks", "punctuation mark", "a punctuation mark", "punctuation", "not {v}.isalnum() and not {v}.isspace()"),
        Condition("occurrences of a given character", "occurrence of a given character", "a given character", "given_char", "{v} == target", ("target", "letter")),
        Condition("characters other than a given one", "character other than a given one", "different from a given character", "other_chars", "{v} != target", ("target", "letter")),
        Condition("characters that occur in another string", "character that occurs in another string", "in another string", "shared_chars", "{v} in other", ("other", "word")),
        Condition("even digits", "even digit", "an even digit", "even_digits", "{v}.isdigit() and int({v}) % 2 == 0"),
    ]
    for ch in "aexo":
        out.append(Condition(f'letters "{ch}"', f'letter "{ch}"', f'the letter "{ch}"', f"letter_{ch}", f'{{v}} == "{ch}"'))
    return out


def char_tasks() -> list[Task]:
    """Characters of a string."""
    base = [("s", "str")]
    conds = char_conditions()
    out = reduce_tasks("chars", "in a string", "s", "char", base, list(conds), [], ["count", "list", "set", "sorted"], "character")
    out += [t for t in selection_tasks("chars", "in a string", "char", base, conds, "character", "characters") if "/remove/" not in t.key and "/split/" not in t.key and "/fraction/" not in t.key]
    for c in conds:
        e, a = c.expr.format(v="char"), _args(base, c)
        out.append(Task(f"chars/remove/{c.name}", [f"remove_{c.name}", f"strip_{c.name}"], a, [f"remove the {c.plural} from a string", f"return a string without its {c.plural}", f"delete all {c.plural} in a string"],
                        [f'    return "".join(char for char in s if not ({e}))', f'    result = ""\n    for char in s:\n        if not ({e}):\n            result += char\n    return result']))
        out.append(Task(f"chars/keep/{c.name}", [f"keep_{c.name}", f"only_{c.name}", f"extract_{c.name}"], a, [f"keep only the {c.plural} of a string", f"return a string of just the {c.plural} in a text"],
                        [f'    return "".join(char for char in s if {e})', f'    result = ""\n    for char in s:\n        if {e}:\n            result += char\n    return result']))
        for what, name, m in (("an asterisk", "star", '"*"'), ("an underscore", "underscore", '"_"'), ("a dash", "dash", '"-"'), ("its uppercase form", "upper", "char.upper()"), ("two copies of itself", "doubled", "char * 2"), ("the letter x", "x", '"x"')):
            out.append(Task(f"chars/replace/{name}/{c.name}", [f"replace_{c.name}_with_{name}", f"mask_{c.name}"], a, [f"replace every {c.one} in a string with {what}", f"return a string in which each {c.one} is replaced by {what}"],
                            [f'    return "".join({m} if {e} else char for char in s)', f'    result = ""\n    for char in s:\n        if {e}:\n            result += {m}\n        else:\n            result += char\n    return result']))
    plain = [c for c in conds if not c.arg]
    for a_, b_ in itertools.permutations(plain[:6], 2):
        ea, eb = a_.expr.format(v="char"), b_.expr.format(v="char")
        out.append(Task(f"chars/count2/{a_.name}/{b_.name}", [f"count_{a_.name}_and_{b_.name}"], base, [f"count the {a_.plural} and the {b_.plural} in a string and return both numbers", f"return how many {a_.plural} and how many {b_.plural} a string has"],
                        [f"    first = 0\n    second = 0\n    for char in s:\n        if {ea}:\n            first += 1\n        if {eb}:\n            second += 1\n    return first, second"]))
    return out


def word_conditions() -> list[Condition]:
    """Conditions on a word."""
    out = [
        Condition("words that start with a vowel", "word that starts with a vowel", "a word with a vowel at the start", "starting_with_vowel", '{v}[0].lower() in "aeiou"'),
        Condition("words that end with a vowel", "word that ends with a vowel", "a word with a vowel at the end", "ending_with_vowel", '{v}[-1].lower() in "aeiou"'),
        Condition("capitalized words", "capitalized word", "capitalized", "capitalized", "{v}[0].isupper()"),
        Condition("palindromes", "palindrome", "a palindrome", "palindromes", "{v} == {v}[::-1]"),
        Condition("words longer than n letters", "word longer than n letters", "longer than n letters", "longer_than_n", "len({v}) > n", ("n", "smallint")),
        Condition("words shorter than n letters", "word shorter than n letters", "shorter than n letters", "shorter_than_n", "len({v}) < n", ("n", "smallint")),
        Condition("words of exactly n letters", "word of exactly n letters", "exactly n letters long", "of_length_n", "len({v}) == n", ("n", "smallint")),
        Condition("words that start with a given letter", "word that starts with a given letter", "a word that starts with a given letter", "starting_with", "{v}.startswith(letter)", ("letter", "letter")),
        Condition("words that end with a given letter", "word that ends with a given letter", "a word that ends with a given letter", "ending_with", "{v}.endswith(letter)", ("letter", "letter")),
        Condition("words that contain a given letter", "word that contains a given letter", "a word that contains a given letter", "containing", "letter in {v}", ("letter", "letter")),
        Condition("words without a given letter", "word without a given letter", "free of a given letter", "without_letter", "letter not in {v}", ("letter", "letter")),
        Condition("words with an even number of letters", "word with an even number of letters", "of even length", "of_even_length", "len({v}) % 2 == 0"),
        Condition("words with an odd number of letters", "word with an odd number of letters", "of odd length", "of_odd_length", "len({v}) % 2 == 1"),
        Condition("words with a repeated letter", "word with a repeated letter", "a word with a repeated letter", "with_repeats", "len(set({v})) < len({v})"),
    ]
    for k in (3, 4, 5):
        out.append(Condition(f"words longer than {k} letters", f"word longer than {k} letters", f"longer than {k} letters", f"longer_than_{k}", f"len({{v}}) > {k}"))
        out.append(Condition(f"words of {k} letters", f"word of {k} letters", f"{k} letters long", f"of_length_{k}", f"len({{v}}) == {k}"))
    for p in ("a", "s", "un"):
        out.append(Condition(f'words that start with "{p}"', f'word that starts with "{p}"', f'a word that starts with "{p}"', f"starting_with_{p}", f'{{v}}.startswith("{p}")'))
    for p in ("e", "s", "ing"):
        out.append(Condition(f'words that end with "{p}"', f'word that ends with "{p}"', f'a word that ends with "{p}"', f"ending_with_{p}", f'{{v}}.endswith("{p}")'))
    return out


WORD_MAPS = [
    ("uppercase forms", "uppercase", "{v}.upper()"), ("lengths", "lengths", "len({v})"), ("reversed forms", "reversed", "{v}[::-1]"), ("first letters", "first_letters", "{v}[0]"),
    ("last letters", "last_letters", "{v}[-1]"), ("capitalized forms", "capitalized", "{v}.capitalize()"), ("lowercase forms", "lowercase", "{v}.lower()"),
]


def word_tasks() -> list[Task]:
    """Words of a sentence and lists of strings."""
    conds = word_conditions()
    kinds = ["list", "count", "sorted", "set"]
    out = reduce_tasks("words", "in a list", "words", "word", [("words", "list[str]")], [None, *conds], WORD_MAPS, kinds, "word")
    out += reduce_tasks("sentence", "in a sentence", "s.split()", "word", [("s", "sentence")], [None, *conds], WORD_MAPS, kinds, "word")
    out += selection_tasks("words", "in a list of words", "word", [("words", "list[str]")], conds, "word", "words")
    for c in conds:
        e = c.expr.format(v="word")
        for it, base, where in (("words", [("words", "list[str]")], "list of words"), ("s.split()", [("s", "sentence")], "sentence")):
            a = _args(base, c)
            out.append(Task(f"{where}/join/{c.name}", [f"join_{c.name}", f"keep_{c.name}"], a, [f"join the {c.plural} in a {where} with spaces", f"return a string of only the {c.plural} in a {where}"], [f'    return " ".join(word for word in {it} if {e})']))
            out.append(Task(f"{where}/longest/{c.name}", [f"longest_{c.name}"], a, [f"return the longest of the {c.plural} in a {where}, or None"], [f"    chosen = [word for word in {it} if {e}]\n    if not chosen:\n        return None\n    return max(chosen, key=len)"]))
            out.append(Task(f"{where}/totlen/{c.name}", [f"total_length_{c.name}"], a, [f"return the total length of the {c.plural} in a {where}"], [f"    return sum(len(word) for word in {it} if {e})", f"    total = 0\n    for word in {it}:\n        if {e}:\n            total += len(word)\n    return total"]))
    for phrase, name, m in [("uppercase", "upper", "word.upper()"), ("reversed", "reverse", "word[::-1]"), ("doubled", "double", "word * 2"), ("without its first letter", "tail", "word[1:]"), ("without its last letter", "head", "word[:-1]"),
                            ("with an exclamation mark", "shout", 'word + "!"'), ("sorted by letter", "sorted_letters", '"".join(sorted(word))'), ("cut to three letters", "cut", "word[:3]")]:
        out.append(Task(f"sentence/map/{name}", [f"{name}_each_word", f"{name}_words"], [("s", "sentence")], [f"return a sentence with every word {phrase}", f"make each word of a sentence {phrase}"],
                        [f'    return " ".join({m} for word in s.split())', f'    result = []\n    for word in s.split():\n        result.append({m})\n    return " ".join(result)']))
        out.append(Task(f"words/map/{name}", [f"{name}_all", f"{name}_words"], [("words", "list[str]")], [f"return a list with every word {phrase}"], [f"    return [{m} for word in words]", f"    result = []\n    for word in words:\n        result.append({m})\n    return result"]))
    return out


def table_tasks() -> list[Task]:
    """Dictionaries, matrices, pairs, and two lists side by side."""
    out: list[Task] = []
    for c in number_conditions():
        e, ec = c.expr.format(v="value"), c.expr.format(v="value")
        d = _args([("d", "dict[str,int]")], c)
        m = _args([("matrix", "matrix")], c)
        what = c.is_
        out += [
            Task(f"dict/keys/{c.name}", [f"keys_with_{c.name}", f"{c.name}_keys"], d, [f"return the keys of a dictionary whose value is {what}", f"list the keys with a value that is {what}"], [f"    return [key for key, value in d.items() if {e}]", f"    result = []\n    for key, value in d.items():\n        if {e}:\n            result.append(key)\n    return result"]),
            Task(f"dict/sum/{c.name}", [f"sum_{c.name}_values"], d, [f"return the sum of the values of a dictionary that are {what}" if not what.startswith(("a ", "an ")) else f"return the sum of each value of a dictionary that is {what}"], [f"    return sum(value for value in d.values() if {e})", f"    total = 0\n    for value in d.values():\n        if {e}:\n            total += value\n    return total"]),
            Task(f"dict/count/{c.name}", [f"count_{c.name}_values"], d, [f"count the values of a dictionary that are {what}", f"return how many values of a dictionary are {what}"], [f"    return sum(1 for value in d.values() if {e})", f"    count = 0\n    for value in d.values():\n        if {e}:\n            count += 1\n    return count"]),
            Task(f"dict/filter/{c.name}", [f"filter_{c.name}_values", f"keep_{c.name}_values"], d, [f"return a dictionary with only the entries whose value is {what}", f"keep the entries of a dictionary with a value that is {what}"], [f"    return {{key: value for key, value in d.items() if {e}}}", f"    result = {{}}\n    for key, value in d.items():\n        if {e}:\n            result[key] = value\n    return result"]),
            Task(f"dict/remove/{c.name}", [f"remove_{c.name}_values"], d, [f"remove the entries of a dictionary whose value is {what}"], [f"    return {{key: value for key, value in d.items() if not ({e})}}"]),
            Task(f"matrix/sum/{c.name}", [f"sum_{c.name}_in_matrix"], m, [f"return the sum of the {c.plural} in a matrix", f"add up all {c.plural} in a list of lists"], [f"    return sum(value for row in matrix for value in row if {ec})", f"    total = 0\n    for row in matrix:\n        for value in row:\n            if {ec}:\n                total += value\n    return total"]),
            Task(f"matrix/count/{c.name}", [f"count_{c.name}_in_matrix"], m, [f"count the {c.plural} in a matrix", f"return the number of {c.plural} in a list of lists"], [f"    count = 0\n    for row in matrix:\n        for value in row:\n            if {ec}:\n                count += 1\n    return count", f"    return sum(1 for row in matrix for value in row if {ec})"]),
            Task(f"matrix/list/{c.name}", [f"{c.name}_in_matrix", f"collect_{c.name}"], m, [f"return a list of the {c.plural} in a matrix"], [f"    return [value for row in matrix for value in row if {ec}]"]),
            Task(f"matrix/rows/{c.name}", [f"rows_with_{c.name}"], m, [f"return the rows of a matrix that contain at least one {c.one}"], [f"    return [row for row in matrix if any({ec} for value in row)]"]),
        ]
    pair_ops = [("sums", "sum", "a + b"), ("products", "product", "a * b"), ("differences", "difference", "a - b"), ("absolute differences", "abs_difference", "abs(a - b)"), ("larger numbers", "max", "max(a, b)"), ("smaller numbers", "min", "min(a, b)"), ("averages", "average", "(a + b) / 2")]
    for phrase, name, e in pair_ops:
        x = e.replace("a", "\0").replace("b", "y").replace("\0", "x").replace("xys(", "abs(").replace("mxx(", "max(")
        out += [
            Task(f"pairs/list/{name}", [f"pair_{name}s", f"{name}_of_pairs"], [("pairs", "int_pairs")], [f"return the {phrase} of the pairs in a list of tuples"], [f"    return [{e} for a, b in pairs]", f"    result = []\n    for a, b in pairs:\n        result.append({e})\n    return result"]),
            Task(f"two/list/{name}", [f"elementwise_{name}", f"{name}_lists"], [("first", "list[int]"), ("second", "list[int]")], [f"return the elementwise {phrase} of two lists", f"return a list of the {phrase} of the matching elements of two lists"], [f"    return [{x} for x, y in zip(first, second)]", f"    result = []\n    for x, y in zip(first, second):\n        result.append({x})\n    return result"]),
            Task(f"two/sum/{name}", [f"sum_of_{name}s"], [("first", "list[int]"), ("second", "list[int]")], [f"return the sum of the elementwise {phrase} of two lists"], [f"    return sum({x} for x, y in zip(first, second))"]),
        ]
    for phrase, name, e in [("equal", "equal", "x == y"), ("greater in the first list", "greater", "x > y"), ("smaller in the first list", "smaller", "x < y"), ("of the same parity", "same_parity", "x % 2 == y % 2")]:
        out += [
            Task(f"two/count/{name}", [f"count_{name}"], [("first", "list[int]"), ("second", "list[int]")], [f"count the positions at which two lists are {phrase}"], [f"    return sum(1 for x, y in zip(first, second) if {e})", f"    count = 0\n    for x, y in zip(first, second):\n        if {e}:\n            count += 1\n    return count"]),
            Task(f"two/idx/{name}", [f"{name}_positions"], [("first", "list[int]"), ("second", "list[int]")], [f"return the positions at which two lists are {phrase}"], [f"    return [i for i, (x, y) in enumerate(zip(first, second)) if {e}]"]),
        ]
    return out


def conversion_tasks() -> list[Task]:
    """Unit conversions and the geometry of simple shapes."""
    out: list[Task] = []
    units = [("kilometers", "miles", "{x} * 0.621371"), ("miles", "kilometers", "{x} * 1.60934"), ("meters", "feet", "{x} * 3.28084"), ("feet", "meters", "{x} * 0.3048"), ("inches", "centimeters", "{x} * 2.54"), ("centimeters", "inches", "{x} / 2.54"),
             ("kilograms", "pounds", "{x} * 2.20462"), ("pounds", "kilograms", "{x} * 0.453592"), ("grams", "kilograms", "{x} / 1000"), ("kilograms", "grams", "{x} * 1000"), ("liters", "milliliters", "{x} * 1000"), ("milliliters", "liters", "{x} / 1000"),
             ("hours", "minutes", "{x} * 60"), ("minutes", "seconds", "{x} * 60"), ("days", "hours", "{x} * 24"), ("weeks", "days", "{x} * 7"), ("days", "seconds", "{x} * 24 * 60 * 60"), ("minutes", "hours", "{x} / 60"), ("meters", "kilometers", "{x} / 1000"),
             ("kilometers", "meters", "{x} * 1000"), ("bytes", "kilobytes", "{x} / 1024"), ("megabytes", "bytes", "{x} * 1024 * 1024"), ("degrees", "radians", "{x} * 3.141592653589793 / 180"), ("dollars", "cents", "{x} * 100"), ("cents", "dollars", "{x} / 100"), ("years", "months", "{x} * 12"), ("dozens", "pieces", "{x} * 12")]
    for a, b, e in units:
        out.append(Task(f"unit/{a}/{b}", [f"{a}_to_{b}", f"convert_{a}_to_{b}"], [(a, "posint")], [f"convert {a} to {b}", f"return the number of {b} in a number of {a}", f"compute how many {b} a given number of {a} is"], ["    return " + e.format(x=a)]))
        out.append(Task(f"unitlist/{a}/{b}", [f"all_{a}_to_{b}"], [("nums", "list[int]")], [f"convert a list of values in {a} to {b}"], ["    return [" + e.format(x="num") + " for num in nums]"]))
    shapes = [("square_area", ["side"], "side * side", "area of a square"), ("square_perimeter", ["side"], "4 * side", "perimeter of a square"), ("rectangle_area", ["width", "height"], "width * height", "area of a rectangle"),
              ("triangle_area", ["base", "height"], "base * height / 2", "area of a triangle from its base and height"), ("circle_circumference", ["radius"], "2 * math.pi * radius", "circumference of a circle"), ("cube_volume", ["side"], "side ** 3", "volume of a cube"),
              ("cube_surface", ["side"], "6 * side ** 2", "surface area of a cube"), ("box_volume", ["length", "width", "height"], "length * width * height", "volume of a box"), ("box_surface", ["length", "width", "height"], "2 * (length * width + length * height + width * height)", "surface area of a box"),
              ("sphere_volume", ["radius"], "4 / 3 * math.pi * radius ** 3", "volume of a sphere"), ("sphere_surface", ["radius"], "4 * math.pi * radius ** 2", "surface area of a sphere"), ("cylinder_volume", ["radius", "height"], "math.pi * radius ** 2 * height", "volume of a cylinder"),
              ("cone_volume", ["radius", "height"], "math.pi * radius ** 2 * height / 3", "volume of a cone"), ("trapezoid_area", ["a", "b", "height"], "(a + b) / 2 * height", "area of a trapezoid with parallel sides a and b"), ("triangle_perimeter", ["a", "b", "c"], "a + b + c", "perimeter of a triangle"),
              ("rectangle_diagonal", ["width", "height"], "(width ** 2 + height ** 2) ** 0.5", "diagonal of a rectangle"), ("square_diagonal", ["side"], "side * 2 ** 0.5", "diagonal of a square"), ("hypotenuse", ["a", "b"], "(a ** 2 + b ** 2) ** 0.5", "hypotenuse of a right triangle"),
              ("parallelogram_area", ["base", "height"], "base * height", "area of a parallelogram"), ("average_speed", ["distance", "time"], "distance / time", "average speed for a distance and a time"), ("travel_time", ["distance", "speed"], "distance / speed", "time needed for a distance at a given speed"),
              ("force", ["mass", "acceleration"], "mass * acceleration", "force on a mass with a given acceleration"), ("density", ["mass", "volume"], "mass / volume", "density of a body"), ("kinetic_energy", ["mass", "velocity"], "mass * velocity ** 2 / 2", "kinetic energy of a moving mass"),
              ("profit", ["revenue", "cost"], "revenue - cost", "profit from revenue and cost"), ("hourly_pay", ["hours", "rate"], "hours * rate", "pay for a number of hours at an hourly rate"), ("fuel_cost", ["distance", "consumption", "price"], "distance / 100 * consumption * price", "fuel cost of a trip from distance, consumption per 100 km and price per liter")]
    for name, args, e, what in shapes:
        pre = "    import math\n\n" if "math." in e else ""
        out.append(Task(f"shape/{name}", [name, f"compute_{name}", f"get_{name}"], [(a, "posint") for a in args], [f"compute the {what}", f"return the {what}", f"calculate the {what}"], [f"{pre}    return {e}"]))
    return out


def all_grids() -> list[Task]:
    """Every combination task."""
    return number_list_tasks() + range_tasks() + char_tasks() + word_tasks() + table_tasks() + conversion_tasks()


def pick_word(rng: random.Random) -> str:
    """A short random lowercase token, for names that should not be learnt by heart."""
    return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 7)))
