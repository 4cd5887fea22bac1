"""New drafter weights into the running engine, between two decode steps, with nothing lost and nothing changed.

owner.py       `SwapOwner`: all that a swap needs of the engine it happens in
swapper.py     a version's way through `drafter_online.lifecycle`: asked for, staged, swapped in, on canary, judged
payload.py     what was asked for: read, verified and measured before anything that runs is touched
weights.py     the weights that run, and the second copy of the drafter that new ones are loaded into
deployment.py  what runs, what ran before, what is on its way, and the steps from one to the other and back
"""

from rollspec.engine.vllm.swap.owner import SwapOwner
from rollspec.engine.vllm.swap.payload import SwapRefusedError
from rollspec.engine.vllm.swap.swapper import Swapper

__all__ = ["SwapOwner", "SwapRefusedError", "Swapper"]
