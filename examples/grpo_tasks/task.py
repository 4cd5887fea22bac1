"""The tasks: an instruction in plain English, an answer that a rule can check, and a worked response to learn from.

    story     Mia has 12 shells. She finds 5. She loses 3. How many shells does Mia have? ...
    sort, reverse, upper, dedupe, count      of a list of words or numbers
    json      Write a JSON list ... Mia is 31 years old and lives in Rome. ...

Every response but JSON works through its task, a line for each item, and ends with the answer. Every task has a size
(sentences, list items, people), whose distribution is heavy-tailed, and so are the lengths of responses. They are drawn
without end from a seed: a job may see fresh prompts all along, or a few again and again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

NAMES = (
    "Mia",
    "Tom",
    "Ana",
    "Leo",
    "Eva",
    "Max",
    "Ida",
    "Ben",
    "Zoe",
    "Sam",
    "Nina",
    "Paul",
    "Rosa",
    "Jack",
    "Lily",
    "Omar",
)
THINGS = ("shells", "coins", "stamps", "marbles", "apples", "books", "cards", "stickers", "pencils", "cookies")
CITIES = ("Rome", "Paris", "Oslo", "Lima", "Cairo", "Delhi", "Berlin", "Tokyo", "Madrid", "Boston", "Quito", "Dublin")
WORDS = (
    "apple", "river", "stone", "cloud", "green", "house", "light", "mouse", "night", "ocean", "paper", "queen", "road",
    "silver", "table", "under", "voice", "water", "young", "bread", "chair", "dream", "earth", "field", "glass",
    "horse", "island", "juice", "knife", "lemon", "music", "north", "orange", "plant", "quiet", "rain", "summer",
    "train", "unit", "valley", "winter", "yellow", "bridge", "candle", "doctor", "engine", "flower", "garden",
)  # fmt: skip
GAINS = ("finds {n}", "buys {n}", "gets {n} from a friend", "wins {n}")
LOSSES = ("loses {n}", "gives {n} away", "sells {n}", "drops {n}")
LAST_LINE = 'Work through it one {step} at a time, a line for each. End with a line "Answer: " and {what}.'
GOLDEN = 0.6180339887498949  # its multiples modulo 1 fill the unit interval evenly at every length


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        kind: a name of `KINDS`.
        instruction: what the user says.
        answer: the number, the items separated by ", ", or the JSON text.
        response: a whole response that earns the full reward.
        totals: of a story, the number after each of its sentences.
    """

    kind: str
    instruction: str
    answer: str
    response: str
    totals: tuple[int, ...] = ()


def size_at(quantile: float, least: int, most: int) -> int:
    """The size at `quantile` in [0, 1): a discrete Pareto distribution, P(size >= k) ~ 1 / k from `least` to `most`."""
    beyond = least / (most + 1)  # the mass cut off, shared out over the rest
    return int(least / (1.0 - quantile * (1.0 - beyond)))


