"""Rows of the health card about rollouts as training data: whose distribution they follow, and how fresh they are."""

from __future__ import annotations

from statistics import fmean

from rollspec.telemetry.runs import Run
from rollspec.telemetry.summary import WARNINGS, RunSummary


def on_policy(run: Run, s: RunSummary) -> list[tuple[str, str, str]]:
    """(ok | warn, what, sentence): distribution, importance weights, repeats of the last epoch, and warnings."""
    out: list[tuple[str, str, str]] = []
    kinds = s.health_warnings
    if s.lossy:
        bias, skipped, saved = (run.known(f"rollspec/reuse/{n}") for n in ("bias", "skip_ratio", "avg_saved_tokens"))
        rule = f"bias {fmean(bias or [0.0]):g}"
        took = f" {100 * fmean(skipped):.1f} % of rollouts are an old response whole," if skipped else ""
        took += f" {fmean(saved):.1f} tokens per rollout are taken over." if saved else ""
        text = f"Lossy by reuse.mode = lenient, {rule}: not the policy's, and no ratio can show it.{took}"
        out.append(("warn", "Distribution of the rollouts", text))
    elif s.correlated:
        text = (
            "Exact for each policy, correlated across epochs: noise is kept (reuse.mode = coupled), and each policy "
            "was trained on rollouts of the same noise."
        )
        out.append(("ok", "Distribution of the rollouts", text))
    if s.ess_token_min is not None:
        whole = "" if s.ess_sequence_min is None else f", of whole responses {s.ess_sequence_min:.3f}"
        away = "" if s.ratio_outside is None else f"; {100 * s.ratio_outside:.2f} % of ratios are outside 0.8 to 1.25"
        text = f"Lowest effective sample size of tokens {s.ess_token_min:.4f}{whole}{away}."
        off = kinds.keys() & {"ess", "ess_sequence", "ratios", "gap", "corr"}
        out.append(("warn" if off else "ok", "Importance weights", text))
    if s.epoch_overlap is not None:
        chance = "" if s.epoch_overlap_chance is None else f", {100 * s.epoch_overlap_chance:.1f} % would by chance"
        text = f"{100 * s.epoch_overlap:.1f} % of tokens repeat the prompt's last response of that number{chance}."
        out.append(("warn" if "overlap" in kinds else "ok", "Independent of the last epoch", text))
    if kinds:
        text = ", ".join(f"{kind} in {n} step{'s' if n > 1 else ''}" for kind, n in kinds.items())
        out.append(("warn", "Health warnings", f"{text}; the log of the job has the first of each kind in full."))
    elif run.has(WARNINGS):
        out.append(("ok", "Health warnings", "No threshold was crossed."))
    return out
