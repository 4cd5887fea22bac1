"""GRPO jobs with TRL, each in a process of its own; OUT/NAME.json has what is checked.

python trl_job.py OUT MODEL NAME...          train: two epochs with a checkpoint, then a weight sync against HF
                                             resume: one step more, from that checkpoint
                                             head, head_resume: the same with a draft head and its trainer, no sync
                                             tools: two epochs of the policy that calls tools, with a checkpoint

All are forked from a process that has imported what they need, which takes as long as either of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import young_head

from examples.trl_grpo.train import build, parser

HEAD = {"preset": "long_tail", "drafter.mode": "dedicated", **young_head.SETTINGS, **young_head.VERIFIED}
STARTING = 240.0
"""Seconds for the head's trainer to start and to have a version, on a slow machine."""


def worst_gap(model: Any, prompts: list[list[int]], texts: list[list[int]]) -> float:
    """How far below HF's best logit a token lies that the engine chose greedily, at most, given what it said before."""
    import torch

    model.eval()
    worst = 0.0
    with torch.no_grad():
        for p, said in zip(prompts, texts, strict=True):
            logits = model(torch.tensor([p + said])).logits[0, len(p) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(said)[:, None])[:, 0]
            worst = max(worst, float((logits.max(-1).values - chosen).max()))
    return worst


def change_and_sync(trainer: Any) -> dict[str, Any]:
    """A large change of the policy through TRL's own sync: greedy vLLM, with drafts, against HF's logits."""
    import torch

    generation = trainer.vllm_generation
    tokenizer = trainer.processing_class
    prompts = [
        tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        for r in list(trainer.train_dataset)[:4]
    ]
    generation.temperature, generation.max_completion_length = 0.0, 48
    generation.generation_kwargs = {"ignore_eos": True}
    before = generation.generate(prompts, None, 1)[1]
    torch.manual_seed(7)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(torch.randn_like(p) * p.std().clamp_min(0.02))
    generation.sync_weights()
    # The second time with the first one's tokens as drafts.
    after = [generation.generate(prompts, None, 1)[1] for _ in range(2)]
    accepted = generation.llm.collective_rpc("rollspec", args=("stats", {}))[0]["accepted"]
    gaps = [worst_gap(trainer.model, prompts, texts) for texts in (before, *after)]
    return {"gaps": gaps, "same": after[0] == after[1], "accepted": accepted}


def info_of(llm: Any) -> dict[str, Any]:
    info: dict[str, Any] = llm.collective_rpc("rollspec", args=("info", {}))[0]
    return info


def wait(llm: Any, done: Callable[[dict[str, Any]], bool], meanwhile: Callable[[], Any] = lambda: None) -> None:
    """Until the draft head is that far."""
    end = time.monotonic() + STARTING
    while not done(info_of(llm)["drafter"]) and time.monotonic() < end:
        time.sleep(0.5)
        meanwhile()


def waiting(llm: Any) -> Any:
    """After the second step, until the engine has a version that the head's trainer made of its rollouts."""
    from transformers import TrainerCallback

    class Waiting(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                wait(llm, lambda head: bool(head["training"]["fetched"]))

    return Waiting()


def main(out: str, model: str, what: str) -> None:
    epochs = "3" if what.endswith("resume") else "2"
    # Short ones, so that a step takes a second or two on two cores.
    args = parser().parse_args(
        ["--out", out, "--model", model, "--prompts", "8", "--prompts-per-step", "4", "--generations", "4",
         "--max-response", "96", "--epochs", epochs, "--save-steps", "4", "--rollspec", "suffix_only"]
    )  # fmt: skip
    if what == "tools":
        args.tools, args.max_response = True, 512
    if what.startswith("head"):
        args.rollspec = HEAD | (young_head.RESUMED if what == "head_resume" else {})
    trainer = build(args)
    llm = trainer.vllm_generation.llm
    result: dict[str, Any] = {"start": info_of(llm)}
    if what.endswith("resume"):
        trainer.args.max_steps = 5
        trainer.train(resume_from_checkpoint=True)
    else:
        if what == "head":
            trainer.add_callback(waiting(llm))
        trainer.train()
    trainer.save_state()
    if what == "head_resume":
        # Its trainer takes the checkpoint's state over when it has started, and a version is swapped in when a step
        # begins.
        wait(
            llm,
            lambda head: head["version"] > young_head.BY_HAND,
            lambda: trainer.vllm_generation.generate([[5, 6, 7]], None, 1),
        )
    result["info"] = info_of(llm)
    result["log"] = trainer.state.log_history
    if what == "train":
        result["sync"] = change_and_sync(trainer)
    (Path(out) / f"{what}.json").write_text(json.dumps(result))


def apart(what: str) -> None:
    """`main` in a process of its own."""
    print(f"=== {what}", flush=True)
    if (pid := os.fork()) == 0:
        try:
            main(*sys.argv[1:3], what)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)  # vLLM in this process leaves threads that would hold it
    if status := os.waitpid(pid, 0)[1]:
        sys.exit(f"{what} ended with status {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    from trl import GRPOTrainer  # noqa: F401
    from vllm import LLM  # noqa: F401

    for each in sys.argv[3:]:
        apart(each)
