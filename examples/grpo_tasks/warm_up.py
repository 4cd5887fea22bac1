"""Supervised warm-up: a model learns from solved tasks for some minutes, so that GRPO starts from the right form.

Usage, from the repository root::

    python -m examples.grpo_tasks.warm_up --model smollm2 --minutes 5 --out runs/warm
    rollspec demo --model runs/warm
    python -m examples.grpo_tasks.warm_up --model runs/warm --layers 4 --minutes 8 --out runs/small    # a draft model

Plain PyTorch on the CPU, float32 weights, fresh tasks without end. Loss is on the response's tokens alone, and only
they pass the LM head, a fifth of a small model's arithmetic and most of its memory. It ends by time, not by a number of
steps: a few minutes teach the form and leave mistakes, which reinforcement learning needs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from examples.grpo_tasks.data import SEEDS, messages
from examples.grpo_tasks.task import Task, stream
from examples.models import resolve
from rollspec.errors import RollspecError

ROWS = 8
PEAK_LR = 1e-4
RISE = 0.1  # share of the time in which the learning rate rises
IGNORE = -100
NOTE_SECONDS = 60.0  # between two lines of progress where no terminal shows a bar


def encode(tokenizer: Any, task: Task) -> tuple[list[int], int]:
    """Token ids of one solved task with its end, as the model's chat template has it, and the prompt's length."""
    prompt = tokenizer.apply_chat_template(messages(task), add_generation_prompt=True, tokenize=False)
    head = tokenizer.encode(prompt, add_special_tokens=False)
    tail = tokenizer.encode(task.response, add_special_tokens=False)  # apart: as the engine continues the prompt
    return [*head, *tail, tokenizer.eos_token_id], len(head)


def batches(tokenizer: Any, seed: int, rows: int = ROWS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`(input_ids[B, T], labels[B, T])` forever, padded on the right; only response tokens carry a label."""
    tasks, rng = stream(SEEDS["warm_up"] + seed), random.Random(seed)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    while True:
        # Of similar length, so that little is padding.
        pool = sorted((encode(tokenizer, task) for task in islice(tasks, 8 * rows)), key=lambda one: len(one[0]))
        for i in rng.sample(range(8), 8):
            group = pool[i * rows : (i + 1) * rows]
            width = max(len(ids) for ids, _ in group)
            input_ids = torch.full((rows, width), pad)  # [B, T]
            labels = torch.full((rows, width), IGNORE)  # [B, T]
            for r, (ids, prompt) in enumerate(group):
                input_ids[r, : len(ids)] = torch.tensor(ids)
                labels[r, prompt : len(ids)] = torch.tensor(ids[prompt:])
            yield input_ids, labels


def loss_of(model: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the labelled tokens; `[B, T]` both. Right padding needs no mask under causal attention."""
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False).last_hidden_state  # [B, T, D]
    wanted = labels[:, 1:]
    chosen = wanted != IGNORE
    logits = model.get_output_embeddings()(hidden[:, :-1][chosen])  # [N, V]
    return torch.nn.functional.cross_entropy(logits.float(), wanted[chosen])


def train(model: Any, tokenizer: Any, seconds: float, lr: float = PEAK_LR, seed: int = 0) -> dict[str, float]:
    """Train `model` in place for so long; steps, tokens that were learned, and the first and last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    losses: list[float] = []
    console = Console(stderr=True)
    learned, noted, began = 0, 0.0, time.monotonic()
    model.train()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("loss  -", total=seconds)
        for input_ids, labels in batches(tokenizer, seed):
            spent = time.monotonic() - began
            done = spent / seconds
            if done >= 1.0:
                break
            if losses and not console.is_terminal and spent - noted > NOTE_SECONDS:
                noted = spent
                print(f"{spent:.0f} of {seconds:.0f} s, {len(losses)} steps, loss {losses[-1]:.3f}", file=sys.stderr)
            for group in optimizer.param_groups:
                group["lr"] = lr * min(done / RISE, (1.0 - done) / (1.0 - RISE), 1.0) + lr / 100
            loss = loss_of(model, input_ids, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            learned += int((labels != IGNORE).sum())
            progress.update(bar, completed=time.monotonic() - began, description=f"loss {losses[-1]:.3f}")
    return {"steps": len(losses), "tokens": learned, "first_loss": losses[0], "last_loss": losses[-1]} if losses else {}


def main() -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Train a model on solved tasks for some minutes.")
    parser.add_argument("--model", default="smollm2", help="PATH, model of the hub, or smollm2")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained checkpoint")
    parser.add_argument(
        "--layers", type=int, help="keep the model's first so many layers only; it then learns to draft"
    )
    parser.add_argument("--lr", type=float, default=PEAK_LR)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        folder = resolve(args.model)
        if args.out.is_file() or (args.out.is_dir() and any(args.out.iterdir())):
            raise RollspecError(f"rollspec: --out {args.out} is there already; give a new or an empty folder.")
        if args.minutes <= 0:
            raise RollspecError(f"rollspec: --minutes {args.minutes:g} leaves no time; give a number above 0.")
        config = AutoConfig.from_pretrained(folder)
        if args.layers is not None and not 0 < args.layers <= config.num_hidden_layers:
            raise RollspecError(
                f"rollspec: --layers {args.layers} of a model of {config.num_hidden_layers}; give 1 to so many."
            )
    except RollspecError as e:
        print(e, file=sys.stderr)
        return 2
    if args.layers is not None:
        config.num_hidden_layers = args.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: args.layers]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    report = train(model, tokenizer, 60 * args.minutes, args.lr, args.seed)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(json.dumps({"model": str(args.out), **report}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
