"""What an engine step costs, fitted online from measured steps: T(n, h, b) seconds.

n: tokens that go through the target (one per request, plus draft tokens). h: context tokens of the batch.
b: requests. Where n > b the step verifies drafts, and rejection sampling costs something whatever their number.

    T = c0 + f(n) + c_h·h·(1 + a·(n/b - 1)) + c_v·[n > b]

Draft tokens read the context of their request, too: on a CPU the more of them the longer that takes, on an accelerator
they share what was loaded (a near 0).

f is piecewise linear over octaves of n and never falls: an accelerator's curve has a knee and a CPU's has steps, which
one line would miss. Segments that were never measured take the slope of their neighbours.

Steps are gathered in cells of similar (n, requests, h), each a robust running mean, and the curve is fitted over the
cells by non-negative least squares: the many steps at batch 1 do not wash out what was learned at batch 64, and one
slow step moves little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_REFIT_AFTER = (8, 16, 32)  # steps until the first refits; later ones come every `_REFIT_EVERY`
_REFIT_EVERY = 64
_CLIP = 2.0  # a step that took this many times its cell's mean counts as this many
_MEMORY = 64.0  # steps a cell remembers
_MAX_CELLS = 256
_STALE = 2000  # steps after which a cell speaks only where no fresher one does
_KNOTS = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096], dtype=np.float64)
_SMOOTH = 0.05  # weight of "neighbouring segments have one slope" against one measured cell
_SURPRISE = 0.3  # relative error of a prediction that, three times in a row, brings the next refit forward
_PRIOR = 0.1  # weight of "fifty tokens double a step" against one measured cell
_LEAST = 0.05  # share of the fastest measured step that every step takes at the least
_NARROW = 1.5  # most over fewest tokens measured, below which their differences say nothing about the slope
_ERRORS = 256  # latest predictions whose error is kept
_VERIFIES = 64  # added to the last number of a cell's key where its steps verify drafts
LONGEST = 60.0  # seconds; a longer step is a clock that jumped or a machine that slept


class CostModel:
    """Predicts steps, in seconds. `c0` and `c1` describe the curve as one line, for people."""

    def __init__(self, c0: float = 0.010, c1: float = 0.0002) -> None:
        # Before anything is measured: fifty tokens double a step. Only the ratio matters.
        self.c0, self.c1, self.c_context, self.c_verify = c0, c1, 0.0, 0.0
        self.c_drafts = 0.0  # a·c_h: seconds per context token and draft token of its request
        self.fitted = False
        self.skipped = 0  # steps whose time could not be used (no clock, a jump), or that came with nothing computed
        self._lay(c0 + c1 * np.arange(1024, dtype=np.float64), c1)
        # Means of n, h, h·(n/b - 1) and seconds; weight; last step.
        self._cells: dict[tuple[int, int, int], list[float]] = {}
        self._errors: deque[float] = deque(maxlen=_ERRORS)
        self._steps = 0
        self._surprises = 0
        self._next_fit = _REFIT_AFTER[0]

    # ---- prediction -------------------------------------------------------------------------------------------------

    def seconds(self, tokens: float, context_tokens: float = 0.0, requests: float = 0) -> float:
        """Predicted duration of a step with `tokens` tokens, of `requests` requests (0: one each)."""
        return self._seconds(tokens, context_tokens, _read(tokens, context_tokens, requests), 0 < requests < tokens)

    def _seconds(self, tokens: float, context_tokens: float, read: float, verifies: bool) -> float:
        more = self.c_context * context_tokens + self.c_drafts * read + self.c_verify * verifies
        low = int(tokens)
        if low + 1 >= len(self._curve):
            return float(self._curve[-1] + self._tail * (tokens - len(self._curve) + 1) + more)
        below = float(self._curve[low])
        return below + (tokens - low) * (float(self._curve[low + 1]) - below) + more

    def curve(self, tokens: int, most: int, context_tokens: float = 0.0) -> npt.NDArray[np.float64]:
        """Predicted durations without drafts, and with 1, 2, ... `most` draft tokens beside the `tokens` tokens of as
        many requests. Shape [most + 1].
        """
        if tokens + most >= len(self._curve):
            self._grow(tokens + most + 1)
        out = self._curve[tokens : tokens + most + 1] + self.c_context * context_tokens
        out[1:] += self.c_verify
        if self.c_drafts:
            out += self.c_drafts * _read(tokens + 1, context_tokens, tokens) * np.arange(most + 1)
        return out

    def slope(self, tokens: int) -> float:
        """The least that one more token costs anywhere from `tokens` on: a bound for what can pay."""
        return float(self._slopes[min(tokens, len(self._slopes) - 1)])

    @property
    def error(self) -> float | None:
        """Median of |predicted - measured| / measured over the latest steps, each predicted before it was learned."""
        return float(np.median(self._errors)) if self._errors else None

    # ---- learning ---------------------------------------------------------------------------------------------------

    def observe(self, tokens: int, seconds: float, context_tokens: float = 0.0, requests: int = 0) -> None:
        """A step took `seconds`. Times that cannot be (non-positive, not finite, a minute) are left out and counted."""
        if tokens <= 0 or not 0.0 < seconds < LONGEST:
            self.skipped += 1
            return
        if self.fitted:
            error = abs(self.seconds(tokens, context_tokens, requests) - seconds) / seconds
            self._errors.append(error)
            self._surprises = self._surprises + 1 if error > _SURPRISE else 0
        read, verifies = _read(tokens, context_tokens, requests), 0 < requests < tokens
        key = (
            int(3 * math.log2(tokens)),
            requests.bit_length(),
            int(context_tokens).bit_length() + _VERIFIES * verifies,
        )
        cell = self._cells.get(key)
        if cell is None or cell[5] < self._steps - _STALE:
            if cell is None and len(self._cells) >= _MAX_CELLS:
                del self._cells[min(self._cells, key=lambda k: self._cells[k][4])]
            self._cells[key] = [float(tokens), float(context_tokens), read, seconds, 1.0, 0.0]
        else:
            weight = min(cell[4] + 1.0, _MEMORY)
            cell[0] += (tokens - cell[0]) / weight
            cell[1] += (context_tokens - cell[1]) / weight
            cell[2] += (read - cell[2]) / weight
            cell[3] += (min(seconds, _CLIP * cell[3]) - cell[3]) / weight
            cell[4] = weight
        self._steps += 1
        self._cells[key][5] = self._steps
        if self._steps >= self._next_fit or self._surprises == 3:
            later = [s for s in _REFIT_AFTER if s > self._steps]
            self._next_fit = later[0] if later else self._steps + _REFIT_EVERY
            self._fit()

    def _fit(self) -> None:
        """Fit the curve to the cells; where they say too little, only its height."""
        since = self._steps - _STALE
        fresh = {k[0] for k, c in self._cells.items() if c[5] > since}
        cells = np.array(
            [
                [*c[:5], k[2] >= _VERIFIES]
                for k, c in self._cells.items()
                # One measurement alone may be a step that compiled something.
                if (c[5] > since or k[0] not in fresh) and (c[4] >= 2.0 or self._plausible(k, c))
            ]
        )
        if not len(cells):
            return
        n, context_tokens, read, seconds, weight, verifies = cells.T
        trust = np.sqrt(np.minimum(weight, 16.0))
        if n.max() < _NARROW * n.min():
            shape = np.array([self._seconds(c[0], c[1], c[2], bool(c[5])) for c in cells])
            factor = float(np.average(seconds / shape, weights=trust))
            self._lay(self._curve * factor, self._tail * factor)
            self.c0, self.c1, self.fitted = self.c0 * factor, self.c1 * factor, True
            return
        from scipy.optimize import nnls

        segments = _ramps(n)
        used = int(np.flatnonzero(segments.max(axis=0) > 0).max()) + 1
        columns = [np.ones_like(n), *segments.T[:used]]
        with_context = bool(context_tokens.max() > 2.0 * max(context_tokens.min(), 1.0))
        with_read = with_context and bool(read.max() > 0)
        with_verify = bool(verifies.min() < verifies.max())
        columns += [context_tokens] * with_context + [read] * with_read + [verifies] * with_verify
        # Relative errors matter, so each row is divided by what it should give.
        rows = np.stack(columns, axis=1) * (trust / seconds)[:, None]
        # Slopes in units of what their segment adds to a step here, so that weights mean the same on every machine.
        unit = float(np.median(seconds))
        prior = unit / (50.0 + float(np.median(n)))
        smooth = np.zeros((2 * used - 1, rows.shape[1]))
        wanted = np.zeros(2 * used - 1)
        for j in range(used):
            width = float(_KNOTS[j]) / unit
            smooth[j, 1 + j], wanted[j] = _PRIOR * width, _PRIOR * width * prior
            if j + 1 < used:
                smooth[used + j, 1 + j], smooth[used + j, 2 + j] = _SMOOTH * 2 * width, -_SMOOTH * 2 * width
        try:
            found, _ = nnls(np.vstack([rows, smooth]), np.concatenate([trust, wanted]))
        except RuntimeError:  # no convergence: keep the last fit
            return
        rest = list(found[1 + used :])
        self.c_context = float(rest.pop(0)) if with_context else 0.0
        self.c_drafts = float(rest.pop(0)) if with_read else 0.0
        self.c_verify = float(rest.pop(0)) if with_verify else 0.0
        # A step takes time whatever it computes; what was measured may be explained without, and then T(1) would be 0.
        self._set(max(float(found[0]), _LEAST * float(seconds.min())), found[1 : 1 + used])
        self.fitted = True

    def _plausible(self, key: tuple[int, int, int], cell: list[float]) -> bool:
        return 0.5 < cell[3] / self._seconds(cell[0], cell[1], cell[2], key[2] >= _VERIFIES) < 2.0

    def _set(self, base: float, slopes: npt.NDArray[np.float64]) -> None:
        slopes = np.maximum(slopes, 1e-9)  # a step does not get cheaper by doing more
        tail = float(slopes[-1])
        ramps = _ramps(np.arange(len(self._curve), dtype=np.float64))
        self._lay(base + ramps @ np.concatenate([slopes, np.full(ramps.shape[1] - len(slopes), tail)]), tail)
        # As one line, through the range that was measured.
        top = float(_KNOTS[min(len(slopes), len(_KNOTS) - 1)])
        self.c1 = (self.seconds(top) - self.seconds(1)) / max(top - 1.0, 1.0)
        self.c0 = self.seconds(1) - self.c1

    def _lay(self, curve: npt.NDArray[np.float64], tail: float) -> None:
        self._curve = curve  # c0 + f(n), seconds
        self._tail = tail  # slope beyond it
        steps = np.append(np.diff(curve), tail)
        self._slopes = np.minimum.accumulate(steps[::-1])[::-1]

    def _grow(self, size: int) -> None:
        have = len(self._curve)
        more = self._curve[-1] + self._tail * np.arange(1, max(size, 2 * have) - have + 1)
        self._lay(np.concatenate([self._curve, more]), self._tail)

    # ---- kept with the job ------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The fit and the cells behind it, in JSON types."""
        return {"cells": [[*k, *v[:5]] for k, v in self._cells.items()], "error": self.error}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start from a stored fit; its cells count until this run measured the same number of tokens.

        Raises:
            ValueError: the stored numbers cannot be used.
        """
        cells: dict[tuple[int, int, int], list[float]] = {}
        for row in state["cells"]:
            a, b, c, *values = row
            if len(values) != 5 or not all(math.isfinite(v) and v >= 0 for v in values) or values[3] <= 0:
                raise ValueError(f"a cell of the cost model is {row!r}")
            values[4] = min(float(values[4]), 4.0)  # the machine of today outweighs the stored one soon
            cells[int(a), int(b), int(c)] = [*(float(v) for v in values), -math.inf]
        self._cells = cells
        self._fit()


def _read(tokens: float, context_tokens: float, requests: float) -> float:
    """Context tokens that draft tokens read beside the first token of their request: h·(n/b - 1)."""
    return context_tokens * (tokens / requests - 1.0) if requests else 0.0


def _ramps(n: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Tokens of `n` that fall into each segment between knots. Shape [len(n), segments]; rows sum to max(n - 1, 0)."""
    low, high = _KNOTS, np.append(_KNOTS[1:], np.inf)
    return np.clip(n[:, None] - low, 0.0, high - low)
