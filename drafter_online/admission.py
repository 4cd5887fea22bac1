"""Which engines and samples a daemon takes: those of the target that its head was made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drafter_online.errors import SampleError
from drafter_online.samples import Sample

if TYPE_CHECKING:
    from drafter_online.engines import Hello
    from drafter_online.model import Drafter


@dataclass(frozen=True)
class Admission:
    """What the target of a head has: its name, the layers that the head reads, hidden size and vocabulary."""

    base: str
    aux: tuple[int, ...]
    hidden: int
    vocabulary: int

    @classmethod
    def of(cls, drafter: Drafter) -> Admission:
        """What an EAGLE-3 head takes."""
        config = drafter.head.config  # type: ignore[attr-defined]
        layer = config.transformer_layer_config
        aux = tuple(config.eagle_aux_hidden_state_layer_ids)
        return cls(drafter.base, aux, int(config.target_hidden_size or layer.hidden_size), int(layer.vocab_size))

    def refusal(self, hello: Hello) -> str | None:
        """Why an engine is not one that this head drafts for; None where it is."""
        if hello.base != self.base:
            return f"this daemon trains a drafter for the target {self.base!r}, and the engine runs {hello.base!r}"
        if tuple(hello.aux) != self.aux:
            return f"this daemon's head reads the target's layers {list(self.aux)}, and the engine's reads {hello.aux}"
        return None

    def check(self, sample: Sample) -> None:
        """Refuse what does not fit.

        Raises:
            SampleError: hidden states have another width, or a token is outside the vocabulary.
        """
        for name, want in (
            ("hidden_states", self.hidden * len(self.aux)),
            ("verifier_last_hidden_states", self.hidden),
        ):
            if getattr(sample, name).shape[1] != want:
                raise SampleError(
                    f"drafter-online: a sample is refused: `{name}` is {getattr(sample, name).shape[1]} wide, and this "
                    f"target's are {want}."
                )
        v = sample.verify
        for name, ids in (("input_ids", sample.input_ids), ("proposed", v.proposed), ("top_ids", v.top_ids)):
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
                raise SampleError(
                    f"drafter-online: a sample is refused: `{name}` has a token outside the vocabulary of "
                    f"{self.vocabulary}."
                )
