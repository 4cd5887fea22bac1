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
from rollspec.sampling.audit_builds import same_tokens
from rollspec.sampling.audit_engine import Arm, Plan, run_arm
from rollspec.sampling.audit_noise import keys_of, leads
from rollspec.sampling.audit_prompts import token_prompts
from rollspec.sampling.audit_reference import Reference

COUPLED = ["mode=coupled"]
SWITCHING = [*COUPLED, "tuning.policy=random", "tuning.guard.enabled=false"]


def compare(a: Samples, b: Samples, plan: Plan, target: Reference) -> dict[str, Any]:
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
        plan = Plan(prompts, tokens=2_000 if quick else tokens, samples=16, max_tokens=128, dtype=dtype)
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
    parser.add_argument("--tokens", type=int, default=20_000, help="sampled by each of the two engines, about")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(run(args.model, args.dtype, args.quick, args.tokens, args.out))
