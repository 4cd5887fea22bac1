"""The example with tools: what tools answer and refuse, tasks by hand, and the tokens that verl's tool loop makes."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("datasets")

from examples.agent_tools import pretrain
from examples.agent_tools.reward import STEPS, compute_score
from examples.agent_tools.task import MOST_STEPS, Task, stream
from examples.agent_tools.tokenizer import NAMED, build_tokenizer
from examples.agent_tools.tools import calculator, python
from examples.grpo_arithmetic.tokenizer import VOCAB_SIZE

TASKS = list(islice(stream(0), 200))


# ---- tools --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("348*27", "9396"),
        (" -2 * (3 + 4) % 5 ", "1"),
        ("7//0", "error: division by zero"),
        ("2**9", "error: only whole numbers, + - * // % and parentheses can be used"),
        ("1.5+1", "error: only whole numbers, + - * // % and parentheses can be used"),
        ("True+1", "error: only whole numbers, + - * // % and parentheses can be used"),
        ("__import__('os')", "error: only whole numbers, + - * // % and parentheses can be used"),
        ("1+", "error: this is no expression"),
        ("9" * 31, "error: a number has more than 30 digits"),
        ("1+" * 100 + "1", "error: the expression has more than 200 characters"),
    ],
)
def test_the_calculator(expression: str, answer: str) -> None:
    assert calculator(expression) == answer


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        ("import math\nprint(math.comb(5, 2))", "10"),
        ("1/0", "error: ZeroDivisionError: division by zero"),
        ("def f(", "error: SyntaxError: '(' was never closed"),
        ("x = [0] * 10**9", "error: MemoryError"),
        ("print('a' * 10**7)", "error: OSError: [Errno 27] File too large"),
        ("print('x' * 300)", "x" * 200 + " ..."),
        ("open('/etc/passwd')", "error: PermissionError: files cannot be opened here"),
        ("open('here', 'w')", "error: PermissionError: files cannot be opened here"),
        ("import os; os.listdir('/')", "error: PermissionError: folders cannot be read here"),
        ("import os; os.system('true')", "error: PermissionError: os.system cannot be used here"),
        ("import os; os.fork()", "error: PermissionError: os.fork cannot be used here"),
        ("import os; os.kill(os.getppid(), 9)", "error: PermissionError: os.kill cannot be used here"),
        ("import socket", "error: PermissionError: _socket cannot be imported here"),
        ("import ctypes", "error: PermissionError: _ctypes cannot be imported here"),
        ("import subprocess", "error: PermissionError: _posixsubprocess cannot be imported here"),
        ("import os; print(sorted(set(os.environ) - {'LC_CTYPE'}))", "[]"),
    ],
)
def test_the_sandbox(code: str, answer: str) -> None:
    assert python(code) == answer


def test_a_program_without_an_end_is_ended() -> None:
    began = time.monotonic()
    assert python("while True: pass").startswith("error: no end within 2 seconds")
    assert time.monotonic() - began < 20


# ---- tasks --------------------------------------------------------------------------------------------------------


def dialogue(task: Task) -> str:
    responses = [f"\n<tool_response>\n{r}\n</tool_response>\n" for r in task.results]
    return "".join(a + b for a, b in zip(task.turns(), [*responses, ""], strict=True))


def test_tasks_repeat_by_seed_and_their_calls_are_right() -> None:
    assert list(islice(stream(0), 200)) == TASKS and len({t.question for t in TASKS}) == len(TASKS)
    tools = {"calculator": calculator, "python": python}
    for task in TASKS[:60]:
        assert [tools[tool](argument) for tool, argument in task.calls] == [str(r) for r in task.results]
    assert {len(t.calls) for t in TASKS} == set(range(1, MOST_STEPS + 1))


def test_worked_dialogues_earn_everything_and_others_do_not() -> None:
    for task in TASKS:
        info = {"results": list(task.results)}
        said = dialogue(task)
        assert compute_score("x", said, str(task.answer), info) == 1.0
        before = said[: said.rfind("<think>")]
        assert compute_score("x", before, str(task.answer), info) == pytest.approx(STEPS), "all on the way, no answer"
        assert compute_score("x", f"#### {task.answer}\n{before}", str(task.answer), info) == pytest.approx(STEPS)
        assert compute_score("x", "", str(task.answer), info) == 0.0
        printed = f"<tool_response>\n#### {task.answer}\n</tool_response>"
        assert compute_score("x", printed, str(task.answer), info) == 0.0, "a tool's answer is not the policy's"


# ---- tokens -------------------------------------------------------------------------------------------------------


def test_the_tokenizer_names_spare_ids_and_keeps_them_in_text() -> None:
    tok = build_tokenizer()
    assert len(tok) == VOCAB_SIZE
    for name in NAMED:
        assert len(tok.encode(name)) == 1 and tok.decode(tok.encode(name), skip_special_tokens=True) == name
    added = tok.get_added_vocab()
    assert {"<think>", "</think>"} <= set(added), "where rollspec looks for them"


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    pytest.importorskip("verl")
    from verl.tools import function_tool

    from examples.agent_tools.job import HERE

    monkeypatch.setattr(function_tool, "FUNCTION_TOOL_REGISTRY", {})
    monkeypatch.setattr(function_tool, "_LOADED_FUNCTION_TOOL_PATHS", {})
    return function_tool.load_function_tools_from_path(str(HERE / "verl_tools.py"))


def test_what_is_learned_is_what_verls_loop_makes_of_the_turns(tools: list[Any]) -> None:
    """verl's own builder and parser: the same tokens, the policy's turns labelled, every call found."""
    from verl.experimental.agent_loop.tool_parser import ToolParser
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    tok = build_tokenizer()
    builder = create_continuous_token_builder(tok, hf_model_type="qwen3")
    parser = ToolParser.get_tool_parser("hermes", tok)
    schemas = [t.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for t in tools]
    for task in TASKS[:12]:
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]
        ids = builder.build_initial_tokens(messages, tools=schemas)
        labels = [-100] * len(ids)
        for i, text in enumerate(task.turns()):
            said = tok.encode(text + tok.eos_token)
            ids, labels = [*ids, *said], [*labels, *said]
            _, calls = asyncio.run(parser.extract_tool_calls(said, [t.tool_schema for t in tools]))
            if i == len(task.calls):
                assert not calls
                break
            (call,) = calls
            tool = next(t for t in tools if t.name == call.name)
            answer = asyncio.run(tool.call(json.loads(call.arguments)))
            assert answer == str(task.results[i])
            before = [*messages, {"role": "assistant", "content": text}]
            messages = [*before, {"role": "tool", "content": answer}]
            ids = builder.merge_context_tokens(before, messages, ids, tools=schemas).token_ids
            labels += [-100] * (len(ids) - len(labels))
        assert pretrain.encode(tok, task) == (ids, labels)


def test_the_job_has_verls_tool_loop(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    from examples.agent_tools.job import OVERRIDES, build

    job = build(tmp_path / "run", tmp_path, speculate=True, size="tiny", train_prompts=4)
    assert job.command[-len(OVERRIDES) :] == OVERRIDES
    again = build(tmp_path / "run", tmp_path, speculate=True, size="tiny", train_prompts=4)
    assert again.command == job.command, "made once"
