"""Every preset of configs/: what it changes, what it plays, and how it trains a head."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import get_args

import pytest

from drafter_online.recipes import RECIPES
from drafter_online.trainer import DrafterTraining
from rollspec.config import RollspecConfig, knobs, presets, resolve
from rollspec.config.sections import TrainingConfig
from rollspec.tuning.tuner import Tuner

CONFIGS = sorted((Path(__file__).parents[4] / "configs").glob("*.yaml"))


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
        "proposal.head.k_max": 5,
        "proposal.head.canary_drafts": 0,
        "proposal.budget.rule": "fixed",
        "drafter.mode": "dedicated",
        "drafter.publish_every": 50,
        "drafter.training.recipe": "aurora",
        "tuning.strategy": "static",
        "tuning.arms": [5],
        "tuning.guard.enabled": False,
    },
    "banditspec": {"proposal.budget.rule": "ucbspec", "tuning.strategy": "static", "tuning.guard.enabled": False},
    "consensus": {"proposal.drafters": ["consensus"], "proposal.budget.length_weight": 0.0},
    "coupled": {"mode": "coupled"},
    "coupled_reuse": {"mode": "coupled", "reuse.mode": "replay"},
    "das": {"proposal.budget.length_weight": 0.5},
    "day0": {
        "proposal.drafters": ["eagle3"],
        "drafter.mode": "idle",
        "drafter.publish_every": 25,
        "drafter.capture.share": 0.05,
    },
    "default": {},
    "hierarchy": {"proposal.drafters": ["hierarchy"], "proposal.k_max": 4, "proposal.budget.length_weight": 0.0},
    "disco": {"proposal.budget.rule": "disco", "tuning.strategy": "static", "tuning.guard.enabled": False},
    "eesd": {"proposal.budget.rule": "eesd", "tuning.strategy": "static", "tuning.guard.enabled": False},
    "exp3spec": {"proposal.budget.rule": "exp3spec", "tuning.strategy": "static", "tuning.guard.enabled": False},
    "long_tail": {"proposal.drafters": ["suffix", "eagle3"], "drafter.mode": "idle"},
    "osd": {
        "proposal.drafters": ["eagle3"],
        "proposal.k_max": 5,
        "proposal.head.route": "domain",
        "proposal.head.k_max": 5,
        "proposal.head.canary_drafts": 0,
        "proposal.budget.rule": "fixed",
        "drafter.mode": "idle",
        "drafter.publish_every": 10,
        "drafter.training.recipe": "osd",
        "tuning.strategy": "static",
        "tuning.arms": [5],
        "tuning.guard.enabled": False,
    },
    "respec": {
        "proposal.drafters": ["eagle3"],
        "proposal.budget.rule": "fixed",
        "drafter.mode": "dedicated",
        "drafter.training.recipe": "respec",
        "tuning.strategy": "respec",
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
        "proposal.budget.rule": "fixed",
        "tuning.strategy": "smartspec",
        "tuning.arms": [0, 1, 2, 3, 4, 5, 6, 7, 8],
        "tuning.guard.enabled": False,
    },
    "spec_rl": {
        "reuse.mode": "lenient",
        "reuse.bias": 0.5,
        "tuning.strategy": "static",
        "tuning.arms": [0],
        "tuning.guard.enabled": False,
    },
    "stand": {"proposal.drafters": ["stand"], "proposal.budget.length_weight": 0.0},
    "specdec++": {"proposal.budget.rule": "specdec++", "tuning.strategy": "static", "tuning.guard.enabled": False},
    "svip": {"proposal.budget.rule": "svip", "tuning.strategy": "static", "tuning.guard.enabled": False},
    "taps": {
        "proposal.drafters": ["eagle3"],
        "proposal.k_max": 4,
        "proposal.budget.rule": "fixed",
        "tuning.strategy": "static",
        "tuning.arms": [4],
        "tuning.guard.enabled": False,
    },
    "tetris": {
        "proposal.k_max": 6,
        "proposal.budget.rule": "tetris",
        "tuning.strategy": "static",
        "tuning.arms": [6],
        "tuning.guard.enabled": False,
    },
    "suffix_only": {"proposal.budget.rule": "fixed", "tuning.strategy": "static", "tuning.guard.enabled": False},
    "tlt": {
        "proposal.drafters": ["suffix", "eagle3"],
        "proposal.k_max": 8,
        "proposal.budget.rule": "fixed",
        "drafter.mode": "idle",
        "drafter.training.ttt_steps": 8,
        "tuning.strategy": "beg_mab",
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
    assert tuners["respec"].strategy.name == "respec" and tuners["smartspec"].strategy.name == "smartspec"
    for batch, lengths in ((1, {8}), (4, {4, 8}), (9, {2, 4}), (32, {1, 2}), (33, {0}), (256, {0})):
        played = {chosen("tlt", batch) for _ in range(200)}  # it explores, within the set
        assert played == {f"{d}:{k}" if k else "none" for k in lengths for d in ("suffix", "suffix+eagle3")}, batch
    terms = {name: DrafterTraining(**plays[name].drafter_training) for name in ("aurora", "osd", "respec", "tlt")}
    assert terms["respec"].reward_beta > 0 and terms["respec"].update_interval > 1
    assert terms["aurora"].accept and terms["aurora"].rejected and terms["aurora"].step_decay == 0.8
    assert terms["osd"].rejected and not terms["osd"].accept
    assert not terms["tlt"].rejected and plays["tlt"].drafter.captures
    assert plays["seer"].proposal.suffix.sources == ("siblings",)
    assert plays["rhymerl"].proposal.suffix.sources == ("past",)


TRAINS = {
    "aurora": {"learning_rate": 1e-5, "warmup_steps": 0, "clip_norm": 2.5, "rejected": 0.5},
    "osd": {"learning_rate": 1e-5, "warmup_steps": 0, "accept": 0.0, "rejected": 1.0},
    "respec": {"reward_beta": 1.0, "update_interval": 2},
    "tlt": {},
}
"""What each preset changes of how a head is trained."""


@pytest.mark.parametrize("name", TRAINS)
def test_presets_train_what_they_serve(name: str) -> None:
    """And a position is trained for every one that a paper's preset drafts."""
    config = resolve(name, env={})
    fields = TRAINS[name] | {"ttt_steps": {"aurora": 5, "osd": 5, "tlt": 8}.get(name, 4)}
    assert name == "respec" or config.proposal.head.k_max == fields["ttt_steps"]
    assert DrafterTraining(**config.drafter_training) == DrafterTraining(**fields)
    faster = config.change({"drafter.training.learning_rate": 0.5, "drafter.training.batch_tokens": 64})
    assert DrafterTraining(**faster.drafter_training) == DrafterTraining(
        **fields | {"learning_rate": 0.5, "batch_tokens": 64}
    )


