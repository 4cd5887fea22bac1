"""Configuration: layers, refusals that name the nearest key, settings as data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollspec.config import RollspecConfig, is_resolved, knobs, resolve, switched_on
from rollspec.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"drafter.training.recip": 2}, "'drafter.training.recip' (value 2) in the given mapping; did you "),
        ({"drafter.capture": {"zzz": 2}}, "unknown key 'drafter.capture.zzz' (value 2)"),
        (
            {"drafter.training": {"batch_tokens": 0}},
            "drafter.training.batch_tokens = 0 cannot be used: Input should be g",
        ),
        ({"drafter.training": {"recip": "tv"}}, "did you mean 'drafter.training.recipe'?"),
        (
            {"drafter.training": {"recipe": "tb"}},
            "drafter.training.recipe = 'tb' cannot be used: Input should be",
        ),
        ({"drafter.training": {"betas": [0, 1]}}, "unknown key 'drafter.training.betas' (value [0, 1])"),
        (
            {"drafter": {"buffer": {"zzz": 1, "keep_versions": 2}}},
            "unknown key 'drafter.buffer' (value {'zzz': 1, 'keep_versions': 2}) in the given",
        ),
        ({"drafter.ray.resources.gpu": 1}, "'drafter.ray.resources.gpu' (value 1) in the given mapping; did you mean"),
        (
            {"drafter.mode": "capture"},
            "drafter.mode = capture is for a draft head or draft model, and proposal.drafters = ['suf",
        ),
        (
            {"preset": "long_tail", "drafter.training": {"recipe": "leap"}, "proposal.head.canary_drafts": 0},
            "proposal.head.canary_drafts = 0 lets them serve unjudged: set that above 0, or another recipe",
        ),
        ({"tuning": {"options": {"epsilon": 1}}}, "unknown key 'tuning.options.epsilon' (value 1)"),
        ({"tuning.options.table": {4: 2}}, "tuning.options.table is set and tuning.strategy = hedge"),
        (
            {"tuning.options.sets": {4: [2]}},
            "tuning.options.sets is set and tuning.strategy = hedge: set that to beg_mab",
        ),
        (
            {"tuning": {"strategy": "table", "options": {"table": {4: 3}}}},
            "K = 3, which is not among tuning.arms [0, 1",
        ),
    ],
)
def test_settings_of_training_and_buffer_are_checked_at_the_start(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        RollspecConfig.load(given, env={})
    assert "\n" not in str(caught.value)


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("preset: suffix_only\nproposal: {k_max: 3, suffix: {window: 7}}\n")
    env = {"ROLLSPEC__PROPOSAL__K_MAX": "4", "ROLLSPEC__HISTORY__MAX_BYTES": "100000", "OTHER": "x"}
    config = RollspecConfig.load(file, env=env, overrides=["history.max_bytes=200000"])
    assert config.preset == "suffix_only"
    assert config.proposal.budget.rule == "fixed"  # from the preset
    assert config.proposal.suffix.window == 7  # from the file
    assert config.proposal.k_max == 4  # the environment over the file
    assert config.history.max_bytes == 200_000  # the override over the environment


def test_off_without_quotes_is_off_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("preset: long_tail\ndrafter: {mode: off}\n")
    assert RollspecConfig.load(file, env={}).drafter.mode == "off"
    assert RollspecConfig.load("long_tail", env={}, overrides=["drafter.mode=off"]).drafter.mode == "off"


def test_mappings_may_be_dotted_or_nested() -> None:
    dotted = {"preset": "suffix_only", "proposal.suffix.window": 2, "proposal.k_max": 5}
    nested = {"preset": "suffix_only", "proposal": {"k_max": 5, "suffix": {"window": 2}}}
    config = RollspecConfig.load(dotted, env={})
    assert config == RollspecConfig.load(nested, env={})
    assert (config.proposal.suffix.window, config.proposal.k_max) == (2, 5)
    assert RollspecConfig.load(None, overrides={"proposal.k_max": 6}, env={}).proposal.k_max == 6


def test_a_section_may_be_given_dotted_and_nested_at_once() -> None:
    config = RollspecConfig.load({"proposal.k_max": 5, "proposal": {"suffix": {"window": 2}}}, env={})
    assert (config.proposal.suffix.window, config.proposal.k_max) == (2, 5)


def test_to_dict_is_json_and_comes_back_equal(tmp_path: Path) -> None:
    config = RollspecConfig.load("suffix_only", overrides=[f"history.dir={tmp_path}", "proposal.k_max=9"], env={})
    assert RollspecConfig.load(json.loads(json.dumps(config.to_dict())), env={}) == config
    assert RollspecConfig.load(config, env={}) == config


def test_the_environment_is_read_once_and_does_not_undo_what_a_job_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica's folders are its own, also where the environment set the job's."""
    monkeypatch.setenv("ROLLSPEC__HISTORY__DIR", "/data")
    monkeypatch.setenv("ROLLSPEC__DRAFTER__DIR", "/heads")
    job = resolve("long_tail")
    for number in (0, 1):
        sent = json.loads(json.dumps(job.of_replica(number).to_dict()))
        for found in (RollspecConfig.from_dict(sent), resolve(sent), resolve(RollspecConfig.from_dict(sent))):
            assert found.history.dir == Path(f"/data/replica_{number}")
            assert found.drafter.dir == Path("/heads"), "their trainer's"
    assert resolve({**sent, "proposal.k_max": 3}).history.dir == Path("/data/replica_1")
    assert resolve(sent, overrides=["history.dir=/mine"]).history.dir == Path("/mine")
    del sent["history"]["dir"]
    assert not is_resolved(sent) and resolve(sent).history.dir == Path("/data")


