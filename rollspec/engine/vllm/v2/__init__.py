"""vLLM's second model runner (V2, vllm/v1/worker/gpu/model_runner.py): drafts live on the device, steps overlap."""
