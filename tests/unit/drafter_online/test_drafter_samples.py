from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
from drafter_sample import make_sample, same

from drafter_online.errors import SampleError
from drafter_online.samples import Sample


def test_bytes_round_trip_with_verify_steps() -> None:
    s = make_sample(reward=0.5, temperature=0.7, draft_version=2).validate()
    assert same(Sample.from_bytes(s.to_bytes()), s)
    assert s.verify.drafter == ("head", "suffix") and s.verify.lengths.tolist() == [3, 2]
    assert s.verify.draft_version.tolist() == [2, -1]
    assert s.verify.top_logits[3:].tolist() == [[0.0] * 2] * 2


def test_bf16_round_trip() -> None:
    s = make_sample()
    s = dataclasses.replace(
        s,
        hidden_states=s.hidden_states.bfloat16(),
        verifier_last_hidden_states=s.verifier_last_hidden_states.bfloat16(),
    )
    assert same(Sample.from_bytes(s.to_bytes()), s)


def test_a_window_keeps_its_verify_steps_and_places() -> None:
    s = make_sample()
    w = s.window(6, 10).validate()
    assert w.position_ids.tolist() == [6, 7, 8, 9] and w.response_length == s.response_length
    assert w.verify.position.tolist() == [1] and w.verify.proposed.tolist() == [9, 9]
    assert same(Sample.from_bytes(w.to_bytes()), w)
    assert make_sample().window(0, 5).verify.proposed.numel() == 0
    with pytest.raises(SampleError, match="window"):
        s.window(6, 13)


def nan(s: Sample) -> torch.Tensor:
    bad = s.hidden_states.clone()
    bad[3, 1] = float("nan")
    return bad


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("input_ids", lambda s: s.input_ids.int()),
        ("input_ids", lambda s: s.input_ids - 100),
        ("hidden_states", lambda s: s.hidden_states[:-1]),
        ("hidden_states", lambda s: s.hidden_states[:, :-1]),
        ("hidden_states", lambda s: s.hidden_states.bfloat16()),
        ("hidden_states", nan),
        ("loss_mask", lambda s: s.loss_mask.long()),
        ("position_ids", lambda s: s.position_ids.flip(0)),
        ("reward", lambda s: float("nan")),
        ("temperature", lambda s: -1.0),
        ("target_version", lambda s: -1),
        ("verify", lambda s: dataclasses.replace(s.verify, accepted=s.verify.lengths + 1)),
        ("verify", lambda s: dataclasses.replace(s.verify, position=s.verify.position + 100)),
        ("verify", lambda s: dataclasses.replace(s.verify, proposed=s.verify.proposed[:-1])),
        ("verify", lambda s: dataclasses.replace(s.verify, logsumexp=s.verify.logsumexp / 0)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(field: str, change: object) -> None:
    s = make_sample()
    bad = dataclasses.replace(s, **{field: change(s)})  # type: ignore[operator, arg-type]
    with pytest.raises(SampleError, match=field):
        bad.validate()
    with pytest.raises(SampleError):
        Sample.from_bytes(bad.to_bytes())


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_truncated_bytes_are_refused(cut: int) -> None:
    with pytest.raises(SampleError):
        Sample.from_bytes(make_sample().to_bytes()[:cut])


def test_foreign_safetensors_are_refused() -> None:
    from safetensors.torch import save

    with pytest.raises(SampleError):
        Sample.from_bytes(save({"a": torch.zeros(2)}))


def test_the_command_and_the_store_are_light_to_import() -> None:
    code = (
        "import drafter_online.cli, drafter_online.versions, sys\n"
        "print([m for m in ('torch', 'speculators', 'transformers', 'rollspec', 'vllm') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (out.returncode, out.stdout.strip()) == (0, "[]"), out.stderr
