"""The audit's verdicts, its files, its arms, its prompts and its command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from audit_cases import evidence
from rich.console import Console
from typer.testing import CliRunner

from rollspec.audit import cli as audit_cli
from rollspec.audit import prompts as audit_prompts
from rollspec.audit.engine import AuditPlan, Variant, _cause, run_arm
from rollspec.audit.evidence import AuditError, samples_from
from rollspec.audit.noise import NoiseCheck
from rollspec.audit.report import check_path, families, markdown, page, verdict_line, write
from rollspec.audit.statistics import TestResult
from rollspec.audit.verdict import (
    AuditResult,
    DraftCounts,
    GreedyCheck,
    LogProbCheck,
    check_greedy,
    check_log_probs,
)
from rollspec.cli import app

runner = CliRunner()
GOOD = TestResult("surprisal", "all positions", 100, 0.5, None, 0.6, 1.0)
BAD = TestResult("token frequency", "token 7", 100, 9.0, None, 1e-9, 1e-7)
DRAFTS = DraftCounts(100, 40)


# ---- checks and verdicts


def test_nan_log_probs_fail_with_a_sentence() -> None:
    p = np.array([0.5, 0.5])
    good = evidence([[0, 1]], p, (np.log([0.5, 0.5]),))
    assert not check_log_probs(good).failure  # type: ignore[union-attr]
    bad = check_log_probs(evidence([[0, 1]], p, (np.array([np.log(0.5), np.nan]),)))
    assert bad is not None and bad.failure and bad.not_finite == 1
    result = AuditResult([GOOD], 2, log_probs=bad)
    assert result.verdict == "fail"
    assert result.reasons == ("1 of 2 log-probabilities that the engine reported are NaN or infinite.",)
    off = check_log_probs(evidence([[0, 1]], p, (np.log([0.5, 0.5]) + 0.05,)))
    assert off is not None and off.failure
    assert check_log_probs(evidence([[0]], p)) is None
    assert not LogProbCheck(9, 0, 0.05, 0.05, None, 0.1).failure  # what bfloat16 may differ by


def _greedy(rows: list[list[int]], gap: float, dtype: str = "float32") -> GreedyCheck:
    want = [np.array([1, 2, 3, 4])]
    return check_greedy(want, samples_from(rows, [0] * len(rows)), lambda i, prefix, a, b: gap, dtype)


def test_greedy_identity() -> None:
    same = _greedy([[1, 2, 3, 4]] * 3, 9.0)
    assert (same.identical, same.tokens, same.failure) == (3, 12, None)
    tie = _greedy([[1, 2, 9, 9]], 1e-6)
    assert (tie.ties, tie.tokens, tie.failure) == (1, 2, None)
    differ = _greedy([[1, 2, 9, 9]], -0.2)
    assert differ.failure
    m = differ.mismatches[0]
    assert (m.position, m.reference_token, m.subject_token, m.gap) == (2, 3, 9, 0.2)
    assert (
        "at position 2 of prompt 0 (3 without drafts, 9 with; their logits differ by 0.2)"
        in (AuditResult([GOOD], 4, greedy=differ).reasons[0])
    )
    assert not _greedy([[1, 2, 9, 9]], 0.2, "bfloat16").failure
    cut = _greedy([[1, 2, 3]], 0.0)
    assert cut.failure and "one response ends there" in AuditResult([GOOD], 3, greedy=cut).reasons[0]


@pytest.mark.parametrize(
    ("tests", "drafts", "verdict", "says"),
    [
        ([GOOD], DRAFTS, "pass", None),
        ([GOOD], None, "pass", None),
        ([BAD, GOOD], DRAFTS, "fail", "1 of 2 tests reject"),
        ([BAD], DraftCounts(0, 0), "fail", "1 of 1 tests reject"),
        ([GOOD], DraftCounts(0, 0), "inconclusive", "0 tokens were drafted"),
        ([GOOD], DraftCounts(9, 0), "inconclusive", "0 of them accepted"),
        ([GOOD], DraftCounts(9, 9), "inconclusive", "9 of them accepted and 0 rejected"),
    ],
)
def test_verdicts(tests: list[TestResult], drafts: DraftCounts | None, verdict: str, says: str | None) -> None:
    result = AuditResult(tests, 100, drafts=drafts)
    assert result.verdict == verdict
    assert (says in result.reasons[0]) if says else result.reasons == ()


# ---- files


def _result(verdict: str = "fail") -> AuditResult:
    tests = [BAD, GOOD] if verdict == "fail" else [GOOD]
    greedy = _greedy([[1, 2, 9, 9], [1, 2, 3]], 0.2)
    return AuditResult(
        tests, 100, drafts=DRAFTS, greedy=greedy if verdict == "fail" else None, provenance={"model": "<m>"}
    )


def test_the_result_is_strict_json(tmp_path: Path) -> None:
    write(_result(), tmp_path / "a" / "r.json")
    found = json.loads((tmp_path / "a" / "r.json").read_text(), parse_constant=lambda c: pytest.fail(c))
    assert found["verdict"] == "fail" and found["n_tests"] == 2 and found["min_p"] == 1e-9
    assert found["drafts"] == {"drafted": 100, "accepted": 40, "rejected": 60}
    assert found["tests"][0]["where"] == "token 7"


def test_pages_say_the_verdict_and_escape(tmp_path: Path) -> None:
    result = _result()
    assert verdict_line(result) in markdown(result)
    text = page(result)
    assert "&lt;m&gt;" in text and "<m>" not in text and "http" not in text
    assert families(result)[0][-1] == "rejects"
    for name in ("r.md", "r.html"):
        write(result, tmp_path / name)
    with pytest.raises(AuditError, match=r"ends in none of \.json, \.md, \.html"):
        check_path(tmp_path / "r.pdf")


# ---- arms


def test_an_arm_leaves_the_jobs_files_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arm = Variant.with_rollspec("default", [f"history.dir={tmp_path}", "proposal.k_max=3"])
    assert arm.drafts and arm.rollspec is not None
    assert arm.rollspec["history"]["dir"] is None
    assert arm.rollspec["proposal"]["k_max"] == 3
    assert not Variant.plain().drafts
    monkeypatch.setenv("ROLLSPEC", "default")
    monkeypatch.setenv("ROLLSPEC__PROPOSAL__K_MAX", "9")
    monkeypatch.setenv("ROLLSPEC_PATCHES", "cpu")
    started: dict[str, Any] = {}
    monkeypatch.setattr("subprocess.Popen", lambda command, **given: started.update(given) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_arm("m", AuditPlan(((1,),)), arm)
    env = started["env"]
    assert "ROLLSPEC" not in env and "ROLLSPEC__PROPOSAL__K_MAX" not in env
    assert env["ROLLSPEC_PATCHES"] == "cpu"


def test_the_first_error_of_a_log_is_the_cause() -> None:
    log = "INFO fine\n(Worker) ERROR 11-21 [x.py:1] RuntimeError: out of chairs\nEngineDeadError: see above\n"
    assert _cause(log) == ": RuntimeError: out of chairs"
    assert "one\ntwo" in _cause("one\ntwo")


# ---- prompts


class _Tokenizer:
    def __init__(self, size: int = 100) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(w) for w in text.split()]

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return " ".join(m["content"] for m in messages)


class _Config:
    vocab_size = 100
    max_position_embeddings = 64


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_prompts, "_load", lambda *_: (_Config(), _Tokenizer()))


@pytest.mark.usefixtures("loads")
def test_prompts_of_every_kind(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a bb"},
        {"token_ids": [4, 5]},
        {"prompt": [{"role": "user", "content": "ccc"}]},
        {"prompt": "a bb"},
    ]
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert audit_prompts.token_prompts("m", file, 8, 10) == ((1, 2), (4, 5), (3,))
    assert len(audit_prompts.token_prompts("m", None, 3, 10)) == 3
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"prompt": ["a bb", "ccc"], "x": [1, 2]}), tmp_path / "p.parquet")
    assert audit_prompts.token_prompts("m", tmp_path / "p.parquet", 8, 10) == ((1, 2), (3,))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompt"),
        ("{", "line 1 of .* is not JSON"),
        ('{"text": "a"}', "prompt 0 has neither `prompt` nor `token_ids`"),
        ('{"token_ids": [100]}', "token id 100, and the model's vocab_size is 100"),
        ('{"prompt": 3.5}', "neither text"),
        ('{"prompt": [1, "a"]}', "neither text, nor token ids, nor messages"),
    ],
)
@pytest.mark.usefixtures("loads")
def test_bad_prompts_are_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(AuditError, match=says) as e:
        audit_prompts.token_prompts("m", file, 8, 10)
    assert "\n" not in str(e.value)


def test_sizes_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(audit_prompts, "_load", lambda *_: (_Config(), _Tokenizer(size=101)))
    with pytest.raises(AuditError, match="the tokenizer has 101 tokens and the model's vocab_size is 100"):
        audit_prompts.token_prompts("m", None, 8, 10)
    monkeypatch.setattr(audit_prompts, "_load", lambda *_: (_Config(), None))
    with pytest.raises(AuditError, match="no tokenizer"):
        audit_prompts.token_prompts("m", None, 8, 10)
    monkeypatch.setattr(audit_prompts, "_load", lambda *_: (_Config(), _Tokenizer()))
    with pytest.raises(AuditError, match="exceeds the model's 64 positions"):
        audit_prompts.token_prompts("m", None, 8, 60)
    with pytest.raises(AuditError, match="cannot be read"):
        audit_prompts.token_prompts("m", tmp_path / "none.jsonl", 8, 10)


# ---- the command


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AuditPlan, Variant]]:
    """The command without engines: what it would have run."""
    calls: list[tuple[AuditPlan, Variant]] = []

    def run_audit(model: str, plan: AuditPlan, subject: Variant, **kwargs: Any) -> AuditResult:
        calls.append((plan, subject))
        kwargs["stage"]("sampling")(1, 2)
        return {"fail": _result, "pass": lambda: _result("pass")}.get(
            model, lambda: AuditResult([GOOD], 9, drafts=DraftCounts(0, 0))
        )()

    monkeypatch.setattr(audit_cli, "run_audit", run_audit)
    monkeypatch.setattr(audit_prompts, "_load", lambda *_: (_Config(), _Tokenizer()))
    return calls


@pytest.mark.parametrize(("model", "status"), [("pass", 0), ("fail", 1), ("nothing drafted", 2)])
def test_exit_status_is_the_verdict(ran: list[tuple[AuditPlan, Variant]], model: str, status: int) -> None:
    out = runner.invoke(app, ["audit", "--model", model, "--max-tokens", "8"])
    assert out.exit_code == status, out.output
    assert {0: "PASS", 1: "FAIL", 2: "INCONCLUSIVE"}[status] in out.output
    assert len(ran) == 1


def test_json_is_all_of_stdout(ran: list[tuple[AuditPlan, Variant]], tmp_path: Path) -> None:
    file = tmp_path / "r.html"
    out = runner.invoke(app, ["audit", "--model", "fail", "--max-tokens", "8", "--json", "--out", str(file)])
    assert json.loads(out.stdout)["verdict"] == "fail"
    assert "FAIL" in file.read_text()


def test_options_reach_the_plan_and_the_engine(ran: list[tuple[AuditPlan, Variant]]) -> None:
    args = ["--preset", "suffix_only", "--set", "proposal.k_max=5", "--tokens", "99", "--samples", "3", "--seed", "4"]
    args += ["--max-tokens", "8", "--engine", "tensor_parallel_size=2", "--temperature", "0.7", "--dtype", "bfloat16"]
    runner.invoke(app, ["audit", "--model", "pass", *args])
    plan, arm = ran[0]
    assert (plan.tokens, plan.samples, plan.max_tokens, plan.seed) == (99, 3, 8, 4)
    assert (plan.temperature, plan.dtype) == (0.7, "bfloat16")
    assert arm.rollspec is not None and arm.rollspec["proposal"]["k_max"] == 5
    assert arm.engine == {"tensor_parallel_size": 2}
    runner.invoke(app, ["audit", "--model", "pass", "--max-tokens", "8", "--speculative-config", '{"method": "ngram"}'])
    assert ran[1][1].speculative_config == {"method": "ngram"} and ran[1][1].rollspec is None
    runner.invoke(app, ["audit", "--model", "pass", "--max-tokens", "8", "--speculative-config", "none"])
    assert not ran[2][1].drafts


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--set", "proposal.k_maks=9"], "did you mean 'proposal.k_max'?"),
        (["--preset", "defualt"], "did you mean 'default'?"),
        (["--temperature", "0"], "--temperature 0 cannot be used"),
        (["--alpha", "1.5"], "--alpha 1.5 cannot be used"),
        (["--out", "x.pdf"], "ends in none of"),
        (["--speculative-config", "{"], "write a JSON object or none"),
        (["--speculative-config", "[1]"], "write a JSON object or none"),
        (["--speculative-config", "none", "--set", "a=1"], "leave out --preset, --set and --switch-arms"),
        (["--engine", "nonsense"], "the override 'nonsense' has no '='"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    ran: list[tuple[AuditPlan, Variant]], args: list[str], says: str
) -> None:
    out = runner.invoke(app, ["audit", "--model", "pass", "--max-tokens", "8", *args])
    assert out.exit_code == 2, out.output
    assert says in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
    assert not ran


def test_a_model_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    out = runner.invoke(app, ["audit", "--model", str(tmp_path)])
    assert out.exit_code == 2, out.output
    assert "is no model that can be read" in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1


# ---- headlines


def test_the_headline_says_what_was_found() -> None:
    """Above a table whose every row is ok it does not say that the tokens are wrong."""
    off = LogProbCheck(100, 0, 0.5, 0.4, 0.01, 0.001)
    differ = _greedy([[1, 2, 9, 9]], 0.2)
    wrong = NoiseCheck(1e-4, 100, 99, 0, 1, 0.5, (0, 1, 2, 3, 0.5))
    from_target = "does not sample from the target"
    assert from_target in verdict_line(AuditResult([BAD, GOOD], 100, log_probs=off))
    assert from_target in verdict_line(AuditResult([GOOD], 100, noise=wrong))
    for found, says in (
        (
            AuditResult([GOOD], 100, log_probs=off),
            "FAIL: the engine reports log-probabilities that are not the target's",
        ),
        (AuditResult([GOOD], 100, greedy=differ, log_probs=off), "FAIL: greedy responses change with drafts"),
        (AuditResult([GOOD], 100, lossy=0.5, greedy=differ), "FAIL: rollouts are lossy by their configuration"),
    ):
        line = verdict_line(found)
        assert line.startswith(says) and from_target not in line and found.verdict == "fail"
        assert all(row[-1] == "ok" for row in families(found))
        assert found.to_dict()["finding"] in line and line in markdown(found)


def test_lossy_reuse_fails_although_every_test_passes() -> None:
    arm = Variant.with_rollspec("spec_rl")
    assert arm.lossy == 0.5 and Variant.with_rollspec("default").lossy is None and Variant.plain().lossy is None
    result = AuditResult([GOOD], 1000, drafts=DRAFTS, lossy=arm.lossy)
    assert result.verdict == "fail" and "reuse.mode = lenient, bias 0.5" in result.reasons[0]
    assert result.to_dict()["lossy"] == 0.5 and "reuse.mode = lenient" in markdown(result)


# ---- progress in a file


def test_stages_are_printed_when_they_begin_where_output_is_a_file(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file, audit_cli._display(Console(file=file)) as stage:
        stage("greedy")(0, 10)
        assert "greedy" in (tmp_path / "log").read_text(), "it comes when the stage begins, not at the end"
        stage("sampling [x]")
        lines = (tmp_path / "log").read_text().splitlines()
        assert [line.split("s  ")[1] for line in lines] == ["greedy", "sampling [x]"]


def test_a_terminal_has_a_bar_for_each_stage(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file, audit_cli._display(Console(file=file, force_terminal=True, width=100)) as stage:
        stage("sampling")(50, 100)
        stage("greedy")
    assert all(name in log.read_text() for name in ("sampling", "greedy"))
