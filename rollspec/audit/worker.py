"""One engine of an audit, in a process of its own: `python -m rollspec.audit.worker JOB PID`.

Reads an `engine.AuditJob`, writes an `engine.ArmOutput` to `output` beside it, and meanwhile the tokens so far to
`progress`. PID is the audit's: with it this process ends. Only vLLM's public interface is used.
"""

from __future__ import annotations

import math
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafter_online.child import end_with
from drafter_online.files import replace
from rollspec.audit.engine import ArmOutput, AuditJob, AuditPlan, Given, Variant
from rollspec.audit.evidence import Samples, samples_from
from rollspec.audit.statistics import Floats
from rollspec.audit.verdict import DraftCounts
from rollspec.sampling import scoring

MAX_SEQS = 64  # more requests than this queue, so that they end and begin at different steps, as in a rollout


@dataclass(slots=True)
class AuditResponse:
    """One response: tokens and the log-probabilities that the engine reported for them."""

    prompt: int
    round: int
    tokens: list[int]
    log_probs: list[float]


def gathered(responses: Sequence[AuditResponse]) -> Samples:
    """The responses as arrays."""
    return samples_from(*([getattr(r, name) for r in responses] for name in ("tokens", "prompt", "round", "log_probs")))


def work(llm: Any, folder: Path, job: AuditJob) -> None:
    """Generate what `job` asks for with an engine that is built, and write it into `folder`."""
    plan = job.plan
    greedy: list[AuditResponse] = []
    for r in range(job.greedy_rounds):
        next_round(llm, job.arm, r)
        greedy += generate(llm, plan, r, copies=2 if r else 1, temperature=0.0)
    before = counters(llm)

    def one(r: int, copies: int) -> list[AuditResponse]:
        next_round(llm, job.arm, job.greedy_rounds + r)
        return generate(llm, plan, r, copies, plan.temperature)

    def note(done: int) -> None:
        replace(folder / "progress", str(done).encode())  # whole or not at all: the audit reads it meanwhile

    sampled = sample(plan, one, note)
    drafts = DraftCounts(*(b - a for a, b in zip(before, counters(llm), strict=True)))
    off, scored = _off(llm, job.arm), score(llm, job.score)  # the score last: an engine that cannot give it may end
    output = ArmOutput(gathered(sampled), gathered(greedy), drafts, DraftCounts(*before), off, scored)
    replace(folder / "output", pickle.dumps(output))


def sample(
    plan: AuditPlan, one: Callable[[int, int], list[AuditResponse]], note: Callable[[int], None]
) -> list[AuditResponse]:
    """Rounds of siblings until there are exactly `plan.tokens` tokens (fewer only after `max_rounds`).

    Args:
        one: (round, siblings per prompt) -> responses in the order of the requests.
        note: gets the tokens so far after each round.
    """
    out: list[AuditResponse] = []
    tokens = 0
    for r in range(plan.max_rounds):
        if tokens >= plan.tokens:
            break
        # Leave their share to the rounds that follow.
        room = math.ceil((plan.tokens - tokens) / max(1, plan.min_rounds - r))
        length = tokens / len(out) if out else plan.max_tokens
        siblings = math.ceil(room / (len(plan.prompts) * length))
        found = cut(one(r, max(2, min(plan.samples, siblings))), room)
        out += found
        tokens += sum(len(s.tokens) for s in found)
        note(tokens)
    return out


def cut(found: list[AuditResponse], room: int) -> list[AuditResponse]:
    """The first responses, `room` tokens in all. They are in the order of the requests, so that what was sampled has no
    say in what is kept.
    """
    out = []
    for s in found:
        if room <= 0:
            break
        out.append(AuditResponse(s.prompt, s.round, s.tokens[:room], s.log_probs[:room]))
        room -= len(s.tokens)
    return out


