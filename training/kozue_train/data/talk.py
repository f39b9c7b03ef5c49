"""Short dialogues, small knowledge, extraction to JSON, text edits and conversations, by templates."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from kozue_train.data.chat import Chat
from kozue_train.data.tasks import NAMES, WORDS

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Poland": "Warsaw", "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Hungary": "Budapest", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Egypt": "Cairo", "Kenya": "Nairobi", "Canada": "Ottawa", "Mexico": "Mexico City", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Australia": "Canberra", "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Thailand": "Bangkok", "Vietnam": "Hanoi", "Cuba": "Havana", "Belgium": "Brussels",
}
CONTINENTS = {"France": "Europe", "Germany": "Europe", "Japan": "Asia", "China": "Asia", "India": "Asia", "Egypt": "Africa", "Kenya": "Africa", "Canada": "North America", "Mexico": "North America", "Brazil": "South America", "Peru": "South America", "Poland": "Europe"}
OPPOSITES = {"hot": "cold", "big": "small", "fast": "slow", "light": "dark", "happy": "sad", "old": "young", "high": "low", "hard": "soft", "open": "closed", "early": "late", "full": "empty", "rich": "poor", "strong": "weak", "wet": "dry", "clean": "dirty", "near": "far", "loud": "quiet", "sharp": "blunt", "thick": "thin", "wide": "narrow"}
FACTS = {
    "How many days are in a week?": "There are seven days in a week.", "How many months are in a year?": "There are twelve months in a year.", "How many hours are in a day?": "A day has 24 hours.", "How many legs does a spider have?": "A spider has eight legs.",
    "What color is the sky on a clear day?": "On a clear day the sky is blue.", "What is the largest planet of the solar system?": "Jupiter is the largest planet of the solar system.", "Which planet is closest to the sun?": "Mercury is the planet closest to the sun.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius at sea level.", "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.", "What is the chemical formula of water?": "The chemical formula of water is H2O.",
    "What do bees make?": "Bees make honey.", "How many sides does a triangle have?": "A triangle has three sides.", "How many sides does a hexagon have?": "A hexagon has six sides.", "What is the freezing point of water in Fahrenheit?": "Water freezes at 32 degrees Fahrenheit.",
    "What is Python?": "Python is a programming language that is known for its readable syntax.", "What is a list in Python?": "A list is an ordered collection of items that can be changed. You write it with square brackets, such as `[1, 2, 3]`.",
    "What is a dictionary in Python?": "A dictionary maps keys to values. You write it with braces, such as `{\"a\": 1}`, and look a value up with `d[key]`.", "What is a tuple in Python?": "A tuple is an ordered collection of items that cannot be changed. You write it with parentheses, such as `(1, 2)`.",
    "What is a set in Python?": "A set is a collection of distinct items without an order. You write it with braces, such as `{1, 2, 3}`.", "What does len do in Python?": "`len` returns the number of items of a list, string, dictionary or other collection.",
    "What is a function?": "A function is a named piece of code that takes arguments and may return a result.", "What is a variable?": "A variable is a name for a value that a program can use and change.", "What is recursion?": "Recursion means that a function calls itself on a smaller part of the problem until it reaches a simple case.",
    "What is a loop?": "A loop repeats a block of code, either for each item of a collection or while a condition is true.", "What is the difference between a list and a tuple?": "A list can be changed after it is made, a tuple cannot. Lists use square brackets and tuples use parentheses.",
    "What does the return statement do?": "`return` ends a function and hands a value back to the caller.", "What is an integer?": "An integer is a whole number, such as -3, 0 or 42.", "What is a string?": "A string is a sequence of characters, such as `\"hello\"`.", "What is a boolean?": "A boolean is a value that is either true or false.",
    "What is a list comprehension?": "A list comprehension builds a list from a loop in one expression, such as `[x * x for x in range(5)]`.", "What is an algorithm?": "An algorithm is a sequence of steps that solves a problem.", "What is a bug?": "A bug is a mistake in a program that makes it behave in a wrong way.",
    "What is the time complexity of binary search?": "Binary search takes O(log n) time because it halves the range in every step.", "What is a stack?": "A stack is a collection in which the last item added is the first one removed.", "What is a queue?": "A queue is a collection in which the first item added is the first one removed.",
    "Why is the sky blue?": "Air scatters blue light more strongly than red light, so blue light reaches us from every direction.", "Why do we sleep?": "Sleep lets the body rest and the brain store what it has learned.", "What do plants need to grow?": "Plants need light, water, air and nutrients.",
    "How do fish breathe?": "Fish breathe with gills that take oxygen out of the water.", "What is the moon?": "The moon is a ball of rock that moves around the Earth.", "What causes rain?": "Rain falls when water vapour in clouds cools and forms drops that are too heavy to float.",
}
IDENTITY = [
    (["Who are you?", "What are you?", "What is your name?", "who are you", "Introduce yourself.", "Tell me about yourself."], ["I am Kozue, a small language model that runs on your own machine.", "My name is Kozue. I am a small language model and I run locally.", "I am Kozue, a small assistant for Python questions and simple tasks."]),
    (["What can you do?", "How can you help me?", "What are you good at?"], ["I can write small Python functions, explain short code, do simple arithmetic and answer short questions.", "I can help with small Python functions, simple arithmetic, JSON and short texts."]),
    (["Hello", "Hi", "Hello!", "Hey there", "Good morning", "Hi Kozue"], ["Hello! How can I help you?", "Hi! What can I do for you?", "Hello! What would you like to do?"]),
    (["Thanks", "Thank you!", "Thanks a lot", "Great, thank you"], ["You are welcome!", "Happy to help!", "You are welcome. Is there anything else?"]),
    (["Bye", "Goodbye", "See you later"], ["Goodbye!", "See you!", "Goodbye, have a nice day!"]),
    (["How are you?", "How are you doing?", "how is it going"], ["I am fine, thank you. How can I help you?", "I am doing well. What can I do for you?"]),
    (["Are you a human?", "Are you a robot?", "Are you real?"], ["No, I am a language model.", "I am a program: a small language model named Kozue."]),
]
GROUPS = {
    "fruits": ["apples", "bananas", "oranges", "pears", "grapes", "cherries", "plums", "lemons", "peaches"], "animals": ["dogs", "cats", "horses", "cows", "lions", "elephants", "rabbits", "foxes", "bears"], "colors": ["red", "blue", "green", "yellow", "orange", "purple", "black", "white", "brown"],
    "vegetables": ["carrots", "potatoes", "onions", "tomatoes", "beans", "peas", "cabbages", "peppers"], "countries": list(CAPITALS)[:16], "programming languages": ["Python", "Rust", "C", "Java", "JavaScript", "Go", "Ruby", "Swift"], "planets": ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"],
    "musical instruments": ["piano", "guitar", "violin", "flute", "drums", "trumpet", "cello", "harp"], "sports": ["football", "tennis", "swimming", "running", "basketball", "hockey", "rowing", "cycling"], "tools": ["hammer", "saw", "screwdriver", "drill", "wrench", "pliers"],
}
CITIES = [*CAPITALS.values(), "Boston", "Chicago", "Lyon", "Hamburg", "Osaka", "Porto"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"]
JOBS = ["teacher", "nurse", "engineer", "baker", "pilot", "painter", "lawyer", "farmer", "student", "driver", "doctor", "cook", "writer", "plumber"]
GOOD = ["I love this {x}.", "The {x} works great and I am very happy.", "What a wonderful {x}!", "The best {x} I have ever had.", "Excellent {x}, I recommend it.", "I am really pleased with the {x}."]
BAD = ["I hate this {x}.", "The {x} broke after one day.", "What a terrible {x}!", "The worst {x} I have ever had.", "I want my money back, the {x} is awful.", "I am disappointed with the {x}."]


def fact(r: random.Random) -> Chat:
    """A short question about the world or about Python."""
    kind = r.random()
    if kind < 0.3:
        country = r.choice(list(CAPITALS))
        city = CAPITALS[country]
        return r.choice([
            Chat([(r.choice([f"What is the capital of {country}?", f"Which city is the capital of {country}?", f"capital of {country}?", f"Name the capital of {country}."]), r.choice([f"The capital of {country} is {city}.", f"{city}.", f"It is {city}."]))]),
            Chat([(r.choice([f"{city} is the capital of which country?", f"In which country is {city}?"]), r.choice([f"{city} is the capital of {country}.", f"{country}."]))]),
        ])
    if kind < 0.4:
        country = r.choice(list(CONTINENTS))
        return Chat([(f"On which continent is {country}?", f"{country} is in {CONTINENTS[country]}.")])
    if kind < 0.55:
        word = r.choice(list(OPPOSITES))
        a, b = (word, OPPOSITES[word]) if r.random() < 0.5 else (OPPOSITES[word], word)
        return Chat([(r.choice([f"What is the opposite of {a}?", f'Give me the opposite of "{a}".', f"opposite of {a}"]), r.choice([f"The opposite of {a} is {b}.", f"{b.capitalize()}.", b]))])
    question = r.choice(list(FACTS))
    return Chat([(question if r.random() < 0.8 else question.lower().rstrip("?"), FACTS[question])])


def identity(r: random.Random) -> Chat:
    """Greetings and questions about the model, sometimes several turns."""
    turns = []
    for questions, answers in r.sample(IDENTITY, r.choice([1, 1, 2])):
        turns.append((r.choice(questions), r.choice(answers)))
    return Chat(turns)


def listing(r: random.Random) -> Chat:
    """Name n things; first letters, counting, sorting."""
    group = r.choice(list(GROUPS))
    n = r.randint(2, 5)
    items = r.sample(GROUPS[group], n)
    word = ["", "one", "two", "three", "four", "five"][n]
    question = r.choice([f"Name {word} {group}.", f"List {n} {group}.", f"Give me {word} examples of {group}.", f"Can you name {n} {group}?"])
    style = r.random()
    if style < 0.35:
        return Chat([(question, "\n".join(f"{i}. {x}" for i, x in enumerate(items, 1)))])
    if style < 0.6:
        return Chat([(question, "\n".join(f"- {x}" for x in items))])
    if style < 0.8:
        return Chat([(question + r.choice([" As JSON.", " Answer with a JSON list.", " Return a JSON array."]), json.dumps(items))])
    return Chat([(question, ", ".join(items[:-1]) + " and " + items[-1] + ".")])


def person(r: random.Random) -> tuple[str, dict[str, object]]:
    """A sentence about a person and its facts."""
    name, age, city, job = r.choice(NAMES), r.randint(18, 80), r.choice(CITIES), r.choice(JOBS)
    text = r.choice([
        f"{name} is {age} years old, lives in {city} and works as a {job}.", f"My name is {name}. I am a {job} from {city} and I am {age}.", f"{name}, a {age}-year-old {job}, has moved to {city}.",
        f"The {job} {name} ({age}) lives in {city}.", f"In {city} I met {name}, who is {age} and works as a {job}.",
    ])
    return text, {"name": name, "age": age, "city": city, "job": job}


def order(r: random.Random) -> tuple[str, dict[str, object]]:
    """A sentence about an order and its facts."""
    name, count, item, price = r.choice(NAMES), r.randint(1, 20), r.choice(WORDS) + "s", r.randint(1, 99)
    text = r.choice([f"{name} ordered {count} {item} for {price} dollars each.", f"Please send {count} {item} at {price} dollars each to {name}.", f"Order: {count} x {item}, unit price {price} dollars, customer {name}."])
    return text, {"customer": name, "item": item, "quantity": count, "price": price}


def event(r: random.Random) -> tuple[str, dict[str, object]]:
    """A sentence about a meeting and its facts."""
    what, city, day, month, hour = r.choice(["meeting", "concert", "party", "workshop", "lecture"]), r.choice(CITIES), r.randint(1, 28), r.choice(MONTHS), r.randint(8, 20)
    text = r.choice([f"The {what} is in {city} on {day} {month} at {hour}:00.", f"On {month} {day} there will be a {what} in {city}, starting at {hour}:00.", f"Come to the {what}: {city}, {day} {month}, {hour}:00."])
    return text, {"event": what, "city": city, "date": f"{day} {month}", "time": f"{hour}:00"}


def extraction(r: random.Random) -> Chat:
    """Facts of a sentence as JSON, or one of them as a word."""
    text, facts = r.choice([person, order, event])(r)
    keys = r.sample(list(facts), r.randint(2, len(facts)))
    if r.random() < 0.25:
        key = keys[0]
        question = r.choice([f"What is the {key} in this text?\n\n{text}", f"{text}\n\nWhat is the {key}?", f'Extract the {key} from: "{text}"'])
        return Chat([(question, str(facts[key]))])
    chosen = {k: facts[k] for k in keys}
    names = ", ".join(f'"{k}"' for k in keys) if r.random() < 0.5 else ", ".join(keys)
    question = r.choice([
        f"Extract {names} as JSON from this text:\n\n{text}", f"{text}\n\nReturn a JSON object with the keys {names}.", f'Convert to JSON with the keys {names}: "{text}"', f"Read the text and answer in JSON ({names}).\n\nText: {text}",
    ])
    answer = json.dumps(chosen, indent=2) if r.random() < 0.3 else json.dumps(chosen)
    return Chat([(question, f"```json\n{answer}\n```" if r.random() < 0.15 else answer)])


def data_question(r: random.Random) -> Chat:
    """Questions about a small JSON table."""
    rows = [{"name": n, "age": r.randint(10, 70), "city": r.choice(CITIES)} for n in r.sample(NAMES, 3)]
    blob = json.dumps(rows)
    oldest = max(rows, key=lambda x: int(str(x["age"])))
    pick = r.choice(rows)
    q, a = r.choice([
        ("Who is the oldest?", f"{oldest['name']} is the oldest with {oldest['age']} years."), (f"Where does {pick['name']} live?", f"{pick['name']} lives in {pick['city']}."), (f"How old is {pick['name']}?", f"{pick['name']} is {pick['age']} years old."),
        ("List the names as JSON.", json.dumps([x["name"] for x in rows])), ("How many people are in the list?", "There are 3 people in the list."),
    ])
    return Chat([(f"{blob}\n\n{q}", a)])


def sentiment(r: random.Random) -> Chat:
    """positive or negative."""
    good = r.random() < 0.5
    text = r.choice(GOOD if good else BAD).format(x=r.choice(["phone", "book", "movie", "hotel", "chair", "game", "lamp", "camera", "restaurant"]))
    label = "positive" if good else "negative"
    q = r.choice([f'Is this review positive or negative? "{text}"', f"Classify the sentiment of this text as positive or negative.\n\n{text}", f"Sentiment of: {text}"])
    if r.random() < 0.2:
        return Chat([(q + "\n\nAnswer in JSON.", json.dumps({"sentiment": label}))])
    return Chat([(q, r.choice([label.capitalize(), label, f"The review is {label}."]))])


def rewriting(r: random.Random) -> Chat:
    """Exact edits of a short text."""
    words = [r.choice(WORDS) for _ in range(r.randint(3, 6))]
    text = " ".join(words)
    kinds: list[Callable[[], tuple[str, str]]] = [
        lambda: (r.choice(["Write this in upper case: {t}", "Convert to uppercase: {t}"]), text.upper()), lambda: ("Sort these words alphabetically: {t}", " ".join(sorted(words))), lambda: ("Reverse the order of these words: {t}", " ".join(words[::-1])),
        lambda: ("Repeat this text exactly: {t}", text), lambda: ("How many words are in this text: {t}", str(len(words))), lambda: ("Write these words as a comma separated list: {t}", ", ".join(words)), lambda: ("Make a JSON list of these words: {t}", json.dumps(words)),
        lambda: ("What is the first word of this text: {t}", words[0]), lambda: ("What is the last word of this text: {t}", words[-1]), lambda: ("Make a bullet list of these words: {t}", "\n".join(f"- {w}" for w in words)),
        lambda: (f'Replace "{words[0]}" by "{words[-1]}" in this text: {{t}}', text.replace(words[0], words[-1])),
    ]
    q, a = r.choice(kinds)()
    return Chat([(q.format(t=text), a)])


def story(r: random.Random) -> Chat:
    """A very short story or message from a frame of sentences."""
    n1, n2 = r.sample(NAMES, 2)
    thing, place, animal = r.choice(WORDS), r.choice(["forest", "garden", "village", "city", "river", "mountain", "school", "market"]), r.choice(["dog", "cat", "bird", "fox", "rabbit", "horse"])
    kind = r.choice(["story", "email", "poem", "thanks"])
    if kind == "story":
        body = " ".join([
            r.choice([f"One morning {n1} went to the {place}.", f"{n1} lived near a {place}.", f"Once there was a child named {n1} who loved the {place}."]), r.choice([f"There {n1} met a small {animal}.", f"A {animal} came and looked at {n1}.", f"On the way {n1} heard a {animal}."]),
            r.choice([f"The {animal} had lost its way home.", f"The {animal} was hungry and cold.", f"The {animal} wanted to play."]), r.choice([f"{n1} gave it some food and a warm place.", f"{n1} helped it and called {n2}.", f"Together with {n2}, {n1} took care of it."]),
            r.choice(["From that day on they were friends.", "In the evening everyone was happy.", f"{n1} never forgot that day."]),
        ])
        return Chat([(r.choice([f"Write a short story about a {animal}.", f"Tell me a story about {n1} and a {animal}.", f"Write a very short story that takes place near a {place}."]), body)])
    if kind == "email":
        day = r.choice(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"])
        return Chat([(f"Write a short email to {n1} to move our meeting to {day}.", f"Hello {n1},\n\n{r.choice(['could we move our meeting', 'I would like to move our meeting', 'is it possible to move our meeting'])} to {day}? {r.choice(['Please let me know if that works for you.', 'Please tell me if this suits you.'])}\n\n{r.choice(['Best regards', 'Kind regards', 'Many thanks'])}")])
    if kind == "thanks":
        return Chat([(f"Write a thank you note to {n1} for the {thing}.", f"Dear {n1},\n\nthank you very much for the {thing}. {r.choice(['It was very kind of you.', 'I was very happy about it.', 'I use it every day.'])}\n\n{r.choice(['Best wishes', 'Yours', 'Kind regards'])}")])
    return Chat([(f"Write a short poem about the {thing}.", f"The {thing} is {r.choice(['still', 'near', 'bright'])} today,\n{r.choice(['the wind has gone to sleep,', 'the clouds are far away,', 'the morning light is deep,'])}\n{r.choice(['and all the birds have come to stay', 'and all the children run and play', 'the evening ends another day'])}\n{r.choice(['beside the quiet deep.', 'in colors we can keep.', 'and everyone can sleep.'])}")])


def talk_chat(r: random.Random) -> Chat:
    """One conversation of this file."""
    maker = r.choices([fact, identity, listing, extraction, data_question, sentiment, rewriting, story], [4, 2, 2, 5, 2, 1.5, 3, 2])[0]
    chat = maker(r)
    if r.random() < 0.05:
        chat.system = r.choice(["You are a helpful assistant.", "You are Kozue, a helpful assistant.", "Answer briefly.", "You are a Python tutor."])
    return chat


def conversation_chat(r: random.Random, turns: list[str]) -> Chat | None:
    """A stretch of a human conversation as user and assistant turns."""
    start = r.randrange(0, max(1, len(turns) - 5))
    part = turns[start : start + 2 * r.randint(1, 4)]
    pairs = [(part[i], part[i + 1]) for i in range(0, len(part) - 1, 2)]
    if not pairs or any(len(x) > 600 for p in pairs for x in p):
        return None
    return Chat(pairs)
