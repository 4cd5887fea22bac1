"""What the audit's page says: what was tested, on what, and how much it could have shown."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from audit_cases import make_distribution, sample
from safetensors.numpy import save_file

from rollspec import __version__
from rollspec.audit.distribution import detectable, distribution_tests
from rollspec.audit.engine import AuditPlan, Variant
from rollspec.audit.report import markdown, page
from rollspec.audit.run import _provenance, checkpoint, prompts_hash
from rollspec.audit.verdict import AuditResult
from rollspec.machine import git_sha, machine


def test_the_page_says_what_was_tested_and_how_to_repeat_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    evidence, tokens = sample(make_distribution(rng), 1, rng)
    tests = distribution_tests(evidence)
    file = tmp_path / "a.safetensors"
    save_file({"w": np.arange(6.0)}, file)
    prompts = ((1, 2), (3,))
    plan = {"prompts": 4, "samples": 16, "temperature": 1.0, "dtype": "float32", "max_tokens": 40, "seed": 3}
    result = AuditResult(
        tests,
        tokens.size,
        power=detectable(evidence, len(tests), 1e-3),
        provenance={"command": "rollspec audit --model <m>", "began": "2026-01-02T03:04:05+00:00"}
        | _provenance(tmp_path, AuditPlan(prompts), Variant.plain({}), SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
        | {"plan": plan | {"prompts_blake2b": prompts_hash(prompts)}},
    )
    weights = hashlib.blake2b(b"a.safetensors\0" + str(file.stat().st_size).encode() + b"\0" + file.read_bytes(),
                                 digest_size=16).hexdigest()  # fmt: skip
    revision = git_sha() or f"rollspec {__version__}"
    for text in (markdown(result), page(result)):
        assert f"blake2b {weights} of 1 safetensors" in text and "names, sizes and contents" in text
        assert f"blake2b {hashlib.blake2b(b'[[1,2],[3]]', digest_size=16).hexdigest()} of the token ids of 4" in text
        assert "2026-01-02T03:04:05+00:00 on" in text and machine()["cpu"] in text and revision in text
        assert "4 prompts, 16 siblings each, temperature 1, float32" in text and "seed 3" in text
        assert "nine times in ten" in text and "reproduce" in text and "adjusted p" in text
    assert "rollspec audit --model &lt;m&gt;" in page(result)
    assert detectable(evidence, 0, 1e-3) is None


def test_a_checkpoint_is_known_by_names_and_contents(tmp_path: Path) -> None:
    file = tmp_path / "model-1.safetensors"
    save_file({"w": np.zeros(4000, np.uint8)}, file)
    first = checkpoint(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[:-2000] + b"x" + data[-1999:])
    assert checkpoint(tmp_path)["blake2b"] != first["blake2b"]
    file.write_bytes(data)
    file.rename(tmp_path / "model-2.safetensors")
    assert checkpoint(tmp_path)["blake2b"] != first["blake2b"]
    nothing = [checkpoint(p) for p in (tmp_path / "none", (tmp_path / "empty"))]
    (tmp_path / "empty").mkdir()
    nothing.append(checkpoint(tmp_path / "empty"))
    assert all(c["blake2b"] is None and c["of"].startswith("not hashed") for c in nothing)


def test_the_docs_say_what_each_test_sees() -> None:
    text = (Path(__file__).parents[4] / "docs" / "exactness.md").read_text()
    rng = np.random.default_rng(5)
    for name in {t.name for t in distribution_tests(sample(make_distribution(rng), 1, rng)[0])}:
        (row,) = [line for line in text.split("\n") if line.startswith(f"| {name} |")]
        assert len(row.split("|")) == 6, "statistic, what it sees, what it cannot see"
