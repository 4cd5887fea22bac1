"""The audit's token-by-token check of coupled sampling: passes what is right, sees one wrong token in thousands."""

from __future__ import annotations

import numpy as np
import pytest

from rollspec import RollspecConfig
from rollspec.audit.distribution import distribution_tests
from rollspec.audit.engine import Variant
from rollspec.audit.evidence import Evidence, Samples, samples_from
from rollspec.audit.noise import NoiseCheck, Witness, Words, first_round, gumbel, keys_of
from rollspec.audit.report import facts
from rollspec.audit.verdict import AuditResult

VOCAB, LENGTH = 60, 30
PROMPTS = ((1, 2, 3), (4, 5), (1, 2, 3))  # the first and the last are one prompt to an engine
CONFIG = RollspecConfig.load({"mode": "coupled", "coupled.seed": 3}, env={})
LOGITS = np.random.default_rng(0).standard_normal((LENGTH, VOCAB)) * 2.0


def _sample(config: RollspecConfig = CONFIG, rounds: int = 3, copies: int = 20) -> tuple[Samples, Words]:
    order = [(i, r) for r in range(rounds) for i in range(len(PROMPTS)) for _ in range(copies)]
    prompt, when = [i for i, _ in order], [r for _, r in order]
    keys = keys_of(samples_from([[]] * len(order), prompt, when), PROMPTS, config, 0, 4)
    tokens = [
        (LOGITS + gumbel(np.repeat(k, LENGTH), len(PROMPTS[i]) + np.arange(LENGTH), VOCAB)).argmax(1)
        for k, i in zip(keys, prompt, strict=True)
    ]
    return samples_from([t.tolist() for t in tokens], prompt, when), keys


def _judge(samples: Samples, keys: Words, tested: Samples | None = None) -> tuple[NoiseCheck, AuditResult]:
    evidence = Evidence(tested or samples, VOCAB, np.random.default_rng(0))
    witness = Witness(samples, evidence, keys, PROMPTS, tie=1e-4)
    log_probs = LOGITS - np.log(np.exp(LOGITS).sum(-1, keepdims=True))
    for s in range(len(samples.tokens)):
        witness.add(s, log_probs[:11])
        witness.add(s, log_probs[11:], 11)
    noise = witness.found
    return noise, AuditResult(distribution_tests(evidence), samples.n_tokens, noise=noise)


def test_the_noise_is_the_engines_bit_for_bit() -> None:
    """Derived apart from the engine's own: `vllm_cpu_v2.noise` is compared with Triton's kernel in tests/kernels."""
    from vllm_cpu_v2 import noise

    keys = np.array([0, 7, 2**63 + 5, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, 17, 1 << 30])
    found = gumbel(keys, positions, 50_000)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, noise.gumbel(keys.view(np.int64), positions - 1, 50_000))


def test_what_target_and_noise_make_passes() -> None:
    samples, keys = _sample()
    assert len(set(keys.tolist())) == len(keys)
    noise, result = _judge(samples, keys)
    assert noise.exact == noise.tokens == 180 * LENGTH and not noise.failure
    assert result.verdict == "pass" and result.noise is noise


def test_one_wrong_token_is_found_and_named() -> None:
    samples, keys = _sample()
    tokens = [t.copy() for t in samples.tokens]
    tokens[70][20] = (tokens[70][20] + 1) % VOCAB
    altered = Samples(tuple(tokens), samples.prompt, samples.round)
    noise, result = _judge(altered, keys)
    assert (noise.exact, noise.ties, noise.wrong) == (180 * LENGTH - 1, 0, 1)
    assert noise.first is not None and noise.first[:2] == (70, 20) and noise.first[3] == tokens[70][20]
    assert result.verdict == "fail" and "token 20 of a response" in result.reasons[0]
    assert any("1 are not" in found for _, found in facts(result))


@pytest.mark.parametrize("other", [{"coupled.seed": 4}, {"reuse.mode": "replay"}])
def test_another_noise_fails(other: dict[str, object]) -> None:
    samples, _ = _sample()
    config = RollspecConfig.load({"mode": "coupled", "coupled.seed": 3, **other}, env={})
    noise, _ = _judge(samples, keys_of(samples, PROMPTS, config, 0, 4))
    assert noise.wrong > 0.3 * noise.tokens


def test_kept_noise_repeats_and_only_its_first_round_is_a_sample() -> None:
    keep = RollspecConfig.load({"mode": "coupled", "reuse.mode": "replay"}, env={})
    samples, keys = _sample(keep)
    assert all((samples.tokens[s] == samples.tokens[s + 60]).all() for s in range(120))
    first = first_round(samples)
    assert len(first.tokens) == 60
    noise, result = _judge(samples, keys, first)
    assert noise.tokens == 180 * LENGTH and result.verdict == "pass"


def test_the_page_names_mode_and_switches() -> None:
    arm = Variant.with_rollspec("default", ["mode=coupled", "tuning.strategy=random"])
    result = AuditResult([], 0, provenance={"subject": {"name": arm.name, "rollspec": arm.rollspec}})
    assert ("engine", "rollspec, preset default, mode coupled, draft lengths by random") in facts(result)
