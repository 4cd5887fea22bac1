"""Does a real policy move away from its draft head? A GRPO job, heads that stopped learning, and one that did not.

    python -m examples.grpo_tasks.warm_up --model smollm2 --minutes 14 --out runs/warm
    drafter-online make-head --model runs/warm --minutes 45 --prompts TASKS --out runs/head
    python -m benchmarks.moving --model runs/warm --head runs/head
    python -m benchmarks.moving --model runs/warm --head runs/head --ablate    # what it learns from
    python -m benchmarks.moving ... --towards runs/later --prompts tasks/train.parquet    # without the job

With `--towards` policies are on the straight line to a later checkpoint. Else the job runs once (`benchmarks/drift.py`,
64 updates in 45 minutes of two cores), and every 16 updates are a policy. Each policy answers the job's prompts, to
train on, and prompts that are in no training; heads are trained between two policies as an online drafter is, and every
policy is drafted for by a head that has only seen the ones before it:

    kept training             trains on every policy's responses
    frozen mid-job            the same, until half of the updates
    frozen at the start       as it came
    the start's text only     trains on the responses of the first policy alone: training without freshness

Acceptance is that of greedy drafts on what a policy said at temperature 1. Beside it is how far the policy has moved:
KL(policy || start) per token of its own responses, over the whole vocabulary, and its entropy.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.drafter import ARMS as SAID
from benchmarks.drafter import Arm as Terms
from benchmarks.drafter import budget_of, load, put_weights, read, trainer_of, write
from benchmarks.drift import CACHE, Drift, drift, first_prompts
from benchmarks.engines import Arm, Engine, Work
from benchmarks.peer_load import drifting
from examples.demo.job import REAL, JobSettings
from rollspec.machine import native_dtype
from rollspec.telemetry.runs import load_run
from rollspec.telemetry.summary import REWARD

KEPT, MIDWAY, START, OLD_TEXT = "kept training", "frozen mid-job", "frozen at the start", "the start's text only"
LIMIT = 256  # tokens of a response
COPIES = 2  # responses to a prompt that are trained on, per policy
AT_ONCE = 64  # sequences
FACTS = "facts.json"  # of a version, written last
DRAFTED = 4  # tokens of a draft whose verify steps are in what is trained on

ARMS = {
    **{name: arm for name, arm in SAID.items() if name not in ("1 TTT step", "5 TTT steps")},
    "half the steps": Terms(share=0.5),
    "twice the steps": Terms(share=2.0),
    "learning rate 1e-4": Terms({"learning_rate": 1e-4}),
    "learning rate 3e-4": Terms({"learning_rate": 3e-4}),
    "learning rate 3e-3": Terms({"learning_rate": 3e-3}),
}
"""What `--ablate` compares: the terms of `benchmarks/drafter.py`, for a head that begins trained."""


@dataclass
class Version:
    """A policy of the job: what it said on the job's prompts and on others, and how far it is from the first."""

    weights: str
    train: list[Any]
    test: list[Any]
    facts: dict[str, float]


def run(
    model: Path,
    head: Path,
    epochs: int = 8,
    every: int = 2,
    steps: int = 8,
    seeds: int = 3,
    rate: float | None = None,
    out: Path | None = None,
    towards: Path | None = None,
    prompts: Path | None = None,
) -> Path:
    """The job or what it saved, then the heads; prints a row per policy, and writes JSON after every seed.

    Args:
        model: the starting policy.
        head: its draft head, of `drafter-online make-head`.
        epochs: of the job; the policy is saved after each.
        every: so many epochs a policy is looked at.
        steps: micro-steps of training per policy.
        seeds: of the training's samples.
        rate: learning rate; the default's when None.
        towards: a later checkpoint, in the place of the job.
        prompts: of that, Parquet as `examples.grpo_tasks.prepare` writes them, with val.parquet beside.
    """
    found, per_epoch = policies(model, epochs, every, towards, prompts)
    versions = collect(found, head)
    target = out or harness.RESULTS / "moving.json"
    lengths: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        for name, row in heads_over(found.model, head, versions, steps, seed, rate).items():
            lengths.setdefault(name, []).append(row)
            print(f"seed {seed}  {name:24} {[round(x, 2) for x in row]}", flush=True)
        result = {
            "benchmark": "moving",
            "provenance": harness.provenance(),
            "policy": found.made_by,
            "updates_per_version": every * per_epoch,
            "micro_steps_per_version": steps,
            "learning_rate": rate,
            "rewards": None if towards else rewards(found, per_epoch),
            "versions": [v.facts for v in versions],
            "lengths": lengths,
            "last_quarter": last_quarter(lengths),
        }
        harness.save("moving", result, target)
    return target


