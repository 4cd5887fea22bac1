"""The prompts of an audit, as token ids that fit the model: a few built-in ones, or a JSONL or Parquet file's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafter_online import prompts
from drafter_online.errors import TrainingError
from rollspec.audit.evidence import AuditError

BUILT_IN = (
    "What is 17 + 25? Let us think step by step.",
    "Write a short story about a lighthouse keeper and a storm.",
    "1, 1, 2, 3, 5, 8, 13,",
    "def fibonacci(n):",
    "The capital of France is",
    "Repeat the word banana ten times: banana banana",
    "Solve for x: 3 x + 7 = 22.",
    "List three animals and the sounds they make.",
)


def token_prompts(
    model: str | Path, file: Path | None, most: int, max_tokens: int, trust_remote_code: bool = False
) -> tuple[tuple[int, ...], ...]:
    """At most `most` prompts as token ids, each leaving room for `max_tokens` more.

    Args:
        model: folder or name of the checkpoint; its tokenizer and configuration are read.
        file: JSONL (`{"prompt": str or chat messages}` or `{"token_ids": [...]}` per line) or Parquet with one of these
            columns; None for the built-in prompts.

    Raises:
        AuditError: the file, the tokenizer or the model's configuration cannot be read, or they do not fit together.
    """
    config, tokenizer = _load(model, trust_remote_code)
    vocab, limit = int(config.vocab_size), getattr(config, "max_position_embeddings", None)
    if tokenizer is not None:
        from rollspec.engine.vllm.compat import vocabulary_mismatch

        if problem := vocabulary_mismatch(len(tokenizer), vocab):
            raise AuditError(f"rollspec: {problem}.")
    try:
        rows: list[Any] = list(BUILT_IN) if file is None else prompts.rows(file, ("token_ids", "prompt"))
    except TrainingError as e:
        raise AuditError(f"rollspec: {e.plain}") from e
    found = [_encode(row, tokenizer, f"prompt {i}") for i, row in enumerate(rows[:most])]
    for i, ids in enumerate(found):
        if wrong := [t for t in ids if not 0 <= t < vocab]:
            raise AuditError(
                f"rollspec: prompt {i} has token id {wrong[0]}, and the model's vocab_size is {vocab}; use the "
                "tokenizer that belongs to the model."
            )
        if limit is not None and len(ids) + max_tokens > limit:
            raise AuditError(
                f"rollspec: prompt {i} has {len(ids)} tokens, which with --max-tokens {max_tokens} exceeds the model's "
                f"{limit} positions; shorten one of them."
            )
    return tuple(dict.fromkeys(map(tuple, found)))  # a prompt given twice is one group


def _load(model: str | Path, trust_remote_code: bool) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError) as e:
        raise AuditError(
            f"rollspec: --model {str(model)!r} is no model that can be read ({' '.join(str(e).split())[:200]}); give a "
            "folder or name of a checkpoint in Hugging Face format."
        ) from e
    try:
        return config, AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except Exception:  # whatever it is, token_ids need no tokenizer, and _encode says what is missing
        return config, None


def _encode(row: Any, tokenizer: Any, name: str) -> list[int]:
    if isinstance(row, dict):
        row = row.get("token_ids", row.get("prompt"))
    if not row:
        raise AuditError(f"rollspec: {name} has neither `prompt` nor `token_ids`, or an empty one.")
    if isinstance(row, list) and all(type(t) is int for t in row):
        return row
    if tokenizer is None:
        raise AuditError("rollspec: the model has no tokenizer that can be loaded; give --prompts with `token_ids`.")
    if isinstance(row, str):
        return list(tokenizer.encode(row))
    try:
        text = tokenizer.apply_chat_template(row, add_generation_prompt=True, tokenize=False)
    except Exception as e:  # a template raises what it likes
        raise AuditError(
            f"rollspec: {name} is neither text, nor token ids, nor messages that fit the chat template ({e})."
        ) from e
    return list(tokenizer.encode(text, add_special_tokens=False))
