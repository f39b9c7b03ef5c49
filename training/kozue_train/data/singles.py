"""Small tasks on one or two plain values: tests, formulas, conversions between units of a family."""

from __future__ import annotations

import itertools

from kozue_train.data.grids import (
    MAPS,
    Condition,
    char_conditions,
    number_conditions,
    word_conditions,
)
from kozue_train.data.tasks import Task

UNITS: dict[str, dict[str, float]] = {
    "time": {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400, "weeks": 604800},
    "length": {"millimeters": 1, "centimeters": 10, "meters": 1000, "kilometers": 1_000_000},
    "mass": {"milligrams": 1, "grams": 1000, "kilograms": 1_000_000, "tonnes": 1_000_000_000},
    "size": {"bits": 1, "bytes": 8, "kilobytes": 8192, "megabytes": 8388608},
    "volume": {"milliliters": 1, "centiliters": 10, "deciliters": 100, "liters": 1000},
    "money": {"cents": 1, "dimes": 10, "quarters": 25, "dollars": 100},
    "count": {"pieces": 1, "pairs": 2, "dozens": 12, "scores": 20, "gross": 144},
    "age": {"months": 1, "years": 12, "decades": 120, "centuries": 1200},
}

# Name, arguments, formula, words.
FORMULAS = [
    ("pentagon_perimeter", "side", "5 * side", "perimeter of a regular pentagon from its side"), ("hexagon_perimeter", "side", "6 * side", "perimeter of a regular hexagon from its side"), ("rhombus_perimeter", "side", "4 * side", "perimeter of a rhombus from its side"),
    ("rhombus_area", "d1,d2", "d1 * d2 / 2", "area of a rhombus from its diagonals"), ("kite_area", "d1,d2", "d1 * d2 / 2", "area of a kite from its diagonals"), ("parallelogram_perimeter", "a,b", "2 * a + 2 * b + 0 * a", "perimeter of a parallelogram from its two sides"),
    ("isosceles_perimeter", "base,leg", "base + 2 * leg", "perimeter of an isosceles triangle from its base and leg"), ("trapezoid_perimeter", "a,b,c,d", "a + b + c + d", "perimeter of a trapezoid from its four sides"), ("ellipse_area", "a,b", "3.14159 * a * b", "area of an ellipse from its half axes, with 3.14159 for pi"),
    ("semicircle_area", "radius", "3.14 * radius ** 2 / 2", "area of a semicircle from its radius, with 3.14 for pi"), ("quarter_circle_area", "radius", "3.14 * radius ** 2 / 4", "area of a quarter circle from its radius, with 3.14 for pi"), ("ring_area", "outer,inner", "3.14 * (outer ** 2 - inner ** 2)", "area of a ring from its outer and inner radius, with 3.14 for pi"),
    ("circle_perimeter", "radius", "2 * 3.14 * radius", "circumference of a circle from its radius, with 3.14 for pi"), ("circle_area_from_diameter", "diameter", "3.14 * (diameter / 2) ** 2", "area of a circle from its diameter, with 3.14 for pi"), ("diameter", "radius", "2 * radius", "diameter of a circle from its radius"),
    ("radius_from_diameter", "diameter", "diameter / 2", "radius of a circle from its diameter"), ("prism_volume", "area,height", "area * height", "volume of a prism from its base area and height"), ("pyramid_volume", "area,height", "area * height / 3", "volume of a pyramid from its base area and height"),
    ("cylinder_side", "radius,height", "2 * 3.14 * radius * height", "lateral area of a cylinder, with 3.14 for pi"), ("cube_diagonal", "side", "side * 3 ** 0.5", "space diagonal of a cube from its side"), ("square_side", "area", "area ** 0.5", "side of a square from its area"),
    ("rectangle_height", "area,width", "area / width", "height of a rectangle from its area and width"), ("angle_sum", "n", "(n - 2) * 180", "sum of the angles of a polygon with n sides"), ("diagonals", "n", "n * (n - 3) // 2", "number of diagonals of a polygon with n sides"),
    ("handshakes", "n", "n * (n - 1) // 2", "number of handshakes among n people"), ("work", "force,distance", "force * distance", "work done by a force over a distance"), ("power", "energy,time", "energy / time", "power from energy and time"),
    ("voltage", "current,resistance", "current * resistance", "voltage from current and resistance"), ("current", "voltage,resistance", "voltage / resistance", "current from voltage and resistance"), ("momentum", "mass,velocity", "mass * velocity", "momentum of a moving mass"),
    ("potential_energy", "mass,height", "mass * 9.81 * height", "potential energy of a mass at a height, with g = 9.81"), ("acceleration", "change,time", "change / time", "acceleration from a change of velocity and a time"), ("pressure", "force,area", "force / area", "pressure from force and area"),
    ("gross_price", "net,rate", "net * (100 + rate) / 100", "gross price from a net price and a tax rate in percent"), ("tip", "bill,rate", "bill * rate / 100", "tip on a bill at a rate in percent"), ("margin", "price,cost", "(price - cost) / price * 100", "margin in percent from price and cost"),
    ("yearly_salary", "monthly", "monthly * 12", "yearly salary from a monthly salary"), ("monthly_rate", "yearly", "yearly / 12", "monthly rate from a yearly rate"), ("total_cost", "price,count", "price * count", "total cost from a unit price and a count"),
    ("average_of_three", "a,b,c", "(a + b + c) / 3", "average of three numbers"), ("sum_of_three", "a,b,c", "a + b + c", "sum of three numbers"), ("product_of_three", "a,b,c", "a * b * c", "product of three numbers"), ("smallest_of_three", "a,b,c", "min(a, b, c)", "smallest of three numbers"),
    ("range_of_three", "a,b,c", "max(a, b, c) - min(a, b, c)", "difference between the largest and the smallest of three numbers"), ("add", "a,b", "a + b", "sum of two numbers"), ("subtract", "a,b", "a - b", "difference of two numbers"), ("multiply", "a,b", "a * b", "product of two numbers"),
    ("quotient", "a,b", "a / b", "quotient of two numbers"), ("whole_quotient", "a,b", "a // b", "quotient of two numbers without the remainder"), ("remainder", "a,b", "a % b", "remainder of a divided by b"), ("squared_difference", "a,b", "(a - b) ** 2", "square of the difference of two numbers"),
    ("sum_of_cubes", "a,b", "a ** 3 + b ** 3", "sum of the cubes of two numbers"), ("difference_of_squares", "a,b", "a ** 2 - b ** 2", "difference of the squares of two numbers"), ("geometric_mean", "a,b", "(a * b) ** 0.5", "geometric mean of two numbers"), ("harmonic_mean", "a,b", "2 * a * b / (a + b)", "harmonic mean of two numbers"),
    ("larger", "a,b", "max(a, b)", "larger of two numbers"), ("smaller", "a,b", "min(a, b)", "smaller of two numbers"), ("fourth_power", "n", "n ** 4", "fourth power of a number"), ("fifth_power", "n", "n ** 5", "fifth power of a number"), ("square", "n", "n ** 2", "square of a number"),
    ("reciprocal", "n", "1 / n", "reciprocal of a number"), ("square_root", "n", "n ** 0.5", "square root of a number"), ("half", "n", "n / 2", "half of a number"), ("double", "n", "n * 2", "double of a number"), ("triple", "n", "n * 3", "triple of a number"), ("next_number", "n", "n + 1", "number after a given integer"),
    ("previous_number", "n", "n - 1", "number before a given integer"), ("next_even", "n", "n + 2 - n % 2", "next even number after a given integer"), ("next_odd", "n", "n + 1 + n % 2", "next odd number after a given integer"), ("tens_digit", "n", "n // 10 % 10", "tens digit of a positive integer"), ("hundreds_digit", "n", "n // 100 % 10", "hundreds digit of a positive integer"),
    ("first_digit", "n", "int(str(n)[0])", "first digit of a positive integer"), ("without_last_digit", "n", "n // 10", "positive integer without its last digit"), ("last_two_digits", "n", "n % 100", "last two digits of a positive integer"), ("distance_to_ten", "n", "abs(n - 10)", "distance of a number from ten"),
]

