"""A program that knows nothing of rollspec: vLLM's `AsyncLLM`, greedy, streamed. `python async_app.py TASK.json`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def main(task: dict[str, Any]) -> None:
    from prometheus_client import REGISTRY
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**task["engine"]))
    params = SamplingParams(temperature=0.0, max_tokens=task["max_tokens"], output_kind=RequestOutputKind.DELTA)

    async def stream(name: str, prompt: list[int]) -> list[list[int]]:
        request = engine.generate({"prompt_token_ids": prompt}, params, request_id=name)
        return [list(part.outputs[0].token_ids) async for part in request]

    chunks = await asyncio.gather(*[stream(f"{i}-{j}", p) for i, p in enumerate(task["prompts"]) for j in range(2)])
    alone = await stream(
        "alone", task["prompts"][0]
    )  # of many at once vLLM joins the parts that were not taken in time
    accepted = [
        s.value
        for family in REGISTRY.collect()
        for s in family.samples
        if s.name == "vllm:spec_decode_num_accepted_tokens_total"
    ]
    engine.shutdown()
    tokens = [[t for part in parts for t in part] for parts in chunks]
    print(json.dumps({"tokens": tokens, "parts": len(alone), "accepted": accepted}))


if __name__ == "__main__":
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text())))
