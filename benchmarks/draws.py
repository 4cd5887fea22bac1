"""How drafts should be drawn at a job's temperature: what a head's drafts achieve by three rules, without an engine.

    python -m benchmarks.draws HEAD [HEAD ...]

On the held-out prompts of `make-head` folders, from the target's and the head's whole distributions at every position:

    greedy         the head's likeliest token, accepted with probability p(x)
    noise          the token that the target's own Gumbel noise makes likeliest, accepted where both agree
    probabilistic  a token drawn from the head, verified by rejection sampling: 1 - TV(p, q), the most that any rule can
    bound          the target's likeliest token: what the best greedy drafter could
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import provenance, save
from benchmarks.recipes import STEPS, Recorded
from rollspec.errors import RollspecError

RULES = ("greedy", "noise", "probabilistic", "bound")
NOISES = 8
"""Draws of noise at each position, whose mean is the chance that both agree."""


def rates(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The chance that a draft is accepted by each rule, [rules, n]; p, q: log-probabilities [n, vocabulary]."""
    most, likely = p.max(-1), q.argmax(-1, keepdim=True)
    agree = torch.zeros(len(p))
    for _ in range(NOISES):
        gumbel = -torch.empty_like(p).exponential_().log()
        agree += ((p + gumbel).argmax(-1) == (q + gumbel).argmax(-1)) / NOISES
    overlap = torch.minimum(p.exp(), q.exp()).sum(-1)
    return torch.stack([p.gather(-1, likely)[:, 0].exp(), agree, overlap, most.values.exp()])


def measure(folder: Path) -> dict[str, Any]:
    """Acceptance of drafts of `STEPS` tokens by each rule, and the target's entropy, on a head's held-out prompts."""
    from drafter_online.model import load
    from drafter_online.objective import draft_starts
    from drafter_online.packing import pack

    given = Recorded.read(folder)
    drafter = load(folder, given.record["target"])
    reached, drafts, entropy = torch.zeros(len(RULES), STEPS), 0, 0.0
    with torch.no_grad():
        for sample in given.held:
            batch = pack([sample], steps=STEPS).to("cpu", torch.float32)
            starts = draft_starts(batch, STEPS).nonzero()[:, 0]
            if not len(starts):
                continue
            heat = batch.temperature[0, starts, None].clamp_min(1e-3)
            alive = torch.ones(len(RULES), len(starts))
            for i, states in enumerate(drafter.states(batch, STEPS)):
                p = drafter.targets(batch.verifier_last_hidden_states[0, starts + i]).float() / heat
                p, q = p.log_softmax(-1), (drafter.score(states[0, starts]).float() / heat).log_softmax(-1)
                alive *= rates(p, q)
                reached[:, i] += alive.sum(-1)
                entropy -= float((p.exp() * p).sum()) / STEPS
            drafts += len(starts)
    return {
        "record": {name: given.record.get(name) for name in ("target", "temperature", "vocabulary_coverage")},
        "drafts": drafts,
        "entropy_nats": round(entropy / drafts, 3),
        "rates": {rule: [round(float(x), 4) for x in row / drafts] for rule, row in zip(RULES, reached, strict=True)},
        "acceptance_length": {
            rule: round(1.0 + float(row.sum()) / drafts, 4) for rule, row in zip(RULES, reached, strict=True)
        },
    }


def run(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Measure each head, print a table, and write JSON."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    began = provenance()
    found = {folder.name: measure(folder) for folder in folders}
    table = Table("head", "target's entropy", *RULES, title=f"acceptance length of drafts of {STEPS} tokens")
    for name, one in found.items():
        lengths = (f"{one['acceptance_length'][rule]:.2f}" for rule in RULES)
        table.add_row(name, f"{one['entropy_nats']:.2f} nats", *lengths)
    Console(stderr=True).print(table)
    return save("draws", {"benchmark": "draws", "provenance": began, "tokens": STEPS, "heads": found}, out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="+", type=Path, help="folders that `drafter-online make-head` wrote")
    parser.add_argument("--out", type=Path, help="JSON file; default benchmarks/results/draws.json")
    parser.add_argument("--json", action="store_true", help="print the JSON on stdout")
    given = parser.parse_args()
    try:
        path = run(given.heads, given.out)
    except (RollspecError, OSError) as e:
        raise SystemExit(f"rollspec: {e}") from None
    print(json.dumps(json.loads(path.read_text()), indent=1) if given.json else path)


if __name__ == "__main__":
    main()
