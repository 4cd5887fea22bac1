"""The GPU suite where there is no GPU: what it says, plans, keeps and shows."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from vllm_like import like, plays

from benchmarks import cli as bench_cli
from benchmarks.gpu import __main__ as entry
from benchmarks.gpu import child, claims, kernels, machine, models, page, plan, propose, storm, suite
from benchmarks.gpu.plan import NotHereError, Part, Spec, parts
from benchmarks.harness import ROOT

CLEAN = {"commit": "c0ffee", "clean": True}
IDENTITIES = ("greedy", "coupled", "storm", "control")


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean tree, whatever is being worked on."""
    monkeypatch.setattr(machine, "revision", lambda copied=None: dict(CLEAN))


# ---- without a GPU


def test_without_a_gpu_it_says_so_and_claims_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "gpu.json"
    said = CliRunner().invoke(bench_cli.command, ["gpu", "--out", str(out), "--json"])
    assert said.exit_code == 0 and not out.exists()
    assert json.loads(said.stdout) == {"benchmark": "gpu", "measured": False, "claims": []}
    assert "no CUDA GPU is at hand" in " ".join(said.stderr.split())


def test_a_bare_machine_needs_none_of_our_packages() -> None:
    """torch and rich, but no pydantic, no typer and no vLLM: the entry and the kernels run."""
    code = (
        "import sys\n"
        "for name in ('pydantic', 'typer', 'vllm', 'yaml', 'msgspec', 'speculators'): sys.modules[name] = None\n"
        "import benchmarks.gpu.__main__\n"
        "from benchmarks.gpu import kernels, plan\n"
        "found = kernels.measure(plan.Spec('cpu', True, ''))\n"
        "print(sum(r['wrong'] for r in found['rows']), len(found['rows']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "2"], done.stderr


def test_an_unknown_device_is_refused() -> None:
    refused = CliRunner().invoke(bench_cli.command, ["gpu", "--device", "tpu"])
    assert "neither cuda nor cpu" in str(refused.exception)


def test_a_checkout_that_is_not_installed_is_a_plugin_all_the_same(tmp_path: Path) -> None:
    from importlib import metadata

    project = (ROOT / "pyproject.toml").read_text()
    assert [d.metadata["Name"] for d in metadata.distributions(path=[str(machine.plugin(tmp_path))])] == ["rollspec"]
    (found,) = next(iter(metadata.distributions(path=[str(tmp_path)]))).entry_points
    assert f'[project.entry-points."{found.group}"]\n{found.name} = "{found.value}"' in project


# ---- running and going on


def _fake(monkeypatch: pytest.MonkeyPatch, ran: list[str], bad: str = "") -> None:
    def execute(part: Part, options: Any, out: Path) -> dict[str, Any]:
        ran.append(part.name)
        if part.name == bad:
            return {"state": "failed", "reason": "it broke", "title": part.title, "seconds": 1.0}
        found = (
            {"rows": []} if part.name == "kernels" else {"tokens_per_second": 1.0, "micro_step_ms": 1.0, "shape": "t"}
        )
        return {"state": "done", "found": found, "title": part.title, "seconds": 1.0}

    monkeypatch.setattr(suite, "execute", execute)


def _options(tmp_path: Path, **more: Any) -> suite.Options:
    return suite.Options(**{"device": "cpu", "vllm": False, "out": tmp_path / "dry.json"} | more)


def test_a_second_call_goes_on_where_the_first_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    _fake(monkeypatch, ran, bad="training")
    out = suite.run(_options(tmp_path))
    assert out is not None and ran == ["kernels", "training"]
    states = {n: p["state"] for n, p in json.loads(out.read_text())["parts"].items()}
    assert states["kernels"] == "done" and states["training"] == "failed" and states["start"] == "left out"
    _fake(monkeypatch, ran)
    suite.run(_options(tmp_path))
    assert ran[2:] == ["training"]  # what failed is tried again, what is done is not
    assert json.loads(out.read_text())["parts"]["training"]["state"] == "done"
    suite.run(_options(tmp_path, fresh=True))
    assert ran[3:] == ["kernels", "training"]


def test_parts_whose_times_do_not_matter_run_at_once_and_share_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    beside: dict[str, int] = {}
    meet = threading.Barrier(len(IDENTITIES), timeout=20)

    def execute(part: Part, options: Any, out: Path) -> dict[str, Any]:
        running.add(part.name)
        if not part.timed:
            meet.wait()
        beside[part.name] = len(running)
        if not part.timed:
            meet.wait()
        running.discard(part.name)
        return {"state": "failed", "reason": "only its time is asked for", "title": part.title, "seconds": 1.0}

    monkeypatch.setattr(suite, "execute", execute)
    monkeypatch.setattr(machine, "has_vllm", lambda: True)
    options = _options(tmp_path, vllm=True, only=("exact", "start", "swap"), together=len(IDENTITIES))
    suite.run(options)
    assert beside == {"start": 1, "swap": 1} | {f"exact/{what}": len(IDENTITIES) for what in IDENTITIES}
    by_name = {p.name: suite._engine(p, dataclasses.replace(options, engine={"seed": 1})) for p in parts("cuda")}
    assert by_name["start"] == {"seed": 1}
    assert by_name["exact/greedy"]["gpu_memory_utilization"] * len(IDENTITIES) < 1 and by_name["exact/greedy"]["seed"]


def test_the_command_line_has_every_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[suite.Options] = []
    monkeypatch.setattr(entry, "run", lambda options: asked.append(options))
    line = "x --minutes 3 --device cpu --no-vllm --fresh --only a b --model m --head h --prompts p --together 2"
    monkeypatch.setattr(sys, "argv", [*line.split(), "--engine", '{"seed": 1}', "--commit", "c0ffee", "--out", "o"])
    entry.main()
    given = {f.name: getattr(asked[0], f.name) for f in dataclasses.fields(suite.Options)}
    defaults = {f.name: getattr(suite.Options(), f.name) for f in dataclasses.fields(suite.Options)}
    assert not [name for name in given if given[name] == defaults[name]]


@pytest.mark.parametrize("other", [{"commit": "beef", "clean": True}, {"commit": "c0ffee", "clean": False}])
def test_another_revision_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]) -> None:
    ran: list[str] = []
    _fake(monkeypatch, ran)
    suite.run(_options(tmp_path))
    monkeypatch.setattr(machine, "revision", lambda copied=None: dict(other))
    suite.run(_options(tmp_path))
    suite.run(_options(tmp_path))  # of a changed tree it is not known whether it is still the same
    again = 0 if other["clean"] else 2
    assert len(ran) == 4 + again


