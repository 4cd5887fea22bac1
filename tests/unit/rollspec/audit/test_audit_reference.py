"""The reference reads several responses to a prompt in one pass, and says of each what it says of one alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from rollspec.audit import reference as module
from rollspec.audit.evidence import Evidence, samples_from
from rollspec.audit.reference import Reference

PROMPTS = (3, 1, 4), (1, 5)
RESPONSES = [[9, 2, 6], [5], [], [3, 5, 8, 9, 7], [9, 3], [2, 3, 8, 4], [6, 2]]
OF = [0, 1, 0, 0, 1, 0, 1]  # the prompt of each


def test_responses_of_a_pass_have_the_probabilities_of_each_alone(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(tiny_target, 0.7, "cpu")
    samples = samples_from(RESPONSES, OF)
    one_pass, passes = reference._logits, list[int]()

    def counted(prompt: tuple[int, ...], responses: list[list[int]]) -> object:
        passes.append(len(responses))
        return one_pass(prompt, responses)

    monkeypatch.setattr(reference, "_logits", counted)
    row = 4 * reference.vocab * (max(map(len, RESPONSES)) + 1)
    found = []
    for at_once, expected in ((1, [1] * 6), (2, [2, 1, 2, 1]), (100, [3, 3])):
        monkeypatch.setattr(module, "CHUNK_BYTES", at_once * row)
        passes.clear()
        evidence = Evidence(samples, reference.vocab, np.random.default_rng(0))
        done: list[tuple[int, int]] = []
        reference.fill(evidence, PROMPTS, lambda *each, done=done: done.append(each))
        found.append(evidence)
        assert evidence.seen.all() and sorted(passes) == sorted(expected)
        assert done[-1] == (samples.n_tokens,) * 2
    for evidence in found[1:]:
        for name in ("log_prob", "entropy", "flat"):
            np.testing.assert_allclose(getattr(evidence, name), getattr(found[0], name), rtol=0, atol=1e-5)
    alone = [reference.log_probs(PROMPTS[p], r)[range(len(r)), r] for p, r in zip(OF, RESPONSES, strict=True) if r]
    np.testing.assert_allclose(found[-1].log_prob, np.concatenate(alone), rtol=0, atol=1e-5)
    assert np.ptp(found[0].log_prob) > 0.01, "a model that tells tokens apart"
