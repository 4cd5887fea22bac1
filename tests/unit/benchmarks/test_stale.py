"""Results that are older than what they measure say so, on every page that names them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import stale
from scripts.generate import results

CODE = "rollspec/proposal/scan.py"


def git(root: Path, *args: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e@e", *args],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def result(root: Path, name: str, provenance: dict[str, object]) -> None:
    write(root, f"{stale.RESULTS}/{name}.json", json.dumps({"part": [{"provenance": provenance}]}))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    write(root, CODE, '"""What it is."""\nx = 1\n')
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    result(root, "propose", {"git": git(root, "rev-parse", "HEAD"), "dirty": False})
    return root


def test_a_result_is_current_until_the_code_that_it_measures_changes(root: Path) -> None:
    assert stale.reasons(root) == {"propose": []}
    write(root, "rollspec/telemetry/report.py", "y = 1\n")  # nothing that it measures
    write(root, str(Path(CODE).with_name("README.md")), "What was measured.\n")
    write(root, CODE, '"""What it is, in other words."""\n\nx = 1  # one\n')
    git(root, "add", "--intent-to-add", ".")
    assert stale.reasons(root) == {"propose": []}
    write(root, CODE, '"""What it is."""\nx = 2\n')
    assert "changed since" in str(stale.reasons(root))
    git(root, "commit", "-qam", "second")
    assert "changed since" in str(stale.reasons(root))
    result(root, "propose", {"git": git(root, "rev-parse", "HEAD"), "dirty": False})
    assert stale.reasons(root) == {"propose": []}


def test_what_a_job_saves_and_takes_up_again_is_in_no_result(root: Path) -> None:
    file = "rollspec/engine/operations.py"
    write(root, file, "def _load(x):\n    return x\n\n\ndef _swap(x):\n    return x\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "operations")
    result(root, "control", {"git": git(root, "rev-parse", "HEAD"), "dirty": False})
    write(root, file, "def _load(x):\n    return 2 * x\n\n\ndef _swap(x):\n    return x\n")
    assert (stale.reasons(root) or {})["control"] == []
    write(root, file, "def _load(x):\n    return x\n\n\ndef _swap(x):\n    return 2 * x\n")
    assert "changed since" in str((stale.reasons(root) or {})["control"])
    for path, _, name in (p.partition("::") for p in stale.RESUME):
        assert name in _names(stale.ROOT / path), f"{path} has no function {name}"


def test_an_engine_without_a_head_is_as_it_was_where_only_heads_change(root: Path) -> None:
    file = "rollspec/config/sections.py"
    write(root, file, "class ModelDrafterConfig:\n    k = 1\n\n\nclass TuningConfig:\n    k = 1\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "sections")
    for name in ("control", "peers-demo"):
        result(root, name, {"git": git(root, "rev-parse", "HEAD"), "dirty": False})
    write(root, file, "class ModelDrafterConfig:\n    k = 2\n\n\nclass TuningConfig:\n    k = 1\n")
    write(root, "rollspec/engine/vllm/specialists.py", "x = 1\n")
    git(root, "add", "--intent-to-add", ".")
    found = stale.reasons(root) or {}
    assert found["control"] == [] and "changed since" in str(found["peers-demo"])
    write(root, file, "class ModelDrafterConfig:\n    k = 2\n\n\nclass TuningConfig:\n    k = 2\n")
    assert "changed since" in str((stale.reasons(root) or {})["control"])


def test_what_cannot_be_checked_out_again_is_stale(root: Path) -> None:
    head = git(root, "rev-parse", "HEAD")
    for name, provenance, why in (
        ("propose", {"git": head, "dirty": True}, "local changes"),
        ("tuner", {"git_sha": f"{head} with local changes"}, "local changes"),
        ("replay", {"git": "f" * 40, "dirty": False}, "ffffffff is not in this history"),
        ("runners", {"cores": 2}, "names no commit"),
        ("teachers", {"git": head, "dirty": False, "commits": ["e" * 40]}, "eeeeeeee is not in this history"),
    ):
        result(root, name, provenance)
        found = stale.reasons(root)
        assert found is not None and len(found[name]) == 1 and why in found[name][0], name
    git(root, "checkout", "-qb", "side")
    git(root, "commit", "-q", "--allow-empty", "-m", "aside")
    result(root, "propose", {"git": git(root, "rev-parse", "HEAD"), "dirty": False})
    git(root, "checkout", "-q", "-")
    assert "is not in this history" in str((stale.reasons(root) or {})["propose"])


def test_without_the_whole_history_nothing_is_said(root: Path, tmp_path: Path) -> None:
    git(root, "add", ".")
    git(root, "commit", "-qm", "second")
    git(tmp_path, "clone", "-q", "--depth", "1", root.as_uri(), "shallow")
    assert stale.reasons(tmp_path / "shallow") is None and stale.reasons(root) is not None
    (tmp_path / "plain").mkdir()
    assert stale.reasons(tmp_path / "plain") is None


def test_a_result_that_measures_nothing_known_is_refused(root: Path) -> None:
    result(root, "new", {})
    with pytest.raises(ValueError, match=r"new\.json has no line in MEASURES"):
        stale.reasons(root)


def test_every_result_says_what_it_measures() -> None:
    names = {path.stem for path in (stale.ROOT / stale.RESULTS).glob("*.json")}
    assert names <= set(stale.MEASURES)
    paths = {p.removeprefix(":(exclude)").partition("::") for paths in stale.MEASURES.values() for p in paths}
    missing = [
        p for p, _, name in paths if not (stale.ROOT / p).exists() or (name and name not in _names(stale.ROOT / p))
    ]
    assert not missing


def _names(path: Path) -> set[str]:
    """Functions and classes of a module."""
    return {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}


def test_pages_mark_what_is_stale_and_nothing_else() -> None:
    text = "[`harm.json`](x/harm.json) and `benchmarks/results/demo.json` *(stale)*, `demo-0.32.json`, `other.json`"
    state = {"harm": ["old"], "demo": [], "demo-0.32": ["old"]}
    want = (
        "[`harm.json`](x/harm.json) *(stale)* and `benchmarks/results/demo.json`, `demo-0.32.json` *(stale)*, "
        "`other.json`"
    )
    assert results.marked(text, state) == want == results.marked(want, state)


def test_a_result_says_itself_that_it_is_stale_and_is_else_left_alone() -> None:
    for text in ('{\n  "benchmark": "x",\n  "n": 1.50\n}\n', '{"benchmark": "x"}', '{\n "a": {"stale": true}\n}\n'):
        flagged = results.flagged(text, True)
        assert json.loads(flagged) == {"stale": True, **json.loads(text)}
        assert results.flagged(flagged, True) == flagged and results.flagged(flagged, False) == text
        assert results.flagged(text, False) == text


def test_every_result_says_whether_it_is_stale() -> None:
    found = stale.reasons()
    if found is None:
        pytest.skip("the whole history is not here")
    said = {p.stem: json.loads(p.read_bytes()).get("stale", False) for p in (stale.ROOT / stale.RESULTS).glob("*.json")}
    assert said == {name: bool(why) for name, why in found.items()}, "run `python -m scripts.generate`"


def test_pages_name_no_result_that_is_not_there() -> None:
    assert results.unknown("`benchmarks/results/control.json`, benchmarks/results/nothing.json") == ["nothing"]
    for page in results.PAGES:
        assert results.unknown(page.FILE.read_text("utf-8")) == [], page.FILE


def test_numbers_of_a_page_are_those_of_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = results.Page(tmp_path / "page.md")
    page.FILE.write_text("a\n<!-- results: control -->\nspeed 7.00x\n<!-- end of results -->\nb\n")
    monkeypatch.setattr(results, "found", lambda: {"control": ["old"]})
    text = page.render()
    r = json.loads((stale.ROOT / stale.RESULTS / "control.json").read_bytes())["on_over_off"]["4"]
    assert f"{1 / r['median']:.2f}x" in text and "7.00x" not in text
    assert "`benchmarks/results/control.json` *(stale)*" in text and text.startswith("a\n") and text.endswith("\nb\n")
    page.FILE.write_text(text)
    assert page.render() == text
    page.FILE.write_text("<!-- results: nothing -->\n<!-- end of results -->\n")
    with pytest.raises(KeyError):
        page.render()


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_headline_is_generated(name: str) -> None:
    """Every number with an x behind it stands between the marks of a table that comes from results."""
    text = (stale.ROOT / name).read_text(encoding="utf-8")
    assert "<!-- results: headline -->" in text
    assert re.findall(r"\d\.\d+x", results.BLOCK.sub("", text)) == []


def test_the_pages_are_marked() -> None:
    assert len(results.PAGES) > 10
    assert [p.FILE.name for p in results.PAGES if p.FILE.read_text("utf-8") != p.render()] == [], (
        "run `python -m scripts.generate`"
    )


def test_every_result_is_named_on_a_page_which_then_shows_that_it_is_stale() -> None:
    pages = [stale.ROOT / "README.md", *(stale.ROOT / "docs").glob("*.md"), *(stale.ROOT / "examples").glob("*/*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    files = {path.name for path in (stale.ROOT / stale.RESULTS).glob("*.json")}
    assert {name for name in files if f"benchmarks/results/{name}" not in text} == set()
