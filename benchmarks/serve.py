"""A `vllm serve` under load while its drafter is replaced every few seconds: what failed, what changed, what it cost.

    rollspec bench serve                       10,000 requests with swaps and as many without (minutes)
    python -m benchmarks.serve --requests 2000

One server, 32 clients, one daemon. Blocks in which a new version is released every `EVERY` seconds alternate
with blocks in which it rests; their order changes. Every eighth request is greedy, and its tokens are compared with
those of a server without rollspec. Weights of successive versions differ by 2 %: each goes through staging, swap and
canary.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.drift import CACHE
from benchmarks.harness import QUICK, pin, provenance, quantile, ratio, save, verdict
from examples.demo.job import JobSettings, prepare_assets
from examples.production_traffic.traffic import client_of, counters

CLIENTS = 32
BLOCK = 500  # requests
EVERY = 4.0  # seconds between two publications
TOKENS = (8, 40)  # of an answer, uniform
GREEDY_EACH = 8
GREEDY_TOKENS = 32
GOAL = 1.05  # p99 latency with swaps over that without
MODEL = "policy"


def run(quick: bool = False, requests: int = 10_000, out: Path | None = None) -> Path:
    """Print the numbers and write JSON. `requests`: so many with swaps, and so many without."""
    from drafter_online import head as heads
    from drafter_online.service import Service
    from drafter_online.settings import settings
    from examples.production_traffic import servers

    pin()
    console = Console(stderr=True)
    began = provenance()
    requests = 400 if quick else requests
    model = prepare_assets(JobSettings(size="tiny"), CACHE / "grpo_arithmetic").model
    prompts = _prompts(model)
    with tempfile.TemporaryDirectory(prefix="rollspec-serve-") as name:
        folder = Path(name)
        console.print("greedy answers of a server without rollspec")
        with servers.server(model, MODEL, folder, None, CLIENTS) as plain:
            expected = asyncio.run(_greedy(plain.url, prompts))
        head = heads.fresh(model)
        options = {
            "proposal.drafters": ["suffix", "eagle3"],
            "proposal.head.model": str(heads.save(head, folder / "head")),
            "drafter.mode": "dedicated",
            "drafter.endpoint": f"ipc://{folder}/wire",
        }
        daemon = Service(
            settings({
                "dir": folder / "daemon", "target": model, "head": folder / "head",
                "endpoint": options["drafter.endpoint"], "passes": 1e-9,
            })
        )  # fmt: skip
        daemon.start()  # and never trains: what it publishes is made here
        console.print("the server with rollspec")
        with servers.server(model, MODEL, folder, options, CLIENTS) as drafting:
            found = asyncio.run(_measure(drafting.url, prompts, expected, requests, _Publisher(daemon, model), console))
        daemon.close()
    result = {"benchmark": "serve", "provenance": began, "clients": CLIENTS, "block": BLOCK, "every": EVERY, **found}
    if quick:
        console.print(QUICK)
    r = result["p99_with_over_without"]
    console.print(
        f"{result['requests']} requests, {result['swaps']} swaps: {result['failed']} failed, {result['altered']} of "
        f"{result['compared']} greedy answers altered; p99 latency with swaps {result['p99']['with']:.3f} s, without "
        f"{result['p99']['without']:.3f} s; by pairs of blocks {r.median:.3f} [{r.low:.3f}, {r.high:.3f}], "
        f"goal {GOAL}: {result['verdict']}",
        highlight=False,
    )
    return save("serve" + ("-quick" if quick else ""), result, out)


async def _measure(
    url: str, prompts: list[list[int]], expected: list[str], requests: int, publisher: _Publisher, console: Console
) -> dict[str, Any]:
    numbers = itertools.count()
    latencies: dict[bool, list[list[float]]] = {True: [], False: []}
    rates: dict[bool, list[float]] = {True: [], False: []}
    failed = altered = compared = sent = 0
    async with client_of(url) as client:
        await _block(client, prompts, expected, itertools.count(), BLOCK)  # warm
        swaps_before = await _swaps(url)
        for n in range(-(-requests // BLOCK)):
            for swapping in (True, False) if n % 2 == 0 else (False, True):
                task = asyncio.create_task(publisher.publish_every(EVERY)) if swapping else None
                begin = time.perf_counter()
                answers = await _block(client, prompts, expected, numbers, min(BLOCK, requests))
                seconds = time.perf_counter() - begin
                if task is not None:
                    task.cancel()
                    await publisher.settled(url)
                good = [a for a in answers if a["seconds"] is not None]
                latencies[swapping].append([a["seconds"] for a in good])
                rates[swapping].append(sum(a["tokens"] for a in good) / seconds)
                failed += len(answers) - len(good)
                altered += sum(a["altered"] for a in good)
                compared += sum(a["compared"] for a in good)
            last = {s: _p99(latencies[s][-1]) for s in (True, False)}
            sent = failed + sum(len(b) for s in latencies.values() for b in s)
            console.print(
                f"{sent} requests: p99 {last[True]:.3f} s with swaps, {last[False]:.3f} s without; "
                f"{failed} failed, {altered} of {compared} altered",
                highlight=False,
            )
        swaps = await _swaps(url) - swaps_before
    with_swaps, without = ([_p99(b) for b in latencies[s]] for s in (True, False))
    pairs = ratio(with_swaps, without)
    return {
        "requests": sent,
        "swaps": int(swaps),
        "published": publisher.published,
        "failed": failed,
        "compared": compared,
        "altered": altered,
        "p50": {_word(s): statistics.median(itertools.chain(*latencies[s])) for s in latencies},
        "p99": {_word(s): _p99(list(itertools.chain(*latencies[s]))) for s in latencies},
        "p99_with_over_without": pairs,
        "tokens_per_second_with_over_without": ratio(rates[True], rates[False]),
        "goal": GOAL,
        "verdict": verdict(pairs, GOAL),
    }


class _Publisher:
    """Has a daemon release versions, by turns a fresh head and the same with all weights 2 % smaller."""

    def __init__(self, daemon: Any, model: str) -> None:
        from drafter_online import architecture
        from drafter_online import head as heads

        self.daemon = daemon
        head = heads.fresh(model)
        self.base = architecture.base_of(architecture.target_config(model))
        self.config = heads.config_of(head)
        self.weights = heads.own_weights(head)
        self.published = 0

    async def publish_every(self, seconds: float) -> None:
        """Until cancelled."""
        while True:
            await asyncio.to_thread(self.publish)
            await asyncio.sleep(seconds)

    def publish(self) -> None:
        """One version."""
        scale = 0.98 if self.published % 2 == 0 else 1.0
        weights = {n: t * scale if t.is_floating_point() else t for n, t in self.weights.items()}
        store = self.daemon.versions
        self.daemon.release.published(store.publish(weights, self.config, base=self.base, target_version=0))
        self.published += 1

    async def settled(self, url: str, seconds: float = 6.0) -> None:
        """Wait until what was published has been swapped in, so that the next block is without."""
        end, before = time.monotonic() + seconds, -1.0
        while time.monotonic() < end:
            now = await _swaps(url)
            if now == before:
                return
            before = now
            await asyncio.sleep(1.5)


async def _block(
    client: Any, prompts: list[list[int]], expected: Sequence[str], numbers: Any, count: int
) -> list[dict[str, Any]]:
    """`count` requests by `CLIENTS` clients."""
    waiting = iter(list(itertools.islice(numbers, count)))
    answers: list[dict[str, Any]] = []

    async def one_client() -> None:
        for n in waiting:
            greedy = n % GREEDY_EACH == 0
            which = (n // GREEDY_EACH if greedy else n) % len(prompts)
            tokens = GREEDY_TOKENS if greedy else random.Random(n).randint(*TOKENS)
            row = {"seconds": None, "tokens": tokens, "compared": greedy, "altered": False}
            begin = time.perf_counter()
            try:
                text = await _ask(client, prompts[which], tokens, 0.0 if greedy else 1.0)
                row |= {"seconds": time.perf_counter() - begin, "altered": greedy and text != expected[which]}
            except Exception as e:  # a failed request is a result
                print(f"request {n} failed: {e}")
            answers.append(row)

    await asyncio.gather(*(one_client() for _ in range(CLIENTS)))
    return answers


async def _ask(client: Any, prompt: list[int], tokens: int, temperature: float) -> str:
    answer = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=tokens, temperature=temperature, extra_body={"ignore_eos": True}
    )
    if answer.usage.completion_tokens != tokens:
        raise RuntimeError(f"{answer.usage.completion_tokens} tokens came instead of {tokens}")
    return str(answer.choices[0].text)


async def _greedy(url: str, prompts: list[list[int]]) -> list[str]:
    async with client_of(url) as client:
        return [await _ask(client, p, GREEDY_TOKENS, 0.0) for p in prompts]


async def _swaps(url: str) -> float:
    import httpx

    async with httpx.AsyncClient(timeout=30) as client:
        return (await counters(client, url, {"swaps": "rollspec_drafter_swaps_total"}))["swaps"]


def _prompts(model: str, count: int = 64) -> list[list[int]]:
    from transformers import AutoTokenizer

    from examples.grpo_arithmetic.task import sample_problem
    from examples.grpo_arithmetic.tokenizer import prompt_text

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(0)
    return [tokenizer.encode(prompt_text(sample_problem(rng).question)) for _ in range(count)]


def _p99(seconds: Sequence[float]) -> float:
    return quantile(sorted(seconds), 0.99)


def _word(swapping: bool) -> str:
    return "with" if swapping else "without"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Swaps under the load of a real server.")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    print(json.loads(run(args.quick, args.requests).read_text())["verdict"])
