"""Drafts around vLLM's second model runner: which slots a step verifies, and which tokens it emits."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from vllm_like import check, like

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402

from rollspec import RollspecConfig  # noqa: E402
from rollspec.engine.vllm.v2 import scheduling  # noqa: E402
from rollspec.engine.vllm.v2.adapter import DRAFTED, Adapter  # noqa: E402
from rollspec.engine.vllm.v2.verify import accept  # noqa: E402
from rollspec.head.ranks import Ranks  # noqa: E402

K = 4
RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
BATCH = "vllm.v1.worker.gpu.input_batch:InputBatch"
OUTPUTS = "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker"


def naive(drawn: list[int], fed: list[int], starts: list[int]) -> list[list[int]]:
    """What requests emit, one row after the other."""
    out = []
    for a, b in itertools.pairwise(starts):
        said = [drawn[a]]
        for row in range(a + 1, b):
            if fed[row] != said[-1]:
                break
            said.append(drawn[row])
        out.append(said)
    return out


def test_a_draft_is_accepted_while_it_is_what_was_drawn() -> None:
    rng = random.Random(0)
    lengths = set()
    for _ in range(300):
        rows = [rng.randrange(K + 1) + 1 for _ in range(rng.randrange(1, 6))]
        starts = [0, *np.cumsum(rows).tolist()]
        drawn = [rng.randrange(3) for _ in range(starts[-1])]
        fed = [rng.choice([-1, 0, 1, 2]) for _ in drawn]
        tokens, count = accept(torch.tensor(drawn), torch.tensor(fed), torch.tensor(starts, dtype=torch.int32), K)
        assert tokens.shape == (len(rows), K + 1) and count.dtype == torch.int32
        said = [row[:n] for row, n in zip(tokens.tolist(), count.tolist(), strict=True)]
        assert said == naive(drawn, fed, starts)
        lengths |= {len(s) for s in said}
    assert lengths == set(range(1, K + 2))


class Bridge:
    """rollspec's side: drafts what a test sets."""

    policy = None
    fault = None
    began = 1.0
    rests = 0

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.next: list[list[int]] = []

    def before_step(self, scheduled: Any) -> None:
        pass

    def rests_for(self) -> int:
        return self.rests

    def begins_nothing(self, scheduled: Any) -> bool:
        return not (scheduled.scheduled_new_reqs or scheduled.finished_req_ids)

    def decide(self, step: Any) -> int:
        self.steps.append(step)
        return 0

    def finish(self, rows: Any, probs: Any, batch: int) -> list[list[int]]:
        assert batch == len(self.next)
        return self.next


def scheduled(slots: dict[str, list[int]], new: tuple[str, ...] = (), finished: tuple[str, ...] = ()) -> Any:
    """A step of requests with these draft slots, each of one token and its slots."""
    counts = {r: 1 + len(p) for r, p in slots.items()}
    requests = [
        dataclasses.replace(
            NewRequestData(
                req_id=r,
                prompt_token_ids=[1, 2],
                mm_features=[],
                sampling_params=None,
                pooling_params=None,
                block_ids=([0],),
                num_computed_tokens=1,
                lora_request=None,
            )
        )
        for r in new
    ]
    return dataclasses.replace(
        SchedulerOutput.make_empty(),
        scheduled_new_reqs=requests,
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={r: p for r, p in slots.items() if p},
        finished_req_ids=set(finished),
    )


def adapter_of(bridge: Bridge) -> Adapter:
    states = like("vllm.v1.worker.gpu.states:RequestState", draft_tokens=torch.zeros(8, K, dtype=torch.int64))
    runner = like(
        RUNNER, num_speculative_steps=K, device=torch.device("cpu"), execute_model_state=object(), req_states=states,
        structured_outputs_worker=like(OUTPUTS, num_bonus_tokens=1),  # until vLLM 0.33: which branch is taken
    )  # fmt: skip
    return Adapter(bridge, runner, Ranks())  # type: ignore[arg-type]


