"""Drafts drawn with the target's noise: its tokens where the laws are equal, never less than theory promises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from rollspec.engine.vllm.shared_noise import SharedNoise  # noqa: E402
from rollspec.sampling.coupled import sample  # noqa: E402


def sampling(temperature: list[float], **more: Any) -> Any:
    t = torch.tensor(temperature)
    return SimpleNamespace(
        temperature=t,
        all_greedy=bool((t < 1e-5).all()),
        all_random=bool((t >= 1e-5).all()),
        **{"top_k": None, "top_p": None, **more},
    )


def shared(n: int, on: bool = True) -> tuple[SharedNoise, list[str]]:
    keys = {str(i): 1000 + 7 * i for i in range(n)}
    coupled = SimpleNamespace(on=on, streams=SimpleNamespace(keys=keys), sample=sample)
    return SharedNoise(coupled), list(keys)  # type: ignore[arg-type]


def keys_of(names: list[str]) -> np.ndarray:
    return np.array([1000 + 7 * int(i) for i in names], dtype=np.uint64)


def test_equal_laws_draft_what_the_target_says_pass_after_pass() -> None:
    noise, names = shared(5)
    lengths = [3, 9, 9, 40, 100]
    torch.manual_seed(0)
    noise.begin(names, lengths, sampling([1.0, 0.7, 1.0, 1.3, 0.5]))
    for p in range(3):
        logits = 3.0 * torch.randn(5, 300)
        tokens, probs = noise.draw(logits)  # type: ignore[misc]
        scaled = logits / torch.tensor([1.0, 0.7, 1.0, 1.3, 0.5])[:, None]
        assert tokens.tolist() == sample(scaled, keys_of(names), np.array(lengths) + p).tolist()
        own = scaled.log_softmax(-1).gather(-1, tokens[:, None])[:, 0].exp()
        torch.testing.assert_close(probs, own)


def test_other_laws_agree_at_least_as_often_as_promised() -> None:
    n, vocab = 4000, 50
    noise, names = shared(n)
    rng = np.random.default_rng(0)
    p = torch.from_numpy(2.0 * rng.normal(size=vocab)).float()
    q = p + 0.6 * torch.from_numpy(rng.normal(size=vocab)).float()
    positions = [17] * n
    noise.begin(names, positions, sampling([1.0] * n))
    drafts, _ = noise.draw(q.expand(n, -1))  # type: ignore[misc]
    said = sample(p.expand(n, -1), keys_of(names), np.array(positions))
    agree = float((drafts == said).float().mean())
    distance = 0.5 * float((p.softmax(0) - q.softmax(0)).abs().sum())
    least, best_greedy = (1 - distance) / (1 + distance), float(p.softmax(0).max())
    assert agree >= least - 3 * (0.25 / n) ** 0.5
    assert agree > best_greedy + 0.1
    assert agree <= 1 - distance + 3 * (0.25 / n) ** 0.5


def test_greedy_rows_and_faults_draft_greedily() -> None:
    noise, names = shared(2)
    logits = torch.randn(2, 40)
    noise.begin(names, [1, 1], sampling([0.0, 1.0]))
    tokens, _ = noise.draw(logits)  # type: ignore[misc]
    assert tokens[0] == logits[0].argmax()
    noise.begin(names, [1, 1], sampling([0.0, 0.0]))
    assert noise.draw(logits) is None
    off, names = shared(2, on=False)
    off.begin(names, [1, 1], sampling([1.0, 1.0]))
    assert off.draw(logits) is None


def test_top_k_is_the_targets_too() -> None:
    noise, names = shared(200)
    torch.manual_seed(1)
    logits = torch.randn(200, 60)
    noise.begin(names, [5] * 200, sampling([1.0] * 200, top_k=torch.full((200,), 3)))
    tokens, _ = noise.draw(logits)  # type: ignore[misc]
    assert all(t in row for t, row in zip(tokens.tolist(), logits.topk(3).indices.tolist(), strict=True))
