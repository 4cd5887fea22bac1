"""Samples with rejected drafts and rewards, for `benchmarks.recipes`: a head drafts while its target generates.

    python -m benchmarks.feedback HEAD --tokens 60000 --rewards train.parquet --out DIR
    python -m benchmarks.recipes DIR --start HEAD --arms 'default;rejected;reward'

HEAD is a folder of `drafter-online make-head`. DIR gets the same layout: samples in `buffer/`, and the record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from drafter_online.buffer import Buffer


def run(head: Path, tokens: int, out: Path, prompts: Path, drafts: int = 4, seed: int = 1, batch: int = 16) -> int:
    """Generate and record; how many samples `out` then has."""
    from drafter_online import generate
    from drafter_online import prompts as files
    from drafter_online.buffer import Buffer, BufferConfig
    from drafter_online.make_head import RECORD

    console = Console(stderr=True)
    record = json.loads((head / RECORD).read_text())
    most = record["max_tokens"]
    rows, _ = files.tokenized(files.read(prompts, seed), record["target"], 1024)
    job = generate.GenerationJob(
        record["target"], str(head), rows, record["temperature"], most, max(map(len, rows)) + most, seed, batch,
        seconds=3600.0, tokens=tokens, drafts=drafts,
    )  # fmt: skip
    (out / "engine").mkdir(parents=True, exist_ok=True)
    generate.run(job, out / "engine", lambda p: None)
    buffer = Buffer(BufferConfig(max_bytes=1 << 62))
    console.print(generate.collect(out / "engine", buffer, out / "buffer"))
    console.print(f"{buffer.reward(rewards(buffer, prompts, record['target']))} rewards joined")
    buffer.save(out / "buffer")
    (out / RECORD).write_text(json.dumps({**record, "head": str(head), "drafts": drafts}, indent=2))
    return len(buffer)


def rewards(buffer: Buffer, prompts: Path, model: str) -> dict[str, float]:
    """What the tasks' own reward gives each response, by request."""
    import pandas
    from transformers import AutoTokenizer

    from examples.grpo_tasks.reward import compute_score

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    score: Callable[..., Any] = compute_score
    known = {}
    for row in pandas.read_parquet(prompts).to_dict("records"):
        ids = tokenizer.apply_chat_template(
            [dict(m) for m in row["prompt"]], add_generation_prompt=True, return_dict=False
        )
        known[tuple(ids)] = row
    found = {}
    for sample in buffer:
        ids, mask = sample.input_ids, sample.loss_mask
        row = known.get(tuple(ids[~mask].tolist()))
        if row is not None:
            text = tokenizer.decode(ids[mask], skip_special_tokens=True)
            got = score(row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])
            found[sample.request_id] = float(got["score"] if isinstance(got, dict) else got)
    return found


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description="Record what a target generates while a head drafts, with rewards.")
    parser.add_argument("head", type=Path, help="folder of `drafter-online make-head`")
    parser.add_argument("--rewards", type=Path, required=True, help="prompts of `examples.grpo_tasks`, Parquet")
    parser.add_argument("--tokens", type=int, default=60_000, help="response tokens to generate")
    parser.add_argument("--drafts", type=int, default=4, help="tokens drafted per step")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(run(args.head, args.tokens, args.out, args.rewards, args.drafts))


if __name__ == "__main__":
    main()
