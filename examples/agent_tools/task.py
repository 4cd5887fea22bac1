"""The tasks, and worked dialogues to learn from: what the policy says in each turn, and what a tool answers.

    user       348 times 27 plus 9612 modulo 97
    assistant  <think>348 times 27</think>
               <tool_call>
               {"name": "calculator", "arguments": {"expression": "348*27"}}
               </tool_call>
    tool       9396
    assistant  <think>now 9396 plus 9612</think> ...
    assistant  <think>done</think>
               #### 93

A chain takes a call for each operation, worked from left to right, and its number is heavy-tailed: so is the number of
turns. The other kind of task, a sum or a count over a range, takes one small program. Thinking has free choices, which
no drafter can guess all; calls and answers copy numbers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass

LEAST_STEPS, MOST_STEPS = 2, 5
GOLDEN = 0.6180339887498949  # its multiples modulo 1 fill the unit interval evenly at every length
SIGNS = {"plus": "+", "minus": "-", "times": "*", "modulo": "%"}
OPENINGS = ("", "", "now ", "next ", "so ", "then ")
ASKS = {
    "sum": "sum(i for i in {r} if {c})",
    "count": "sum(1 for i in {r} if {c})",
    "largest": "max(i for i in {r} if {c})",
}


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        question: what the user says.
        answer: the number that is right.
        calls: the tool of each turn but the last, and its argument.
        results: what each of them answers.
        thoughts: of each turn, the last one included; they have free choices.
    """

    question: str
    answer: int
    calls: tuple[tuple[str, str], ...]
    results: tuple[int, ...]
    thoughts: tuple[str, ...]

    def turns(self) -> list[str]:
        """What a policy that is right says, turn by turn."""
        said = [f"<think>{t}</think>\n{call(*c)}" for t, c in zip(self.thoughts, self.calls, strict=False)]
        return [*said, f"<think>{self.thoughts[-1]}</think>\n#### {self.answer}"]


def call(tool: str, argument: str) -> str:
    """A call of a tool in the format that verl's `hermes` parser reads."""
    name = "expression" if tool == "calculator" else "code"
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': {name: argument}})}\n</tool_call>"


def chain(rng: random.Random, quantile: float) -> Task:
    """Operations one after the other; P(steps >= k) ~ 1 / k, from `LEAST_STEPS` to `MOST_STEPS`."""
    total = rng.randint(2, 999)
    question, calls, results, thoughts = [str(total)], [], [], []
    for _ in range(int(LEAST_STEPS / (1.0 - quantile * (1.0 - LEAST_STEPS / (MOST_STEPS + 1))))):
        words = [w for w in SIGNS if not (w == "times" and total > 9999) and not (w == "modulo" and total < 100)]
        word = rng.choice(words)
        n = rng.randint(2, {"times": 99, "modulo": 99}.get(word, 9999))
        if word == "minus":
            n = rng.randint(1, max(1, total))
        question.append(f"{word} {n}")
        thoughts.append(f"{rng.choice(OPENINGS)}{total} {word} {n}")
        calls.append(("calculator", f"{total}{SIGNS[word]}{n}"))
        total = {"plus": total + n, "minus": total - n, "times": total * n, "modulo": total % n}[word]
        results.append(total)
    thoughts.append(rng.choice(("done", "that is it")))
    return Task(" ".join(question), total, tuple(calls), tuple(results), tuple(thoughts))


def program(rng: random.Random) -> Task:
    """A sum, a count or the largest of the numbers of a range that some number divides, or does not."""
    ask, first, divisor = rng.choice(list(ASKS)), rng.randint(1, 99), rng.randint(3, 19)
    last = first + rng.randint(divisor, 900)
    divides = rng.random() < 0.5
    question = f"{ask} of {first} to {last} {'divided' if divides else 'not divided'} by {divisor}"
    code = ASKS[ask].format(r=f"range({first}, {last + 1})", c=f"i % {divisor} {'==' if divides else '!='} 0")
    found = [i for i in range(first, last + 1) if (i % divisor == 0) == divides]
    answer = {"sum": sum(found), "count": len(found), "largest": max(found)}[ask]
    thought = f"{rng.choice(OPENINGS)}a {rng.choice(('program', 'loop'))} for the {ask}"
    return Task(question, answer, (("python", f"print({code})"),), (answer,), (thought, "done"))


def stream(seed: int) -> Iterator[Task]:
    """Tasks without end, none twice, the same for the same seed: three chains, then a program.

    Numbers of steps follow their distribution by evenly spread quantiles: even a few dozen tasks hold their share of
    long ones.
    """
    rng = random.Random(seed)
    quantile, seen, n = rng.random(), set(), 0
    while True:
        task = program(rng) if n % 4 == 3 else chain(rng, quantile)
        if task.question not in seen:
            seen.add(task.question)
            yield task
            n, quantile = n + 1, (quantile + GOLDEN) % 1.0
