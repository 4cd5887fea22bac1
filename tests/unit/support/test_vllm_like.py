"""Stand-ins have only names and parameters of what they play."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_like
from vllm_like import check, like, plays

BASE = """
from typing import Generic, NamedTuple

class Base:
    inherited: int = 0
    def method(self):
        for self.counted, (self.in_tuple, other.not_ours) in []:
            self.typed: int = 1
            self.nested.not_ours = 2
    def call(self, needed, other=1, *, named=2): pass
    @staticmethod
    def bare(needed): pass
    def any(self, needed, *args, **kwargs): pass
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
def function(needed, *, named): pass
VALUE: int = 1
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


CALLS = [
    ("call", lambda needed: 0, None),
    ("call", lambda needed, other=3, *, named=4: 0, None),
    ("call", lambda needed, *, other: 0, None),
    ("call", lambda *a, **k: 0, None),
    ("call", lambda _: 0, None),
    ("call", lambda: 0, "needs 'needed'"),
    ("call", lambda other, needed: 0, "has 'needed' where the stand-in has 'other'"),
    ("call", lambda needed, named: 0, "has 'other' where the stand-in has 'named'"),
    ("call", lambda needed, *, gone: 0, "takes no 'gone'"),
    ("call", lambda needed, other, more: 0, "takes no 'more'"),
    ("bare", lambda needed: 0, None),
    ("bare", lambda _self, needed: 0, "takes no 'needed'"),
    ("any", lambda needed, more, *, last: 0, None),
    ("computed", lambda anything: 0, None),
    ("field", lambda anything: 0, None),
]


@pytest.mark.parametrize(("name", "stand_in", "why"), CALLS)
def test_parameters_are_those_of_the_method(package: None, name: str, stand_in: Any, why: str | None) -> None:
    if why is None:
        assert like("played_package.module:Direct", **{name: stand_in})
        return
    with pytest.raises(AssertionError, match=rf"Direct\.{name} {why}.*/played_package/module\.py"):
        like("played_package.module:Direct", **{name: stand_in})


def test_a_class_plays_another(package: None) -> None:
    @plays("played_package.module:Direct")
    class Good:
        field = 2

        def call(self, needed: int) -> None: ...

    assert Good.field == 2
    plays("played_package.module:Direct", "invented")(type("Good", (), {"invented": 1}))
    with pytest.raises(AssertionError, match="Direct has no attribute 'invented'"):
        plays("played_package.module:Direct")(type("Bad", (), {"invented": 1}))
    with pytest.raises(AssertionError, match=r"Direct\.call needs 'needed'"):
        plays("played_package.module:Direct")(type("Bad", (), {"call": lambda self: 0}))


def test_a_module_is_played_too(package: None) -> None:
    module = "played_package.module"
    like(module, function=lambda needed, *, named: 0, VALUE=3, Direct=int, Renamed=int, torch=None)
    like("played_package", module=like(module))
    with pytest.raises(AssertionError, match=r"played_package\.module has no attribute 'gone'"):
        like(module, gone=1)
    with pytest.raises(AssertionError, match=r"played_package\.module\.function needs 'named'"):
        like(module, function=lambda needed: 0)


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
