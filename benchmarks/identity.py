"""How often rounding parts coupled texts: the same prompts and noise, without drafts and with ones of random length.

    python -m benchmarks.identity --dtype bfloat16 --model PATH

In exact arithmetic the texts are equal. In a given dtype, batches of other shapes round differently, and a token may
change where the two best perturbed logits are closer than that. Each pair is compared up to its first difference, and
there both tokens are scored by the float32 reference and the noise: `gap` is the winner's lead.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import pin, provenance, save
from rollspec import RollspecConfig
from rollspec.audit.engine import AuditPlan, Variant, run_arm
from rollspec.audit.evidence import Samples
from rollspec.audit.noise import Words, gumbel, keys_of
from rollspec.audit.prompts import token_prompts
from rollspec.audit.reference import Reference

COUPLED = ["mode=coupled"]
SWITCHING = [*COUPLED, "tuning.strategy=random", "tuning.guard.enabled=false"]


Lead = Callable[[int, list[int], int, int], float]
"""(sequence, prefix, token a, token b) -> by how much a's perturbed score leads b's there."""


@dataclass(frozen=True, slots=True)
class SameTokens:
    """`identical` texts of `sequences`; `ties` part where two scores are within `tie`, `wrong` elsewhere. `leads` are
    the winners' leads where texts part; `first`: the first wrong one as (sequence, position, token, other, lead).
    """

    sequences: int
    tokens: int
    identical: int
    ties: int
    wrong: int
    tie: float
    leads: tuple[float, ...]
    first: tuple[int, int, int, int, float] | None

    @property
    def passed(self) -> bool:
        """No difference that rounding does not explain."""
        return self.wrong == 0


def siblings(samples: Samples) -> dict[tuple[int, int, int], int]:
    """Index of each text by round, prompt and how many of that prompt came before it in the round."""
    count: Counter[tuple[int, int]] = Counter()
    out = {}
    for s, key in enumerate(zip(samples.round.tolist(), samples.prompt.tolist(), strict=True)):
        out[(*key, count[key])] = s
        count[key] += 1
    return out


def same_tokens(a: Samples, b: Samples, lead: Lead, tie: float) -> SameTokens:
    """Compare the texts that two engines gave to the same sibling of a prompt, each up to its first difference.

    One that ends where the other continues is wrong: the end is a token, too.
    """
    compared = identical = ties = wrong = 0
    leads: list[float] = []
    first: tuple[int, int, int, int, float] | None = None
    others = siblings(b)
    pairs = [(s, others[name]) for name, s in siblings(a).items() if name in others]
    for s, other in pairs:
        x, y = a.tokens[s], b.tokens[other]
        n = min(len(x), len(y))
        differ = np.flatnonzero(x[:n] != y[:n])
        if not len(differ):
            compared += n
            if len(x) == len(y):
                identical += 1
            else:
                wrong += 1
                first = first or (s, n, -1, -1, float("inf"))
            continue
        at = int(differ[0])
        compared += at + 1
        p, q = int(x[at]), int(y[at])
        distance = abs(lead(s, x[:at].tolist(), p, q))
        leads.append(distance)
        if distance <= tie:
            ties += 1
        else:
            wrong += 1
            first = first or (s, at, p, q, distance)
    return SameTokens(len(pairs), compared, identical, ties, wrong, tie, tuple(leads), first)


def leads(samples: Samples, keys: Words, prompts: Sequence[Sequence[int]], target: Any) -> Any:
    """For `same_tokens`: scores two tokens with the logits of `target` (a `Reference`) and their noise."""

    def lead(sequence: int, prefix: list[int], a: int, b: int) -> float:
        prompt = prompts[int(samples.prompt[sequence])]
        at = np.array([len(prompt) + len(prefix)])
        noise = gumbel(keys[sequence : sequence + 1], at, target.vocab)[0]
        return float(target.gap(tuple(prompt), prefix, a, b) / target.temperature + noise[a] - noise[b])

    return lead


def compare(a: Samples, b: Samples, plan: AuditPlan, target: Reference) -> dict[str, Any]:
    """Tokens compared, texts that part, and the leads of the winners where they do."""
    keys = keys_of(a, plan.prompts, RollspecConfig.load({"mode": "coupled"}, env={}), plan.seed, 0)
    found = same_tokens(a, b, leads(a, keys, plan.prompts, target), 0.0)
    return {
        "texts": found.sequences,
        "tokens": found.tokens,
        "parted": len(found.leads),
        "parted_per_token": len(found.leads) / max(1, found.tokens),
        "gap_median": float(np.median(found.leads)) if found.leads else None,
        "gap_max": max(found.leads, default=None),
        "gaps": sorted(found.leads),
    }


def run(
    model: str | None = None,
    dtype: str = "bfloat16",
    quick: bool = False,
    tokens: int = 20_000,
    out: Path | None = None,
) -> Path:
    """Print and save the comparison."""
    pin()
    began = provenance()
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            from examples.grpo_arithmetic.prepare import prepare

            model = str(prepare(folder, size="tiny" if quick else "demo").model)
        prompts = token_prompts(model, None, 8, 128)
        plan = AuditPlan(prompts, tokens=2_000 if quick else tokens, samples=16, max_tokens=128, dtype=dtype)
        found = []
        for overrides in ([*COUPLED, "proposal.drafters=[]"], SWITCHING):
            arm = Variant.with_rollspec("default", overrides)
            found.append(run_arm(model, plan, arm, greedy_rounds=0))
        result = compare(found[0].samples, found[1].samples, plan, Reference(model, plan.temperature))
    drafts = found[1].drafts
    print(
        f"{dtype}: {result['parted']} of {result['texts']} texts part, {result['parted_per_token']:.1e} per token; gap "
        f"median {result['gap_median']}, max {result['gap_max']}; {drafts.accepted} of {drafts.drafted} drafts accepted"
    )
    return save(
        f"identity-{dtype}" + ("-quick" if quick else ""),
        {
            "benchmark": "identity",
            "provenance": began,
            "dtype": dtype,
            "drafted": drafts.drafted,
            "accepted": drafts.accepted,
            **result,
        },
        out,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint; default: the demo's policy")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--quick", action="store_true", help="show that it runs")
    parser.add_argument("--tokens", type=int, default=20_000, help="sampled by each of the two engines, about")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(run(args.model, args.dtype, args.quick, args.tokens, args.out))
