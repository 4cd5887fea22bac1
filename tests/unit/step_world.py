"""A small world for the engine's step: requests, siblings, epochs, a head, aborts; all decided by one seed.

It stands in for an inference engine: it verifies drafts against fixed texts, cuts some of them, begins and aborts
requests, changes versions. `play` gives one line per step of what the engine under test planned and proposed.
`simulate` and `rollout` decode fixed texts alone, with exact verification.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TIMED = ("propose_seconds", "tuner_seconds", "step_seconds", "tail_seconds", "pass_seconds")


@dataclass
class World:
    """What happens. `symbols`: size of the alphabet. `head`: acceptance rate of its tokens. `epoch`: steps of one."""

    overrides: dict[str, Any]
    head: float | None = None
    steps: int = 160
    epoch: int = 40
    batch: int = 12
    symbols: int = 40
    changed: float = 0.1  # of an epoch's tokens differ from the last one's
    samples: int = 4  # per prompt
    kept: bool = False  # whether requests keep their noise over epochs
    seed: int = 0


@dataclass
class _Running:
    text: list[int]
    args: dict[str, Any]
    at: int
    left: int  # steps in its prompt
    draft: list[int] = field(default_factory=list)


class Player:
    """Plays a world with an engine under test."""

    def __init__(self, world: World, engine: Any) -> None:
        self.world, self.engine = world, engine
        self.rng = random.Random(world.seed)
        self.running: dict[str, _Running] = {}
        self.plans: list[Any] = []
        self.scored: list[tuple[str, int, int]] = []
        self.epoch, self.serial = 0, 0
        self.watched: Any = None
        if world.head is not None:
            engine.scored = lambda *row: self.scored.append(row)

    def _watch(self) -> None:
        """See the tuner's plans, and give host time that no clock decides."""
        tuner = self.engine.tuner
        if tuner is self.watched:
            return
        self.watched = tuner
        plan, host = tuner.plan, tuner.host

        def planned(batch: int, context: float) -> Any:
            found = plan(batch, context)
            rest = bool(found.watch) and len(self.plans) % 7 < 4  # more often than the tuner would
            self.plans.append(dataclasses.replace(found, rest=rest))
            return self.plans[-1]

        tuner.plan = planned
        tuner.host = lambda seconds, requests, verifying: host(2e-6 * requests, requests, verifying)

    def _text(self, group: int, sample: int) -> list[int]:
        base = random.Random(1000 + group)
        words = [base.randrange(5, 5 + self.world.symbols) for _ in range(90)]
        own = random.Random(f"{group} {sample} {self.epoch}")
        return [own.randrange(5, 5 + self.world.symbols) if own.random() < self.world.changed else t for t in words]

    def _begin(self) -> None:
        rng, world = self.rng, self.world
        group, sample = rng.randrange(4), rng.randrange(world.samples)
        name = f"r{self.serial}"
        self.serial += 1
        stops = rng.choice([(), (7,), (9, 11)])
        args = {
            "prompt": [1, 2, 3 + group, 4], "max_tokens": rng.randrange(1, 80), "stop_ids": stops, "emitted": [],
            "stream": 10 * group + sample if world.kept else None, "private": rng.random() < 0.08,
            "origin": name if world.kept else None, "min_tokens": rng.choice([0, 0, 0, 6]) if stops else 0,
        }  # fmt: skip
        self.running[name] = _Running(self._text(group, sample), args, 0, rng.choice([0, 0, 1]))
        self.engine.begin(name, **args)

    def _abort(self, name: str) -> None:
        """Some of them go on as another request from what they have said."""
        r = self.running.pop(name)
        said = [*r.args["emitted"], *r.text[len(r.args["emitted"]) : r.at]]
        self.engine.finish(name)
        if said and self.rng.random() < 0.7:
            name = f"r{self.serial}"
            self.serial += 1
            args = {**r.args, "emitted": said[: self.rng.randrange(len(said)) + 1]}
            self.running[name] = _Running(r.text, args, len(args["emitted"]), 0)
            self.engine.begin(name, **args)

    def step(self) -> str:
        rng, engine, world = self.rng, self.engine, self.world
        self._watch()
        while len(self.running) < world.batch and rng.random() < 0.4:
            self._begin()
        for name in [n for n in self.running if rng.random() < 0.02]:
            self._abort(name)
        ids = [*self.running, "stranger"]
        new, scheduled = [], {}
        for name, r in self.running.items():
            if r.left:
                r.left -= 1
                new.append([])
                continue
            draft = r.draft if rng.random() > 0.1 else r.draft[: rng.randrange(len(r.draft) + 1)]  # the engine cut it
            n = 0
            while n < len(draft) and r.at + n < len(r.text) and draft[n] == r.text[r.at + n]:
                n += 1
            new.append((r.text + [4] * 99)[r.at : r.at + n + 1])
            r.at += n + 1
            if draft:
                scheduled[name] = draft
        new.append([8])
        tokens = len(ids) + sum(map(len, scheduled.values()))
        context = float(sum(r.at for r in self.running.values()))
        engine.timed(tokens, rng.random() > 0.1, (0.01 + 0.0003 * tokens) * rng.lognormvariate(0, 0.05), len(ids))
        passes = engine.prepare(ids, new, scheduled, context)
        rows = probs = None
        if passes and rng.random() > 0.05:
            assert world.head is not None
            rows = [[t if rng.random() < world.head else 3 for t in (self._after(n) + [4] * 16)[:passes]] for n in ids]
            probs = [[rng.random() for _ in row] for row in rows] if rng.random() > 0.3 else None
            engine.passed(passes, 0.0004 * passes * rng.lognormvariate(0, 0.1), len(ids), 0.0001 * (rng.random() < 0.1))
        drafts = engine.complete(rows, probs)
        for name, draft in zip(ids, drafts, strict=True):
            if name in self.running:
                self.running[name].draft = draft
        for name in [n for n in self.running if self.engine.requests[n].ended and rng.random() < 0.8]:
            engine.finish(name)
            del self.running[name]
        plan = self.plans[-1]
        lengths = ",".join(map(str, map(len, drafts)))
        state = f"{plan.k}{f'w{plan.watch}' if plan.watch else ''}{'r' if plan.rest else ''}"
        return f"{state} {'+'.join(plan.drafters)} {passes} {lengths} {zlib.crc32(json.dumps(drafts).encode()):08x}"

    def _after(self, name: str) -> list[int]:
        r = self.running.get(name)
        return r.text[r.at :] if r else []


