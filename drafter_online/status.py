"""What the daemon shows: its status as JSON, its versions, and its status as Prometheus metrics (`METRICS`)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from drafter_online.errors import DrafterError

if TYPE_CHECKING:
    from drafter_online.service import Service
    from drafter_online.versions import Versions


def status(service: Service) -> dict[str, Any]:
    """Everything, as JSON."""
    c, b, inbox = service.trainer.counts, service.trainer.buffer, service.inbox
    total = service.engines.total()
    loss = service.trainer.last_loss
    return {
        "started": service.started,
        "target": service.config.target,
        "base": service.trainer.drafter.base,
        "endpoint": service.hub.endpoint,
        "training": {
            "state": service.training if service.trains else "ended",
            "device": str(service.trainer.device),
            "steps": c.steps,
            "tokens": c.tokens,
            "loss": round(loss, 5) if math.isfinite(loss) else None,
            "not_finite": c.not_finite,
            "failed": service.counts["failed_steps"],
            "out_of_memory": c.out_of_memory,
            **({"rounds": w.rounds, "rounds_skipped": w.skipped} if (w := service.when) is not None else {}),
            "terms": service.terms,
            "step_age_seconds": round(service.watch.age, 1),
            "hangs": service.watch.hangs,
        },
        "versions": {
            "running": {e.name: e.status.version for e in service.engines},
            "promoted": service.release.current,
            "canary": service.release.candidate,
            "canary_engines": list(service.release.canaries),
            "latest": service.versions.latest(),
            "published": service.counts["published"],
            "failed": service.counts["failed_publications"],
            "rolled_back": service.release.rolled_back,
            "lag_seconds": _lag(service),
        },
        "feedback": {
            "samples": inbox.received,
            "dropped": inbox.dropped,
            "waiting": len(inbox),
            "waiting_bytes": inbox.bytes,
            "buffer_samples": len(b),
            "buffer_bytes": b.bytes,
            "rewards": service.counts["rewards"],
            "expired": service.counts["expired"],
        },
        "wire": dict(service.hub.counts),
        "engines": [
            {
                "name": e.name,
                "samples": e.samples,
                "silent_seconds": round(time.monotonic() - e.last_message, 1),
                **msgspec.to_builtins(e.status),
            }
            for e in service.engines
        ],
        "domains": {
            name: {n: getattr(d, n) for n in ("requests", "emitted", "drafted", "accepted", "rate", "length")}
            for name, d in sorted(service.engines.domains.items())
        },
        "acceptance": {"rate": total.rate, "length": total.length},
        "alarms": [asdict(a) for a in service.alarms],
    }


def _lag(service: Service) -> float | None:
    """Seconds since the oldest weights that an engine runs were made; None where no engine runs any of ours."""
    ages = []
    for version in {e.status.version for e in service.engines}:
        with contextlib.suppress(OSError):
            made = (service.versions.path(version) / "manifest.json").stat().st_mtime
            ages.append(round(time.time() - made, 1))
    return max(ages, default=None)


def list_versions(versions: Versions, promoted: int | None) -> list[dict[str, Any]]:
    """Versions in a store, oldest first, with what became of them."""
    events = {e.version: e for e in versions.events()}
    rows: list[dict[str, Any]] = []
    for number in versions.numbers():
        row: dict[str, Any] = {"version": number, "promoted": number == promoted, "verdict": None}
        try:
            m = versions.manifest(number)
            row |= {n: getattr(m, n) for n in ("kind", "base", "created", "parent", "target_version")}
            row |= {n: m.provenance.get(n) for n in ("loss", "copy_of")}
            row["bytes"] = sum(f["bytes"] for f in m.files.values())
        except DrafterError as e:
            row["error"] = str(e)
        if (event := events.get(number)) is not None:
            row |= {"verdict": event.verdict, "reason": event.reason, "decided": event.time}
        rows.append(row)
    return rows


@dataclass(frozen=True)
class Exported:
    """A metric of `/metrics`: `value` is of the status, a mapping by `label` where there is one; None: left out."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    value: Callable[[dict[str, Any]], Any]
    label: str | None = None


