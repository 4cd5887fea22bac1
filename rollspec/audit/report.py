"""An audit's result for people: rows of tables, Markdown, a self-contained page. The JSON is `AuditResult.to_dict`."""

from __future__ import annotations

import html
import json
from pathlib import Path

from drafter_online.files import replace
from rollspec.audit.distribution import Power
from rollspec.audit.evidence import AuditError
from rollspec.audit.statistics import TestResult
from rollspec.audit.verdict import AuditResult

Row = tuple[str, ...]
FAMILY_COLUMNS = ("test", "tests", "strongest", "smallest p", "adjusted p", "")
TEST_COLUMNS = ("test", "where", "n", "statistic", "p", "adjusted p")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse}th,td{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #d0d7de}
pre{overflow:auto}.pass{color:#1a7f37}.fail{color:#b42318}.inconclusive{color:#9a6700}"""


def verdict_line(result: AuditResult) -> str:
    """One line: what was found, over how much."""
    return (
        f"{result.finding} ({result.n_tokens:,} tokens, {len(result.tests)} tests, smallest p {result.min_p:.2g}, "
        f"family-wise alpha {result.alpha:g})"
    )


def facts(result: AuditResult) -> list[Row]:
    """What was checked besides the distribution, and on what, as (name, finding)."""
    made = result.provenance
    out: dict[str, str] = {}
    if subject := made.get("subject"):
        own = subject.get("rollspec")
        out["engine"] = subject["name"] + (f", draft lengths by {own['tuning']['strategy']}" if own else "")
    if plan := made.get("plan"):
        out["tested"] = (
            f"{result.n_tokens:,} tokens: {plan['prompts']} prompts, {plan['samples']} siblings each, temperature "
            f"{plan['temperature']:g}, {plan['dtype']}, up to {plan['max_tokens']} tokens, seed {plan['seed']}"
        )
        out["prompts"] = f"blake2b {plan['prompts_blake2b']} of the token ids of {plan['prompts']} prompts"
    if c := made.get("checkpoint"):
        hashed = f"blake2b {c['blake2b']} of {c['files']} safetensors, {c['bytes']:,} bytes: " if c["blake2b"] else ""
        out["checkpoint"] = f"{made['model']}: {hashed}{c['of']}"
    if m := made.get("machine"):
        gpu = f"{m['gpu']}, " if m.get("gpu") else ""
        versions = ", ".join(f"{name} {version}" for name, version in made["versions"].items())
        revision = f", revision {made['git_sha']}" if made.get("git_sha") else ""
        out["run"] = (
            f"{made['began']} on {gpu}{m['cpu']} with {m['cores']} cores, reference on {made['reference_device']}; "
            f"{versions}{revision}"
        )
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
    if (p := result.log_probs) is not None:
        out["log-probabilities"] = p.distance
    if (x := result.cross_check) is not None:
        agree = "do not agree" if x.failure else "agree"
        out["reference"] = f"it and the engine without drafts {agree} on {x.n:,} of these tokens: {x.distance}"
    if result.power is not None:
        out["power"] = _power(result.power, result.alpha)
    if "mean_entropy" in made:
        out["entropy"] = f"{made['mean_entropy']:.2f} nats per token on average"
    if command := made.get("command"):
        out["reproduce"] = command
    return list(out.items())


def _power(power: Power, alpha: float) -> str:
    sizes = [
        f"{'none' if share is None else f'{share:.2%}'} of tokens {how}"
        for share, how in ((power.uniform, "uniform instead"), (power.argmax, "most likely instead"))
    ]
    if power.odds is not None:
        sizes.append(f"odds of token {power.token} changed by {power.odds:.1%}")
    return f"found nine times in ten at p <= {alpha:g}: {', '.join(sizes)}"


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
            f"{group[0].p_value:.2g}",
            f"{group[0].p_adjusted:.2g}",
            "rejects" if group[0].p_adjusted <= result.alpha else "ok",
        )
        for name, group in members.items()
    ]


def _statistic(t: TestResult) -> str:
    return f"z = {t.statistic:.2f}" if t.df is None else f"G = {t.statistic:.1f}, df {t.df:.4g}"


def write(result: AuditResult, path: Path) -> None:
    """Write the result in the format of the file's ending, one of `FORMATS` (`check_path`).

    Raises:
        AuditError: the file cannot be written.
    """
    text = FORMATS[path.suffix](result)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, text.encode())
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


def _tables(result: AuditResult) -> list[tuple[str, Row, list[Row]]]:
    """(title, columns, rows) of all that a file shows."""
    every: list[Row] = [
        (t.name, t.where, f"{t.n:,}", _statistic(t), f"{t.p_value:.3g}", f"{t.p_adjusted:.3g}") for t in result.tests
    ]
    return [
        ("Findings", ("what", "found"), facts(result)),
        ("Kinds of test", FAMILY_COLUMNS, families(result)),
        ("Every test", TEST_COLUMNS, every),
    ]


def markdown(result: AuditResult) -> str:
    """Verdict, reasons, findings, one row per family and one per test."""
    lines = ["# rollspec audit", "", f"**{verdict_line(result)}**", "", *(f"- {r}" for r in result.reasons)]
    for title, columns, rows in _tables(result):
        lines += ["", f"## {title}", "", *map(_line, (columns, ("---",) * len(columns), *rows))]
    lines += ["", "## Provenance", "", "```json", json.dumps(result.provenance, indent=2), "```", ""]
    return "\n".join(lines)


def _line(cells: Row) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page(result: AuditResult) -> str:
    """The same as one HTML file without outside references."""

    def row(cells: Row, tag: str = "td") -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

    tables = "".join(
        f"<h2>{title}</h2><table>{row(columns, 'th')}{''.join(map(row, rows))}</table>"
        for title, columns, rows in _tables(result)
    )
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>rollspec audit</title><style>{STYLE}</style>"
        f"<h1>rollspec audit</h1><p class={result.verdict}><b>{html.escape(verdict_line(result))}</b></p>"
        f"<ul>{''.join(f'<li>{html.escape(r)}</li>' for r in result.reasons)}</ul>{tables}"
        f"<h2>Provenance</h2><pre>{html.escape(json.dumps(result.provenance, indent=2))}</pre></html>\n"
    )


FORMATS = {".json": json_text, ".md": markdown, ".html": page}
"""What `--out` writes, by the file's ending."""
