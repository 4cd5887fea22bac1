"""What a trainer asks of an engine: the operations of `collective_rpc("rollspec", (op, payload))`, in every worker.

Every operation answers with a JSON-able dict; a failing one answers `{"error": sentence}` and never raises, because an
exception in a worker call ends the engine. Ranks that do not draft answer `{}`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rollspec.engine.bridge import TRAINER, Bridge
from rollspec.errors import HistoryError, RollspecError
from rollspec.tuning import store

logger = logging.getLogger("rollspec")


def call(bridge: Bridge | None, op: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Run one operation on a worker's bridge, None where rollspec is off; `OPERATIONS` has names and payloads."""
    if bridge is None:
        return {"state": "off", "reason": "rollspec is not on in this engine"} if op == "info" else {}
    if bridge.runner is not None and not bridge.drafting and bridge.fault is None:
        if op in ("set_version", "swap"):
            _follow(bridge, op, payload)
        return {}  # a rank whose drafts vLLM does not read
    bridge.join()
    operation = OPERATIONS.get(op)
    if operation is None:
        return {"error": f"rollspec: there is no operation {op!r}; use one of {', '.join(sorted(OPERATIONS))}."}
    try:
        return operation(bridge, payload)
    except RollspecError as e:
        return {"error": str(e)}
    except Exception as e:
        logger.exception("rollspec: the operation %r failed", op)
        return {"error": f"rollspec: the operation {op!r} failed ({type(e).__name__}: {e})."}


def load_history(bridge: Bridge) -> None:
    """Take up what an earlier run saved, where a folder is named."""
    if bridge.config.history.dir is not None and bridge.drafting:
        _load(bridge, {"dir": str(bridge.config.history.dir)})


def next_version(bridge: Bridge) -> None:
    """The target has other weights, and no program set their version: it is the next one."""
    _new_version(bridge, bridge.engine.version + 1)


def _follow(bridge: Bridge, op: str, payload: dict[str, Any]) -> None:
    """What a rank does together with the one that drafts; that one answers for all. Never raises."""
    try:
        OPERATIONS[op](bridge, payload)
    except RollspecError as e:
        logger.debug("%s", e)
    except Exception as e:
        bridge.count(f"{op}: {type(e).__name__}: {e}")
        logger.exception("rollspec: the operation %r failed on a rank that does not draft", op)


def _new_weights(bridge: Bridge) -> None:
    """The target has other weights; on every rank."""
    head = bridge.head
    if head is None:
        return
    head.swapper.verify()
    if not head.ranks.alone and bridge.config.drafter.trains and head.trainable:
        parts = head.target_parts()  # whole, which takes all ranks
        if head.training is not None:
            head.training.parts = parts


