"""The device's lookup against the definition, in Triton's interpreter; skipped where there is no Triton."""

from __future__ import annotations

import os

import numpy as np
import pytest

from benchmarks.gpu.lookup_reference import reference
from rollspec.proposal.lookup import DEPTH, NOTHING, SEPARATOR

torch = pytest.importorskip("torch")
pytest.importorskip("triton.language", exc_type=ImportError)
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET is not set", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("seed", range(3))
def test_the_device_drafts_what_the_definition_does(seed: int) -> None:
    from benchmarks.gpu.lookup_triton import lookup

    rng = np.random.default_rng(seed)
    batch, k, symbols = 4, 7, (3, 8, 30)[seed]
    corpus = rng.integers(0, symbols, 360).astype(np.int32)
    corpus[rng.integers(0, len(corpus), 8)] = SEPARATOR
    starts = np.array([0, 160, 70, 330])
    ends = np.array([160, 360, 70, 341])  # two blocks, to the end, empty, short
    contexts = rng.integers(0, symbols, (batch, DEPTH)).astype(np.int32)
    for b, at in enumerate((60, 300, 30, 336)):
        contexts[b] = corpus[at - DEPTH : at]
    contexts[contexts == SEPARATOR] = 1
    contexts[3, :13] = NOTHING
    rooms = np.array([k, k, k, 3], np.int32)
    wanted = reference(corpus, starts, ends, contexts, rooms, 2.0, 0.1)
    tensors = [torch.from_numpy(a).to(DEVICE) for a in (corpus, starts, ends, contexts, rooms)]
    found = lookup(*tensors, 2.0, 0.1, k, 200, block=128)
    assert found.counts.tolist() == wanted.counts.tolist() and sum(wanted.counts) > 0
    assert found.matches.tolist() == wanted.matches.tolist()
    for b, n in enumerate(wanted.counts):
        assert found.tokens[b, :n].tolist() == wanted.tokens[b, :n].tolist()
        assert found.tokens[b, n:].tolist() == [-1] * (k - n)
        assert found.probs[b, :n].tolist() == pytest.approx(wanted.probs[b, :n].tolist(), rel=1e-5)
    assert found.scores.tolist() == pytest.approx(wanted.scores.tolist(), rel=1e-5)
