"""How often rounding parts coupled texts: the same prompts and noise, without drafts and with ones of random length.

    python -m benchmarks.identity --dtype bfloat16 --model PATH

In exact arithmetic the texts are equal. In a given dtype, batches of other shapes round differently, and a token may
change where the two best perturbed logits are closer than that. Each pair is compared up to its first difference, and
there both tokens are scored by the float32 reference and the noise: `gap` is the winner's lead.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import pin, provenance, save
from rollspec import RollspecConfig
from rollspec.sampling.audit import Samples
from rollspec.sampling.audit_engine import Arm, Plan, run_arm
from rollspec.sampling.audit_noise import keys_of
from rollspec.sampling.audit_prompts import token_prompts
from rollspec.sampling.audit_reference import Reference
from rollspec.sampling.noise import gumbel

COUPLED = ["mode=coupled"]
SWITCHING = [*COUPLED, "tuning.policy=random", "tuning.guard.enabled=false"]


def compare(a: Samples, b: Samples, plan: Plan, target: Reference) -> dict[str, Any]:
    """Tokens compared, texts that part, and the leads of the winners where they do."""
    keys = keys_of(a, plan.prompts, RollspecConfig.load({"mode": "coupled"}, env={}), plan.seed, 0)
    compared, gaps = 0, []
    for s, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        n = min(len(x), len(y))
        differ = np.flatnonzero(x[:n] != y[:n])
        if not len(differ):
            compared += n
            continue
        at = int(differ[0])
        compared += at + 1
        prompt = plan.prompts[int(a.prompt[s])]
        p, q = int(x[at]), int(y[at])
        noise = gumbel(keys[s : s + 1], np.array([len(prompt) + at]), target.vocab)[0]
        lead = target.gap(prompt, x[:at].tolist(), p, q) / plan.temperature + noise[p] - noise[q]
        gaps.append(abs(float(lead)))
    return {
        "texts": len(a.tokens),
        "tokens": compared,
        "parted": len(gaps),
        "parted_per_token": len(gaps) / max(1, compared),
        "gap_median": float(np.median(gaps)) if gaps else None,
        "gap_max": max(gaps, default=None),
    }


def run(model: str | None = None, dtype: str = "bfloat16", quick: bool = False, out: Path | None = None) -> Path:
    """Print and save the comparison."""
    pin()
    began = provenance()
    with tempfile.TemporaryDirectory() as folder:
        if model is None:
            from examples.grpo_arithmetic.prepare import prepare

            model = str(prepare(folder, size="tiny" if quick else "demo").model)
        prompts = token_prompts(model, None, 8, 128)
        plan = Plan(prompts, tokens=2_000 if quick else 60_000, samples=16, max_tokens=128, dtype=dtype)
        found = []
        for overrides in ([*COUPLED, "proposal.drafters=[]"], SWITCHING):
            arm = Arm.with_rollspec("default", overrides)
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
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(run(args.model, args.dtype, args.quick, args.out))
