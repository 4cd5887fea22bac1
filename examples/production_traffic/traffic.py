"""Clients of a server: bursts of requests, each with its domain, and what came of them.

Before each burst the clients pause, as traffic does: a daemon on the same machine trains then. Every server is sent the
same requests in the same order.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from examples.production_traffic.servers import Server

MODEL = "language"
TIMEOUT = 120.0
COUNTERS = {
    "tokens": "vllm:generation_tokens_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "version": "rollspec_drafter_version",
}


@dataclass(frozen=True)
class Plan:
    """Traffic: `phases` of so many bursts of one domain each, `burst` requests by `clients` at a time."""

    phases: tuple[tuple[str, int], ...]
    burst: int = 12
    clients: int = 4
    pause: float = 3.0  # seconds between bursts
    tokens: tuple[int, int] = (32, 80)  # lengths of answers, uniform
    temperature: float = 0.0  # greedy, so that answers of all servers can be compared
    seed: int = 0
    natural: bool = False  # answers end where the model ends them, `tokens` are the most

    def bursts(self, prompts: dict[str, list[list[int]]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        """Domain and requests of every burst; prompts come again only when there are no more."""
        rng = random.Random(self.seed)
        next_prompt = dict.fromkeys(prompts, 0)
        for domain, count in self.phases:
            for _ in range(count):
                requests = []
                for _ in range(self.burst):
                    prompt = prompts[domain][next_prompt[domain] % len(prompts[domain])]
                    next_prompt[domain] += 1
                    requests.append({"prompt": prompt, "max_tokens": rng.randint(*self.tokens)})
                yield domain, requests


@dataclass(frozen=True)
class Burst:
    """What came of one burst; a line of `bursts.jsonl`."""

    number: int
    domain: str
    requests: int  # sent so far, this burst included
    failed: int
    seconds: float
    tokens: int
    drafted: int
    accepted: int
    version: int
    slowest: float  # seconds of the slowest request
    answers: tuple[str, ...] = ()  # a hash of each answer, in the order of the requests

    @property
    def rate(self) -> float:
        """Tokens per second of all clients together."""
        return self.tokens / self.seconds

    @property
    def length(self) -> float:
        """Tokens per request and step: 1 without drafts."""
        return self.tokens / max(self.tokens - self.accepted, 1)


def read_bursts(path: Path) -> list[Burst]:
    """The lines of a finished or broken-off run."""
    known = {f.name for f in fields(Burst)}
    bursts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items() if k in known}
        bursts.append(Burst(**values))
    return bursts


def client_of(url: str) -> Any:
    """An OpenAI client that asks once: a failed request is a result."""
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)


Seen = Callable[[str, Burst], None]
"""Is given the name of a server and what came of a burst there."""


async def send(
    servers: Mapping[str, Server], plan: Plan, prompts: dict[str, list[list[int]]], out: Path, seen: Seen
) -> dict[str, list[Burst]]:
    """Send every burst to each server in turn, first one way round and then the other; those that wait are halted.

    Args:
        out: folder; every burst is written to `SERVER.jsonl` there, and given to `seen`, as it ends.
    """
    import httpx

    done: dict[str, list[Burst]] = {name: [] for name in servers}
    async with AsyncExitStack() as stack:
        scraper = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT))
        clients = {n: await stack.enter_async_context(client_of(s.url)) for n, s in servers.items()}
        files = {n: stack.enter_context((out / f"{n}.jsonl").open("w", encoding="utf-8")) for n in servers}
        for number, (domain, requests) in enumerate(plan.bursts(prompts)):
            for name in servers if number % 2 == 0 else reversed(servers):
                server = servers[name]
                server.resume()
                if number:
                    await asyncio.sleep(plan.pause)
                before = await counters(scraper, server.url, COUNTERS)
                begin = time.perf_counter()
                times, said = await _burst(clients[name], plan, domain, requests)
                seconds = time.perf_counter() - begin
                after = await counters(scraper, server.url, COUNTERS)
                if len(servers) > 1:
                    server.suspend()
                grown = {k: int(after[k] - before[k]) for k in ("tokens", "drafted", "accepted")}
                burst = Burst(
                    number, domain, (number + 1) * plan.burst, sum(t is None for t in times), seconds,
                    version=int(after["version"]), slowest=max((t for t in times if t is not None), default=TIMEOUT),
                    answers=tuple(said), **grown,
                )  # fmt: skip
                files[name].write(json.dumps(asdict(burst)) + "\n")
                files[name].flush()
                done[name].append(burst)
                seen(name, burst)
    return done


async def _burst(
    client: Any, plan: Plan, domain: str, requests: list[dict[str, Any]]
) -> tuple[list[float | None], list[str]]:
    """Seconds of each request, None where it failed; and a hash of each answer, empty where there is none."""
    waiting = iter(enumerate(requests))
    times: list[float | None] = []
    said = [""] * len(requests)

    async def one_client() -> None:
        for n, request in waiting:
            begin = time.perf_counter()
            try:
                more = {"vllm_xargs": {"rollspec": json.dumps({"domain": domain})}, "ignore_eos": not plan.natural}
                answer = await client.completions.create(
                    model=MODEL, temperature=plan.temperature, **request, extra_body=more
                )
                good = plan.natural or answer.usage.completion_tokens == request["max_tokens"]
                said[n] = hashlib.sha256(answer.choices[0].text.encode()).hexdigest()[:8]
            except Exception as e:  # a failed request is a result
                print(f"a request failed: {e}")
                good = False
            times.append(time.perf_counter() - begin if good else None)

    await asyncio.gather(*(one_client() for _ in range(plan.clients)))
    return times, said


async def counters(client: Any, url: str, names: dict[str, str]) -> dict[str, float]:
    """Sums over labels of Prometheus metrics that a server shows; 0 for what is not there. `names`: by key."""
    text = (await client.get(f"{url}/metrics")).text
    found = {k: re.findall(rf"^{re.escape(n)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for k, n in names.items()}
    return {k: sum(map(float, values)) for k, values in found.items()}
