"""What a request says about itself: its domain, and whether it is private.

    SamplingParams(extra_args={"rollspec": {"domain": "code", "private": True}})
    client.completions.create(..., extra_body={"vllm_xargs": {"rollspec": '{"domain": "code"}'}})

What cannot be read makes a request private, the safe choice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollspec.sampling.scoring import KEY

LONGEST = 64  # characters of a domain's name
DEFAULT, INVALID = "default", "invalid"


@dataclass(frozen=True, slots=True)
class Metadata:
    """Of one request. A private one is neither captured nor kept to draft other requests from."""

    domain: str = DEFAULT
    private: bool = False


PLAIN = Metadata()


def of(sampling_params: Any) -> Metadata:
    """A request's metadata; never raises."""
    given = mapping((getattr(sampling_params, "extra_args", None) or {}).get(KEY))
    if not given:
        return PLAIN
    domain = given.get("domain", DEFAULT)
    if not isinstance(domain, str) or not domain or len(domain) > LONGEST or not domain.isprintable():
        domain = INVALID
    return Metadata(domain, bool(given.get("private", False)))


def of_running(running: Mapping[str, Any], req_id: str) -> Metadata:
    """That of one of the requests that an engine runs (`sampling_params` of each); of one that is gone, `PLAIN`."""
    return of(getattr(running.get(req_id), "sampling_params", None))


def added(extra_args: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """A request's `extra_args`, which are not changed, with more of rollspec's own settings."""
    extra = dict(extra_args or {})
    return {**extra, KEY: {**mapping(extra.get(KEY)), **settings}}


def mapping(given: Any) -> dict[str, Any]:
    """What a request carries under `KEY`, as a mapping; what cannot be read makes it private. Never raises.

    From text, which clients write, only the domain and privacy are taken: the rest is between rollspec and trainers.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    try:
        read = json.loads(given) if isinstance(given, str) else None
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        return {"domain": "", "private": True}
    return {k: v for k, v in read.items() if k in ("domain", "private")}
