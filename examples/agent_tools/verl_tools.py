"""The tools as verl loads them: by the path of this file, in ``rollout.multi_turn.function_tool_path``."""

from __future__ import annotations

from verl.tools.function_tool import function_tool

from examples.agent_tools import tools

calculator = function_tool(tools.calculator)
python = function_tool(tools.python)
