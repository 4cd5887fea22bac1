"""Layers of settings: where they come from, and how they become one checked configuration.

    validated(RollspecConfig, [*layers_of("default"), ({"proposal.k_max": 8}, "the overrides")])

A layer is a mapping and its origin: a preset, a YAML file, a mapping, the environment or dotted overrides. Later ones
win. An unknown key is an error: a typo must not leave the default in place.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from rollspec.errors import ConfigError

ENV_SWITCH = "ROLLSPEC"
ENV_PREFIX = "ROLLSPEC__"

M = TypeVar("M", bound=BaseModel)
Layer = tuple[dict[str, Any], str]


def switched_on(env: Mapping[str, str] | None = None) -> str | None:
    """The preset or file that `ROLLSPEC` names for every engine of a program; None where it is not set."""
    return (os.environ if env is None else env).get(ENV_SWITCH) or None


def presets() -> dict[str, Path]:
    """Preset names and their files: the packaged ones, or those of the source tree when run from a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "configs", package / "_presets"):
        if folder.is_dir():
            return {p.stem: p for p in sorted(folder.glob("*.yaml"))}
    return {}


def layers_of(source: str | Path | Mapping[str, Any] | None) -> list[Layer]:
    """A preset, a file or a mapping as layers: what it names as its own preset comes before it.

    Raises:
        ConfigError: there is no such preset or file, or it cannot be read.
    """
    text, known = str(source or "default"), presets()
    if isinstance(source, Mapping):
        data, origin = dict(source), "the given mapping"
    elif text in known:
        return [({**_read_yaml(known[text]), "preset": text}, f"preset {text!r}")]
    elif Path(text).suffix in (".yaml", ".yml") or Path(text).is_file():
        if not Path(text).is_file():
            raise ConfigError(f"rollspec: the configuration file {text!r} does not exist; give a path to a YAML file.")
        data, origin = _read_yaml(Path(text)), text
    else:
        near = difflib.get_close_matches(text, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"rollspec: there is no preset {text!r}; {hint}choose one of {', '.join(known)} or a YAML file."
        )
    base = data.pop("preset", None)
    return [*(layers_of(base) if base is not None else []), (data, origin)]


def environment(env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The knobs that `ROLLSPEC__SECTION__KNOB=value` set, by dotted name; of `os.environ` when None."""
    return {
        k[len(ENV_PREFIX) :].lower().replace("__", "."): _parse(v)
        for k, v in (os.environ if env is None else env).items()
        if k.startswith(ENV_PREFIX)
    }


def overriding(overrides: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Overrides as a mapping: `{"proposal.k_max": 8}` as it is, `["proposal.k_max=8"]` read as YAML.

    Raises:
        ConfigError: one has no `=`.
    """
    if isinstance(overrides, Mapping):
        return dict(overrides)
    out: dict[str, Any] = {}
    for item in overrides:
        key, eq, value = item.partition("=")
        if not eq:
            raise ConfigError(f"rollspec: the override {item!r} has no '='; write key.sub=value.")
        out[key.strip()] = _parse(value)
    return out


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as e:
        raise ConfigError(f"rollspec: {path} cannot be read as YAML ({' '.join(str(e).split())}); fix the file.") from e
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"rollspec: {path} holds {type(data).__name__}, not a mapping of keys to values.")
    return data


def _parse(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def knobs(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Every knob as (dotted name, type, default, description), for documentation and for nearest-name hints."""
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from knobs(kind, f"{prefix}{name}.")
        else:
            text = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
            yield f"{prefix}{name}", text or str(kind), field.default, field.description or ""


def validated(section: type[M], layers: Sequence[Layer]) -> M:
    """The configuration of layers, the weakest first.

    Raises:
        ConfigError: a key is unknown, or a value out of range.
    """
    given: dict[str, Any] = {}
    for mapping, origin in layers:
        given |= flat(section, mapping, origin)
    nested: dict[str, Any] = {}
    for name, value in given.items():
        *parents, leaf = name.split(".")
        node = nested
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    try:
        return section.model_validate(nested)
    except ValidationError as e:
        raise ConfigError(_sentence(e)) from e


def flat(section: type[BaseModel], mapping: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Knobs by dotted name, from `{"a.b": 1}` as from `{"a": {"b": 1}}`.

    Raises:
        ConfigError: a key is of no knob.
    """
    known = [name for name, *_ in knobs(section)]
    out: dict[str, Any] = {}

    def take(mapping: Mapping[str, Any], prefix: str) -> None:
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            if name in known:
                out[name] = value
            elif not any(knob.startswith(f"{name}.") for knob in known):
                raise ConfigError(_unknown(known, name, value, origin))
            elif not isinstance(value, Mapping):
                raise ConfigError(f"rollspec: {name} = {value!r} cannot be used: it is a section of knobs.")
            else:
                take(value, f"{name}.")

    take(mapping, "")
    return out


def _unknown(names: Sequence[str], key: str, value: Any, origin: str) -> str:
    # A user who writes only the leaf ("k_max") should still be led to the full name.
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.6) or [
        n for n in names if n.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]
    ]
    hint = f"did you mean {near[0]!r}?" if near else "run `rollspec config` for the list."
    return f"rollspec: unknown key {key!r} (value {value!r}) in {origin}; {hint}"


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"]) or "the configuration"
    message = first["msg"].removeprefix("Value error, ")
    value = "" if not first["loc"] else f" = {first['input']!r}"
    return f"rollspec: {where}{value} cannot be used: {message}."