def _info(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    state, reason = bridge.state()
    p = bridge.engine
    cost = p.tuner.cost
    return {
        "state": state,
        "reason": reason,
        "version": p.version,
        "k": p.k,
        "k_max": p.k_max,
        "preset": bridge.config.preset,
        "reuse": "lenient" if bridge.scores else bridge.config.reuse.mode,
        "mode": bridge.mode,
        "vllm": bridge.machine.get("vllm"),
        "running": len(p.requests),
        "prompts": len(p.history),
        "cost": {"c0": cost.c0, "c1": cost.c1, "fitted": cost.fitted, "error": cost.error},
        "strategy": p.config.tuning.strategy,
        "arms": [a.name for a in p.tuner.arms],
        "drafters_off": p.tuner.guard.off,
        **({"drafter": bridge.head.info()} if bridge.head is not None else {}),
    }


def _stats(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    return bridge.drain(str(payload.get("reader", TRAINER))).to_dict()


def _set_version(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    version = int(payload["version"])
    if bridge.policy is not None:
        bridge.policy.announced()
    return _new_version(bridge, version)


def _new_version(bridge: Bridge, version: int) -> dict[str, Any]:
    bridge.set_version(version)  # coupled noise depends on it, on every rank, and staleness
    _new_weights(bridge)
    if bridge.head is not None and bridge.head.training is not None:
        bridge.head.training.updating(False)  # the new policy is here
    history = bridge.config.history
    if history.dir is not None and bridge.drafting:
        _save(bridge, {"dir": str(history.dir), "wait": False})
    return {"version": version}


def _swap(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    if bridge.head is None:
        return {"error": "rollspec: this engine runs no draft head, so there are no weights to swap."}
    return bridge.head.swapper.request(payload)  # type: ignore[no-any-return]


def _samples(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    if bridge.head is None or bridge.head.capture is None:
        return {"error": "rollspec: this engine captures no samples; set drafter.mode to capture."}
    _collect(bridge)
    return bridge.head.capture.drain(Path(payload["dir"]))  # type: ignore[no-any-return]


def _updating(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    """The machine is the trainer's (`on` true, until the next step or `set_version`): nothing else uses it."""
    on = bool(payload["on"])
    if bridge.head is not None and bridge.head.training is not None:
        bridge.head.training.updating(on)
    return {"updating": on}


def _set_k(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    k, most = int(payload["k"]), bridge.engine.k_max
    if not 0 <= k <= most:
        return {"error": f"rollspec: k = {k} cannot be used; give 0 to proposal.k_max = {most}."}
    bridge.engine.k = k
    return {"k": k}


def _rewards(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    items = [(str(p), str(r), float(v)) for p, r, v in payload["items"]]
    _collect(bridge)
    if bridge.head is not None and bridge.head.training is not None:
        bridge.head.training.reward(items)
    return {"matched": bridge.engine.history.reward(items), "of": len(items)}


def _save(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    folder = Path(payload["dir"])
    snapshot, tuning = bridge.engine.snapshot(), bridge.engine.tuning_state()

    def write() -> Path:
        store.save(folder, tuning, bridge.machine)
        return bridge.engine.history.save(folder, snapshot, bridge.tokenizer)

    if bridge.head is not None and bridge.head.training is not None and payload.get("wait", True):
        bridge.head.training.save(folder / "drafter")
    if payload.get("wait", True):
        return {"path": str(write())}
    _save_later(bridge, write)
    return {"path": str(folder)}


def _load(bridge: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    if bridge.head is not None and bridge.head.training is not None:  # whatever becomes of the history
        bridge.head.training.load(Path(payload["dir"]) / "drafter")
    try:
        vocab = int(bridge.runner.model_config.get_vocab_size())
        p = bridge.engine
        count = p.history.load(payload["dir"], p.version, vocab, bridge.tokenizer)
    except HistoryError as e:
        bridge.count("history file refused", e)
        return {"error": str(e)}
    bridge.engine.suffix.warm()
    return {"responses": count, "tuning": _load_tuning(bridge, Path(payload["dir"]))}


def _load_tuning(bridge: Bridge, folder: Path) -> str:
    """Take the saved tuning: "loaded", "none", or why not all of it. Without it, speed is measured anew."""
    try:
        found, problem = store.load(folder, bridge.machine)
        if found is None:
            return "none"
        try:
            bridge.engine.restore_tuning(found)
        except (ValueError, KeyError, TypeError) as e:
            raise HistoryError(store.refuse(folder / store.FILE, e)) from e
    except HistoryError as e:
        bridge.count("tuning file refused", e)
        return str(e)
    if problem is not None:
        logger.warning("%s", problem)
    return problem or "loaded"


def _collect(bridge: Bridge) -> None:
    """Finish requests that ended in the last step: vLLM reports them to the worker only when the next step starts."""
    running = bridge.running
    for req_id, r in list(bridge.engine.requests.items()):
        if req_id not in running or r.ended:
            scheduled = req_id in running  # perhaps, where steps overlap: one more of it
            if bridge.head is not None and bridge.head.capture is not None:
                bridge.head.capture.finish(req_id, r, scheduled)
            bridge.engine.finish(req_id)
            if scheduled:
                bridge.collected.add(req_id)


def _save_later(bridge: Bridge, job: Callable[[], Any]) -> None:
    """Run `job` off the step path; it takes the place of one that still waits, whose snapshot is older."""
    if bridge.saves is None:
        jobs = bridge.saves = SimpleQueue()
        threading.Thread(target=_run_saves, args=(bridge, jobs), name="rollspec-history", daemon=True).start()
    bridge.saves.put(job)


def _run_saves(bridge: Bridge, jobs: SimpleQueue[Callable[[], Any]]) -> None:
    while True:
        job = jobs.get()
        while not jobs.empty():
            job = jobs.get()
        try:
            job()
        except Exception as e:
            bridge.count("history not saved", e)


OPERATIONS: dict[str, Callable[[Bridge, dict[str, Any]], dict[str, Any]]] = {
    "info": _info,
    "stats": _stats,
    "set_version": _set_version,
    "set_k": _set_k,
    "swap": _swap,
    "samples": _samples,
    "updating": _updating,
    "rewards": _rewards,
    "save": _save,
    "load": _load,
}
