"""All changes to vLLM are in the registry, in its order; nothing outside assigns to an object of vLLM's."""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from vllm_like import like

from rollspec.engine.vllm import hooks, plugin
from rollspec.engine.vllm.hooks import HOOKS, Hook, Patch, RunnerHook, base, table

ROOT = Path(__file__).parents[4]
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator"
FOLDER = ROOT / "rollspec" / "engine" / "vllm" / "hooks"
HOOK_FILES = set(FOLDER.rglob("*.py"))
FILES = sorted(
    p
    for top in ("rollspec", "integrations", "cpu/rollspec_verl_cpu")
    for p in (ROOT / top).rglob("*.py")
    if p not in HOOK_FILES
)

# What a parameter or attribute is called that holds an object of vLLM's code (not its settings, or a step's data).
NAMES = {
    "runner", "model_runner", "worker", "wrapper", "scheduler", "core", "drafter", "sampler", "rejection_sampler",
    "topk_topp_sampler", "llm", "async_llm", "model", "target_model", "layer",
}  # fmt: skip
UNTYPED = {None, "Any", "object", "ModuleType"}

NAMED = {h: name for module in (hooks, table) for name, h in vars(module).items() if isinstance(h, Hook)}


def assignments(text: str, engine: bool = False) -> list[tuple[int, str]]:
    """(line, target) of every assignment to an object of vLLM's in a module's source.

    Of vLLM are: what is imported from it; parameters with a name in `NAMES` and no class of ours as their type; the
    module given to a callback of `on_import("vllm...")`, and a `module: ModuleType` in files with an engine; whatever
    is read from one of these; attributes called so.
    """
    tree = ast.parse(text)
    roots = {
        a.asname or a.name.split(".")[0]
        for n in ast.walk(tree)
        if isinstance(n, (ast.Import, ast.ImportFrom))
        and (n.module if isinstance(n, ast.ImportFrom) else n.names[0].name or "").partition(".")[0] == "vllm"
        for a in n.names
    }
    callbacks = {
        ast.unparse(n.args[1])
        for n in ast.walk(tree)
        if isinstance(n, ast.Call)
        and ast.unparse(n.func).endswith("on_import")
        and isinstance(n.args[0], ast.Constant)
        and str(n.args[0].value).startswith("vllm")
    }
    if engine:
        functions = (n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))
        callbacks |= {n.name for n in functions for a in n.args.args if ast.unparse(a).endswith(": ModuleType")}
    found: list[tuple[int, str]] = []
    _scan(tree, roots, callbacks, found)
    return found


def _scan(node: ast.AST, foreign: set[str], callbacks: set[str], found: list[tuple[int, str]]) -> None:
    """Walk one scope in order. `foreign`: its names that are vLLM's."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner = set(foreign)
            called = isinstance(child, ast.Lambda) or child.name in callbacks
            for a in (*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs):
                kind = None if a.annotation is None else ast.unparse(a.annotation)
                inner.discard(a.arg)
                if kind in UNTYPED and (a.arg in NAMES or (a.arg == "module" and called)):
                    inner.add(a.arg)
            _scan(child, inner, callbacks, found)
            continue
        if isinstance(child, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Delete)):
            value = getattr(child, "value", None)
            goals = child.targets if isinstance(child, (ast.Assign, ast.Delete)) else [child.target]
            for goal in goals:
                for one, of in _pairs(goal, value):
                    if isinstance(one, ast.Name):
                        ours = isinstance(child, ast.AnnAssign) and ast.unparse(child.annotation) not in UNTYPED
                        (foreign.add if of is not None and not ours and _is(of, foreign) else foreign.discard)(one.id)
                    elif (owner := _owner(one)) is not None and _is(owner, foreign):
                        found.append((one.lineno, ast.unparse(one)))
        if isinstance(child, ast.For):
            foreign |= {n.id for n in ast.walk(child.target) if isinstance(n, ast.Name)} & NAMES
        if (
            isinstance(child, ast.Call)
            and ast.unparse(child.func) in ("setattr", "object.__setattr__", "delattr")
            and _is(child.args[0], foreign)
        ):
            found.append((child.lineno, ast.unparse(child)))
        _scan(child, foreign, callbacks, found)


def _pairs(goal: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if isinstance(goal, (ast.Tuple, ast.List)):
        values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else [value] * len(goal.elts)
        yield from zip(goal.elts, values, strict=False)
    else:
        yield goal, value


def _owner(goal: ast.expr) -> ast.expr | None:
    """The object whose attribute is set: of `x.a`, `x.__dict__["a"]` and `vars(x)["a"]` it is x."""
    if isinstance(goal, ast.Attribute):
        return goal.value
    if isinstance(goal, ast.Subscript):
        of = goal.value
        if isinstance(of, ast.Attribute) and of.attr == "__dict__":
            return of.value
        if isinstance(of, ast.Call) and ast.unparse(of.func) == "vars":
            return of.args[0]
    return None


def _is(node: ast.expr, foreign: set[str]) -> bool:
    """Whether an expression is an object of vLLM's code: a foreign name, or something reached through one."""
    if isinstance(node, ast.Name):
        return node.id in foreign
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_") in NAMES or _is(node.value, foreign)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
        names = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
        return names[:1] == ["drafter"] or _is(node.args[0], foreign)
    return False


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_nothing_outside_the_registry_assigns_to_vllm(path: Path) -> None:
    found = assignments(path.read_text(encoding="utf-8"), engine=path.is_relative_to(FOLDER.parent))
    assert not found, f"{path.relative_to(ROOT)} assigns to vLLM's {found}; make it a hook in {FOLDER.name}/"


