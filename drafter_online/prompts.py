"""Prompts that a head's training text is generated from, as token ids: a file's, or built-in instructions.

A file has one prompt per line: JSON with `prompt` (text, or chat messages as verl writes them) or `messages`, or plain
text. Parquet has one of these two columns. What is chat, and text where the tokenizer has a chat template, is
rendered with it.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drafter_online.errors import TrainingError

MOST = 8192  # of a longer file, so many at random

TOPICS = (
    "volcanoes", "the water cycle", "bicycles", "honey bees", "chess openings", "the Roman roads", "black holes",
    "baking bread", "the immune system", "sorting algorithms", "jazz music", "solar panels", "the printing press",
    "coral reefs", "public libraries", "learning a language", "tea", "the moon landing", "city parks", "vaccines",
    "mountain weather", "computer networks", "the stock market", "medieval castles", "sleep", "whales", "photography",
    "recycling", "prime numbers", "railways",
)  # fmt: skip
INSTRUCTIONS = (
    "Explain {topic} to a child in a few sentences.",
    "List five facts about {topic}.",
    "Write a short story in which {topic} plays a part.",
    "What are common mistakes that people make about {topic}?",
    "Write a polite e-mail that invites colleagues to a talk about {topic}.",
    "Give me a JSON object with the keys title, summary and keywords about {topic}.",
    "Compare {topic} with {other}: what do they have in common?",
    "Ask me three quiz questions about {topic} and give the answers at the end.",
    "Write a Python function that prints {number} lines about {topic}, and explain it.",
    "I have {number} minutes to learn about {topic}. Make a plan.",
    "A shop sells {number} books about {topic} at {price} dollars each. How much is that? Show the steps.",
    "Rewrite this in a formal style: hey, {topic} is way cooler than {other}, don't you think?",
)


def built_in(seed: int = 0) -> list[str]:
    """Every instruction about every topic, 360 in all, in a random order."""
    rng = random.Random(seed)
    made = [
        text.format(topic=topic, other=rng.choice(TOPICS), number=rng.randrange(2, 60), price=rng.randrange(3, 40))
        for text, topic in itertools.product(INSTRUCTIONS, TOPICS)
    ]
    return rng.sample(made, len(made))


def read(file: Path | None, seed: int = 0) -> list[Any]:
    """A file's prompts, text or messages, `MOST` of them by chance where there are more; None: the built-in ones.

    Raises:
        TrainingError: it cannot be read, holds none, or a row of it is none.
    """
    if file is None:
        return built_in(seed)
    prompts = [_prompt(row, i, file) for i, row in enumerate(rows(file, ("prompt", "messages")))]
    return prompts if len(prompts) <= MOST else random.Random(seed).sample(prompts, MOST)


def rows(file: Path, columns: tuple[str, ...]) -> list[Any]:
    """A file's rows: of Parquet these columns, else a line each, JSON or text.

    Raises:
        TrainingError: it cannot be read, or has none.
    """
    try:
        found = list(_parquet(file, columns) if file.suffix == ".parquet" else _lines(file))
    except (OSError, UnicodeDecodeError) as e:
        raise TrainingError(f"--prompts {file} cannot be read ({e}).") from e
    if not found:
        raise TrainingError(f"--prompts {file} holds no prompt; give one per line.")
    return found


def tokenized(prompts: Iterable[Any], target: str | Path, room: int) -> tuple[list[list[int]], int]:
    """Token ids of each different prompt of at most `room` tokens, and how many were longer.

    Raises:
        TrainingError: the target has no tokenizer, a prompt does not fit its chat template, every prompt is too long.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(target))
    except Exception as e:  # whatever a tokenizer's files can be
        why = " ".join(str(e).split())[:200]
        raise TrainingError(f"{target} has no tokenizer that can be loaded ({why}).") from e
    found = list(dict.fromkeys(tuple(_ids(p, tokenizer)) for p in prompts))
    fit = [list(ids) for ids in found if 0 < len(ids) <= room]
    if not fit:
        raise TrainingError(
            f"no prompt leaves room for --max-tokens: the shortest has {min(map(len, found))} tokens "
            f"and {max(0, room)} fit; give shorter ones, or a smaller --max-tokens."
        )
    return fit, len(found) - len(fit)


def _lines(file: Path) -> Iterable[Any]:
    text = file.read_text(encoding="utf-8")
    plain = file.suffix not in (".json", ".jsonl") and not text.lstrip().startswith("{")
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield line if plain else json.loads(line)
        except ValueError as e:
            raise TrainingError(f"line {number} of --prompts {file} is not JSON ({e}).") from e


def _parquet(file: Path, columns: tuple[str, ...]) -> Iterable[Any]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-untyped,unused-ignore]
    except ModuleNotFoundError as e:
        raise TrainingError("Parquet prompts need pyarrow; pip install pyarrow, or give JSONL.") from e
    try:
        table = parquet.read_table(file)
    except ValueError as e:  # pyarrow's own errors are ValueErrors
        raise TrainingError(f"--prompts {file} is not Parquet ({' '.join(str(e).split())}).") from e
    return table.select([c for c in columns if c in table.column_names]).to_pylist()  # type: ignore[no-any-return]


def _prompt(row: Any, i: int, file: Path) -> Any:
    """Text, or messages up to the one that is to be answered."""
    if isinstance(row, dict):
        row = row.get("prompt") or row.get("messages")
    if isinstance(row, list) and row and all(isinstance(m, dict) and "content" in m for m in row):
        while row and row[-1].get("role") == "assistant":
            row = row[:-1]
    if not row or not isinstance(row, str | list) or (isinstance(row, list) and not isinstance(row[0], dict)):
        raise TrainingError(
            f"row {i} of --prompts {file} is no prompt: it needs `prompt` or `messages`, text or chat "
            "messages that are not empty."
        )
    return row


def _ids(prompt: Any, tokenizer: Any) -> list[int]:
    if not tokenizer.chat_template:
        text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as e:  # a template raises what it likes
        raise TrainingError(f"a prompt does not fit the model's chat template ({e}).") from e
    return list(tokenizer.encode(text, add_special_tokens=False))
