"""Day-0 and drift on real text: a server without speculation, with a frozen drafter, and with one that keeps learning.

    make serve-demo                                  or: python -m examples.production_traffic --out runs/traffic
    python -m examples.production_traffic --bursts 8,8,4 --only online

    python -m examples.production_traffic --model smollm2 --head runs/head

A small language model of the standard library is trained on first use (some three minutes) and served by a real
`vllm serve`. Clients ask for completions of code, then of prose, then of code again. A model of yours is asked for
arithmetic, lists, code and rewriting. The online drafter starts as `--head`, or a fresh one; the frozen one is what the
online one had become when the traffic turned for the first time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import provenance
from drafter_online.errors import DrafterError
from examples.models import resolve
from examples.production_traffic import language, results, servers, topics, traffic
from examples.production_traffic.traffic import Burst, Plan
from rollspec.errors import RollspecError

ARMS = ("none", "online", "frozen")  # in the order in which they run: the frozen one is made by the online one
CORPUS = (("code", 20), ("prose", 20), ("code", 10))
REAL = (("arithmetic", 6), ("lists", 6), ("code", 16), ("rewriting", 16))
"""Bursts of each domain, in this order, unless `--bursts` says other numbers; the latter with `--model`."""
ROOT = Path(__file__).resolve().parents[2]
DAEMON = {
    "option.publish_every": 40,
    "option.recency": 20,
    "set.learning_rate": "2e-3",
    "set.batch_tokens": 512,
    "set.ttt_steps": 3,
}
DAEMON_REAL = {"option.publish_every": 20, "option.recency": 20, "set.batch_tokens": 512}
DRAFTS = 3  # of the head of the language model


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.production_traffic", description=__doc__.partition("\n\n")[0] if __doc__ else None
    )
    parser.add_argument("--out", type=Path, help="folder of the run; default runs/traffic-<time>")
    parser.add_argument("--model", help="PATH|HUB|smollm2: serve this model instead of the example's")
    parser.add_argument("--head", type=Path, help="draft head of --model that the online drafter starts as")
    parser.add_argument("--bursts", help="of each domain in turn, as 20,20,10: of code, of prose, and of code again")
    parser.add_argument("--clients", type=int, default=4, help="requests at the same time")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between bursts")
    parser.add_argument("--suffix", action="store_true", help="draft from what was said before, too")
    parser.add_argument("--only", choices=ARMS, help="one arm; others of the same --out are kept")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a model that is hardly trained, and not grown (tests)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON; progress goes to stderr")
    args = parser.parse_args(argv)
    console = Console(stderr=args.json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends the servers as Ctrl-C does
    try:
        summary = run(args, console)
    except (RollspecError, DrafterError) as e:
        print(e, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130
    if args.json:
        print(json.dumps(summary, indent=2))
    return 0


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run the arms, write `summary.json` and `traffic.svg`; the numbers."""
    out = (args.out or ROOT / "runs" / f"traffic-{datetime.now():%Y%m%d-%H%M%S}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.head and not (args.model and (args.head / "config.json").is_file()):
        raise RollspecError(f"--head {args.head}: give the folder of a head, with config.json, and its --model.")
    phases = _phases(args.bursts, REAL if args.model else CORPUS)
    answers: dict[str, Any] = {"tokens": (96, 160), "natural": True} if args.model else {}
    plan = Plan(phases, clients=args.clients, pause=args.pause, seed=args.seed, **answers)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollspec" / "production_traffic"
    console.print(f"runs go to {out}", highlight=False, soft_wrap=True)
    if args.model:
        made = topics.prepare(resolve(args.model), args.seed)
    else:
        made = language.prepare(cache, steps=4 if args.tiny else 600, grown=not args.tiny, seed=args.seed)
    os.sched_setaffinity(0, {servers.TRAINER_CORE})  # the server's core is the server's
    arms: dict[str, list[Burst]] = {}
    for name in ARMS:
        file = out / f"{name}.jsonl"
        if args.only in (None, name):
            console.print(f"[bold]{results.NAMES[name]}[/bold]: starting the server")
            arms[name] = asyncio.run(_arm(name, made, plan, out, args, console))
        elif file.is_file():
            arms[name] = traffic.read_bursts(file)
    arms = {name: bursts for name, bursts in arms.items() if len(bursts) == sum(n for _, n in plan.phases)}
    summary = {
        **results.summarize(plan, arms), "model": args.model, "head": args.head and str(args.head),
        "plan": vars(plan), "suffix": args.suffix, "provenance": provenance(),
    }  # fmt: skip
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    picture = out / "traffic.svg"
    results.draw(plan, arms, picture)
    table = Table(*results.HEAD)
    for row in results.rows(plan, summary):
        table.add_row(*row)
    console.print(table)
    for other in ("frozen", "none"):
        if ratios := summary.get(f"online_over_{other}"):
            said = ", ".join(f"{d} {r:.2f}x" for (d, _), r in zip(plan.phases, ratios, strict=True))
            console.print(f"online over {results.NAMES[other]}, tokens/s at the end of: {said}", highlight=False)
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    return summary


async def _arm(
    name: str, made: language.Language, plan: Plan, out: Path, args: argparse.Namespace, console: Console
) -> list[Burst]:
    folder = out / name
    folder.mkdir(exist_ok=True)
    first_phase = plan.phases[0][1]

    def seen(burst: Burst) -> None:
        console.print(
            f"  {burst.domain:10}  {burst.requests:4} requests, {burst.rate:5.0f} tokens/s, {burst.length:.2f} tokens "
            f"per step, version {burst.version}" + (f", {burst.failed} failed" if burst.failed else ""),
            highlight=False,
        )
        if name == "online" and burst.number == first_phase - 1:
            _freeze(folder, out / "head", burst.version)

    options = _options(name, out, args.suffix, args.model is not None)
    endpoint = f"ipc://{folder / 'wire'}"
    if name == "online":
        from drafter_online import head as heads

        shutil.rmtree(folder / "drafter", ignore_errors=True)
        first = heads.load(args.head, made.model) if args.head else heads.fresh(made.model)
        head = heads.save(first, out / "first")
        with servers.daemon(made.model, head, folder, endpoint, DAEMON_REAL if args.model else DAEMON) as url:
            console.print(f"  status: {url}/status", highlight=False)
            return await _traffic(made, plan, out, name, {**options, "drafter.endpoint": endpoint}, seen)
    return await _traffic(made, plan, out, name, options, seen)


async def _traffic(
    made: language.Language, plan: Plan, out: Path, name: str, options: dict[str, Any], seen: Any
) -> list[Burst]:
    with servers.server(made.model, traffic.MODEL, out / name, options or None, plan.clients, made.dtype) as url:
        warm = replace(plan, phases=((plan.phases[0][0], 2),), pause=0.0, seed=plan.seed + 1)
        await traffic.send(url, warm, {d: p[::-1] for d, p in made.prompts.items()}, out / f"{name}.warm", _quiet)
        return await traffic.send(url, plan, made.prompts, out / f"{name}.jsonl", seen)


def _options(name: str, out: Path, suffix: bool, real: bool = False) -> dict[str, Any]:
    """What `--additional-config` says; nothing for the server without speculation."""
    if name == "none":
        return {}
    drafters = ["suffix", "eagle3"] if suffix else ["eagle3"]
    common: dict[str, Any] = {"proposal.drafters": drafters} | ({} if real else {"proposal.head.k_max": DRAFTS})
    if name == "online":
        return {
            **common, "preset": "serve", "proposal.head.model": str(out / "first"), "drafter.capture.share": 1.0,
        }  # fmt: skip
    if not (out / "head").is_dir():
        raise RollspecError(f"the frozen drafter is made by the online one: run --only online --out {out} first.")
    return {**common, "preset": "default", "proposal.head.model": str(out / "head")}


def _freeze(folder: Path, head: Path, version: int) -> None:
    """Keep what the online drafter is now, before its store forgets it."""
    from drafter_online.versions import Versions

    source = Versions(folder / "drafter" / "versions").path(version) if version else folder.parent / "first"
    shutil.rmtree(head, ignore_errors=True)
    shutil.copytree(source, head)


def _phases(text: str | None, order: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    if text is None:
        return order
    try:
        counts = [int(n) for n in text.split(",")]
    except ValueError:
        counts = []
    if len(counts) != len(order) or min(counts) < 1:
        names = ", ".join(domain for domain, _ in order)
        raise RollspecError(f"--bursts {text}: give {len(order)} counts from 1 up, of {names}.")
    return tuple((domain, count) for (domain, _), count in zip(order, counts, strict=True))


def _quiet(burst: Burst) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
