"""An audit's result for people: rows of a table, Markdown, a self-contained page. The JSON is `AuditResult.to_dict`."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

from rollspec.audit.evidence import AuditError
from rollspec.audit.power import Power
from rollspec.audit.statistics import TestResult
from rollspec.audit.verdict import AuditResult

FAMILY_COLUMNS = ("test", "tests", "strongest", "statistic", "smallest p", "adjusted p", "")
TEST_COLUMNS = ("test", "where", "n", "statistic", "p", "adjusted p")
Row = tuple[str, ...]


def verdict_line(result: AuditResult) -> str:
    """One line: what was found, over how much."""
    return (
        f"{result.finding} ({result.n_tokens:,} tokens, {len(result.tests)} tests, smallest p {result.min_p:.2g}, "
        f"family-wise alpha {result.alpha:g})"
    )


def facts(result: AuditResult) -> list[tuple[str, str]]:
    """What was checked besides the distribution, as (name, finding)."""
    out: dict[str, str] = {}
    if result.subject is not None:
        out["engine"] = result.subject
    if plan := result.provenance.get("plan"):
        out["tested"] = (
            f"{result.n_tokens:,} tokens: {plan['prompts']} prompts, {plan['samples']} siblings each, temperature "
            f"{plan['temperature']:g}, {plan['dtype']}, up to {plan['max_tokens']} tokens, seed {plan['seed']}"
        )
    out |= _identity(result.provenance)
    if (d := result.drafts) is not None:
        share = d.accepted / d.drafted if d.drafted else 0.0
        out["drafts"] = f"{d.drafted:,} drafted, {d.accepted:,} accepted ({share:.0%}), {d.rejected:,} rejected"
    if (g := result.greedy) is not None:
        ties = f", {g.ties} part at a tie" if g.ties else ""
        bad = f", {len(g.mismatches)} differ" if g.mismatches else ""
        drafts = f", {g.drafts.accepted:,} of {g.drafts.drafted:,} drafts accepted" if g.drafts else ""
        counts = f"{g.identical} of {g.sequences} responses identical{ties}{bad}"
        out["greedy identity"] = f"{counts} ({g.tokens:,} tokens{drafts})"
    if (k := result.noise) is not None:
        rest = f", {k.ties} at a tie" if k.ties else ""
        rest += f", {k.wrong} are not" if k.wrong else ""
        out["coupled noise"] = f"{k.exact:,} of {k.tokens:,} tokens are what target and noise make{rest}"
    if (c := result.log_probs) is not None:
        broken = f", {c.not_finite:,} NaN or infinite" if c.not_finite else ""
        out["log-probabilities"] = f"off by {c.mean_error:.1e} on average, {c.max_error:.1e} at most{broken}"
    if result.power is not None and result.power.tests:
        out["power"] = _power(result.power)
    if "mean_entropy" in result.provenance:
        out["entropy"] = f"{result.provenance['mean_entropy']:.2f} nats per token on average"
    return list(out.items())


def _identity(provenance: dict[str, Any]) -> dict[str, str]:
    """What was tested where, so that it differs visibly from another checkpoint, other prompts, another version."""
    out: dict[str, str] = {}
    if c := provenance.get("checkpoint"):
        hashed = f"blake2b {c['blake2b']} of {c['files']} safetensors, {c['bytes']:,} bytes: " if c["blake2b"] else ""
        out["checkpoint"] = f"{provenance['model']}: {hashed}{c['of']}"
    if digest := (provenance.get("plan") or {}).get("prompts_blake2b"):
        out["prompts"] = f"blake2b {digest} of the token ids of {provenance['plan']['prompts']} prompts"
    if m := provenance.get("machine"):
        v = provenance["versions"]
        gpu = f"{m['gpu']}, " if m.get("gpu") else ""
        revision = f" at {provenance['git_sha']}" if provenance.get("git_sha") else ""
        out["run"] = (
            f"{provenance['began']} on {gpu}{m['cpu']} with {m['cores']} cores, reference on "
            f"{provenance['reference_device']}; rollspec {v['rollspec']}{revision}, vLLM {v['vllm']}, torch "
            f"{v['torch']}, transformers {v['transformers']}"
        )
    return out


def _power(power: Power) -> str:
    sizes = [
        f"{'none' if share is None else f'{share:.2%}'} of tokens {how}"
        for share, how in ((power.uniform, "uniform instead"), (power.argmax, "most likely instead"))
    ]
    if power.odds is not None:
        sizes.append(f"odds of token {power.token} changed by {power.odds:.1%}")
    return f"found nine times in ten at p <= {power.alpha:g}: {', '.join(sizes)}"


def families(result: AuditResult) -> list[Row]:
    """One row per kind of test, with its strongest member; columns as `FAMILY_COLUMNS`."""
    members: dict[str, list[TestResult]] = {}
    for t in result.tests:  # sorted by p
        members.setdefault(t.name, []).append(t)
    return [
        (
            name,
            str(len(group)),
            group[0].where,
            _statistic(group[0]),
            f"{group[0].p_value:.2g}",
            f"{group[0].p_adjusted:.2g}",
            "rejects" if group[0].p_adjusted <= result.alpha else "ok",
        )
        for name, group in members.items()
    ]


def _statistic(t: TestResult) -> str:
    return f"z = {t.statistic:.2f}" if t.df is None else f"G = {t.statistic:.1f}, df {t.df:.4g}"


def write(result: AuditResult, path: Path) -> None:
    """Write the result in the format of the file's ending (`FORMATS`).

    Raises:
        AuditError: another ending, or a file that cannot be written.
    """
    check_path(path)
    text = FORMATS[path.suffix](result)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as e:
        raise AuditError(f"rollspec: --out {str(path)!r} cannot be written ({e.strerror or e}).") from e


def check_path(path: Path) -> None:
    """Refuse an ending that `write` would refuse, before minutes were spent."""
    if path.suffix not in FORMATS:
        raise AuditError(
            f"rollspec: --out {str(path)!r} ends in none of {', '.join(FORMATS)}; name one of these formats."
        )


def json_text(result: AuditResult) -> str:
    """Every number."""
    return json.dumps(result.to_dict(), indent=2) + "\n"


def markdown(result: AuditResult) -> str:
    """Verdict, reasons, findings, one row per family and one per test."""

    def table(columns: Row, rows: list[Row]) -> list[str]:
        return ["", *(f"| {' | '.join(row)} |" for row in (columns, ("---",) * len(columns), *rows))]

    lines = ["# rollspec audit", "", f"**{verdict_line(result)}**", "", *(f"- {r}" for r in result.reasons), ""]
    lines += [f"- {name}: {found}" for name, found in facts(result)]
    if again := result.provenance.get("command"):
        lines += ["", f"Reproduce: `{again}`"]
    lines += table(FAMILY_COLUMNS, families(result))
    lines += ["", "## Every test", *table(TEST_COLUMNS, _test_rows(result))]
    lines += ["", "## Provenance", "", "```json", json.dumps(result.provenance, indent=2), "```", ""]
    return "\n".join(lines)


def _test_rows(result: AuditResult) -> list[Row]:
    return [
        (t.name, t.where, f"{t.n:,}", _statistic(t), f"{t.p_value:.3g}", f"{t.p_adjusted:.3g}") for t in result.tests
    ]


def page(result: AuditResult) -> str:
    """The same as one HTML file without outside references."""

    def line(cells: Row, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    def table(columns: Row, rows: list[Row]) -> str:
        return f"<table>{line(columns, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"

    colour = {"pass": "#1a7f37", "fail": "#b42318", "inconclusive": "#9a6700"}[result.verdict]
    items = "".join(f"<li>{html.escape(r)}</li>" for r in result.reasons)
    found = "".join(f"<tr><th>{html.escape(n)}</th><td>{html.escape(f)}</td></tr>" for n, f in facts(result))
    command = result.provenance.get("command")
    again = f"<p>Reproduce: <code>{html.escape(command)}</code></p>" if command else ""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<title>rollspec audit</title><style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
        "padding:0 1rem;color:#1f2328;background:#fff}table{border-collapse:collapse;margin:1rem 0}"
        "th,td{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #d0d7de}"
        f".v{{color:{colour};font-weight:600;font-size:1.15rem}}pre{{overflow:auto;background:#f6f8fa;padding:1rem}}"
        f"</style><h1>rollspec audit</h1><p class=v>{html.escape(verdict_line(result))}</p><ul>{items}</ul>"
        f"<table>{found}</table>{again}{table(FAMILY_COLUMNS, families(result))}"
        f"<details><summary>Every test</summary>{table(TEST_COLUMNS, _test_rows(result))}</details>"
        f"<details><summary>Provenance</summary><pre>{html.escape(json.dumps(result.provenance, indent=2))}</pre>"
        "</details></html>\n"
    )


FORMATS = {".json": json_text, ".md": markdown, ".html": page}
"""What `--out` writes, by the file's ending."""
