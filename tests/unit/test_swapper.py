"""The swapper on a small torch drafter that shares its target's embedding, with vLLM's loader played by a stand-in.

What vLLM itself does (loading, packing, the steps between which it happens) is in tests/engine/test_swap_engine.py.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rollspec.engine.vllm.states import States  # noqa: E402
from rollspec.engine.vllm.swap import Swapper, SwapRefusedError  # noqa: E402
from rollspec.proposal.router import Router  # noqa: E402


class Inner(torch.nn.Module):
    def __init__(self, embed: Any) -> None:
        super().__init__()
        self.embed_tokens = embed
        self.fc = torch.nn.Linear(4, 4, bias=False)


class Model(torch.nn.Module):
    def __init__(self, embed: Any, seed: int) -> None:
        super().__init__()
        self.model = Inner(embed)
        torch.nn.init.constant_(self.model.fc.weight, float(seed))

    def load_weights(self, weights: Any) -> None:
        params = dict(self.model.named_parameters())
        for name, t in weights:
            params[name].data.copy_(t)


@pytest.fixture
def swapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Swapper]:
    from safetensors.torch import save_file

    config, utils = ModuleType("vllm.config"), ModuleType("vllm.model_executor.layers.utils")
    config.set_current_vllm_config = contextlib.nullcontext  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.layers.utils", utils)
    target = Model(torch.nn.Embedding(8, 4), 9)
    drafter = Model(target.model.embed_tokens, 1)
    save_file({"fc.weight": drafter.model.fc.weight.data.clone()}, tmp_path / "model.safetensors")
    proposer = SimpleNamespace(router=Router(2), version=3, swaps=0)
    proposer.swapped = lambda: setattr(proposer, "swaps", proposer.swaps + 1)
    learned = SimpleNamespace(
        bridge=SimpleNamespace(
            config=SimpleNamespace(
                proposal=SimpleNamespace(learned=SimpleNamespace(canary_drafts=10, canary_ratio=0.9))
            )
        ),
        drafter=SimpleNamespace(
            model=drafter,
            draft_model_config=SimpleNamespace(model=str(tmp_path)),
            _get_model=lambda: Model(torch.nn.Embedding(8, 4), 0),
        ),
        runner=SimpleNamespace(get_model=lambda: target, device=torch.device("cpu")),
        states=States(1 << 20, 100, 4, 4),
        proposer=proposer,
    )
    context = {"layer": object()}
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        compilation_config=SimpleNamespace(static_forward_context=context),
    )
    out = Swapper(learned, vllm_config)  # type: ignore[arg-type]
    out.prepare()
    assert list(context) == ["layer"], "the engine's own layers are as they were"
    yield out
    for thread in (out._spare, out._thread):
        if thread is not None:
            thread.join()


def payload(value: float, **more: Any) -> dict[str, Any]:
    return {"tensors": {"fc.weight": torch.full((4, 4), value)}, "wait": True, **more}


def weight(s: Swapper) -> Any:
    return s.learned.drafter.model.model.fc.weight


def test_weights_arrive_in_the_same_storage_and_the_targets_stay(swapper: Swapper) -> None:
    target = swapper.learned.runner.get_model()
    before = target.model.embed_tokens.weight.clone()
    where = weight(swapper).data_ptr()
    swapper.learned.states.add("a", 0, torch.zeros(5, 4))
    swapper.learned.states.read(["a"])
    given = payload(2.0, canary=False)
    given["tensors"]["embed_tokens.weight"] = torch.randn(8, 4)
    answer = swapper.request(given)
    assert weight(swapper).data_ptr() == where and bool((weight(swapper) == 2.0).all())
    assert torch.equal(target.model.embed_tokens.weight, before) and bool((target.model.fc.weight == 9.0).all())
    assert swapper.version == 1 and swapper.since == 3 and swapper.learned.proposer.swaps == 1
    assert answer["reread"] == 5 and answer["change"] == pytest.approx(1.0) and answer["pause_ms"] > 0
    assert swapper.counts["promoted"] == 1
    # A small change leaves the KV as it is.
    swapper.learned.states.read(["a"])
    assert swapper.request(payload(2.01, canary=False))["reread"] == 0


def test_older_and_unfit_versions_are_refused(swapper: Swapper) -> None:
    swapper.request(payload(2.0, canary=False, version=5))
    with pytest.raises(SwapRefusedError, match="not newer than version 5"):
        swapper.request(payload(3.0, version=5))
    with pytest.raises(SwapRefusedError, match="NaN"):
        swapper.request(payload(float("nan")))
    assert swapper.counts["refused"] == 2 and swapper.version == 5 and bool((weight(swapper) == 2.0).all())


@pytest.mark.parametrize(("hits", "value", "version"), [(2, 2.0, 1), (0, 1.0, 0)])
def test_the_trial_keeps_or_takes_back(swapper: Swapper, hits: int, value: float, version: int) -> None:
    swapper.learned.proposer.router.acceptance.restore(np.array([0.9, 0.9]))
    swapper.request(payload(2.0))
    assert swapper.info()["state"] == "canary" and bool((weight(swapper) == 2.0).all())
    with pytest.raises(SwapRefusedError, match="trial drafts"):
        swapper.request(payload(3.0))
    while swapper.canary is not None:
        swapper.observe(hits, 2)
    assert bool((weight(swapper) == value).all()) and swapper.version == version
    assert swapper.last["verdict"] == ("promoted" if hits else "rolled_back") and not swapper.busy
    assert swapper.verify(), "the fingerprint is that of what runs"
    # And the next one comes in as if nothing had been.
    swapper.request(payload(4.0, canary=False, version=7))
    assert bool((weight(swapper) == 4.0).all())


def test_staged_on_a_thread_swapped_at_a_step(swapper: Swapper) -> None:
    assert swapper.request(payload(2.0, wait=False, canary=False))["staging"]
    for _ in range(200):
        swapper.poll()
        if swapper.version:
            break
        time.sleep(0.01)
    assert swapper.version == 1 and bool((weight(swapper) == 2.0).all()) and not swapper.busy
    swapper.request(payload(float("inf"), wait=False))
    for _ in range(200):
        swapper.poll()
        if swapper.counts["refused"]:
            break
        time.sleep(0.01)
    assert swapper.counts["refused"] == 1 and "NaN or infinity" in swapper.last["refused"]


def test_an_offered_folder_that_is_gone_is_refused(swapper: Swapper, tmp_path: Path) -> None:
    swapper.offer(tmp_path / "gone")
    assert swapper.busy
    for _ in range(200):
        swapper.poll()
        if not swapper.busy:
            break
        time.sleep(0.01)
    assert swapper.counts["refused"] == 1 and "gone" in swapper.last["refused"]


@pytest.mark.parametrize("trial", [False, True])
def test_lost_weights_come_back(swapper: Swapper, trial: bool) -> None:
    assert swapper.verify()
    swapper.request(payload(2.0, canary=trial))
    weight(swapper).data.zero_()
    assert not swapper.verify() and bool((weight(swapper) == 2.0).all()) and swapper.counts["resent"] == 1
    assert swapper.verify()
    if trial:  # what is to come back if the trial fails is still at hand
        while swapper.canary is not None:
            swapper.observe(0, 2)
        assert bool((weight(swapper) == 1.0).all())
