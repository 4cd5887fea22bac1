"""vLLM's second model runner (V2, vllm/v1/worker/gpu/model_runner.py): drafts live on the device, steps overlap.

Files: `speculator.py`, what the runner builds as its speculator where drafts come from memory alone; `adapter.py`,
around one runner: what was sampled goes to rollspec, drafts of any length per request come back; `draft_slots.py`, a
step without its padded draft slots; `verify.py`, coupled verification with the runner's own seeded noise;
`scheduling.py`, what the scheduler must know of drafts that only the worker counts; `max_acceptance.py` and
`scoring.py`, what is read of the target's logits; `install.py`, puts them together in a worker whose KV cache is ready.
With a head: `head.py`, which decides about its passes; `drafter.py`, vLLM's speculator run on request; `layers.py`,
what it and its training read of the target.
"""
