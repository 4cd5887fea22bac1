"""A GRPO job with TRL in server mode: `python trl_server_app.py MODEL URL OUT`. Writes its log history to OUT.

Weight sync to a server needs NCCL, so TRL's client is kept from it: two of its methods do nothing, and the learning
rate is zero. All else is TRL's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(model: str, url: str, out: str) -> None:
    import rollspec_trl

    rollspec_trl.enable()
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation.vllm_client import VLLMClient

    VLLMClient.init_communicator = lambda self, device=0: None
    VLLMClient.update_named_params = lambda self, metadata, params: None

    rows = [{"prompt": [{"role": "user", "content": f"{n}+58-23=?"}]} for n in (17, 40)]
    config = GRPOConfig(
        output_dir=str(Path(out).parent / "trl"), use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
        use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, num_generations=4,
        per_device_train_batch_size=8, max_completion_length=64, num_train_epochs=2, learning_rate=0.0,
        logging_steps=1, save_strategy="no", report_to=[],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=config, reward_funcs=lambda completions, **_: [1.0] * len(completions),
        train_dataset=Dataset.from_list(rows), processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    Path(out).write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
