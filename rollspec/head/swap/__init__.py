"""Swaps new drafter weights into the running engine between two decode steps; requests and outputs are not affected.

swapper.py     drives a version from step to step: staged, swapped in, on canary, promoted or rolled back
payload.py     an offered version: read, verified and measured before the running weights are touched
deployment.py  the weights that run, those before them and those being staged, and the steps between them
"""

from rollspec.head.swap.payload import SwapRefusedError
from rollspec.head.swap.swapper import Swapper

__all__ = ["SwapRefusedError", "Swapper"]
