"""Day-0 and drift on real text: a server without speculation, with a frozen drafter, and with one that keeps learning.

    make serve-demo                                  or: python -m examples.production_traffic --out runs/traffic
    python -m examples.production_traffic --bursts 8,8,4 --only online

    python -m examples.production_traffic --model smollm2 --head runs/head

A small language model of the standard library is trained on first use (some three minutes) and served by a real
`vllm serve`. Clients ask for completions of code, then of prose, then of code again. A model of yours is asked for
arithmetic, lists, code and rewriting. With `--head` the online drafter starts from it and the frozen one stays it, and
all servers are sent each burst in turn; those that wait are halted, the trainer with its server. Without, the online
one starts from a fresh head, and the frozen one, which runs after it, is what that was when the traffic turned first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
from contextlib import AbstractContextManager, ExitStack
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
    parser.add_argument("--seeds", type=int, default=1, help="so many of them, one after the other, from --seed on")
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
    began = provenance()
    out = (args.out or ROOT / "runs" / f"traffic-{datetime.now():%Y%m%d-%H%M%S}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    if args.head and args.only:
        raise RollspecError("--only is for a run without --head: with one, all servers take turns; leave it out.")
    if args.head and not (args.model and (args.head / "config.json").is_file()):
        raise RollspecError(f"--head {args.head}: give the folder of a head, with config.json, and its --model.")
    phases = _phases(args.bursts, REAL if args.model else CORPUS)
    answers: dict[str, Any] = {"tokens": (96, 160), "natural": True} if args.model else {}
    console.print(f"runs go to {out}", highlight=False, soft_wrap=True)
    os.sched_setaffinity(0, {servers.TRAINER_CORE})  # the server's core is the server's
    found: dict[int, dict[str, list[Burst]]] = {}
    for seed in range(args.seed, args.seed + args.seeds):
        plan = Plan(phases, clients=args.clients, pause=args.pause, seed=seed, **answers)
        folder = out if args.seeds == 1 else out / f"seed-{seed}"
        folder.mkdir(exist_ok=True)
        found[seed] = _seed(plan, folder, args, console)
    plan, arms = replace(plan, seed=args.seed), found[args.seed]
    summary = {
        **results.summarize(plan, arms), "model": args.model, "head": args.head and str(args.head),
        "plan": vars(plan), "suffix": args.suffix, "provenance": began,
    }  # fmt: skip
    if args.head:  # servers took turns
        summary |= {"seeds": {s: results.summarize(plan, a) for s, a in found.items()},
                    "pairs": results.pairs(plan, list(found.values()))}  # fmt: skip
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    picture = out / "traffic.svg"
    results.draw(plan, arms, picture)
    for seed, one in summary.get("seeds", {args.seed: summary}).items():
        table = Table(*results.HEAD, title=f"seed {seed}" if args.seeds > 1 else None)
        for row in results.rows(plan, one):
            table.add_row(*row)
        console.print(table)
    for line in results.sentences(plan, summary):
        console.print(line, highlight=False)
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    return summary


def _seed(plan: Plan, out: Path, args: argparse.Namespace, console: Console) -> dict[str, list[Burst]]:
    """The traffic of one seed, through every server; those that broke off are left out."""
    if args.model:
        made = topics.prepare(resolve(args.model), plan.seed)
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollspec" / "production_traffic"
        made = language.prepare(cache, steps=4 if args.tiny else 600, grown=not args.tiny, seed=plan.seed)
    arms: dict[str, list[Burst]] = {}
    if args.head:
        console.print("[bold]all three servers[/bold]: starting; they take turns")
        arms = asyncio.run(_traffic(ARMS, made, plan, out, args, console))
    for name in () if args.head else ARMS:
        if args.only in (None, name):
            console.print(f"[bold]{results.NAMES[name]}[/bold]: starting the server")
            arms |= asyncio.run(_traffic((name,), made, plan, out, args, console))
        elif (file := out / f"{name}.jsonl").is_file():
            arms[name] = traffic.read_bursts(file)
    return {name: bursts for name, bursts in arms.items() if len(bursts) == sum(n for _, n in plan.phases)}


async def _traffic(
    names: tuple[str, ...],
    made: language.Language,
    plan: Plan,
    out: Path,
    args: argparse.Namespace,
    console: Console,
) -> dict[str, list[Burst]]:
    """What came of the traffic that these servers were sent; they take turns."""
    first_phase = plan.phases[0][1]

    def seen(name: str, burst: Burst) -> None:
        console.print(
            f"  {name:6}  {burst.domain:10}  {burst.requests:4} requests, {burst.rate:5.0f} tokens/s, "
            f"{burst.length:.2f} tokens per step, version {burst.version}"
            + (f", {burst.failed} failed" if burst.failed else ""),
            highlight=False,
        )
        if name == "online" and not args.head and burst.number == first_phase - 1:
            _freeze(out / name, out / "head", burst.version)

    with ExitStack() as stack:
        live: dict[str, servers.Server] = {}
        for name in names:
            folder = out / name
            folder.mkdir(exist_ok=True)
            options, families = _options(name, out, args), ()
            if name == "online":
                trainer = stack.enter_context(_daemon(made, out, args))
                console.print(f"  status: {trainer.url}/status", highlight=False)
                options["drafter.endpoint"], families = _endpoint(folder), trainer.families
            server = stack.enter_context(
                servers.server(made.model, traffic.MODEL, folder, options or None, plan.clients, made.dtype)
            )
            live[name] = replace(server, families=(*server.families, *families))
            warm = replace(plan, phases=((plan.phases[0][0], 2),), pause=0.0, seed=plan.seed + 1)
            turned = {d: p[::-1] for d, p in made.prompts.items()}
            await traffic.send({"warm": live[name]}, warm, turned, folder, lambda *_: None)
            if len(names) > 1:
                live[name].suspend()
        return await traffic.send(live, plan, made.prompts, out, seen)


def _endpoint(folder: Path) -> str:
    return f"ipc://{folder / 'wire'}"


def _daemon(made: language.Language, out: Path, args: argparse.Namespace) -> AbstractContextManager[servers.Server]:
    """A trainer that starts from `--head`, or from a fresh head."""
    from drafter_online import head as heads

    folder = out / "online"
    shutil.rmtree(folder / "drafter", ignore_errors=True)
    head = heads.save(heads.load(args.head, made.model) if args.head else heads.fresh(made.model), out / "first")
    options = DAEMON_REAL if args.model else DAEMON
    return servers.daemon(made.model, head, folder, _endpoint(folder), options)


def _options(name: str, out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What `--additional-config` says; nothing for the server without speculation."""
    if name == "none":
        return {}
    drafters = ["suffix", "eagle3"] if args.suffix else ["eagle3"]
    common: dict[str, Any] = {"proposal.drafters": drafters} | ({} if args.model else {"proposal.head.k_max": DRAFTS})
    if name == "online":
        return {
            **common, "preset": "serve", "proposal.head.model": str(out / "first"), "drafter.capture.share": 1.0,
        }  # fmt: skip
    if not args.head and not (out / "head").is_dir():
        raise RollspecError(f"the frozen drafter is made by the online one: run --only online --out {out} first.")
    return {**common, "preset": "default", "proposal.head.model": str(args.head or out / "head")}


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


if __name__ == "__main__":
    sys.exit(main())
