"""What the GPU suite runs within given minutes, and in which order."""

from __future__ import annotations

from benchmarks.gpu import plan
from benchmarks.gpu.plan import choose, parts
from benchmarks.harness import ROOT


def test_minutes_decide_what_runs_in_the_order_of_worth() -> None:
    everything, _ = choose(parts("cuda"), 1000)
    assert [p.name for p in everything] == [p.name for p in parts("cuda")]
    chosen, left = choose(parts("cuda"), 7)
    assert [p.name for p in chosen] == ["kernels", "training", "start", "exact/greedy"]
    assert sum(p.minutes for p in chosen) <= 7
    assert {p.name for p in chosen} | set(left) == {p.name for p in parts("cuda")}
    assert "minutes" in left["exact/storm"]


def test_a_real_head_is_measured_where_there_is_one() -> None:
    assert "speed" not in {p.name for p in parts("cuda")}
    assert [p.name for p in parts("cuda", head=True)][:4] == ["kernels", "training", "start", "speed"]


def test_forty_minutes_hold_one_whole_cost_curve() -> None:
    chosen, left = choose(parts("cuda"), 40)
    names = {p.name for p in chosen}
    assert {f"cost/{plan.SHAPES[0]}/{arm}" for arm in plan.ARMS} <= names
    invariant = {p.name for p in parts("cuda") if p.name.startswith("invariant/")}
    assert set(left) == {f"cost/{plan.SHAPES[1]}/{arm}" for arm in plan.ARMS} | invariant


def test_arms_of_a_curve_run_together_or_not_at_all() -> None:
    curve = [p for p in parts("cuda") if p.name.startswith("cost/qwen3-1.7b")]
    chosen, left = choose(curve, sum(p.minutes for p in curve) - 0.1)
    assert not chosen and len(left) == len(plan.ARMS)
    done = {curve[0].name}
    assert choose(curve, sum(p.minutes for p in curve[1:]) + 0.01, done)[0] == curve[1:]


def test_without_vllm_only_parts_that_need_torch_alone() -> None:
    chosen, left = choose(parts("cuda"), 1000, vllm=False)
    assert [p.name for p in chosen] == ["kernels", "training"]
    assert all("vLLM" in why for why in left.values())


def test_every_part_names_a_function() -> None:
    for part in parts("cuda"):
        module, _, name = part.function.partition(":")
        text = (ROOT / "benchmarks" / "gpu" / f"{module}.py").read_text()
        assert f"def {name}(spec: Spec)" in text, part
