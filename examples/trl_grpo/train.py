"""A GRPO job with TRL, vLLM in the same process, and rollspec by one line. Runs on two CPU cores and on a GPU.

    python -m examples.trl_grpo.train --out runs/trl                     # with rollspec
    ROLLSPEC__ENABLED=false python -m examples.trl_grpo.train --out runs/trl-off  # without
    rollspec report runs/trl --baseline runs/trl-off
    python -m examples.trl_grpo.train --out runs/trl-tools --tools       # a policy that calls tools

The policy and the prompts are those of `examples/grpo_arithmetic`; with `--tools`, those of `examples/agent_tools`, in
TRL's own tool loop.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

from examples.agent_tools import prepare as tools_policy
from examples.agent_tools.reward import compute_score as score_with_tools
from examples.agent_tools.task import stream
from examples.agent_tools.tools import calculator, python
from examples.cache import home
from examples.grpo_arithmetic.data import problems
from examples.grpo_arithmetic.prepare import prepare
from examples.grpo_arithmetic.reward import compute_score


def parser() -> argparse.ArgumentParser:
    """The options; everything else is in `build`."""
    p = argparse.ArgumentParser(description="A GRPO job with TRL, with and without rollspec.")
    p.add_argument("--out", type=Path, required=True, help="folder for checkpoints and measurements")
    p.add_argument("--rollspec", default="default", help="a preset, a YAML file, or `off`")
    p.add_argument("--model", help="checkpoint to train; default: the grown policy of the example")
    p.add_argument("--tools", action="store_true", help="the policy calls a calculator and a Python sandbox")
    p.add_argument("--prompts", type=int, default=32, help="training prompts")
    p.add_argument("--prompts-per-step", type=int, default=4)
    p.add_argument("--generations", type=int, default=8, help="responses per prompt")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--max-response", type=int, default=512, help="tokens")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-steps", type=int, default=0, help="write a checkpoint every so many steps; 0: none")
    p.add_argument("--report-to", nargs="*", default=[], help="wandb, tensorboard, ...")
    return p


def reward(completions: list[Any], question: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 for the right answer, partial credit for right leading steps."""
    return [
        compute_score("", c[0]["content"], str(a), {"question": q})
        for c, q, a in zip(completions, question, answer, strict=True)
    ]


def reward_with_tools(completions: list[Any], results: list[list[int]], answer: list[int], **_: Any) -> list[float]:
    """1 for the right answer, partial credit for what tools answered on the way."""
    return [
        score_with_tools("", "\n".join(map(_said, turns)), str(a), {"results": r})
        for turns, r, a in zip(completions, results, answer, strict=True)
    ]


def _said(message: dict[str, str]) -> str:
    text = message["content"]
    return f"<tool_response>\n{text}\n</tool_response>" if message["role"] == "tool" else text


def task(args: argparse.Namespace) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """The policy to train, rows to train it on, and what else the trainer is given."""
    if not args.tools:
        problem_rows = [
            {"prompt": [{"role": "user", "content": p.question}], "question": p.question, "answer": p.answer}
            for p in problems("train", args.prompts, args.seed)
        ]
        return args.model or prepare(home() / "grpo_arithmetic").model, problem_rows, {"reward_funcs": reward}
    rows = [
        {"prompt": [{"role": "user", "content": t.question}], "results": list(t.results), "answer": t.answer}
        for t in islice(stream(tools_policy.SEEDS["train"] + args.seed), args.prompts)
    ]
    model = args.model or tools_policy.prepare(home() / "agent_tools").model
    return model, rows, {"reward_funcs": reward_with_tools, "tools": [calculator, python]}


def build(args: argparse.Namespace) -> Any:
    """The trainer, with its engine started."""
    if args.rollspec != "off":
        import rollspec_trl

        rollspec_trl.enable(args.rollspec)  # the one line: before the trainer is made

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model, rows, given = task(args)
    tokenizer = AutoTokenizer.from_pretrained(model)
    if args.tools:
        from trl.chat_template_utils import qwen3_template

        tokenizer.response_template = qwen3_template  # the policy writes calls as Qwen3 does
    batch = args.prompts_per_step * args.generations
    gpu = torch.cuda.is_available()
    config = GRPOConfig(
        output_dir=str(args.out),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=args.max_response + 192,
        vllm_gpu_memory_utilization=0.3,
        use_cpu=not gpu,
        bf16=gpu,
        model_init_kwargs={"dtype": "float32"},
        num_generations=args.generations,
        per_device_train_batch_size=batch,
        max_completion_length=args.max_response,
        num_train_epochs=args.epochs,
        learning_rate=args.lr,
        temperature=1.0,
        logging_steps=1,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        report_to=args.report_to,
        seed=args.seed,
    )
    return GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **given,
    )


def main() -> None:
    """Train, and leave `trainer_state.json` for `rollspec report`."""
    args = parser().parse_args()
    trainer = build(args)
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main()
