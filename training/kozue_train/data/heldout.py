"""Held-out programming prompts with tests, and the filter that keeps their tasks out of training.

A training task is dropped where its function gives the expected answers on a prompt's tests
(`solves`), whatever its wording; documented functions from packages are dropped by name.
"""

from __future__ import annotations

import copy
import random
import re
import signal
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kozue_train.data.tasks import GENERATORS, Task, call


@dataclass(frozen=True)
class Prompt:
    """A request and the calls that a right answer passes."""

    text: str
    tests: tuple[tuple[tuple[Any, ...], Any], ...]


def _p(text: str, *tests: tuple[tuple[Any, ...], Any]) -> Prompt:
    return Prompt(text, tests)


CODE = [
    _p("Write a Python function that counts the vowels in a string.", (("hello",), 2), (("xyz",), 0), (("banana split",), 4)),
    _p("Write a function to find the second largest number in a list.", (([3, 9, 5],), 5), (([10, 2, 8, 4],), 8), (([-1, -5, -3],), -3)),
    _p("Write a Python function that returns the sum of the squares of the numbers in a list.", (([1, 2, 3],), 14), (([],), 0), (([-2, 5],), 29)),
    _p("Write a function that counts the uppercase letters in a string.", (("Hello World",), 2), (("abc",), 0), (("ABC d",), 3)),
    _p("Write a Python function that removes all vowels from a string.", (("banana",), "bnn"), (("sky",), "sky"), (("hello there",), "hll thr")),
    _p("Write a function that returns the product of the even numbers in a list.", (([2, 3, 4],), 8), (([1, 6, 10, 7],), 60), (([2],), 2)),
    _p("Write a Python function that returns the difference between the largest and the smallest number in a list.", (([3, 9, 5],), 6), (([10],), 0), (([-4, 4, 0],), 8), (([9, 1],), 8)),
    _p("Write a function to check whether a character is a vowel.", (("a",), True), (("b",), False), (("u",), True)),
    _p("Write a Python function that returns the cube of a number.", ((3,), 27), ((-2,), -8), ((0,), 0)),
    _p("Write a function that takes a list of words and a number n and returns the words that are longer than n characters.", ((["hi", "hello", "cat"], 2), ["hello", "cat"]), ((["a", "bb"], 5), []), ((["tree", "sun", "planet"], 3), ["tree", "planet"])),
    _p("Write a Python function that replaces every space in a string with an underscore.", (("a b c",), "a_b_c"), (("abc",), "abc"), (("hello big world",), "hello_big_world")),
    _p("Write a function that counts the negative numbers in a list.", (([1, -2, -3],), 2), (([0, 4],), 0), (([-1],), 1)),
    _p("Write a Python function that computes the average of the positive numbers in a list. Return 0 if there are none.", (([2, 4, -6],), 3), (([-1],), 0), (([5, 0, 10, 15],), 10)),
    _p("Write a function that returns the first even number in a list, or None if there is none.", (([1, 3, 4, 6],), 4), (([1, 3],), None), (([8, 1],), 8)),
    _p("Write a Python function that returns the sum of all multiples of 3 or 5 from 1 to n.", ((10,), 33), ((5,), 8), ((2,), 0)),
    _p("Write a function that computes the perimeter of a rectangle from its width and height.", ((2, 3), 10), ((5, 5), 20), ((1, 7), 16)),
    _p("Write a Python function that converts hours to seconds.", ((1,), 3600), ((2,), 7200), ((10,), 36000)),
    _p("Write a function that returns the number of words in a sentence that start with a vowel.", (("an apple fell",), 2), (("big tree",), 0), (("only one egg",), 3)),
    _p("Write a Python function that returns the sum of the even values of a dictionary.", (({"a": 2, "b": 3, "c": 4},), 6), (({"x": 1},), 0), (({"p": 10, "q": 20},), 30)),
    _p("Write a function that returns a list of the squares of the numbers from 1 to n.", ((3,), [1, 4, 9]), ((1,), [1]), ((5,), [1, 4, 9, 16, 25])),
    _p("Write a Python function that returns all odd numbers from 1 to n as a list.", ((5,), [1, 3, 5]), ((1,), [1]), ((8,), [1, 3, 5, 7])),
    _p("Write a function to check whether a number is divisible by both 3 and 5.", ((15,), True), ((9,), False), ((10,), False), ((30,), True)),
    _p("Write a Python function that returns the sum of the numbers at even positions (index 0, 2, 4, ...) of a list.", (([1, 2, 3],), 4), (([5],), 5), (([1, 10, 2, 20, 3, 30],), 6), (([7, 8],), 7)),
    _p("Write a function that returns the last word of a sentence.", (("the big house",), "house"), (("hi",), "hi"), (("one two",), "two")),
    _p("Write a Python function that capitalizes the first letter of a string and leaves the rest unchanged.", (("hello",), "Hello"), (("hELLO",), "HELLO"), (("a b",), "A b")),
    _p("Write a function that returns the length of the longest word in a list of words.", ((["a", "abc", "de"],), 3), ((["tree"],), 4), ((["sun", "river", "on"],), 5)),
    _p("Write a Python function that removes all None values from a list.", (([1, None, 2],), [1, 2]), (([None],), []), (([0, None, 3, None],), [0, 3])),
    _p("Write a function that returns the longest key of a dictionary.", (({"a": 1, "abc": 2},), "abc"), (({"tree": 0, "sun": 5},), "tree"), (({"x": 9},), "x")),
    _p("Write a Python function that takes two lists of equal length and returns a list with the larger element at each position.", (([1, 5], [3, 2]), [3, 5]), (([0], [0]), [0]), (([7, 1, 4], [6, 2, 4]), [7, 2, 4])),
    _p("Write a function that swaps the elements of every pair in a list of tuples.", (([(1, 2), (3, 4)],), [(2, 1), (4, 3)]), (([(5, 5)],), [(5, 5)]), (([(0, 9), (8, 1)],), [(9, 0), (1, 8)])),
    _p("Write a Python function that returns the sum of the positive numbers in a matrix.", (([[1, -2], [3, 4]],), 8), (([[-1]],), 0), (([[5, 0], [-5, 5]],), 10)),
    _p("Write a function that converts a list of numeric strings to a list of integers.", ((["1", "2"],), [1, 2]), ((["10", "-3"],), [10, -3]), ((["007"],), [7])),
    _p('Write a Python function that counts the words in a list that end with "s".', ((["cats", "dog", "bus"],), 2), ((["a"],), 0), ((["s", "trees"],), 2)),
    _p("Write a function that returns the absolute difference between two numbers.", ((3, 8), 5), ((8, 3), 5), ((-2, 2), 4)),
    _p("Write a Python function that returns the sum of all integers between a and b, both included.", ((1, 4), 10), ((5, 5), 5), ((2, 6), 20)),
    _p("Write a function that computes the alternating sum of a list: first element minus the second plus the third and so on.", (([5, 3, 2],), 4), (([10],), 10), (([1, 2, 3, 4],), -2)),
    _p("Write a Python function that returns how many distinct elements a list has.", (([1, 1, 2],), 2), (([],), 0), (([4, 5, 6, 4],), 3), (([3, 2, 1],), 3), (([2, 2, 2, 5, 5],), 2)),
    _p("Write a function that checks whether all numbers in a list are positive.", (([1, 2],), True), (([2, 1],), True), (([1, -2],), False), (([3, 0],), False)),
    _p("Write a Python function to check if a list contains a negative number.", (([1, -2],), True), (([1, 2],), False), (([0],), False)),
    _p("Write a function that returns the index of the smallest number in a list.", (([4, 2, 9],), 1), (([1],), 0), (([5, 6, 1, 3],), 2)),
    _p("Write a Python function that returns a list without its last element.", (([1, 2, 3],), [1, 2]), (([1],), []), (([4, 5],), [4])),
    _p("Write a function that returns the last digit of a positive integer.", ((123,), 3), ((10,), 0), ((7,), 7)),
    _p("Write a Python function to check whether a string contains only uppercase letters.", (("ABC",), True), (("AbC",), False), (("XYZ",), True)),
    _p("Write a function that counts the digits in a string.", (("a1b22",), 3), (("abc",), 0), (("2024",), 4)),
    _p("Write a Python function that reverses each word of a sentence but keeps the word order.", (("abc def",), "cba fed"), (("hi",), "ih"), (("one two three",), "eno owt eerht")),
    _p("Write a function that doubles every number in a list.", (([1, 2],), [2, 4]), (([],), []), (([0, -3],), [0, -6])),
    _p("Write a Python function that returns the smallest value in a dictionary.", (({"a": 3, "b": 1},), 1), (({"x": 7},), 7), (({"p": 4, "q": 9, "r": 6},), 4)),
    _p("Write a function that multiplies every element of a list by its index.", (([5, 6, 7],), [0, 6, 14]), (([1],), [0]), (([2, 2, 2, 2],), [0, 2, 4, 6])),
    _p("Write a Python function that concatenates two lists.", (([1], [2, 3]), [1, 2, 3]), (([], [4]), [4]), (([3, 1], [2, 0]), [3, 1, 2, 0]), ((["b"], ["a"]), ["b", "a"])),
    _p("Write a function that computes the area of a circle from its radius. Use 3.14 for pi.", ((1,), 3.14), ((2,), 12.56), ((10,), 314.0)),
]

