"""Train the small policy from scratch on worked examples, to a middling score.

Usage (reproduces ``checkpoint/``; about five minutes on two cores)::

    python -m examples.grpo_arithmetic.pretrain --out /tmp/checkpoint

Training stops while the policy still makes mistakes: reinforcement learning needs both right and wrong answers within
a group. The same seed and thread count give the same weights on the same machine; another CPU's kernels round
differently, so elsewhere expect the same score, not the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.grpo_arithmetic.reward import compute_score
from examples.grpo_arithmetic.task import sample_problem, worked_solution
from examples.grpo_arithmetic.tokenizer import EOS_ID, MAX_POSITIONS, PAD_ID, VOCAB_SIZE, build_tokenizer, prompt_text

DEFAULT_STEPS = 1800
DEFAULT_LR = 3e-3
TOKENS_PER_BATCH = 2048
EXAMPLE_EXPONENT = 1.3  # shorter chains than the task's: more short steps to learn arithmetic from
POOL = 512  # examples sorted together by length, so that batches carry little padding
IGNORE = -100


def small_config() -> Qwen3Config:
    """The shipped size, about 1.1 M parameters. Head size and head ratio are those of the grown policy."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )


def encode_example(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """Draw one worked example: its token ids (prompt, response, end of text) and the prompt's length."""
    problem = sample_problem(rng, exponent=EXAMPLE_EXPONENT)
    prompt = tokenizer.encode(prompt_text(problem.question))
    return [*prompt, *tokenizer.encode(worked_solution(problem, rng)), EOS_ID], len(prompt)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ``(input_ids[B, T], labels[B, T])`` forever, ``B * T <= TOKENS_PER_BATCH``, padded on the right.

    Only response tokens carry a label. Right padding needs no attention mask under causal attention.
    """
    rng = random.Random(seed)
    while True:
        pool = sorted((encode_example(tokenizer, rng) for _ in range(POOL)), key=lambda item: len(item[0]))
        groups: list[list[tuple[list[int], int]]] = [[]]
        for item in pool:
            if len(item[0]) * (len(groups[-1]) + 1) > TOKENS_PER_BATCH:
                groups.append([])
            groups[-1].append(item)
        rng.shuffle(groups)
        for group in groups:
            width = max(len(ids) for ids, _ in group)
            input_ids = torch.full((len(group), width), PAD_ID)  # [B, T]
            labels = torch.full((len(group), width), IGNORE)  # [B, T]
            for row, (ids, prompt_len) in enumerate(group):
                input_ids[row, : len(ids)] = torch.tensor(ids)
                labels[row, prompt_len : len(ids)] = torch.tensor(ids[prompt_len:])
            yield input_ids, labels


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 5 % of the steps, then cosine decay to a twentieth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


@torch.no_grad()
def sampled_reward(model: Qwen3ForCausalLM, prompts: int = 64, seed: int = 999, max_new_tokens: int = 512) -> float:
    """Mean reward of one sampled response (temperature 1) per fresh prompt."""
    tokenizer = build_tokenizer()
    rng = random.Random(seed)
    problems = [sample_problem(rng) for _ in range(prompts)]
    encoded = tokenizer(
        [prompt_text(p.question) for p in problems], return_tensors="pt", padding=True, padding_side="left"
    )
    output = model.eval().generate(  # [prompts, T]
        encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=max_new_tokens,
    )
    texts = tokenizer.batch_decode(output[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    model.train()
    scores = [
        compute_score("arithmetic", text, str(p.answer), {"question": p.question})
        for text, p in zip(texts, problems, strict=True)
    ]
    return sum(scores) / len(scores)


def train(
    steps: int = DEFAULT_STEPS,
    peak_lr: float = DEFAULT_LR,
    seed: int = 0,
    report_every: int = 50,
    stream: Iterator[tuple[torch.Tensor, torch.Tensor]] | None = None,
    model: Qwen3ForCausalLM | None = None,
) -> Qwen3ForCausalLM:
    """Train a small policy and return it in float32, with weights rounded to bfloat16 values.

    `stream`: batches `(input_ids[B, T], labels[B, T])`, those of this task where None. `model`: to go on with, in
    float32; a fresh one where None.
    """
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(small_config()) if model is None else model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.05)
    stream = batches(build_tokenizer(), seed) if stream is None else stream
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=False) as progress:
        task = progress.add_task("loss  -", total=steps)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, peak_lr)
            input_ids, labels = next(stream)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
            if report_every and (step + 1) % report_every == 0:
                progress.console.print(f"step {step + 1:5d}  loss {loss.item():.4f}")
    return model.to(torch.bfloat16).to(torch.float32)


def save(model: Qwen3ForCausalLM, out: Path, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
    """Write model (bfloat16) and tokenizer, this task's where None, to ``out``."""
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    model.to(torch.bfloat16).save_pretrained(out)
    (tokenizer or build_tokenizer()).save_pretrained(out)
    model.to(torch.float32)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Train the small arithmetic policy from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--lr", type=float, default=DEFAULT_LR)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    model = train(args.steps, args.lr, args.seed)
    seconds = time.perf_counter() - started
    save(model, args.out)
    reward = sampled_reward(model)
    print(json.dumps({"steps": args.steps, "seconds": round(seconds, 1), "reward_at_temperature_1": round(reward, 3)}))


if __name__ == "__main__":
    main()
