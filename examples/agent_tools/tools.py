"""The two tools, as plain functions: their docstrings are what verl and TRL tell the policy about them.

Whatever the policy asks for, they answer with text: the result, or ``error:`` and the reason. They raise nothing.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from examples.agent_tools.sandbox import MOST_TEXT, run

MOST_DIGITS = 30

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Work out an expression of whole numbers.

    Args:
        expression: Whole numbers, + - * // % and parentheses.
    """
    try:
        if len(expression) > MOST_TEXT:
            raise ValueError(f"the expression has more than {MOST_TEXT} characters")
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except SyntaxError:
        return "error: this is no expression"
    except (ValueError, RecursionError, MemoryError, AttributeError, TypeError) as e:
        return f"error: {e}"


def python(code: str) -> str:
    """Run a Python program and read what it prints.

    Args:
        code: The program. It has the standard library, two seconds, no files and no network.
    """
    return run(code) if isinstance(code, str) else "error: code is no text"


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        found = node.value
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        found = -_value(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    else:
        raise ValueError("only whole numbers, + - * // % and parentheses can be used")
    if abs(found) >= 10**MOST_DIGITS:
        raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    return found
