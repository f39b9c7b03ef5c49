"""Arithmetic and word problems, made by templates with worked steps; every answer is computed."""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction

from kozue_train.data.chat import Chat
from kozue_train.data.tasks import NAMES

THINGS = ["apples", "oranges", "books", "pencils", "marbles", "stickers", "coins", "cards", "eggs", "flowers", "cookies", "shells", "stamps", "toys", "balloons", "candles", "buttons", "bottles", "tickets", "pens"]


def _num(x: Fraction | float) -> str:
    f = Fraction(x).limit_denominator(10**6)
    if f.denominator == 1:
        return str(f.numerator)
    return f"{float(f):.4f}".rstrip("0").rstrip(".")


def add_steps(a: int, b: int) -> list[str]:
    """Column addition with carries."""
    steps, carry, place, x, y = [], 0, 0, a, b
    names = ["ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands"]
    while x or y or carry:
        s = x % 10 + y % 10 + carry
        note = f" + {carry}" if carry else ""
        steps.append(f"{names[place] if place < 6 else 'next'}: {x % 10} + {y % 10}{note} = {s}" + (f", write {s % 10}, carry 1" if s >= 10 else ""))
        carry, x, y, place = s // 10, x // 10, y // 10, place + 1
    return steps


def multiply_steps(a: int, b: int) -> list[str]:
    """a times each part of b, then the sum."""
    parts = [int(d) * 10**i for i, d in enumerate(reversed(str(b))) if d != "0"][::-1]
    steps = [f"{b} = {' + '.join(map(str, parts))}"] if len(parts) > 1 else []
    products = [a * p for p in parts]
    steps += [f"{a} * {p} = {q}" for p, q in zip(parts, products)]
    total = products[0] if products else 0
    for q in products[1:]:
        steps.append(f"{total} + {q} = {total + q}")
        total += q
    return steps


def arithmetic(r: random.Random) -> tuple[str, list[str], str]:
    """A bare calculation."""
    kind = r.choice("++--**/%x")
    if kind == "+":
        a, b = r.randint(1, 10 ** r.randint(1, 4)), r.randint(1, 10 ** r.randint(1, 4))
        return f"{a} + {b}", add_steps(a, b), str(a + b)
    if kind == "-":
        a, b = r.randint(1, 10 ** r.randint(1, 4)), r.randint(1, 10 ** r.randint(1, 4))
        if a < b and r.random() < 0.8:
            a, b = b, a
        tens = b // 10 * 10
        steps = [f"{a} - {tens} = {a - tens}", f"{a - tens} - {b - tens} = {a - b}"] if tens and b != tens else [f"{a} - {b} = {a - b}"]
        return f"{a} - {b}", steps, str(a - b)
    if kind == "*":
        a, b = r.randint(2, 10 ** r.randint(1, 3)), r.randint(2, r.choice([12, 99, 99, 999]))
        return f"{a} {r.choice(['*', 'x', 'times'])} {b}", multiply_steps(a, b), str(a * b)
    if kind == "/":
        b, q = r.randint(2, 25), r.randint(2, 200)
        return f"{b * q} / {b}", [f"{b} * {q} = {b * q}", f"so {b * q} / {b} = {q}"], str(q)
    if kind == "%":
        b, a = r.randint(2, 20), r.randint(10, 500)
        return f"{a} mod {b}", [f"{b} * {a // b} = {a // b * b}", f"{a} - {a // b * b} = {a % b}"], str(a % b)
    a, b, c = r.randint(2, 30), r.randint(2, 20), r.randint(1, 50)
    if r.random() < 0.5:
        return f"{a} * {b} + {c}", [f"{a} * {b} = {a * b}", f"{a * b} + {c} = {a * b + c}"], str(a * b + c)
    return f"({a} + {b}) * {c}", [f"{a} + {b} = {a + b}", f"{a + b} * {c} = {(a + b) * c}"], str((a + b) * c)


