"""A small torch drafter that shares its target's embedding, and a swapper of it, with stand-ins for vLLM's modules."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm_like import like

from rollspec.engine.vllm.draft_weights import DraftWeights
from rollspec.head.drafter_kv import DrafterKV
from rollspec.head.swap import Swapper
from rollspec.proposal.router import HeadAcceptance


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


class Owner:
    """What a swap needs of a `DraftHead`, without an engine."""

    def __init__(self, target: Any, drafter: Any, folder: Path, vllm_config: Any) -> None:
        self.target_model, self.draft_model = target, drafter
        self.draft_folder, self.vllm_config = str(folder), vllm_config
        self.base, self.device, self.asleep = "b", torch.device("cpu"), False
        self.drafter_kv = DrafterKV(1 << 20, 100, 4, 4)
        self.acceptance = HeadAcceptance(2)
        self.swaps = 0
        self.faults: list[str] = []
        self.rewind = self.drafter_kv.rewind
        self.engine = like("rollspec.step:DraftEngine", version=3, canary_runs=False, swapped=self.swapped)
        self.bridge = like("rollspec.engine.bridge:Bridge", count=self.faults.append)

    def second_model(self) -> Any:
        return Model(torch.nn.Embedding(8, 4), 0)

    def swapped(self, version: int, known: Any = None) -> None:
        self.swaps += 1
        self.acceptance.changed()
        if known is not None:
            self.acceptance.restore(known)


def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Swapper:
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
    context = {"layer": object()}
    compilation = like("vllm.config:CompilationConfig", static_forward_context=context)
    vllm_config = like("vllm.config:VllmConfig", compilation_config=compilation)
    owner = Owner(target, drafter, tmp_path, vllm_config)
    out = Swapper(owner, DraftWeights(owner), canary_drafts=10)
    out.deployment.weights.build()
    assert list(context) == ["layer"], "the engine's own layers are as they were"
    return out


FOLDERS = tempfile.TemporaryDirectory(prefix="rollspec-heads-")


def payload(value: float, further: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """To swap in a head with this weight, and `further` ones; the caller waits."""
    from safetensors.torch import save_file

    folder = tempfile.mkdtemp(dir=FOLDERS.name)
    save_file({"fc.weight": torch.full((4, 4), value), **(further or {})}, f"{folder}/model.safetensors")
    return {"dir": folder, "wait": True, **more}


def weight(s: Swapper) -> Any:
    return s.head.draft_model.model.fc.weight


def run_until(swapper: Swapper, condition: Any) -> None:
    for _ in range(2000):
        swapper.poll()
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("not within twenty seconds")
