"""A planted fault of speculation: after a rejection the token is redrawn from the target itself.

Exact rejection sampling redraws from what is left of the target once the draft is taken out; SPEC-RL does not. Named as
`worker_extension_cls`, this module is imported in the worker's process, and the import plants the fault.
"""

from __future__ import annotations

from vllm_cpu_v2.kernels import sampling


class RedrawFromTarget:
    """Adds nothing to the worker; a worker extension has to be a class."""


sampling.take_out = lambda residual, tokens: None