def test_a_part_that_crashes_or_hangs_costs_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LEAST", 0.0)
    broken = Part("x", "X", "kernels:nothing_of_that_name", 1.0)
    found = suite.execute(broken, _options(tmp_path), tmp_path / "dry.json")
    assert found["state"] == "failed" and "nothing_of_that_name" in found["reason"]
    hanging = dataclasses.replace(broken, minutes=0.0001)
    found = suite.execute(hanging, _options(tmp_path), tmp_path / "dry.json")
    assert found["state"] == "failed" and "did not end within" in found["reason"]


def test_what_is_missing_here_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(spec: Spec) -> None:
        raise NotHereError("no head")

    monkeypatch.setattr(kernels, "measure", measure)
    assert child.run("kernels:measure", Spec("cpu", True, "")) == {"state": "skipped", "reason": "no head"}


# ---- what is measured


def test_the_plain_definition_of_verification_catches_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollspec.engine.vllm.v2 import verify

    right = verify.accept
    assert kernels._accept(Spec("cpu", True, ""), 64)["wrong"] == 0
    monkeypatch.setattr(verify, "accept", lambda *a: (right(*a)[0], right(*a)[1].clamp(max=1)))
    assert kernels._accept(Spec("cpu", True, ""), 64)["wrong"] > 0


