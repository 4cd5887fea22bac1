"""Drafter weights swapped in a running engine: nothing lost, nothing changed, bad versions refused or rolled back.

float32 and greedy, so every comparison is token identity. One engine drafts with the target itself, so that what is
swapped in decides everything: the target's weights are always accepted, noise never is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import ALWAYS, bridge, build, call, close, during, generate, swap

pytestmark = pytest.mark.engine


def weights_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def noisy(folder: Path, into: Path, scale: float = 5.0, seed: int = 0) -> Path:
    """The same model with other weights."""
    import torch
    from safetensors.torch import save_file

    into.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / name, into)
    g = torch.Generator().manual_seed(seed)
    out = {
        n: (t.float() + scale * t.float().std().nan_to_num(1.0) * torch.randn(t.shape, generator=g)).to(t.dtype)
        for n, t in weights_of(folder).items()
    }
    save_file(out, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    bad = noisy(model, tmp_path_factory.mktemp("noise"))
    config = {"proposal.drafters": ["draft_model"], "proposal.head.model": str(bad), **ALWAYS}
    config |= {"proposal.head.canary_drafts": 40}
    llm = build(model, config, max_num_batched_tokens=256)
    yield llm
    close(llm)


def rate(llm: Any) -> float:
    """Accepted over drafted since the last call."""
    stats = call(llm, "stats")
    assert not stats["faults"]
    return stats["accepted"] / max(stats["drafted"], 1)


def test_a_swap_mid_generation_loses_nothing_and_is_read_again(
    engine: Any, model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    assert generate(engine, prompts) == plain["greedy"]
    assert rate(engine) < 0.2, "noise was meant to be useless"
    answers: list[dict[str, Any]] = []
    for at in (1, 3, 25):  # in the prompts, just after them, in the middle
        number = call(engine, "info")["drafter"]["version"] + 1

        def act(number: int = number) -> None:
            answers.append(swap(engine, model, version=number))
            call(engine, "stats")  # what follows is counted from here

        out = during(engine, prompts, act, at)
        assert out == plain["long"]
        assert "error" not in answers[-1], answers[-1]
        assert call(engine, "info")["drafter"]["last"]["verdict"] == "promoted"
        if at == 25:
            assert answers[-1]["reread"] > 0
        found = rate(engine)
        assert found > 0.6, f"requests in flight were not drafted for with the new weights ({found:.2f})"
        assert generate(engine, prompts) == plain["greedy"]
        assert rate(engine) > 0.95
        # Back to noise, trusted at once.
        noise = Path(call(engine, "info")["drafter"]["started_with"])
        assert "error" not in swap(engine, noise, version=number + 1, canary=False)
        generate(engine, prompts[:1])
        call(engine, "stats")


def test_the_canary_rolls_garbage_back(
    engine: Any, model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    number = call(engine, "info")["drafter"]["version"]
    assert "error" not in swap(engine, model, version=number + 1, canary=False)
    generate(engine, prompts)
    assert rate(engine) > 0.95
    garbage = noisy(model, tmp_path / "garbage", seed=5)
    out = during(engine, prompts, lambda: swap(engine, garbage, version=number + 2))
    assert out == plain["long"]
    info = call(engine, "info")["drafter"]
    assert info["last"]["verdict"] == "rolled_back" and info["version"] == number + 1
    assert info["rolled_back"] == 1
    rate(engine)
    assert generate(engine, prompts) == plain["greedy"]
    assert rate(engine) > 0.95, "the old weights are not back"


def test_what_does_not_fit_is_refused_and_touches_nothing(
    engine: Any, model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    before = call(engine, "info")["drafter"]
    good = weights_of(model)

    def variant(name: str, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        save_file({n: t for n, t in {**good, **changes}.items() if t is not None}, folder / "model.safetensors")
        return folder

    norm = "model.norm.weight"
    cases = {
        "truncated": variant("truncated"),
        "NaN": variant("nan", **{norm: torch.full_like(good[norm], float("nan"))}),
        "shape": variant("shape", **{norm: good[norm][:-1]}),
        "missing": variant("missing", **{norm: None}),
        "not a weight": variant("extra", **{"model.more.weight": good[norm].clone()}),
        "no safetensors": tmp_path,
    }
    file = cases["truncated"] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    for what, folder in cases.items():
        error = swap(engine, folder)["error"]
        assert what in error and error.startswith("rollspec: ") and error.endswith("."), error
    after = call(engine, "info")["drafter"]
    assert after["version"] == before["version"] and after["refused"] == before["refused"] + len(cases)
    # The same, prepared on the thread.
    assert call(engine, "swap", dir=str(cases["NaN"]))["staging"]
    assert generate(engine, prompts) == plain["greedy"]
    assert "NaN" in call(engine, "info")["drafter"]["last"]["refused"]
    assert rate(engine) > 0.95


def test_lost_weights_are_put_back(engine: Any, prompts: list[list[int]], plain: dict[str, Any]) -> None:
    def lose(worker: Any) -> None:
        model = bridge(worker).head.drafter.model
        for p in model.parameters():
            p.data.zero_()
        for m in model.modules():
            if hasattr(m, "cpu_linear"):
                import vllm.model_executor.layers.utils as utils

                utils.dispatch_cpu_unquantized_gemm(m, remove_weight=False)

    engine.collective_rpc(lose)
    generate(engine, prompts[:2])
    assert rate(engine) < 0.5
    call(engine, "set_version", version=50)
    assert call(engine, "info")["drafter"]["resent"] == 1
    assert generate(engine, prompts) == plain["greedy"]
    assert rate(engine) > 0.95
    call(engine, "set_version", version=51)
    assert call(engine, "info")["drafter"]["resent"] == 1


def test_a_sleep_that_loses_the_weights_and_a_swap_asked_for_meanwhile(
    engine: Any, model: Path, prompts: list[list[int]], plain: dict[str, Any]
) -> None:
    """vLLM's CPU worker has no sleep mode: it is played by one that forgets the drafter, as level 2 does."""

    def forgetful(worker: Any) -> None:
        from rollspec.engine.vllm.v2 import install as module
        from rollspec.engine.vllm.v2.install import bridge

        def sleep(level: int = 1) -> None:
            for p in bridge(worker).head.drafter.model.parameters():
                p.data.zero_()

        worker.sleep, worker.wake_up = sleep, lambda tags=None: None
        module._watch_sleep(worker, bridge(worker).head)

    engine.collective_rpc(forgetful)
    before = call(engine, "info")["drafter"]
    engine.collective_rpc("sleep", args=(2,))
    answer = swap(engine, model, version=before["version"] + 1, canary=False)
    assert answer["deferred"], answer
    call(engine, "set_version", version=60)
    assert call(engine, "info")["drafter"]["version"] == before["version"], "it was swapped in its sleep"
    engine.collective_rpc("wake_up")
    assert during(engine, prompts, lambda: None) == plain["long"]
    after = call(engine, "info")["drafter"]
    assert after["version"] == before["version"] + 1 and after["resent"] == before["resent"] + 1
    generate(engine, prompts)
    rate(engine)
    assert generate(engine, prompts) == plain["greedy"]
    assert rate(engine) > 0.95
