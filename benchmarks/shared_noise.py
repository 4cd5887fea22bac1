"""Drafting with the target's noise against greedy drafting: acceptance at temperature 1, by how far the drafter is off.

    python -m benchmarks.shared_noise

The drafters are the example's policy with all weights moved by noise of a scale times their own spread: 0 is the policy
itself. Every proposed token is verified, three per step; the texts are the same in both, which is checked.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import pin, provenance, save

SCALES = (0.0, 0.02, 0.05, 0.1, 0.2)
CONFIG = {
    "preset": "default",
    "mode": "coupled",
    "proposal.drafters": ["draft_model"],
    "proposal.learned.k_max": 3,
    "proposal.learned.canary_drafts": 0,
    "proposal.budget.policy": "fixed",
    "tuning.policy": "static",
    "tuning.guard.enabled": False,
}


def moved(model: str | Path, folder: Path, scale: float) -> Path:
    """The same model with all weights moved by noise of `scale` times their own spread."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(scale * p.std().nan_to_num(0.0) * torch.randn_like(p))
    other.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def measure(model: str, drafters: dict[float, Path], drafts: str, copies: int) -> tuple[dict[str, Any], Any]:
    """Acceptance by scale, and the texts."""
    from vllm import LLM, SamplingParams

    from rollspec.audit.prompts import token_prompts

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=32,
        disable_log_stats=False,
        additional_config={
            "rollspec": CONFIG | {"proposal.learned.model": str(drafters[max(drafters)]), "coupled.drafts": drafts}
        },
    )

    def call(op: str, **payload: Any) -> dict[str, Any]:
        return next(r for r in llm.collective_rpc("rollspec", args=(op, payload)) if r)

    prompts = token_prompts(model, None, 8, 128)
    params = SamplingParams(temperature=1.0, max_tokens=100, detokenize=False, ignore_eos=True)
    out, texts = {}, []
    for version, (scale, folder) in enumerate(drafters.items(), 1):
        answer = call("swap", dir=str(folder), version=version, wait=True)
        assert "error" not in answer, answer
        call("set_version", version=0)
        call("set_version", version=1)  # the same noise for every drafter
        call("stats")
        requests = [{"prompt_token_ids": list(p)} for p in prompts for _ in range(copies)]
        texts.append([list(o.outputs[0].token_ids) for o in llm.generate(requests, params, use_tqdm=False)])
        stats = call("stats")
        assert not stats["faults"], stats["faults"]
        out[str(scale)] = {
            "drafted": stats["drafted"],
            "accepted": stats["accepted"],
            "rate": stats["accepted"] / stats["drafted"],
            "tokens_per_step": stats["emitted"] / stats["requests"],
        }
    llm.llm_engine.engine_core.shutdown()
    return out, texts


def run(quick: bool = False, out: Path | None = None) -> Path:
    """Print and save the comparison."""
    from examples.grpo_arithmetic.prepare import prepare

    pin()
    began = provenance()
    with tempfile.TemporaryDirectory() as name:
        model = str(prepare(name, size="tiny").model)
        drafters = {s: moved(model, Path(name) / f"drafter-{s}", s) for s in SCALES}
        found = {m: measure(model, drafters, m, 2 if quick else 8) for m in ("noise", "greedy")}
    (noise, texts), (greedy, others) = found["noise"], found["greedy"]
    same = sum(a == b for x, y in zip(texts, others, strict=True) for a, b in zip(x, y, strict=True))
    table = Table(title="accepted drafts under coupled sampling, temperature 1")
    for column in ("drafter off by", "greedy", "same noise", "tokens per step: greedy", "same noise"):
        table.add_column(column, justify="right")
    for scale in noise:
        g, n = greedy[scale], noise[scale]
        table.add_row(
            scale,
            f"{g['rate']:.1%}",
            f"{n['rate']:.1%}",
            f"{g['tokens_per_step']:.2f}",
            f"{n['tokens_per_step']:.2f}",
        )
    Console(stderr=True).print(table)
    return save(
        "shared_noise" + ("-quick" if quick else ""),
        {
            "benchmark": "shared_noise",
            "provenance": began,
            "noise": noise,
            "greedy": greedy,
            "texts": sum(map(len, texts)),
            "texts_identical": same,
        },
        out,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="show that it runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(run(args.quick, args.out))
