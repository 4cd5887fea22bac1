"""New drafter weights into the running engine, between two decode steps, with nothing lost and nothing changed.

    stage    verified, loaded and packed into a second copy of the drafter, on a thread, while the engine steps
    swap     copied into the first one's own storage (CUDA graphs hold its addresses), at the start of a step
    canary   the next drafts are compared with what the old weights reached; then they stay, or are taken back

What the drafter shares with its target (embedding, LM head) is left out of every payload and never written: vLLM shares
them by reference, so writing them would change what is sampled. Requests, the target's KV and the batch are not
touched. The drafter's own KV is the old weights'; where they moved much, it is read again from the states that are kept
(`States.rewind`), a part per step.

Tensor-parallel ranks stage their parts each for itself and swap at the first step at which all are ready; a version
that one rank refuses is refused by all (`Ranks`). While the engine sleeps its weights have no memory: a swap that is
asked for then waits for the first step, and what woke up is verified before that step.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollspec.engine.vllm.payload import (
    SwapRefusedError,
    check,
    distance,
    fingerprint,
    read_folder,
    unprepared,
)
from rollspec.engine.vllm.ranks import NOTHING, Note, Ranks
from rollspec.once import Once
from rollspec.proposal.canary import Canary, Verdict

if TYPE_CHECKING:
    from rollspec.engine.vllm.head import DraftHead

LARGE = 0.02
"""Relative change of the weights from which on the KV that the old ones wrote is read again."""


@dataclass(slots=True)
class Before:
    """What ran before a trial: version, weights by checkpoint name, and what was known of its acceptance."""

    version: int
    since: int
    tensors: dict[str, torch.Tensor]
    acceptance: dict[str, list[float]]


@dataclass(slots=True)
class Staged:
    """Weights that are ready: `tensors` by checkpoint name, on the CPU; the second copy of the drafter holds them."""

    version: int
    tensors: dict[str, torch.Tensor]
    change: float  # |new - old| / |old| over all weights
    seconds: float
    canary: bool
    print: list[float]  # fingerprint
    store: Path | None = None
    target: int | None = None  # newest policy version that they were trained on


class Swapper:
    """Swaps for one worker's drafter. Everything but staging runs on the worker's own thread, between steps."""

    def __init__(self, learned: DraftHead, vllm_config: Any, ranks: Ranks | None = None) -> None:
        self.learned = learned
        self.ranks = ranks or Ranks()
        self.vllm_config = vllm_config
        self.version = 0
        self.since = 0  # newest policy version that the weights were trained on, or under which they came
        self.canary: Canary | None = None
        self.pauses: list[float] = []  # seconds, since the last drain
        self.counts = {"promoted": 0, "rolled_back": 0, "refused": 0, "resent": 0}
        self.last: dict[str, Any] = {}
        self._config = learned.bridge.config.proposal.learned
        self._shadow: Any = None
        self._thread: threading.Thread | None = None
        self._staged: Staged | None = None
        self._offering = threading.Lock()
        self._offered: dict[str, Any] | None = None  # by another thread
        self._trying: int | None = None  # the offered version that is being staged
        self._replaceable = False  # what is being staged was offered for a trial, and a newer offer may take its place
        self.told: Callable[[int, str, str], None] | None = None
        """Told of verdicts (version, verdict, reason) in the place of the store's own record."""
        self._deferred: dict[str, Any] | None = None  # asked for while the engine slept
        self._pending = False  # a swap is being prepared, on every rank
        self._verdict: Verdict | None = None  # of the trial, not told to the other ranks yet
        self._woke = False
        self._error: SwapRefusedError | None = None
        self._once = Once()
        self._running: dict[str, torch.Tensor] | None = None  # payload of what runs; None: as loaded
        self._spare: threading.Thread | None = None  # loads what ran before into the second copy
        self._before: Before | None = None  # what ran before the canary
        self._store: Path | None = None
        self._base: dict[str, torch.Tensor] | None = None  # what the engine was started with
        model = self._live = learned.drafter.model
        modules = {id(m) for m in learned.runner.get_model().modules()}
        self._own = {
            name: p for name, p in model.named_parameters()
            if p.numel() and id(model.get_submodule(name.rpartition(".")[0])) not in modules
        }  # fmt: skip
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # the same weight in both copies of the drafter
        self._packed: list[tuple[Any, Any]] = []  # the same layer, where vLLM-CPU packs its weight
        self._print = fingerprint(self._own.values())

    # ---- operations -------------------------------------------------------------------------------------------------

    def request(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Stage new weights, and swap them in when they are ready.

        Args:
            payload: `dir`, a version's folder or a head's; or `tensors`, a state dict in the checkpoint's names (in
                this process only). `version`: its number where the folder does not say; `canary`: False promotes at
                once; `back`: True allows an older version, and without `dir` the weights that the engine was started
                with; `instead`: True gives up what is staged (of `poll` only); `wait`: True returns
                after the swap, else it happens at the start of a later step.

        Returns:
            what was done: `version`, and with `wait` also `pause_ms`, `stage_ms`, `change`, `reread` (positions);
            `deferred` where the engine sleeps, and the swap waits until it is awake.

        Raises:
            SwapRefusedError: in one sentence, why nothing was touched.
        """
        if self.learned.asleep:
            self._deferred = dict(payload)
            return {"deferred": True, "version": self.version}
        if self._pending and not payload.get("instead"):
            raise SwapRefusedError("rollspec: a swap is being prepared; try again when it is done.")
        if self.canary is not None:
            raise SwapRefusedError(
                f"rollspec: version {self.canary.version} has been running for {self.canary.seen} of its "
                f"{self.canary.drafts} trial drafts; try again after its verdict."
            )
        for thread in (self._spare, self._thread):
            if thread is not None:
                thread.join()
        self._pending, self._error, self._staged = True, None, None
        try:
            self._build()
        except Exception as e:  # on one rank perhaps: all must learn of it
            self._error = unprepared(e)
        if payload.get("wait"):
            self._prepare(payload)
            return self._settle() or {}
        self._thread = threading.Thread(target=self._prepare, args=(dict(payload),), name="rollspec-stage")
        self._thread.daemon = True
        self._thread.start()
        return {"staging": True, "version": self.version}

    @property
    def busy(self) -> bool:
        """Whether a swap is on its way or on trial."""
        return self._pending or self._offered is not None or self._deferred is not None or self.canary is not None

    @property
    def open(self) -> bool:
        """Whether a newer version may be offered: none is on trial, and no offer that needs no trial is in the way."""
        offered = self._offered
        return self.canary is None and self._deferred is None and (offered is None or bool(offered["canary"]))

    def offer(self, folder: Path | None, canary: bool = True, back: bool = False) -> None:
        """Have a version staged when the next step begins. For other threads. Arguments as in `request`.

        It takes the place of an offer that was not swapped in yet: one that no step has taken up, and once also one
        that is staged. Once only, or short bursts of steps with an offer between any two would never swap.
        """
        with self._offering:
            self._offered = {"dir": str(folder or ""), "canary": canary, "back": back}

    def withdraw(self) -> bool:
        """Take an offer back; False where there is none, or a step has taken it up. For other threads."""
        with self._offering:
            offered, self._offered = self._offered, None
        return offered is not None

    def prepare(self) -> None:
        """Make the second copy of the drafter now rather than at the first swap."""
        self._build()

    def woke(self) -> None:
        """The engine woke up: what its memory holds is not known before it was looked at."""
        self._woke = True

    def poll(self) -> None:
        """A step begins: swap in what is ready."""
        if self._woke:
            self._woke = False
            self.verify()
        asked, self._deferred = self._deferred, None
        if asked is None and self.ranks.alone:
            asked = self._accept()
        try:
            if asked is not None:
                asked.pop("wait", None)
                try:
                    self.request(asked)
                except SwapRefusedError as e:
                    self.refuse(e)
            elif self._pending:
                self._settle()
        except SwapRefusedError:
            pass  # counted and said by `_settle`

    def note(self) -> Note:
        """What the other ranks must be told; on the first rank of several."""
        if self.ranks.alone:
            return NOTHING
        if self._verdict is not None:
            return Note(self._verdict)
        offered = self._accept()
        return NOTHING if offered is None else Note("swap", json.dumps(offered))

    def heed(self, note: Note) -> None:
        """Do what the first rank says; on every rank of several, at the same step."""
        if note.kind == "swap":
            try:
                self.request(json.loads(note.text))
            except SwapRefusedError as e:
                self.refuse(e)
        elif note.kind:
            self._conclude(note.kind)

    def info(self) -> dict[str, Any]:
        """What runs, and what became of the last swap."""
        waits = self._pending or self._deferred is not None
        state = "staging" if waits else "canary" if self.canary is not None else "settled"
        started = str(self.learned.drafter.draft_model_config.model)
        return {"version": self.version, "state": state, **self.counts, "last": self.last, "started_with": started}

    def verify(self) -> bool:
        """Whether the drafter still has its weights; if not (a policy sync, a sleep), they are put back."""
        if self.learned.asleep:
            self._woke = True  # looked at when there is something to look at
            return True
        # Ranks read the drafter's KV again together, so what one has lost all put back.
        if self.ranks.least(int(self._print == fingerprint(self._own.values()))):
            return True
        self.counts["resent"] += 1
        self._once("resent", "rollspec: the drafter's weights were lost or overwritten; they are put back.")
        self._build()
        for thread in (self._thread, self._spare):
            if thread is not None:
                thread.join()
        self._load(self._running if self._running is not None else self._original())
        self._exchange()
        self.learned.states.rewind()
        # What the second copy held is needed there again.
        if self._staged is not None:
            self._load(self._staged.tensors)
        elif self._before is not None:
            self._load(self._before.tensors)
        return False

    def observe(self, hits: int, length: int) -> None:
        """A draft of the new weights was scored."""
        if self.canary is None:
            return
        if self._verdict is not None:
            return  # it takes effect when all ranks know
        verdict = self.canary.observe(hits, length)
        if verdict is not None and self.ranks.alone:
            self._conclude(verdict)
        else:
            self._verdict = verdict

    def refuse(self, error: SwapRefusedError) -> None:
        """Count and log a refusal."""
        self.counts["refused"] += 1
        self.last = {"refused": str(error)}
        version, self._trying = self._trying, None
        if version is not None and self.told is not None:
            self.told(version, "refused", str(error))
        self._once(str(error), "%s", error)

    # ---- staging ----------------------------------------------------------------------------------------------------

    def _accept(self) -> dict[str, Any] | None:
        """The offer, if it can be staged now; with `instead` where it takes the place of a staged one."""
        if self.canary is not None or (self._pending and not self._superseded):
            return None
        with self._offering:
            offered, self._offered = self._offered, None
        if offered is None:
            return None
        self._trying, self._replaceable = _number(offered), bool(offered["canary"]) and not self._pending
        return {**offered, "instead": True} if self._pending else offered

    @property
    def _superseded(self) -> bool:
        """Whether what is staged gives way to a newer offer: not with ranks, none of which knows that all staged."""
        return self.ranks.alone and self._replaceable and self._staged is not None and self._offered is not None

    def _prepare(self, payload: Mapping[str, Any]) -> None:
        """Stage, or remember why not. Never raises: a fault while preparing touches nothing that runs."""
        if self._error is not None:
            return
        try:
            self._staged = self._stage(payload)
        except SwapRefusedError as e:
            self._error = e
        except Exception as e:
            self._error = unprepared(e)

    def _settle(self) -> dict[str, Any] | None:
        """Swap if all ranks are ready; None while one is not.

        Raises:
            SwapRefusedError: one of them refused; it is counted.
        """
        done = self._thread is None or not self._thread.is_alive()
        agreed = self.ranks.least(0 if not done else 1 if self._error is not None else 2)
        if agreed == 0:
            return None
        self._pending, self._thread, self._replaceable = False, None, False
        if agreed == 1:
            error, self._error = self._error, None
            self._staged = None
            if error is None:
                error = SwapRefusedError("rollspec: drafter weights were not loaded: another rank refused them.")
            self.refuse(error)
            raise error
        return self._swap()

    def _stage(self, payload: Mapping[str, Any]) -> Staged:
        begin = time.perf_counter()
        version, tensors, store, target = self._read(payload)
        like = self._original()
        tensors = self._strip(tensors)
        check(tensors, like)
        old = self._running if self._running is not None else like
        change = distance(tensors, old)
        self._load(tensors)
        # Of the second copy, whose bytes the first one will have.
        marks = fingerprint(second for _, second in self._pairs)
        seconds = time.perf_counter() - begin
        return Staged(version, tensors, change, seconds, bool(payload.get("canary", True)), marks, store, target)

    def _read(self, payload: Mapping[str, Any]) -> tuple[int, dict[str, torch.Tensor], Path | None, int | None]:
        """(version, tensors by checkpoint name, the store they are from, policy version that they were trained on)."""
        if "tensors" in payload:
            version = int(payload.get("version", self.version + 1))
            if version <= self.version:
                raise SwapRefusedError(
                    f"rollspec: drafter version {version} is not newer than version {self.version}, which runs."
                )
            return version, {n: t.detach().to("cpu") for n, t in payload["tensors"].items()}, None, None
        back = bool(payload.get("back"))
        if back and not payload.get("dir"):
            return 0, dict(self._original()), None, 0
        folder = Path(str(payload.get("dir", "")))
        if (folder / "manifest.json").is_file() or folder.name.isdigit():
            from drafter_online.errors import DrafterError
            from drafter_online.head import base_of
            from drafter_online.versions import Versions

            try:
                store = Versions(folder.parent)
                base = base_of(self.learned.runner.model_config.hf_text_config)
                found = store.load(int(folder.name), base=base, newer_than=None if back else self.version)
            except (DrafterError, ValueError) as e:
                raise SwapRefusedError(f"rollspec: {str(e).removeprefix('drafter-online: ')}") from e
            return found.number, dict(found.tensors), folder.parent, found.manifest.target_version
        return int(payload.get("version", self.version + 1)), read_folder(folder), None, None

    def _strip(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Without what is the target's own in this engine."""
        live, target = self._live, self.learned.runner.get_model()
        shared = ["verifier_"]
        inner = getattr(live, "model", live)
        if getattr(inner, "embed_tokens", None) is getattr(getattr(target, "model", None), "embed_tokens", self):
            shared.append("embed_tokens")
        if getattr(live, "lm_head", None) is getattr(target, "lm_head", self):
            shared.append("lm_head")
        return {n: t for n, t in tensors.items() if not any(s in n for s in shared)}

    def _original(self) -> dict[str, torch.Tensor]:
        """What the engine was started with."""
        if self._base is not None:
            return self._base
        path = Path(str(self.learned.drafter.draft_model_config.model))
        if not path.is_dir():
            from huggingface_hub import snapshot_download

            path = Path(snapshot_download(str(path), local_files_only=True))
        self._base = self._strip(read_folder(path))
        return self._base

    def _build(self) -> None:
        """The second copy of the drafter, made once; its attention layers are not the engine's."""
        if self._shadow is not None:
            return
        from vllm.config import set_current_vllm_config

        context = self.vllm_config.compilation_config.static_forward_context
        kept = dict(context)
        context.clear()
        try:
            with set_current_vllm_config(self.vllm_config):
                self._shadow = self.learned.drafter._get_model()
        finally:
            context.clear()
            context.update(kept)
        live = dict(self._live.named_modules())
        targets = {id(m) for m in self.learned.runner.get_model().modules()}
        for name in [n for n, m in live.items() if id(m) in targets and n.endswith(("embed_tokens", "lm_head"))]:
            # What is shared with the target is needed once.
            parent, _, leaf = name.rpartition(".")
            setattr(self._shadow.get_submodule(parent), leaf, torch.nn.Module())
        second = dict(self._shadow.named_parameters())
        written = {p.data_ptr() for p in self.learned.runner.get_model().parameters() if p.numel()}
        self._pairs = [(p, second[n]) for n, p in self._own.items() if n in second and p.data_ptr() not in written]
        self._packed = [
            (live[name], other)
            for name, other in self._shadow.named_modules()
            if name in live and id(live[name]) not in targets and hasattr(other, "cpu_linear")
        ]

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            self._shadow.load_weights(iter(tensors.items()))
        from rollspec.engine.vllm.patches.cpu_weights import repack

        repack(self._shadow)  # nothing to do where nothing is packed

    # ---- the swap ---------------------------------------------------------------------------------------------------

    def _swap(self) -> dict[str, Any]:
        begin = time.perf_counter()
        staged = self._staged
        assert staged is not None
        self._staged = self._trying = None
        acceptance = self.learned.proposer.router.acceptance
        rates, known = acceptance.measured, acceptance.state()
        before = self._running if self._running is not None else self._original()
        self._exchange()
        self._print = staged.print
        reread = self.learned.states.rewind() if staged.change >= LARGE else 0
        self._before = Before(self.version, self.since, before, known)
        self.version, self._running, self._store = staged.version, staged.tensors, staged.store
        policy = self.learned.proposer.version
        # Versions of another job may count policies otherwise: none is of the future.
        self.since = policy if staged.target is None else min(staged.target, policy)
        self.learned.proposer.swapped(self.version)
        if staged.canary and self._config.canary_drafts:
            self.canary = Canary(staged.version, rates, self._config.canary_drafts, self._config.canary_ratio)
        self.learned.proposer.on_trial = self.canary is not None
        pause = time.perf_counter() - begin
        self.pauses.append(pause)
        self.last = {
            "version": staged.version,
            "pause_ms": 1e3 * pause,
            "stage_ms": 1e3 * staged.seconds,
            "change": staged.change,
            "reread": reread,
        }
        if self.canary is None:
            self._conclude("promoted")
        else:
            # The second copy is free: what it replaced waits there, so that taking back is one exchange as well.
            self._spare = threading.Thread(target=self._load, args=(before,), name="rollspec-spare", daemon=True)
            self._spare.start()
        return dict(self.last)

    def _exchange(self) -> None:
        """Copy the second drafter's weights into the first one's storage."""
        with torch.no_grad():
            for mine, new in self._pairs:
                mine.data.copy_(new.data)
        for layer, other in self._packed:
            # vLLM-CPU packs a weight into a closure: the packed ones change places.
            layer.cpu_linear, other.cpu_linear = other.cpu_linear, layer.cpu_linear
        if self.learned.runner.device.type == "cuda":
            torch.cuda.synchronize()

    def _conclude(self, verdict: Verdict) -> None:
        """The trial is over: the weights stay, or those before them come back."""
        canary, self.canary, self._verdict = self.canary, None, None
        self.learned.proposer.on_trial = False
        reason = canary.reason if canary is not None else "without a trial"
        version, store = self.version, self._store
        self.counts[verdict] += 1
        if verdict == "promoted":
            self._once(
                f"{version} promoted", "rollspec: drafter version %d stays: %s.", version, reason, level=logging.INFO
            )
        else:
            assert self._before is not None
            self._once(f"{version} back", "rollspec: drafter version %d is taken back: %s.", version, reason)
            old = self._before
            begin = time.perf_counter()
            if self._spare is not None:
                self._spare.join()
            self._exchange()
            self.pauses.append(time.perf_counter() - begin)
            self._print = fingerprint(self._own.values())
            self.learned.states.rewind()
            self.version, self.since, self._running = old.version, old.since, old.tensors
            self.learned.proposer.swapped(old.version, old.acceptance)
        self._before = None
        self.last |= {"verdict": verdict, "reason": reason}
        if self.told is not None:
            self.told(version, verdict, reason)
        elif store is not None and self.ranks.first:
            self._record(store, version, verdict, reason, tried=canary is not None)

    def _record(self, store: Path, version: int, verdict: Verdict, reason: str, tried: bool) -> None:
        from drafter_online.errors import DrafterError
        from drafter_online.versions import Versions

        versions = Versions(store)
        if not tried and any(e.version == version for e in versions.events()):
            return  # it had its verdict, from another engine or before a restart
        try:
            versions.record(version, verdict, reason)
        except DrafterError as e:
            self._once("record", "rollspec: %s", str(e).removeprefix("drafter-online: "))


def _number(offered: Mapping[str, Any]) -> int | None:
    """The version that was offered; None for what has no number."""
    name = Path(str(offered.get("dir", ""))).name
    return int(name) if name.isdigit() else None
