"""The swapper on a small torch drafter that shares its target's embedding, with vLLM's loader played by a stand-in.

What vLLM itself does (loading, packing, the steps between which it happens) is in
tests/engine/test_swap_engine.py and test_swap_head_engine.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from swap_owner import payload, run_until, weight  # noqa: E402

from rollspec.config import RollspecConfig  # noqa: E402
from rollspec.head.swap import Swapper, SwapRefusedError  # noqa: E402
from rollspec.step import DraftEngine  # noqa: E402


def test_weights_arrive_in_the_same_storage_and_the_targets_stay(swapper: Swapper) -> None:
    target = swapper.head.target_model
    before = target.model.embed_tokens.weight.clone()
    where = weight(swapper).data_ptr()
    swapper.head.drafter_kv.add("a", 0, torch.zeros(5, 4))
    swapper.head.drafter_kv.read(["a"])
    given = payload(2.0, {"embed_tokens.weight": torch.randn(8, 4)}, canary=False)
    answer = swapper.request(given)
    assert weight(swapper).data_ptr() == where and bool((weight(swapper) == 2.0).all())
    assert torch.equal(target.model.embed_tokens.weight, before) and bool((target.model.fc.weight == 9.0).all())
    assert swapper.version == 1 and swapper.deployment.running.since == 3 and swapper.head.swaps == 1
    assert answer["reread"] == 5 and answer["change"] == pytest.approx(1.0) and answer["pause_ms"] > 0
    assert swapper.counts["promoted"] == 1
    # A small change leaves the KV as it is.
    swapper.head.drafter_kv.read(["a"])
    assert swapper.request(payload(2.01, canary=False))["reread"] == 0


def test_a_specforge_heads_layer_has_the_name_that_versions_have(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from rollspec.head.swap.payload import check, read_folder

    save_file(
        {"midlayer.mlp.up_proj.weight": torch.ones(2), "fc.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    check({"layers.0.mlp.up_proj.weight": torch.zeros(2), "fc.weight": torch.zeros(2)}, read_folder(tmp_path))


def test_older_and_unfit_versions_are_refused(swapper: Swapper) -> None:
    swapper.request(payload(2.0, canary=False, version=5))
    with pytest.raises(SwapRefusedError, match="not newer than version 5"):
        swapper.request(payload(3.0, version=5))
    with pytest.raises(SwapRefusedError, match="NaN"):
        swapper.request(payload(float("nan")))
    assert swapper.counts["refused"] == 2 and swapper.version == 5 and bool((weight(swapper) == 2.0).all())


@pytest.mark.parametrize(("accepted", "value", "version"), [(2, 2.0, 1), (0, 1.0, 0)])
def test_the_canary_promotes_or_rolls_back(swapper: Swapper, accepted: int, value: float, version: int) -> None:
    acceptance = swapper.head.acceptance
    for _ in range(100):
        acceptance.observe(2, 2)
    rates = acceptance.rates
    swapper.request(payload(2.0))
    assert swapper.info()["state"] == "canary" and bool((weight(swapper) == 2.0).all())
    with pytest.raises(SwapRefusedError, match="canary drafts"):
        swapper.request(payload(3.0))
    while swapper.canary is not None:
        swapper.observe(accepted, 2)
    assert bool((weight(swapper) == value).all()) and swapper.version == version
    assert swapper.last["verdict"] == ("promoted" if accepted else "rolled_back") and not swapper.busy
    assert swapper.verify(), "the fingerprint is that of what runs"
    if not accepted:
        assert acceptance.rates == pytest.approx(rates), "so is its acceptance"
    # And the next one comes in as if nothing had been.
    swapper.request(payload(4.0, canary=False, version=7))
    assert bool((weight(swapper) == 4.0).all())


def test_staged_on_a_thread_swapped_at_a_step(swapper: Swapper) -> None:
    assert swapper.request(payload(2.0, wait=False, canary=False))["staging"]
    for _ in range(2000):
        swapper.poll()
        if swapper.version:
            break
        time.sleep(0.01)
    assert swapper.version == 1 and bool((weight(swapper) == 2.0).all()) and not swapper.busy
    swapper.request(payload(float("inf"), wait=False))
    for _ in range(2000):
        swapper.poll()
        if swapper.counts["refused"]:
            break
        time.sleep(0.01)
    assert swapper.counts["refused"] == 1 and "NaN or infinity" in swapper.last["refused"]


def test_weights_that_never_drafted_are_no_bar(swapper: Swapper) -> None:
    """An engine that has only just started hopes for much and has measured nothing."""
    swapper.request(payload(2.0))
    while swapper.canary is not None:
        swapper.observe(0, 2)
    assert swapper.last["verdict"] == "promoted" and swapper.version == 1


def test_a_swap_during_sleep_waits_until_the_engine_is_awake(swapper: Swapper) -> None:
    swapper.head.asleep = True
    before = weight(swapper).clone()
    assert swapper.request(payload(2.0, canary=False)) == {"deferred": True, "version": 0}
    assert swapper.busy and torch.equal(weight(swapper), before), "memory that is not there was written"
    weight(swapper).data.zero_()  # what sleep mode leaves
    assert swapper.verify() and swapper.counts["resent"] == 0, "there is nothing to look at"
    swapper.head.asleep = False
    swapper.wake()
    run_until(swapper, lambda: swapper.version == 1)
    assert swapper.counts["resent"] == 1 and bool((weight(swapper) == 2.0).all()) and not swapper.busy


def test_weights_that_a_sleep_lost_are_back_before_the_next_step(swapper: Swapper) -> None:
    swapper.request(payload(2.0, canary=False))
    weight(swapper).data.normal_()
    swapper.wake()
    swapper.poll()
    assert bool((weight(swapper) == 2.0).all()) and swapper.counts["resent"] == 1
    swapper.wake()
    swapper.poll()
    assert swapper.counts["resent"] == 1


@pytest.mark.parametrize("canary", [False, True])
def test_lost_weights_come_back(swapper: Swapper, canary: bool) -> None:
    assert swapper.verify()
    for _ in range(20):
        swapper.head.acceptance.observe(2, 2)
    swapper.request(payload(2.0, canary=canary))
    weight(swapper).data.zero_()
    assert not swapper.verify() and bool((weight(swapper) == 2.0).all()) and swapper.counts["resent"] == 1
    assert swapper.verify()
    if canary:  # what is to come back if the canary fails is still at hand
        while swapper.canary is not None:
            swapper.observe(0, 2)
        assert bool((weight(swapper) == 1.0).all())


def test_a_canary_is_held_against_what_a_resumed_job_has_seen() -> None:
    """A state that is loaded is taken into the record that the canary reads."""
    config = RollspecConfig.load({"proposal.drafters": ["suffix", "eagle3"]}, env={})
    engine = DraftEngine(config, 64, "eagle3")
    assert engine.head is not None
    acceptance = engine.head.acceptance  # as a `DraftHead` takes it when it is made
    other = DraftEngine(config, 64, "eagle3")
    assert other.head is not None
    other.head.acceptance.observe(1, 1)
    engine.restore_tuning(other.tuning_state())
    assert acceptance.measured[0] == 1.0 and engine.head.acceptance is acceptance
