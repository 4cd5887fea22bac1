"""`rollspec audit --model PATH`: does speculation change what this model's engine samples?

    rollspec audit --model PATH
    rollspec audit --model PATH --preset suffix_only --set proposal.k_max=8 --tokens 100000
    rollspec audit --model PATH --speculative-config '{"method": "ngram_gpu", "num_speculative_tokens": 3}'

Exit status: 0 pass, 1 fail, 2 bad input or inconclusive (nothing was drafted, accepted or rejected).
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from rollspec.audit.engine import ARM_SECONDS, TOKENS, AuditPlan, Progress, Variant
from rollspec.audit.evidence import AuditError
from rollspec.audit.report import FAMILY_COLUMNS, check_path, facts, families, json_text, verdict_line, write
from rollspec.audit.run import Stage, run_audit
from rollspec.audit.verdict import ALPHA, AuditResult
from rollspec.config.layers import overriding

EXIT = {"pass": 0, "fail": 1, "inconclusive": 2}
STYLE = {"pass": "bold green", "fail": "bold red", "inconclusive": "bold yellow"}


def command(
    model: Annotated[str, typer.Option(help="Folder or name of the checkpoint to audit.")],
    preset: Annotated[str, typer.Option(help="Preset or YAML file of rollspec's configuration.")] = "default",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a knob; may be repeated.")
    ] = None,
    switch_arms: Annotated[
        bool, typer.Option("--switch-arms", help="Change the draft length at random at every step.")
    ] = False,
    speculative_config: Annotated[
        str | None,
        typer.Option(metavar="JSON|none", help="Audit vLLM's own speculation instead, or `none`: the plain engine."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL or Parquet with `prompt` (text or messages) or `token_ids`; default: built-in ones."),
    ] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Use at most so many prompts.")] = 8,
    tokens: Annotated[int, typer.Option(min=1, help="Sampled tokens to test, exactly.")] = TOKENS,
    samples: Annotated[int, typer.Option(min=1, help="Responses per prompt and round, at most.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest response.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature, above 0.")] = 1.0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(
            help="Of the engines. Only float32 separates the distribution from rounding; the reference is float32."
        ),
    ] = "float32",
    alpha: Annotated[float, typer.Option(help="Chance of a false alarm in the whole audit.")] = ALPHA,
    seed: Annotated[int, typer.Option(help="Of the engines and of the tests' own randomness.")] = 0,
    device: Annotated[str, typer.Option(help="Of the reference model: auto, cpu or cuda.")] = "auto",
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Further argument of vllm.LLM for both engines; may be repeated."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds an engine may take.")] = ARM_SECONDS,
    out: Annotated[Path | None, typer.Option(help="Write every test to this .json, .md or .html file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")] = False,
) -> None:
    """Test on your own model that speculation does not change the distribution: greedy identity, and at a temperature
    z-tests and G-tests of the sampled tokens against the target's own probabilities. Exit status: 0 pass, 1 fail, 2 bad
    input or inconclusive.
    """
    from rollspec.audit.prompts import token_prompts

    if out is not None:
        check_path(out)
    if not temperature > 0:
        raise AuditError(f"rollspec: --temperature {temperature:g} cannot be used; give one above 0 (1 is usual).")
    if not 0 < alpha < 1:
        raise AuditError(f"rollspec: --alpha {alpha:g} cannot be used; give a probability such as {ALPHA:g}.")
    arguments = overriding(engine or ())
    switches = ("tuning.strategy=random", "tuning.options.table=null", "tuning.guard.enabled=false")
    chosen = [*(overrides or ()), *(switches if switch_arms else ())]
    arm = _arm(preset, chosen, speculative_config, arguments)
    found = token_prompts(model, prompts, max_prompts, max_tokens, bool(arguments.get("trust_remote_code")))
    plan = AuditPlan(
        found, tokens=tokens, samples=samples, max_tokens=max_tokens, temperature=temperature, seed=seed, dtype=dtype
    )
    console = Console(stderr=as_json)
    with _display(console) as stage:
        result = run_audit(model, plan, arm, alpha=alpha, timeout=timeout, device=device, stage=stage)
    words = ["rollspec", *sys.argv[1:]]
    result = replace(result, provenance={**result.provenance, "command": shlex.join(words)})
    if out is not None:
        write(result, out)
    if as_json:
        sys.stdout.write(json_text(result))
    else:
        show(result, console)
        if out is not None:
            console.print(f"every test: {out}", highlight=False, soft_wrap=True)
    raise typer.Exit(EXIT[result.verdict])


def show(result: AuditResult, console: Console) -> None:
    """Print the findings, one row per kind of test, and the verdict."""
    findings = Table.grid(padding=(0, 2))
    for name, finding in facts(result):
        findings.add_row(f"[bold]{escape(name)}[/bold]", escape(finding))
    console.print(findings)
    table = Table(header_style="bold", pad_edge=False)
    for i, column in enumerate(FAMILY_COLUMNS):
        table.add_column(column, justify="left" if i in (0, 2, 5) else "right")
    for row in families(result):
        table.add_row(*map(escape, row), style="red" if row[-1] == "rejects" else None)
    console.print(table)
    console.print(f"[{STYLE[result.verdict]}]{escape(verdict_line(result))}[/]", highlight=False, soft_wrap=True)
    for reason in result.reasons:
        console.print(f"- {escape(reason)}", highlight=False, soft_wrap=True)


@contextmanager
def _display(console: Console) -> Iterator[Stage]:
    """A bar for each stage; where output is not a terminal (a file, a pipe), a plain line when one begins."""
    began = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bars(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bars:

        def stage(name: str) -> Progress:
            for before in bars.tasks:
                bars.update(before.id, total=1.0, completed=1.0)
            if not console.is_terminal:
                console.print(f"{time.monotonic() - began:6.0f} s  {escape(name)}", highlight=False, soft_wrap=True)
                console.file.flush()
            now = bars.add_task(escape(name), total=None)
            return lambda done, total: bars.update(now, completed=done, total=total)

        yield stage


def _arm(preset: str, overrides: Sequence[str], speculative_config: str | None, engine: dict[str, Any]) -> Variant:
    if speculative_config is None:
        return Variant.with_rollspec(preset, overrides, engine)
    if overrides or preset != "default":
        raise AuditError(
            "rollspec: --speculative-config replaces rollspec's speculation; leave out --preset, --set and "
            "--switch-arms."
        )
    if speculative_config == "none":
        return Variant.plain(engine)
    try:
        config = json.loads(speculative_config)
    except json.JSONDecodeError:
        config = None
    if not isinstance(config, dict):
        raise AuditError(f"rollspec: --speculative-config is {speculative_config}; write a JSON object or none.")
    return Variant(f"vLLM's {config.get('method', 'own')} speculation", speculative_config=config, engine=engine)
