"""Hooks inside a vLLM worker, and the operations a trainer calls on it by `collective_rpc("rollspec", (op, payload))`.

Every operation answers with a JSON-able dict; a failing one answers `{"error": sentence}` and never raises, because an
exception in a worker call ends the engine. Ranks that do not draft answer `{}`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from rollspec.config import RollspecConfig
from rollspec.engine.vllm import hooks
from rollspec.engine.vllm.bridge import TRAINER, Bridge
from rollspec.engine.vllm.compat import vllm_version
from rollspec.engine.vllm.hooks.worker import WorkerSleep, WorkerWakeUp
from rollspec.errors import HistoryError, RollspecError, UnsupportedEngineError
from rollspec.tuning import store

if TYPE_CHECKING:
    from rollspec.engine.vllm.head import DraftHead

logger = logging.getLogger("rollspec")

BRIDGE = "_rollspec"
"""On a model runner: rollspec's side of it."""


def equip(worker: Any, drafter: Bridge, head: DraftHead, config: RollspecConfig) -> None:
    """Give a worker's head what swaps, trains and follows it."""
    from rollspec.engine.vllm.follow import Follower
    from rollspec.engine.vllm.swap import Swapper

    drafter.learned = head
    swapper = head.swapper = Swapper(head, head.ranks, config.proposal.learned.canary_drafts)
    _watch_sleep(worker, head)
    trains, shared = config.drafter.trains and head.eagle, config.drafter.versions
    if trains or shared is not None:
        swapper.prepare()
    if trains and head.capture is not None:  # on the rank that drafts
        _train(drafter, head, config.drafter.mode)
    if shared is not None and drafter.drafting:
        requests = drafter.proposer.requests
        head.follower = Follower(swapper, shared, lambda: bool(requests), drafter.count)
        head.follower.start()


def _train(drafter: Bridge, head: DraftHead, mode: str) -> None:
    """Begin to train; where no daemon can be fed, the engine serves with the head it has."""
    if mode == "idle":
        from rollspec.engine.vllm.online import OnlineTraining

        head.online = OnlineTraining(head)
        return
    from drafter_online.errors import DrafterError
    from rollspec.engine.vllm.dedicated import DedicatedTraining

    assert head.capture is not None
    try:
        head.online = DedicatedTraining(head)
    except DrafterError as e:
        drafter.count("drafter feedback")
        head.capture.paused = True
        logger.error("rollspec: the drafter gets no feedback: %s", str(e).removeprefix("drafter-online: "))


def load_history(drafter: Bridge) -> None:
    """Take up what an earlier run saved, where a folder is named."""
    if drafter.config.history.dir is not None and drafter.drafting:
        _load(drafter, {"dir": str(drafter.config.history.dir)})


