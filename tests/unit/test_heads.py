from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollspec import RollspecConfig
from rollspec.engine.vllm import heads

TARGET = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 4}
HEAD = {
    "speculators_model_type": "eagle3",
    "target_hidden_size": 16,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": {"vocab_size": 100, "hidden_size": 16},
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(heads.V2_SWITCH, "")  # restored afterwards


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def settle(tmp_path: Path, head: dict[str, Any] | None, drafters: list[str] | None = None, **args: Any) -> Any:
    target = folder(tmp_path / "target", TARGET)
    model = folder(tmp_path / "head", head) if head is not None else None
    config = RollspecConfig.load(
        {"proposal.drafters": drafters or ["suffix", "eagle3"], "proposal.learned.model": model}, env={}
    )
    return heads.settle(SimpleNamespace(model=target, **args), config)


def test_a_head_that_fits_is_taken(tmp_path: Path) -> None:
    config, method = settle(tmp_path, HEAD)
    assert method == "eagle3" and config.proposal.drafters == ("suffix", "eagle3")
    config, method = settle(tmp_path, TARGET, ["draft_model"])
    assert method == "draft_model"


def test_suffix_alone_asks_for_nothing(tmp_path: Path) -> None:
    config, method = settle(tmp_path, None, ["suffix"])
    assert method is None and config.proposal.drafters == ("suffix",)


@pytest.mark.parametrize(
    ("head", "args", "words"),
    [
        ({**HEAD, "target_hidden_size": 32}, {}, "hidden size of the target"),
        ({**HEAD, "transformer_layer_config": {"vocab_size": 99}}, {}, "the vocab_size of"),
        ({**HEAD, "eagle_aux_hidden_state_layer_ids": [1, 2, 7]}, {}, "layers [1, 2, 7]"),
        ({**HEAD, "speculators_model_type": "dflash"}, {}, "'dflash'"),
        (HEAD, {"data_parallel_size": 2}, "data_parallel_size"),
    ],
)
def test_what_does_not_fit_is_left_out_in_one_sentence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, head: dict[str, Any], args: dict[str, Any], words: str
) -> None:
    with caplog.at_level(logging.WARNING, "rollspec"):
        config, method = settle(tmp_path, head, **args)
    assert method is None and config.proposal.drafters == ("suffix",)
    (record,) = caplog.records
    assert words in record.message and record.message.startswith("rollspec: the drafter 'eagle3' is left out because")


def test_a_fresh_head_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], **kwargs: Any) -> Any:
        calls.append(command)
        folder(Path(command[-1]), HEAD)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(heads.subprocess, "run", run)
    target = folder(tmp_path / "target", TARGET)
    config = RollspecConfig.load(
        {"proposal.drafters": ["eagle3"], "proposal.learned.folder": str(tmp_path / "heads")}, env={}
    )
    found = {heads.settle(SimpleNamespace(model=target), config)[0].proposal.learned.model for _ in range(2)}
    assert len(found) == 1 and len(calls) == 1
    assert [p.name for p in (tmp_path / "heads").iterdir()] == [Path(found.pop()).name]


def test_where_none_can_be_made_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nModuleNotFoundError: No module named 'speculators'\n")
    monkeypatch.setattr(heads.subprocess, "run", lambda *a, **k: failed)
    target = folder(tmp_path / "target", TARGET)
    config = RollspecConfig.load(
        {"proposal.drafters": ["suffix", "eagle3"], "proposal.learned.folder": str(tmp_path / "heads")}, env={}
    )
    with caplog.at_level(logging.WARNING, "rollspec"):
        config, method = heads.settle(SimpleNamespace(model=target), config)
    assert method is None and "No module named 'speculators'" in caplog.text and "suffix goes on" in caplog.text
    assert not list((tmp_path / "heads").iterdir())


def test_configurations_that_cannot_be_are_refused() -> None:
    from rollspec.errors import ConfigError

    for given, words in [
        ({"proposal.drafters": ["eagle3", "draft_model"]}, "one of eagle3 and draft_model"),
        ({"proposal.drafters": ["draft_model"]}, "give its folder"),
        ({"drafter.mode": "idle"}, "add eagle3"),
    ]:
        with pytest.raises(ConfigError, match=words):
            RollspecConfig.load(given, env={})


@pytest.mark.parametrize(
    ("name", "other", "words"),
    [
        ("code", HEAD, None),
        ("code", {**HEAD, "dtype": "float16"}, None),
        ("code", {**HEAD, "draft_vocab_size": 50}, "has another shape"),
        (
            "code",
            {**HEAD, "transformer_layer_config": {**HEAD["transformer_layer_config"], "rope_theta": 5.0}},
            "has another shape",
        ),
        ("code", {**HEAD, "target_hidden_size": 32}, "hidden size of the target"),
        ("code", None, "is no folder with a config.json"),
        ("general", HEAD, "that is what the head in proposal.learned.model is called"),
    ],
)
def test_specialists_have_the_shape_of_the_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, other: dict[str, Any] | None, words: str | None
) -> None:
    path = folder(tmp_path / "other", other) if other is not None else str(tmp_path / "gone")
    config = RollspecConfig.load(
        {
            "proposal.drafters": ["eagle3"],
            "proposal.learned.model": folder(tmp_path / "head", HEAD),
            "proposal.learned.specialists": {name: path},
        },
        env={},
    )
    with caplog.at_level(logging.WARNING, "rollspec"):
        found, method = heads.settle(SimpleNamespace(model=folder(tmp_path / "target", TARGET)), config)
    assert method == "eagle3"
    assert found.proposal.learned.specialists == ({name: path} if words is None else {})
    assert words is None or words in caplog.text
