"""TRL's hooks on small stand-ins for its classes; the real ones run in tests/e2e/test_trl.py."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import rollspec_trl
from rollspec_trl import engines, generation, options, trainer
from rollspec_trl.trainer import state_of
from vllm_like import like, plays

from rollspec.engine import calls
from rollspec.engine.vllm import plugin
from rollspec.errors import ConfigError
from rollspec.proposal.base import prompt_key
from rollspec.telemetry import health
from rollspec.telemetry.engine_stats import EngineStats

torch = pytest.importorskip("torch")

ACCELERATOR = "accelerate.accelerator:Accelerator"
STATS = EngineStats(steps=4, requests=8, verified=4, drafted=10, accepted=5, emitted=13, version=3).to_dict()


class Llm:
    """Answers operations; remembers them."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"info": {"state": "suffix"}, "stats": STATS, **answers}
        self.calls: list[tuple[str, Any]] = []

    def collective_rpc(self, method: str, args: tuple[str, dict[str, Any]]) -> list[Any]:
        assert method == "rollspec"
        op, payload = args
        self.calls.append((op, payload))
        answer = self.answers.get(op, {})
        if isinstance(answer, Exception):
            raise answer
        return [{}, answer]

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> None:
        pass

    def named(self, op: str) -> list[Any]:
        return [payload for name, payload in self.calls if name == op]


@pytest.fixture(autouse=True)
def _switch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tested TRL is there, whatever is; afterwards rollspec is off again."""
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.16.0" if name == "trl" else real(name))
    before = options._config
    yield
    options._config = before
    plugin.enable(None)


def generation_class() -> Any:
    @plays("trl.generation.vllm_generation:VLLMGeneration")
    class VLLMGeneration:
        def __init__(self, llm: Llm, **changes: Any) -> None:
            self.llm, self.mode, self.min_p, self.generation_kwargs = llm, "colocate", 0.0, {}
            self.accelerator = like(ACCELERATOR, is_main_process=True)
            self.built_with: Any = None
            self.__dict__.update(changes)
            self._init_vllm()

        def _init_vllm(self) -> None:
            self.built_with = plugin._enabled

        def sync_weights(self) -> None:
            pass

        def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
            return prompts, [[7, 8], [9]], [[[-0.5], [-0.25]], [[-1.0]]], None

    found = ModuleType("vllm_generation")
    found.VLLMGeneration = VLLMGeneration  # type: ignore[attr-defined]
    generation.install(found)
    generation.install(found)  # a second time changes nothing
    return VLLMGeneration


def trainer_of(llm: Llm, tmp_path: Path, **changes: Any) -> Any:
    @plays("trl.trainer.grpo_trainer:GRPOTrainer", "_get_output_dir")  # of a base in another package
    class Trainer:
        def __init__(self) -> None:
            self.vllm_generation = generation_class()(llm, **changes)
            self.accelerator = like(ACCELERATOR, process_index=0, num_processes=1)
            self.model = like("torch.nn.modules.module:Module", training=True)
            self.state = like("transformers.trainer_callback:TrainerState", global_step=0)
            self.reward_weights = torch.tensor([1.0, 2.0])
            self.logged: list[dict[str, Any]] = []

        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            self.vllm_generation.sync_weights()
            self.vllm_generation.generate(inputs, None, 2)
            self._calculate_rewards(inputs, inputs, None, None)
            mask = torch.tensor([[1, 1], [1, 0]])
            sampled = torch.tensor([[-0.5, -0.25], [-1.0, 0.0]])
            return {"completion_mask": mask, "sampling_per_token_logps": sampled, "old_per_token_logps": sampled + 0.1}

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            return torch.tensor([[0.5, 0.25], [float("nan"), float("nan")]])

        def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
            self.logged.append(logs)

        def _get_output_dir(self, trial: Any) -> str:
            return str(tmp_path)

        def _save_checkpoint(self, model: Any, trial: Any) -> str:
            return "saved"

        def _load_optimizer_and_scheduler(self, checkpoint: Any) -> str:
            return "loaded"

    found = ModuleType("grpo_trainer")
    found.GRPOTrainer = Trainer  # type: ignore[attr-defined]
    trainer.install(found)
    trainer.install(found)
    return Trainer()


PROMPTS = [[1, 2], [1, 2]]


def test_a_step_sends_version_and_rewards_and_logs_metrics(tmp_path: Path) -> None:
    rollspec_trl.enable("suffix_only")
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    assert t.vllm_generation.built_with.preset == "suffix_only"
    for step in range(2):
        t.state.global_step = step
        t._generate_and_score_completions(PROMPTS)
        t.log({"loss": 0.1})
    assert llm.named("set_version") == [{"version": 0}, {"version": 1}]
    # 1.0 * 0.5 + 2.0 * 0.25; the second response has no reward.
    assert llm.named("rewards") == [{"items": [[prompt_key([1, 2]), prompt_key([7, 8]), 1.0]]}] * 2
    out = t.logged[-1]
    assert out["loss"] == 0.1 and out["rollspec/reward/mean"] == 1.0
    assert out["rollspec/accept/rate"] == 0.5 and out["rollspec/policy/version"] == 3
    assert out["rollspec/length/max"] == 2 and out["rollspec/health/nan_logprobs"] == 0
    assert out["rollspec/health/logprob_gap"] == pytest.approx(0.1)
    assert 0 <= out["rollspec/rollout/generation_share"] <= 1


def test_a_step_says_once_what_is_wrong_with_its_rollouts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in says the same in every epoch, and its trainer is 0.1 nats away from its engine."""
    rollspec_trl.enable({"mode": "coupled", "reuse.mode": "coupled", "telemetry.health.max_overlap": 0.1})
    monkeypatch.setitem(health.LIMITS, "gap", 0.05)
    t = trainer_of(Llm(), tmp_path, top_p=0.9)
    with caplog.at_level(logging.WARNING, "rollspec"):
        for epoch in range(3):
            t.state.global_step = epoch
            t._generate_and_score_completions(PROMPTS)
            t.log({"loss": 0.1})
    first, second, _ = t.logged
    assert "rollspec/health/epoch_overlap" not in first and first["rollspec/health/warnings"] == 1.0
    assert second["rollspec/health/epoch_overlap"] == second["rollspec/health/epoch_identical"] == 1.0
    # e^-0.5 + e^-0.75 + e^-1, of three tokens
    assert second["rollspec/health/epoch_overlap_chance"] == pytest.approx(0.4822, abs=1e-4)
    assert second["rollspec/health/ess_sequence"] == pytest.approx(0.9975, abs=1e-4), "of two responses, not of a batch"
    assert second["rollspec/health/warnings/gap"] == second["rollspec/health/warnings/overlap"] == 1.0
    texts = [r.getMessage() for r in caplog.records]
    assert len(texts) == 2 and "at step 0 engine and trainer differ" in texts[0] and "top_p and top_k cut" in texts[0]
    assert "at step 1" in texts[1] and "reuse.mode = coupled does that" in texts[1]


