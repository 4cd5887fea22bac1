"""What the audit covers besides one engine's law: lossy reuse, a second build, swaps, and how much it can see."""

from __future__ import annotations

import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from test_audit import ran  # noqa: F401 - a fixture
from test_audit_power import V as POWER_VOCAB
from test_audit_power import make_law, mixed_with_argmax, mixed_with_uniform, one_token, sample
from typer.testing import CliRunner

from rollspec import __version__
from rollspec.cli import app
from rollspec.machine import git_sha, machine
from rollspec.sampling import audit_identity, lenient
from rollspec.sampling.audit import (
    BuildCheck,
    DraftCounts,
    SwapCheck,
    TestResult,
    conclude,
    law_tests,
    samples_from,
)
from rollspec.sampling.audit_builds import same_tokens
from rollspec.sampling.audit_engine import Arm, Plan
from rollspec.sampling.audit_law import SIGHT
from rollspec.sampling.audit_lossy import LossyCheck, check_lossy
from rollspec.sampling.audit_power import detectable
from rollspec.sampling.audit_report import facts, markdown, page
from rollspec.sampling.audit_run import _provenance
from rollspec.sampling.audit_worker import SWAP_STEPS, Swaps

runner = CliRunner()
GOOD = TestResult("surprisal", "all positions", 1000, 0.1, None, 0.9, 1.0)
BOTH = DraftCounts(10, 5)
VOCAB, LENGTH = 30, 8


class Laws:
    """A reference model with one law per position, whatever came before."""

    def __init__(self, seed: int, other: np.ndarray | None = None, by: float = 1.0) -> None:
        logits = np.random.default_rng(seed).normal(size=(LENGTH, VOCAB)) * 2.0
        logits = logits if other is None else other + by * logits
        self.logits = logits
        self.p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def log_probs(self, prompt: Sequence[int], response: list[int]) -> np.ndarray:
        return np.log(self.p[: len(response)])


def draw(p: np.ndarray, rng: np.random.Generator) -> int:
    return int(rng.choice(len(p), p=p))


def rollouts(new: Laws, old: Laws, n: int, bias: float, rng: np.random.Generator) -> tuple[list[list[int]], list[int]]:
    """Responses that start from old ones by the rule, and how many tokens it decided."""
    said, ruled = [], []
    for _ in range(n):
        before = [draw(q, rng) for q in old.p]
        cut = 0
        while cut < LENGTH:
            kept = lenient.keep_probability(
                np.log(new.p[cut, before[cut : cut + 1]]), np.log(old.p[cut, before[cut : cut + 1]]), bias
            )
            if rng.random() > kept[0]:
                break
            cut += 1
        said.append(before[:cut] + [draw(p, rng) for p in new.p[cut:]])
        ruled.append(min(cut + 1, LENGTH))
    return said, ruled


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_the_measured_distance_is_the_formulas(bias: float) -> None:
    new = Laws(0)
    old = Laws(1, new.logits, 0.3)
    said, ruled = rollouts(new, old, 1500, bias, np.random.default_rng(2))
    found = check_lossy(samples_from(said, [0] * len(said)), np.array(ruled), [(1,)], new, old, bias)  # type: ignore[arg-type]
    assert found.positions == sum(ruled) and found.tokens == 1500 * LENGTH
    assert found.theory > 0.02 and found.largest > found.theory and found.error < 0.01
    assert found.agrees, found
    honest = [[draw(p, np.random.default_rng(i * LENGTH + j)) for j, p in enumerate(new.p)] for i in range(1500)]
    found = check_lossy(samples_from(honest, [0] * 1500), np.array(ruled), [(1,)], new, old, bias)  # type: ignore[arg-type]
    assert abs(found.measured) < 4 * found.error and not found.agrees, "it would report the formula whatever was said"


def lossy(measured: float = 0.031) -> LossyCheck:
    return LossyCheck(1000, 400, 400, measured, 0.004, 0.03, 0.2, 0.5)


def test_lossy_reuse_fails_although_every_test_passes() -> None:
    result = conclude([GOOD], 1000, lossy=lossy(), provenance={"plan": None})
    assert result.verdict == "fail"
    assert "0.0310 +- 0.0040 measured, 0.0300 by the rule's formula" in result.reasons[0]
    assert "total variation 0.0310 +- 0.0040 measured" in dict(facts(result))["lossy reuse"]
    json.dumps(result.to_dict())


# ---- two builds


def texts(*rows: list[int]) -> Any:
    return samples_from(list(rows), [0] * len(rows))


