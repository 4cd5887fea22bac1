from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from drafter_target import filled
from typer.testing import CliRunner

from drafter_online.cli import app
from drafter_online.samples import Sample
from drafter_online.versions import MODEL, Versions


def call(*args: object, fails: bool = False) -> Any:
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == (2 if fails else 0), result.output
    if fails:
        assert result.output.startswith("drafter-online: ") and result.output.strip().count("\n") == 0, result.output
        return result.output
    return json.loads(result.stdout) if "--json" in args else result.stdout


@pytest.fixture(scope="module")
def work(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    filled(tiny_target, 16, errors=1).save(folder / "buffer")
    return folder


def test_from_nothing_to_a_promoted_version(tiny_target: Path, work: Path) -> None:
    made = call("init", "--target", tiny_target, "--out", work / "head", "--json")
    assert made["aux_layers"] == [1, 2, 3] and made["vocabulary_coverage"] == 1.0 and made["parameters"] > 1000
    stats = call("buffer", "stats", work / "buffer", "--json")
    assert stats["samples"] == 16 and stats["added"] == 16
    assert "response tokens" in call("buffer", "stats", work / "buffer")
    train = [
        "train", "--buffer", work / "buffer", "--head", work / "head", "--out", work / "v", "--state", work / "state",
        "--steps", 20, "--hold-out", 0.3, "--set", "learning_rate=0.003", "--set", "batch_tokens=96",
        "--set", "rejected=0.5", "--json",
    ]  # fmt: skip
    first = call(*train)
    assert first["version"] == 1 and not first["resumed"] and first["held_out"] > 0
    assert first["counts"]["micro_steps"] == 20
    second = call(*train)
    assert second["version"] == 2 and second["resumed"] and second["counts"]["micro_steps"] == 40
    listed = call("versions", "list", work / "v", "--json")
    assert [(v["version"], v["parent"], v["promoted"]) for v in listed] == [(1, None, False), (2, 1, False)]
    assert "is promoted" in call("versions", "promote", work / "v", 1)
    promoted = call("versions", "promote", work / "v", 2, "--json")
    assert (promoted["version"], promoted["verdict"], promoted["promoted"]) == (2, "promoted", 2)
    rolled = call("versions", "rollback", work / "v", "--reason", "slow", "--json")
    assert (rolled["version"], rolled["verdict"], rolled["reason"], rolled["promoted"]) == (2, "rolled_back", "slow", 1)
    assert call("versions", "rollback", work / "v", 2).strip().endswith("promoted is now 1")
    assert Versions(work / "v").promoted() == 1
    shown = call("versions", "show", work / "v", 2, "--json")
    assert [e["verdict"] for e in shown["events"]] == ["promoted", "rolled_back", "rolled_back"] and shown[
        "kind"
    ] == "eagle3"
    assert "all verified" in call("versions", "show", work / "v", 1)
    assert "rolled_back" in call("versions", "list", work / "v")
    path = work / "v" / "00000002" / MODEL
    path.write_bytes(path.read_bytes()[:-8])
    assert "truncated" in call("versions", "show", work / "v", 2, fails=True)
    assert "truncated" in call("versions", "promote", work / "v", 2, fails=True)


def test_a_pruned_vocabulary_from_a_buffer_and_conversion(tiny_target: Path, work: Path) -> None:
    out = call(
        "init", "--target", tiny_target, "--out", work / "pruned", "--draft-vocab", 20, "--counts", work / "buffer",
        "--dtype", "float32", "--json",
    )  # fmt: skip
    assert out["draft_vocab_size"] == 20 and 0.4 < out["vocabulary_coverage"] < 1
    again = call(
        "convert", work / "pruned", "--target", tiny_target, "--out", work / "again", "--dtype", "float32", "--json"
    )
    assert {**again, "head": ""} == {**out, "head": ""}
    assert (work / "again" / MODEL).read_bytes() == (work / "pruned" / MODEL).read_bytes()


def test_mistakes_are_one_sentence(tiny_target: Path, work: Path, tmp_path: Path) -> None:
    assert "not a model" in call("init", "--target", tmp_path / "no", "--out", tmp_path, fails=True)
    assert "--aux" in call("init", "--target", tiny_target, "--out", tmp_path, "--aux", "a", fails=True)
    assert "do not fit" in call("init", "--target", tiny_target, "--out", tmp_path, "--aux", "1,2,8", fails=True)
    assert "--dtype" in call("init", "--target", tiny_target, "--out", tmp_path, "--dtype", "int8", fails=True)
    assert "no saved buffer" in call("buffer", "stats", tmp_path, fails=True)
    train = ["train", "--buffer", work / "buffer", "--out", tmp_path / "v"]
    assert "nothing to train" in call(*train, fails=True)
    assert "--target" in call(*train, "--model", tiny_target, fails=True)
    assert "training.ttt_steps = 99" in call(*train, "--set", "ttt_steps=99", fails=True)
    assert "training.lr" in call(*train, "--set", "lr=1", fails=True)
    assert "is not in" in call("versions", "show", tmp_path / "v", 1, fails=True)
    assert "nothing to roll back" in call("versions", "rollback", tmp_path / "v", fails=True)
    assert call("versions", "list", tmp_path / "v", "--json") == []


def test_a_specialist_learns_from_its_domain(tiny_target: Path, work: Path, tmp_path: Path) -> None:
    from drafter_online.buffer import Buffer, BufferConfig

    both = Buffer(BufferConfig())
    for i, sample in enumerate(filled(tiny_target, 16, errors=1)):
        both.add(Sample.from_bytes(dataclasses.replace(sample, domain="code" if i % 4 else "prose").to_bytes()))
    both.save(tmp_path / "buffer")
    assert call("buffer", "stats", tmp_path / "buffer", "--json")["domains"] == {"code": 12, "prose": 4}
    train = ["train", "--buffer", tmp_path / "buffer", "--out", tmp_path / "v", "--domain"]
    assert "it has code, prose" in call(*train, "poems", fails=True)
    assert "none with a domain" in call(*train[:1], "--buffer", work / "buffer", *train[3:], "code", fails=True)
    head = call("init", "--target", tiny_target, "--out", tmp_path / "head", "--json")["head"]
    got = call(*train, "code", "--head", head, "--steps", 2, "--hold-out", 0, "--set", "batch_tokens=64", "--json")
    assert got["samples"] == 12


def test_a_draft_model_is_distilled(tiny_target: Path, work: Path, tmp_path: Path) -> None:
    got = call(
        "train", "--buffer", work / "buffer", "--model", tiny_target, "--target", tiny_target, "--out", tmp_path / "v",
        "--steps", 3, "--set", "batch_tokens=64", "--json",
    )  # fmt: skip
    assert Versions(tmp_path / "v").manifest(got["version"]).kind == "draft_model"