def ablate(
    model: Path,
    head: Path,
    names: Sequence[str] | None = None,
    epochs: int = 8,
    every: int = 2,
    steps: int = 8,
    seeds: int = 3,
    out: Path | None = None,
    towards: Path | None = None,
    prompts: Path | None = None,
) -> Path:
    """What the head learns from: one that is trained further by each of `ARMS`; rows join those that are there."""
    found, _ = policies(model, epochs, every, towards, prompts)
    versions = collect(found, head)
    room = {"max_bytes": budget_of(v.train for v in versions)}
    target = out or harness.RESULTS / "moving-terms.json"
    rows = json.loads(target.read_text())["arms"] if target.is_file() else {}
    for name in names or ARMS:
        arm = ARMS[name]
        trainers = (_trainer(found.model, head, arm, seed, room) for seed in range(seeds))
        lengths = [follow(t, versions, round(arm.share * steps), errors=arm.errors) for t in trainers]
        rows[name] = {"lengths": lengths, "after_the_first": [statistics.mean(row[1:]) for row in lengths]}
        print(f"{name:28} {[round(x, 3) for x in rows[name]['after_the_first']]}", flush=True)
        facts = {
            "policy": found.made_by,
            "versions": [v.facts for v in versions],
            "micro_steps_per_version": steps,
            "buffer_bytes": room["max_bytes"],
            "arms": rows,
        }
        harness.save("moving-terms", {"benchmark": "moving-terms", "provenance": harness.provenance(), **facts}, target)
    return target