def play(world: World, make: Callable[[dict[str, Any], str | None], Any]) -> dict[str, Any]:
    """Lines of all steps, and what was counted and learned. `make`: overrides and the head's name to an engine."""
    head = "eagle3" if world.head is not None else None
    engine = make(world.overrides, head)
    player = Player(world, engine)
    lines, stats = [], []
    for n in range(world.steps):
        lines.append(player.step())
        if n % world.epoch == world.epoch - 1:
            player.epoch += 1
            engine.set_version(player.epoch)
            stats.append({k: _plain(v) for k, v in engine.drain().to_dict().items() if k not in TIMED})
        if n % 50 == 49:
            engine.k = player.rng.choice([engine.k_max, engine.k_max, 3, 0])
        elif n % 50 == 5:
            engine.k = engine.k_max
        if head and n % 30 == 29:
            engine.swapped(n, None if n % 60 == 29 else engine.head.acceptance.state())
            engine.canary_runs, engine.resting = n % 60 == 29, n % 90 == 59
        if n == world.steps // 2:
            engine.restore_tuning(json.loads(json.dumps(engine.tuning_state())))
    snap = engine.snapshot()
    return {
        "steps": lines,
        "stats": stats,
        "tuning": _sums(engine.tuning_state()),
        "scored": [len(player.scored), zlib.crc32(json.dumps(player.scored).encode())],
        "kept": [snap["tokens"].tolist().__len__(), int(snap["tokens"].sum()), len(snap["prompts"])],
        "reached": _plain(engine.head.reached) if head else None,
    }


def _sums(value: Any) -> dict[str, list[float]]:
    """How many numbers each part has, and the sum of their magnitudes: the last digits are the machine's."""

    def numbers(part: Any) -> list[float]:
        if isinstance(part, dict):
            part = list(part.values())
        if isinstance(part, list | tuple):
            return [n for p in part for n in numbers(p)]
        return [abs(float(part))] if isinstance(part, int | float) and math.isfinite(part) else []

    return {name: [len(found := numbers(part)), sum(found)] for name, part in value.items()}


