"""Engines of coupled sampling, and far more switches of what is drafted than a policy would make: sent to workers."""

from __future__ import annotations

from typing import Any

from engines import bridge

COUPLED = {"preset": "default", "mode": "coupled", "coupled.seed": 7}
QUIET = COUPLED | {"proposal.drafters": []}
GRAMMAR = "[0-9+= ]{10,70}"


def any_arm(worker: Any) -> None:
    """Any arm at any step, budgets included."""
    import random

    rng = random.Random(0)
    tuner = bridge(worker).engine.tuner
    tuner.policy.choose = lambda bucket: rng.randrange(len(tuner.arms))


def any_arm_and_passes(worker: Any) -> None:
    """Any arm and any number of the draft head's passes at any step, whatever they cost."""
    import random

    rng = random.Random(0)
    engine = bridge(worker).engine
    tuner, route = engine.tuner, engine.head.route
    tuner.policy.choose = lambda bucket: rng.randrange(len(tuner.arms))
    tuner.config = tuner.config.model_copy(update={"guard": tuner.config.guard.model_copy(update={"enabled": False})})

    def routed(step: Any, *args: Any, **kwargs: Any) -> int:
        found = route(step, *args, **kwargs)
        on = step.asked and engine.head.name in step.plan.drafters
        return rng.choice([0, 0, found, 1, engine.head.router.k]) if on else rng.choice([0, 0, 0, 1])

    engine.head.route = routed
