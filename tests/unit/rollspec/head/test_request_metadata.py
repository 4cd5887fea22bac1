"""What requests say about themselves: their domain, and that nothing of a private one stays."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_like import like

from rollspec import RollspecConfig
from rollspec.head import metadata
from rollspec.head.domains import Domains
from rollspec.step import DraftEngine


@pytest.mark.parametrize(
    ("given", "domain", "private"),
    [
        (None, "default", False),
        ({}, "default", False),
        ({"domain": "code"}, "code", False),
        ({"private": True}, "default", True),
        ('{"domain": "code", "private": 1}', "code", True),
        ({"domain": 7}, "invalid", False),
        ({"domain": "x" * 65}, "invalid", False),
        ({"domain": "a\nb"}, "invalid", False),
        ("not json", "invalid", True),
        ("[" * 100_000, "invalid", True),
        (3, "invalid", True),
    ],
)
def test_metadata(given: Any, domain: str, private: bool) -> None:
    params = like("vllm:SamplingParams", extra_args=None if given is None else {"rollspec": given})
    assert metadata.of(params) == metadata.Metadata(domain, private)
    assert metadata.of(None) == metadata.Metadata()


def test_domains_count_what_drafts_achieve() -> None:
    def request(domain: str) -> Any:
        params = like("vllm:SamplingParams", extra_args={"rollspec": {"domain": domain}})
        return like("rollspec.engine.vllm.v2.adapter:ScheduledRequest", sampling_params=params)

    running = {"a": request("code"), "b": request("prose")}
    d = Domains(running)
    d.observe(["a", "b", "c"], [[1, 2, 3], [4], []], {"a": [1, 2, 9], "b": [5]})
    d.observe(["a", "c"], [[1], [2]], {})
    assert d.to_dict() == {"code": [1, 2, 1, 3, 2, 4], "prose": [1, 1, 1, 1, 0, 1], "default": [1, 1, 0, 0, 0, 1]}
    for i in range(100):
        running[f"r{i}"] = request(f"d{i}")
        d.observe([f"r{i}"], [[1]], {})
        d.forget(f"r{i}")
    assert len(d.to_dict()) == 65 and d.to_dict()["other"][0] == 39


@pytest.mark.usefixtures("steady_clock")
def test_nothing_of_a_private_request_stays() -> None:
    p = DraftEngine(RollspecConfig.load(env={}), 256)
    text = list(range(20, 40))
    for req_id, private in (("secret", True), ("other", False)):
        p.begin(req_id, [1, 2, 3], 100, private=private)
        for token in text:
            drafts = p.step([req_id], [[token]], {})
        assert drafts == [[]], "what the first one said is not drafted to the second"
        if private:
            assert p.snapshot()["prompts" if "prompts" in p.snapshot() else next(iter(p.snapshot()))] is not None
        p.finish(req_id)
        assert len(p.history) == (0 if private else 1)
    assert p.suffix.bytes >= 0 and not any(k.startswith("private") for k in p.suffix._groups)
    p.begin("third", [1, 2, 3], 100)
    drafted = [p.step(["third"], [[t]], {}) for t in text[:6]]
    assert any(d != [[]] for d in drafted), "what an open request said is"