def test_of_several_processes_none_knows_which_sample_is_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollspec_trl.enable()
    t = trainer_of(Llm(), tmp_path)
    t.accelerator.num_processes = 2
    for _ in range(2):
        t._generate_and_score_completions(PROMPTS)
    assert state_of(t).overlaps == []


def test_evaluations_and_the_summary_stay_as_they_are(tmp_path: Path) -> None:
    rollspec_trl.enable()
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    t.model.training = False
    t._generate_and_score_completions(PROMPTS)
    t.log({"eval_loss": 1.0})
    t.model.training = True
    t.log({"train_runtime": 1.0})
    assert t.logged == [{"eval_loss": 1.0}, {"train_runtime": 1.0}]
    assert llm.named("rewards") == [] and llm.named("stats") == []


def test_the_same_weights_sent_again_are_no_new_version(tmp_path: Path) -> None:
    rollspec_trl.enable()
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    t._generate_and_score_completions(PROMPTS)
    t.vllm_generation.sync_weights()  # TRL's sleep mode does
    assert llm.named("set_version") == [{"version": 0}]


def test_other_trainers_have_versions_without_a_step() -> None:
    rollspec_trl.enable()
    llm = Llm()
    g = generation_class()(llm)
    g.sync_weights()
    g.generate(prompts=PROMPTS, images=None, num_generations=2)
    g.sync_weights()
    assert llm.named("set_version") == [{"version": 0}, {"version": 1}]


