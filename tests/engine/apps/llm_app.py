"""A program that knows nothing of rollspec: vLLM's `LLM`, greedy. `python llm_app.py TASK.json`; prints JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    task = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**task["engine"], disable_log_stats=False)
    params = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"])
    prompts = [{"prompt_token_ids": p} for p in task["prompts"] for _ in range(2)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    accepted = [m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    print(json.dumps({"tokens": tokens, "accepted": accepted}), flush=True)
