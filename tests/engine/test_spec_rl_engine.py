"""The preset `spec_rl`, as it is, in a real engine and verl's server: SPEC-RL's cut, its lenience, its continuation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lenient import LIMIT, PRESENT, audit, counts, event_loop, make_server, remember, rollouts, started
from models import make_sharp_model

from rollspec.sampling import lenient_reuse

pytest.importorskip("verl")
pytestmark = pytest.mark.engine

EOS = 1
LENIENCE = math.exp(0.5)  # of the paper: an old token is kept with the chance min(1, LENIENCE p_new / p_old)
COPIES = 8


def test_spec_rl_cuts_at_the_first_rejection_with_its_lenience_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Old log-probs are shifted, as if another policy had sampled the responses: ratios are e^-shift at every token."""
    decided: list[tuple[list[float], list[float], list[float], int]] = []
    plain = lenient_reuse.kept

    def noting(log_new: Any, log_old: Any, uniform: Any, bias: float = 0.0) -> int:
        n = plain(log_new, log_old, uniform, bias)
        decided.append((log_new.tolist(), log_old.tolist(), uniform.tolist(), n))
        return n

    monkeypatch.setattr(lenient_reuse, "kept", noting)
    sharp = make_sharp_model(tmp_path)
    found: dict[float, dict[str, float]] = {}
    texts: dict[float, list[tuple[int, str, Any]]] = {}
    with event_loop() as run, started(sharp, {"preset": "spec_rl"}, run) as engine:
        server = run(make_server(engine, {"preset": "spec_rl"}))
        info = run(server.rollspec_call("info", {}))
        assert info["preset"] == "spec_rl" and info["reuse"] == "lenient", info
        first = run(rollouts(server, PRESENT, COPIES, "first"))
        run(server.rollspec_call("stats", {}))  # from here on
        for shift in (0.45, 0.7):  # within the lenience, and e^-0.2 beyond it
            decided.clear()
            remember(server, first, shift)
            texts[shift] = run(rollouts(server, PRESENT, COPIES, f"shift {shift}"))
            stats = run(server.rollspec_call("stats", {}))
            found[shift] = counts(stats)
            assert not stats["faults"] and stats["drafted"] == 0, "nothing is drafted, as there"
            assert found[shift]["rollspec/reuse/lossy"] == 1.0
            assert len(decided) == len(first) == found[shift]["rollspec/reuse/verified"]
            assert all(n == first_rejection(*of) for *of, n in decided)
            assert found[shift]["rollspec/reuse/avg_cut_idx"] == np.mean([n for *_, n in decided])
            cuts = sorted(n for *_, n in decided)
    assert "LOSSY" in capsys.readouterr().out
    assert found[0.45]["rollspec/reuse/skip_ratio"] == 1.0, "a ratio within the lenience cuts nothing"
    assert [o.token_ids for *_, o in texts[0.45]] == [o.token_ids for *_, o in first]
    assert 2.5 < np.mean(cuts) < 6.5 and len(set(cuts)) > 4, "4.5 on average, as a geometric distribution has it"
    again = [(i, o.token_ids, old.token_ids) for (i, _, o), (*_, old) in zip(texts[0.7], first, strict=True)]
    for _, new, _ in again:
        assert len(new) == LIMIT or new[-1] == EOS, "cut and not continued"
    same = sorted(common(new, old) for _, new, old in again)
    assert all(s >= n for s, n in zip(same, cuts, strict=True)), "it does not start from the old response"
    assert sum(new != old for _, new, old in again) > len(again) / 2, "what follows the cut was not sampled anew"
    # Of prefix and continuation alike, log-probs are the present policy's: an independent model in float32 agrees.
    result = audit(sharp, texts[0.7], PRESENT)
    assert result.log_probs is not None and not result.log_probs.failure, result.log_probs


def first_rejection(log_new: list[float], log_old: list[float], uniform: list[float]) -> int:
    """How many tokens are in front of the first one with U > LENIENCE p_new / p_old."""
    ratios = [math.exp(new - old) for new, old in zip(log_new, log_old, strict=True)]
    rejected = [i for i, (u, ratio) in enumerate(zip(uniform, ratios, strict=True)) if u > LENIENCE * ratio]
    return rejected[0] if rejected else len(ratios)


def common(a: list[int], b: list[int]) -> int:
    """Leading tokens that both have."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