def test_shapes_are_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    for shape, hidden in (("qwen3-1.7b", 2048), ("qwen3-8b", 4096)):
        config = AutoConfig.from_pretrained(models.target(tmp_path, shape))
        assert config.model_type == "qwen3" and config.hidden_size == hidden
        head = json.loads((models.head(tmp_path, shape) / "config.json").read_text())
        ids = head["eagle_aux_hidden_state_layer_ids"]
        assert ids == sorted(set(ids)) and ids[-1] < config.num_hidden_layers


def test_the_demos_policy_is_made_without_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` is a package that a bare machine may lack."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in [n for n in sys.modules if n.startswith("examples.grpo_arithmetic.data")]:
        monkeypatch.delitem(sys.modules, name)
    model = models.real(Spec("cpu", True, str(tmp_path)))
    assert (Path(model) / "config.json").is_file() and models.real(Spec("cpu", True, str(tmp_path))) == model
    prompts = models.real_prompts(model, 5)
    assert len({tuple(p) for p in prompts}) == 5 and models.real_prompts(model, 5) == prompts
    assert models.real(Spec("cpu", True, str(tmp_path), model="/mine")) == "/mine"


def test_storms_of_one_seed_are_the_same_storm() -> None:
    import random

    prompts = [[5, 6, 7], [8, 9]]
    one, two = (storm.requests(random.Random(3), prompts, 40) for _ in range(2))
    assert one == two and len(one) == 40
    assert len({json.dumps(p, sort_keys=True) for _, p in one}) > 10


def test_waits_for_the_device_are_counted_in_their_own_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading
    import warnings

    import torch

    class Event:
        def synchronize(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", type("Stream", (Event,), {}))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    before = Event.synchronize
    with propose.Synchronisations("warn") as seen:
        Event().synchronize()
        other = threading.Thread(target=lambda: Event().synchronize())
        other.start()
        other.join()
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
    assert seen.count == 2 and len(seen.where) == 2
    assert Event.synchronize is before
    with pytest.raises(RuntimeError, match="waits for the device"), propose.Synchronisations("error"):
        Event().synchronize()
    assert Event.synchronize is before


def test_propose_is_timed_and_dummy_runs_are_not() -> None:
    @plays("vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator")
    class Speculator:
        def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False) -> int:
            return int(input_batch.num_reqs)

    worker = like(
        "vllm.v1.worker.gpu_worker:Worker",
        model_runner=like("vllm.v1.worker.gpu.model_runner:GPUModelRunner", speculator=Speculator()),
    )
    propose.watch(worker, False, "warn")
    propose.watch(worker, False, "warn")  # a second time is no second layer
    batch = like("vllm.v1.worker.gpu.input_batch:InputBatch", num_reqs=3)
    call = worker.model_runner.speculator.propose
    assert call(input_batch=batch, dummy_run=True) == 3 and call(batch, None) == 3
    (row,) = propose.take(worker)
    assert row["requests"] == 3 and row["device_us"] is None and row["host_us"] > 0
    assert propose.take(worker) == []


def test_prompts_of_the_cost_curve_repeat_themselves() -> None:
    for prompt in propose.repeating(3, 64):
        assert len(prompt) == 64 and prompt[:16] == prompt[16:32]


# ---- claims and the page


def sample(**more: Any) -> dict[str, Any]:
    """A whole result as an H100 might give it."""

    def done(found: Any) -> dict[str, Any]:
        return {"state": "done", "title": "t", "seconds": 12.0, "found": found}

    identity = {"requests": 96, "tokens": 9000, "parted": 0, "parted_at": [], "drafted": 900.0, "accepted": 500.0}
    ratio = {"median": 1.001, "low": 0.999, "high": 1.004, "quartiles": [1.0, 1.002], "n": 11}
    row = {"device_us": 31.0, "host_us": 90.0, "step_us": 6000.0, "host_share": 0.015, "synchronisations": 0}
    parts_: dict[str, Any] = {
        "start": done({"v2_runner": True, "asynchronous": True, "full_graphs": True, "state": "on", "reason": None,
                       "graphs": {"captured": {"FULL": 35}}, "start_seconds": 41.0, "holds": True}),
        **{f"{kernels}/{what}": done(identity) for kernels in ("exact", "invariant") for what in IDENTITIES},
        "propose": done({"batches": [{"batch": b, **row} for b in (1, 64, 256)], "error_mode_passed": True}),
        "swap": done({"pause_ms": {"median": 0.4, "p99": 0.9}, "pause_steps": {"median": 0.1, "p99": 0.2}}),
        "capture": done({"1": {"ratio": ratio}, "8": {"ratio": ratio}}),
        "training": done({"tokens_per_second": 41_000.0, "micro_step_ms": 50.0, "shape": "qwen3-1.7b"}),
        "kernels": {"state": "failed", "title": "t", "seconds": 1.0, "reason": "<b>RuntimeError</b>"},
    }  # fmt: skip
    for arm in plan.ARMS:
        batches = [{"batch": b, "step_ms": 5.0 + b / 50, "tokens_per_second": 200.0 * b} for b in (1, 64, 256)]
        parts_[f"cost/qwen3-8b/{arm}"] = done({"shape": "qwen3-8b", "arm": arm, "batches": batches})
    result = {
        "benchmark": "gpu", "format": suite.FORMAT, "dry": False, **CLEAN, "device": {"name": "NVIDIA H100"},
        "versions": {"torch": "2.11"}, "model": "m", "began": "2026", "minutes": 20.0, "parts": parts_, **more,
    }  # fmt: skip
    return result | {"claims": claims.of(result)}


def states(result: dict[str, Any]) -> dict[str, str]:
    return {c["what"]: c["state"] for c in result["claims"] if not c["part"].startswith("cost/")}


def test_claims_of_a_good_run() -> None:
    found = states(sample())
    assert found.pop("Verification on the device") == "fails"
    assert found.pop("Tokens per verify step, last epoch") == "not measured"
    assert found.pop("Idle training of a head") == "measured"
    assert {found.pop(what) for what in [*found] if "control" in what or "another size" in what} == {"measured"}
    assert set(found.values()) == {"holds"}


@pytest.mark.parametrize(
    ("part", "field", "value", "what", "state"),
    [
        ("exact/greedy", "parted", 1, "Greedy texts are those without drafts", "fails"),
        ("exact/storm", "accepted", 0.0, "Mixed requests in any batch say the same", "undecided"),
        ("propose", "error_mode_passed", None, "Device time of propose", "fails"),
        ("start", "holds", False, "An engine starts on the second runner", "fails"),
        ("swap", "pause_steps", {"median": 0.1, "p99": 1.2}, "Pause of a swap", "fails"),
    ],
)
def test_a_claim_that_does_not_hold(part: str, field: str, value: Any, what: str, state: str) -> None:
    result = sample()
    result["parts"][part]["found"] = result["parts"][part]["found"] | {field: value}
    assert states(result | {"claims": claims.of(result)})[what] == state


@pytest.mark.parametrize("why", [{"dry": True}, {"clean": False}, {"commit": None}, {"clean": None}])
def test_no_claim_from_a_dry_run_or_an_unknown_tree(why: dict[str, Any]) -> None:
    result = sample(**why)
    assert not {"holds", "fails"} & set(states(result).values())
    assert "nothing is claimed" in claims.headline(result)
    assert "nothing claimed" in page.render(result)


def test_the_page_is_self_contained_and_shows_every_claim() -> None:
    html = page.render(sample())
    for claim in sample()["claims"]:
        assert claim["what"] in html
    assert "--run: #0f766e" in html and html.count("<svg") == 2
    assert "<b>RuntimeError</b>" not in html  # escaped
    assert not [tag for tag in ("<script", "<link", "http://", "src=") if tag in html]


def test_make_gpu_needs_no_environment_of_ours() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "gpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "ARGS"))},
    )
    assert done.stdout.strip() == "python3 -m benchmarks.gpu"