# Items of mixed lists: what is removed or kept, test on the item.
KINDS = [
    ("empty strings", 'item == ""', [["a", "", "b"], ["", ""], ["x"]]), ("zeros", "item == 0", [[1, 0, 2], [0], [3]]), ("negative numbers and zeros", "item <= 0", [[1, -2, 0], [5], [-1]]), ("strings", "isinstance(item, str)", [[1, "a", 2], ["b"], [3]]),
    ("integers", "isinstance(item, int)", [[1, "a", 2], ["b"], [3]]), ("lists", "isinstance(item, list)", [[1, [2], 3], [[4]], [5]]), ("empty lists", "item == []", [[[1], [], [2]], [[]], [[3]]]), ("false values", "not item", [[1, 0, "", "a"], [0], [2]]), ("numbers", "isinstance(item, (int, float))", [[1, "a", 2.5], ["b"], [3]]),
]


def _check(name: str, what: str, arg: tuple[str, str], c: Condition, value: str) -> Task:
    expr = c.expr.format(v=value)
    args = [arg] + ([c.arg] if c.arg else [])
    codes = [f"    return {expr}", f"    if {expr}:\n        return True\n    return False"]
    return Task(f"single/{name}/{c.name}", [f"is_{c.name}", f"check_{c.name}", f"{name}_is_{c.name}"], args, [f"check whether {what} is {c.is_}", f"return True if {what} is {c.is_}", f"determine whether {what} is {c.is_}", f"test if {what} is {c.is_}"], codes)