def test_texts_of_two_builds() -> None:
    a = texts([1, 2, 3], [4, 5, 6], [7, 8], [1, 1])
    b = texts([1, 2, 3], [4, 9, 9], [7, 8, 9], [2, 1])
    asked: list[tuple[Any, ...]] = []

    def lead(*given: Any) -> float:
        asked.append(given)
        return {5: -1e-6, 1: 0.3}[given[2]]

    found = same_tokens(a, b, lead, 1e-4)
    assert (found.identical, found.ties, found.wrong, found.sequences) == (1, 1, 2, 4)
    assert asked == [(1, [4], 5, 9), (3, [], 1, 2)] and found.leads == (1e-6, 0.3)
    assert found.first == (2, 2, -1, -1, float("inf")) and found.tokens == 3 + 2 + 2 + 1 and not found.passed
    assert same_tokens(a, a, lead, 0.0).passed

    def verdict(build: BuildCheck) -> Any:
        return conclude([GOOD], 100, drafts=BOTH, build=build)

    result = verdict(BuildCheck("k_max=4", 50, None, None, BOTH, found))
    assert result.verdict == "fail"
    assert "2 of 4 texts differ between the two builds, the first at token 2 of response 2" in result.reasons[0]
    assert "1 of 4 texts identical" in dict(facts(result))["second build"]
    assert result.to_dict()["build"]["same"]["passed"] is False
    ok = verdict(BuildCheck("k_max=4", 50, None, None, BOTH, same_tokens(a, a, lead, 0.0)))
    assert ok.verdict == "pass"
    assert verdict(BuildCheck("k_max=4", 50, None, None, DraftCounts(9, 0), None)).verdict == "inconclusive"
    assert "did not speculate in the second" in verdict(BuildCheck("x", 5, None, None, None, None, "no")).reasons[0]


# ---- swaps


