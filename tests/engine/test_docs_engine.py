"""The documentation's examples that need an engine run as written."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from rollspec.proposal.history import History

pytestmark = pytest.mark.engine

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def block(title: str) -> str:
    found = re.search(rf'^( *)```python title="{title}"\n(.*?)^\1```', PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, title
    return textwrap.dedent(found[2])


def test_a_trainer(
    model: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    from rollspec.engine.vllm import plugin

    monkeypatch.setattr(plugin, "_enabled", None)  # put back what the example switches on
    given = {
        "MODEL": str(model),
        "FOLDER": str(tmp_path),
        "prompts": [{"prompt_token_ids": p} for p in prompts],
        "reward": lambda text: float(len(text) % 2),
    }
    exec(compile(block("trainer.py"), "trainer.py", "exec"), given)
    printed = [line for line in capsys.readouterr().out.splitlines() if "tokens per request and step" in line]
    responses = 4 * len(prompts)
    assert [re.search(r"'matched': (\d+), 'of': (\d+)", line).groups() for line in printed] == [
        (str(responses), str(responses))
    ] * 3
    # How much a round drafts is for the tuner to say, which goes by the seconds of this machine.
    lengths = [float(line.split()[-6]) for line in printed]
    assert min(lengths) >= 1.0 and max(lengths) > 1.0, printed
    assert {p.name for p in tmp_path.iterdir()} == {"history.safetensors", "tuning.json"}
    assert History(1 << 24, window=8).load(tmp_path) == 3 * responses  # of this round and the two before


def test_the_list_of_patches(capsys: pytest.CaptureFixture[str]) -> None:
    from rollspec.engine.vllm.hooks import PATCHES

    exec(compile(block("patches.py"), "patches.py", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [cls.name for cls in PATCHES]