NAMES = re.compile(
    r"^_*(count_?vowels|vowel_?count|(find_?)?second_?(largest|max|highest)|sum_?(of_?)?squares|remove_?vowels|is_?vowel|cube|hours_to_seconds|capitali[sz]e(_?first)?|"
    r"last_word|circle_area|area_of_circle|rectangle_perimeter|swap_pairs|alternating_sum|count_?(digits|uppercase|true)|last_digit|remove_none|count_char|argmin)$", re.IGNORECASE
)


def equal(got: Any, want: Any) -> bool:
    """Equality with a tolerance for floats; True does not equal 1."""
    if isinstance(want, bool) or isinstance(got, bool):
        return got is want or type(got) is type(want) and got == want
    if isinstance(want, (int, float)) and isinstance(got, (int, float)):
        return abs(got - want) <= 1e-6 * max(1.0, abs(want))
    return type(got) is type(want) and bool(got == want)


class _Slow(BaseException):
    """Raised by the timer inside a call that runs too long."""


def _timed(source: str, name: str, args: tuple[Any, ...], seconds: float = 0.05) -> Any:
    def stop(*_: object) -> None:
        raise _Slow

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call(source, name, args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _plain(kind: type) -> type:
    return int if kind in (float, bool) else kind


@lru_cache
def _kind_type(kind: str) -> type:
    return _plain(type(GENERATORS[kind](random.Random(0))))


def solves(task: Task, prompts: list[Prompt] | None = None) -> int | None:
    """Index of a held-out prompt whose tests the task's first body passes, or None. Main thread only."""
    source = task.source(task.codes[0])
    takes = [_kind_type(kind) for _, kind in task.args]
    for i, prompt in enumerate(prompts or CODE):
        # A task for other types of arguments is another task; calling it anyway (a string times a billion) may be costly.
        if sorted(map(str, takes)) != sorted(str(_plain(type(a))) for a in prompt.tests[0][0]):
            continue
        for flip in (False, True) if len(task.args) == 2 else (False,):
            try:
                if all(equal(_timed(source, task.names[0], args[::-1] if flip else args), want) for args, want in copy.deepcopy(prompt.tests)):
                    return i
            except (Exception, _Slow):  # noqa: BLE001 - any failure means that the task does something else
                continue
    return None
