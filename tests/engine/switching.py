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
    tuner.strategy.choose = lambda bucket: rng.randrange(len(tuner.arms))


def on_a_thread(worker: Any) -> None:
    """Drafts are made on a thread of their own, as on a GPU, in stretches with drafts and without, in which the tuner
    soon rests and steps begin before the last one's tokens are known.
    """
    import random
    from concurrent.futures import ThreadPoolExecutor

    from rollspec.tuning import tuner as module

    module.REST_AFTER = 2
    rng, left = random.Random(0), {"steps": 0, "arm": 0}
    found = bridge(worker)
    tuner, adapter = found.engine.tuner, found.join.__self__
    adapter._thread = ThreadPoolExecutor(1)
    worker._rollspec_begun = begun = {True: 0, False: 0}

    def choose(bucket: int) -> int:
        if not left["steps"]:
            nothing = rng.random() < 0.6
            left["steps"], left["arm"] = (
                rng.choice([2, 8, 24]),
                tuner.none if nothing else rng.randrange(len(tuner.arms)),
            )
        left["steps"] -= 1
        return left["arm"]

    def begins_nothing(scheduled: Any) -> bool:
        says = type(found).begins_nothing(found, scheduled)
        begun[says] += 1
        return says

    tuner.strategy.choose, found.begins_nothing = choose, begins_nothing


def begun_ahead(worker: Any) -> int:
    """Steps that began before the last one's tokens were known."""
    return int(worker._rollspec_begun[True])


def any_arm_and_passes(worker: Any) -> None:
    """Any arm and any number of the draft head's passes at any step, whatever they cost."""
    import random

    rng = random.Random(0)
    engine = bridge(worker).engine
    tuner, route = engine.tuner, engine.head.route
    tuner.strategy.choose = lambda bucket: rng.randrange(len(tuner.arms))
    tuner.config = tuner.config.model_copy(update={"guard": tuner.config.guard.model_copy(update={"enabled": False})})

    def routed(step: Any, *args: Any, **kwargs: Any) -> int:
        found = route(step, *args, **kwargs)
        on = step.asked and engine.head.name in step.plan.drafters
        return rng.choice([0, 0, found, 1, engine.head.k]) if on else rng.choice([0, 0, 0, 1])

    engine.head.route = routed
