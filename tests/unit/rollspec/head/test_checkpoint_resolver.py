from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_like import like

from rollspec import RollspecConfig
from rollspec.head import checkpoint_resolver

ARGS = "vllm.engine.arg_utils:EngineArgs"
TARGET = {"vocab_size": 100, "hidden_size": 16, "num_hidden_layers": 4}
HEAD = {
    "speculators_model_type": "eagle3",
    "target_hidden_size": 16,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "transformer_layer_config": {"vocab_size": 100, "hidden_size": 16},
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


def folder(path: Path, config: dict[str, Any]) -> str:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def settle(tmp_path: Path, head: dict[str, Any] | None, drafters: list[str] | None = None, **args: Any) -> Any:
    target = folder(tmp_path / "target", TARGET)
    model = folder(tmp_path / "head", head) if head is not None else None
    config = RollspecConfig.load(
        {"proposal.drafters": drafters or ["suffix", "eagle3"], "proposal.head.model": model}, env={}
    )
    return checkpoint_resolver.settle(like(ARGS, model=target, **args), config)


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


@pytest.mark.parametrize(
    ("d2t", "words"),
    [([0, 0, 120], "draft token 2 the target's 122"), ([-1, 0, 0], "draft token 0 the target's -1"), ([0, 5, 90], "")],
)
def test_a_vocabulary_map_that_leads_out_of_the_vocabulary_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, d2t: list[int], words: str
) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    (tmp_path / "head").mkdir()
    save_file({"d2t": torch.tensor(d2t)}, tmp_path / "head" / "model.safetensors")
    _, method = settle(tmp_path, {**HEAD, "draft_vocab_size": 3})
    assert (method is None) == bool(words) and words in caplog.text
    assert ("the vocabulary map of" in caplog.text) == bool(words)


def test_a_target_with_recurrent_layers_gets_no_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = folder(tmp_path / "target", {**TARGET, "model_type": "x", "layer_types": ["linear_attention"] * 4})
    config = RollspecConfig.load(
        {"proposal.drafters": ["eagle3"], "proposal.head.model": folder(tmp_path / "head", HEAD)}, env={}
    )
    assert checkpoint_resolver.settle(like(ARGS, model=target), config)[1] is None
    assert "has layers with a recurrent state (linear_attention)" in caplog.text


def test_a_targets_own_mtp_layer_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = folder(tmp_path / "target", {**TARGET, "num_nextn_predict_layers": 1})
    cases: list[tuple[dict[str, Any], str | None]] = [({}, "mtp"), ({"proposal.head.model": "x"}, None)]
    for given, method in cases:
        config = RollspecConfig.load({"proposal.drafters": ["suffix", "mtp"], **given}, env={})
        found, name = checkpoint_resolver.settle(like(ARGS, model=target), config)
        assert name == method and (method is None or found.proposal.head.model == target)
    assert "proposal.head.model is set" in caplog.text
    config = RollspecConfig.load({"proposal.drafters": ["suffix", "mtp"]}, env={})
    without = folder(tmp_path / "without", TARGET)
    assert checkpoint_resolver.settle(like(ARGS, model=without), config)[1] is None
    assert "has 0 MTP layers" in caplog.text


@pytest.mark.parametrize(
    ("drafter", "given", "words"),
    [
        ("eagle3", {**HEAD, "speculators_model_type": "dflash"}, "one pass over keys"),
        ("eagle3", {**HEAD, "speculators_model_type": "peagle"}, "in parallel with DFlash"),
        ("draft_model", {**TARGET, "pard_token": 7}, "in parallel with DFlash"),
        ("draft_model", {**TARGET, "architectures": ["DFlashDraftModel"]}, "one pass over keys"),
        ("draft_model", {**TARGET, "architectures": ["MedusaModel"]}, "no such drafter"),
        ("draft_model", {**TARGET, "vocab_size": 99}, "no mapping between the tokens of two vocabularies"),
    ],
)
def test_other_kinds_are_refused_with_what_vllm_lacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, drafter: str, given: dict[str, Any], words: str
) -> None:
    with caplog.at_level(logging.WARNING, "rollspec"):
        config, method = settle(tmp_path, given, ["suffix", drafter])
    assert method is None and config.proposal.drafters == ("suffix",)
    (record,) = caplog.records
    assert words in record.message