def _plain(value: Any) -> Any:
    """JSON types with floats rounded to six digits: the last ones are the machine's. Without times by the clock."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not str(k).startswith("clock/")}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


WORLDS = {
    "suffix": World({}),
    "suffix, all is verified": World({"proposal.budget.rule": "fixed", "tuning.strategy": "static"}, seed=1),
    "suffix under kept noise": World({"mode": "coupled", "reuse.mode": "replay"}, kept=True, changed=0.03, seed=2),
    "suffix that nothing repeats": World(
        {}, symbols=60, changed=1.0, samples=999, batch=24, steps=240, epoch=239, seed=3
    ),
    "suffix, long ones count for more": World({"proposal.budget.length_weight": 2.0}, seed=4),
    "suffix, SVIP": World({"proposal.budget.rule": "svip"}, seed=4),
    "suffix and head": World({"proposal.drafters": ["suffix", "eagle3"]}, head=0.8, steps=240, seed=5),
    "suffix and head, any arm": World(
        {"proposal.drafters": ["suffix", "eagle3"], "tuning.strategy": "random"},
        head=0.7,
        changed=0.3,
        kept=True,
        steps=240,
        seed=10,
    ),
    "suffix and head, all is verified": World(
        {
            "proposal.drafters": ["suffix", "eagle3"],
            "proposal.budget.rule": "specdec++",
            "tuning.strategy": "static",
        },
        head=0.2,
        changed=0.4,
        seed=7,
    ),
    "head": World({"proposal.drafters": ["eagle3"]}, head=0.75, seed=8),
    "useless head": World({"proposal.drafters": ["suffix", "eagle3"]}, head=0.0, changed=0.5, steps=240, seed=9),
}

# ---- fixed texts ----------------------------------------------------------------------------------------------------

C0, C1 = 0.0085, 0.00013
"""Seconds of a step, and of each token in it, where a test is about what steps cost."""

Texts = dict[str, tuple[list[int], list[int]]]
"""By request: its prompt, and what the target says."""


def story(seed: int, n: int = 120) -> list[int]:
    """A text that repeats next to nothing."""
    rng = random.Random(seed)
    return [rng.randrange(5, 500) for _ in range(n)]


def random_texts(batch: int, length: int, symbols: int, seed: int = 0) -> list[list[int]]:
    """Texts of an alphabet of `symbols`."""
    rng = random.Random(seed)
    return [[rng.randrange(3, 3 + symbols) for _ in range(length)] for _ in range(batch)]


def simulate(
    engine: Any, texts: Texts, accepted: float = 0.0, seed: int = 0, pass_seconds: float = 0.0005, **more: Any
) -> int:
    """Decode fixed texts with exact verification, as an engine would; returns the steps taken.

    Tokens of the draft head are accepted with probability `accepted`; a pass takes `pass_seconds`. `more`: it fails
    (`fail`), or after a rest takes `late` seconds to catch up.
    """
    return _decode(engine, texts, accepted, seed, pass_seconds, **more)[0]


def rollout(engine: Any, texts: list[list[int]], seed: int = 0) -> tuple[float, float]:
    """Decode the texts as one batch with known step costs: seconds, and seconds without speculation."""
    named = {f"{engine.version}-{i}": ([1, 2, 3], text) for i, text in enumerate(texts)}
    seconds = _decode(engine, named, seed=seed, cost=(C0, C1), noise=0.02)[1]
    plain = sum(C0 + C1 * sum(len(t) > s for t in texts) for s in range(max(map(len, texts))))
    return seconds, plain


def _decode(
    engine: Any,
    texts: Texts,
    accepted: float = 0.0,
    seed: int = 0,
    pass_seconds: float = 0.0,
    fail: bool = False,
    cost: tuple[float, float] = (0.01, 0.0003),
    noise: float = 0.0,
    late: float = 0.0,
) -> tuple[int, float]:
    """Steps, and the seconds that they took."""
    rng = random.Random(seed)
    drafts: dict[str, list[int]] = {}
    said: dict[str, list[int]] = {r: [] for r in texts}
    for r, (prompt, text) in texts.items():
        engine.begin(r, prompt, len(text))
    steps, seconds = 0, 0.0
    while ids := [r for r in texts if len(said[r]) < len(texts[r][1])]:
        new = []
        for r in ids:
            text, at, draft = texts[r][1], len(said[r]), drafts.get(r, [])
            assert at + len(draft) < len(text), "a draft left no room for the target's own token"
            n = 0
            while n < len(draft) and draft[n] == text[at + n]:
                n += 1
            new.append(text[at : at + n + 1])
            said[r].extend(new[-1])
        scheduled = {r: drafts[r] for r in ids if drafts.get(r)}
        tokens = len(ids) + sum(map(len, scheduled.values()))
        took = (cost[0] + cost[1] * tokens) * (rng.lognormvariate(0, noise) if noise else 1.0)
        engine.timed(tokens, True, took, len(ids))
        passes = engine.prepare(ids, new, scheduled, float(sum(len(said[r]) for r in ids)))
        rows = None
        if passes and not fail:
            rows = []
            for r in ids:
                after = texts[r][1][len(said[r]) :] + [1] * passes
                rows.append([t if rng.random() < accepted else 3 for t in after[:passes]])
            more = late if engine.head.rested else 0.0
            engine.passed(passes, pass_seconds * passes + more, len(ids), more)
        out = engine.complete(rows)
        assert all(len(d) <= engine.k for d in out)
        drafts.update(zip(ids, out, strict=True))
        steps, seconds = steps + 1, seconds + took
    for r in texts:
        engine.finish(r)
    return steps, seconds
