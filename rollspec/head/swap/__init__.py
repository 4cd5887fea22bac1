"""New drafter weights into the running engine, between two decode steps, with nothing lost and nothing changed.

owner.py       `SwapOwner` and `Weights`: all that a swap needs of the engine it happens in
swapper.py     a version's way through `drafter_online.lifecycle`: asked for, staged, swapped in, on canary, judged
payload.py     what was asked for: read, verified and measured before anything that runs is touched
deployment.py  what runs, what ran before, what is on its way, and the steps from one to the other and back
"""

from rollspec.head.swap.owner import SwapOwner
from rollspec.head.swap.payload import SwapRefusedError
from rollspec.head.swap.swapper import Swapper

__all__ = ["SwapOwner", "SwapRefusedError", "Swapper"]
