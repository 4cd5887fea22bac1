"""`drafter-online make-head` with an engine that writes samples of a tiny target at once, and takes no time."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from character_tokenizer import Tokenizer
from drafter_target import AUX, HIDDEN, VOCABULARY, model, sample
from reference_samples import capture
from transformers import AutoConfig
from typer.testing import CliRunner

from drafter_online import files, generate, make_head, make_head_cli
from drafter_online import head as heads
from drafter_online.architecture import aux_layers, check_room
from drafter_online.buffer import Buffer
from drafter_online.cli import app
from drafter_online.errors import DrafterError, HeadError, TrainingError
from drafter_online.files import replace, try_lock
from drafter_online.held_out import covered, first, max_acceptance, split
from drafter_online.make_head import Options, draft_vocabulary, make
from drafter_online.samples import Sample
from rollspec.engine.vllm.generate import endless, reached


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    made = Tokenizer(template=True)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_: made)
    return made


# ---- the vocabulary and the held-out prompts ------------------------------------------------------------------------


def test_the_draft_vocabulary_covers_the_text_and_no_more() -> None:
    many = Counter({i: 1000 for i in range(100)})
    assert draft_vocabulary(many, 50_000) == 128  # 100, rounded up to a multiple of 64
    assert draft_vocabulary(many | Counter({i: 1 for i in range(100, 200)}), 50_000) == 128, "the last 0.1 % is rare"
    assert draft_vocabulary(many | Counter({i: 10 for i in range(100, 200)}), 50_000) == 192
    assert draft_vocabulary(Counter({i: 2 for i in range(30_000)}), 50_000) == 8192
    assert draft_vocabulary(Counter({i: 1 for i in range(300)}), 50_000) == 8192, "so little text says nothing of more"
    assert draft_vocabulary(many, 110) == 110, "no more than the target has"


def test_no_prompt_is_on_both_sides(tiny_target: Path) -> None:
    buffer = Buffer()
    for i in range(12):
        buffer.add(sample(tiny_target, i, prompt_key=f"p{i % 6}"))
    kept, held = split(buffer, 0.4)
    sides = {s.prompt_key for s in kept}, {s.prompt_key for s in held}
    assert all(sides) and not sides[0] & sides[1] and len(kept) + len(held) == 12
    for i in range(12, 40):  # what comes later moves none
        buffer.add(sample(tiny_target, i, prompt_key=f"p{i}"))
    assert sides[1] <= {s.prompt_key for s in split(buffer, 0.4)[1]}
    assert {s.prompt_key for s in split(buffer, 1e-9)[1]} and len(split(buffer, 1.0)[0])
    assert first(held, 1) == held[:1] and first(held, 10**6) == held


def test_of_one_prompt_nothing_is_held_out(tiny_target: Path) -> None:
    buffer = Buffer()
    for i in range(3):
        buffer.add(sample(tiny_target, i, prompt_key="p"))
    kept, held = split(buffer, 0.1)
    assert len(kept) == 3 and not held


def test_the_max_acceptance_is_that_of_the_targets_own_likeliest_tokens(tiny_target: Path) -> None:
    """On text that the target said greedily it is reached everywhere; on other text as often as that is its choice."""
    from drafter_online.model import Eagle3
    from drafter_online.trainer import DrafterTraining, Trainer

    trainer = Trainer(Eagle3(heads.fresh(tiny_target, aux=AUX)), Buffer(), DrafterTraining(ttt_steps=2))
    target = model(tiny_target)
    greedy = said(tiny_target, 5)
    assert max_acceptance(trainer, [greedy]).length == 3.0
    other = capture(target, [(t + 1) % VOCABULARY for t in greedy.input_ids.tolist()], 4, AUX, request_id="b")
    best = target(other.input_ids[None]).logits[0].argmax(-1)[:-1] == other.input_ids[1:]  # of tokens 1 to 23
    at = [int(best[i]) + int(best[i] and best[i + 1]) for i in range(3, len(best) - 1)]
    assert max_acceptance(trainer, [other]).length == pytest.approx(1 + sum(at) / len(at))


def test_coverage_counts_what_the_head_can_draft(tiny_target: Path) -> None:
    whole = sample(tiny_target, 0, length=24, prompt=4)
    said = whole.input_ids[whole.loss_mask].tolist()
    head = heads.fresh(tiny_target, draft_vocab_size=2, counts={said[0]: 9, said[1]: 9})
    assert covered(head, [whole]) == pytest.approx(sum(t in said[:2] for t in said) / len(said))
    assert covered(heads.fresh(tiny_target), [whole]) == 1.0


# ---- models without room --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["t5", "qwen3_next", "jamba", "mamba", "nemotron_h"])
def test_models_without_room_for_a_head(model_type: str) -> None:
    with pytest.raises(HeadError, match=rf"x \({model_type}\) has|x is an encoder-decoder"):
        check_room("x", AutoConfig.for_model(model_type))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "gpt_oss", "mixtral"])
def test_models_with_room_for_a_head(model_type: str) -> None:
    check_room("x", AutoConfig.for_model(model_type))


def test_the_learning_rate_falls_in_the_second_half() -> None:
    assert make_head.cooled(0.0) == make_head.cooled(0.5) == 1.0 > make_head.cooled(0.6) > make_head.cooled(0.9) > 0.0
    assert make_head.cooled(1.0) == make_head.cooled(1.5) == pytest.approx(0.0)


def test_a_step_at_no_rate_changes_nothing(tiny_target: Path) -> None:
    from drafter_online.model import Eagle3
    from drafter_online.trainer import DrafterTraining, Trainer

    buffer = Buffer()
    buffer.add(said(tiny_target, 1))
    trainer = Trainer(Eagle3(heads.fresh(tiny_target, aux=AUX)), buffer, DrafterTraining(ttt_steps=2))
    before = {n: p.detach().clone() for n, p in trainer.drafter.module.named_parameters()}
    trainer.rate = 0.0
    trainer.micro_step()
    assert all(p.equal(before[n]) for n, p in trainer.drafter.module.named_parameters())
    trainer.rate = 1.0
    trainer.micro_step()
    assert not all(p.equal(before[n]) for n, p in trainer.drafter.module.named_parameters())


# ---- the whole ------------------------------------------------------------------------------------------------------


def said(path: Path, seed: int, **fields: str) -> Sample:
    """20 tokens that the target says greedily, which a head can learn in seconds."""
    begin = torch.tensor([[seed % VOCABULARY, 3, seed // 2 % VOCABULARY, 1]])
    ids = model(path).generate(begin, do_sample=False, min_new_tokens=20, max_new_tokens=20)[0].tolist()
    return capture(model(path), ids, 4, aux_layers(4), temperature=0.0, request_id=f"r{seed}", **fields)


class Engine:
    """In the place of vLLM's process: writes samples and progress; fails or is killed where a test says so."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.jobs: list[generate.GenerationJob] = []
        self.killed = False
        self.samples = 12

    def __call__(self, job: generate.GenerationJob, folder: Path, note: Any) -> None:
        self.jobs.append(job)
        (folder / generate.SAMPLES).mkdir(parents=True)
        for i in range(self.samples):
            at = said(self.target, i + job.seed, prompt_key=f"p{i}")
            replace(folder / generate.SAMPLES / f"{i}.safetensors", at.to_bytes())
        progress = {"state": "done", "start_seconds": 1.0, "seconds": job.seconds, "requests": 12, "tokens": 240}
        replace(folder / generate.PROGRESS, json.dumps(progress).encode())
        note({**progress, "state": "generating"})
        if self.killed:
            raise KeyboardInterrupt


