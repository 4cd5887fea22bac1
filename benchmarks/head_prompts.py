"""The prompts of `rollspec bench head`: in an order of each seed, and which of them the head was trained on."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_online import prompts
from rollspec.errors import RollspecError
from rollspec.proposal.base import prompt_key

ROOM = 1024  # tokens of a prompt
HELD_OUT = 0.1  # of the prompts of a `make-head` that did not record its share


def trained_on(folder: Path) -> set[str] | None:
    """Keys of the prompts that a `make-head` trained on; None where its samples are gone. Reads no tensor."""
    from safetensors import safe_open

    from drafter_online.buffer import SAMPLES
    from drafter_online.held_out import held_out
    from drafter_online.make_head import RECORD

    keys = set()
    for file in (folder / "buffer" / SAMPLES).glob("*.safetensors"):
        with safe_open(str(file), "pt") as sample:
            keys.add(str(json.loads(sample.metadata()["sample"])["prompt_key"]))
    if not keys:
        return None
    record = json.loads((folder / RECORD).read_bytes())
    return keys - held_out(keys, record.get("hold_out", HELD_OUT))


@dataclass
class Prompts:
    """Token ids of all prompts that may be used, and the keys of those that the head was trained on (None: unknown)."""

    found: list[list[int]]
    trained: set[str] | None

    @classmethod
    def of(cls, model: Path, file: Path | None, head: Path, fresh_to: Path | None) -> Prompts:
        """From a file, or the built-in ones.

        Args:
            fresh_to: folder of a `make-head`; prompts that it trained on are left out.

        Raises:
            TrainingError: the file cannot be used.
            RollspecError: nothing is left, or what was trained on is not known.
        """
        found, _ = prompts.tokenized(prompts.read(file), model, ROOM)
        if fresh_to is None:
            return cls(found, trained_on(head))
        trained = trained_on(fresh_to)
        if trained is None:
            raise RollspecError(
                f"rollspec: --held-out {fresh_to} has no samples in buffer/, which say what its head was trained on; "
                "give the --out of a make-head that still has them."
            )
        left = [p for p in found if prompt_key(p) not in trained]
        if not left:
            raise RollspecError(
                f"rollspec: the head of --held-out {fresh_to} was trained on every prompt; give other --prompts."
            )
        return cls(left, trained)

    def order(self, seed: int, count: int) -> list[list[int]]:
        """`count` of them in an order of the seed; from the start again where there are fewer."""
        shuffled = random.Random(seed).sample(self.found, len(self.found))
        return [shuffled[i % len(shuffled)] for i in range(count)]

    def facts(self, used: list[list[int]]) -> dict[str, Any]:
        """How many of the prompts that were used there are, and of them the head was trained on."""
        keys = {prompt_key(p) for p in used}
        known = None if self.trained is None else len(keys & self.trained)
        return {"prompts_used": len(keys), "prompts_trained_on": known, "prompts_used_again": len(used) - len(keys)}