def run(adapter: Adapter, step: Any, grammar: Any = None) -> tuple[Any, Any, Any]:
    """One step of the runner: (the step as it ran, masks as they came, the runner's output)."""
    ran: list[Any] = []
    adapter.execute_model(lambda s: ran.append(s), step)
    ids = list(step.num_scheduled_tokens)
    batch = like(
        BATCH,
        req_ids=ids,
        num_reqs=len(ids),
        idx_mapping=torch.arange(len(ids)),
        seq_lens_cpu_upper_bound=torch.full((len(ids),), 9),
    )
    output = ModelRunnerOutput(req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)})
    masks: list[Any] = []

    def sample_tokens(given: Any) -> Any:
        masks.append(given)
        sampled = like(
            "vllm.v1.worker.gpu.sample.output:SamplerOutput", sampled_token_ids=torch.full((len(ids), K + 1), 7)
        )
        adapter.sample(lambda: (sampled, torch.ones(len(ids), dtype=torch.int32), None))
        drafts = adapter.propose(lambda b: torch.full((b.num_reqs, K), 3), batch)
        adapter.runner.req_states.draft_tokens[batch.idx_mapping] = drafts
        return output

    adapter.sample_tokens(sample_tokens, grammar)
    return ran[0], masks[0], output


def test_slots_without_a_draft_leave_the_step() -> None:
    bridge = Bridge()
    adapter = adapter_of(bridge)
    bridge.next = [[11, 12], [], [13, 14, 15, 16]]
    run(adapter, scheduled({"a": [], "b": [], "c": []}, new=("a", "b", "c")))
    # The runner's own copy of the drafts: what was drafted, and filler behind it.
    assert adapter.runner.req_states.draft_tokens[:3].tolist() == [[11, 12, 3, 3], [3] * K, [13, 14, 15, 16]]

    step = scheduled({"a": [-1] * K, "b": [-1] * K, "c": [-1] * 3})
    bridge.next = [[], [], []]
    ran, _, output = run(adapter, step)
    assert ran.num_scheduled_tokens == {"a": 3, "b": 1, "c": 4} and ran.total_num_scheduled_tokens == 8
    assert ran.scheduled_spec_decode_tokens == {"a": [11, 12], "c": [13, 14, 15]}
    assert bridge.steps[-1].verified == {"a": [11, 12], "c": [13, 14, 15]} and bridge.steps[-1].tokens == 8
    assert getattr(output, DRAFTED) == {"a": 2, "c": 3}
    assert step.num_scheduled_tokens["a"] == K + 1, "the scheduler's own copy was changed"


def test_a_scheduler_that_waits_may_cut_drafts() -> None:
    bridge = Bridge()
    adapter = adapter_of(bridge)
    bridge.next = [[11, 12, 13]]
    run(adapter, scheduled({"a": []}, new=("a",)))
    taken = adapter.take_draft_token_ids(lambda: DraftTokenIds([], []))
    assert (taken.req_ids, taken.draft_token_ids) == (["a"], [[11, 12, 13]])
    taken.draft_token_ids[0].clear()  # as the scheduler does with what a grammar refuses
    bridge.next = [[]]
    ran, _, _ = run(adapter, scheduled({"a": [11]}))
    assert ran.scheduled_spec_decode_tokens == {"a": [11]} and ran.total_num_scheduled_tokens == 2


def test_drafts_of_a_request_that_was_preempted_are_not_verified() -> None:
    bridge = Bridge()
    adapter = adapter_of(bridge)
    bridge.next = [[11], [12]]
    run(adapter, scheduled({"a": [], "b": []}, new=("a", "b")))
    bridge.next = [[]]
    ran, _, _ = run(adapter, scheduled({"a": [-1] * K}, new=("a",), finished=("b",)))
    assert not ran.scheduled_spec_decode_tokens and ran.total_num_scheduled_tokens == 1
    assert set(adapter.requests) == {"a"}