def last_quarter(lengths: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Acceptance length of the head that kept training over each of the others, in the job's last quarter."""
    count = max(1, len(lengths[KEPT][0]) // 4)
    tails = {name: [statistics.mean(row[-count:]) for row in rows] for name, rows in lengths.items()}
    return {
        name: {"length": statistics.mean(tail), "kept_over_it": [a / b for a, b in zip(tails[KEPT], tail, strict=True)]}
        for name, tail in tails.items()
    }


def policies(
    model: Path, epochs: int, every: int, towards: Path | None = None, prompts: Path | None = None
) -> tuple[Drift, int]:
    """The start, and what the job saved after each `every` epochs; and its updates per epoch, none without a job."""
    harness.pin(threads=2)
    if towards is not None:
        return dataclasses.replace(drifting(model, towards, epochs // every + 1), prompts=str(prompts)), 0
    settings = JobSettings(model=str(model), **REAL, epochs=epochs + 1)
    found = drift(settings)
    return dataclasses.replace(found, weights=found.weights[::every]), settings.steps_per_epoch


def rewards(found: Drift, steps: int) -> list[float]:
    """The job's mean reward in each of its epochs."""
    known = load_run(Path(found.weights[-1]).parent / "job").known(*REWARD)
    return [statistics.mean(known[at : at + steps]) for at in range(0, len(known), steps)]


def heads_over(
    model: str, folder: Path, versions: list[Version], steps: int, seed: int, rate: float | None = None
) -> dict[str, list[float]]:
    """Acceptance lengths of every head on every policy's responses to prompts that are in no training."""
    half, terms = len(versions) // 2, {} if rate is None else {"learning_rate": rate}
    head, old, frozen, kept = (_trainer(model, folder, Terms(terms), seed) for _ in range(4))
    for sample in versions[0].train:
        old.buffer.add(sample)
    begun = follow(kept, versions[:half], steps)
    frozen.drafter.head.load_state_dict(kept.drafter.head.state_dict())
    return {
        KEPT: begun + follow(kept, versions[half:], steps),
        MIDWAY: begun + follow(frozen, versions[half:], 0),
        START: follow(head, versions, 0),
        OLD_TEXT: follow(old, versions, steps, reads=False),
    }


def follow(trainer: Any, versions: list[Version], steps: int, reads: bool = True, errors: bool = False) -> list[float]:
    """Acceptance length on each policy in turn, before so many micro-steps of training after each.

    Args:
        reads: what each policy says gets into the buffer.
        errors: with the verify steps, and so with the tokens that were rejected.
    """
    from drafter_online.samples import Verify

    lengths = []
    for version in versions:
        trainer.drafter.refresh(_parts(version.weights))
        lengths.append(trainer.evaluate(version.test).length)
        for sample in version.train if reads and steps else ():
            trainer.buffer.add(sample if errors else dataclasses.replace(sample, verify=Verify.gather(())))
        for _ in range(steps):
            trainer.micro_step()
    return lengths


def _trainer(model: str, folder: Path, arm: Terms, seed: int, buffer: Mapping[str, Any] | None = None) -> Any:
    from drafter_online import head as heads

    return trainer_of(heads.load(folder, model), arm, seed, buffer or {}, {})


def _parts(weights: str) -> dict[str, Any]:
    """What a head follows of its target."""
    from safetensors import safe_open

    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    with safe_open(weights, "pt") as file:
        there = set(file.keys())
        parts = {part: file.get_tensor(name).float() for part, name in names.items() if name in there}
    return {"lm_head": parts["embed"], **parts}  # tied where it has none


# ---- the data -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A prompt of the job, and what its reward needs."""

    ids: list[int]
    answer: str
    info: dict[str, Any]


def collect(found: Drift, head: Path) -> list[Version]:
    """What every policy says, with the verify steps of drafts by `head`; kept under ~/.cache/rollspec/moving."""
    named = json.dumps([found.weights, found.made_by, str(head), LIMIT, COPIES])
    kept = CACHE / "moving" / hashlib.sha256(named.encode()).hexdigest()[:12]
    folders = [kept / f"version-{i}" for i in range(len(found.weights))]
    if missing := [i for i, folder in enumerate(folders) if not (folder / FACTS).is_file()]:
        _answer(found, head, folders, missing)
    return [
        Version(weights, read(folder / "train"), read(folder / "test"), json.loads((folder / FACTS).read_text()))
        for weights, folder in zip(found.weights, folders, strict=True)
    ]


def _answer(found: Drift, head: Path, folders: Sequence[Path], missing: Sequence[int]) -> None:
    """Write what the policies `missing` say."""
    from drafter_online.architecture import aux_layers

    # The engine first: vLLM asks for nearly all memory to be free.
    with contextlib.closing(Engine(Arm("none"), found.model, REAL["max_prompt_length"] + LIMIT)) as engine:
        train = _asked(found, Path(found.prompts))
        seen = [p.ids for p in train]
        test = [p for p in _asked(found, Path(found.prompts).with_name("val.parquet")) if p.ids not in seen]
        every = [*(p for p in train for _ in range(COPIES)), *test]
        (model, tokenizer), (first, _) = (load(found.model, native_dtype()) for _ in range(2))
        drafter = _trainer(found.model, head, Terms(), 0).drafter
        aux = aux_layers(model.config.num_hidden_layers)
        replay = harness.from_tests("support", "reference_samples").replay
        for i in missing:
            put_weights(model, found.weights[i])
            work = Work([p.ids for p in every], None, AT_ONCE, i, found.weights[i], texts=True, most=LIMIT)
            said = samples(model, tokenizer, every, engine.run(work)["texts"], i, aux)
            ours, others = said[: -len(test)], said[-len(test) :]
            write(folders[i] / "train", [replay(model, drafter, s, DRAFTED) for s in ours])
            write(folders[i] / "test", others)
            facts = {"version": i, **distance(model, first, others)}
            (folders[i] / FACTS).write_text(json.dumps(facts))
            print(facts, flush=True)


def _asked(found: Drift, file: Path) -> list[Asked]:
    import pandas as pd

    ids = first_prompts(dataclasses.replace(found, prompts=str(file)), None)
    rows = pd.read_parquet(file).itertuples()
    return [Asked(i, r.reward_model["ground_truth"], dict(r.extra_info)) for i, r in zip(ids, rows, strict=True)]


def samples(model: Any, tokenizer: Any, asked: list[Asked], said: list[list[int]], version: int, aux: Any) -> list[Any]:
    """What was answered to each prompt, with its reward and the model's hidden states."""
    from examples.grpo_tasks.data import DATA_SOURCE
    from examples.grpo_tasks.reward import compute_score

    capture = harness.from_tests("support", "reference_samples").capture
    out = []
    for at, (p, ids) in enumerate(zip(asked, said, strict=True)):
        text = tokenizer.decode(ids, skip_special_tokens=True)
        found = capture(
            model, p.ids + ids, len(p.ids), aux, request_id=f"{version}-{at}",
            prompt_key=" ".join(map(str, p.ids)), target_version=version,
            reward=float(compute_score(DATA_SOURCE, text, p.answer, p.info)),
        )  # fmt: skip
        out.append(found)
    return out


def distance(model: Any, first: Any, said: list[Any]) -> dict[str, float]:
    """Per token of what `model` said: KL from `first`, entropy, and the probability of the likeliest token."""
    import torch

    kl = entropy = likeliest = tokens = 0.0
    with torch.no_grad():
        for s in said:
            rows = slice(len(s) - s.response_length - 1, -1)
            now, then = (
                m(input_ids=s.input_ids[None], use_cache=False).logits[0, rows].float().log_softmax(-1)
                for m in (model, first)
            )
            p = now.exp()
            kl += float((p * (now - then)).sum())
            entropy -= float((p * now).sum())
            likeliest += float(p.amax(-1).sum())
            tokens += s.response_length
    return {
        "kl_from_start": kl / tokens, "entropy": entropy / tokens, "likeliest": likeliest / tokens,
        "response_length": tokens / len(said),
    }  # fmt: skip


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the starting policy")
    parser.add_argument("--head", type=Path, required=True, help="its draft head")
    for name, default in {"epochs": 8, "every": 2, "steps": 8, "seeds": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, help="learning rate of the heads' training")
    parser.add_argument("--towards", type=Path, help="a later checkpoint: no job, policies on the line to it")
    parser.add_argument("--prompts", type=Path, help="of that: Parquet of examples.grpo_tasks.prepare")
    parser.add_argument(
        "--ablate",
        nargs="*",
        metavar="ARM",
        choices=tuple(ARMS),
        help="what it learns from instead: all, or some of ARMS",
    )
    parser.add_argument("--out", type=Path)
    args = vars(parser.parse_args())
    names = args.pop("ablate")
    if (args["towards"] is None) != (args["prompts"] is None):
        parser.error("--towards and --prompts go together: a job has prompts of its own")
    if names is None:
        print(run(**args))
    elif args.pop("rate") is not None:
        parser.error("--rate: with --ablate the rate is an arm's")
    else:
        print(ablate(names=names, **args))


if __name__ == "__main__":
    main()
