"""Questions for chat models that know more than kozue-nano: topics in templates, tasks, sums, passages of prose.

A drafter for such a model learns from the model's own answers; all that is needed here is a wide spread
of questions. Evaluation draws from other topics and passages than training.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from kozue_train.data import instruct, maths, talk
from kozue_train.data.chat import Chat
from kozue_train.data.functions import Exercise

TOPICS = """
photosynthesis|volcanoes|the water cycle|black holes|the Roman Empire|the French Revolution|the printing press|climate change|recycling|renewable energy|solar panels|wind turbines|electric cars|bicycles|airplanes|
the human heart|the immune system|vaccines|antibiotics|DNA|evolution|dinosaurs|whales|honey bees|ants|spiders|butterflies|penguins|elephants|wolves|cats|dogs|horses|owls|sharks|coral reefs|rain forests|deserts|
mountains|rivers|oceans|glaciers|earthquakes|hurricanes|tornadoes|lightning|rainbows|the seasons|the moon|the sun|Mars|Jupiter|comets|galaxies|gravity|magnetism|electricity|light|sound|heat|atoms|molecules|
acids and bases|metals|plastics|glass|paper|cotton|coffee|tea|chocolate|bread|cheese|pasta|pizza|soup|rice|potatoes|tomatoes|apples|spices|sugar|salt|vitamins|protein|sleep|exercise|yoga|running|swimming|football|
basketball|tennis|chess|board games|video games|music|jazz|the piano|the guitar|painting|photography|sculpture|poetry|novels|theatre|cinema|dance|architecture|bridges|castles|cathedrals|museums|libraries|schools|
universities|teachers|homework|exams|reading|writing|handwriting|languages|translation|grammar|history|geography|philosophy|psychology|economics|inflation|taxes|banks|saving money|budgets|stocks|insurance|
supply and demand|trade|marketing|advertising|leadership|teamwork|job interviews|resumes|emails|meetings|time management|procrastination|public speaking|negotiation|customer service|small businesses|startups|
computers|keyboards|the internet|search engines|social media|passwords|encryption|databases|spreadsheets|operating systems|Linux|open source software|programming languages|Python|JavaScript|algorithms|sorting|recursion|
machine learning|neural networks|robots|chatbots|data privacy|backups|cloud computing|mobile phones|batteries|cameras|satellites|GPS|radio|television|newspapers|democracy|elections|laws|courts|human rights|the United Nations|
cities|villages|public transport|trains|ships|traffic|parking|gardens|trees|flowers|mushrooms|compost|farming|fishing|forests|national parks|hiking|camping|travel|packing a suitcase|hotels|airports|maps|weather forecasts|
friendship|family|parenting|babies|grandparents|weddings|birthdays|holidays|gifts|manners|honesty|courage|patience|happiness|stress|anxiety|meditation|habits|motivation|goals|creativity|memory|dreams|laughter|
Japan|Brazil|Egypt|India|Canada|Kenya|Iceland|Australia|Paris|New York|ancient Greece|the Vikings|the Silk Road|the Industrial Revolution|the Renaissance|World War II|the space race|the Wright brothers|
Albert Einstein|Marie Curie|Isaac Newton|Leonardo da Vinci|William Shakespeare|Ludwig van Beethoven|Cleopatra|Mahatma Gandhi|statistics|probability|fractions|geometry|algebra|prime numbers|percentages|triangles|circles
"""
ASKS = [
    "What is {t}?", "What are the most important facts about {t}?", "Explain {t} to a child.", "Explain {t} in simple words.", "Write a short paragraph about {t}.", "Write a short story about {t}.", "Write a poem about {t}.",
    "Why does {t} matter?", "Give me five facts about {t}.", "List three advantages and three disadvantages of {t}.", "What should a beginner know about {t}?", "How has {t} changed over time?", "Tell me about {t}.", "tell me something about {t}",
    "Give me tips about {t}.", "What are common misunderstandings about {t}?", "Write an email to a friend about {t}.", "Write a dialogue between two people who talk about {t}.", "Summarize what is known about {t} in three sentences.",
    "Make a list of ten words that have to do with {t}.", "What questions could a teacher ask about {t}?", "Describe {t}.", "Write an introduction for an essay on {t}.", "Compare {t} and {u}.", "What do {t} and {u} have in common?",
    "Suggest three titles for an article about {t}.", "How would you explain the difference between {t} and {u}?", "Write a quiz question about {t} with four possible answers.", "What is interesting about {t}?", "Can you help me understand {t}?",
]
TELLING = ["Summarize this text in one or two sentences:\n\n{p}", "Rewrite this text in simpler words:\n\n{p}", "What is this text about?\n\n{p}", "Continue this text:\n\n{p}", "List the key points of this text:\n\n{p}", "Correct the grammar of this text:\n\n{p}", "Give this text a title:\n\n{p}"]


def topics(held_out: bool) -> list[str]:
    """Every fifth topic is kept for evaluation."""
    every = [t.strip() for t in TOPICS.replace("\n", "").split("|") if t.strip()]
    return [t for i, t in enumerate(every) if (i % 5 == 4) == held_out]


def passage(r: random.Random, text: str, characters: int = 500) -> str:
    """Some whole paragraphs or sentences of a text, at most about `characters` long."""
    at = r.randint(0, max(0, len(text) - characters))
    piece = text[at : at + characters]
    first, last = piece.find(" ") + 1 if at else 0, max(piece.rfind(". ") + 1, piece.rfind("\n"))
    return piece[first : last if last > characters // 3 else len(piece)].strip()


def question_sets(
    count: int, seed: int, held_out: bool, write: Callable[[random.Random], Chat], found: list[Exercise], prose: list[str],
) -> dict[str, list[str]]:
    """`count` single questions by category; `write(random)` makes a conversation about a programming task."""
    r = random.Random(f"questions/{seed}")
    names = topics(held_out)

    def code() -> str:
        if found and r.random() < 0.25:
            return instruct.exercise_chat(r, r.choice(found)).turns[0][0]
        return write(r).turns[0][0]

    def chat() -> str:
        if r.random() < 0.2:
            return talk.talk_chat(r).turns[0][0]
        t, u = r.sample(names, 2)
        return r.choice(ASKS).format(t=t, u=u)

    makers: dict[str, Callable[[], str]] = {"code": code, "maths": lambda: maths.maths_chat(r).turns[0][0], "chat": chat}
    if prose:
        makers["prose"] = lambda: r.choice(TELLING).format(p=passage(r, r.choice(prose)))
    return {name: [make() for _ in range(count)] for name, make in makers.items()}