def test_masks_of_slots_that_left_are_left_out() -> None:
    bridge = Bridge()
    adapter = adapter_of(bridge)
    bridge.next = [[11], [12, 13]]
    run(adapter, scheduled({"a": [], "b": []}, new=("a", "b")))
    rows = np.arange(2 * (K + 1))[:, None]
    bridge.next = [[], []]
    grammar = GrammarOutput(["b", "a"], rows)
    _, masks, _ = run(adapter, scheduled({"a": [-1] * K, "b": [-1] * K}), grammar)
    assert masks.grammar_bitmask[:, 0].tolist() == [0, 1, 2, K + 1, K + 2]
    # From vLLM 0.33 on every request has K + 1 masks, whatever it verifies.
    adapter.runner.structured_outputs_worker = object()
    bridge.next = [[], []]
    assert run(adapter, scheduled({"a": [-1] * K, "b": [-1] * K}), grammar)[1] is grammar


def scheduler(ours: bool = True) -> Any:
    """vLLM's, of an engine that rollspec is on in, or is not."""
    config = {"rollspec": RollspecConfig.load("default").to_dict()} if ours else {}
    return like(
        "vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        max_num_scheduled_tokens=100,
        running=[None] * 10,
        use_v2_model_runner=True,
        vllm_config=like("vllm.config:VllmConfig", additional_config=config),
    )


def test_statistics_count_drafts_and_not_slots() -> None:
    step = scheduled({"a": [-1] * K, "b": [-1] * K})
    output = ModelRunnerOutput(req_ids=["a", "b"], req_id_to_index={"a": 0, "b": 1})
    output.__dict__[DRAFTED] = {"a": 3}
    scheduling.count_drafts(lambda *_: None, None, step, output)
    assert step.num_invalid_spec_tokens == {"a": 1, "b": K}
    made: list[int] = []
    for r in "ab":
        scheduling.leave_out_empty(
            lambda _, stats, num_draft_tokens, **__: made.append(num_draft_tokens),
            scheduler(),
            None,
            num_draft_tokens=K,
            num_invalid_spec_tokens=step.num_invalid_spec_tokens,
            request_id=r,
        )
    assert made == [K], "a request without a draft was counted"


def test_a_step_parses_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled_by, step = scheduler(), scheduled({"a": [-1] * K})
    step.num_spec_tokens_to_schedule = K

    def parse(_: Any) -> Any:
        raise AssertionError("a configuration was parsed while requests run: about 1 ms for each of them")

    monkeypatch.setattr(RollspecConfig, "from_dict", parse)
    scheduling.limit_slots(lambda *_: None, scheduled_by, step)
    scheduling.count_drafts(lambda *_: None, scheduled_by, step, ModelRunnerOutput(req_ids=[], req_id_to_index={}))
    scheduling.leave_out_empty(
        lambda *_, **__: None,
        scheduled_by,
        None,
        num_draft_tokens=K,
        num_invalid_spec_tokens=None,
        request_id="a",
    )


def test_slots_leave_room_for_prompts() -> None:
    for ours, slots in ((True, 4), (False, 16)):
        step = dataclasses.replace(SchedulerOutput.make_empty(), num_spec_tokens_to_schedule=16)
        scheduling.limit_slots(lambda s, o: None, scheduler(ours), step)
        assert step.num_spec_tokens_to_schedule == slots


