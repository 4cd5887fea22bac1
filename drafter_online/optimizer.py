"""fp32 master weights of the weights under training, with AdamW: the part of training whose state is tensors.

Weights in bf16 lose small updates; the optimiser works on fp32 copies, and the module's weights are rounded from them.
Where the weights are fp32 already they are their own master weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from drafter_online.errors import TrainingError

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MasterWeights:
    """fp32 master weights of a module's parameters that require gradients."""

    def __init__(self, module: Any, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> None:
        self._learning_rate = learning_rate
        self._params = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._master_weights = {
            n: p if p.dtype == torch.float32 else p.detach().float().clone().requires_grad_()
            for n, p in self._params.items()
        }
        self._optimiser = torch.optim.AdamW(
            list(self._master_weights.values()), lr=learning_rate, betas=betas, weight_decay=weight_decay
        )

    def step(self, warm: float, clip_norm: float) -> float:
        """One optimiser step with the gradients there are, at `warm` (0..1) of the learning rate; returns their norm.

        With a norm that is not finite nothing but the gradients is changed. They are gone afterwards.
        """
        for n, p in self._params.items():
            if self._master_weights[n] is not p:
                self._master_weights[n].grad = None if p.grad is None else p.grad.float()
        norm = float(torch.nn.utils.clip_grad_norm_(self._master_weights.values(), clip_norm))
        if math.isfinite(norm):
            for group in self._optimiser.param_groups:
                group["lr"] = self._learning_rate * warm
            self._optimiser.step()
            self._round()
        self.clear()
        return norm

    def _round(self) -> None:
        with torch.no_grad():
            for n, p in self._params.items():
                if self._master_weights[n] is not p:
                    p.copy_(self._master_weights[n])

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients accumulated so far."""
        return {n: p.grad.clone() for n, p in self._params.items() if p.grad is not None}

    def clear(self, gradients: dict[str, Tensor] | None = None) -> None:
        """Drop all gradients, or put these in their place."""
        self._optimiser.zero_grad(set_to_none=True)
        for n, p in self._params.items():
            p.grad = None if gradients is None or n not in gradients else gradients[n].to(p.device, p.dtype)

    def state(self, *, gradients: bool) -> dict[str, Tensor]:
        """Copies on the CPU: master weights, moments and, where a step is half accumulated, gradients."""
        tensors: dict[str, Tensor] = {}
        for n, m in self._master_weights.items():
            tensors[f"master.{n}"] = m.detach().to("cpu", copy=True)
            for k, v in self._optimiser.state.get(m, {}).items():
                tensors[f"adam.{k}.{n}"] = torch.as_tensor(v).detach().to("cpu", copy=True)
        if gradients:
            tensors |= {f"grad.{n}": g.to("cpu", copy=True) for n, g in self.gradients().items()}
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state`; `tensors` are not kept.

        Raises:
            TrainingError: they are of other weights; names the first that is missing or has another shape.
        """
        for n, m in self._master_weights.items():
            t = tensors.get(f"master.{n}")
            if t is None or t.shape != m.shape:
                raise TrainingError(
                    f"drafter-online: the checkpoint has no {n} of shape {list(m.shape)}: it is of another drafter; "
                    "give another folder."
                )
        with torch.no_grad():
            for n, m in self._master_weights.items():
                m.copy_(tensors[f"master.{n}"])
                self._optimiser.state.pop(m, None)
                moments = {k: tensors[f"adam.{k}.{n}"] for k in _MOMENTS if f"adam.{k}.{n}" in tensors}
                if moments:
                    # torch keeps the step counter on the CPU.
                    self._optimiser.state[m] = {
                        k: v.clone() if k == "step" else v.to(m.device, copy=True) for k, v in moments.items()
                    }
        self._round()
        self.clear({n.removeprefix("grad."): g.clone() for n, g in tensors.items() if n.startswith("grad.")})