@pytest.mark.parametrize(
    "planted",
    [
        "def install(runner: Any):\n    runner._sample = lambda *a: None",
        "def install(self, worker):\n    worker.sleep, worker.wake_up = None, None",
        "def f(runner: Any):\n    top = runner.sampler.topk_topp_sampler\n    top.forward = 1",
        "def f(runner: Any):\n    drafter = getattr(runner, 'drafter', None)\n    drafter.model = 1",
        "class A:\n    def f(self):\n        self._runner.x = 1",
        "class A:\n    def f(self):\n        self.learned.drafter._names |= {1}",
        "from vllm.v1.core.sched.scheduler import Scheduler\nScheduler.schedule = None",
        "import vllm.model_executor.layers.utils as utils\ndef f():\n    utils.gemm = None",
        "def f():\n    from vllm.x import y\n    setattr(y, 'z', 1)",
        "def patch(module):\n    cls = module.EngineCore\n    cls.step = None\non_import('vllm.v1.engine.core', patch)",
        "def f(runner: Any):\n    runner.__dict__['_sample'] = None",
        "def f(runner: Any):\n    vars(runner.model)['load_weights'] = None",
        "def f(scheduler):\n    del scheduler.running",
        "def f(self):\n    for layer, other in self._packed:\n        layer.cpu_linear = other",
        "def widen(module: ModuleType):\n    cls = module.GPUModelRunner\n    cls._layers = None",
    ],
)
def test_an_assignment_is_found(planted: str) -> None:
    assert len(assignments(planted, engine=True)) in (1, 2)


@pytest.mark.parametrize(
    "fine",
    [
        "def f(drafter: Bridge):\n    drafter.coupled = 1",
        "def f(runner: Any):\n    found: Bridge = runner.drafter\n    found.learned = 1",
        "class A:\n    def __init__(self, runner: Any):\n        self.runner = runner",
        "def patch(module):\n    module.x = 1\non_import('verl.trainer', patch)",
        "def f(runner: Any):\n    counts = {}\n    counts[runner.x] = 1",
    ],
)
def test_what_is_ours_is_left_alone(fine: str) -> None:
    assert assignments(fine) == []


def test_every_hook_says_what_why_and_until_when() -> None:
    for h in HOOKS:
        assert h.why and h.removal and h.name
        SpecifierSet(h.versions)
        assert all(t.partition(":")[2] for t in h.targets) and h.targets
        assert h.by, "who gives what runs there?"
    assert len({h.name for h in HOOKS}) == len(HOOKS)


def test_every_hook_is_in_the_list() -> None:
    modules = [m for name, m in sys.modules.items() if name.startswith(f"{hooks.__name__}.")]
    assert len(modules) == len(HOOK_FILES) - 1
    assert {h for m in modules for h in vars(m).values() if isinstance(h, Hook)} == set(HOOKS) == set(NAMED)


def test_every_hook_has_its_behaviour() -> None:
    """In `plugin.BEHAVIOUR`, or in the mapping of a call of `hooks.install`; in the module of the hook's `by`."""
    given = {NAMED[h]: h.by for h in plugin.BEHAVIOUR}
    for path in FILES:
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(n, ast.Call) and ast.unparse(n.func) == "hooks.install" and isinstance(n.args[0], ast.Dict):
                for key, value in zip(n.args[0].keys, n.args[0].values, strict=True):
                    assert key is not None
                    given[ast.unparse(key).rpartition(".")[2]] = (ast.unparse(value).partition(".")[0],)
    plain = {NAMED[h]: h.by for h in HOOKS if not isinstance(h, (Patch, RunnerHook))}
    assert plain == given
    assert all(h.by == (f.__module__.rpartition(".")[2],) for h, f in plugin.BEHAVIOUR.items())