def test_checkpoints_carry_the_history(tmp_path: Path) -> None:
    rollspec_trl.enable()
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    t.state.global_step = 4
    assert t._save_checkpoint(None, None) == "saved"
    folder = tmp_path / "checkpoint-4" / "rollspec" / "replica_0"
    assert llm.named("save") == [{"dir": str(folder)}]
    folder.mkdir(parents=True)
    assert t._load_optimizer_and_scheduler(None) == t._load_optimizer_and_scheduler(str(tmp_path / "none")) == "loaded"
    t._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-4"))
    assert llm.named("load") == []
    t._generate_and_score_completions(PROMPTS)
    # After the version, so that what is loaded is older than what is said from now on.
    assert [op for op, _ in llm.calls if op in ("set_version", "load")] == ["set_version", "load"]
    t._generate_and_score_completions(PROMPTS)
    assert llm.named("load") == [{"dir": str(folder)}]


@pytest.mark.parametrize(
    ("changes", "word"), [({"min_p": 0.1}, "min_p"), ({"generation_kwargs": {"logit_bias": {1: 2.0}}}, "logit_bias")]
)
def test_what_vllm_would_refuse_is_not_speculated(
    changes: dict[str, Any], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    rollspec_trl.enable()
    with caplog.at_level(logging.WARNING, "rollspec"):
        g = generation_class()(Llm(info={"state": "off"}), **changes)
    assert list(g.built_with) == ["off"]
    assert plugin._enabled is options.config(), "the next engine is asked anew"
    assert [r for r in caplog.records if word in r.getMessage()] == caplog.records and len(caplog.records) == 1


def test_a_server_that_speculates_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine cannot be changed from here: what will fail is said, in one sentence."""
    rollspec_trl.enable()
    monkeypatch.setattr(engines.Server, "ask", lambda self, op, payload: [{"state": "suffix"}])
    client = like("trl.generation.vllm_client:VLLMClient", base_url="http://host:8000")
    with caplog.at_level(logging.WARNING, "rollspec"):
        generation_class()(Llm(), mode="server", vllm_client=client, min_p=0.1)
    assert len(caplog.records) == 1 and "the server speculates, but min_p" in caplog.text


def test_an_engine_without_rollspec_is_said_once_and_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollspec_trl.enable()
    llm = Llm(info=AttributeError("no method rollspec"))
    with caplog.at_level(logging.WARNING, "rollspec"):
        t = trainer_of(llm, tmp_path)
        t._generate_and_score_completions(PROMPTS)
        t.log({"loss": 0.1})
        t._save_checkpoint(None, None)
    assert [op for op, _ in llm.calls] == ["info"]
    assert "without speculation" in caplog.text and "accept/rate" not in str(t.logged)
    assert t.logged[0]["rollspec/reward/mean"] == 1.0


def test_a_failing_hook_is_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollspec_trl.enable()
    t = trainer_of(Llm(), tmp_path)
    monkeypatch.setattr(np, "isfinite", lambda x: 1 / 0)
    with caplog.at_level(logging.ERROR, "rollspec"):
        for _ in range(2):
            t._generate_and_score_completions(PROMPTS)
    monkeypatch.undo()
    assert len(caplog.records) == 1 and "rollouts failed" in caplog.text
    t.log({"loss": 0.1})
    assert t.logged[0]["rollspec/guard/faults/rollouts"] == 2


def test_without_vllm_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollspec_trl.enable()
    t = trainer_of(Llm(), tmp_path)
    del t.vllm_generation
    with caplog.at_level(logging.WARNING, "rollspec"):
        for _ in range(2):
            t.log({"loss": 0.1})
    assert len(caplog.records) == 1 and "use_vllm=True" in caplog.text


def test_disabled_asks_nothing(tmp_path: Path) -> None:
    rollspec_trl.enable({"enabled": False})
    llm = Llm()
    t = trainer_of(llm, tmp_path)
    t._generate_and_score_completions(PROMPTS)
    t.log({"loss": 0.1})
    assert llm.calls == []
    assert set(t.logged[0]) >= {"rollspec/rollout/generation_share", "rollspec/length/p50"}
    assert "rollspec/guard/faults" not in t.logged[0]


@pytest.mark.parametrize(("version", "says"), [("1.15.0", "outside the tested range"), (None, "not installed")])
def test_another_trl_is_left_alone(
    version: str | None, says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def look(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", look)
    with caplog.at_level(logging.WARNING, "rollspec"):
        rollspec_trl.enable()
    assert len(caplog.records) == 1 and says in caplog.text
    assert plugin._enabled is None


def test_a_typo_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="did you mean 'default'"):
        rollspec_trl.enable("defualt")


def test_each_rank_has_a_history_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    rollspec_trl.enable({"history.dir": str(tmp_path)})
    assert options.config().history.dir == tmp_path / "replica_3"


def test_a_server_that_does_not_answer_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = pytest.importorskip("requests")
    sent: list[Any] = []

    def post(url: str, json: Any, timeout: float) -> Any:
        sent.append((url, json))
        if len(sent) > 1:
            raise requests.ConnectionError("refused")
        return like(
            "requests.models:Response", raise_for_status=lambda: None, json=lambda: {"results": [{"state": "suffix"}]}
        )

    monkeypatch.setattr(requests, "post", post)
    server = engines.Server("http://host:8000/")
    assert server.call("info") == {"state": "suffix"}
    assert sent == [("http://host:8000/collective_rpc", {"method": "rollspec", "args": ["info", {}]})]
    with caplog.at_level(logging.ERROR, "rollspec"):
        for _ in range(5):
            assert "error" in server.call("stats")
    assert len(sent) == 1 + calls.MOST_FAILURES and "not asked again" in caplog.text


def test_trl_passes_the_switch_on_to_its_server() -> None:
    serve = pytest.importorskip("trl.scripts.vllm_serve")
    extra = ["--additional-config", '{"rollspec": "default"}']
    assert serve.build_command(serve.ScriptArguments(model="m"), extra)[-2:] == extra


def test_the_turns_of_a_rollout_are_marked_and_all_of_them_get_its_reward(tmp_path: Path) -> None:
    """TRL's tool loop generates again for those that called a tool, in their order; two have said the same."""
    rollspec_trl.enable("suffix_only")
    seen: list[list[Any]] = []

    class Generating(Llm):
        def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> None:
            seen.append(sampling_params)

    llm = Generating()
    t = trainer_of(llm, tmp_path)
    first = [[1, 2], [1, 2], [3, 4]]
    calls = [
        (first, [[7, 8], [7, 8], [9]]),
        ([[1, 2, 7, 8, 50], [3, 4, 9, 51]], [[10], [11]]),
        ([[3, 4, 9, 51, 11, 52]], [[12]]),
    ]
    params = like("vllm:SamplingParams", temperature=1.0, extra_args={"theirs": 1})

    def say(self: Any, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        self.llm.generate(prompts, sampling_params=params, use_tqdm=False)
        return prompts, next(said for asked, said in calls if asked == prompts), None, None

    def score(inputs: Any) -> dict[str, Any]:
        for prompts, _ in calls:
            generation._generate(say, t.vllm_generation, prompts, None, 1)
        state = state_of(t)
        state.scores = np.array([1.0, 0.0, np.nan])
        return {"completion_mask": torch.ones(3, 2)}

    state = state_of(t)
    state.step, state.turns, state.rollouts = (lambda: 0), [], []
    out = score(None)
    items: list[list[Any]] = []
    trainer._on_batch(state, out, items, True)
    marks = [[p.extra_args["rollspec"]["turn"] for p in batch] for batch in seen]
    names = [mark[0] for mark in marks[0]]
    assert len(set(names)) == 3 and [mark[1:] for mark in marks[0]] == [[0, 2, 2]] * 3
    assert marks[1] == [[names[0], 1, 2, 4], [names[2], 1, 2, 3]] and marks[2] == [[names[2], 2, 2, 5]]
    assert params.extra_args == {"theirs": 1} and seen[0][0].extra_args["theirs"] == 1
    assert items == [
        [prompt_key([1, 2]), prompt_key([7, 8]), 1.0], [prompt_key([1, 2]), prompt_key([7, 8]), 0.0],
        [prompt_key([1, 2]), prompt_key([10]), 1.0],
    ]  # fmt: skip
    assert "generate" not in vars(llm)
