"""Options from verl's rollout configuration to the engine's additional_config."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm_like import like

from rollspec.config import RollspecConfig
from rollspec.errors import ConfigError

omegaconf = pytest.importorskip("omegaconf")
pytest.importorskip("verl")


def read(custom: Any) -> RollspecConfig:
    from rollspec_verl import options

    return options.read(omegaconf.OmegaConf.create({"custom": custom}))


def test_nothing_given_is_the_default_preset() -> None:
    default = RollspecConfig.load("default")
    assert read(None) == read({}) == read({"rollspec": {}}) == read({"other": 1}) == default


def test_a_string_is_a_preset_and_a_mapping_changes_one() -> None:
    assert read({"rollspec": "suffix_only"}) == RollspecConfig.load("suffix_only")
    assert read({"rollspec": {"proposal": {"k_max": 5}}}).proposal.k_max == 5
    assert read({"rollspec": {"preset": "suffix_only", "proposal": {"k_max": 5}}}).preset == "suffix_only"
    assert not read({"rollspec": {"enabled": False}}).enabled


def test_a_typo_names_the_key_and_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"k_mx.*k_max"):
        read({"rollspec": {"proposal": {"k_mx": 5}}})
    with pytest.raises(ConfigError, match="suffix_onyl"):
        read({"rollspec": "suffix_onyl"})


@pytest.mark.parametrize("given", [None, {}, {"theirs": 1}, {"rollspec": "suffix_only"}, {"rollspec.k_max": 5}])
def test_settled_options_are_data_that_no_environment_changes(
    given: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollspec_verl import options

    from rollspec.config import settings

    rollout = omegaconf.OmegaConf.create({"name": "vllm", "custom": given})
    omegaconf.OmegaConf.set_struct(rollout, True)  # as verl's are
    options.settle(rollout)
    want = options.read(rollout)
    monkeypatch.setenv("ROLLSPEC__PROPOSAL__K_MAX", "3")
    monkeypatch.setattr(settings, "layers_of", lambda source: pytest.fail(f"{source!r} was resolved again"))
    assert options.read(rollout) == want and want.proposal.k_max == 16
    sent = omegaconf.OmegaConf.to_container(rollout)["custom"]
    assert options.read(like("verl.workers.config.rollout:RolloutConfig", get=lambda *_: sent)) == want
    options.settle(rollout)
    assert options.read(rollout) == want and set(given or {}) <= set(rollout.custom)


@pytest.mark.parametrize("given", [None, {}, {"theirs": 1}, '{"theirs": 1}'])
def test_additional_config_keeps_what_the_user_gave(given: Any) -> None:
    from rollspec_verl.replica import merge_additional_config

    config = RollspecConfig.load("default").to_dict()
    merged = merge_additional_config(given, config)
    assert merged["rollspec"] == config
    assert ("theirs" in merged) is bool(given)
    # verl writes it as JSON on vLLM's command line, and the plugin loads it back.
    assert RollspecConfig.from_dict(json.loads(json.dumps(merged))["rollspec"]) == RollspecConfig.load("default")


def test_a_verl_outside_the_range_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import rollspec_verl
    import verl

    monkeypatch.setattr(verl, "__version__", "0.8.0")
    monkeypatch.setattr(rollspec_verl, "on_import", lambda *_: pytest.fail("hooks were installed"))
    rollspec_verl._register()
    assert "verl 0.8.0 is outside the tested range" in caplog.text and len(caplog.records) == 1