def test_modules_that_wrap_are_the_ones_that_do() -> None:
    """`by` of a runner's hook names exactly the modules that call its `put`, `wrap`, `during` or `exchange`."""
    calls: dict[str, set[str]] = {}
    for path in FILES:
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(n, ast.Attribute) and n.attr in ("put", "wrap", "during", "exchange"):
                calls.setdefault(ast.unparse(n.value).rpartition(".")[2], set()).add(path.stem)
    for h in HOOKS:
        if isinstance(h, RunnerHook):
            assert calls.get(NAMED[h], set()) == set(h.by), h.name


def test_hooks_are_applied_in_the_order_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Hook] = []
    monkeypatch.setattr(Hook, "install", lambda hook, version, around: applied.append(hook) or True)
    hooks.install(dict(reversed(plugin.BEHAVIOUR.items())))
    assert applied == [h for h in HOOKS if h in plugin.BEHAVIOUR]


def test_a_function_is_wrapped_once_and_a_parents_mark_does_not_count() -> None:
    class Parent:
        def step(self) -> int:
            """Docs."""
            return 1

        @property
        def batches(self) -> int:
            return 1

    class Child(Parent):
        pass

    def more(original: Any, self: Any) -> int:
        return int(original(self)) + 1

    for _ in range(2):
        base.wrap(Parent, "step", more)
        base.wrap(Parent, "batches", more)
    assert (Parent().step(), Parent().batches, Parent.step.__doc__) == (2, 2, "Docs.")
    base.wrap(Child, "step", more)
    assert (Child().step(), Parent().step()) == (3, 2)


def test_a_coroutine_function_stays_one() -> None:
    class Server:
        async def ask(self) -> int:
            return 1

    async def more(original: Any, self: Any) -> int:
        return int(await original(self)) + 1

    base.wrap(Server, "ask", more)
    assert inspect.iscoroutinefunction(Server.ask) and asyncio.run(Server().ask()) == 2


def test_a_runners_hook_keeps_the_order_and_gives_back_what_was_there() -> None:
    speculator = like(SPECULATOR, propose="vllm's")
    assert table.Propose.put(speculator, "ours", "rollspec.engine.vllm.v2.layers") == "vllm's"
    assert table.Propose.put(speculator, "outer", "rollspec.engine.vllm.v2.install") == "ours"
    with pytest.raises(RuntimeError, match=r"layers too late; the order is specialists, layers, install"):
        table.Propose.put(speculator, "inner", "rollspec.engine.vllm.v2.layers")
    with pytest.raises(ValueError, match="not in tuple"):
        table.Propose.put(speculator, "inner", "rollspec.head.swap")
    assert speculator.propose == "outer"


def test_for_the_time_of_a_block() -> None:
    speculator = like(SPECULATOR, num_speculative_steps=4)
    seen = []

    def fails() -> None:
        with table.DraftSteps.during(speculator, 2):
            seen.append(speculator.num_speculative_steps)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (seen, speculator.num_speculative_steps) == ([2], 4)
    module = ModuleType("utils")
    module.get_model = "vllm's"  # type: ignore[attr-defined]
    with table.MakeHead.during(module, "ours"):
        seen.append(module.get_model)
    assert (seen[1:], module.get_model) == (["ours"], "vllm's")


def test_what_is_kept_on_vllms_objects_cannot_be_its_own() -> None:
    owner = SimpleNamespace()
    hooks.keep(owner, "_rollspec_x", 1)
    assert owner._rollspec_x == 1
    with pytest.raises(ValueError, match="'drafter' could be"):
        hooks.keep(owner, "drafter", 1)


def test_a_hook_outside_its_versions_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollspec.engine.vllm.hooks.table import AddRequest, CreateEngineConfig

    module = ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = type("EngineArgs", (), {"create_engine_config": lambda self: 1})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not AddRequest.install("0.99.0", lambda *a: None)
    assert "0.99.0" in (AddRequest.off_because("0.99.0") or "")
    # It says why such an engine is left alone.
    assert CreateEngineConfig.install("0.99.0", lambda create, args: create(args) + 1)
    assert module.EngineArgs().create_engine_config() == 2
