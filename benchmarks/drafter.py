"""A fresh head trained on a small trained policy's responses: what each loss term, step count and policy buys.

Offline and without an engine: responses are sampled with transformers, hidden states are captured by the reference
(`drafter_online.reference`), verify steps are those an engine would have had. Acceptance is that of greedy drafts of
`ttt_steps` tokens on prompts that were not trained on; at temperature 1 it is bounded by the policy's own entropy.

    python -m benchmarks.drafter --quick
    python -m benchmarks.drafter --seeds 3
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import harness

ARMS: dict[str, dict[str, Any]] = {
    "forward KL (default)": {},
    "top-1": {"objective": "top1"},
    "LK hybrid": {"objective": "lk_hybrid"},
    "total variation": {"objective": "tv"},
    "no step decay": {"step_decay": 1.0},
    "1 TTT step": {"ttt_steps": 1},
    "rejected 0.5 (Aurora)": {"rejected": 0.5},
    "induced 0.5 (Draft-OPD)": {"induced": 0.5},
    "rejected + induced": {"rejected": 0.5, "induced": 0.5},
    "windows of 64": {"window_tokens": 64},
}
K = 3


def responses(
    model: Any, tokenizer: Any, split: str, prompts: int, limit: int, seed: int
) -> list[tuple[list[int], int, str]]:
    """Sampled sequences at temperature 1: token ids, prompt length, question."""
    import torch

    from examples.grpo_arithmetic.data import problems
    from examples.grpo_arithmetic.tokenizer import prompt_text

    questions = [p.question for p in problems(split, prompts)]
    tokenizer.padding_side = "left"
    out = []
    torch.manual_seed(seed)
    for at in range(0, prompts, 64):
        chunk = questions[at : at + 64]
        enc = tokenizer([prompt_text(q) for q in chunk], return_tensors="pt", padding=True, add_special_tokens=False)
        done = model.generate(
            input_ids=enc["input_ids"], attention_mask=enc["attention_mask"], do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, max_new_tokens=limit,
        )  # fmt: skip
        for q, ids, mask in zip(chunk, done.tolist(), enc["attention_mask"].tolist(), strict=True):
            first = mask.index(1)
            prompt, answer = ids[first : len(mask)], ids[len(mask) :]
            if model.generation_config.eos_token_id in answer:
                answer = answer[: answer.index(model.generation_config.eos_token_id) + 1]
            out.append((prompt + answer, len(prompt), q))
    return out


def run(quick: bool = False, out: Path | None = None, seeds: int = 1, steps: int = 600) -> Path:
    """Collect, train every arm on the same data, and write the table."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from drafter_online import head as heads
    from drafter_online.buffer import Buffer
    from drafter_online.model import Eagle3
    from drafter_online.reference import capture, replay
    from drafter_online.trainer import DrafterTraining, Trainer
    from examples.grpo_arithmetic.prepare import prepare

    train_prompts, test_prompts, steps, limit = (24, 8, 30, 48) if quick else (256, 64, steps, 224)
    arms = dict(list(ARMS.items())[:: 6 if quick else 1])
    path = prepare(Path(tempfile.gettempdir()) / "rollspec-bench-policy", size="tiny").model
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    aux = heads.aux_layers(model.config.num_hidden_layers)

    def samples(split: str, prompts: int, seed: int) -> list[Any]:
        got = responses(model, tokenizer, split, prompts, limit, seed)
        return [
            capture(model, ids, n, aux, request_id=f"{split}{i}", prompt_key=q) for i, (ids, n, q) in enumerate(got)
        ]

    train, test = samples("train", train_prompts, 1), samples("val", test_prompts, 2)
    settings = {"learning_rate": 2e-3, "batch_tokens": 1024, "window_tokens": 512}

    def trainer(data: list[Any], seed: int, **terms: Any) -> Any:
        buffer = Buffer()
        for s in data:
            buffer.add(s)
        fresh = heads.fresh(path, aux=aux, seed=seed)
        return Trainer(Eagle3(fresh), buffer, DrafterTraining(**{**settings, "seed": seed, **terms}))

    # Errors to learn from are those of a half-trained head, as they are in a running job.
    half = trainer(train, 0)
    for _ in range(steps // 4):
        half.micro_step()
    errors = [replay(model, half.drafter, s, K) for s in train]
    rows = []
    for name, terms in arms.items():
        lengths, rates, seconds = [], [], []
        for seed in range(seeds):
            t = trainer(errors, seed, **terms)
            start = time.perf_counter()
            for _ in range(steps):
                t.micro_step()
            seconds.append(time.perf_counter() - start)
            # All arms are measured at the same draft length, whatever they were trained for.
            judge = Trainer(t.drafter, t.buffer, DrafterTraining(ttt_steps=K))
            got = judge.evaluate(test)
            lengths.append(got.length)
            rates.append(got.rates)
        row = {"arm": name, "length": statistics.mean(lengths), "lengths": lengths, "rates": rates, "seconds": seconds}
        rows.append(row)
        print(
            f"{name:26} length {row['length']:.3f}  rates {[round(x, 3) for x in rates[0]]}  {seconds[0]:.1f} s",
            flush=True,
        )
    fresh = trainer(train, 0).evaluate(test)
    print(f"{'fresh head':26} length {fresh.length:.3f}  rates {[round(x, 3) for x in fresh.rates]}")
    return harness.save(
        "drafter",
        {
            "what": "acceptance length of greedy drafts of 3 tokens, held-out prompts, temperature 1",
            "quick": quick, "steps": steps, "train": len(train), "test": len(test), "seeds": seeds,
            "tokens": sum(map(len, train)), "fresh": {"length": fresh.length, "rates": fresh.rates}, "arms": rows,
            **harness.provenance(),
        },
        out,
    )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    args = parser.parse_args()
    run(args.quick, args.out, args.seeds, args.steps)
