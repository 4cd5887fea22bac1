"""How far SPEC-RL's rule (`rollspec/sampling/lenient_reuse.py`) is from the policy's distribution, in closed form."""

from __future__ import annotations

import numpy as np

from rollspec.sampling.lenient_reuse import Floats, keep_probability


def distribution(new: Floats, old: Floats, bias: float = 0.0) -> Floats:
    """What a token is distributed as where an old one, drawn from `old`, is kept or replaced by a draw from `new`.

    Args:
        new, old: [..., vocab] probabilities.

    Returns:
        [..., vocab] probabilities: kept mass + (1 - kept mass's sum) * new.
    """
    mass = _mass(new, old, bias)
    out: Floats = mass + (1.0 - mass.sum(-1, keepdims=True)) * new
    return out


def total_variation(new: Floats, old: Floats, bias: float = 0.0) -> Floats:
    """Distance of `distribution` from the policy `new`: 1/2 sum |min(l p, q) - alpha p| with l = exp(bias), p = new,
    q = old and alpha = sum min(l p, q). 0 exactly where the policy did not change or nothing overlaps.
    """
    mass = _mass(new, old, bias)
    out: Floats = 0.5 * np.abs(mass - mass.sum(-1, keepdims=True) * new).sum(-1)
    return out


def _mass(new: Floats, old: Floats, bias: float) -> Floats:
    with np.errstate(divide="ignore"):
        log_new, log_old = np.log(new), np.log(old)
    out: Floats = np.where(old > 0, old * keep_probability(log_new, log_old, bias), 0.0)
    return out
