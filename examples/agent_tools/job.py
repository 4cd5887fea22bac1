"""One GRPO job with tools in verl's agent loop, on this machine.

Usage, from the repository root::

    python -m examples.agent_tools.job --out runs/tools
    python -m examples.agent_tools.job --out runs/tools-off --rollspec off
    rollspec report runs/tools --baseline runs/tools-off

The job is that of `rollspec demo` with this example's policy, prompts and reward, and with `OVERRIDES`, which are all
that verl's tool loop needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.agent_tools.prepare import HERE, SIZES, prepare
from examples.cache import home
from examples.demo.job import Assets, Job, JobSettings, build_job, hydra_value, require_programs
from examples.demo.runner import JobFailed, run_job
from rollspec.errors import RollspecError
from rollspec.telemetry.runs import Row

MOST_TURNS = 7  # two more than the longest chain of a policy that is right
PROMPT, RESPONSE = 192, 704  # tokens; the longest worked dialogue has 620 behind its prompt

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
OVERRIDES = (
    "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    f"{_MULTI_TURN}.enable=True",
    f"{_MULTI_TURN}.format=hermes",
    f"{_MULTI_TURN}.max_assistant_turns={MOST_TURNS}",
    f"{_MULTI_TURN}.function_tool_path={hydra_value(str(HERE / 'verl_tools.py'))}",
)


def build(folder: Path, cache: Path, *, speculate: bool, overrides: Sequence[str] = (), **changes: Any) -> Job:
    """The job as a command; `changes` are to `JobSettings`, `overrides` to the preset (`preset=` among the former)."""
    preset = changes.pop("preset", "default")
    settings = JobSettings(**{"max_prompt_length": PROMPT, "max_response_length": RESPONSE, **changes})
    made = prepare(cache, settings.size, settings.seed, settings.train_prompts, val_size=8)
    assets = Assets(made.model, made.train, made.val, made.reward, made.manifest)
    job = build_job(settings, assets, folder, speculate=speculate, preset=preset, overrides=overrides)
    return dataclasses.replace(job, command=(*job.command, *OVERRIDES))


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Run a GRPO job whose policy calls a calculator and a Python sandbox.")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--rollspec", default="default", help="preset, or off")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="knob on top of the preset")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()
    on = args.rollspec != "off"
    sizes = {"size": args.size, "train_prompts": args.prompts, "epochs": args.epochs}
    try:
        require_programs()
        job = build(
            args.out, home() / "agent_tools", speculate=on, overrides=args.set,
            preset=args.rollspec if on else "default", **sizes,
        )  # fmt: skip
        args.out.mkdir(parents=True, exist_ok=True)
        run_job(job, timeout=3600.0, on_step=_show)
    except (RollspecError, JobFailed) as e:
        print(e, file=sys.stderr)
        return 2
    return 0


def _show(row: Row) -> None:
    names = ("rollspec/reward/mean", "num_turns/mean", "rollspec/accept/length", "timing_s/gen")
    print("  ".join(f"{name} {row[name]:.2f}" for name in names if name in row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
