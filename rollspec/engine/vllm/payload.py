"""What may be loaded into a drafter: read, checked and measured before anything that runs is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from rollspec.errors import RollspecError


class SwapRefusedError(RollspecError):
    """A payload that must not be loaded; nothing was touched."""


def unprepared(error: Exception) -> SwapRefusedError:
    """A fault while weights were prepared."""
    return SwapRefusedError(f"rollspec: drafter weights were not prepared ({type(error).__name__}: {error}).")


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a head's or model's folder, a SpecForge head's layer by the name that published versions have.

    Raises:
        SwapRefusedError: there are none, or they cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SwapRefusedError(f"rollspec: drafter weights were not loaded: {folder} holds no safetensors file.")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (OSError, SafetensorError) as e:
            raise SwapRefusedError(
                f"rollspec: drafter weights were not loaded: {file} cannot be read ({e}); it is truncated or damaged."
            ) from e
    return {n.replace("midlayer.", "layers.0.", 1): t for n, t in tensors.items()}


def fingerprint(weights: Iterable[torch.Tensor]) -> list[float]:
    """Sums over weights that any overwriting or loss changes."""
    sums = []
    for p in weights:
        if p.is_floating_point():
            flat = p.data.float().flatten()
            places = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float32).remainder_(97.0)
            sums += [flat.sum(dtype=torch.float64), (flat * places).sum(dtype=torch.float64)]
    return [float(x) for x in torch.stack(sums).tolist()] if sums else []


def check(tensors: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor]) -> None:
    """Names, shapes, kinds and finiteness, before anything is touched."""
    for name, want in like.items():
        have = tensors.get(name)
        if have is None:
            raise SwapRefusedError(f"rollspec: drafter weights were not loaded: {name} is missing.")
        if have.shape != want.shape:
            raise SwapRefusedError(
                f"rollspec: drafter weights were not loaded: {name} has shape {list(have.shape)}, not "
                f"{list(want.shape)}; give a version of the drafter that runs."
            )
        if have.is_floating_point() != want.is_floating_point():
            raise SwapRefusedError(
                f"rollspec: drafter weights were not loaded: {name} is {have.dtype}, not {want.dtype}."
            )
        if have.is_floating_point() and not bool(have.isfinite().all()):
            raise SwapRefusedError(f"rollspec: drafter weights were not loaded: {name} has NaN or infinity in it.")
    if extra := sorted(set(tensors) - set(like)):
        raise SwapRefusedError(
            f"rollspec: drafter weights were not loaded: {extra[0]} is not a weight of the drafter that runs."
        )


def distance(new: Mapping[str, torch.Tensor], old: Mapping[str, torch.Tensor]) -> float:
    """|new - old| / |old| over all weights."""
    moved = size = 0.0
    for name, t in new.items():
        if t.is_floating_point():
            a, b = t.double(), old[name].double()
            moved += float((a - b).square().sum())
            size += float(b.square().sum())
    return (moved / size) ** 0.5 if size else float("inf")