def call(worker: Any, op: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Run one operation; see `OPERATIONS` for their names and payloads."""
    drafter = bridge(worker)
    if drafter is None:
        return {"state": "off", "reason": "rollspec is not on in this engine"} if op == "info" else {}
    if drafter.runner is not None and not drafter.drafting and drafter.fault is None:
        if op in ("set_version", "swap"):
            _follow(drafter, op, payload)
        return {}  # a rank whose drafts vLLM does not read
    drafter.join()
    operation = OPERATIONS.get(op)
    if operation is None:
        return {"error": f"rollspec: there is no operation {op!r}; use one of {', '.join(sorted(OPERATIONS))}."}
    try:
        return operation(drafter, payload)
    except RollspecError as e:
        return {"error": str(e)}
    except Exception as e:
        logger.exception("rollspec: the operation %r failed", op)
        return {"error": f"rollspec: the operation {op!r} failed ({type(e).__name__}: {e})."}


def bridge(worker: Any) -> Bridge | None:
    """rollspec's side of a worker, or None where rollspec is not on in it."""
    found: Bridge | None = getattr(getattr(worker, "model_runner", None), BRIDGE, None)
    return found


def ready() -> None:
    """Check that what vLLM needs to sample correctly is in place.

    Raises:
        UnsupportedEngineError: it is not, in one sentence; the engine must not speculate.
    """
    if absent := hooks.missing():
        raise UnsupportedEngineError(
            f"vLLM {vllm_version()} needs the patches {', '.join(absent)} to sample correctly, and "
            f"{hooks.ENV_PATCHES}=none forbids them; unset it"
        )


def is_output_rank(worker: Any) -> bool:
    """vLLM reads drafts from the first tensor-parallel rank of the last pipeline stage only (executor
    `output_rank`).
    """
    parallel = worker.vllm_config.parallel_config
    return int(worker.rank) % int(parallel.tensor_parallel_size) == 0


def next_version(drafter: Bridge) -> None:
    """The target has other weights, and nobody said which version they are: the next one."""
    if drafter.drafting:
        _new_version(drafter, drafter.proposer.version + 1)
    else:
        drafter.set_version(drafter.proposer.version + 1)  # coupled noise depends on it
        _new_weights(drafter)


def _follow(drafter: Bridge, op: str, payload: dict[str, Any]) -> None:
    """What a rank does together with the one that drafts; that one answers for all. Never raises."""
    try:
        if op == "swap":
            _swap(drafter, payload)
            return
        if drafter.policy is not None:
            drafter.policy.told()
        drafter.set_version(int(payload["version"]))  # coupled noise depends on it, and staleness
        _new_weights(drafter)
    except RollspecError as e:
        logger.debug("%s", e)
    except Exception as e:
        drafter.count(f"{op}: {type(e).__name__}: {e}")
        logger.exception("rollspec: the operation %r failed on a rank that does not draft", op)


def _new_weights(drafter: Bridge) -> None:
    """The target has other weights; on every rank."""
    learned = drafter.learned
    if learned is None or learned.swapper is None:
        return
    learned.swapper.verify()
    if not learned.ranks.alone and drafter.config.drafter.trains and learned.eagle:
        parts = learned.target_parts()  # whole, which takes all ranks
        if learned.online is not None:
            learned.online.parts = parts


def _watch_sleep(worker: Any, head: DraftHead) -> None:
    """Know when the engine's memory is taken away (sleep mode), and when it is back and of unknown contents."""

    def falls_asleep(sleep: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with head.reading:
            head.asleep = True
        return sleep(*args, **kwargs)

    def wakes_up(wake_up: Callable[..., Any], tags: list[str] | None = None) -> Any:
        out = wake_up(tags)
        if tags is None or "weights" in tags:
            head.asleep = False
            if head.swapper is not None:
                head.swapper.wake()
            if head.specialists is not None:
                head.specialists.woke = True
        return out

    if hasattr(worker, "sleep") and hasattr(worker, "wake_up"):
        WorkerSleep.wrap(worker, falls_asleep, __name__)
        WorkerWakeUp.wrap(worker, wakes_up, __name__)


# ---- operations -----------------------------------------------------------------------------------------------------


def _info(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    state, reason = drafter.state()
    p = drafter.proposer
    cost = p.tuner.cost
    return {
        "state": state,
        "reason": reason,
        "version": p.version,
        "k": p.k,
        "k_max": p.k_max,
        "preset": drafter.config.preset,
        "reuse": "lenient" if drafter.scores else drafter.config.reuse.mode,
        "mode": drafter.mode,
        "vllm": vllm_version(),
        "running": len(p.requests),
        "prompts": len(p.history),
        "cost": {"c0": cost.c0, "c1": cost.c1, "fitted": cost.fitted, "error": cost.error},
        "policy": p.config.tuning.policy,
        "arms": [a.name for a in p.tuner.arms],
        "drafters_off": p.tuner.guard.off,
        **({"drafter": drafter.learned.info()} if drafter.learned is not None else {}),
    }


def _stats(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    return drafter.drain(str(payload.get("reader", TRAINER))).to_dict()


def _set_version(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    version = int(payload["version"])
    if drafter.policy is not None:
        drafter.policy.told()
    return _new_version(drafter, version)


def _new_version(drafter: Bridge, version: int) -> dict[str, Any]:
    drafter.set_version(version)
    _new_weights(drafter)
    if drafter.learned is not None and drafter.learned.online is not None:
        drafter.learned.online.updating = False  # the new policy is here
    history = drafter.config.history
    if history.dir is not None and drafter.drafting:
        _save(drafter, {"dir": str(history.dir), "wait": False})
    return {"version": version}


def _swap(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    if drafter.learned is None or drafter.learned.swapper is None:
        return {"error": "rollspec: this engine runs no learned drafter, so there are no weights to swap."}
    return drafter.learned.swapper.request(payload)  # type: ignore[no-any-return]


def _samples(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    if drafter.learned is None or drafter.learned.capture is None:
        return {"error": "rollspec: this engine captures no samples; set drafter.mode to capture."}
    _collect(drafter)
    return drafter.learned.capture.drain(Path(payload["dir"]))  # type: ignore[no-any-return]


def _updating(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    """The machine is the trainer's (`on` true, until the next step or `set_version`): nothing else uses it."""
    on = bool(payload["on"])
    if drafter.learned is not None and drafter.learned.online is not None:
        drafter.learned.online.updating = on
    return {"updating": on}


def _set_k(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    k, most = int(payload["k"]), drafter.proposer.k_max
    if not 0 <= k <= most:
        return {"error": f"rollspec: k = {k} cannot be used; give 0 to proposal.k_max = {most}."}
    drafter.proposer.k = k
    return {"k": k}


def _rewards(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    items = [(str(p), str(r), float(v)) for p, r, v in payload["items"]]
    _collect(drafter)
    if drafter.learned is not None and drafter.learned.online is not None:
        drafter.learned.online.reward(items)
    return {"matched": drafter.proposer.history.reward(items), "of": len(items)}


def _save(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    folder = Path(payload["dir"])
    snapshot, learned = drafter.proposer.snapshot(), drafter.proposer.learned()

    def write() -> Path:
        store.save(folder, learned, drafter.machine)
        return drafter.proposer.history.save(folder, snapshot, drafter.tokenizer)

    if drafter.learned is not None and drafter.learned.online is not None and payload.get("wait", True):
        drafter.learned.online.save(folder / "drafter")
    if payload.get("wait", True):
        return {"path": str(write())}
    _save_later(drafter, write)
    return {"path": str(folder)}


def _load(drafter: Bridge, payload: dict[str, Any]) -> dict[str, Any]:
    try:
        vocab = int(drafter.runner.model_config.get_vocab_size())
        p = drafter.proposer
        count = p.history.load(payload["dir"], p.version, vocab, drafter.tokenizer)
    except HistoryError as e:
        drafter.count("history file refused", e)
        return {"error": str(e)}
    drafter.proposer.suffix.warm()
    if drafter.learned is not None and drafter.learned.online is not None:
        drafter.learned.online.load(Path(payload["dir"]) / "drafter")
    return {"responses": count, "tuning": _load_learned(drafter, Path(payload["dir"]))}


def _load_learned(drafter: Bridge, folder: Path) -> str:
    """Take what was learned about speed: "loaded", "none", or why not all of it. Without it, it is learned anew."""
    try:
        learned, problem = store.load(folder, drafter.machine)
        if learned is None:
            return "none"
        try:
            drafter.proposer.relearn(learned)
        except (ValueError, KeyError, TypeError) as e:
            raise HistoryError(store.refuse(folder / store.FILE, e)) from e
    except HistoryError as e:
        drafter.count("tuning file refused", e)
        return str(e)
    if problem is not None:
        logger.warning("%s", problem)
    return problem or "loaded"


def _collect(drafter: Bridge) -> None:
    """Take requests that ended in the last step as finished: vLLM tells the worker only when the next step starts."""
    running = drafter.running
    for req_id, r in list(drafter.proposer.requests.items()):
        ended = bool(r.output) and (r.output[-1] in r.stop_ids or len(r.output) >= r.max_tokens)
        if req_id not in running or ended:
            scheduled = req_id in running  # perhaps, where steps overlap: one more of it
            if drafter.learned is not None and drafter.learned.capture is not None:
                drafter.learned.capture.finish(req_id, r, scheduled)
            drafter.proposer.finish(req_id)
            if scheduled:
                drafter.collected.add(req_id)


def _save_later(drafter: Bridge, job: Callable[[], Any]) -> None:
    """Run `job` off the step path; it takes the place of one that still waits, whose snapshot is older."""
    if drafter.saves is None:
        jobs = drafter.saves = SimpleQueue()
        threading.Thread(target=_run_saves, args=(drafter, jobs), name="rollspec-history", daemon=True).start()
    drafter.saves.put(job)


def _run_saves(drafter: Bridge, jobs: SimpleQueue[Callable[[], Any]]) -> None:
    while True:
        job = jobs.get()
        while not jobs.empty():
            job = jobs.get()
        try:
            job()
        except Exception as e:
            drafter.count("history not saved", e)


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
