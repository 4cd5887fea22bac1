"""The tasks for a real model: answers and rewards by hand, data in verl's format, what a job gets, the warm-up."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from examples.grpo_arithmetic import tokenizer  # noqa: E402
from examples.grpo_tasks import data, prepare, warm_up  # noqa: E402
from examples.grpo_tasks.reward import FORM, PARTIAL, compute_score  # noqa: E402
from examples.grpo_tasks.task import KINDS, Task, size_at, stream  # noqa: E402
from rollspec.errors import RollspecError  # noqa: E402

TASKS = list(islice(stream(0), 700))


def score(task: Task, response: str) -> float:
    return compute_score("x", response, task.answer, {"kind": task.kind, "totals": list(task.totals)})


# ---- tasks --------------------------------------------------------------------------------------------------------


def test_streams_repeat_by_seed_and_never_within() -> None:
    assert list(islice(stream(0), 700)) == TASKS and list(islice(stream(1), 7)) != TASKS[:7]
    assert len({t.instruction for t in TASKS}) == len(TASKS)
    assert Counter(t.kind for t in TASKS) == dict.fromkeys(KINDS, 100)


def test_worked_responses_earn_everything_and_others_do_not() -> None:
    for task in TASKS:
        assert score(task, task.response) == 1.0, task
        assert score(task, task.response + "\nAnswer: 0") < 1.0, task
        assert score(task, "") == 0.0
        assert score(task, task.instruction) <= PARTIAL, task


def brute_force(task: Task) -> str:
    """The answer, from the instruction alone."""
    listed = task.instruction.split(": ", 1)[1].split(". Work")[0].split(", ") if ": " in task.instruction else []
    if task.kind == "sort":
        number = listed[0].isdigit()
        return ", ".join(sorted(listed, key=lambda x: (int(x), x) if number else (0, x)))
    if task.kind == "count":
        word = task.instruction.split('"')[1]
        return str(task.instruction.split(": ", 1)[1].split("?")[0].split(", ").count(word))
    act = {
        "reverse": lambda x: x[::-1],
        "upper": lambda x: [w.upper() for w in x],
        "dedupe": lambda x: [w for i, w in enumerate(x) if w not in x[:i]],
    }
    return ", ".join(act[task.kind](listed))


def test_answers_are_those_of_the_instruction() -> None:
    for task in TASKS:
        if task.kind == "story":
            total = 0
            for i, sentence in enumerate(task.instruction.split(" How many")[0].rstrip(".").split(". ")):
                n = int(next(w for w in sentence.split() if w.isdigit()))
                loses = any(w in sentence for w in ("loses", "gives", "sells", "drops"))
                total += -n if loses else n
                assert total >= 0 and (i == 0 or task.totals[i - 1] == total)
            assert task.answer == str(total)
        elif task.kind == "json":
            people = json.loads(task.answer)
            said = " ".join(f"{p['name']} is {p['age']} years old and lives in {p['city']}." for p in people)
            assert task.instruction.startswith(said + " Write")
        else:
            assert brute_force(task) == task.answer, task


def test_lengths_have_a_tail() -> None:
    lengths = sorted(len(t.response) for t in TASKS)
    assert lengths[-1] >= 4 * lengths[350] and lengths[630] >= 2 * lengths[350]
    assert [size_at(q, 3, 16) for q in (0.0, 0.5, 0.999999)] == [3, 5, 16]


# ---- rewards ------------------------------------------------------------------------------------------------------

STORY = {"kind": "story", "totals": [12, 9]}
PEOPLE = '[{"name": "Mia", "age": 31}, {"name": "Tom", "age": 40}]'


@pytest.mark.parametrize(
    ("kind", "response", "expected"),
    [
        ("story", "7 + 5 = 12\n12 - 3 = 9\nAnswer: 9", 1.0),
        ("story", "answer: 9.", 1.0),  # sums are a help, not the task
        ("story", "7 + 5 = 12\n12 - 3 = 8\nAnswer: 8", FORM + PARTIAL / 2),
        ("story", "7 + 5 = 12\n12 - 3 = 9", PARTIAL),  # no answer line
        ("story", "12 - 3 = 9\n7 + 5 = 12\nAnswer: 8", FORM + PARTIAL / 2),  # in the wrong order
        ("story", "Answer: 9 shells", 0.0),
        ("story", "Answer: 9\nAnswer: 9", 0.0),
        ("story", "Answer:", 0.0),
        ("count", "Answer: 9", 1.0),
        ("count", "Answer: 8", FORM),
        ("count", "9", 0.0),
        ("sort", "Answer: a, b, c, d", 1.0),
        ("sort", "Here it is:\nAnswer: a,b, c,  d.", 1.0),
        ("sort", "a, b, c, d", PARTIAL),
        ("sort", "Answer: a, b, d, c", FORM + PARTIAL / 2),
        ("sort", "Answer: a, b, c, d, e, f, g, h", FORM + PARTIAL / 2),  # what is too much counts against it
        ("sort", "Answer: A, B, C, D", FORM),
        ("json", '[{"age": 31, "name": "Mia"}, {"name": "Tom", "age": 40}]', 1.0),
        ("json", f"```json\n{PEOPLE}\n```", 1.0),
        ("json", '[{"name": "Mia", "age": "31"}, {"name": "Tom", "age": 40}]', FORM + PARTIAL * 3 / 4),  # a string
        ("json", '[{"name": "Mia", "age": 31}]', FORM + PARTIAL / 2),
        ("json", '{"name": "Mia", "age": 31}', 0.0),
        ("json", "[]", FORM),
        ("json", f"Sure! {PEOPLE}", 0.0),
        ("json", "[" * 100_000, 0.0),
    ],
)
def test_reward(kind: str, response: str, expected: float) -> None:
    answer = {"story": "9", "count": "9", "sort": "a, b, c, d", "json": PEOPLE}[kind]
    info: dict[str, Any] = STORY if kind == "story" else {"kind": kind, "totals": []}
    assert compute_score("x", response, answer, info, unknown_argument=1) == pytest.approx(expected)


@given(st.sampled_from(TASKS), st.text(max_size=60), st.booleans())
def test_any_text_has_a_reward(task: Task, text: str, form: bool) -> None:
    response = f"Answer: {text}" if form else text
    assert 0.0 <= score(task, response) <= 1.0


def test_the_reward_is_loaded_by_path_alone(tmp_path: Path) -> None:
    """As verl does; `totals` comes back from Parquet as an array."""
    path = data.write_split(tmp_path / "train.parquet", "train", 14, seed=3)
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("reward_by_path", prepare.HERE / "reward.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tasks = list(islice(stream(data.SEEDS["train"] + 3), 14))
    for row, task in zip(rows.with_format("numpy"), tasks, strict=True):
        truth = str(row["reward_model"]["ground_truth"])
        assert module.compute_score(row["data_source"], task.response, truth, row["extra_info"]) == 1.0
    assert rows[0]["prompt"] == [{"role": "user", "content": tasks[0].instruction}]


# ---- what a job gets ------------------------------------------------------------------------------------------------


def model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.build_tokenizer().save_pretrained(folder)
    return folder


def test_prepared_once_per_model_and_seed(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    first = prepare.prepare(tmp_path / "cache", str(folder), train_size=8, val_size=4)
    assert prepare.prepare(tmp_path / "cache", str(folder), train_size=8, val_size=4) == first
    assert first.model == str(folder) and Path(first.reward).is_file()
    assert len(datasets.Dataset.from_parquet(first.train, cache_dir=str(tmp_path / "c"))) == 8
    assert prepare.prepare(tmp_path / "cache", str(folder), seed=1, train_size=8).train != first.train
    (folder / "model.safetensors").touch()  # trained further: another job
    assert prepare.prepare(tmp_path / "cache", str(folder), train_size=8, val_size=4).manifest != first.manifest
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RollspecError, match="has no chat template"):
        prepare.prepare(tmp_path / "cache", str(folder))
    with pytest.raises(RollspecError, match="is no folder"):
        prepare.prepare(tmp_path / "cache", str(tmp_path / "absent"))


# ---- the warm-up ----------------------------------------------------------------------------------------------------


def test_only_the_response_is_learned() -> None:
    tok = tokenizer.build_tokenizer()
    ids, prompt = warm_up.encode(tok, TASKS[0])
    assert tok.decode(ids[prompt:]) == TASKS[0].response + tokenizer.IM_END
    assert tok.decode(ids[:prompt]) == tokenizer.prompt_text(TASKS[0].instruction)
    input_ids, labels = next(warm_up.batches(tok, 0, rows=4))
    assert input_ids.shape == labels.shape and len(input_ids) == 4
    for row, wanted in zip(input_ids, labels, strict=True):
        learned = wanted != warm_up.IGNORE
        assert torch.equal(row[learned], wanted[learned])
        assert tok.decode(wanted[learned]).endswith(tokenizer.IM_END)
        assert tok.decode(row[~learned]).startswith(tokenizer.IM_START)


def test_the_loss_is_that_of_the_whole_model(tmp_path: Path) -> None:
    policy = Qwen3ForCausalLM.from_pretrained(model(tmp_path / "m"))
    input_ids, labels = next(warm_up.batches(tokenizer.build_tokenizer(), 0, rows=2))
    whole = policy(input_ids=input_ids, labels=labels).loss
    assert warm_up.loss_of(policy, input_ids, labels).item() == pytest.approx(whole.item(), rel=1e-4)


def test_training_lowers_the_loss_and_stops_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    policy = Qwen3ForCausalLM.from_pretrained(model(tmp_path / "m"))
    ticks = iter(range(10_000))
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(monotonic=lambda: next(ticks)))  # a second per look
    monkeypatch.setattr(warm_up, "NOTE_SECONDS", 25.0)
    report = warm_up.train(policy, tokenizer.build_tokenizer(), seconds=60, lr=1e-2)
    assert report["steps"] == 30 and report["last_loss"] < 0.8 * report["first_loss"]
    notes = [line for line in capsys.readouterr().err.splitlines() if "of 60 s" in line]
    assert [note.split(",")[0] for note in notes] == ["27 of 60 s", "53 of 60 s"], "where no bar is shown"


def test_warm_up_refuses_before_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = model(tmp_path / "m")
    for arguments, words in (
        (["--model", str(tmp_path / "absent"), "--out", str(tmp_path / "o")], "is no folder"),
        (["--model", str(folder), "--out", str(folder)], "is there already"),
        (["--model", str(folder), "--out", str(tmp_path / "o"), "--minutes", "0"], "leaves no time"),
        (["--model", str(folder), "--out", str(tmp_path / "o"), "--layers", "9"], "--layers 9 of a model of"),
    ):
        monkeypatch.setattr("sys.argv", ["warm_up", *arguments])
        assert warm_up.main() == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_draft_model_of_fewer_layers_is_written_into_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "o").mkdir()
    given = ["--model", str(model(tmp_path / "m")), "--out", str(tmp_path / "o"), "--layers", "1", "--minutes", "0.001"]
    monkeypatch.setattr("sys.argv", ["warm_up", *given])
    assert warm_up.main() == 0
    small = Qwen3ForCausalLM.from_pretrained(tmp_path / "o")
    assert small.config.num_hidden_layers == len(small.model.layers) == len(small.config.layer_types) == 1
