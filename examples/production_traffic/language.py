"""A small language model of the corpus, trained from scratch and grown, and prompts that it was not trained on.

    python -m examples.production_traffic.language --out ~/.cache/rollspec/production_traffic

Some three minutes on two cores the first time and nothing after that: the result lies in a folder named by a hash of
code, sizes and Python version, written beside its final place and renamed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from examples.cache import built_once
from examples.production_traffic.corpus import DOMAINS, Domain, documents

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent
VOCABULARY = 1024
END, END_ID = "<|endoftext|>", 0
WINDOW = 256  # tokens of a training example
BATCH = 8
PEAK_RATE = 3e-3
PROMPTS = 512  # of each domain
PROMPT_TOKENS = 48


@dataclass(frozen=True)
class Language:
    """Where the model is, token ids of the prompts by domain, and the type that it is served in."""

    model: str
    prompts: dict[str, list[list[int]]]
    dtype: str = "float32"


def prepare(cache: str | Path, steps: int = 600, grown: bool = True, seed: int = 0) -> Language:
    """Build once per set of inputs; later calls read what is there.

    Args:
        cache: folder for the results, one sub-folder per set of inputs.
        steps: optimiser steps of training, 2,048 tokens each.
        grown: whether to grow the model to where decoding costs what verification saves (tests do without).
        seed: of weights, order and prompts.
    """
    digest = hashlib.sha256(json.dumps([steps, grown, seed, platform.python_version()]).encode())
    for path in (HERE / "corpus.py", HERE / "language.py", HERE.parent / "grpo_arithmetic" / "grow.py"):
        digest.update(path.read_bytes())
    final = built_once(cache, digest.hexdigest()[:12], "prompts.json", lambda work: _build(work, steps, grown, seed))
    prompts = json.loads((final / "prompts.json").read_text(encoding="utf-8"))
    return Language(str(final / "model"), prompts)


def _build(folder: Path, steps: int, grown: bool, seed: int) -> None:
    from examples.grpo_arithmetic.grow import Size, grow

    tokenizer = build_tokenizer([text for d in DOMAINS for text in documents(d, held_out=False)])
    model = train(tokenizer, steps, seed)
    if grown:
        model = grow(model, Size(), seed=seed)
    model.generation_config.eos_token_id = END_ID
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    prompts = {d: _prompts(tokenizer, d, seed) for d in DOMAINS}
    (folder / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `VOCABULARY` tokens, learned from `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=END)


def train(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Qwen3ForCausalLM:
    """A small Qwen3 model, 1.1 M parameters, trained on both domains by turns; float32."""
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from examples.grpo_arithmetic.pretrain import learning_rate

    torch.manual_seed(seed)
    # Head size and ratio are those that `grow` keeps.
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, rope_theta=10000.0,
        tie_word_embeddings=False, pad_token_id=END_ID, eos_token_id=END_ID, bos_token_id=None,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    streams = {d: _stream(tokenizer, d) for d in DOMAINS}
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training the language model", total=steps)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, PEAK_RATE)
            stream = streams[DOMAINS[step % len(DOMAINS)]]
            at = [rng.randrange(len(stream) - WINDOW) for _ in range(BATCH)]
            rows = torch.stack([stream[i : i + WINDOW] for i in at])  # [BATCH, WINDOW]
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            progress.update(task, advance=1, description=f"training the language model, loss {loss.item():.2f}")
            if (step + 1) % 100 == 0 and not progress.console.is_terminal:
                progress.console.print(
                    f"training the language model: step {step + 1} of {steps}, loss {loss.item():.2f}"
                )
    return model


def _stream(tokenizer: PreTrainedTokenizerFast, domain: Domain) -> torch.Tensor:
    """All training documents of a domain as one line of tokens."""
    import torch

    ids: list[int] = []
    for text in documents(domain, held_out=False):
        ids += [*tokenizer.encode(text), END_ID]
    return torch.tensor(ids)


def _prompts(tokenizer: PreTrainedTokenizerFast, domain: Domain, seed: int) -> list[list[int]]:
    """Pieces from the middle of documents that were not trained on."""
    rng = random.Random(f"{domain} {seed}")
    every = [ids for text in documents(domain, held_out=True) if len(ids := tokenizer.encode(text)) > PROMPT_TOKENS]
    out = []
    for _ in range(PROMPTS):
        ids = rng.choice(every)
        at = rng.randrange(len(ids) - PROMPT_TOKENS)
        out.append(ids[at : at + PROMPT_TOKENS])
    return out


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Train the language model of the production traffic example.")
    parser.add_argument("--out", type=Path, required=True, help="cache folder")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(prepare(args.out, args.steps, seed=args.seed).model)


if __name__ == "__main__":
    main()
