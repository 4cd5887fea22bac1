"""The example's corpus, traffic and numbers; its servers are run by `make serve-demo`."""

from __future__ import annotations

import ast
import asyncio
import random
from pathlib import Path

import pytest

from examples.production_traffic import traffic
from examples.production_traffic.__main__ import main
from examples.production_traffic.corpus import documents
from examples.production_traffic.language import PROMPTS
from examples.production_traffic.results import draw, pairs, phases, rows, sentences, summarize
from examples.production_traffic.servers import Server
from examples.production_traffic.topics import TOPICS
from examples.production_traffic.traffic import Burst, Plan, read_bursts

PLAN = Plan((("code", 4), ("prose", 4), ("code", 2)), burst=2)


def bursts(lengths: list[float], rate: float = 100.0) -> list[Burst]:
    """Bursts of 100 tokens with these acceptance lengths."""
    domains = [d for d, n in PLAN.phases for _ in range(n)]
    return [
        Burst(i, d, 2 * (i + 1), 0, 100 / rate, 100, 0, round(100 - 100 / length), i // 4, 1.0)
        for i, (d, length) in enumerate(zip(domains, lengths, strict=True))
    ]


def test_corpus_is_code_that_parses_and_prose_that_does_not() -> None:
    code, prose = documents("code", held_out=True), documents("prose", held_out=True)
    assert len(code) > 10 and len(prose) > 50
    for text in code[:10]:
        assert not any(ast.get_docstring(n) for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    words = [sum(c.isalpha() or c == " " for c in "".join(texts)) / len("".join(texts)) for texts in (code, prose)]
    assert words[1] > words[0]
    assert not set(code) & set(documents("code", held_out=False))


def test_every_server_is_sent_the_same_requests() -> None:
    prompts = {"code": [[1], [2], [3]], "prose": [[4], [5], [6]]}
    first, second = (list(PLAN.bursts(prompts)) for _ in range(2))
    assert first == second
    assert [d for d, _ in first] == ["code"] * 4 + ["prose"] * 4 + ["code"] * 2
    assert [r["prompt"] for _, requests in first[:2] for r in requests] == [[1], [2], [3], [1]]
    assert all(32 <= r["max_tokens"] <= 80 for _, requests in first for r in requests)


def test_recovery_is_counted_from_the_shift() -> None:
    online = bursts([1.0, 2.0, 2.0, 2.0, 1.1, 1.5, 2.0, 2.0, 2.0, 2.0], rate=150)
    frozen = bursts([2.0, 2.0, 2.0, 2.0, 1.1, 1.1, 1.1, 1.1, 2.0, 2.0])
    none = bursts([1.0] * 10, rate=80)
    summary = summarize(PLAN, {"none": none, "online": online, "frozen": frozen})
    assert [p["requests_to_recover"] for p in summary["arms"]["online"]] == [4, 6, 2]
    assert [p["requests_to_recover"] for p in summary["arms"]["none"]] == [None] * 3
    # A topic that is harder to draft is recovered, and the first one's length is not there.
    harder = summarize(PLAN, {"online": bursts([2.0] * 4 + [1.1, 1.4, 1.4, 1.4] + [2.0] * 2)})["arms"]["online"]
    assert [p["requests_to_recover"] for p in harder] == [2, 4, 2]
    assert [p["requests_to_first"] for p in harder] == [2, None, 2]
    assert summary["online_over_frozen"] == pytest.approx([1.5] * 3)
    assert summary["online_over_none"] == pytest.approx([1.875] * 3)
    assert len(rows(PLAN, summary)) == 9
    assert phases(PLAN) == [range(4), range(4, 8), range(8, 10)]


def test_bursts_that_alternate_are_compared_pair_by_pair() -> None:
    fast, slow = bursts([2.0] * 10, rate=150), bursts([2.0] * 10, rate=100)
    found = pairs(PLAN, [{"online": fast, "frozen": slow}] * 2)
    assert list(found) == ["frozen"] and [r["n"] for r in found["frozen"]] == [8, 8, 4]
    assert all(r["median"] == pytest.approx(1.5) for r in found["frozen"])
    (said,) = sentences(PLAN, {"pairs": found})
    assert "online over frozen drafter" in said and "code 1.50x (1.50-1.50), prose 1.50x" in said


def test_servers_take_turns_and_those_that_wait_are_halted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []

    class Recorded(Server):
        def suspend(self) -> None:
            happened.append(f"halt {self.url}")

        def resume(self) -> None:
            happened.append(f"go on {self.url}")

    async def answer(client: object, plan: Plan, domain: str, requests: list[object]) -> tuple[list[float], list[str]]:
        happened.append(f"burst {domain}")
        return [0.1] * len(requests), ["x"] * len(requests)

    async def count(client: object, url: str, names: dict[str, str]) -> dict[str, float]:
        return dict.fromkeys(names, float(len(happened)))

    monkeypatch.setattr(traffic, "_burst", answer)
    monkeypatch.setattr(traffic, "counters", count)
    plan = Plan((("code", 2),), burst=2, pause=0.0)
    both = {n: Recorded(f"http://{n}", ()) for n in ("a", "b")}
    done = asyncio.run(traffic.send(both, plan, {"code": [[1]]}, tmp_path, lambda *_: None))
    assert happened == [w for n in "abba" for w in (f"go on http://{n}", "burst code", f"halt http://{n}")]
    assert [b.requests for b in done["a"]] == [2, 4] and done["b"][0].tokens == 1
    assert read_bursts(tmp_path / "b.jsonl") == done["b"]


def test_picture_and_lines_of_a_run(tmp_path: Path) -> None:
    import json
    from dataclasses import asdict

    arm = bursts([1.0, 2.0, 2.0, 2.0, 1.1, 1.5, 2.0, 2.0, 2.0, 2.0])
    file = tmp_path / "online.jsonl"
    file.write_text("".join(json.dumps({**asdict(b), "later": 1}) + "\n" for b in arm))
    assert read_bursts(file) == arm
    draw(PLAN, {"online": read_bursts(file)}, tmp_path / "traffic.svg")
    assert (tmp_path / "traffic.svg").stat().st_size > 1000


def test_bad_counts_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--bursts", "3,x"]) == 2
    assert "give 3 counts" in capsys.readouterr().err


def test_one_arm_alone_is_not_for_servers_that_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--model", "x", "--head", str(tmp_path), "--only", "none"]) == 2
    assert "all servers take turns" in capsys.readouterr().err


def test_a_head_needs_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--out", str(tmp_path), "--head", str(tmp_path)]) == 2
    assert "and its --model" in capsys.readouterr().err


def test_a_model_of_ones_own_gets_four_topics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from itertools import islice

    for made in TOPICS.values():
        first, again = (list(islice(made(random.Random(3)), PROMPTS)) for _ in range(2))
        assert first == again and len(set(first)) > PROMPTS * 0.7
    assert main(["--out", str(tmp_path), "--model", "smollm2", "--bursts", "1,2,3"]) == 2
    assert "give 4 counts from 1 up, of arithmetic, lists, code, rewriting" in capsys.readouterr().err
