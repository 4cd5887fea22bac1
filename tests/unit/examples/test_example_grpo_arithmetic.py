"""The arithmetic GRPO example: tokenizer, reward, data, growth, prepared folder, shipped checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from examples.grpo_arithmetic import data, gsm8k, task, tokenizer  # noqa: E402
from examples.grpo_arithmetic.grow import Size, count_parameters, grow, layer_positions  # noqa: E402
from examples.grpo_arithmetic.lengths import percentile, summarize_lengths  # noqa: E402
from examples.grpo_arithmetic.prepare import CHECKPOINT, HERE, prepare  # noqa: E402
from examples.grpo_arithmetic.reward import STEP_CREDIT, compute_score, correct_leading_steps, evaluate  # noqa: E402

SMALL = {
    "vocab_size": tokenizer.VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def noisy_model(**changes: Any) -> Qwen3ForCausalLM:
    """A small random policy whose norms are not all ones, so that growth is tested on every kind of weight."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{**SMALL, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


# --- tokenizer ---------------------------------------------------------------------------------------


def test_tokenizer_round_trip_and_size() -> None:
    tok = tokenizer.build_tokenizer()
    text = "17+58=67+8=75\nthen 75-23=52\n#### 52 é"
    assert tok.decode(tok.encode(text)) == text
    assert len(tok) == tokenizer.VOCAB_SIZE
    assert (tok.pad_token_id, tok.eos_token_id) == (tokenizer.PAD_ID, tokenizer.EOS_ID)


def test_prompt_text_is_the_chat_template() -> None:
    tok = tokenizer.build_tokenizer()
    messages = [{"role": "user", "content": "1+2=?"}]
    assert tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == tokenizer.prompt_text(
        "1+2=?"
    )


# --- task and reward -----------------------------------------------------------------------------------


def test_worked_solutions_are_right_and_heavy_tailed() -> None:
    rng = random.Random(0)
    lengths = []
    for _ in range(2000):
        problem = task.sample_problem(rng)
        solution = task.worked_solution(problem, rng)
        assert compute_score("x", solution, str(problem.answer)) == 1.0
        assert correct_leading_steps(problem.question, solution) == (len(problem.ops), len(problem.ops))
        assert all(0 <= total <= task.MAX_TOTAL for total in problem.totals)
        lengths.append(len(solution) + 1)
    assert max(lengths) >= 5 * percentile(lengths, 0.5)
    assert percentile(lengths, 0.99) < 512


INFO = {"question": "17+58-23=?"}


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("17+58=75\n75-23=52\n#### 52", 1.0),
        ("then 17+58=67+8=75\nnow 75-23=55-3=52\n#### 52\n", 1.0),
        ("17+58=75\n75-23=51\n#### 51", STEP_CREDIT / 2),  # second step wrong
        ("17+58=66+8=75\n75-23=52\n#### 53", 0.0),  # the sides of the first step disagree
        ("17+58=75\n75-24=51\n#### 51", STEP_CREDIT / 2),  # wrong operand
        ("17+58=75\n75-23=52\n#### 53", STEP_CREDIT),  # all steps right, answer wrong
        ("17+58=75\n75-23=52", STEP_CREDIT),  # no answer
        ("#### 52 apples", 0.0),
        ("52", 0.0),
        ("", 0.0),
        ("####", 0.0),
        ("=\n+=-\n#### x", 0.0),
    ],
)
def test_reward(solution: str, score: float) -> None:
    assert compute_score("x", solution, "52", INFO) == pytest.approx(score)


def test_reward_without_question_is_right_or_wrong() -> None:
    assert compute_score("x", "17+58=75", "52") == 0.0
    assert compute_score("x", "#### 52", "52", None, unknown_argument=1) == 1.0
    assert compute_score("x", "#### 1234", "1,234") == 1.0


def test_evaluate() -> None:
    assert evaluate("17+58-23") == 52
    assert evaluate("17+") is None
    assert evaluate("__import__('os')") is None


# --- data ------------------------------------------------------------------------------------------------


def test_problems_are_deterministic_and_splits_differ() -> None:
    assert data.problems("train", 20, seed=3) == data.problems("train", 30, seed=3)[:20]
    assert data.problems("train", 20, seed=3) != data.problems("train", 20, seed=4)
    assert not set(data.problems("train", 256)) & set(data.problems("val", 64))
    with pytest.raises(ValueError, match="split='test'"):
        data.problems("test", 1)


@pytest.mark.parametrize("count", [32, 64, 256])
def test_few_prompts_hold_long_chains(count: int) -> None:
    ops = [len(problem.ops) for problem in data.problems("train", count)]
    assert percentile(ops, 0.5) <= 4
    assert max(ops) >= 5 * percentile(ops, 0.5)
    assert min(ops) >= task.MIN_OPS and max(ops) <= task.MAX_OPS


def test_parquet_rows_feed_the_reward(tmp_path: Path) -> None:
    path = data.write_split(tmp_path / "train.parquet", "train", 8)
    rows = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 8
    first = rows[0]
    assert set(first) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert first["prompt"] == [{"role": "user", "content": first["extra_info"]["question"]}]
    truth = first["reward_model"]["ground_truth"]
    assert compute_score(first["data_source"], f"#### {truth}", truth, first["extra_info"]) == 1.0


def test_gsm8k_rows_and_unreachable_hub(tmp_path: Path) -> None:
    def load(*_: Any, **__: Any) -> list[dict[str, str]]:
        return [{"question": "How many?", "answer": "1,000+200=1,200\n#### 1,200"}]

    train, _ = gsm8k.write_gsm8k(tmp_path, load)
    first = datasets.Dataset.from_parquet(str(train), cache_dir=str(tmp_path / "cache"))[0]
    assert first["reward_model"]["ground_truth"] == "1200"
    assert compute_score(first["data_source"], "so #### 1200", "1200", first["extra_info"]) == 1.0

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    with pytest.raises(gsm8k.HubUnreachableError, match="hub is unreachable"):
        gsm8k.write_gsm8k(tmp_path, offline)


