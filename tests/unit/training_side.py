"""A worker's part in the training, without an engine: what it captured, and its swapper, are stand-ins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from vllm_like import like

from drafter_online.samples import Sample
from drafter_online.versions import Versions
from rollspec import RollspecConfig
from rollspec.head import training

LAYERS = "vllm.model_executor.layers"


class Capture:
    """Finished samples, as the engine's capture holds them."""

    def __init__(self) -> None:
        self.waiting: list[Sample] = []
        self.paused, self.logits = False, True
        self.counts = {"samples": 0}

    @property
    def ready(self) -> bool:
        return bool(self.waiting)

    def take(self, most: int | None = None) -> list[Sample]:
        out, self.waiting = self.waiting[:most], self.waiting[most:] if most else []
        return out


class Swapper:
    """Takes what it is offered, after loading it as the real one does."""

    def __init__(self) -> None:
        self.version, self.busy = 0, False
        self.report: Any = None
        self.offered: list[tuple[Path, bool]] = []

    def offer(self, folder: Path, canary: bool = True) -> None:
        self.offered.append((folder, canary))
        assert folder.stat().st_mode & 0o077 == 0, "others on this machine cannot read it"
        loaded = Versions(folder.parent).load(int(folder.name), newer_than=self.version)
        self.version, self.tensors = loaded.number, loaded.tensors
        assert self.report is not None
        self.report(self.version, "promoted", "fine")


def embedding(cls: str, weight: torch.Tensor) -> Any:
    """vLLM's, whose weight its `quant_method` makes."""
    layer = like(f"{LAYERS}.vocab_parallel_embedding:{cls}")
    layer.weight = weight
    return layer


class Side:
    """A HeadTraining without an engine."""

    def __init__(self, endpoint: str, device: Path | None = None, **drafter: Any) -> None:
        given = {"proposal.drafters": ["eagle3"], "drafter.mode": "dedicated", "drafter.endpoint": endpoint}
        config = RollspecConfig.load({**given, **{f"drafter.{k}": v for k, v in drafter.items()}}, env={})
        self.capture, self.swapper = Capture(), Swapper()
        hf = {n: 1 for n in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")}
        guard = like("rollspec.tuning.guard:Guard", off=[])
        engine = like("rollspec.step:DraftEngine", version=0, tuner=like("rollspec.tuning.tuner:Tuner", guard=guard))
        bridge = like(
            "rollspec.engine.bridge:Bridge",
            config=config,
            engine=engine,
            faults={},
            fault=None,
            running={},
            state=lambda: ("eagle3", ""),
        )
        bridge.count = lambda cause: bridge.faults.update({cause: bridge.faults.get(cause, 0) + 1})
        model = like(
            "vllm.model_executor.models.qwen3:Qwen3ForCausalLM",
            model=like(
                "vllm.model_executor.models.qwen3:Qwen3Model",
                embed_tokens=embedding("VocabParallelEmbedding", torch.arange(24.0).reshape(6, 4)),
                norm=like(f"{LAYERS}.layernorm:RMSNorm", weight=torch.ones(4)),
            ),
            lm_head=embedding("ParallelLMHead", torch.zeros(6, 4)),
        )
        hf |= {"model_type": "m"}
        runner = like(
            "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
            model_config=like("vllm.config:ModelConfig", hf_text_config=hf, get_vocab_size=lambda: 5),
            get_model=lambda: model,
        )
        self.head = like(
            "rollspec.head.draft_head:DraftHead",
            bridge=bridge,
            capture=self.capture,
            swapper=self.swapper,
            runner=runner,
            layers=(1, 2, 3),
            base="m",
            domains=None,
            asleep=False,
        )
        weights = {"embed": model.model.embed_tokens, "norm": model.model.norm, "lm_head": model.lm_head}
        self.head.ranks, self.head.reading = like("rollspec.head.ranks:Ranks", alone=True), threading.Lock()
        self.head.target_parts = lambda: {n: m.weight for n, m in weights.items()}
        self.training = training.HeadTraining(self.head, device)  # type: ignore[arg-type]

    def close(self) -> None:
        self.training.stop()