def test_a_fresh_head_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], **kwargs: Any) -> Any:
        calls.append(command)
        folder(Path(command[-1]), HEAD)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(checkpoint_resolver.subprocess, "run", run)
    target = folder(tmp_path / "target", TARGET)
    config = RollspecConfig.load({"proposal.drafters": ["eagle3"], "drafter.dir": str(tmp_path)}, env={})
    found = {checkpoint_resolver.settle(like(ARGS, model=target), config)[0].proposal.head.model for _ in range(2)}
    assert len(found) == 1 and len(calls) == 1
    assert [p.name for p in (tmp_path / "heads").iterdir()] == [Path(found.pop()).name]


def test_where_none_can_be_made_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = SimpleNamespace(returncode=1, stderr="Traceback\nModuleNotFoundError: No module named 'speculators'\n")
    monkeypatch.setattr(checkpoint_resolver.subprocess, "run", lambda *a, **k: failed)
    target = folder(tmp_path / "target", TARGET)
    config = RollspecConfig.load({"proposal.drafters": ["suffix", "eagle3"], "drafter.dir": str(tmp_path)}, env={})
    with caplog.at_level(logging.WARNING, "rollspec"):
        config, method = checkpoint_resolver.settle(like(ARGS, model=target), config)
    assert method is None and "No module named 'speculators'" in caplog.text and "suffix is used" in caplog.text
    assert not list((tmp_path / "heads").iterdir())


def given(tmp_path: Path, config: dict[str, Any], weights: list[str], **more: Any) -> Any:
    """Settles an engine that trains a given head with these weights (empty ones)."""
    header = json.dumps({n: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in weights}).encode()
    path = folder(tmp_path / "head", config)
    (tmp_path / "head" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    options = {"proposal.drafters": ["eagle3"], "proposal.head.model": path, "drafter.mode": "idle"}
    options |= {"drafter.dir": str(tmp_path), **more}
    target = folder(tmp_path / "target", TARGET)
    found, method = checkpoint_resolver.settle(like(ARGS, model=target), RollspecConfig.load(options, env={}))
    assert method == "eagle3"
    return found.proposal.head


FLAT = {"vocab_size": 100, "hidden_size": 16, "draft_vocab_size": 50}


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (FLAT, ["midlayer.mlp.up_proj.weight", "d2t", "lm_head.weight"]),
        (HEAD, ["layers.0.mlp.up_proj.weight", "embed_tokens.weight"]),
        (HEAD, ["layers.0.mlp.up_proj.weight", "lm_head.weight"]),
    ],
)
def test_a_head_that_training_could_not_replace_runs_as_a_converted_copy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    weights: list[str],
) -> None:
    calls = []

    def run(command: list[str], **kwargs: Any) -> Any:
        calls.append(command[-4:])
        folder(Path(command[-1]), {**HEAD, "drafter_online": {"replaced": ["embed_tokens.weight"]}})
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(checkpoint_resolver.subprocess, "run", run)
    head, target = str(tmp_path / "head"), str(tmp_path / "target")
    copies = {given(tmp_path, config, weights).model}
    assert len(calls) == 1 and calls[0][:3] == [checkpoint_resolver.CONVERT, head, target]
    assert "with the target's embed_tokens.weight in the place of its own" in caplog.text
    # Frozen, it is left as it is; and so is a specialist beside it, unless it has the other layout.
    assert given(tmp_path, config, weights, **{"drafter.mode": "off"}).model == head and len(calls) == 1
    assert copies.pop() not in (head, None)
    other = folder(tmp_path / "other", config)
    more = {"proposal.head.specialists": {"code": other}}
    kept = given(tmp_path, config, weights, **more).specialists
    assert (kept["code"] == other) == (config is HEAD)