# --- growth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "size",
    [
        Size(128, 96, 5, 4, 2),  # width and depth; the width ratio is a power of four
        Size(48, 48, 2, 2, 1),  # width alone, an uneven ratio
        Size(32, 48, 6, 2, 1),  # depth alone
        Size(32, 64, 2, 6, 3),  # heads and MLP alone
    ],
)
def test_growth_keeps_the_logits(size: Size, tied: bool) -> None:
    model = noisy_model(tie_word_embeddings=tied)
    grown = grow(model, size).eval()
    ids = torch.randint(0, tokenizer.VOCAB_SIZE, (3, 40))
    with torch.no_grad():
        before, after = model(ids).logits, grown(ids).logits  # [3, 40, V]
    assert before.abs().max() > 1.0  # a flat model would pass for free
    assert (before - after).abs().max() < 1e-4
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    assert count_parameters(grown) > count_parameters(model)
    assert (grown.config.hidden_size, grown.config.num_hidden_layers) == (size.hidden_size, size.num_hidden_layers)


def test_growth_with_small_activations_keeps_epsilon_exact() -> None:
    """Where the mean of squares is near epsilon, a wrong epsilon shows."""
    model = noisy_model(rms_norm_eps=1e-2)
    ids = torch.randint(0, tokenizer.VOCAB_SIZE, (2, 30))
    with torch.no_grad():
        assert (model(ids).logits - grow(model, Size(128, 96, 4, 4, 2))(ids).logits).abs().max() < 1e-4


def test_new_parts_learn() -> None:
    model = noisy_model()
    grown = grow(model, Size(64, 96, 4, 4, 2))
    start = {name: parameter.detach().clone() for name, parameter in grown.named_parameters()}
    optimizer = torch.optim.Adam(grown.parameters(), lr=1e-3)
    ids = torch.randint(0, tokenizer.VOCAB_SIZE, (2, 30))
    for _ in range(2):  # what is behind a zero projection sees a gradient from the second step on
        optimizer.zero_grad()
        grown(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in grown.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        assert not torch.equal(parameter, start[name]), name
    assert grown.model.embed_tokens.weight.grad[ids[0], 32:].abs().max() > 0  # new residual channels are written


def test_growth_refuses_what_it_cannot_do() -> None:
    model = noisy_model()
    with pytest.raises(ValueError, match="hidden_size=16"):
        grow(model, Size(16, 48, 2, 2, 1))
    with pytest.raises(ValueError, match="num_attention_heads=4"):
        grow(model, Size(64, 48, 2, 4, 1))


def test_layer_positions() -> None:
    assert layer_positions(4, 9) == [0, 2, 4, 6]
    assert layer_positions(3, 3) == [0, 1, 2]


# --- prepared folder and shipped checkpoint -------------------------------------------------------------------


def test_shipped_checkpoint() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 5 * 2**20
    model = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    tok = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert model.config.vocab_size == len(tok) == model.get_input_embeddings().weight.shape[0]
    # Worked solutions must look familiar to it: about 0.1 nats per token is the entropy of the free choices alone.
    rng = random.Random(5)
    losses = []
    for _ in range(8):
        problem = task.sample_problem(rng, num_ops=4)
        prompt = tok.encode(tokenizer.prompt_text(problem.question))
        ids = torch.tensor([[*prompt, *tok.encode(task.worked_solution(problem, rng)), tok.eos_token_id]])
        labels = ids.clone()
        labels[:, : len(prompt)] = -100
        with torch.no_grad():
            losses.append(model(input_ids=ids, labels=labels).loss.item())
    assert sum(losses) / len(losses) < 0.5


def test_grown_checkpoint_has_the_same_logits() -> None:
    model = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    grown = grow(model, Size()).eval()
    ids = torch.tensor([tokenizer.build_tokenizer().encode(tokenizer.prompt_text("17+58-23=?") + "17+58=75\n75-23=")])
    with torch.no_grad():
        before, after = model(ids).logits, grown(ids).logits  # [1, T, V]
    assert (before - after).abs().max() < 1e-4
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    assert 15e6 < count_parameters(grown) < 60e6


def test_prepare_is_idempotent(tmp_path: Path) -> None:
    first = prepare(tmp_path, size="tiny", train_size=4, val_size=2)
    stamp = Path(first.manifest).stat().st_mtime_ns
    assert prepare(tmp_path, size="tiny", train_size=4, val_size=2) == first
    assert Path(first.manifest).stat().st_mtime_ns == stamp
    assert prepare(tmp_path, size="tiny", train_size=5, val_size=2).model != first.model
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []  # no work folder left behind
    manifest = json.loads(Path(first.manifest).read_text())
    assert manifest["size"] == "tiny" and len(manifest["inputs_sha256"]) == 64
    assert Path(first.reward) == HERE / "reward.py"
    assert len(datasets.Dataset.from_parquet(first.val, cache_dir=str(tmp_path / "cache"))) == 2
    assert len(AutoTokenizer.from_pretrained(first.model)) == tokenizer.VOCAB_SIZE
    with pytest.raises(ValueError, match="size='huge'"):
        prepare(tmp_path, size="huge")


# --- statistics ----------------------------------------------------------------------------------------------


def test_summarize_lengths() -> None:
    stats = summarize_lengths(range(1, 101))
    assert stats == {"p50": 50, "p90": 90, "p99": 99, "max": 100, "max_over_p50": 2.0}
