"""A fresh head trained while a small policy moves: what each loss term, step count and buffer policy buys.

Offline and without an engine. The policy's checkpoints are those that the demo's GRPO job saves after each epoch
(`benchmarks/drift.py`); responses are sampled from each with transformers, hidden states are captured by the reference
(`tests/support/reference_samples.py`), verify steps are those that an engine with a half-trained head would have had.
Every arm sees the same data in the same order, a version's samples before its share of the training steps, as an online
drafter does; acceptance is that of greedy drafts of 3 tokens on the last policy's responses to prompts that were not
trained on. At temperature 1 it is bounded by the policy's own entropy.

    python -m benchmarks.drafter --quick                      # shows that it runs
    python -m benchmarks.drafter --seeds 2                    # the table, on the example's smaller policy
    python -m benchmarks.drafter --arms "default" "top-1"     # some arms; rows join those that are there
    python -m benchmarks.drafter --size demo --arms frozen    # frozen against online, on the demo's own policy
    python -m benchmarks.drafter --seeds 3 --arms replicas    # one head for two replicas, or a head each
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.drift import CACHE, Drift, drift
from examples.demo.job import JobSettings

K = 3
"""Tokens per draft of every measurement, whatever an arm was trained for."""

LEARNING = {"learning_rate": 2e-3, "batch_tokens": 512, "window_tokens": 384}


@dataclass(frozen=True)
class Arm:
    """How one head is trained.

    `terms`: fields of `DrafterTraining`. `buffer`: fields of `BufferConfig`. `errors`: with the verify steps of a
    half-trained head. `sees`: policy versions that it is trained on (None: all). `replicas`: heads, of which each sees
    what a replica of its own said: siblings are spread over them.
    """

    terms: dict[str, Any] = field(default_factory=dict)
    buffer: dict[str, Any] = field(default_factory=dict)
    errors: bool = False
    sees: tuple[int, ...] | None = None
    share: float = 1.0  # of the training steps
    replicas: int = 1


ARMS: dict[str, Arm] = {
    "default": Arm(),
    "top-1": Arm({"objective": "top1"}),
    "LK hybrid": Arm({"objective": "lk_hybrid"}),
    "no step decay": Arm({"step_decay": 1.0}),
    "1 TTT step": Arm({"ttt_steps": 1}),
    "2 TTT steps": Arm({"ttt_steps": 2}),
    "5 TTT steps": Arm({"ttt_steps": 5}),
    "rejected 0.5 (Aurora)": Arm({"rejected": 0.5}, errors=True),
    "reward weight 1 (ReSpec)": Arm({"reward_beta": 1.0}),
    "no tail quota": Arm(buffer={"tail_quota": 0.0}),
    "no recency": Arm(buffer={"half_life": 1e6}),
    "newest version only": Arm(buffer={"keep_versions": 1}),
    "windows of 64": Arm({"window_tokens": 64}),
}

FROZEN: dict[str, Arm] = {
    "online": Arm(),
    "frozen mid-job": Arm(sees=(0, 1), share=0.5),
    "frozen at the start, as many steps": Arm(sees=(0,)),
    "frozen at the start": Arm(sees=(0,), share=0.25),
}

REPLICAS: dict[str, Arm] = {
    "one head": Arm(),
    "two heads, as many steps each": Arm(replicas=2),
    "two heads, half the steps each": Arm(replicas=2, share=0.5),
}

SETS = {"arms": ARMS, "frozen": FROZEN, "replicas": REPLICAS}


@dataclass
class Data:
    """`train`: samples per policy version; `replayed`: the same with verify steps; `test`: of the last version."""

    model: str
    made_by: str
    train: list[list[Any]]
    replayed: list[list[Any]]
    test: list[Any]


def run(
    quick: bool = False,
    out: Path | None = None,
    seeds: int = 1,
    steps: int = 240,
    size: str = "tiny",
    names: list[str] | None = None,
) -> Path:
    """Collect (or find) the data, train the arms, and join their rows to the table."""
    if quick:
        seeds, steps = 1, 12
    key = names[0] if names and names[0] in SETS else "arms"
    arms = {n: a for n, a in SETS[key].items() if not names or n in names or key == names[0]}
    if quick and not names:
        arms = dict(list(arms.items())[::6])
    data = collect(size, quick)
    budget = budget_of(data.train)
    target = out or harness.RESULTS / "drafter.json"
    table = {} if quick or not target.is_file() else json.loads(target.read_text())
    setting = {
        "steps": steps, "seeds": seeds, "size": size, "policy": data.made_by, "learning": LEARNING, "k": K,
        "responses": [len(v) for v in data.train], "tokens": [sum(map(len, v)) for v in data.train],
        "test": len(data.test), "buffer_bytes": budget,
    }  # fmt: skip
    if table.get(f"{key}_setting") != setting:
        table[key] = []
    table[f"{key}_setting"] = setting
    if not table[key]:
        table[key] = [row_of("fresh head", [measure(untrained(data, s), data) for s in range(seeds)])]
    for name, arm in arms.items():
        table[key] = [r for r in table[key] if r["arm"] != name]
        heads = [(s, replica) for s in range(seeds) for replica in range(arm.replicas)]
        table[key].append(row_of(name, [measure(train(data, arm, *h, steps, budget), data) for h in heads]))
        harness.save("drafter", {**table, "quick": quick, "provenance": harness.provenance()}, target)
    return target


def row_of(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table; printed as well."""
    row = {
        "arm": name,
        "length": statistics.mean(f["length"] for f in found),
        "tail": statistics.mean(f["tail"] for f in found),
        "lengths": [f["length"] for f in found],
        "rates": found[0]["rates"],
        "seconds": [f["seconds"] for f in found],
    }
    print(
        f"{name:36} length {row['length']:.3f}  tail {row['tail']:.3f}  rates {[round(x, 3) for x in row['rates']]}  "
        f"{row['seconds'][0]:.0f} s",
        flush=True,
    )
    return row


