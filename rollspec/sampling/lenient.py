"""SPEC-RL's rule for reusing old responses (arXiv:2509.23232), and how far it is from the policy. **Lossy.**

An old response is kept up to its first rejected token, and the policy continues from there. Token i is kept while
log U <= log p_new - log p_old + bias; more bias keeps more. That is not the policy's distribution even at
bias 0: after a rejection the token is drawn from the policy itself and not from what the kept tokens leave of it. These
are pure functions; `reuse.mode: lenient` (`lenient_reuse.py`) samples with them, and nothing else does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def keep_probability(log_new: Floats, log_old: Floats, bias: float = 0.0) -> Floats:
    """Chance that an old token is kept: min(1, exp(log p_new - log p_old + bias)).

    Args:
        log_new, log_old: log-probabilities in nats under the present and the old policy, any one shape. -inf under the
            present policy is never kept.
    """
    with np.errstate(invalid="ignore"):
        out: Floats = np.exp(np.minimum(0.0, log_new - log_old + bias))
    out[np.isneginf(log_new)] = 0.0
    return out


def kept(log_new: Floats, log_old: Floats, uniform: Floats, valid: Bools, bias: float = 0.0) -> Ints:
    """Leading tokens of each old response that are reused.

    Args:
        log_new, log_old: [n, length] log-probabilities of the old response's tokens. uniform: [n, length] in (0, 1).
        valid: [n, length], true where there is a token of the response; false after its end.

    Returns:
        [n] cut index: the first rejected token, or the response's length where there is none.

    Raises:
        ValueError: arrays of different shapes, or `valid` with a hole.
    """
    if not log_new.shape == log_old.shape == uniform.shape == valid.shape:
        raise ValueError("log_new, log_old, uniform and valid must have one shape")
    if (valid[:, 1:] & ~valid[:, :-1]).any():
        raise ValueError("valid must be true up to each response's end and false after it")
    rejected = uniform > keep_probability(log_new, log_old, bias)
    ends = np.concatenate([rejected | ~valid, np.ones((len(valid), 1), dtype=bool)], axis=1)
    out: Ints = ends.argmax(axis=1)
    return out
