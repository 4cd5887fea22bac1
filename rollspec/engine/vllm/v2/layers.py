"""Which of the target's layers an EAGLE-3 head reads, and one more for training: its last.

The states of the last layer (before the final norm) are returned with the auxiliary ones, as one more auxiliary layer
that is not given to the head. Both are arranged when the model is loaded, before it is profiled and compiled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from rollspec.config import RollspecConfig
from rollspec.engine.vllm.compat import engine_config, vllm_version
from rollspec.engine.vllm.hooks import keep
from rollspec.engine.vllm.hooks import table as v2

logger = logging.getLogger("rollspec")

AUX = 4
"""Place of `aux_hidden_states` among the arguments of `propose`."""

LAYERS = "_rollspec_layers"
"""On a speculator: the target's layers that its head reads, in its order, without the one that training adds; empty for
a draft model that is trained.
"""


def read_and_widen(load: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `GPUModelRunner.load_model` of the second runner."""
    out = load(runner, *args, **kwargs)
    config = engine_config(runner.vllm_config)
    if config is None:
        return out
    last = int(runner.model_config.get_total_num_hidden_layers())
    if runner.speculative_config is not None and runner.speculative_config.method == "draft_model":
        _show_last(runner, config, last)
    if runner.speculative_config is None or runner.speculative_config.method != "eagle3":
        return out
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    given = get_eagle3_aux_layers_from_config(runner.speculative_config)
    layers = tuple(given or runner.model.get_eagle3_default_aux_hidden_state_layers())
    speculator = runner.speculator
    keep(speculator, LAYERS, layers)
    if config.drafter.captures and last not in layers:
        runner.model.set_aux_hidden_state_layers((*layers, last))
        v2.Propose.wrap(speculator, functools.partial(_without_last, len(layers)), __name__)
    return out


def _show_last(runner: Any, config: RollspecConfig, last: int) -> None:
    """Have the target give its last layer's states where a draft model is trained, which reads none itself."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not config.drafter.captures:
        return
    because = v2.GiveStates.off_because(vllm_version())
    if because is None and not supports_eagle3(runner.model):
        because = f"vLLM's {type(runner.model).__name__} does not give the states of its layers"
    if because is not None:
        logger.warning("rollspec: the draft model is not trained, because %s.", because)
        return
    runner.model.set_aux_hidden_state_layers((last,))
    v2.GiveStates.put(runner, True, __name__)
    keep(runner.speculator, LAYERS, ())


def _without_last(count: int, propose: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the speculator's `propose`, whose head reads `count` auxiliary layers [tokens, H] each."""
    given = list(args)
    if len(given) > AUX and given[AUX]:
        given[AUX] = given[AUX][:count]
    elif kwargs.get("aux_hidden_states"):
        kwargs["aux_hidden_states"] = kwargs["aux_hidden_states"][:count]
    return propose(*given, **kwargs)
