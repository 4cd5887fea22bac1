from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rollspec.head.swap.payload import SwapRefusedError, check, distance, fingerprint, read_folder  # noqa: E402

GOOD = {"fc.weight": torch.ones(2, 3), "norm.weight": torch.ones(2), "d2t": torch.zeros(4, dtype=torch.int64)}


def test_what_fits_is_accepted() -> None:
    check({n: t.clone() for n, t in GOOD.items()}, GOOD)
    check({n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in GOOD.items()}, GOOD)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc.weight": None}, "fc.weight is missing"),
        ({"fc.weight": torch.ones(3, 2)}, "fc.weight has shape [3, 2], not [2, 3]"),
        ({"norm.weight": torch.tensor([1.0, float("inf")])}, "norm.weight has NaN or infinity"),
        ({"norm.weight": torch.ones(2, dtype=torch.int64)}, "norm.weight is torch.int64"),
        ({"d2t": torch.tensor([0, 1, -4, 0])}, "d2t makes draft token 2 the target's -2"),
        ({"d2t": torch.tensor([0, 1, 0, 0])}, "d2t makes draft token 2 the target's 2, which is not after"),
        ({"more.weight": torch.ones(1)}, "more.weight is not a weight of the drafter that runs"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(change: dict[str, Any], words: str) -> None:
    given = {n: t for n, t in {**GOOD, **change}.items() if t is not None}
    with pytest.raises(SwapRefusedError) as e:
        check(given, GOOD)
    assert words in str(e.value) and str(e.value).startswith("rollspec: drafter weights were not loaded: ")
    assert str(e.value).endswith(".") and "\n" not in str(e.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(GOOD, tmp_path / "model.safetensors")
    assert set(read_folder(tmp_path)) == set(GOOD)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(SwapRefusedError, match="truncated"):
        read_folder(tmp_path)
    path.unlink()
    with pytest.raises(SwapRefusedError, match="no safetensors"):
        read_folder(tmp_path)


def test_how_far_weights_moved() -> None:
    moved = {n: t * 1.1 if t.is_floating_point() else t for n, t in GOOD.items()}
    assert distance(moved, GOOD) == pytest.approx(0.1, rel=1e-5)
    assert distance(GOOD, GOOD) == 0.0


def test_a_fingerprint_sees_lost_and_swapped_weights() -> None:
    a = torch.randn(100)
    marks = fingerprint([a])
    assert fingerprint([a.clone()]) == marks
    assert fingerprint([torch.zeros(100)]) != marks
    assert fingerprint([a.flip(0)]) != marks, "the same numbers in other places"
