"""What an engine step costs: T(n) = c0 + c1·n seconds for n tokens through the target, fitted online.

Steps are gathered in bins of n, each with a robust running mean, and the line is fitted over the bins. So the many
steps of a long tail at batch 1 do not wash out what was learned at batch 64, and one slow step (a compile, a noisy
neighbour) moves nothing.
"""

from __future__ import annotations

import math

_BINS_PER_OCTAVE = 3
_REFIT_EVERY = 16
_CLIP = 3.0  # a step that took this many times its bin's mean counts as this many
_MEMORY = 64.0  # steps a bin remembers


class CostModel:
    """Linear step cost over the number of tokens verified. Units: seconds."""

    def __init__(self) -> None:
        # Before anything is measured: fifty tokens double a step. Only the ratio matters.
        self.c0 = 0.010
        self.c1 = 0.0002
        self.fitted = False
        self._bins: dict[int, list[float]] = {}  # bin -> [mean n, mean seconds, weight]
        self._since = 0

    def seconds(self, tokens: float) -> float:
        """Predicted duration of a step with `tokens` tokens."""
        return self.c0 + self.c1 * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """A step with `tokens` tokens took `seconds`. Clocks that jump (non-positive or absurd values) are left out."""
        if tokens <= 0 or not 0.0 < seconds < 60.0:
            return
        index = int(_BINS_PER_OCTAVE * math.log2(tokens))
        cell = self._bins.get(index)
        if cell is None:
            self._bins[index] = [float(tokens), seconds, 1.0]
        else:
            weight = min(cell[2] + 1.0, _MEMORY)
            cell[0] += (tokens - cell[0]) / weight
            cell[1] += (min(seconds, _CLIP * cell[1]) - cell[1]) / weight
            cell[2] = weight
        self._since += 1
        if self._since >= _REFIT_EVERY:
            self._since = 0
            self._fit()

    def _fit(self) -> None:
        cells = [c for c in self._bins.values() if c[2] >= 3.0]
        if len(cells) < 2:
            return
        # Relative errors matter: weight each bin by 1/seconds².
        weights = [min(w, 16.0) / (t * t) for _, t, w in cells]
        total = sum(weights)
        mean_n = sum(w * n for w, (n, _, _) in zip(weights, cells, strict=True)) / total
        mean_t = sum(w * t for w, (_, t, _) in zip(weights, cells, strict=True)) / total
        spread = sum(w * (n - mean_n) ** 2 for w, (n, _, _) in zip(weights, cells, strict=True))
        if spread <= 0.0:
            return
        slope = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t, _) in zip(weights, cells, strict=True)) / spread
        # A step cannot get cheaper by doing more, nor start at less than nothing; noise can pretend so.
        slope = max(slope, 1e-9)
        self.c1 = slope
        self.c0 = max(mean_t - slope * mean_n, 0.05 * mean_t)
        self.fitted = True
