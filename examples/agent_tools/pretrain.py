"""Train the small policy on worked dialogues.

Usage (reproduces ``checkpoint/``)::

    python -m examples.agent_tools.pretrain --out /tmp/first
    python -m examples.agent_tools.pretrain --out /tmp/checkpoint --start /tmp/first --steps 600 --seed 1

It starts from the policy of `examples.grpo_arithmetic`, which copies numbers already, with that example's loop. A
dialogue is the text that verl's tool loop makes of its turns; loss is on the policy's turns alone, never on what a tool
answers.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.agent_tools.task import Task, stream
from examples.agent_tools.tokenizer import build_tokenizer
from examples.grpo_arithmetic import pretrain
from examples.grpo_arithmetic.prepare import CHECKPOINT as FROM
from examples.grpo_arithmetic.tokenizer import PAD_ID

SEED = 3_000_003  # apart from those of the prompts (data.py)
STEPS, LR = 500, 2e-3
TOKENS_PER_BATCH = 4096
POOL = 256  # dialogues sorted together by length, so that batches carry little padding
TOOLS = [{"function": {"name": "calculator"}}, {"function": {"name": "python"}}]


def encode(tokenizer: PreTrainedTokenizerFast, task: Task) -> tuple[list[int], list[int]]:
    """Token ids of a whole worked dialogue, and its labels: those of the policy's turns, with their ends."""
    messages: list[dict[str, str]] = [{"role": "user", "content": task.question}]
    ids: list[int] = []
    labels: list[int] = []
    for i, text in enumerate(task.turns()):
        # Byte-level ids do not depend on what stands beside them, so a longer prompt goes on where the last turn ended.
        prompt = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, tokenize=False)
        context = tokenizer.encode(prompt)[len(ids) :]
        said = tokenizer.encode(text + tokenizer.eos_token)
        ids += context + said
        labels += [pretrain.IGNORE] * len(context) + said
        messages.append({"role": "assistant", "content": text})
        if i < len(task.results):
            messages.append({"role": "tool", "content": str(task.results[i])})
    return ids, labels


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`(input_ids[B, T], labels[B, T])` forever, ``B * T <= TOKENS_PER_BATCH``, padded on the right."""
    tasks, rng = stream(SEED + seed), random.Random(seed)
    while True:
        pool = sorted((encode(tokenizer, task) for task in islice(tasks, POOL)), key=lambda one: len(one[0]))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for one in pool:
            if len(one[0]) * (len(groups[-1]) + 1) > TOKENS_PER_BATCH:
                groups.append([])
            groups[-1].append(one)
        rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            yield (
                torch.tensor([ids + [PAD_ID] * (width - len(ids)) for ids, _ in group]),
                torch.tensor([own + [pretrain.IGNORE] * (width - len(own)) for _, own in group]),
            )


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Train the small policy that calls tools.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--start", type=Path, default=FROM, help="checkpoint to go on with")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    began = time.perf_counter()
    start = Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    model = pretrain.train(args.steps, args.lr, args.seed, stream=batches(tokenizer, args.seed), model=start)
    pretrain.save(model, args.out, tokenizer)
    print(json.dumps({"steps": args.steps, "seconds": round(time.perf_counter() - began, 1)}))


if __name__ == "__main__":
    main()
