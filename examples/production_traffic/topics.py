"""Prompts of four topics for a real model, as chats: arithmetic and lists of `examples/grpo_tasks`, code, rewriting."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from drafter_online.prompts import tokenized
from examples.grpo_tasks.task import KINDS
from examples.production_traffic.language import PROMPTS, Language
from rollspec.machine import native_dtype

SEED = 5_000_003  # apart from those of the prompts that a head was trained on
ROOM = 300  # tokens of a prompt
SUBJECTS = (
    "a list of numbers", "a string", "a dictionary of prices", "a list of words", "a matrix", "a text file",
    "two sorted lists", "a binary tree", "a date", "a queue of jobs", "a linked list", "an e-mail address",
)  # fmt: skip
WORK = (
    "returns the largest part of {of}", "removes what occurs twice in {of}", "prints {of} line by line",
    "checks whether {of} is valid", "counts what {of} holds", "turns {of} around", "splits {of} in two halves",
    "compares {of} with a copy of it", "saves {of} as JSON", "searches {of} for a value",
)  # fmt: skip
LANGUAGES = ("Python", "JavaScript", "C", "Java", "Go")
TONES = ("formal", "friendly", "shorter", "more polite", "angry", "cheerful")
NEWS = (
    "the report is late and has to be sent today", "I did not know that the meeting was moved to Friday",
    "the parcel came broken and I want my money back", "we are going to the lake if it does not rain",
    "your invoice has a mistake in the second line", "the new printer does not work since Monday",
    "I cannot come to the party because I am ill", "the team did a great job on the last project",
    "please keep the door of the kitchen closed", "the train was late again and I missed my flight",
    "we need three more chairs for the guests", "the price of the tickets went up by a third",
)  # fmt: skip
WHO = ("my boss", "a customer", "my neighbour", "an old friend", "the whole office", "a teacher")


def _tasks(kinds: tuple[str, ...], rng: random.Random) -> Iterator[str]:
    for kind in itertools.cycle(kinds):
        yield KINDS[kind](rng, rng.random() * 0.9).instruction


def _drawn(texts: list[str], rng: random.Random) -> Iterator[str]:
    return iter(rng.sample(texts, len(texts)))


def _arithmetic(rng: random.Random) -> Iterator[str]:
    return _tasks(("story", "count"), rng)


def _lists(rng: random.Random) -> Iterator[str]:
    return _tasks(("sort", "reverse", "upper", "dedupe"), rng)


def _code(rng: random.Random) -> Iterator[str]:
    every = itertools.product(LANGUAGES, WORK, SUBJECTS)
    return _drawn([f"Write a function in {lang} that {work.format(of=of)}." for lang, work, of in every], rng)


def _rewriting(rng: random.Random) -> Iterator[str]:
    every = itertools.product(TONES, NEWS, WHO)
    return _drawn([f"Rewrite this message to {who} so that it is {tone}: {text}." for tone, text, who in every], rng)


TOPICS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "arithmetic": _arithmetic, "lists": _lists, "code": _code, "rewriting": _rewriting,
}  # fmt: skip


def prepare(model: Path, seed: int = 0) -> Language:
    """The model with token ids of its prompts by topic.

    Raises:
        TrainingError: its tokenizer cannot be used.
    """
    rng = random.Random(SEED + seed)
    texts = {topic: list(itertools.islice(made(rng), PROMPTS)) for topic, made in TOPICS.items()}
    prompts = {topic: tokenized(some, model, ROOM)[0] for topic, some in texts.items()}
    return Language(str(model), prompts, native_dtype())