def test_replicas_share_a_trainer_of_their_job() -> None:
    config = resolve("serve", overrides={"history.dir": "/data", "drafter.dir": "/job"}, env={}).of_replica(2)
    assert (config.history.dir, config.drafter.dir) == (Path("/data/replica_2"), Path("/job"))
    found = resolve("long_tail", overrides={"history.dir": "/data"}, env={}).of_replica(2)
    assert (found.history.dir, found.drafter.dir) == (Path("/data/replica_2"), Path("/data/drafter"))
    captures = resolve("long_tail", overrides={"drafter.mode": "capture", "drafter.dir": "/job"}, env={}).of_replica(2)
    assert captures.drafter.dir == Path("/job/replica_2"), "nothing is shared"
    plain = resolve(env={})
    assert plain.of_replica(1) is plain


def test_resolved_settings_are_whole_or_refused() -> None:
    whole = resolve("suffix_only", env={}).to_dict()
    del whole["proposal"]["k_max"]
    with pytest.raises(ConfigError, match=r"lack 'proposal\.k_max'"):
        RollspecConfig.from_dict(whole)
    with pytest.raises(ConfigError, match=r"proposal\.k_maks"):
        RollspecConfig.from_dict(resolve(env={}).to_dict() | {"proposal.k_maks": 3})


def test_changed_settings_are_checked_again() -> None:
    config = resolve("suffix_only", env={})
    assert config.change({"proposal.k_max": 3}).proposal.k_max == 3 and config.proposal.k_max == 16
    with pytest.raises(ConfigError, match=r"tuning\.arms has 16"):
        config.change({"tuning.arms": [16]}).change({"proposal.k_max": 3})


STARTS = {  # where a job, an engine or a command starts
    "rollspec/doctor.py", "examples/demo/cli.py", "examples/demo/job.py",
    "rollspec/engine/vllm/plugin.py", "rollspec/engine/vllm/generate.py", "rollspec/audit/engine.py",
    "integrations/rollspec_openrlhf/__init__.py", "integrations/rollspec_trl/__init__.py",
    "integrations/rollspec_verl/options.py",
}  # fmt: skip


def test_settings_are_resolved_where_a_job_starts_and_are_data_everywhere_else() -> None:
    root = Path(__file__).parents[4]
    files = [
        p
        for top in ("rollspec", "drafter_online", "integrations", "cpu", "examples/demo")
        for p in (root / top).rglob("*.py")
    ]
    texts = {str(p.relative_to(root)): p.read_text() for p in files}
    texts = {name: text for name, text in texts.items() if not name.startswith("rollspec/config/")}
    assert {name for name, text in texts.items() if re.search(r"import .*\bresolve\b", text)} == STARTS
    loads = [n for n, text in texts.items() if "RollspecConfig.load(" in text.replace("rollspec.RollspecConfig", "")]
    assert not loads


def test_the_switch_names_a_preset_or_nothing() -> None:
    assert switched_on({"ROLLSPEC": "day0"}) == "day0"
    assert switched_on({"ROLLSPEC": ""}) is switched_on({}) is None


@pytest.mark.parametrize(
    ("source", "overrides", "says"),
    [
        ("suffix_onyl", [], ["'suffix_onyl'", "did you mean 'suffix_only'"]),
        ("missing.yaml", [], ["'missing.yaml'", "does not exist"]),
        ({"proposal.k_maks": 8}, [], ["'proposal.k_maks'", "8", "did you mean 'proposal.k_max'"]),
        ({"k_max": 8}, [], ["'k_max'", "did you mean 'proposal.k_max'"]),
        ({}, ["proposal.sufix.window=1"], ["'proposal.sufix.window'", "the overrides; did you mean"]),
        ({}, ["proposal.k_max"], ["'proposal.k_max'", "'='"]),
        ({}, ["proposal.k_max=0"], ["proposal.k_max = 0", "greater than or equal to 1"]),
        ({}, ["proposal.k_max=many"], ["proposal.k_max", "'many'"]),
        ({}, ["mode=lenient"], ["mode = 'lenient'", "'standard'"]),
        ({"proposal": 3}, [], ["proposal", "3"]),
        (
            {"proposal.suffix": {"sources": []}},
            [],
            ["proposal.suffix.sources = []", "at least 1 item"],
        ),
    ],
)
def test_what_cannot_be_used_is_one_sentence_that_names_it(
    source: object, overrides: list[str], says: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        RollspecConfig.load(source, overrides=overrides, env={})  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("rollspec: ")
    assert "\n" not in message
    for part in says:
        assert part in message


@pytest.mark.parametrize(("text", "says"), [("[1, 2]", "list"), ("a: [", "cannot be read as YAML")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        RollspecConfig.load(file, env={})
    assert str(file) in str(caught.value)


def test_an_unknown_key_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="the environment"):
        RollspecConfig.load(env={"ROLLSPEC__PROPOSAL__KMAX": "3"})


def test_every_knob_is_described_and_reachable_by_its_name() -> None:
    defaults = RollspecConfig().model_dump()
    names = [name for name, *_ in knobs(RollspecConfig)]
    assert len(names) == len(set(names)) > 10
    for name, kind, default, description in knobs(RollspecConfig):
        value = defaults
        for part in name.split("."):
            value = value[part]
        assert value == default, name
        assert kind
        assert description.endswith("."), f"{name} needs a sentence"


def test_a_configuration_cannot_be_changed_after_it_is_made() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RollspecConfig().enabled = False  # type: ignore[misc]
