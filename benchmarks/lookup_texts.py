"""Responses to look drafts up in: epochs of a GRPO run of the demo's policy, and siblings that share spans.

    epochs = grpo_epochs(cache)        # [epoch][response]: (prompt, response); minutes, then read from the cache
    epochs = shared_spans(groups=8)    # the same shape, synthetic, at once

What a lookup is worth depends on how a policy repeats itself while it is trained, so the first are sampled from one
that is: the arithmetic example's shipped checkpoint, with a policy-gradient step on group advantages per batch.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

Epoch = list[tuple[list[int], list[int]]]

PROMPTS, PER_STEP, SIBLINGS, LONGEST = 32, 8, 8, 512


def grpo_epochs(cache: Path, epochs: int = 4, seed: int = 0, lr: float = 1e-4) -> list[Epoch]:
    """Every epoch answers the same `PROMPTS` prompts `SIBLINGS` times, siblings beside each other; the policy is
    updated after every `PER_STEP` prompts.
    """
    path = cache / f"lookup-{epochs}-{seed}-{lr:g}.npz"
    if path.is_file():
        with np.load(path) as f:
            return _split(f["tokens"], f["lengths"], epochs)
    import torch
    from transformers import Qwen3ForCausalLM

    from examples.grpo_arithmetic.data import problems
    from examples.grpo_arithmetic.prepare import CHECKPOINT
    from examples.grpo_arithmetic.reward import compute_score
    from examples.grpo_arithmetic.tokenizer import EOS_ID, PAD_ID, build_tokenizer, prompt_text

    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model: Any = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    tasks = problems("train", PROMPTS, seed)
    rows: list[list[int]] = []
    for step in track(range(epochs * PROMPTS // PER_STEP), "a GRPO run to record"):
        at = step * PER_STEP % PROMPTS
        chosen = [task for task in tasks[at : at + PER_STEP] for _ in range(SIBLINGS)]
        texts = [prompt_text(task.question) for task in chosen]
        given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        width = given["input_ids"].shape[1]
        with torch.no_grad():
            output = model.eval().generate(  # [PER_STEP * SIBLINGS, T]
                **{k: given[k] for k in ("input_ids", "attention_mask")},
                do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=LONGEST,
            )  # fmt: skip
        said = output[:, width:]
        rewards = torch.tensor([
            compute_score("", tokenizer.decode(s, skip_special_tokens=True), str(t.answer), {"question": t.question})
            for s, t in zip(said, chosen, strict=True)
        ]).view(-1, SIBLINGS)  # fmt: skip
        advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        mask = (said != PAD_ID).float()  # [B, T'] the end of text counts
        for i, text in enumerate(texts):
            length = int(mask[i].sum())
            rows.append(tokenizer(text)["input_ids"])
            rows.append(said[i, :length].tolist())
        full = torch.cat([given["attention_mask"], mask.long()], 1)
        model.train()
        optimizer.zero_grad()
        for part in torch.arange(len(chosen)).split(16):
            logits = model(input_ids=output[part], attention_mask=full[part]).logits[:, width - 1 : -1]
            picked = logits.log_softmax(-1).gather(-1, said[part].unsqueeze(-1)).squeeze(-1)
            (-(advantage[part] * picked * mask[part]).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert EOS_ID != PAD_ID
    tokens, lengths = np.concatenate([np.array(r, np.int32) for r in rows]), np.array([len(r) for r in rows])
    cache.mkdir(parents=True, exist_ok=True)
    np.savez(path, tokens=tokens, lengths=lengths)
    return _split(tokens, lengths, epochs)


def _split(tokens: Any, lengths: Any, epochs: int) -> list[Epoch]:
    rows = [r.tolist() for r in np.split(tokens, np.cumsum(lengths)[:-1])]
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    per = len(pairs) // epochs
    return [pairs[i * per : (i + 1) * per] for i in range(epochs)]


def shared_spans(
    groups: int = 8, siblings: int = 8, epochs: int = 4, length: int = 512, vocab: int = 4000, seed: int = 0
) -> list[Epoch]:
    """Siblings that string together spans of their group's stock, with a few tokens changed: what many samples of one
    problem look like. A quarter of a group's stock is replaced with each epoch, as a policy drifts.
    """
    rng = random.Random(seed)

    def span() -> list[int]:
        return rng.choices(range(3, vocab), k=rng.randint(4, 40))

    def response(stock: list[list[int]]) -> list[int]:
        out: list[int] = []
        at = 0
        while len(out) < length:
            at = (at + 1) % len(stock) if rng.random() < 0.6 else rng.randrange(len(stock))
            out += [t if rng.random() > 0.03 else rng.randrange(3, vocab) for t in stock[at]]
        return out[: rng.randint(length // 4, length)]

    prompts = [rng.choices(range(3, vocab), k=40) for _ in range(groups)]
    stocks = [[span() for _ in range(24)] for _ in range(groups)]
    out: list[Epoch] = []
    for _ in range(epochs):
        out.append([(p, response(s)) for p, s in zip(prompts, stocks, strict=True) for _ in range(siblings)])
        for stock in stocks:
            for i in rng.sample(range(len(stock)), len(stock) // 4):
                stock[i] = span()
    return out
