"""New drafter weights into the running engine, between two decode steps, with nothing lost and nothing changed.

owner.py     `SwapOwner`: all that a swap needs of the engine it happens in
payload.py   what was asked for: read, verified and measured before anything that runs is touched
weights.py   the weights that run, and the second copy of the drafter that new ones are loaded into
swapper.py   drives `drafter_online.lifecycle` from step to step: stage, swap, canary, verdict
v1.py        the owner on vLLM's first model runner
"""

from rollspec.engine.vllm.swap.owner import SwapOwner
from rollspec.engine.vllm.swap.payload import SwapRefusedError
from rollspec.engine.vllm.swap.swapper import Swapper

__all__ = ["SwapOwner", "SwapRefusedError", "Swapper"]