def build(job: AuditJob) -> Any:
    """The engine that `job` describes."""
    from vllm import LLM

    from rollspec.engine.vllm.compat import ask_for_runner

    ask_for_runner()  # engines without rollspec, too: what is compared differs in drafting alone
    from vllm.platforms import current_platform

    plan, arm = job.plan, job.arm
    args: dict[str, Any] = {
        "model": job.model,
        "dtype": plan.dtype,
        "seed": plan.seed,
        "max_num_seqs": MAX_SEQS,
        "max_model_len": max(map(len, plan.prompts)) + plan.max_tokens + 1,
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": False,  # the draft counters come with the statistics
        # Compiling costs a minute on CPU and a GPU's graphs are what its user runs.
        "enforce_eager": bool(current_platform.is_cpu()),
    }
    if arm.speculative_config is not None:
        args["speculative_config"] = arm.speculative_config
    if arm.rollspec is not None:
        args["additional_config"] = {"rollspec": arm.rollspec}
    return LLM(**(args | arm.engine))


def generate(llm: Any, plan: AuditPlan, r: int, copies: int, temperature: float) -> list[AuditResponse]:
    """Responses to every prompt; the copies of a prompt are siblings, in order."""
    from vllm import SamplingParams

    order = [i for i in range(len(plan.prompts)) for _ in range(copies)]
    params = SamplingParams(
        temperature=temperature,
        max_tokens=plan.max_tokens,
        logprobs=0,
        detokenize=False,
        # Greedy text is cheap to compare at any length; sampled responses end as they do in a rollout.
        ignore_eos=temperature == 0,
    )
    outputs = llm.generate([{"prompt_token_ids": list(plan.prompts[i])} for i in order], params, use_tqdm=False)
    return [AuditResponse(i, r, *read(o)) for i, o in zip(order, outputs, strict=True)]


def read(output: Any) -> tuple[list[int], list[float]]:
    """(tokens, log-probs) of a finished request."""
    (o,) = output.outputs
    log_probs = [float(step[t].logprob) for step, t in zip(o.logprobs, o.token_ids, strict=True)]
    return list(map(int, o.token_ids)), log_probs


def score(llm: Any, given: Given) -> tuple[Floats, ...] | str:
    """As `ArmOutput.scored`: one prefill of each prompt with its response, in which nothing is drafted."""
    if not given:
        return ()
    requests = [{"prompt_token_ids": [*prompt, *response]} for prompt, response in given]
    try:
        outputs = llm.generate(requests, scoring.params(temperature=1.0), use_tqdm=False)
        found = [scoring.read(o, first=len(prompt)) for o, (prompt, _) in zip(outputs, given, strict=True)]
    except Exception as e:  # not every engine scores prompts, and the audit stands without
        return " ".join(f"{type(e).__name__}: {e}".split())[:200]
    return tuple(f.astype(float) for f in found)


def next_round(llm: Any, arm: Variant, version: int) -> int:
    """Tell rollspec that a round begins, as a trainer does after a weight sync: past rounds are drafted from too."""
    if arm.rollspec is not None and _off(llm, arm) is None:
        llm.collective_rpc("rollspec", args=("set_version", {"version": version}))
    return version + 1


def _off(llm: Any, arm: Variant) -> str | None:
    """Why rollspec does not speculate in this engine, or None where it does or was not asked to."""
    if arm.rollspec is None:
        return None
    given = (llm.llm_engine.vllm_config.additional_config or {}).get("rollspec")
    if isinstance(given, dict) and "off" in given:
        return str(given["off"])
    try:
        infos = [i for i in llm.collective_rpc("rollspec", args=("info", {})) if i]
    except Exception as e:
        return f"its plugin is not loaded in the engine's worker ({type(e).__name__}: {e})"
    # Coupled sampling without drafters is on, though it drafts nothing.
    return next((str(i["reason"]) for i in infos if i["state"] in ("none", "off") and i.get("mode") != "coupled"), None)


def counters(llm: Any) -> tuple[int, int]:
    """(draft tokens, accepted tokens) since the engine started."""
    values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    drafted, accepted = (values.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in ("draft", "accepted"))
    return int(drafted), int(accepted)


if __name__ == "__main__":
    _file = Path(sys.argv[1])
    end_with(int(sys.argv[2]), _file.parent)
    _job: AuditJob = pickle.loads(_file.read_bytes())
    work(build(_job), _file.parent, _job)
