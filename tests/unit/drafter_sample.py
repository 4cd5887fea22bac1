"""A sample of a response with verify steps of two drafters, made of random numbers."""

from __future__ import annotations

import torch

from drafter_online.samples import Sample, Verify, VerifyStep


def make_sample(t: int = 12, h: int = 4, prompt: int = 4, seed: int = 0, **fields: object) -> Sample:
    g = torch.Generator().manual_seed(seed)
    steps = [
        VerifyStep(
            5,
            "head",
            [1, 2, 3],
            1,
            torch.tensor([[1, 4], [5, 2], [0, 3]]),
            torch.randn(3, 2),
            torch.ones(3),
            draft_version=2,
        ),
        VerifyStep(7, "suffix", [9, 9], 2, torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2)),
        VerifyStep(8, "head", [], 0, torch.ones(0, 2), torch.ones(0, 2), torch.ones(0)),
    ]
    values: dict[str, object] = {
        "input_ids": torch.randint(0, 10, (t,), generator=g),
        "hidden_states": torch.randn(t, 3 * h, generator=g),
        "verifier_last_hidden_states": torch.randn(t, h, generator=g),
        "loss_mask": torch.arange(t) >= prompt,
        "position_ids": torch.arange(t),
        "prompt_key": "p",
        "request_id": f"r{seed}",
        "target_version": 3,
        "response_length": t - prompt,
        "verify": Verify.gather(steps),
    }
    return Sample(**{**values, **fields})  # type: ignore[arg-type]


def same(a: Sample, b: Sample) -> bool:
    (x, r), (y, s) = a.parts(), b.parts()
    return r == s and x.keys() == y.keys() and all(torch.equal(x[k], y[k]) and x[k].dtype == y[k].dtype for k in x)