def measure(made: tuple[Any, float], data: Data) -> dict[str, Any]:
    """Acceptance length on the held-out prompts, and on the longest quarter of them."""
    from drafter_online.trainer import DrafterTraining, Trainer

    trainer, seconds = made
    judge = Trainer(trainer.drafter, trainer.buffer, DrafterTraining(ttt_steps=K))
    whole = judge.evaluate(data.test)
    longest = sorted(data.test, key=lambda s: -s.response_length)[: max(1, len(data.test) // 4)]
    return {
        "length": whole.length, "rates": whole.rates, "tail": judge.evaluate(longest).length, "seconds": seconds
    }  # fmt: skip


def untrained(data: Data, seed: int) -> tuple[Any, float]:
    """A fresh head."""
    return fresh_trainer(data, Arm(), seed, 1 << 30), 0.0


def fresh_trainer(data: Data, arm: Arm, seed: int, budget: int) -> Any:
    """A trainer that has seen nothing."""
    from drafter_online import head as heads

    return trainer_of(heads.fresh(data.model, seed=seed), arm, seed, {"max_bytes": budget}, LEARNING)


def trainer_of(head: Any, arm: Arm, seed: int, buffer: Mapping[str, Any], training: Mapping[str, Any]) -> Any:
    """A trainer of `head` by an arm, which goes before `buffer` and `training`, fields of their settings."""
    from drafter_online.buffer import Buffer, BufferConfig
    from drafter_online.model import Eagle3
    from drafter_online.trainer import DrafterTraining, Trainer

    kept = Buffer(BufferConfig(**{**buffer, **arm.buffer}))
    return Trainer(Eagle3(head), kept, DrafterTraining(**{**training, "seed": seed, **arm.terms}))


def budget_of(train: Iterable[Iterable[Any]]) -> int:
    """Bytes of a buffer that some of these samples do not fit into, so that it matters what is kept."""
    return int(0.4 * sum(s.nbytes for version in train for s in version))


def train(data: Data, arm: Arm, seed: int, replica: int, steps: int, budget: int) -> tuple[Any, float]:
    """The head of one of the arm's replicas after the job, and the seconds that its training took."""
    trainer = fresh_trainer(data, arm, seed, budget)
    versions = range(len(data.train)) if arm.sees is None else arm.sees
    start = time.perf_counter()
    for version in versions:
        for sample in (data.replayed if arm.errors else data.train)[version][replica :: arm.replicas]:
            trainer.buffer.add(sample)
        for _ in range(round(arm.share * steps / len(versions))):
            trainer.micro_step()
    return trainer, time.perf_counter() - start


# ---- the data -------------------------------------------------------------------------------------------------------


def collect(size: str, quick: bool) -> Data:
    """Responses of every policy version; kept under ~/.cache/rollspec/drafter, so that arms can be run one by one."""
    from drafter_online import architecture

    prompts, copies, held, limit = (6, 1, 6, 48) if quick else (24, 2, 48, 320)
    found = _policies(size, quick)
    named = json.dumps([found.weights, found.made_by, prompts, copies, held, limit])
    folder = CACHE / "drafter" / f"{size}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
    if not (folder / "done").is_file():
        model, tokenizer = load(found.model)
        aux = architecture.aux_layers(model.config.num_hidden_layers)
        for version, weights in enumerate(found.weights):
            put_weights(model, weights)
            write(folder / f"train-{version}", _sample(model, tokenizer, "train", prompts, copies, limit, aux, version))
        write(folder / "test", _sample(model, tokenizer, "val", held, 1, limit, aux, len(found.weights) - 1))
        (folder / "done").touch()
    train = [read(folder / f"train-{v}") for v in range(len(found.weights))]
    data = Data(found.model, found.made_by, train, [], read(folder / "test"))
    data.replayed = _replayed(folder, data, found, 12 if quick else 60)
    return data


def _policies(size: str, quick: bool) -> Drift:
    from examples.grpo_arithmetic.prepare import prepare

    if not quick:
        return drift(JobSettings(size=size, epochs=3))
    model = prepare(CACHE / "grpo_arithmetic", size="tiny").model
    start = str(Path(model) / "model.safetensors")
    return Drift(model, "", [start, start], "the example's smaller policy, twice")


def load(path: str, dtype: str = "float32") -> tuple[Any, Any]:
    """A policy and its tokenizer, padded on the left."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.padding_side = "left"
    return model, tokenizer


def put_weights(model: Any, path: str) -> None:
    """Give the policy the weights of a version."""
    from safetensors.torch import load_file

    missing = model.load_state_dict(load_file(path), strict=False)
    if missing.unexpected_keys:
        raise RuntimeError(f"{path} holds {missing.unexpected_keys[0]}, which the policy does not have")


def _sample(
    model: Any, tokenizer: Any, split: str, prompts: int, copies: int, limit: int, aux: list[int], version: int
) -> list[Any]:
    """Responses at temperature 1 with their rewards, as samples."""
    import torch

    from examples.grpo_arithmetic.data import problems
    from examples.grpo_arithmetic.reward import compute_score
    from examples.grpo_arithmetic.tokenizer import prompt_text

    capture = harness.from_tests("support", "reference_samples").capture

    asked = [p for p in problems(split, prompts) for _ in range(copies)]
    torch.manual_seed(1000 * version + len(split))
    enc = tokenizer(
        [prompt_text(p.question) for p in asked], return_tensors="pt", padding=True, add_special_tokens=False
    )
    done = model.generate(
        **{k: enc[k] for k in ("input_ids", "attention_mask")}, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=limit,
    )  # fmt: skip
    out = []
    end = model.generation_config.eos_token_id
    for i, (p, ids, mask) in enumerate(zip(asked, done.tolist(), enc["attention_mask"].tolist(), strict=True)):
        first = mask.index(1)
        prompt, answer = ids[first : len(mask)], ids[len(mask) :]
        if end in answer:
            answer = answer[: answer.index(end) + 1]
        text = tokenizer.decode(answer, skip_special_tokens=True)
        reward = compute_score("", text, str(p.answer), {"question": p.question})
        out.append(
            capture(
                model,
                prompt + answer,
                len(prompt),
                aux,
                request_id=f"{split}{version}-{i}",
                prompt_key=p.question,
                target_version=version,
                reward=reward,
            )
        )
    return out


def _replayed(folder: Path, data: Data, found: Drift, steps: int) -> list[list[Any]]:
    """The samples with the verify steps of a head that was trained on the first version for a while."""
    replay = harness.from_tests("support", "reference_samples").replay

    if not (folder / "replayed").is_dir():
        half, _ = train(data, Arm(sees=(0,)), 99, 0, steps, 1 << 30)
        model, _ = load(found.model)
        for version, weights in enumerate(found.weights):
            put_weights(model, weights)
            done = [replay(model, half.drafter, s, K) for s in data.train[version]]
            write(folder / "replaying" / f"train-{version}", done)
        (folder / "replaying").rename(folder / "replayed")
    return [read(folder / "replayed" / f"train-{v}") for v in range(len(data.train))]


def write(folder: Path, samples: list[Any]) -> None:
    """Keep samples as files."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, s in enumerate(samples):
        (folder / f"{i:05d}.safetensors").write_bytes(s.to_bytes())


def read(folder: Path) -> list[Any]:
    """The samples that `write` kept, in their order."""
    from drafter_online.samples import Sample

    return [Sample.from_bytes(p.read_bytes()) for p in sorted(folder.glob("*.safetensors"))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--size", choices=["tiny", "demo"], default="tiny")
    parser.add_argument("--arms", nargs="*", help="`frozen`, `replicas`, or names of the table")
    args = parser.parse_args()
    run(args.quick, args.out, args.seeds, args.steps, args.size, args.arms)