@pytest.fixture
def engine(tiny_target: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(tiny_target)
    monkeypatch.setattr(generate, "run", made)
    # This target says one token over and over, and its last layer knows: a random start leaves something to learn.
    monkeypatch.setattr(heads, "start_as_target", lambda *_: [])
    return made


def options(target: Path, out: Path, **more: Any) -> Options:
    training = {"learning_rate": 1e-2, "warmup_steps": 2, "batch_tokens": 96, "ttt_steps": 2, "checkpoint_every": 5}
    given: dict[str, Any] = {"minutes": 0.1, "max_tokens": 64, "hold_out": 0.3, "training": training, **more}
    return Options(str(target), out, **given)


def test_a_head_is_made_and_a_second_call_generates_nothing(tiny_target: Path, engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "head"
    phases = Counter[str]()
    facts = make(options(tiny_target, out), lambda phase, *_: phases.update([phase]))
    (job,) = engine.jobs
    assert job.seconds == pytest.approx(2.0) and job.temperature == 1.0 and job.max_tokens == 64 and job.tokens is None
    assert len(job.prompts) == 360 and facts["built_in_prompts"] and facts["prompts_too_long"] == 0
    assert job.max_model_len == max(map(len, job.prompts)) + 64 <= 256
    assert (Path(job.head) / heads.CONFIG).exists() and phases["generating"] == 1 and phases["training"] > 5
    assert facts == json.loads((out / make_head.RECORD).read_text()) and facts["finished"]
    assert facts["after"]["acceptance_length"] > facts["before"]["acceptance_length"] + 0.05, facts
    assert facts["samples"] + facts["held_out"] == 12 and facts["held_out"] > 1
    assert [c["micro_steps"] for c in facts["curve"]] == sorted({c["micro_steps"] for c in facts["curve"]})
    assert facts["curve"][-1]["micro_steps"] == facts["counts"]["micro_steps"] > 5 and facts["cpu_seconds"] > 0
    assert facts["curve"][-1]["acceptance_length"] == facts["after"]["acceptance_length"]
    head = heads.load(out, tiny_target)
    assert head.config.eagle_aux_hidden_state_layer_ids == aux_layers(4) == facts["aux_layers"]
    assert head.fc.weight.shape[0] == HIDDEN and facts["draft_vocab_size"] == VOCABULARY
    # Again, with nothing left of the minutes but what generating may not have: nothing is generated, training goes on.
    again = make(options(tiny_target, out))
    assert len(engine.jobs) == 1
    assert again["curve"][: len(facts["curve"]) - 1] == facts["curve"][:-1] and again["before"] == facts["before"]
    assert 0 <= again["counts"]["micro_steps"] - facts["counts"]["micro_steps"] < facts["counts"]["micro_steps"] / 2
    # With more of them both go on.
    more = make(options(tiny_target, out, minutes=0.25))
    assert len(engine.jobs) == 2 and engine.jobs[1].seconds == pytest.approx(5.0 - 3.0) and engine.jobs[1].seed == 12
    assert more["counts"]["micro_steps"] > again["counts"]["micro_steps"] + 5 and more["samples"] == facts["samples"]


def test_what_a_killed_call_left_is_gone_on_with(tiny_target: Path, engine: Engine, tmp_path: Path) -> None:
    out = tmp_path / "head"
    engine.killed = True
    with pytest.raises(KeyboardInterrupt):
        make(options(tiny_target, out))
    assert len(Buffer.load(out / "buffer")) == 12 and not json.loads((out / make_head.RECORD).read_text())["finished"]
    # Killed outright, samples lie where the engine wrote them, one of them cut short, and training has begun.
    left = out / "work" / "engine" / generate.SAMPLES
    left.mkdir()
    blob = said(tiny_target, 99, prompt_key="p99").to_bytes()
    replace(left / "a.safetensors", blob)
    replace(left / "b.safetensors", blob[:-8])
    calls = 0

    def dies(phase: str, *_: Any) -> None:
        nonlocal calls
        calls += phase == "training"
        if calls == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(options(tiny_target, out), dies)
    assert len(Buffer.load(out / "buffer")) == 13 and not left.exists()
    assert (out / "work" / "state").is_dir() and not (out / heads.CONFIG).exists(), "no head before it is trained"
    facts = make(options(tiny_target, out))
    assert len(engine.jobs) == 1, "what was generated before is enough"
    assert facts["finished"] and facts["counts"]["micro_steps"] >= 10
    assert facts["before"]["acceptance_length"] < facts["after"]["acceptance_length"]


@pytest.mark.parametrize("full", ["job.json", "index.json", "make-head.json", "model.safetensors"])
def test_a_full_disk_is_one_sentence_and_nothing_half_written_is_used(
    full: str, tiny_target: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = files.write_synced, [1]

    def no_space(path: Path, data: bytes, mode: int = 0o666) -> None:
        if full in path.name and left:
            left.pop()
            write(path, data[: len(data) // 2], mode)
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data, mode)

    monkeypatch.setattr(files, "write_synced", no_space)
    monkeypatch.setattr(generate, "run", lambda job, folder, note: (
        folder.mkdir(parents=True, exist_ok=True), generate.replace(folder / "job.json", b"{}"),
        engine(job, folder, note),
    ))  # fmt: skip
    with pytest.raises(DrafterError, match=r"written.*No space left on device") as error:
        make(options(tiny_target, tmp_path))
    assert str(error.value).startswith("drafter-online: ") and "\n" not in str(error.value)
    assert not left and not [p for p in tmp_path.rglob(".*") if p.is_file()], "half a file is left"
    facts = make(options(tiny_target, tmp_path))
    assert facts["finished"] and facts["samples"] + facts["held_out"] == 12
    assert heads.load(tmp_path, tiny_target) is not None


def test_enough_tokens_end_generating(tiny_target: Path, engine: Engine, tmp_path: Path) -> None:
    engine.killed = True
    with pytest.raises(KeyboardInterrupt):
        make(options(tiny_target, tmp_path, tokens=500, minutes=10))
    assert Buffer.load(tmp_path / "buffer").token_counts().total() == 12 * 20
    with pytest.raises(KeyboardInterrupt):
        make(options(tiny_target, tmp_path, tokens=500, minutes=30))
    assert [j.tokens for j in engine.jobs] == [500, 500 - 240]
    engine.killed = False
    make(options(tiny_target, tmp_path, tokens=480, minutes=0.1))
    assert len(engine.jobs) == 2


def test_a_vocabulary_of_its_own_stays(tiny_target: Path, engine: Engine, tmp_path: Path) -> None:
    facts = make(options(tiny_target, tmp_path, draft_vocab=2))
    assert facts["draft_vocab_size"] == 2 and 0.05 < facts["vocabulary_coverage"] < 1
    assert facts["held_out_coverage"] < 1 and heads.load(tmp_path, tiny_target).draft_vocab_size == 2
    with pytest.raises(HeadError, match="--draft-vocab 2, not 30"):
        make(options(tiny_target, tmp_path, draft_vocab=30))


def test_mistakes_are_one_sentence(tiny_target: Path, engine: Engine, tokenizer: Tokenizer, tmp_path: Path) -> None:
    def fails(says: str, out: Path = tmp_path / "a", **more: Any) -> None:
        with pytest.raises(DrafterError, match=says) as error:
            make(options(tiny_target, out, **more))
        assert str(error.value).startswith("drafter-online: ") and "\n" not in str(error.value)

    fails("training.lr", training={"lr": 1})
    fails("cannot be read", prompts=tmp_path / "no")
    (tmp_path / "file").write_text("")
    fails("cannot be written", out=tmp_path / "file" / "head")
    tokenizer.encode = lambda text, add_special_tokens=True: [VOCABULARY + 2]  # type: ignore[method-assign]
    fails(f"token {VOCABULARY + 2}, but the model's vocabulary has {VOCABULARY}")
    del tokenizer.encode  # type: ignore[method-assign]
    engine.samples = 0
    fails("recorded no response")
    engine.samples = 12
    lock = try_lock(tmp_path / "a" / "work" / "lock")
    assert lock is not None
    fails("another make-head")
    os.close(lock)
    make(options(tiny_target, tmp_path / "a"))
    fails(r"aux_layers \[1, 2, 3\], not \[0, 2\]", aux=[0, 2])
    (tmp_path / "a" / make_head.RECORD).write_text("{")
    fails("is damaged")


def test_the_command(
    tiny_target: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(make_head_cli, "NOTE_SECONDS", 0.0)
    (tmp_path / "prompts.txt").write_text("a\nb\nc\n")
    given = [
        "make-head", "--model", tiny_target, "--out", tmp_path / "head", "--minutes", 0.05, "--prompts",
        tmp_path / "prompts.txt", "--max-tokens", 32, "--hold-out", 0.3, "--engine", "dtype=float32", "--temperature",
        0.7, "--batch", 4, "--set", "batch_tokens=96", "--set", "ttt_steps=2", "--dtype", "float32",
    ]  # fmt: skip
    result = CliRunner().invoke(app, [*map(str, given), "--json"])
    assert result.exit_code == 0, result.output
    assert "drafter-online: training, " in caplog.text, "progress where no terminal shows a bar"
    assert ": 240 tokens, " in caplog.text, "those of the responses so far"
    facts = json.loads(result.stdout)
    (job,) = engine.jobs
    assert facts["prompts"] == 3 == len(job.prompts) and not facts["built_in_prompts"] and facts["temperature"] == 0.7
    assert (job.batch, job.temperature, job.max_tokens, job.engine) == (4, 0.7, 32, {"dtype": "float32"})
    assert json.loads((tmp_path / "head" / heads.CONFIG).read_text())["dtype"] == "float32"
    table = CliRunner().invoke(app, [*map(str, given)])
    assert table.exit_code == 0 and "acceptance length, after" in table.stdout and "curve" not in table.stdout
    none = CliRunner().invoke(app, ["make-head", "--model", str(tmp_path / "no"), "--out", str(tmp_path / "b")])
    assert none.exit_code == 2 and "not a model" in none.output and not (tmp_path / "b").exists()


# ---- the engine's program -------------------------------------------------------------------------------------------


def test_limits_end_generating() -> None:
    so_far = {"seconds": 5.0, "tokens": 100, "bytes": 1000}
    none = dict.fromkeys(("seconds", "tokens", "bytes"))
    assert not reached(so_far, none) and not reached(so_far, {**none, "seconds": 6.0, "tokens": 101, "bytes": 1001})
    assert all(reached(so_far, {**none, name: value}) for name, value in so_far.items())


def test_every_prompt_comes_once_a_round() -> None:
    order = endless(5, seed=3)
    rounds = [[next(order) for _ in range(5)] for _ in range(3)]
    assert all(sorted(r) == list(range(5)) for r in rounds) and rounds[0] != rounds[1]


def test_an_engine_that_fails_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "failing_engine.py"
    program.write_text("import sys\nprint('INFO fine')\nraise ValueError('no memory for the cache')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(generate, "ENGINE", "failing_engine")
    job = generate.GenerationJob("m", "h", [[1]], 1.0, 8, 16, 0, 1, 1.0)
    with pytest.raises(TrainingError, match=r"status 1 \(ValueError: no memory for the cache\); see .*engine.log") as e:
        generate.run(job, tmp_path / "engine", lambda _: None)
    assert "\n" not in str(e.value)
    assert json.loads((tmp_path / "engine" / generate.JOB).read_text()) == dataclasses.asdict(job)
    monkeypatch.setattr(generate, "find_spec", lambda _: None)
    with pytest.raises(TrainingError, match="vLLM, which is not installed"):
        generate.run(job, tmp_path / "engine", lambda _: None)
