"""What trainers ask of an engine between its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_like import like

from rollspec import RollspecConfig
from rollspec.engine.operations import OPERATIONS
from rollspec.proposal.history import FILE
from rollspec.step import DraftEngine


def test_a_history_that_is_refused_does_not_keep_the_head_from_its_state(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no safetensors")
    asked: list[Path] = []
    faults: list[str] = []
    config = like("vllm.config:ModelConfig", get_vocab_size=lambda: 64)
    training = like("rollspec.head.training:HeadTraining", load=lambda folder: asked.append(folder))
    bridge: Any = like(
        "rollspec.engine.bridge:Bridge", engine=DraftEngine(RollspecConfig.load({}, env={}), 64), tokenizer=None,
        runner=like("vllm.v1.worker.gpu.model_runner:GPUModelRunner", model_config=config),
        head=like("rollspec.head.draft_head:DraftHead", training=training),
        count=lambda cause, error: faults.append(cause),
    )  # fmt: skip
    answer = OPERATIONS["load"](bridge, {"dir": str(tmp_path)})
    assert "is refused" in answer["error"] and faults == ["history file refused"]
    assert asked == [tmp_path / "drafter"]
