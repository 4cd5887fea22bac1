"""A version to be loaded into a drafter: read, checked and measured before the running weights are touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_online.errors import DrafterError
from drafter_online.versions import Versions
from drafter_online.vocabulary import misfit
from rollspec.errors import RollspecError


class SwapRefusedError(RollspecError):
    """A payload that must not be loaded; nothing was touched."""


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """Weights that run, or were asked for and read."""

    number: int
    tensors: dict[str, torch.Tensor]  # by checkpoint name, on the CPU; empty: as the engine was started
    store: Path | None = None  # of versions, that they are from
    since: int | None = None  # newest policy version that they were trained on, or under which they came


def unprepared(error: Exception) -> SwapRefusedError:
    """A fault while weights were prepared."""
    return SwapRefusedError(f"rollspec: drafter weights were not prepared ({type(error).__name__}: {error}).")


def not_loaded(why: str) -> SwapRefusedError:
    """Weights that do not fit, or cannot be read."""
    return SwapRefusedError(f"rollspec: drafter weights were not loaded: {why}.")


def read(payload: Mapping[str, Any], running: int, base: str, original: Mapping[str, torch.Tensor]) -> LoadedVersion:
    """Read what a payload names (`Swapper.request`); without `back` only versions newer than the `running` one.
    `base`: of the target (`drafter_online.architecture.base_of`). `original`: the weights that the engine was started
    with.

    Raises:
        SwapRefusedError: they cannot be read, or must not be loaded.
    """
    back = bool(payload.get("back"))
    if back and not payload.get("dir"):
        return LoadedVersion(0, dict(original), since=0)
    folder = Path(str(payload.get("dir", "")))
    if (folder / "manifest.json").is_file() or folder.name.isdigit():
        try:
            found = Versions(folder.parent).load(int(folder.name), base=base, newer_than=None if back else running)
        except (DrafterError, ValueError) as e:
            raise SwapRefusedError(f"rollspec: {str(e).removeprefix('drafter-online: ')}") from e
        return LoadedVersion(found.number, dict(found.tensors), folder.parent, found.manifest.target_version)
    version = int(payload.get("version", running + 1))
    if version <= running and not back:
        raise SwapRefusedError(f"rollspec: drafter version {version} is not newer than version {running}, which runs.")
    return LoadedVersion(version, read_folder(folder))


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a head's or model's folder, a SpecForge head's layer by the name that published versions have.

    Raises:
        SwapRefusedError: there are none, or they cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise not_loaded(f"{folder} holds no safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as e:
            raise not_loaded(f"{file} cannot be read ({e}); it is truncated or damaged") from e
    return {n.replace("midlayer.", "layers.0.", 1): t for n, t in tensors.items()}


def fingerprint(weights: Iterable[torch.Tensor]) -> list[float]:
    """Sums over weights that any overwriting or loss changes."""
    sums = []
    for p in weights:
        if p.is_floating_point():
            flat = p.data.float().flatten()
            positions = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float32).remainder_(97.0)
            sums += [flat.sum(dtype=torch.float64), (flat * positions).sum(dtype=torch.float64)]
    return [float(x) for x in torch.stack(sums).tolist()] if sums else []


def check(tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> None:
    """Names, shapes, kinds, finiteness and the vocabulary map, before anything is touched."""
    for name, want in like.items():
        have = tensors.get(name)
        if have is None:
            raise not_loaded(f"{name} is missing")
        if have.shape != want.shape:
            raise not_loaded(
                f"{name} has shape {list(have.shape)}, not {list(want.shape)}; give a version of the drafter that runs"
            )
        if have.is_floating_point() != want.is_floating_point():
            raise not_loaded(f"{name} is {have.dtype}, not {want.dtype}")
        if have.is_floating_point() and not bool(have.isfinite().all()):
            raise not_loaded(f"{name} has NaN or infinity in it")
    if extra := sorted(set(tensors) - set(like)):
        raise not_loaded(f"{extra[0]} is not a weight of the drafter that runs")
    if problem := misfit(tensors):
        raise not_loaded(f"{problem}; give the map that the version was trained with")


def distance(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> float:
    """|new - old| / |old| over all weights."""
    moved = size = 0.0
    for name, t in new.items():
        if t.is_floating_point():
            a, b = t.double(), old[name].double()
            moved += float((a - b).square().sum())
            size += float(b.square().sum())
    return (moved / size) ** 0.5 if size else float("inf")
