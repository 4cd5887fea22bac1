"""New drafter weights into the running engine, between two decode steps, with nothing lost and nothing changed.

owner.py       `SwapOwner`: all that a swap needs of the engine it happens in
swapper.py     what others call: requests and offers come in, steps and ranks go by
offers.py      the place for what another thread offers
slot.py        the place for what is staged or on canary, and its way through `drafter_online.lifecycle`
swap.py        one version on that way, as data
payload.py     what was asked for: read, verified and measured before anything that runs is touched
weights.py     the weights that run, and the second copy of the drafter that new ones are loaded into
deployment.py  what runs, what ran before, and the steps from one to the other and back
verdicts.py    what became of versions
head_owner.py  the owner: a worker's draft head, on either model runner
"""

from rollspec.engine.vllm.swap.owner import SwapOwner
from rollspec.engine.vllm.swap.payload import SwapRefusedError
from rollspec.engine.vllm.swap.swapper import Swapper

__all__ = ["SwapOwner", "SwapRefusedError", "Swapper"]
