"""A GRPO job with TRL in server mode: `python trl_server_app.py MODEL URL OUT`.

Writes its log history to OUT, and how far the server is from the trainer's policy at its start, before and after the
last sync: mean differences of the log-probabilities of what the server says.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(model: str, url: str, out: str) -> None:
    import rollspec_trl

    rollspec_trl.enable()
    import gloo_transfer
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    gloo_transfer.trainer()
    rows = [{"prompt": [{"role": "user", "content": f"{n}+58-23=?"}]} for n in (17, 40)]
    config = GRPOConfig(
        output_dir=str(Path(out).parent / "trl"), use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
        use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, num_generations=4,
        per_device_train_batch_size=8, max_completion_length=64, num_train_epochs=3, learning_rate=2e-4,
        logging_steps=1, save_strategy="no", report_to=[],
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = GRPOTrainer(
        model=model, args=config, reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip
    prompt = tokenizer.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True, tokenize=True)
    prompt = list(prompt["input_ids"] if hasattr(prompt, "keys") else prompt)
    generation = trainer.vllm_generation

    def gap() -> float:
        """Mean |server's - trainer's log-probability| of what the server says greedily."""
        said: Any = generation.vllm_client.generate([prompt], temperature=0.0, max_tokens=32, logprobs=0)
        tokens, theirs = said["completion_ids"][0], torch.tensor(said["logprobs"][0]).view(-1)
        with torch.no_grad():
            policy = trainer.accelerator.unwrap_model(trainer.model)
            logits = policy(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        mine = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        return float((mine - theirs).abs().mean())

    gaps = [gap()]
    trainer.train()
    gaps.append(gap())
    generation.sync_weights()
    gaps.append(gap())
    Path(out).write_text(json.dumps({"log": trainer.state.log_history, "gaps": gaps}))


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
