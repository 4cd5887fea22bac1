"""Where layers of settings come from: presets, YAML files, mappings, the environment and dotted overrides."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rollspec.config.layers import Layer
from rollspec.errors import ConfigError

ENV_SWITCH = "ROLLSPEC"
ENV_PREFIX = "ROLLSPEC__"


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
