"""Runs the engines of an audit, each in a fresh process with a time limit, and reads back what they sampled."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafter_online.child import first_error
from rollspec.audit.evidence import AuditError, Samples, samples_from
from rollspec.audit.verdict import DraftCounts
from rollspec.config import ENV_PREFIX, ENV_SWITCH, Source, resolve

Progress = Callable[[int, int], None]

ARM_SECONDS = 900.0
GREEDY_ROUNDS = 3
TAIL_LINES = 25
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Set where the user has not: without them vLLM on CPU reserves half the memory and may pin threads to one core."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is generated: `tokens` sampled tokens, in rounds of at most `samples` responses to every prompt, at least
    `min_rounds` of them: suffix drafts need responses of siblings or of an earlier round.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: int = 40_000
    samples: int = 16
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    min_rounds: int = 2
    max_rounds: int = 200


@dataclass(frozen=True, slots=True)
class Arm:
    """One engine: rollspec's resolved configuration, vLLM's own speculation, or neither; and more `LLM` arguments."""

    name: str
    rollspec: dict[str, Any] | None = None
    speculative_config: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)

    @property
    def lossy(self) -> float | None:
        """The bias of SPEC-RL's rule where a trainer's rollouts start from old responses by it, else None."""
        reuse = (self.rollspec or {}).get("reuse", {})
        return float(reuse["bias"]) if reuse.get("mode") == "lenient" else None

    @property
    def speculates(self) -> bool:
        """Whether drafts are expected, and their absence makes the audit inconclusive."""
        return self.rollspec is not None or self.speculative_config is not None

    @property
    def drafts(self) -> bool:
        """Whether it is configured to draft anything at all."""
        if self.rollspec is None:
            return self.speculative_config is not None
        return bool(self.rollspec["proposal"]["drafters"]) and self.rollspec["tuning"]["arms"] != [0]

    @classmethod
    def plain(cls, engine: Mapping[str, Any] | None = None) -> Arm:
        """The engine without speculation."""
        return cls("without speculation", engine=dict(engine or {}))

    @classmethod
    def with_rollspec(
        cls, source: Source = "default", overrides: Sequence[str] = (), engine: Mapping[str, Any] | None = None
    ) -> Arm:
        """An engine with rollspec. The audit's text must not reach the job's history or metrics, so both stay off."""
        config = resolve(source, overrides=[*overrides, "history.dir=null", "telemetry.jsonl=null"])
        return cls(
            f"rollspec, preset {config.preset}, mode {config.mode}",
            rollspec=config.to_dict(),
            engine=dict(engine or {}),
        )


@dataclass(frozen=True, slots=True)
class ArmOutput:
    """An engine's responses, and its drafts while it sampled and while it was greedy. `off`: why rollspec did not
    speculate in it, or None. `cpu_seconds`: of its processes.
    """

    samples: Samples
    greedy: Samples
    drafts: DraftCounts
    greedy_drafts: DraftCounts
    off: str | None
    cpu_seconds: float = 0.0


def run_arm(
    model: str | Path,
    plan: Plan,
    arm: Arm,
    *,
    sample: bool = True,
    greedy_rounds: int = GREEDY_ROUNDS,
    timeout: float = ARM_SECONDS,
    progress: Progress | None = None,
) -> ArmOutput:
    """Build the engine in a new process, generate, end it.

    Args:
        sample: generate at the plan's temperature; greedy responses are generated in any case.
        greedy_rounds: how often every prompt is answered greedily; from the second time on with drafts from the first.
        progress: called with (tokens sampled, tokens wanted).

    Raises:
        AuditError: the engine failed or took longer than `timeout` seconds; the message ends with its last lines.
    """
    job = job_of(model, plan, arm, sample, greedy_rounds)
    with tempfile.TemporaryDirectory(prefix="rollspec-audit-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job))
        _run_process(arm.name, folder, timeout, progress)
        return read_output(folder)


def read_output(folder: Path) -> ArmOutput:
    """What `worker.py` wrote into `folder`."""
    output = json.loads((folder / "output.json").read_text())
    for name in ("samples", "greedy"):
        columns = ([row[c] for row in output[name]] for c in ("tokens", "prompt", "round", "log_probs"))
        output[name] = samples_from(*columns)
    for name in ("drafts", "greedy_drafts"):
        output[name] = DraftCounts(*output[name])
    return ArmOutput(**output)


def job_of(
    model: str | Path, plan: Plan, arm: Arm, sample: bool = True, greedy_rounds: int = GREEDY_ROUNDS
) -> dict[str, Any]:
    """What `worker.py` reads."""
    return {
        "model": str(model),
        "plan": asdict(plan),
        "rollspec": arm.rollspec,
        "speculative_config": arm.speculative_config,
        "engine": arm.engine,
        "max_model_len": max(map(len, plan.prompts)) + plan.max_tokens + 1,
        "sample": sample,
        "greedy_rounds": greedy_rounds,
    }


def _environment() -> dict[str, str]:
    """This process's, without rollspec's own switches: an arm is what its job says, whatever the shell says."""
    kept = {k: v for k, v in os.environ.items() if k != ENV_SWITCH and not k.startswith(ENV_PREFIX)}
    return {**CPU_ENVIRONMENT, "VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", **kept}


def _run_process(name: str, folder: Path, timeout: float, progress: Progress | None) -> None:
    # A file and not a pipe: an engine process that outlives its parent would hold a pipe open.
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollspec.audit.worker", str(folder / "job.json"), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
        end, code = time.monotonic() + timeout, None
        try:
            while code is None and time.monotonic() < end:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(0.2)
                if progress is not None and (folder / "progress.json").exists():
                    at = json.loads((folder / "progress.json").read_text())
                    progress(at["done"], at["total"])
        finally:
            # Also after a normal end: what outlives this engine would share the machine with the next.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0 and (folder / "output.json").exists():
        return
    if code is None:
        what = f"did not finish within {timeout:g} s"
    elif code < 0:
        what = f"was killed by signal {-code} (from outside, or for want of memory)"
    else:
        what = f"ended with status {code}"
    raise AuditError(f"rollspec: the engine ({name}) {what}{_cause((folder / 'log.txt').read_text(errors='replace'))}")


def _cause(log: str) -> str:
    """The first error in a log of several processes; else its last lines."""
    if first := first_error(log):
        return f": {first}"
    tail = "\n".join(log.splitlines()[-TAIL_LINES:])
    return f"; its last lines:\n{tail}" if tail else " and said nothing."
