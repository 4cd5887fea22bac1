"""The policy version of programs that do not set it: loading weights begins a new one.

Trainers with an integration say which version they sync (`set_version`). OpenRLHF, and any program that loads weights
into a running engine, does not; there the next step after a `load_weights` counts as the next version, so that past
rounds leave the corpora all the same. Once a program announces the version, this only watches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("rollspec")


class PolicyWatch:
    """`begin` is called before the first step with other weights.

    Many calls between two steps (one per parameter, or per bucket) are one version.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._announced = False
        self.changed = False
        """Whether weights were loaded since the last step."""

    def load(self, load_weights: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `model.load_weights`."""
        self.changed = True
        return load_weights(*args, **kwargs)

    def announced(self) -> None:
        """A program says which version the weights are."""
        self._announced, self.changed = True, False

    def before_step(self) -> None:
        """The engine starts a step. Never raises."""
        if not self.changed:
            return
        self.changed = False
        if self._announced:
            return
        try:
            self._begin()
        except Exception as e:  # rounds do not slide; what is sampled does not depend on it
            self._announced = True
            logger.error("rollspec: policy versions are not counted any more (%s: %s).", type(e).__name__, e)
