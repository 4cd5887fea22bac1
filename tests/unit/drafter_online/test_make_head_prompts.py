"""Prompts of `drafter-online make-head`: read from files, rendered as chat, built in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from character_tokenizer import Tokenizer
from drafter_target import VOCABULARY

from drafter_online import prompts
from drafter_online.errors import TrainingError

QUESTION = [{"role": "user", "content": "2+2?"}]


def test_prompts_of_every_kind_of_file(tmp_path: Path) -> None:
    answered = [*QUESTION, {"role": "assistant", "content": "4"}]
    lines = [{"prompt": "one"}, {"prompt": QUESTION, "answer": "4"}, {"messages": answered}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert prompts.read(tmp_path / "a.jsonl") == ["one", QUESTION, QUESTION], "an answer is not a part of its prompt"
    (tmp_path / "a.txt").write_text('one\n\n  "two"\n')
    assert prompts.read(tmp_path / "a.txt") == ["one", '  "two"']
    (tmp_path / "b.txt").write_text('{"prompt": "one"}\n')
    assert prompts.read(tmp_path / "b.txt") == ["one"]
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"data_source": ["x"], "prompt": [QUESTION]}), tmp_path / "a.parquet")
    assert prompts.read(tmp_path / "a.parquet") == [QUESTION]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"}\n{"question": "b"}', "row 1"),
        ('{"prompt": ""}', "row 0"),
        ('{"prompt": [1, 2]}', "row 0"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "row 0"),
        ('{"prompt": "a"}\n{"prompt', "line 2"),
        ("\n \n", "no prompt"),
    ],
)
def test_a_file_without_prompts_is_refused_by_row(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a").write_text(text)
    with pytest.raises(TrainingError, match=says):
        prompts.read(tmp_path / "a")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="cannot be read"):
        prompts.read(tmp_path / "no.jsonl")
    (tmp_path / "a.parquet").write_bytes(b"no")
    with pytest.raises(TrainingError, match=r"not Parquet|need pyarrow"):
        prompts.read(tmp_path / "a.parquet")


def test_a_long_file_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MOST", 10)
    (tmp_path / "a.txt").write_text("\n".join(map(str, range(100))))
    found = prompts.read(tmp_path / "a.txt", seed=1)
    assert len(set(found)) == 10 and found != [str(i) for i in range(10)]
    assert found == prompts.read(tmp_path / "a.txt", seed=1) != prompts.read(tmp_path / "a.txt", seed=2)


def test_prompts_are_rendered_as_chat_where_there_is_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(template=True)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_: tokenizer)

    def ids(text: str, begin: tuple[int, ...] = ()) -> list[int]:
        return [*begin, *(ord(c) % VOCABULARY for c in text)]

    chat = ids("<user>2+2?<assistant>")
    assert prompts.tokenized(["2+2?", QUESTION], "target", 100) == ([chat], 0), "the same prompt twice is one"
    tokenizer.chat_template = None
    assert prompts.tokenized(["2+2?", QUESTION], "target", 100) == ([ids("2+2?", (0,))], 0)
    assert prompts.tokenized(["a", "abc"], "target", 2) == ([ids("a", (0,))], 1)
    with pytest.raises(TrainingError, match="shortest has 2 tokens and 1 fit"):
        prompts.tokenized(["a", "abc"], "target", 1)


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="no tokenizer"):
        prompts.tokenized(["a"], tmp_path, 10)


def test_built_in_prompts_are_many_and_different() -> None:
    made = prompts.built_in(0)
    assert len(set(made)) == 360 and not any("{" in p for p in made)
    assert made == prompts.built_in(0) != prompts.built_in(1)
