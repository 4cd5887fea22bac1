"""Renders knobs and presets as `docs/configuration.md`, so that the page cannot disagree with `rollspec/config/`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rollspec.config import RollspecConfig, knobs, presets

FILE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

_HEAD = """\
# Configuration

Every knob and every preset. Generated from `rollspec/config/` and `configs/` by `python -m scripts.generate`:
edit them there. `rollspec config` prints the same list, `rollspec config show` what a preset or file resolves to.

## Where it is set

| where | how |
|---|---|
| verl | `+actor_rollout_ref.rollout.custom.rollspec=suffix_only`, or a mapping: `'...rollspec={proposal:{k_max:8}}'` |
| any program that builds a vLLM engine | `ROLLSPEC=default` or `ROLLSPEC=my.yaml` in its environment |
| `vllm serve`, `LLM(...)` | `--additional-config '{"rollspec": "default"}'`, `additional_config={"rollspec": ...}` |
| `rollspec audit`, `rollspec demo` | `--preset default --set proposal.k_max=8` |
| one knob over all of these | `ROLLSPEC__PROPOSAL__K_MAX=8`: two underscores for each dot |

A source is a preset's name, a YAML file or a mapping. A file or mapping may name a `preset` and change some of it;
keys may be nested or dotted. Later layers win: preset, file or mapping, environment, `--set`.

This is decided once, where the job starts (the trainer's driver, or the program that builds the engine). Every other
process is given the result as data and reads neither files nor its environment for it. A mapping that has every knob,
as `RollspecConfig.to_dict()` makes it, is such a result and is taken as it is.

```yaml title="my.yaml"
preset: suffix_only
proposal:
  k_max: 8
history.dir: /data/history
```

An unknown key, an unknown preset or a value out of range stops the start with one sentence that names the nearest
valid key.
"""

_ENVIRONMENT = """\
## Environment variables

| variable | read by | meaning |
|---|---|---|
| `ROLLSPEC` | the vLLM plugin, `rollspec doctor` | preset or YAML file for every engine that the program builds |
| `ROLLSPEC__A__B` | the process that starts the job | the knob `a.b`; it wins over presets and files |
| `ROLLSPEC_PATCHES` | the vLLM plugin | `cpu`: fix vLLM's CPU build in every engine, with or without rollspec; \
`none`: never, so speculation stays off where a fix is needed; unset: in engines that rollspec speculates in |
| `ROLLSPEC_VERL_LENGTHS` | the verl integration | file that gets one JSON line per step with all response lengths |
| `ROLLSPEC_TRAINER_CORES` | the trainer that a job starts | \
cores that its process runs on, as `2,5-7`; unset: those of the engine that starts it |
| `DRAFTER_ONLINE_TOKEN` | `drafter-online serve`, engines that it trains for | the token they share, \
unless a file is given |
| `VLLM_PLUGINS` | vLLM | names of the plugins it loads; where it is set, `rollspec` must be among them |
| `ROLLSPEC_VENV`, `ROLLSPEC_PYTHON`, `ROLLSPEC_PIP_ARGS` | `make setup` | see [contributing](../CONTRIBUTING.md) |
"""


def render() -> str:
    """The page as Markdown: knobs by section, presets, environment variables."""
    parts = [_HEAD, "## Knobs\n"]
    for section, rows in _sections().items():
        title, about = _about(section)
        parts.append(f"### {title}\n\n{about}\n\n| knob | value | default | meaning |\n|---|---|---|---|")
        parts.append("\n".join(rows) + "\n")
    parts.append("## Presets\n")
    for name, path in sorted(presets().items(), key=lambda p: (p[0] != "default", p[0])):
        header, body = _split(path.read_text(encoding="utf-8"))
        about = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", header)
        parts.append(f"### `{name}`\n\n{about}\n\n```yaml\n{body}```\n")
    return "\n".join([*parts, _ENVIRONMENT])


def _sections() -> dict[str, list[str]]:
    defaults = RollspecConfig().to_dict()
    out: dict[str, list[str]] = {}
    for name, kind, _, text in knobs(RollspecConfig):
        value: Any = defaults
        for part in name.split("."):
            value = value[part]
        meaning = text.replace("|", "\\|").replace("docs/tuning.md", "[tuning](tuning.md)")
        cells = (f"`{name}`", _value(kind, _field(name)), _default(name, value), meaning)
        out.setdefault(name.rpartition(".")[0], []).append("| " + " | ".join(cells) + " |")
    return out


def _field(name: str) -> FieldInfo:
    section: type[BaseModel] = RollspecConfig
    *parents, leaf = name.split(".")
    for part in parents:
        kind = section.model_fields[part].annotation
        assert isinstance(kind, type) and issubclass(kind, BaseModel), name
        section = kind
    return section.model_fields[leaf]


def _value(kind: str, field: FieldInfo) -> str:
    """What a knob takes: its type with its bounds, or the words to choose from."""
    text = re.sub(r"Literal\[([^\]]*)\]", lambda m: m[1].replace("'", "`"), kind)
    text = re.sub(r"tuple\[(.*), \.\.\.\]", r"list of \1", text)
    text = text.replace(" | None", "").replace("dict", "mapping").replace("pathlib.Path", "path")
    bounds = [
        f"{sign} {bound:g}"
        for rule in field.metadata
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (bound := getattr(rule, attribute, None)) is not None
    ]
    return " ".join([text, " and ".join(bounds)]).strip()


def _default(name: str, value: Any) -> str:
    if value is None:
        return "unset"
    exact = f"`{json.dumps(value)}`"
    return f"{exact} ({value >> 20} MiB)" if name.endswith("_bytes") else exact


def _about(section: str) -> tuple[str, str]:
    """Heading and first paragraph of a section, from its class."""
    kind: Any = RollspecConfig
    for part in section.split(".") if section else ():
        kind = kind.model_fields[part].annotation
    paragraph = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    return (f"`{section}`" if section else "Top level"), paragraph


def _split(text: str) -> tuple[str, str]:
    """A preset's comment header as prose, and the YAML below it."""
    lines = text.splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    header = " ".join(line.lstrip("#").strip() for line in lines[:count])
    sentence = header.split(": ", 1)[-1]
    return sentence[:1].upper() + sentence[1:], "\n".join(lines[count:]).strip() + "\n"
