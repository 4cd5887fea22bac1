"""Samples from N replicas to one trainer: how much comes through, how long it waits, what is dropped.

Replicas finish responses at random times (Poisson) and send those that are recorded. The trainer's end is one server:
the slower of its link and of reading a sample. What waits is bounded in bytes, and the oldest waiting sample goes
first, as in `drafter_online.inbox`. Without a bound, mean waiting is that of M/D/1: ρ·s / 2(1 - ρ).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.scale.costs import Measured, World, sample_bytes
from benchmarks.scale.events import Clock, Queue


@dataclass(frozen=True)
class Feedback:
    """`arrivals`: samples per second, over all replicas. `seconds`: of the trainer's end per sample."""

    arrivals: float
    seconds: float
    sample_bytes: float
    waiting: int  # samples that may wait
    tokens: float  # per sample

    @classmethod
    def of(cls, replicas: int, world: World, measured: Measured, rate: float) -> Feedback:
        """With `rate` of the responses recorded."""
        size = sample_bytes(world)
        return cls(
            arrivals=replicas * rate * world.tokens_per_second / world.response_tokens,
            seconds=server_seconds(world, measured),
            sample_bytes=size,
            waiting=max(1, int(world.inbox_bytes / size)),
            tokens=world.response_tokens,
        )


def server_seconds(world: World, measured: Measured) -> float:
    """What the trainer's end takes per sample: the slower of receiving it and of reading it, which overlap."""
    size = sample_bytes(world)
    return max(size / world.trainer_link, size * measured.unpack_seconds_per_byte)


def rate_for(replicas: int, world: World, measured: Measured) -> float:
    """Share of responses to record: what the trainer learns from, and what its end has room for at `world.load`."""
    made = replicas * world.tokens_per_second
    room = world.load * world.response_tokens / server_seconds(world, measured)
    return min(1.0, world.trained_tokens / made, room / made)


def feedback(f: Feedback, seconds: float, seed: int) -> dict[str, float]:
    """Simulate; `load` of the trainer's end, `tokens` per second through it, mean and p99 `wait`, share `dropped`."""
    rng, clock = random.Random(seed), Clock()
    server = Queue(clock)
    waits: list[float] = []
    counts = {"arrived": 0, "dropped": 0}

    def arrive() -> None:
        clock.after(rng.expovariate(f.arrivals), arrive)
        counts["arrived"] += 1
        if len(server) >= f.waiting:
            server.drop()
            counts["dropped"] += 1
        begun = clock.now
        server.put(f.seconds, lambda: waits.append(clock.now - begun - f.seconds))

    clock.after(rng.expovariate(f.arrivals), arrive)
    clock.run(seconds)
    waits.sort()
    return {
        "offered_bytes_per_second": f.arrivals * f.sample_bytes,
        "load": f.arrivals * f.seconds,
        "tokens_per_second": len(waits) * f.tokens / seconds,
        "wait_mean": sum(waits) / len(waits) if waits else 0.0,
        "wait_p99": waits[int(0.99 * (len(waits) - 1))] if waits else 0.0,
        "dropped": counts["dropped"] / max(counts["arrived"], 1),
    }
