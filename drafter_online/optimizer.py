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

BETAS = (0.9, 0.95)  # of AdamW
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MasterWeights:
    """fp32 master weights of a module's parameters that require gradients."""

    def __init__(self, module: Any, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._params = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._master_weights = {
            n: p if p.dtype == torch.float32 else p.detach().float().clone().requires_grad_()
            for n, p in self._params.items()
        }
        self._optimiser = torch.optim.AdamW(
            list(self._master_weights.values()), lr=learning_rate, betas=BETAS, weight_decay=0.0
        )

    def step(self, warm: float, clip_norm: float) -> bool:
        """One optimiser step with the gradients there are, at `warm` (0..1) of the learning rate; they are gone then.

        False: their norm was not finite, and no weight has changed.
        """
        for n, p in self._params.items():
            if self._master_weights[n] is not p:
                self._master_weights[n].grad = None if p.grad is None else p.grad.float()
        finite = math.isfinite(torch.nn.utils.clip_grad_norm_(self._master_weights.values(), clip_norm))
        if finite:
            for group in self._optimiser.param_groups:
                group["lr"] = self._learning_rate * warm
            self._optimiser.step()
            self._round()
        self.clear()
        return finite

    def _round(self) -> None:
        with torch.no_grad():
            for n, p in self._params.items():
                if self._master_weights[n] is not p:
                    p.copy_(self._master_weights[n])

    def clear(self) -> None:
        """Drop all gradients."""
        for p in (*self._params.values(), *self._master_weights.values()):
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU: master weights and moments."""
        tensors: dict[str, Tensor] = {}
        for n, m in self._master_weights.items():
            tensors[f"master.{n}"] = m.detach().to("cpu", copy=True)
            for k, v in self._optimiser.state.get(m, {}).items():
                tensors[f"adam.{k}.{n}"] = torch.as_tensor(v).detach().to("cpu", copy=True)
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
                    f"the checkpoint has no {n} of shape {list(m.shape)}: it is of another drafter; "
                    "give another folder."
                )
        with torch.no_grad():
            for n, m in self._master_weights.items():
                m.copy_(tensors[f"master.{n}"])
                moments = {k: tensors[f"adam.{k}.{n}"] for k in _MOMENTS if f"adam.{k}.{n}" in tensors}
                # torch keeps the step counter on the CPU.
                self._optimiser.state[m] = {
                    k: v.to("cpu" if k == "step" else m.device, copy=True) for k, v in moments.items()
                }
        self._round()
        self.clear()
