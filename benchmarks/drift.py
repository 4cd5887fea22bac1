"""A drifting policy: checkpoints that the demo's own GRPO job saves at the end of each epoch.

    python -m benchmarks.drift --json

Runs the job once (a few minutes on two cores) and keeps the weights under ~/.cache/rollspec/drift.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from examples.cache import home
from examples.demo.job import Assets, JobSettings, build_job, prepare_assets
from examples.demo.runner import run_job

CACHE = home()
MAX_LEN = 704
PROMPTS, SAMPLES = 8, 8
INSTRUCTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "A train goes 60 km in 45 minutes. How fast is it in km per hour? Show each step.",
    "List ten things to pack for a week in the mountains.",
    "Rewrite this sentence in a friendly tone: The report is late and has to be sent today.",
    "Tell a short story about a lighthouse keeper and a lost boat.",
    "Compare cats and dogs as pets in a table with three rows.",
    "Summarise in one paragraph how plants make sugar from light.",
)
"""Prompts of a model that comes with none."""


@dataclass(frozen=True)
class Drift:
    """`model`: folder of the starting policy; `weights`: one safetensors file per epoch, the starting policy first."""

    model: str
    prompts: str
    weights: list[str]
    made_by: str


def drift(settings: JobSettings | None = None, cache: Path = CACHE) -> Drift:
    """Checkpoints of the demo job, one per epoch; run now unless they are there already."""
    settings = settings or JobSettings()
    assets = prepare_assets(settings, cache / settings.example)
    # The identity is the baseline's: what is saved does not depend on how the rollouts were made.
    probe = build_job(settings, assets, cache / "drift" / "probe", speculate=False)
    folder = cache / "drift" / probe.settings_hash
    start = str(Path(assets.model) / "model.safetensors")
    expected = [folder / f"epoch_{e}.safetensors" for e in range(1, settings.epochs)]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second benchmark waits for the first one's job
        if not all(p.is_file() for p in expected):
            _train(settings, assets, folder / "job", expected)
    made_by = f"verl GRPO job of the demo, saved after each epoch ({probe.settings_hash})"
    return Drift(assets.model, assets.train, [start, *map(str, expected)], made_by)


def first_prompts(policy: Drift, count: int | None) -> list[list[int]]:
    """Token ids of the job's first prompts, or of all; of `INSTRUCTIONS` where the policy is of no job."""
    import pandas as pd
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(policy.model)
    if policy.prompts:
        chats = [list(row) for row in pd.read_parquet(policy.prompts).prompt[:count]]
    else:
        chats = [[{"role": "user", "content": text}] for text in INSTRUCTIONS[:count]]
    if not tokenizer.chat_template:  # a base model
        return [tokenizer.encode(chat[-1]["content"]) for chat in chats]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def _train(settings: JobSettings, assets: Assets, work: Path, expected: list[Path]) -> None:
    """Run the job until the last checkpoint is saved, and keep the weights only."""
    work.mkdir(parents=True, exist_ok=True)
    job = build_job(
        dataclasses.replace(settings, steps=settings.steps_per_epoch * len(expected)), assets, work, speculate=True
    )
    more = (
        f"trainer.save_freq={settings.steps_per_epoch}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        f"trainer.default_local_dir={work / 'checkpoints'}",
    )
    run_job(dataclasses.replace(job, command=(*job.command, *more)), timeout=2 * 3600 if settings.model else 3600)
    for epoch, path in enumerate(expected, 1):
        saved = work / "checkpoints" / f"global_step_{epoch * settings.steps_per_epoch}" / "actor" / "huggingface"
        shutil.copyfile(saved / "model.safetensors", path)
    shutil.rmtree(work / "checkpoints")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the paths as JSON")
    args = parser.parse_args()
    found = drift()
    print(json.dumps(dataclasses.asdict(found)) if args.json else "\n".join(found.weights))


if __name__ == "__main__":
    main()
