"""Marks of tests that use a package's own classes.

@needs_vllm
def test_what_vllm_is_asked() -> None: ...
"""

from __future__ import annotations

import pytest
from vllm_like import folder

needs_vllm = pytest.mark.skipif(folder("vllm") is None, reason="needs vLLM")
