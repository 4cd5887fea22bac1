"""Lists that benchmarks take as one option: numbers and names, checked, with one sentence for what is wrong."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection

from rollspec.errors import RollspecError


def numbers(option: str, text: str, least: int = 0, most: int | None = None) -> tuple[int, ...]:
    """Numbers from `least` to `most`, separated by commas.

    Args:
        option: as it is typed, for the error.

    Raises:
        RollspecError: it is no such list.
    """
    try:
        found = tuple(int(n) for n in text.split(","))
    except ValueError as e:
        raise RollspecError(f"rollspec: {option} {text!r} is not a list of numbers; write 1,8,32.") from e
    if outside := [n for n in found if n < least or (most is not None and n > most)]:
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise RollspecError(f"rollspec: {option} {text!r} has {outside[0]}; give numbers of {bounds}.")
    return found


def arms_and_seeds(
    parser: ArgumentParser, arms: str, seeds: str, known: Collection[str]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """What `--arms`, separated by semicolons, and `--seeds` say; else `parser` ends the program with what is wrong."""
    try:
        return names("--arms", arms, known, ";"), numbers("--seeds", seeds)
    except RollspecError as e:
        parser.error(str(e))


def names(option: str, text: str | None, known: Collection[str], separator: str = ",") -> tuple[str, ...]:
    """Names of `known`, each once, in the order in which they are given; all of them where nothing is.

    Raises:
        RollspecError: one is not known.
    """
    if not text:
        return tuple(known)
    found = tuple(dict.fromkeys(n.strip() for n in text.split(separator) if n.strip()))
    if unknown := [n for n in found if n not in known]:
        raise RollspecError(f"rollspec: {option} has {unknown[0]!r}; choose from {f'{separator} '.join(known)}.")
    return found
