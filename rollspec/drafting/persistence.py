"""The state of an engine that is saved with a job and restored by the next one: history and tuning.

History is written by `History.save`, what was measured of speed and acceptance by `rollspec.tuning.store`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.drafting.head import Head
from rollspec.drafting.requests import Request
from rollspec.proposal.confidence import Confidence
from rollspec.proposal.history import History
from rollspec.proposal.router import Router
from rollspec.tuning.tuner import Tuner


def snapshot(history: History, requests: Iterable[Request]) -> dict[str, Any]:
    """History with what running requests have emitted so far, without the private ones; for `History.save`."""
    return history.snapshot((r.key, r.prompt, r.response) for r in requests if r.output and not r.private)


def tuning_state(tuner: Tuner, confidence: Confidence, head: Head | None) -> dict[str, Any]:
    """What was measured of speed and acceptance, in JSON types."""
    out = {"tuner": tuner.state(), "confidence": confidence.state()}
    return out if head is None else out | head.state()


def restored(state: Mapping[str, Any], config: RollspecConfig, head: Head | None) -> tuple[Tuner, Confidence]:
    """A tuner and a calibration that start from what an earlier run saved; the head takes its part.

    Raises:
        ValueError, KeyError, TypeError: it cannot be used; nothing of it is.
    """
    confidence, tuner = Confidence(), Tuner(config.tuning, config.proposal.k_max, config.proposal.drafters)
    router, version = Router(head.router.k if head is not None else 1), None
    if head is not None and "passes" in state:  # not there where it was measured on another machine
        router.cost.restore(state["passes"])
    if head is not None and "drafter" in state:
        version = int(state["drafter"]["version"])
        router.acceptance.restore(state["drafter"]["acceptance"])
    confidence.restore(state["confidence"])
    if "tuner" in state:
        tuner.restore(state["tuner"])
    if head is not None:
        head.restore(router, version)
    return tuner, confidence