def story(rng: random.Random, quantile: float) -> Task:
    """A number that goes up and down; the response has one line for each change."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    total = rng.randint(3, 20)
    text, lines, totals = [f"{name} has {total} {thing}."], [], []
    for _ in range(size_at(quantile, 1, 8)):
        gains = total < 4 or rng.random() < 0.5
        n = rng.randint(2, 12) if gains else rng.randint(1, min(total, 12))
        after = total + n if gains else total - n
        text.append(f"{name} {rng.choice(GAINS if gains else LOSSES).format(n=n)}.")
        lines.append(f"{text[-1].removesuffix('.')}, so {total} {'+' if gains else '-'} {n} = {after}.")
        totals.append(total := after)
    ask = f"How many {thing} does {name} have? {LAST_LINE.format(step='step', what='the number')}"
    return Task("story", f"{' '.join(text)} {ask}", str(total), _worked(lines, str(total)), tuple(totals))


def _worked(lines: list[str], answer: str) -> str:
    return "\n".join([*lines, f"Answer: {answer}"])


def _items(kind: str, order: str, items: list[str], lines: list[str], result: list[str]) -> Task:
    what = LAST_LINE.format(step="item", what="the result, separated by commas")
    answer = ", ".join(result)
    return Task(kind, f"{order}: {', '.join(items)}. {what}", answer, _worked(lines, answer))


def sort(rng: random.Random, quantile: float) -> Task:
    """Words by the alphabet, or numbers by size."""
    size = size_at(quantile, 3, 16)
    if rng.random() < 0.5:
        order, items = "Sort these words from A to Z", rng.sample(WORDS, size)
        result = sorted(items)
    else:
        order, items = "Sort these numbers from small to large", [*map(str, rng.sample(range(1, 100), size))]
        result = sorted(items, key=int)
    left, lines = list(items), []
    for item in result[:-1]:
        lines.append(f"Of {', '.join(left)} the next is {item}.")
        left.remove(item)
    return _items("sort", order, items, [*lines, f"The last is {result[-1]}."], result)


def reverse(rng: random.Random, quantile: float) -> Task:
    """A list from its end."""
    words = rng.sample(WORDS, size_at(quantile, 3, 16))
    lines = [f"Number {i} is {words[i - 1]}." for i in range(len(words), 0, -1)]
    return _items("reverse", "Write these words in reverse order, the last word first", words, lines, words[::-1])


def upper(rng: random.Random, quantile: float) -> Task:
    """Words in capital letters."""
    words = rng.sample(WORDS, size_at(quantile, 3, 16))
    lines = [f"{w} in capital letters is {w.upper()}." for w in words]
    return _items("upper", "Write these words in capital letters", words, lines, [w.upper() for w in words])


def dedupe(rng: random.Random, quantile: float) -> Task:
    """Each word once, in the order of first appearance."""
    size = size_at(quantile, 4, 18)
    few = rng.sample(WORDS, max(2, size * 2 // 3))
    words = [*few, *rng.choices(few, k=size - len(few))]
    rng.shuffle(words)
    lines = [f"{w} {'was there already' if w in words[:i] else 'is new'}." for i, w in enumerate(words)]
    once = list(dict.fromkeys(words))
    return _items("dedupe", "Write each of these words once, in the same order", words, lines, once)


def count(rng: random.Random, quantile: float) -> Task:
    """How often a word is in a list."""
    size = size_at(quantile, 4, 18)
    word, *others = rng.sample(WORDS, 5)
    often = rng.randint(1, max(1, size // 2))
    words = [word] * often + rng.choices(others, k=size - often)
    rng.shuffle(words)
    ask = f'How many times is the word "{word}" in this list: {", ".join(words)}?'
    found, lines = 0, []
    for w in words:
        found += w == word
        lines.append(f"{w}: {'yes, that makes' if w == word else 'no, still'} {found}.")
    instruction = f"{ask} {LAST_LINE.format(step='word', what='the number')}"
    return Task("count", instruction, str(often), _worked(lines, str(often)))


def json_people(rng: random.Random, quantile: float) -> Task:
    """Sentences about people as a JSON list of objects."""
    names = rng.sample(NAMES, size_at(quantile, 1, 5))
    people = [{"name": n, "age": rng.randint(18, 80), "city": rng.choice(CITIES)} for n in names]
    facts = " ".join(f"{p['name']} is {p['age']} years old and lives in {p['city']}." for p in people)
    answer = "[" + ",\n ".join(json.dumps(p) for p in people) + "]"
    ask = "Write a JSON list with one object for each person, with the keys name, age and city, and nothing else."
    return Task("json", f"{facts} {ask}", answer, answer)


KINDS: dict[str, Callable[[random.Random, float], Task]] = {
    "story": story, "sort": sort, "json": json_people, "reverse": reverse, "count": count, "upper": upper,
    "dedupe": dedupe,
}  # fmt: skip


def stream(seed: int) -> Iterator[Task]:
    """Tasks without end, none twice, the same for the same seed; kinds in turn.

    Sizes follow their distribution by evenly spread quantiles: even a few dozen tasks hold their share of long ones.
    """
    rng = random.Random(seed)
    quantile = rng.random()
    seen: set[str] = set()
    while True:
        for make in KINDS.values():
            task = make(rng, quantile)
            while task.instruction in seen:
                task = make(rng, quantile)
            seen.add(task.instruction)
            yield task
            quantile = (quantile + GOLDEN) % 1.0
