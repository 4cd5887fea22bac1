"""A tokenizer for the tiny target."""

from __future__ import annotations

from typing import Any

from drafter_target import VOCABULARY


class Tokenizer:
    """One token per character; a chat template where there is one."""

    def __init__(self, template: bool) -> None:
        self.chat_template = "there is one" if template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *(ord(c) % VOCABULARY for c in text)]

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt and not tokenize
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
