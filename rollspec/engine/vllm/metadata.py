"""What a request says about itself: its domain, and whether it is private.

    SamplingParams(extra_args={"rollspec": {"domain": "code", "private": True}})
    client.completions.create(..., extra_body={"vllm_xargs": {"rollspec": '{"domain": "code"}'}})

vLLM's HTTP interface takes text and numbers in `vllm_xargs`, so there the mapping is written as JSON. Metadata that
cannot be read makes a request private: whoever wrote it wanted something.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY = "rollspec"
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
    given = (getattr(sampling_params, "extra_args", None) or {}).get(KEY)
    if given is None:
        return PLAIN
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, Mapping):
        return Metadata(INVALID, True)
    domain = given.get("domain", DEFAULT)
    if not isinstance(domain, str) or not domain or len(domain) > LONGEST or not domain.isprintable():
        domain = INVALID
    return Metadata(domain, bool(given.get("private", False)))