def single_tasks() -> list[Task]:
    """All tasks of this file."""
    out: list[Task] = []
    numbers = number_conditions()
    for a, b in itertools.combinations((2, 3, 4, 5, 7, 9, 10), 2):
        for word, op in (("both", "and"), ("either", "or")):
            out.append(Task(f"single/div/{word}/{a}/{b}", [f"divisible_by_{a}_{op}_{b}", f"is_divisible_by_{a}_{op}_{b}"], [("n", "posint")], [f"check whether a number is divisible by {word} {a} {op} {b}", f"return True if a number is divisible by {word} {a} {op} {b}", f"determine if n is divisible by {a} {op} by {b}"],
                            [f"    return n % {a} == 0 {op} n % {b} == 0", f"    if n % {a} == 0 {op} n % {b} == 0:\n        return True\n    return False"]))
            for kind, start, step, end, names in (("sum", "total = 0", "total += i", "total", "sum of"), ("count", "count = 0", "count += 1", "count", "number of"), ("list", "result = []", "result.append(i)", "result", "list of")):
                text = f"{names} all numbers from 1 to n that are divisible by {word} {a} {op} {b}" if word == "both" else f"{names} all multiples of {a} or {b} from 1 to n"
                closed = {"sum": "sum(i for i in range(1, n + 1) if {c})", "count": "sum(1 for i in range(1, n + 1) if {c})", "list": "[i for i in range(1, n + 1) if {c}]"}[kind].format(c=f"i % {a} == 0 {op} i % {b} == 0")
                out.append(Task(f"single/divrange/{kind}/{word}/{a}/{b}", [f"{kind}_divisible_by_{a}_{op}_{b}", f"{kind}_of_multiples"], [("n", "smallint")], [f"return the {text}", f"compute the {text}"],
                                [f"    return {closed}", f"    {start}\n    for i in range(1, n + 1):\n        if i % {a} == 0 {op} i % {b} == 0:\n            {step}\n    return {end}"]))
    out += [_check("number", "a number", ("n", "int"), c, "n") for c in numbers]
    out += [_check("char", "a character", ("char", "letter"), c, "char") for c in char_conditions()]
    out += [_check("word", "a word", ("word", "word"), c, "word") for c in word_conditions()]
    for phrase, name, expr in MAPS:
        out.append(Task(f"single/map/{name}/{expr}", [name, f"number_{name}"], [("n", "posint")], [f"return the {phrase.removesuffix('s')} of a number".replace("halve of", "half of")], ["    return " + expr.format(v="n")]))
    for family in UNITS.values():
        for (old_unit, fa), (new_unit, fb) in itertools.permutations(family.items(), 2):
            factor = fa / fb
            expr = f"{old_unit} * {int(factor)}" if factor >= 1 and factor == int(factor) else (f"{old_unit} / {int(fb / fa)}" if fb / fa == int(fb / fa) else f"{old_unit} * {int(fa)} / {int(fb)}")
            out.append(Task(f"convert/{old_unit}/{new_unit}", [f"{old_unit}_to_{new_unit}", f"convert_{old_unit}_to_{new_unit}", f"{old_unit}_in_{new_unit}"], [(old_unit, "posint")],
                            [f"convert {old_unit} to {new_unit}", f"return how many {new_unit} a number of {old_unit} is", f"express a number of {old_unit} in {new_unit}", f"return the number of {new_unit} in a number of {old_unit}"], [f"    return {expr}"]))
    for name, args, expr, what in FORMULAS:
        out.append(Task(f"formula/{name}", [name, f"get_{name}", f"compute_{name}", f"calculate_{name}"], [(a, "posint") for a in args.split(",")], [f"{v} the {what}" for v in ("return", "compute", "calculate", "find")], [f"    return {expr}"]))
    for what, test, _ in KINDS:
        for verb, name, keep in (("remove all", "remove", f"not ({test})"), ("keep only the", "keep", test)):
            tail = "from" if name == "remove" else "of"
            out.append(Task(f"mixed/{name}/{what}", [f"{name}_{what.replace(' ', '_')}"], [("items", "mixed_list")], [f"{verb} {what} {tail} a list", f"return a list without its {what}" if name == "remove" else f"return a list of the {what} in a list"],
                            [f"    return [item for item in items if {keep}]", f"    result = []\n    for item in items:\n        if {keep}:\n            result.append(item)\n    return result"]))
        out.append(Task(f"mixed/count/{what}", [f"count_{what.replace(' ', '_')}"], [("items", "mixed_list")], [f"count the {what} in a list", f"return how many {what} a list contains"], [f"    return sum(1 for item in items if {test})", f"    count = 0\n    for item in items:\n        if {test}:\n            count += 1\n    return count"]))
    for old, new, left, right in itertools.chain(*[[(x, y, p, q), (y, x, q, p)] for x, y, p, q in ((" ", "-", "space", "dash"), (",", ";", "comma", "semicolon"), (".", "!", "dot", "exclamation mark"), ("/", "\\\\", "slash", "backslash"), ("_", "-", "underscore", "dash"), ("a", "e", "letter a", "letter e"), (" ", ".", "space", "dot"), (":", " ", "colon", "space"))]):
        out.append(Task(f"replace/{left}/{right}", [f"replace_{left.replace(' ', '_')}", f"{left.replace(' ', '_')}_to_{right.replace(' ', '_')}"], [("s", "sentence")], [f"replace every {left} in a string with a {right}", f"replace all occurrences of the {left} in a text by a {right}", f"return a string with each {left} changed to a {right}"],
                        [f'    return s.replace("{old}", "{new}")', f'    result = ""\n    for char in s:\n        if char == "{old}":\n            result += "{new}"\n        else:\n            result += char\n    return result']))
    for k, word in enumerate(("first", "second", "third", "fourth")):
        out.append(Task(f"nth/word/{word}", [f"{word}_word", f"get_{word}_word"], [("s", "sentence")], [f"return the {word} word of a sentence", f"get the {word} word in a string"], [f"    return s.split()[{k}]"]))
        out.append(Task(f"nth/item/{word}", [f"{word}_element", f"{word}_item"], [("nums", "list[int]")], [f"return the {word} element of a list", f"get the {word} item in a list"], [f"    return nums[{k}]"]))
        out.append(Task(f"nth/char/{word}", [f"{word}_character"], [("s", "word")], [f"return the {word} character of a string"], [f"    return s[{k}]"]))
    return out
