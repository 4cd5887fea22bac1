"""What the documentation names exists: commands and their options, knobs, metrics, variables, files, messages."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from rollspec import cli
from rollspec.config import RollspecConfig, knobs, presets
from rollspec.errors import ConfigError
from rollspec.telemetry.metrics import find
from scripts.generate import configuration

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [p.relative_to(ROOT).as_posix() for p in PAGES]
KNOBS = {name for name, *_ in knobs(RollspecConfig)}
SECTIONS = {name.rpartition(".")[0] for name in KNOBS} - {""}
TOP = {name.split(".")[0] for name in SECTIONS}
FILES = (".py", ".json", ".jsonl", ".safetensors", ".yaml", ".md", ".csv", ".html")
FENCE = re.compile(r"^( *)```(\w*).*?\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

page = pytest.mark.parametrize("path", PAGES, ids=NAMES)


def fences(path: Path) -> list[tuple[str, str]]:
    """(language, text) of every code block."""
    return [(language, text) for _, language, text in FENCE.findall(path.read_text(encoding="utf-8"))]


def spans(path: Path) -> list[str]:
    """Inline code, as the reader sees it."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    return [s.replace("\\|", "|") for s in re.findall(r"`([^`\n]+)`", text)]


def code(path: Path) -> list[str]:
    """Inline code, and the lines of code blocks without their comments."""
    lines = [line for _, text in fences(path) for line in text.splitlines()]
    return [*spans(path), *(re.sub(r"\s{2,}# .*| # .*", "", line) for line in lines)]


# ---- commands


def commands(path: Path) -> Iterator[list[str]]:
    for text in code(path):
        # A command begins the text, or follows variables, a prompt's `&&` or another program's name.
        found = re.match(r"^\s*(?:[A-Z_]+=\S* )*(rollspec (?:[a-z]|-).*)$", text)
        if found and not re.match(r"rollspec [a-z]+:", found[1]):
            yield shlex.split(found[1])[1:]


def check(words: list[str]) -> None:
    """Walk the command tree along `words`; raises ValueError at the first that is not there."""
    command: Any = None
    names: Any = cli.COMMANDS
    while words and names and not words[0].startswith("-"):
        name, *words = words
        if name.isupper() or "|" in words:  # RUN, NAME and the like, and "a | b", stand for one of several
            return
        if name not in names:
            raise ValueError(f"there is no command {name!r}")
        command = cli._load(name) if command is None else names[name]
        names = getattr(command, "commands", None)
    command = command or typer.main.get_command(cli.app)
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
    for word in words:
        if word.startswith("--") and word.split("=")[0] not in options:
            raise ValueError(f"{command.name} has no option {word}")
    for key, value in pairwise(words):
        if key == "--set" and value != "KEY=VALUE":
            RollspecConfig.load(overrides=[value], env={})
        if key == "--preset" and value not in presets():
            raise ValueError(f"there is no preset {value!r}")


@page
def test_commands_and_their_options(path: Path) -> None:
    for words in commands(path):
        try:
            check(words)
        except (ValueError, ConfigError) as e:
            pytest.fail(f"rollspec {' '.join(words)}: {e}")


def test_the_check_of_commands_sees_mistakes() -> None:
    check(["audit", "--model", "PATH", "--set", "proposal.k_max=8"])
    check(["config", "show", "default", "--set", "proposal.k_max=8"])
    for wrong in (
        "bench nothing",
        "audit --modell PATH",
        "audit --set proposal.kmax=8",
        "demo --preset suffix",
        "docter",
    ):
        with pytest.raises((ValueError, ConfigError)):
            check(wrong.split())
    assert [c for p in PAGES for c in commands(p)], "no command was found"


@page
def test_make_targets(path: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for text in code(path):
        for found in re.findall(r"(?:^|[A-Z]=\S* |\")\s*make ((?:[a-z-]+(?: |$))+)", text):
            assert set(found.split()) <= targets, text


@page
def test_modules_that_are_run(path: Path) -> None:
    for text in code(path):
        for module in re.findall(r"python -m ((?:rollspec|benchmarks|examples|drafter_online)[\w.]*)", text):
            files = [ROOT / folder / module.replace(".", "/") for folder in (".", "integrations", "cpu")]
            assert any(f.with_suffix(".py").is_file() or (f / "__main__.py").is_file() for f in files), text


# ---- configuration


def dotted(path: Path) -> Iterator[str]:
    for text in code(path):
        yield from re.findall(rf"(?<![\w./-])((?:{'|'.join(TOP)})(?:\.\w+)+(?:\.\w+)*)", text)


def known(name: str) -> bool:
    """Whether `name` is a knob, a section, or an entry of a knob that is a mapping."""
    return name in KNOBS | SECTIONS or any(
        name.startswith(f"{k}.") for k, kind, *_ in knobs(RollspecConfig) if "dict" in kind
    )


@page
def test_knobs(path: Path) -> None:
    for name in dotted(path):
        assert known(name) or name.endswith(FILES), f"{path.name} names {name}, which is no knob"


def test_the_check_of_knobs_sees_mistakes() -> None:
    assert known("proposal.k_max") and known("proposal.budget") and known("tuning.options.table")
    assert not known("proposal.kmax") and not known("tuning.options_")
    assert {"proposal.k_max", "history.dir"} <= {name for p in PAGES for name in dotted(p)}


@page
def test_configurations(path: Path) -> None:
    """YAML blocks, and mappings and presets given to verl, to `additional_config` and to the environment, load."""
    sources: list[Any] = [yaml.safe_load(text) for language, text in fences(path) if language == "yaml"]
    for text in code(path):
        for found in re.findall(r"custom\.rollspec=(\w+|\{[^'\"`]*\})", text):
            sources.append(yaml.safe_load(found.replace(":", ": ")))
        for found in re.findall(r"custom\.rollspec\.([\w.]+=\w+)", text):
            sources.append(dict([found.split("=")]))
        for found in re.findall(r"--additional-config '(\{.*\})'", text):
            sources.append(yaml.safe_load(found)["rollspec"])
        for name in re.findall(r"(?:^|\s)ROLLSPEC=(\w+)\b(?!\.yaml)", text):
            sources.append(name)
    for source in sources:
        RollspecConfig.load(source, env={})


