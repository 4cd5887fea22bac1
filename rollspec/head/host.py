"""What the draft head needs of the worker that it runs in, and nothing else of it; no vLLM in this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rollspec.config import RollspecConfig
from rollspec.drafting.requests import StepResult
from rollspec.step import DraftEngine


class Host(Protocol):
    """One worker. Everything but `count` is called on the worker's own thread.

    Attributes:
        drafting: whether this worker drafts: the output rank's does, until a fault.
        fault: why it does not any more.
    """

    config: RollspecConfig
    drafting: bool
    fault: str | None

    @property
    def engine(self) -> DraftEngine:
        """The step's side."""

    @property
    def running(self) -> Mapping[str, Any]:
        """Prompt and sampling parameters of the running requests, as `prompt_token_ids` and `sampling_params`."""

    @property
    def scheduled(self) -> Mapping[str, list[int]]:
        """The drafts that this step verifies, by request."""

    def ended(self, req_id: str) -> bool:
        """Whether a request emits nothing any more, though one more step of it may be scheduled."""

    def decide(self, step: StepResult) -> int:
        """How many passes the head should run after a step. Never raises."""

    def state(self) -> tuple[str, str]:
        """Who drafts, or "none"; and why nothing does."""

    def count(self, cause: str, error: BaseException | None = None) -> None:
        """Record a fault."""