def _of_domains(field: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda s: {name: domain[field] for name, domain in s["domains"].items()}


def _refused(s: dict[str, Any]) -> dict[str, int]:
    return {k.removeprefix("refused/"): n for k, n in s["wire"].items() if k.startswith("refused/")}


METRICS = (
    Exported("counter", "steps", "optimiser steps", lambda s: s["training"]["steps"]),
    Exported("counter", "trained_tokens", "tokens trained on", lambda s: s["training"]["tokens"]),
    Exported("counter", "failed_steps", "training steps that failed", lambda s: s["training"]["failed"]),
    Exported("gauge", "loss", "latest training loss (nats)", lambda s: s["training"]["loss"]),
    Exported("gauge", "loss_term", "its terms, without their weights", lambda s: s["training"]["terms"], "term"),
    Exported("gauge", "step_age_seconds", "age of the training step that runs now",
             lambda s: s["training"]["step_age_seconds"]),
    Exported("gauge", "version_promoted", "version that engines should run", lambda s: s["versions"]["promoted"] or 0),
    Exported("gauge", "version_latest", "newest version", lambda s: s["versions"]["latest"] or 0),
    Exported("counter", "published", "versions published", lambda s: s["versions"]["published"]),
    Exported("counter", "failed_publications", "versions that could not be written", lambda s: s["versions"]["failed"]),
    Exported("counter", "rolled_back", "versions rolled back", lambda s: s["versions"]["rolled_back"]),
    Exported("gauge", "lag_seconds", "age of the oldest weights that an engine runs",
             lambda s: s["versions"]["lag_seconds"]),
    Exported("counter", "samples", "samples received", lambda s: s["feedback"]["samples"]),
    Exported("counter", "samples_dropped", "samples that came faster than training took them",
             lambda s: s["feedback"]["dropped"]),
    Exported("gauge", "samples_waiting", "samples waiting", lambda s: s["feedback"]["waiting"]),
    Exported("gauge", "buffer_bytes", "bytes of samples trained on", lambda s: s["feedback"]["buffer_bytes"]),
    Exported("gauge", "engines", "engines connected", lambda s: len(s["engines"])),
    Exported("gauge", "accept_rate", "accepted / drafted tokens since the start", lambda s: s["acceptance"]["rate"]),
    Exported("gauge", "accept_length", "tokens per request and step since the start",
             lambda s: s["acceptance"]["length"]),
    Exported("gauge", "engine_version", "version that an engine runs", lambda s: s["versions"]["running"], "engine"),
    Exported("counter", "domain_requests", "requests", _of_domains("requests"), "domain"),
    Exported("counter", "domain_emitted", "tokens emitted", _of_domains("emitted"), "domain"),
    Exported("counter", "domain_drafted", "tokens drafted", _of_domains("drafted"), "domain"),
    Exported("counter", "domain_accepted", "drafted tokens accepted", _of_domains("accepted"), "domain"),
    Exported("counter", "messages_refused", "messages refused, by kind", _refused, "kind"),
    Exported("gauge", "alarm", "1 while an alarm is on", lambda s: {a["kind"]: 1 for a in s["alarms"]}, "kind"),
)  # fmt: skip


class Collector:
    """The status as Prometheus metrics, read when they are scraped."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Any]:
        """See prometheus_client's `Collector`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        s = status(self.service)
        for m in METRICS:
            kind: Any = CounterMetricFamily if m.kind == "counter" else GaugeMetricFamily
            family = kind(f"drafter_online_{m.name}", m.text, labels=[m.label] if m.label else [])
            found = m.value(s)
            for key, value in found.items() if m.label else [("", found)]:
                if value is not None:
                    family.add_metric([key] if m.label else [], float(value))
            yield family