@page
def test_environment_variables(path: Path) -> None:
    sources = [
        *ROOT.glob("rollspec/**/*.py"),
        *ROOT.glob("integrations/**/*.py"),
        *ROOT.glob("cpu/**/*.py"),
        *ROOT.glob("scripts/*.sh"),
    ]
    there = {v for file in sources for v in re.findall(r"\bROLLSPEC_[A-Z][A-Z_]*", file.read_text(encoding="utf-8"))}
    for text in code(path):
        for name in re.findall(r"\bROLLSPEC__([A-Z_]+)", text):
            assert name == "A__B" or known(name.lower().replace("__", ".")), text
        assert set(re.findall(r"\bROLLSPEC_[A-Z][A-Z_]*", text)) <= there, text


def test_the_configuration_page_is_up_to_date() -> None:
    assert configuration.FILE.read_text(encoding="utf-8") == configuration.render(), "run `python -m scripts.generate`"


def test_the_configuration_page_has_every_knob_preset_and_variable() -> None:
    text = configuration.render()
    assert all(text.count(f"| `{name}` |") == 1 for name in KNOBS)
    assert all(f"### `{name}`\n" in text for name in presets())
    code = "\n".join(file.read_text(encoding="utf-8") for file in ROOT.glob("rollspec/**/*.py"))
    read = set(re.findall(r'"(ROLLSPEC_[A-Z][A-Z_]*)"', code)) - {"ROLLSPEC_DEMO_JOB"}  # the demo's own mark
    assert all(f"`{name}`" in text for name in read)


# ---- metrics, files, messages, numbers


