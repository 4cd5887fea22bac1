"""OpenRLHF's own `create_vllm_engines` and vLLM actors under Ray on CPU; prints what `test_openrlhf.py` checks.

    python openrlhf_job.py MODEL NEW_WEIGHTS OUT

Its trainer cannot run here: it imports flash-attention and DeepSpeed, and its weight sync is CUDA's. A small actor
stands for it; weights are loaded as its worker extension does once they have arrived.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import ray
import rollspec_openrlhf
from rollspec_openrlhf import actors as hooks

PROMPTS = ["17+58-23=?", "17+58-23=?", "40+2=?", "91-15+7=?"]


def load(worker: Any, path: str) -> str:
    """What `WorkerWrap.update_weight` does with each tensor (openrlhf/trainer/ray/vllm_worker_wrap.py)."""
    from safetensors.torch import load_file

    for name, weight in load_file(path).items():
        worker.model_runner.model.load_weights(weights=[(name, weight)])
    return "extended" if hasattr(worker, "update_weight_cuda_ipc") else type(worker).__name__


async def load_weights(self: Any, path: str) -> Any:
    return (await self.llm.collective_rpc(load, args=(path,)))[0]


class Base:
    """Stands for `BasePPOTrainer`: it samples with its engines, and reports a status."""

    def __init__(self, engines: list[Any]) -> None:
        self.vllm_engines = engines

    def train_step(self, prompts: list[list[int]], global_step: int) -> tuple[dict[str, Any], int]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=48, min_tokens=48, ignore_eos=True, logprobs=1)
        engine = self.vllm_engines[0]
        outputs = ray.get([engine.generate.remote(p, params) for p in prompts])
        return {"tokens": [list(o.outputs[0].token_ids) for o in outputs]}, global_step + 1


def main(model: str, weights: str, out: str) -> None:
    subclass = hooks.subclass

    def with_load(base: type, config: Any) -> type:
        cls = subclass(base, config)
        cls.load_weights = load_weights  # type: ignore[attr-defined]
        return cls

    hooks.subclass = with_load
    rollspec_openrlhf.enable("default")
    # A GPU only for Ray's bookkeeping: OpenRLHF asks for one per engine.
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False)
    from openrlhf.trainer.ray import create_vllm_engines
    from transformers import AutoTokenizer

    actors = create_vllm_engines(1, 1, model, 0, False, False, True, 256, gpu_memory_utilization=0.5)
    found = ModuleType("ppo_trainer")
    found.PPOTrainer = ray.remote(type("PPOTrainer", (Base,), {}))  # type: ignore[attr-defined]
    hooks.install_trainer(found, "PPOTrainer")
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": p}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for p in PROMPTS
    ]
    actor = found.PPOTrainer.remote(actors)
    steps = [ray.get(actor.train_step.remote(prompts, 0))[0] for _ in range(2)]
    extended = ray.get(actors[0].load_weights.remote(weights))
    steps.append(ray.get(actor.train_step.remote(prompts, 2))[0])
    info = ray.get(actors[0].rollspec_call.remote("info", {}))
    Path(out).write_text(json.dumps({"steps": steps, "info": info, "extended": extended, "prompts": prompts}))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