def test_drafts_made_on_a_thread_are_put_in_place_when_the_next_step_begins() -> None:
    bridge = Bridge()
    adapter = adapter_of(bridge)
    adapter._thread = ThreadPoolExecutor(1)
    bridge.next = [[11, 12]]
    waited: list[bool] = []

    class Output:
        sampled_token_ids = np.array([[7, 0, 0, 0, 0]])
        num_sampled_tokens_np = np.array([1])
        model_runner_output = ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0})
        copy_event = like("torch.cuda.streams:Event", synchronize=lambda: waited.append(True))

    check("vllm.v1.worker.gpu.async_utils:AsyncOutput", *(n for n in vars(Output) if not n.startswith("_")))
    batch = like(
        BATCH, req_ids=["a"], num_reqs=1, idx_mapping=torch.tensor([5]), seq_lens_cpu_upper_bound=torch.tensor([3])
    )

    def sample_tokens(_: Any) -> Any:
        out = adapter.propose(lambda b: torch.full((1, K), 3), batch)
        assert out.tolist() == [[3] * K] and not bridge.steps, "the step waited for its tokens"
        return Output()

    adapter.execute_model(lambda s: None, scheduled({"a": []}, new=("a",)))
    adapter.sample_tokens(sample_tokens, None)
    ran: list[Any] = []
    adapter.execute_model(ran.append, scheduled({"a": [-1] * K}))
    assert waited == [True] and bridge.steps[0].sampled == [[7]]
    assert ran[0].scheduled_spec_decode_tokens == {"a": [11, 12]}
    assert adapter.runner.req_states.draft_tokens[5].tolist() == [11, 12, 0, 0]


def test_steps_begin_without_the_last_ones_tokens_while_the_tuner_rests() -> None:
    bridge = Bridge()
    adapter = adapter_of(bridge)
    adapter._thread = ThreadPoolExecutor(1)
    bridge.next = [[]]
    known = threading.Event()
    batch = like(
        BATCH, req_ids=["a"], num_reqs=1, idx_mapping=torch.tensor([5]), seq_lens_cpu_upper_bound=torch.tensor([3])
    )
    said = itertools.count(7)

    def step(**more: Any) -> None:
        adapter.execute_model(lambda s: None, scheduled({"a": [-1] * K}, **more))
        output = like(
            "vllm.v1.worker.gpu.async_utils:AsyncOutput",
            sampled_token_ids=np.array([[next(said)]]),
            num_sampled_tokens_np=np.array([1]),
            model_runner_output=ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}),
            copy_event=like("torch.cuda.streams:Event", synchronize=lambda: known.wait(20)),
        )

        def sample_tokens(_: Any) -> Any:
            adapter.propose(lambda b: torch.full((1, K), 3), batch)
            return output

        adapter.sample_tokens(sample_tokens, None)

    def seen() -> list[int]:
        return [s.sampled[0][0] for s in bridge.steps]

    step(new=("a",))
    bridge.rests = 2
    known.set()
    step()  # waits, and learns that two more need not
    known.clear()
    step()
    step()
    assert seen() == [7], "none of them is known"
    threading.Timer(0.2, known.set).start()
    step()
    assert known.is_set() and seen()[:4] == [7, 8, 9, 10], "in their order"
    assert [s.began for s in bridge.steps[:4]] == [1.0, 1.0, None, None]
    step()  # two more may go ahead again, but not one that a request ends with
    known.clear()
    threading.Timer(0.2, known.set).start()
    step(finished=("b",))
    assert known.is_set() and seen()[:6] == [7, 8, 9, 10, 11, 12]
    adapter.join()
    assert not adapter._late and seen() == [7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize("preset", ["default", "long_tail"])
def test_the_first_step_imports_and_compiles_nothing(preset: str) -> None:
    code = f"""
import sys
from rollspec import RollspecConfig
from rollspec.engine.vllm.v2.install import _warm
from rollspec.step import DraftEngine
config = RollspecConfig.load({preset!r}, env={{}})
_warm(config)
before = set(sys.modules)
engine = DraftEngine(config, 64)
engine.begin("a", [1, 2, 3], 32)
for n in range(1, 10):
    engine.timed(n, True, 0.01 * n, 1)
    engine.step(["a"], [[1 + n % 3]], {{}})
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