@page
def test_metrics(path: Path) -> None:
    for text in spans(path):
        if re.fullmatch(r"rollspec/[a-z]+/[\w<>:/]+\*?", text) and "." not in text and not (ROOT / text).exists():
            stem = text.rstrip("*")
            assert find(text) or (text.endswith("*") and any(m.startswith(stem) for m in metric_names())), text


def metric_names() -> list[str]:
    from rollspec.telemetry.metrics import TABLE

    return [row.name for row in TABLE]


@page
def test_files(path: Path) -> None:
    for text in spans(path):
        if re.fullmatch(r"(?:rollspec|integrations|cpu|tests|benchmarks|scripts|configs|examples|docs)/[\w./-]+", text):
            at = text.rstrip("/")
            # Metrics look like paths; written ones are results of benchmarks.
            made = at.startswith("benchmarks/results/") or find(at) is not None
            assert made or (ROOT / at).exists(), f"{path.name} names {text}, which is not there"
        elif re.fullmatch(r"(?:proposal|tuning|sampling|telemetry|engine)/\w+\.py", text):
            assert (ROOT / "rollspec" / text).is_file(), text


def names_in(file: Path) -> set[str]:
    """Functions of a module as `f`, methods as `C.f`."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef)}
    return found


def test_the_walks_of_the_architecture_lead_through_functions_that_exist() -> None:
    """Each step names a file and, up to the colon, functions of it; a walk is at most eight files."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    steps = re.findall(r"^(\d+)\. \[`([^`]+)`\]\(\.\./([^)]+)\), (.*?):", text, re.MULTILINE | re.DOTALL)
    assert len(steps) == len(re.findall(r"^\d+\. \[", text, re.MULTILINE)) > 20
    for number, shown, path, functions in steps:
        assert int(number) <= 8 and shown == path
        named = set(re.findall(r"`([^`]+)`", functions))
        assert named and named <= names_in(ROOT / path), f"{path} has no {named - names_in(ROOT / path)}"


def words_of_the_code() -> str:
    """Every string constant of the code, and the scripts."""
    found = [file.read_text(encoding="utf-8") for file in ROOT.glob("scripts/*.sh")]
    for folder in ("rollspec", "drafter_online", "integrations", "cpu", "examples/demo"):
        for file in ROOT.glob(f"{folder}/**/*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_messages_that_troubleshooting_quotes() -> None:
    """A quoted message is in the code, part by part between its `…`."""
    there = words_of_the_code()
    quoted = [s for s in spans(ROOT / "docs" / "troubleshooting.md") if "…" in s or s.startswith("rollspec:")]
    assert len(quoted) > 30
    for message in quoted:
        for part in message.removeprefix("rollspec setup: ").split("…"):
            part = part.strip(" ;.(),=:")
            assert part in there, f"{message!r}: {part!r} is in no message"


def test_numbers_on_the_first_page_are_those_of_the_readme() -> None:
    section = (ROOT / "docs" / "index.md").read_text().split("## What was measured")[1].split("\n## ")[0]
    readme = (ROOT / "README.md").read_text() + (ROOT / "docs" / "benchmarks.md").read_text()
    for number in re.findall(r"\d+\.\d+", section):
        assert number in readme, number


OTHER_WORDS = "|".join(
    (
        r"laws?|lawful|stands?[ _]aside|heeds?|woke|masters|errands?|count the cause",
        r"tak(?:e|es|en|ing)[ _](?:\w+?[ _])?back",  # roll back
        r"(?:always|(?:drafts?|tokens?|head|phrase) (?:is|are)) right|(?:is|are) right more often",  # accepted
        r"(?:offered|refused)[ _](?:tokens?|drafts?|proposals?)",  # draft tokens, rejected
        # Draft head; what a tuner learned is another thing.
        r"learned[ _](?:drafts?|drafters?|heads?|models?|length|engine|and[ _](?:suffix|hybrid))",
        r"(?-i:LEARNED|LearnedConfig)",
        r"whoever|nobody|told|heard|surest|harvest(?:ed|s)?|trials?",
    )
)
"""Words that another one has the place of, on pages and in code."""

THEIRS = re.compile(r"\btrial(?=: Any|, \*|[)=])|prefix_cache_hits|harvested_seconds")
"""TRL's argument, vLLM's counter, and a field of older results."""


def test_the_glossary_is_in_order_and_pages_use_its_words() -> None:
    terms = re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(), re.M)
    assert 20 <= len(terms) <= 25 and terms == sorted(terms, key=str.lower)
    for page in PAGES:
        other = re.findall(rf"\b(?:{OTHER_WORDS}|(?:go|goes|going|went) on)\b", page.read_text(), re.I)
        assert not other, f"{page.name}: {other}"


def others(words: str) -> re.Pattern[str]:
    """Finds them in code: in names part by part, in docstrings, comments and messages."""
    return re.compile(rf"(?<![^\W_])(?:{words})(?![^\W_])", re.I)


def test_code_uses_the_words_of_the_glossary() -> None:
    words = others(rf"{OTHER_WORDS}|ceilings?|hits?")
    folders = ("rollspec", "drafter_online", "integrations", "tests", "benchmarks")
    files = {f for folder in folders for f in (ROOT / folder).rglob("*.py")} - {Path(__file__)}
    assert len(files) > 300
    texts = {f: THEIRS.sub("", f.read_text(encoding="utf-8")) for f in files}
    found = {f"{f.relative_to(ROOT)}: {m[0]}" for f, text in texts.items() for m in words.finditer(text)}
    assert not found, sorted(found)


def test_the_check_of_words_sees_mistakes() -> None:
    words = others(OTHER_WORDS)
    for wrong in (
        "a drafter that is always right",
        "where they agree the drafts are right",
        "chance that a token of the phrase is right",
        "drafts that know the noise are right more often",
        "test_the_canary_takes_garbage_back",
        "what an engine takes back",
        "test_cut_is_the_first_refused_token",
        "if name in LEARNED:",
        "class LearnedConfig(Section):",
        "is for a learned drafter",
        "test_learned_and_suffix_drafts_follow",
        "test_coupled_learned_engine.py",
        '"learned_length": 1.0',
        "test_engines_are_told",
    ):
        assert words.search(wrong), wrong
    for fine in (
        "proposal.head.model",
        "ROLLSPEC__PROPOSAL__HEAD__MODEL=HEAD",
        "test_what_was_learned_is_kept",
        "a head that learned from drafts",
        "the tokens to the right",
        "versions that are refused",
    ):
        assert not words.search(fine), fine


# ---- modules that packages list


PACKAGES = sorted(f for f in ROOT.glob("*/**/__init__.py") if not {"tests", ".venv", "shared"} & set(f.parts))


def not_there(docstring: str, modules: set[str]) -> set[str]:
    """The modules that a package's docstring names, as `name` or name.py, and that are not among its `modules`.

    Names in backticks are taken for modules where one of them is.
    """
    quoted = set(re.findall(r"`([a-z]\w*)`", docstring))
    files = set(re.findall(r"(?:^|[;,] )(\w+)\.py\b", docstring, re.M))
    return ((quoted if quoted & modules else set()) | files) - modules


def test_modules_that_packages_list() -> None:
    assert len(PACKAGES) > 20
    for file in PACKAGES:
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        modules = {f.stem for f in file.parent.iterdir() if f.suffix == ".py" or (f / "__init__.py").is_file()}
        wrong = not_there(docstring, modules)
        assert not wrong, f"{file.relative_to(ROOT)} names {sorted(wrong)}, which it does not have"


def test_the_check_of_listed_modules_sees_mistakes() -> None:
    assert not_there("keys (`streams`), agreement (`health`)", {"streams", "agreement"}) == {"health"}
    assert not_there("idle.py   training; run train.py", {"streams"}) == {"idle"}
    assert not not_there("verl imports `external_lib`", {"streams"})
    assert not not_there("`Streams` is in `streams`", {"streams"})
