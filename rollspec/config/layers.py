"""Layers of settings become one checked configuration: nested, merged in order, refused in one sentence.

    validated(RollspecConfig, [({"proposal.k_max": 8}, "the overrides")])

A layer is a mapping and where it is from. An unknown key is an error: a typo must not leave the default in place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollspec.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
Layer = tuple[dict[str, Any], str]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def knobs(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Every knob as (dotted name, type, default, description), for documentation and for nearest-name hints."""
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if _is_section(kind):
            yield from knobs(kind, f"{prefix}{name}.")
        else:
            text = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
            yield f"{prefix}{name}", text or str(kind), field.default, field.description or ""


def missing_knobs(section: type[BaseModel], data: Mapping[str, Any]) -> Iterator[str]:
    """Knobs of `section` that `data` does not set, by dotted name."""
    for name, *_ in knobs(section):
        value: Any = data
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                yield name
                break
            value = value[part]


def validated(section: type[M], layers: Sequence[Layer]) -> M:
    """The configuration of layers, the weakest first.

    Raises:
        ConfigError: a key is unknown, or a value out of range.
    """
    flat: dict[str, Any] = {}
    for mapping, origin in layers:
        flat |= _flat(section, mapping, origin)
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = nested
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = value
    try:
        return section.model_validate(nested)
    except ValidationError as e:
        raise ConfigError(_sentence(e)) from e


def _flat(root: type[BaseModel], mapping: Mapping[str, Any], origin: str, prefix: str = "") -> dict[str, Any]:
    """Knobs by dotted name, from `{"a.b": 1}` as from `{"a": {"b": 1}}`; keys that no knob has are refused."""
    out: dict[str, Any] = {}
    for key, value in mapping.items():
        parts = f"{prefix}{key}".split(".")
        section: Any = root
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if parts[depth - 1] not in section.model_fields:
                raise ConfigError(_unknown(root, name, value, origin))
            section = section.model_fields[parts[depth - 1]].annotation
            if not _is_section(section):  # a knob; what follows is a key of its mapping
                if rest := ".".join(parts[depth:]):
                    known = out.get(name)
                    value = {**(known if isinstance(known, dict) else {}), rest: value}
                out[name] = value
                break
        else:
            if not isinstance(value, Mapping):
                raise ConfigError(f"rollspec: {name} = {value!r} cannot be used: it is a section of knobs.")
            out |= _flat(root, value, origin, f"{name}.")
    return out


def _unknown(root: type[BaseModel], key: str, value: Any, origin: str) -> str:
    names = [name for name, *_ in knobs(root)]
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