def word_problem(r: random.Random) -> tuple[str, list[str], str]:
    """A story with one to three steps."""
    n1, n2, n3 = r.sample(NAMES, 3)
    t = r.choice(THINGS)
    a, b, c = r.randint(5, 80), r.randint(2, 30), r.randint(2, 12)
    p = r.randint(2, 20)
    problems: list[Callable[[], tuple[str, list[str], str]]] = [
        lambda: (f"{n1} has {a} {t}. {n2} gives {n1} {b} more. How many {t} does {n1} have now?", [f"{n1} starts with {a} {t}.", f"{a} + {b} = {a + b}"], f"{a + b}"),
        lambda: (f"{n1} had {a + b} {t} and gave {b} of them to {n2}. How many {t} are left?", [f"{n1} starts with {a + b} and gives away {b}.", f"{a + b} - {b} = {a}"], f"{a}"),
        lambda: (f"A box holds {c} {t}. How many {t} are in {b} boxes?", [f"Each of the {b} boxes holds {c} {t}.", f"{b} * {c} = {b * c}"], f"{b * c}"),
        lambda: (f"{n1} shares {b * c} {t} equally among {c} friends. How many {t} does each friend get?", [f"{b * c} {t} are split into {c} equal parts.", f"{b * c} / {c} = {b}"], f"{b}"),
        lambda: (f"{n1} buys {c} {t} for {p} dollars each and pays with {c * p + b} dollars. How much change does {n1} get?", [f"Cost: {c} * {p} = {c * p} dollars.", f"Change: {c * p + b} - {c * p} = {b} dollars."], f"{b} dollars"),
        lambda: (f"{n1} has {a} {t}, {n2} has {b} more than {n1}. How many {t} do they have together?", [f"{n2} has {a} + {b} = {a + b} {t}.", f"Together: {a} + {a + b} = {2 * a + b}"], f"{2 * a + b}"),
        lambda: (f"{n1} has {a} {t}. {n2} has {c} times as many. How many {t} does {n2} have?", [f"{n2} has {c} * {a} {t}.", f"{c} * {a} = {c * a}"], f"{c * a}"),
        lambda: (f"A train travels {a} kilometers per hour. How far does it travel in {c} hours?", ["Distance is speed times time.", f"{a} * {c} = {a * c}"], f"{a * c} kilometers"),
        lambda: (f"{n1} drives {a * c} kilometers in {c} hours. What is the average speed?", ["Speed is distance divided by time.", f"{a * c} / {c} = {a}"], f"{a} kilometers per hour"),
        lambda: (f"A shirt costs {a * 10} dollars. It is reduced by {(d := r.choice([10, 20, 25, 50]))} percent. What is the new price?", [f"Discount: {a * 10} * {d} / 100 = {_num(Fraction(a * 10 * d, 100))} dollars.", f"New price: {a * 10} - {_num(Fraction(a * 10 * d, 100))} = {_num(a * 10 - Fraction(a * 10 * d, 100))} dollars."], f"{_num(a * 10 - Fraction(a * 10 * d, 100))} dollars"),
        lambda: (f"{n1} reads {b} pages a day. How many pages does {n1} read in {c} days?", [f"{b} pages a day for {c} days.", f"{b} * {c} = {b * c}"], f"{b * c} pages"),
        lambda: (f"A book has {b * c} pages. {n1} reads {b} pages every day. How many days does {n1} need?", [f"{b * c} / {b} = {c}"], f"{c} days"),
        lambda: (f"{n1} is {a} years old. {n2} is {b} years younger than {n1}. How old will {n2} be in {c} years?" if a > b else f"{n1} is {a + b} years old. How old will {n1} be in {c} years?",
                 [f"{n2} is {a} - {b} = {a - b} years old now.", f"In {c} years: {a - b} + {c} = {a - b + c}"] if a > b else [f"{a + b} + {c} = {a + b + c}"], f"{a - b + c if a > b else a + b + c} years old"),
        lambda: (f"There are {a} red and {b} blue {t} in a bag. {n1} takes out {c}. How many are left?", [f"At first there are {a} + {b} = {a + b} {t}.", f"{a + b} - {c} = {a + b - c}"], f"{a + b - c}"),
        lambda: (f"{n1} earns {p} dollars an hour and works {c} hours a day for {b} days. How much does {n1} earn?", [f"Per day: {p} * {c} = {p * c} dollars.", f"For {b} days: {p * c} * {b} = {p * c * b} dollars."], f"{p * c * b} dollars"),
        lambda: (f"A rectangle is {a} cm long and {b} cm wide. What is its area?", ["Area is length times width.", f"{a} * {b} = {a * b}"], f"{a * b} square centimeters"),
        lambda: (f"A rectangle is {a} cm long and {b} cm wide. What is its perimeter?", ["The perimeter is twice the sum of length and width.", f"{a} + {b} = {a + b}", f"2 * {a + b} = {2 * (a + b)}"], f"{2 * (a + b)} cm"),
        lambda: (f"{n1}, {n2} and {n3} have {a}, {b} and {c} {t}. How many {t} do they have in total?", [f"{a} + {b} = {a + b}", f"{a + b} + {c} = {a + b + c}"], f"{a + b + c}"),
        lambda: (f"What is the average of {a}, {a + 2 * b} and {a + b}?", [f"Sum: {a} + {a + 2 * b} + {a + b} = {3 * a + 3 * b}", f"{3 * a + 3 * b} / 3 = {a + b}"], f"{a + b}"),
        lambda: (f"What is {(d := r.choice([5, 10, 15, 20, 25, 30, 40, 50, 75]))}% of {a * 4}?", [f"{d}% of {a * 4} is {a * 4} * {d} / 100.", f"{a * 4} * {d} = {a * 4 * d}", f"{a * 4 * d} / 100 = {_num(Fraction(a * 4 * d, 100))}"], _num(Fraction(a * 4 * d, 100))),
        lambda: (f"Solve for x: {c}x + {b} = {c * p + b}", [f"Subtract {b} from both sides: {c}x = {c * p}", f"Divide by {c}: x = {p}"], f"x = {p}"),
        lambda: (f"Solve for x: x - {b} = {a}", [f"Add {b} to both sides: x = {a} + {b}", f"x = {a + b}"], f"x = {a + b}"),
        lambda: (f"Solve for x: {c}x - {b} = {c * p - b}", [f"Add {b} to both sides: {c}x = {c * p}", f"Divide by {c}: x = {p}"], f"x = {p}"),
        lambda: (f"{n1} saves {p} dollars every week. How many weeks are needed to buy a bike for {p * b} dollars?", [f"{p * b} / {p} = {b}"], f"{b} weeks"),
        lambda: (f"A farmer has {b} cows and {c} times as many sheep. How many animals are there?", [f"Sheep: {c} * {b} = {c * b}", f"Animals: {b} + {c * b} = {b + c * b}"], f"{b + c * b} animals"),
        lambda: (f"{n1} bakes {b} trays with {c} cookies each and eats {min(p, b * c)}. How many cookies are left?", [f"Baked: {b} * {c} = {b * c}", f"Left: {b * c} - {min(p, b * c)} = {b * c - min(p, b * c)}"], f"{b * c - min(p, b * c)} cookies"),
        lambda: (f"How many minutes are {c} hours and {b} minutes?", [f"{c} * 60 = {c * 60}", f"{c * 60} + {b} = {c * 60 + b}"], f"{c * 60 + b} minutes"),
        lambda: (f"Which is larger, {a} * {c} or {b} * {p}?", [f"{a} * {c} = {a * c}", f"{b} * {p} = {b * p}"], f"{a} * {c}" if a * c > b * p else (f"{b} * {p}" if b * p > a * c else "They are equal")),
        lambda: (f"What comes next in the sequence {a}, {a + b}, {a + 2 * b}, {a + 3 * b}?", [f"Each term is {b} more than the one before.", f"{a + 3 * b} + {b} = {a + 4 * b}"], f"{a + 4 * b}"),
        lambda: (f"Is {a * c + (d := r.randint(0, 1))} divisible by {c}?", [f"{c} * {(a * c + d) // c} = {(a * c + d) // c * c}", f"{a * c + d} - {(a * c + d) // c * c} = {(a * c + d) % c}"], "Yes" if (a * c + d) % c == 0 else "No"),
    ]
    return r.choice(problems)()


def maths_chat(r: random.Random) -> Chat:
    """A question with its steps, in the answer or in the thought."""
    if r.random() < 0.4:
        q, steps, answer = arithmetic(r)
        question = r.choice(["What is {q}?", "Calculate {q}.", "{q} = ?", "Compute {q}", "How much is {q}?", "{q}", "Work out {q}."]).format(q=q)
    else:
        question, steps, answer = word_problem(r)
        if r.random() < 0.2:
            question += r.choice([" Show your steps.", " Explain step by step.", " Think step by step."])
    style = r.random()
    if style < 0.3:
        return Chat([(question, f"The answer is {answer}." if r.random() < 0.5 else answer)], thought="\n".join(steps))
    if style < 0.45 and len(steps) <= 1:
        return Chat([(question, f"The answer is {answer}.")])
    joined = "\n".join(steps) if r.random() < 0.6 else "\n".join(f"{i}. {s}" for i, s in enumerate(steps, 1))
    return Chat([(question, f"{joined}\n\n{r.choice(['The answer is', 'Answer:', 'So the answer is'])} {answer}.")])
