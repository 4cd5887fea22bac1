"""Stand-ins of TRL's generation and trainer with the hooks installed, and an engine that records what it is asked."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rollspec_trl import generation, trainer
from vllm_like import like, plays

from rollspec.engine.vllm import plugin
from rollspec.telemetry.engine_stats import EngineStats

ACCELERATOR = "accelerate.accelerator:Accelerator"
STATS = EngineStats(steps=4, requests=8, verified=4, drafted=10, accepted=5, emitted=13, version=3).to_dict()
PROMPTS = [[1, 2], [1, 2]]


@plays("vllm.entrypoints.llm:LLM", "named")
class Llm:
    """Answers operations; remembers them."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"info": {"state": "suffix"}, "stats": STATS, **answers}
        self.calls: list[tuple[str, Any]] = []

    def collective_rpc(self, method: str, *, args: tuple[str, dict[str, Any]]) -> list[Any]:
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
