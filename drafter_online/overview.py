"""What the daemon shows: its status as JSON, its versions, and both as Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drafter_online.errors import DrafterError

if TYPE_CHECKING:
    from drafter_online.service import Service


def status(service: Service, points: int = 360) -> dict[str, Any]:
    """Everything, as JSON. `points`: at most so many of the journal, evenly over it, the latest among them."""
    c, b, i = service.trainer.counts, service.trainer.buffer, service.inbox.counts
    total = service.engines.total()
    facts = service.facts()
    return {
        "started": service.started,
        "target": service.config.target,
        "base": service.trainer.drafter.base,
        "endpoint": service.hub.endpoint,
        "training": {
            "state": service.training if service.trains else "ended",
            "device": service.config.device,
            "steps": c.steps,
            "tokens": c.tokens,
            "loss": facts["loss"],
            "not_finite": c.not_finite,
            "failed": service.counts["failed_steps"],
            "out_of_memory": c.out_of_memory,
            "terms": service.terms,
            "step_age_seconds": round(service.watch.age, 1),
            "hangs": service.watch.hangs,
        },
        "versions": {
            "running": {e.name: e.version for e in service.engines},
            "promoted": service.release.current,
            "on_trial": service.release.candidate,
            "tried_by": service.release.trials,
            "latest": service.versions.latest(),
            "published": service.counts["published"],
            "failed": service.counts["failed_publications"],
            "rolled_back": service.release.rolled_back,
            "lag_seconds": facts["lag"],
        },
        "feedback": {
            "samples": i.received,
            "dropped": i.dropped,
            "waiting": i.received - i.taken - i.dropped,
            "waiting_bytes": service.inbox.bytes,
            "buffer_samples": len(b),
            "buffer_bytes": b.bytes,
            "rewards": service.counts["rewards"],
            "expired": service.counts["expired"],
        },
        "wire": dict(service.hub.counts),
        "engines": [
            {
                "name": e.name,
                "version": e.version,
                "busy": bool(e.status and e.status.busy),
                "policy": e.status.policy if e.status else 0,
                "speculating": bool(e.status and e.status.speculating),
                "off": e.status.off if e.status else [],
                "samples": e.samples,
                "heard_seconds": round(time.monotonic() - e.heard, 1),
                "counts": e.status.counts if e.status else {},
                "faults": e.status.faults if e.status else [],
            }
            for e in service.engines
        ],
        "domains": {
            name: {
                "requests": d.requests,
                "emitted": d.emitted,
                "drafted": d.drafted,
                "accepted": d.accepted,
                "rate": d.rate,
                "length": d.length,
            }
            for name, d in sorted(service.engines.domains.items())
        },
        "acceptance": {"rate": total.rate, "length": total.length},
        "alarms": service.alarms.to_list(),
        "journal": thinned(list(service.journal.points), points),
    }


def list_versions(service: Service) -> list[dict[str, Any]]:
    """Versions in the store, oldest first, with what became of them."""
    verdicts = {e.version: e for e in service.versions.events()}
    rows: list[dict[str, Any]] = []
    for number in service.versions.numbers():
        row: dict[str, Any] = {"version": number, "promoted": number == service.release.current}
        try:
            m = service.versions.manifest(number)
            row |= {
                "created": m.created,
                "parent": m.parent,
                "target_version": m.target_version,
                "loss": m.provenance.get("loss"),
                "copy_of": m.provenance.get("copy_of"),
                "bytes": sum(f["bytes"] for f in m.files.values()),
            }
        except DrafterError as e:
            row["error"] = str(e)
        event = verdicts.get(number)
        if event is not None:
            row |= {"verdict": event.verdict, "reason": event.reason, "decided": event.time}
        rows.append(row)
    return rows


def thinned(points: list[Any], most: int) -> list[Any]:
    """At most `most` of the points, evenly, the last one among them."""
    if most < 1:
        return []
    each = -(-len(points) // most)
    return points[::-1][::each][::-1] if each > 1 else points


class Collector:
    """The status as Prometheus metrics, read when they are scraped."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def collect(self) -> Iterator[Any]:
        """See prometheus_client's `Collector`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        s = status(self.service, points=0)

        def one(kind: Any, name: str, text: str, value: float | None) -> Iterator[Any]:
            if value is not None:
                yield kind(f"drafter_online_{name}", text, value=float(value))

        def many(kind: Any, name: str, text: str, label: str, values: dict[str, Any]) -> Iterator[Any]:
            family = kind(f"drafter_online_{name}", text, labels=[label])
            for key, value in values.items():
                if value is not None:
                    family.add_metric([key], float(value))
            yield family

        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        v, t, f, d = s["versions"], s["training"], s["feedback"], s["domains"]
        yield from one(counter, "steps", "optimiser steps", t["steps"])
        yield from one(counter, "trained_tokens", "tokens trained on", t["tokens"])
        yield from one(counter, "failed_steps", "training steps that failed", t["failed"])
        yield from one(gauge, "loss", "latest training loss (nats)", t["loss"])
        yield from many(gauge, "loss_term", "its terms, without their weights", "term", t["terms"])
        yield from one(gauge, "step_age_seconds", "age of the training step that runs now", t["step_age_seconds"])
        yield from one(gauge, "version_promoted", "version that engines should run", v["promoted"] or 0)
        yield from one(gauge, "version_latest", "newest version", v["latest"] or 0)
        yield from one(counter, "published", "versions published", v["published"])
        yield from one(counter, "failed_publications", "versions that could not be written", v["failed"])
        yield from one(counter, "rolled_back", "versions taken back", v["rolled_back"])
        yield from one(gauge, "lag_seconds", "age of the oldest weights that an engine runs", v["lag_seconds"])
        yield from one(counter, "samples", "samples received", f["samples"])
        yield from one(counter, "samples_dropped", "samples that came faster than training took them", f["dropped"])
        yield from one(gauge, "samples_waiting", "samples waiting", f["waiting"])
        yield from one(gauge, "buffer_bytes", "bytes of samples trained on", f["buffer_bytes"])
        yield from one(gauge, "engines", "engines connected", len(s["engines"]))
        yield from one(gauge, "accept_rate", "accepted / drafted tokens since the start", s["acceptance"]["rate"])
        yield from one(gauge, "accept_length", "tokens per request and step since the start", s["acceptance"]["length"])
        yield from many(gauge, "engine_version", "version that an engine runs", "engine", v["running"])
        for name, text in (
            ("requests", "requests"), ("emitted", "tokens emitted"), ("drafted", "tokens drafted"),
            ("accepted", "drafted tokens accepted"),
        ):  # fmt: skip
            yield from many(counter, f"domain_{name}", text, "domain", {k: x[name] for k, x in d.items()})
        refused = {k.removeprefix("refused/"): n for k, n in s["wire"].items() if k.startswith("refused/")}
        yield from many(counter, "messages_refused", "messages refused, by kind", "kind", refused)
        yield from many(gauge, "alarm", "1 while an alarm is on", "kind", {a["kind"]: 1 for a in s["alarms"]})
