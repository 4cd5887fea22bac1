"""Engines and servers that TRL's hooks meet: which are left alone, which are asked, and what is said of each."""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import rollspec_trl
from rollspec_trl import engines
from vllm_like import like

from rollspec.engine import calls
from rollspec.engine.vllm import plugin
from rollspec.errors import ConfigError

pytest.importorskip("torch")

from trl_stand_ins import PROMPTS, Llm, generation_class, trainer_of

pytestmark = pytest.mark.usefixtures("tested_trl")


@pytest.mark.parametrize(
    ("changes", "word"), [({"min_p": 0.1}, "min_p"), ({"generation_kwargs": {"logit_bias": {1: 2.0}}}, "logit_bias")]
)
def test_what_vllm_would_refuse_is_not_speculated(
    changes: dict[str, Any], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    rollspec_trl.enable()
    with caplog.at_level(logging.WARNING, "rollspec"):
        g = generation_class()(Llm(info={"state": "off"}), **changes)
    assert list(g.built_with) == ["off"]
    assert plugin._enabled is engines.config(), "the next engine is asked anew"
    assert [r for r in caplog.records if word in r.getMessage()] == caplog.records and len(caplog.records) == 1


def test_a_server_that_speculates_is_recognised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine cannot be changed from here: what will fail is said, in one sentence."""
    rollspec_trl.enable()
    monkeypatch.setattr(engines.Server, "ask", lambda self, op, payload: [{"state": "suffix"}])
    client = like("trl.generation.vllm_client:VLLMClient", base_url="http://host:8000")
    with caplog.at_level(logging.WARNING, "rollspec"):
        generation_class()(Llm(), mode="server", vllm_client=client, min_p=0.1)
    assert len(caplog.records) == 1 and "the server speculates, but min_p" in caplog.text


def test_an_engine_without_rollspec_is_said_once_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollspec_trl.enable()
    llm = Llm(info=AttributeError("no method rollspec"))
    with caplog.at_level(logging.WARNING, "rollspec"):
        t = trainer_of(llm, tmp_path)
        t._generate_and_score_completions(PROMPTS)
        t.log({"loss": 0.1})
        t._save_checkpoint(None, None)
    assert [op for op, _ in llm.calls] == ["info"]
    assert "without speculation" in caplog.text and "accept/rate" not in str(t.logged)
    assert t.logged[0]["rollspec/reward/mean"] == 1.0


def test_without_vllm_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollspec_trl.enable()
    t = trainer_of(Llm(), tmp_path)
    del t.vllm_generation
    with caplog.at_level(logging.WARNING, "rollspec"):
        for _ in range(2):
            t.log({"loss": 0.1})
    assert len(caplog.records) == 1 and "use_vllm=True" in caplog.text


def test_disabled_asks_nothing(tmp_path: Path) -> None:
    rollspec_trl.enable({"enabled": False})
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    t._generate_and_score_completions(PROMPTS)
    t.log({"loss": 0.1})
    assert llm.calls == []
    assert set(t.logged[0]) >= {"rollspec/rollout/generation_share", "rollspec/length/p50"}
    assert "rollspec/faults" not in t.logged[0]


@pytest.mark.parametrize(("version", "says"), [("1.15.0", "outside the tested range"), (None, "not installed")])
def test_another_trl_is_left_alone(
    version: str | None, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", look)
    with caplog.at_level(logging.WARNING, "rollspec"):
        rollspec_trl.enable()
    assert len(caplog.records) == 1 and says in caplog.text
    assert plugin._enabled is None


def test_a_typo_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        rollspec_trl.enable("defualt")


def test_each_rank_has_a_history_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    rollspec_trl.enable({"history.dir": str(tmp_path)})
    assert engines.config().history.dir == tmp_path / "replica_3"


def test_a_server_that_does_not_answer_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = pytest.importorskip("requests")
    sent: list[Any] = []

    def post(url: str, json: Any, timeout: float) -> Any:
        sent.append((url, json))
        if len(sent) > 1:
            raise requests.ConnectionError("refused")
        return like(
            "requests.models:Response", raise_for_status=lambda: None, json=lambda: {"results": [{"state": "suffix"}]}
        )

    monkeypatch.setattr(requests, "post", post)
    server = engines.Server("http://host:8000/")
    assert server.call("info") == {"state": "suffix"}
    assert sent == [("http://host:8000/collective_rpc", {"method": "rollspec", "args": ["info", {}]})]
    with caplog.at_level(logging.ERROR, "rollspec"):
        for _ in range(5):
            assert "error" in server.call("stats")
    assert len(sent) == 1 + calls.MOST_FAILURES and "not asked again" in caplog.text


def test_trl_passes_the_switch_on_to_its_server() -> None:
    serve = pytest.importorskip("trl.scripts.vllm_serve")
    extra = ["--additional-config", '{"rollspec": "default"}']
    assert serve.build_command(serve.ScriptArguments(model="m"), extra)[-2:] == extra