def test_a_head_in_the_layout_of_versions_is_left_as_it_is(tmp_path: Path) -> None:
    for weights in (["layers.0.mlp.up_proj.weight"], ["layers.0.mlp.up_proj.weight", "d2t", "lm_head.weight"]):
        assert given(tmp_path, HEAD, weights).model == str(tmp_path / "head")


def test_a_head_that_cannot_be_converted_drafts_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = SimpleNamespace(returncode=1, stderr="HeadError: the head lacks fc.weight\n")
    monkeypatch.setattr(checkpoint_resolver.subprocess, "run", lambda *a, **k: failed)
    assert given(tmp_path, FLAT, ["midlayer.x"]).model == str(tmp_path / "head")
    assert "lacks fc.weight" in caplog.text and "drafts as it is" in caplog.text


def test_a_name_on_the_hub_becomes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    head, target = folder(tmp_path / "snapshot", HEAD), folder(tmp_path / "target", TARGET)
    options = {"proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": "someone/head"}
    config = RollspecConfig.load(options, env={})
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **k: asked.append((name, k)) or head)
    found, method = checkpoint_resolver.settle(like(ARGS, model=target, download_dir="/cache"), config)
    assert method is None and "someone/head has no safetensors file on the hub" in caplog.text
    (Path(head) / "model.safetensors").touch()
    found, method = checkpoint_resolver.settle(like(ARGS, model=target, download_dir="/cache"), config)
    assert method == "eagle3" and found.proposal.head.model == head
    assert asked[0][0] == "someone/head" and asked[0][1]["cache_dir"] == "/cache"

    def offline(name: str, **more: Any) -> str:
        raise OSError("Cannot find an appropriate cached snapshot folder\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    found, method = checkpoint_resolver.settle(like(ARGS, model=target), config)
    assert method is None and found.proposal.drafters == ("suffix",)
    assert "someone/head is neither a folder nor to be had from the hub (Cannot find" in caplog.text
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")  # then vLLM looks elsewhere
    assert checkpoint_resolver.settle(like(ARGS, model=target), config)[0].proposal.head.model == "someone/head"


def test_configurations_that_cannot_be_are_refused() -> None:
    from rollspec.errors import ConfigError

    for given, words in [
        ({"proposal.drafters": ["eagle3", "draft_model"]}, "one of eagle3, draft_model and mtp"),
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
        ("general", HEAD, "that is what the head in proposal.head.model is called"),
    ],
)
def test_specialists_have_the_shape_of_the_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, other: dict[str, Any] | None, words: str | None
) -> None:
    path = folder(tmp_path / "other", other) if other is not None else str(tmp_path / "gone")
    config = RollspecConfig.load(
        {
            "proposal.drafters": ["eagle3"],
            "proposal.head.model": folder(tmp_path / "head", HEAD),
            "proposal.head.specialists": {name: path},
        },
        env={},
    )
    with caplog.at_level(logging.WARNING, "rollspec"):
        found, method = checkpoint_resolver.settle(like(ARGS, model=folder(tmp_path / "target", TARGET)), config)
    assert method == "eagle3"
    assert found.proposal.head.specialists == ({name: path} if words is None else {})
    assert words is None or words in caplog.text


def test_draft_models_of_one_shape_run_beside_each_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = {"vocab_size": TARGET["vocab_size"], "hidden_size": 8, "num_hidden_layers": 1, "transformers_version": "4"}
    same = folder(tmp_path / "same", {**small, "transformers_version": "5", "eos_token_id": 2})
    config = RollspecConfig.load(
        {
            "proposal.drafters": ["draft_model"],
            "proposal.head.model": folder(tmp_path / "small", small),
            "proposal.head.specialists": {
                "code": same,
                "math": folder(tmp_path / "deep", {**small, "num_hidden_layers": 2}),
            },
        },
        env={},
    )
    with caplog.at_level(logging.WARNING, "rollspec"):
        found, method = checkpoint_resolver.settle(like(ARGS, model=folder(tmp_path / "target", TARGET)), config)
    assert method == "draft_model" and found.proposal.head.specialists == {"code": same}
    assert "'math' is left out because" in caplog.text and "has another shape" in caplog.text
