"""Runs the engines of an audit, each in a fresh process with a time limit, and reads back what they sampled."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter_online import child
from rollspec.audit.evidence import AuditError, Samples
from rollspec.audit.statistics import Floats
from rollspec.audit.verdict import DraftCounts
from rollspec.config import Source, resolve

Progress = Callable[[int, int], None]
Given = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Prompts, each with a response to it."""

ARM_SECONDS = 900.0
TOKENS = 12_000  # half a percent of uniform tokens are found in a 135 M model, within minutes on a CPU
GREEDY_ROUNDS = 3
TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What is generated: `tokens` sampled tokens, in rounds of at most `samples` responses to every prompt, at least
    `min_rounds` of them: suffix drafts need responses of siblings or of an earlier round.
    """

    prompts: tuple[tuple[int, ...], ...]
    tokens: int = TOKENS
    samples: int = 16
    max_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    dtype: str = "float32"
    min_rounds: int = 2
    max_rounds: int = 200


@dataclass(frozen=True, slots=True)
class Variant:
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
    def drafts(self) -> bool:
        """Whether drafts are expected, and their absence makes the audit inconclusive."""
        if self.rollspec is None:
            return self.speculative_config is not None
        return bool(self.rollspec["proposal"]["drafters"]) and self.rollspec["tuning"]["arms"] != [0]

    @classmethod
    def plain(cls, engine: Mapping[str, Any] | None = None) -> Variant:
        """The engine without speculation."""
        return cls("without speculation", engine=dict(engine or {}))

    @classmethod
    def with_rollspec(
        cls, source: Source = "default", overrides: Sequence[str] = (), engine: Mapping[str, Any] | None = None
    ) -> Variant:
        """An engine with rollspec. The audit's text must not reach the job's history or metrics, so both stay off."""
        config = resolve(source, overrides=[*overrides, "history.dir=null", "telemetry.jsonl=null"])
        return cls(
            f"rollspec, preset {config.preset}, mode {config.mode}",
            rollspec=config.to_dict(),
            engine=dict(engine or {}),
        )


@dataclass(frozen=True, slots=True)
class AuditJob:
    """What an engine's process does: each prompt is answered greedily so many times, from the second time on with
    drafts from the first, then sampled from; at last the responses in `score` are read as prompts.
    """

    model: str
    plan: AuditPlan
    arm: Variant
    greedy_rounds: int = GREEDY_ROUNDS
    score: Given = ()


@dataclass(frozen=True, slots=True)
class ArmOutput:
    """An engine's responses, and its drafts while it sampled and while it was greedy. `off`: why rollspec did not
    speculate in it, or None. `scored`: [tokens] log-probabilities, at temperature 1, of each response in
    `AuditJob.score`, or why the engine gave none.
    """

    samples: Samples
    greedy: Samples
    drafts: DraftCounts
    greedy_drafts: DraftCounts
    off: str | None
    scored: tuple[Floats, ...] | str = ()


def run_arm(
    model: str | Path,
    plan: AuditPlan,
    arm: Variant,
    *,
    greedy_rounds: int = GREEDY_ROUNDS,
    score: Given = (),
    timeout: float = ARM_SECONDS,
    progress: Progress = lambda done, total: None,
) -> ArmOutput:
    """Build the engine in a new process, generate (see `AuditJob`), end it. `progress` gets tokens (sampled, wanted).

    Raises:
        AuditError: the engine failed or took longer than `timeout` seconds; the message ends with its last lines.
    """
    with tempfile.TemporaryDirectory(prefix="rollspec-audit-") as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps(AuditJob(str(model), plan, arm, greedy_rounds, score)))
        _run_process(arm.name, folder, timeout, lambda done: progress(done, plan.tokens))
        output: ArmOutput = pickle.loads((folder / "output").read_bytes())
        return output


def _run_process(name: str, folder: Path, timeout: float, progress: Callable[[int], None]) -> None:
    def written() -> bool:
        if (folder / "progress").exists():
            progress(int((folder / "progress").read_text()))
        return False

    code = child.run("rollspec.audit.worker", folder / "job", folder / "log.txt", timeout, written)
    if code == 0 and (folder / "output").exists():
        return
    what = f"did not finish within {timeout:g} s" if code is None else f"ended with status {code}"
    raise AuditError(f"rollspec: the engine ({name}) {what}{_cause((folder / 'log.txt').read_text(errors='replace'))}")


def _cause(log: str) -> str:
    """The first error in a log of several processes; else its last lines."""
    if first := child.first_error(log):
        return f": {first}"
    return "; its last lines:\n" + "\n".join(log.splitlines()[-TAIL_LINES:])
