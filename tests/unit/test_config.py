"""Configuration: layers, refusals that name the nearest key, and every preset of configs/."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import get_args

import pytest

from drafter_online.recipes import RECIPES
from drafter_online.trainer import DrafterTraining
from rollspec.config import RollspecConfig, is_resolved, knobs, presets, resolve, switched_on
from rollspec.config.gone import GONE
from rollspec.config.sections import MOST_TRAINED, LearnedConfig, TrainingConfig
from rollspec.errors import ConfigError
from rollspec.tuning.tuner import Tuner

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_preset_loads_by_name_and_by_path_and_says_what_it_is(path: Path) -> None:
    by_name = RollspecConfig.load(path.stem, env={})
    by_path = RollspecConfig.load(path, env={})
    assert by_name.preset == path.stem
    assert by_name.model_copy(update={"preset": by_path.preset}) == by_path
    assert path.read_text().startswith(f"# {path.stem}: ")


def test_presets_are_those_of_the_checkout() -> None:
    assert set(presets()) == {p.stem for p in CONFIGS} >= {"default"}


MEANS: dict[str, dict[str, object]] = {
    "aurora": {
        "proposal.drafters": ["eagle3"],
        "proposal.k_max": 5,
        "proposal.learned.k_max": 5,
        "proposal.learned.canary_drafts": 0,
        "proposal.budget.policy": "fixed",
        "drafter.mode": "idle",
        "drafter.publish_every": 50,
        "drafter.training.recipe": "aurora",
        "tuning.policy": "static",
        "tuning.arms": [5],
        "tuning.guard.enabled": False,
    },
    "banditspec": {"proposal.budget.policy": "ucbspec", "tuning.policy": "static", "tuning.guard.enabled": False},
    "consensus": {"proposal.drafters": ["consensus"], "proposal.budget.length_weight": 0.0},
    "coupled": {"mode": "coupled"},
    "coupled_reuse": {"mode": "coupled", "reuse.mode": "coupled"},
    "das": {"proposal.budget.length_weight": 0.5},
    "day0": {
        "proposal.drafters": ["eagle3"],
        "drafter.mode": "idle",
        "drafter.publish_every": 25,
        "drafter.capture.share": 0.05,
    },
    "default": {},
    "hierarchy": {"proposal.drafters": ["hierarchy"], "proposal.k_max": 4, "proposal.budget.length_weight": 0.0},
    "disco": {"proposal.budget.policy": "disco", "tuning.policy": "static", "tuning.guard.enabled": False},
    "eesd": {"proposal.budget.policy": "eesd", "tuning.policy": "static", "tuning.guard.enabled": False},
    "exp3spec": {"proposal.budget.policy": "exp3spec", "tuning.policy": "static", "tuning.guard.enabled": False},
    "long_tail": {"proposal.drafters": ["suffix", "eagle3"], "drafter.mode": "idle"},
    "osd": {
        "proposal.drafters": ["eagle3"],
        "proposal.k_max": 5,
        "proposal.learned.k_max": 5,
        "proposal.learned.canary_drafts": 0,
        "proposal.budget.policy": "fixed",
        "drafter.mode": "idle",
        "drafter.publish_every": 10,
        "drafter.training.recipe": "osd",
        "tuning.policy": "static",
        "tuning.arms": [5],
        "tuning.guard.enabled": False,
    },
    "respec": {
        "proposal.drafters": ["eagle3"],
        "proposal.budget.policy": "fixed",
        "drafter.mode": "idle",
        "drafter.training.recipe": "respec",
        "tuning.policy": "respec",
        "tuning.arms": [0, 2, 4],
        "tuning.guard.enabled": False,
    },
    "rhymerl": {
        "proposal.suffix.sources": ["past"],
        "proposal.suffix.window": 1,
        "proposal.budget.length_weight": 0.0,
    },
    "seer": {"proposal.suffix.sources": ["siblings"], "proposal.budget.length_weight": 0.0},
    "serve": {
        "proposal.drafters": ["suffix", "eagle3"],
        "drafter.mode": "dedicated",
        "drafter.endpoint": "tcp://127.0.0.1:5765",
    },
    "smartspec": {
        "proposal.k_max": 8,
        "proposal.budget.policy": "fixed",
        "tuning.policy": "smartspec",
        "tuning.arms": [0, 1, 2, 3, 4, 5, 6, 7, 8],
        "tuning.guard.enabled": False,
    },
    "spec_rl": {
        "reuse.mode": "lenient",
        "reuse.bias": 0.5,
        "tuning.policy": "static",
        "tuning.arms": [0],
        "tuning.guard.enabled": False,
    },
    "stand": {"proposal.drafters": ["stand"], "proposal.budget.length_weight": 0.0},
    "specdec++": {"proposal.budget.policy": "specdec++", "tuning.policy": "static", "tuning.guard.enabled": False},
    "svip": {"proposal.budget.policy": "svip", "tuning.policy": "static", "tuning.guard.enabled": False},
    "taps": {
        "proposal.drafters": ["eagle3"],
        "proposal.k_max": 4,
        "proposal.budget.policy": "fixed",
        "tuning.policy": "static",
        "tuning.arms": [4],
        "tuning.guard.enabled": False,
    },
    "tetris": {
        "proposal.k_max": 6,
        "proposal.budget.policy": "tetris",
        "tuning.policy": "static",
        "tuning.arms": [6],
        "tuning.guard.enabled": False,
    },
    "suffix_only": {"proposal.budget.policy": "fixed", "tuning.policy": "static", "tuning.guard.enabled": False},
    "tlt": {
        "proposal.drafters": ["suffix", "eagle3"],
        "proposal.k_max": 8,
        "proposal.learned.k_max": 8,
        "proposal.budget.policy": "fixed",
        "drafter.mode": "idle",
        "tuning.policy": "beg_mab",
        "tuning.arms": [0, 1, 2, 4, 8],
        "tuning.options.sets": {"1": [8], "4": [4, 8], "16": [2, 4], "32": [1, 2], "64": [0]},
        "tuning.guard.enabled": False,
    },
    "token_recycling": {
        "proposal.drafters": ["token_recycling"],
        "proposal.k_max": 6,
        "proposal.budget.length_weight": 0.0,
    },
}
"""What each preset changes of the built-in values."""


@pytest.mark.parametrize("name", sorted(presets()))
def test_presets_mean_what_they_meant(name: str) -> None:
    def flat(config: RollspecConfig) -> dict[str, object]:
        return {
            n: functools.reduce(lambda at, part: at[part], n.split("."), config.to_dict())
            for n, *_ in knobs(RollspecConfig)
        }

    plain = flat(RollspecConfig()) | {"preset": name}
    assert {k: v for k, v in flat(resolve(name, env={})).items() if v != plain[k]} == MEANS[name]


PUBLISHED = (
    "aurora", "banditspec", "consensus", "das", "disco", "eesd", "exp3spec", "hierarchy", "osd", "respec", "rhymerl",
    "seer", "smartspec", "spec_rl", "specdec++", "stand", "svip", "taps", "tetris", "tlt", "token_recycling",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_of_published_systems_say_what_is_theirs_and_what_is_not(name: str) -> None:
    header = "".join(line[2:] for line in presets()[name].read_text().splitlines(True) if line.startswith("# "))
    assert "arXiv:" in header and "Carried over: " in header and "Differs: " in header


def test_presets_of_published_systems_play_what_they_are_named_for() -> None:
    plays = {name: RollspecConfig.load(name, env={}) for name in PUBLISHED}
    tuners = {name: Tuner(c.tuning, c.proposal.k_max, c.proposal.drafters) for name, c in plays.items()}

    def chosen(name: str, batch: int) -> str:
        return tuners[name].arms[tuners[name].plan(batch, 0.0).played].name

    assert [chosen("aurora", b) for b in (1, 64)] == [chosen("osd", b) for b in (1, 64)] == ["eagle3:5", "eagle3:5"]
    assert tuners["respec"].policy.name == "respec" and tuners["smartspec"].policy.name == "smartspec"
    for batch, lengths in ((1, {8}), (4, {4, 8}), (9, {2, 4}), (32, {1, 2}), (33, {0}), (256, {0})):
        played = {chosen("tlt", batch) for _ in range(200)}  # it explores, within the set
        assert played == {f"{d}:{k}" if k else "none" for k in lengths for d in ("suffix", "suffix+eagle3")}, batch
    terms = {name: DrafterTraining(**plays[name].drafter_training) for name in ("aurora", "osd", "respec", "tlt")}
    assert terms["respec"].reward_beta > 0
    assert terms["aurora"].accept and terms["aurora"].rejected and terms["aurora"].step_decay == 0.8
    assert terms["osd"].rejected and not terms["osd"].accept
    assert not terms["tlt"].rejected and plays["tlt"].drafter.captures
    assert plays["seer"].proposal.suffix.sources == ("siblings",)
    assert plays["rhymerl"].proposal.suffix.sources == ("past",)


TRAINS = {
    "aurora": {"learning_rate": 1e-5, "warmup_steps": 0, "clip_norm": 2.5, "rejected": 0.5},
    "osd": {"learning_rate": 1e-5, "warmup_steps": 0, "accept": 0.0, "rejected": 1.0},
    "respec": {"reward_beta": 1.0},
    "tlt": {},
}
"""What each preset changes of how a head is trained."""


@pytest.mark.parametrize("name", TRAINS)
def test_presets_train_what_they_serve(name: str) -> None:
    """And a position is trained for every one that the preset drafts."""
    config = resolve(name, env={})
    fields = TRAINS[name] | {"ttt_steps": {"aurora": 5, "osd": 5, "tlt": 8}.get(name, 4)}
    assert config.proposal.learned.k_max == fields["ttt_steps"]
    assert DrafterTraining(**config.drafter_training) == DrafterTraining(**fields)
    faster = config.change({"drafter.training.learning_rate": 0.5, "drafter.training.batch_tokens": 64})
    assert DrafterTraining(**faster.drafter_training) == DrafterTraining(
        **fields | {"learning_rate": 0.5, "batch_tokens": 64}
    )


def test_every_recipe_can_be_set_and_trained_by() -> None:
    assert list(get_args(TrainingConfig.model_fields["recipe"].annotation)) == list(RECIPES)
    for name, fields in RECIPES.items():
        config = resolve({"drafter.training.recipe": name}, env={})
        assert DrafterTraining(**config.drafter_training) == DrafterTraining(**fields, ttt_steps=4)


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
        ({"drafter.training": {"betas": [0, 1]}}, "is gone; a job trains as drafter.training.recipe has it"),
        ({"drafter": {"buffer": {"zzz": 1, "keep_versions": 2}}}, "'drafter.buffer.keep_versions' (value 2) in the gi"),
        ({"drafter.mode": "capture"}, "drafter.mode = capture is for an EAGLE-3 head, and proposal.drafters = ['suff"),
        ({"tuning": {"options": {"epsilon": 1}}}, "is gone; published policies are played with the numbers of their"),
        ({"tuning.options.table": {4: 2}}, "tuning.options.table is set and tuning.policy = hedge"),
        (
            {"tuning.options.sets": {4: [2]}},
            "tuning.options.sets is set and tuning.policy = hedge: set that to beg_mab",
        ),
        ({"tuning": {"policy": "table", "options": {"table": {4: 3}}}}, "K = 3, which is not among tuning.arms [0, 1"),
    ],
)
def test_settings_of_training_and_buffer_are_checked_at_the_start(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        RollspecConfig.load(given, env={})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "sampling", "divergence"),
    [
        ({}, "greedy", "top1"),
        ({"mode": "coupled"}, "probabilistic", "lk_hybrid"),
        ({"mode": "coupled", "coupled.drafts": "greedy"}, "greedy", "top1"),
    ],
)
def test_training_follows_how_the_engine_draws_drafts(given: dict[str, object], sampling: str, divergence: str) -> None:
    from rollspec.engine import daemon

    config = RollspecConfig.load({"drafter.training.recipe": "matched", **given}, env={})
    for settings in (config.drafter_training, daemon.options(config, "target", Path("folder"))["training"]):
        terms = DrafterTraining(**settings)
        assert (terms.draft_sampling, terms.divergence) == (sampling, divergence)


def test_settings_of_training_are_those_of_the_trainer() -> None:
    training = RollspecConfig().drafter_training
    assert DrafterTraining(**training) == DrafterTraining() and DrafterTraining().ttt_steps == LearnedConfig().k_max
    longest = RollspecConfig.load({"proposal.learned.k_max": 16}, env={}).drafter_training
    assert DrafterTraining(**longest).ttt_steps == MOST_TRAINED
    bounds = {n: f.metadata for n, f in DrafterTraining.model_fields.items()}
    assert {n: bounds[n] for n in TrainingConfig.model_fields if n != "recipe"} == {
        n: f.metadata for n, f in TrainingConfig.model_fields.items() if n != "recipe"
    }


def test_day_0_starts_from_nothing_and_may_rest() -> None:
    c = RollspecConfig.load("day0", env={})
    assert c.proposal.learned.model is None and c.drafter.captures and c.proposal.learned.canary_drafts
    assert "none" in {a.name for a in Tuner(c.tuning, c.proposal.k_max, c.proposal.drafters).arms}


def test_the_default_preset_is_the_built_in_defaults() -> None:
    assert RollspecConfig.load(env={}) == RollspecConfig()


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("preset: suffix_only\nproposal: {k_max: 3, suffix: {window: 7}}\n")
    env = {"ROLLSPEC__PROPOSAL__K_MAX": "4", "ROLLSPEC__HISTORY__MAX_BYTES": "100000", "OTHER": "x"}
    config = RollspecConfig.load(file, env=env, overrides=["history.max_bytes=200000"])
    assert config.preset == "suffix_only"
    assert config.proposal.budget.policy == "fixed"  # from the preset
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
            assert found.drafter.dir == Path(f"/heads/replica_{number}")
    assert resolve({**sent, "proposal.k_max": 3}).history.dir == Path("/data/replica_1")
    assert resolve(sent, overrides=["history.dir=/mine"]).history.dir == Path("/mine")
    del sent["history"]["dir"]
    assert not is_resolved(sent) and resolve(sent).history.dir == Path("/data")


def test_replicas_share_a_trainer_of_their_job() -> None:
    config = resolve("serve", overrides={"history.dir": "/data", "drafter.dir": "/job"}, env={}).of_replica(2)
    assert (config.history.dir, config.drafter.dir) == (Path("/data/replica_2"), Path("/job"))
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
    "rollspec/cli.py", "rollspec/doctor.py", "examples/demo/cli.py", "examples/demo/job.py",
    "rollspec/engine/vllm/plugin.py", "rollspec/engine/vllm/generate.py", "rollspec/audit/engine.py",
    "integrations/rollspec_openrlhf/__init__.py", "integrations/rollspec_trl/__init__.py",
    "integrations/rollspec_verl/options.py",
}  # fmt: skip


def test_settings_are_resolved_where_a_job_starts_and_are_data_everywhere_else() -> None:
    root = Path(__file__).parents[2]
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
        ({}, ["proposal.sufix.window=1"], ["'proposal.sufix'", "the overrides"]),
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


def test_shared_versions_need_a_drafter_with_weights() -> None:
    with pytest.raises(ConfigError, match=r"drafter.versions = /v .* add eagle3"):
        RollspecConfig.load({"drafter.versions": "/v"}, env={})
    assert RollspecConfig.load({"preset": "day0", "drafter.versions": "/v"}, env={}).drafter.versions == Path("/v")


def test_a_knob_that_is_gone_says_what_is_in_its_place() -> None:
    assert not set(GONE) & {name for name, *_ in knobs(RollspecConfig)}
    for name in GONE:
        with pytest.raises(ConfigError) as caught:
            resolve({name: 1}, env={})
        message = str(caught.value)
        assert f"{name!r} (value 1) in the given mapping is gone; {GONE[name]}." in message and "\n" not in message


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