def test_every_recipe_can_be_set_and_trained_by() -> None:
    assert list(get_args(TrainingConfig.model_fields["recipe"].annotation)) == list(RECIPES)
    for name, fields in RECIPES.items():
        config = resolve({"drafter.training.recipe": name}, env={})
        steps = 8 if "rejected" in fields else 4  # all that it drafts, where what was rejected of it is learned from
        assert DrafterTraining(**config.drafter_training) == DrafterTraining(**fields, ttt_steps=steps)
        given = config.change({"drafter.training.ttt_steps": 3}).drafter_training
        assert DrafterTraining(**given).ttt_steps == 3


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
    for settings in (config.drafter_training, daemon.options(config, "target")["training"]):
        terms = DrafterTraining(**settings)
        assert (terms.draft_sampling, terms.divergence) == (sampling, divergence)


def test_settings_of_training_are_those_of_the_trainer() -> None:
    training = RollspecConfig().drafter_training
    assert DrafterTraining(**training) == DrafterTraining()
    shorter = RollspecConfig.load({"proposal.head.k_max": 2}, env={}).drafter_training
    assert DrafterTraining(**shorter).ttt_steps == 2, "no position is trained for that is never drafted"
    bounds = {n: f.metadata for n, f in DrafterTraining.model_fields.items()}
    assert {n: bounds[n] for n in TrainingConfig.model_fields if n != "recipe"} == {
        n: f.metadata for n, f in TrainingConfig.model_fields.items() if n != "recipe"
    }


def test_day_0_starts_from_nothing_and_may_rest() -> None:
    c = RollspecConfig.load("day0", env={})
    assert c.proposal.head.model is None and c.drafter.captures and c.proposal.head.canary_drafts
    assert "none" in {a.name for a in Tuner(c.tuning, c.proposal.k_max, c.proposal.drafters).arms}


def test_the_default_preset_is_the_built_in_defaults() -> None:
    assert RollspecConfig.load(env={}) == RollspecConfig()