class Worker:
    """`collective_rpc` of an engine that refuses one folder."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def collective_rpc(self, name: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        assert (name, args[0]) == ("rollspec", "swap")
        self.asked.append(args[1])
        return [{"error": "rollspec: bad."} if args[1]["dir"] == "bad" else {"version": args[1]["version"]}, {}]


def test_folders_take_turns_while_requests_run() -> None:
    llm = Worker()
    swaps = Swaps(llm, ["a", "bad"])
    for _ in range(4 * SWAP_STEPS + 1):
        swaps.step()
    assert [q["dir"] for q in llm.asked] == ["a", "bad", "a", "bad"]
    assert [q["version"] for q in llm.asked] == [1, 2, 3, 4] and all(q["wait"] for q in llm.asked)
    assert swaps.made == 2 and swaps.errors == ["rollspec: bad."] * 2
    result = conclude([GOOD], 9, drafts=BOTH, swaps=SwapCheck(0, ("rollspec: bad.",)))
    assert result.verdict == "inconclusive" and "not replaced while requests ran (bad)" in result.reasons[0]
    result = conclude([GOOD], 9, drafts=BOTH, swaps=SwapCheck(7))
    assert result.verdict == "pass" and dict(facts(result))["drafter swaps"] == "7 while requests ran"


# ---- the lossy rule in the audit's engine


class Engine:
    """`LLM.generate` of a target that gives every old token the log-prob `new`, and always goes on with token 9."""

    def __init__(self, new: dict[int, float]) -> None:
        self.new = new
        self.asked: list[tuple[list[int], Any]] = []

    def generate(self, requests: list[dict[str, Any]], params: Any, use_tqdm: bool) -> list[Any]:
        out = []
        for request, p in zip(requests, params, strict=True):
            ids = list(request["prompt_token_ids"])
            self.asked.append((ids, p))
            log_probs = [None] + [{t: SimpleNamespace(logprob=self.new.get(t, -1.0))} for t in ids[1:]]
            said = [9] * p.max_tokens
            one = SimpleNamespace(token_ids=said, logprobs=[{9: SimpleNamespace(logprob=-0.5)}] * len(said))
            out.append(SimpleNamespace(finished=True, prompt_token_ids=ids, prompt_logprobs=log_probs, outputs=[one]))
        return out


def test_a_round_starts_from_old_responses_and_says_what_the_rule_decided() -> None:
    pytest.importorskip("vllm")
    from rollspec.config import ReuseConfig
    from rollspec.proposal.response_cache import ResponseCache
    from rollspec.sampling.audit_worker import Said, _generate_lossily
    from rollspec.sampling.lenient_reuse import LenientReuse

    reuse = LenientReuse(ReuseConfig(mode="lenient"), ResponseCache(1 << 20), 64, 20, frozenset({0}))
    engine = Engine({7: -99.0})
    old = [
        Said(0, 0, [4, 5, 0], [-1.0] * 3),  # kept whole, to its end
        Said(0, 0, [4, 7, 5], [-1.0] * 3),  # cut before the 7
        Said(1, 0, [7, 4], [-1.0] * 2),  # cut at once
        Said(1, 0, [4, 5], [-1.0] * 2),  # kept whole, and goes on
        Said(1, 0, [4, 5, 6, 6, 6, 6, 6], [-1.0] * 7),  # longer than the limit: generated whole
    ]
    plan = {"prompts": [(1, 2), (3, 4)], "max_tokens": 6, "temperature": 0.8}
    found = _generate_lossily(engine, plan, 2, reuse, old)
    assert [(s.tokens, s.ruled) for s in found] == [
        ([4, 5, 0], 3),
        ([4, 9, 9, 9, 9, 9], 2),
        ([9] * 6, 1),
        ([4, 5, 9, 9, 9, 9], 2),
        ([9] * 6, 0),
    ]
    assert [s.log_probs for s in found[:2]] == [[-1.0] * 3, [-1.0] + [-0.5] * 5]
    assert all((s.round, s.prompt) == (2, o.prompt) for s, o in zip(found, old, strict=True))
    scored, rest = engine.asked[:4], engine.asked[4:]
    assert all(p.prompt_logprobs == 0 for _, p in scored)
    assert [(ids, p.max_tokens) for ids, p in rest] == [([1, 2, 4], 5), ([3, 4], 6), ([3, 4, 4, 5], 4), ([3, 4], 6)]


# ---- power


@pytest.mark.parametrize("fault", ["uniform", "argmax", "odds"])
def test_what_it_says_it_can_see_it_finds(fault: str) -> None:
    """A fault of the size that is to be found nine times in ten: found in most of 15 audits."""
    rng = np.random.default_rng(5)
    law = make_law(rng)
    evidence, _ = sample(law, 8, rng)
    tests = law_tests(evidence)
    power = detectable(evidence, len(tests), 1e-3)
    assert power.tokens == 8 * 64 * 40 and power.token == 5
    assert power.uniform is not None and power.argmax is not None and power.odds is not None
    bias = {
        "uniform": lambda: mixed_with_uniform(power.uniform),
        "argmax": lambda: mixed_with_argmax(power.argmax),
        "odds": lambda: one_token(power.odds),
    }[fault]()
    found = sum(law_tests(sample(law, 8, rng, bias)[0])[0].p_adjusted <= 1e-3 for _ in range(15))
    assert found >= 10, (found, power)
    assert evidence.vocab == POWER_VOCAB


def test_the_page_says_what_was_tested_and_how_to_repeat_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    evidence, tokens = sample(make_law(rng), 1, rng)
    tests = law_tests(evidence)
    file = tmp_path / "a.safetensors"
    save_file({"w": np.arange(6.0)}, file)
    prompts = ((1, 2), (3,))
    plan = {"prompts": 4, "samples": 16, "temperature": 1.0, "dtype": "float32", "max_tokens": 40, "seed": 3}
    result = conclude(
        tests,
        tokens.size,
        power=detectable(evidence, len(tests), 1e-3),
        provenance={"command": "rollspec audit --model <m>", "began": "2026-01-02T03:04:05+00:00"}
        | _provenance(tmp_path, Plan(prompts), Arm.plain({}), SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
        | {"plan": plan | {"prompts_blake2b": audit_identity.prompts(prompts)}},
    )
    checkpoint = hashlib.blake2b(b"a.safetensors\0" + str(file.stat().st_size).encode() + b"\0" + file.read_bytes(),
                                 digest_size=16).hexdigest()  # fmt: skip
    revision = git_sha() or f"rollspec {__version__}"
    for text in (markdown(result), page(result)):
        assert f"blake2b {checkpoint} of 1 safetensors" in text and audit_identity.WHOLE in text
        assert f"blake2b {hashlib.blake2b(b'[[1,2],[3]]', digest_size=16).hexdigest()} of the token ids of 4" in text
        assert "2026-01-02T03:04:05+00:00 on" in text and machine()["cpu"] in text and revision in text
        assert "cannot see" in text
        for name in {t.name for t in tests}:
            assert all(html.escape(what) in text or what in text for what in SIGHT[name]), name
        assert "4 prompts, 16 siblings each, temperature 1, float32" in text and "seed 3" in text
        assert "nine times in ten" in text and "Reproduce" in text and "adjusted p" in text
    assert "rollspec audit --model &lt;m&gt;" in page(result)
    nothing = detectable(SimpleNamespace(log_prob=np.zeros(0)), 5, 1e-3)  # type: ignore[arg-type]
    assert (nothing.uniform, nothing.argmax, nothing.odds) == (None, None, None)


def test_a_large_checkpoint_is_known_by_its_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_identity, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(audit_identity, "END_BYTES", 100)
    file = tmp_path / "model-1.safetensors"
    save_file({"w": np.zeros(4000, np.uint8)}, file)
    first = audit_identity.checkpoint(tmp_path)
    assert first["of"] == audit_identity.PARTS and first["files"] == 1 and first["bytes"] == file.stat().st_size
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")

    def changed(at: int) -> bool:
        file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        return bool(audit_identity.checkpoint(tmp_path)["blake2b"] != first["blake2b"])

    assert all(changed(at) for at in (9, start, start + 99, len(data) - 100, len(data) - 1))
    assert not changed(start + 2000), "its middle is not read, as the page says"
    file.write_bytes(data)
    file.rename(tmp_path / "model-2.safetensors")
    assert audit_identity.checkpoint(tmp_path)["blake2b"] != first["blake2b"]
    nothing = [audit_identity.checkpoint(p) for p in (tmp_path / "none", (tmp_path / "empty"))]
    (tmp_path / "empty").mkdir()
    nothing.append(audit_identity.checkpoint(tmp_path / "empty"))
    assert all(c["blake2b"] is None and c["of"].startswith("not hashed") for c in nothing)


def test_what_each_test_sees_is_what_the_docs_say() -> None:
    text = (Path(__file__).parents[2] / "docs" / "exactness.md").read_text()
    for name, (sees, cannot) in SIGHT.items():
        assert any(
            line.startswith(f"| {name} |") and line.endswith(f"| {sees} | {cannot} |") for line in text.split("\n")
        )


# ---- the command


def test_options_reach_both_builds(ran: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    from rollspec.sampling import audit_cli

    seconds: list[Arm | None] = []
    plain = audit_cli.run_audit

    def noting(*args: Any, second: Arm | None = None, **kwargs: Any) -> Any:
        seconds.append(second)
        return plain(*args, **kwargs)

    monkeypatch.setattr(audit_cli, "run_audit", noting)
    head = tmp_path / "head"
    head.mkdir()

    def audit(*args: str) -> Arm:
        out = runner.invoke(app, ["audit", "--model", "pass", "--max-tokens", "8", *args])
        assert out.exit_code == 0, out.output
        found: Arm = ran[-1][1]
        return found

    audit("--set", "mode=coupled", "--second", "proposal.k_max=3", "--second", "max_num_batched_tokens=64")
    other = seconds[-1]
    assert other is not None and other.rollspec is not None
    assert other.rollspec["proposal"]["k_max"] == 3 and other.rollspec["mode"] == "coupled"
    assert other.engine == {"max_num_batched_tokens": 64}
    assert other.name == "proposal.k_max=3, max_num_batched_tokens=64"
    assert audit("--preset", "spec_rl", "--temperature", "0.8").old_temperature == 0.4
    assert audit("--preset", "spec_rl", "--old", "m0").old_temperature is None
    kept = audit("--preset", "coupled_reuse", "--old", "m0", "--old-temperature", "0.9")
    assert (kept.old, kept.old_temperature) == ("m0", 0.9) and seconds[-1] is None
    learned = ["--set", "proposal.drafters=[eagle3]", "--set", f"proposal.learned.model={head}"]
    assert audit(*learned, "--swap", str(head)).swaps == (str(head),)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--swap", "."], "this engine has none"),
        (["--set", "proposal.drafters=[eagle3]", "--swap", "/none/such"], "is no folder"),
        (["--second", "nonsense"], "--second 'nonsense' is not KEY=VALUE"),
        (["--second", "proposal.k_maks=3"], "did you mean 'proposal.k_max'?"),
        (["--speculative-config", "none", "--second", "proposal.k_max=3"], "which this engine does not run"),
        (["--old-temperature", "0"], "--old-temperature 0 cannot be used"),
    ],
)
def test_bad_input_is_one_sentence(ran: list[Any], args: list[str], says: str) -> None:  # noqa: F811
    out = runner.invoke(app, ["audit", "--model", "pass", "--max-tokens", "8", *args])
    assert out.exit_code == 2, out.output
    assert says in out.stderr and len(out.stderr.strip().splitlines()) == 1 and not ran
