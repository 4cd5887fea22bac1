"""Stand-ins have only names of the class they play."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import vllm_like
from vllm_like import check, like

BASE = """
from typing import Generic, NamedTuple

class Base:
    inherited: int = 0
    def method(self):
        for self.counted, (self.in_tuple, other.not_ours) in []:
            self.typed: int = 1
            self.nested.not_ours = 2
"""
MODULE = """
from dataclasses import dataclass
from . import base
from .base import Base as Renamed
import torch

if True:
    @dataclass
    class Direct(Renamed, torch.nn.Module):
        field: int
        constant, other = 1, 2
        @property
        def computed(self): return self.only_read

class ByModule(base.Base): pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "played_package"
    folder.mkdir()
    for name, source in (("__init__", "raise ImportError"), ("base", BASE), ("module", MODULE)):
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    for cached in (vllm_like.folder, vllm_like.parsed, vllm_like._names, vllm_like._file):
        cached.cache_clear()


NAMES = ("field", "constant", "other", "computed", "inherited", "method", "counted", "in_tuple", "typed")


@pytest.mark.parametrize("name", NAMES)
def test_what_a_class_has_is_accepted(package: None, name: str) -> None:
    assert vars(like("played_package.module:Direct", **{name: 3})) == {name: 3}
    assert "played_package" not in sys.modules, "the package was imported"


@pytest.mark.parametrize("name", ["invented", "not_ours", "only_read", "Renamed"])
def test_what_a_class_lacks_is_refused(package: None, name: str) -> None:
    with pytest.raises(AssertionError, match=rf"Direct has no attribute '{name}': .*/played_package/module\.py"):
        like("played_package.module:Direct", **{name: 3})


def test_classes_are_found_through_imports(package: None) -> None:
    check("played_package.module:ByModule", "inherited", "typed")
    check("played_package.module:Renamed", "inherited")
    with pytest.raises(AssertionError, match=r"no class 'Gone' in module played_package\.module"):
        like("played_package.module:Gone")
    with pytest.raises(AssertionError, match=r"no class 'Gone' in module played_package\.gone"):
        like("played_package.gone:Gone")


def test_a_package_that_is_not_installed_is_not_checked() -> None:
    assert like("no_such_package.module:Class", anything=1).anything == 1


@pytest.mark.skipif(vllm_like.folder("vllm") is None, reason="needs vLLM's source")
def test_vllms_own_classes() -> None:
    runner = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    like(runner, req_states=None, execute_model=None, device=None)
    like("vllm.config:VllmConfig", model_config=None)  # through the package's own import
    like("vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator", num_speculative_steps=4)  # of a base
    with pytest.raises(AssertionError, match="GPUModelRunner has no attribute 'requests_of_ours'"):
        like(runner, requests_of_ours={})
