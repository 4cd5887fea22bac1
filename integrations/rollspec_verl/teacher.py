"""The policy's own log-prob pass as the draft head's teacher (`drafter.mode: policy`), in verl's training workers.

Before each update verl computes the log-probs of all rollouts with the policy that sampled them. The hidden states of
that pass are the head's training data, of every token and without any work in the engine: hooks on the decoder layers
copy what enters the layers that the head reads and what leaves the last one, and a thread sends it to the job's
trainer. Nothing of it is differentiated, drawn or changed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from drafter_online.inbox import Inbox
from drafter_online.samples import Sample
from rollspec.config import RollspecConfig
from rollspec.engine.vllm.hooks.base import wrap
from rollspec.proposal.base import as_tokens, prompt_key
from rollspec_verl import options

logger = logging.getLogger("rollspec")

HOLD_BYTES = 256 << 20
"""Bytes of samples that wait to be sent; the oldest go first."""

LEAST_TOKENS = 4
"""Shorter responses teach nothing about drafts."""

MODES: tuple[str, ...] = ("policy",)
"""Of `drafter.mode`, those in which the pass is read."""

TICK_SECONDS = 0.05
FIND_SECONDS = 5.0  # between two looks for the job's trainer, which the first engine starts


def install(module: ModuleType) -> None:
    """Hook the workers that train."""
    from verl.single_controller.base.decorator import Dispatch, register

    worker = module.ActorRolloutRefWorker
    wrap(worker, "compute_log_prob", _log_probs)
    if not hasattr(worker, "rollspec_teacher"):  # a method of its worker group, as verl's own are
        worker.rollspec_teacher = register(dispatch_mode=Dispatch.ONE_TO_ALL)(_info)


def install_engine(module: ModuleType) -> None:
    """Hook their FSDP engine."""
    wrap(module.FSDPEngineWithLMHead, "forward_step", _forward_step)


def _info(rank: Any) -> dict[str, Any]:
    """What this process has given to the head's trainer so far."""
    teacher: Teacher | None = rank.__dict__.get("_rollspec_teaches")
    return {} if teacher is None else teacher.info()


def metrics(ranks: Sequence[dict[str, Any]], trainer: Any) -> dict[str, float]:
    """What the training processes answered, as metrics; counts are since the last call for `trainer`."""
    before = trainer.__dict__.setdefault("_rollspec_taught", {})
    out: dict[str, float] = {}
    for name in ("samples", "dropped"):
        now = sum(r.get(name, 0) for r in ranks)
        out[f"rollspec/drafter/policy_{name}"] = float(now - before.get(name, 0))
        before[name] = now
    out["rollspec/drafter/policy_share"] = max((r["share"] for r in ranks if "share" in r), default=0.0)
    for cause in {str(r["fault"]) for r in ranks if "fault" in r} - before.setdefault("faults", set()):
        before["faults"].add(cause)
        print(f"rollspec: the draft head gets no more samples of the policy ({cause}).", flush=True)
    return out


def _log_probs(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ActorRolloutRefWorker.compute_log_prob` of the policy; the reference's has a method of its own."""
    teacher = _teacher_of(self)
    if teacher is None:
        return original(self, *args, **kwargs)
    with teacher.reading(self.actor.engine):
        return original(self, *args, **kwargs)


def _forward_step(original: Callable[..., Any], self: Any, micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around one micro-batch of `FSDPEngineWithLMHead`."""
    out = original(self, micro_batch, *args, **kwargs)
    teacher = self.__dict__.get("_rollspec_teacher")
    if teacher is not None:
        teacher.take(micro_batch)
    return out


def _teacher_of(rank: Any) -> Teacher | None:
    """The teacher in a training process, made when its first log-probs are computed; None where there is none."""
    if "_rollspec_teaches" not in rank.__dict__:
        rank._rollspec_teaches = None
        try:
            config = options.read(rank.config.rollout)
            if config.enabled and config.drafter.mode in MODES:
                rank._rollspec_teaches = Teacher(config, str(rank.config.model.path))
        except Exception as e:  # what cannot be read has ended the job in the task runner, where that reads it
            logger.warning("rollspec: the draft head gets no samples of the policy (%s).", e)
    teacher: Teacher | None = rank._rollspec_teaches
    return teacher if teacher is not None and teacher.fault is None else None


class Teacher:
    """Of one training process. Everything but sending runs on its thread, and nothing is raised into verl."""

    def __init__(self, config: RollspecConfig, target: str) -> None:
        self.config, self.target, self.head = config.drafter, target, config.proposal.head.model
        self.fault: str | None = None  # why it teaches no more
        self.inbox = Inbox(HOLD_BYTES)
        self.counts = {"passes": 0, "skipped": 0, "sent": 0}
        self.spent = 0.0  # seconds of reading
        self.began: float | None = None  # the first pass
        self._states: dict[int, torch.Tensor] | None = None  # by layer, of the micro-batch that is computed
        self._layers: tuple[int, ...] = ()
        self._last = 0
        self._hello: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    # ---- inside the pass --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, engine: Any) -> Iterator[None]:
        """While verl computes the log-probs of one batch with `engine`."""
        self.began = self.began or time.perf_counter()
        with self._left_out("hooking the policy"):
            if self._thread is None:
                self.attach(engine.module)
                self._thread = threading.Thread(target=self._send, name="rollspec-teacher", daemon=True)
                self._thread.start()
            if getattr(engine, "use_ulysses_sp", False):
                raise RuntimeError("sequence parallelism splits the responses over ranks")
            engine._rollspec_teacher = self
            self._states = {}
        try:
            yield
        finally:
            engine.__dict__.pop("_rollspec_teacher", None)
            self._states = None
            self.counts["passes"] += 1

    def attach(self, module: torch.nn.Module) -> None:
        """Put hooks on the decoder layers. They copy while a pass is read, and do nothing else at any time.

        Raises:
            RuntimeError: the model has no such layers.
        """
        from drafter_online.architecture import aux_layers, base_of, target_config

        layers = _decoder_layers(module)
        self._last = len(layers)
        self._layers = _read_by(self.head) or tuple(aux_layers(self._last))
        self._hello = {"name": f"policy-{id(self):x}", "base": base_of(target_config(self.target)),
                       "aux": list(self._layers)}  # fmt: skip
        for number in self._layers:
            if number < self._last:
                layers[number].register_forward_pre_hook(self._entering(number), with_kwargs=True)
        layers[-1].register_forward_hook(self._leaving)

    def _entering(self, number: int) -> Callable[..., None]:
        def keep(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._states is not None:
                self._states[number] = args[0] if args else kwargs["hidden_states"]

        return keep

    def _leaving(self, _: Any, args: Any, output: Any) -> None:
        if self._states is not None:
            self._states[self._last] = output[0] if isinstance(output, tuple) else output

    def take(self, micro_batch: Any) -> None:
        """A micro-batch was computed: its samples go to the queue, if the share of the time allows."""
        if self._states is None:  # a fault, in this pass or before
            return
        began = time.perf_counter()
        with self._left_out("reading the policy's states"):
            states, self._states = self._states, {}
            if self.spent > self.config.capture.share * self.seconds and self.counts["passes"]:
                self.counts["skipped"] += 1
            else:
                for sample in self.samples(micro_batch, states):
                    self.inbox.put(sample)
        self.spent += time.perf_counter() - began

    @torch.no_grad()
    def samples(self, micro_batch: Any, states: dict[int, torch.Tensor]) -> Iterator[Sample]:
        """The responses of a micro-batch. `states`: [1, tokens, H] where verl packs it, else [rows, longest, H]."""
        ids, prompts, masks = micro_batch["input_ids"], micro_batch["prompts"], micro_batch["response_mask"]
        temperature = float(torch.as_tensor(micro_batch["temperature"]).flatten()[0])
        offsets = ids.offsets().tolist()
        packed = states[self._last].shape[0] == 1
        for i, (prompt, mask) in enumerate(zip(prompts.unbind(), masks.unbind(), strict=True)):
            n = offsets[i + 1] - offsets[i]
            first, at = len(prompt), (0, offsets[i]) if packed else (i, 0)
            said = mask.bool().cpu()[: n - first]
            if int(said.sum()) < LEAST_TOKENS:
                continue
            part = {k: s.detach()[at[0], at[1] : at[1] + n].to("cpu", copy=True) for k, s in states.items()}
            tokens = ids.values()[offsets[i] : offsets[i + 1]].to("cpu", torch.int64, copy=True)
            key = prompt_key(as_tokens(tokens[:first].numpy()))
            yield Sample(
                input_ids=tokens,
                hidden_states=torch.cat([part[k] for k in self._layers], dim=-1),
                verifier_last_hidden_states=part[self._last],
                # A token of a tool or an environment is context, as the prompt is.
                loss_mask=torch.cat([torch.zeros(first, dtype=torch.bool), said]),
                position_ids=torch.arange(n),
                prompt_key=key,
                request_id=f"{key}:{prompt_key(as_tokens(tokens[first:].numpy()))}",  # rewards are joined by it
                target_version=0,  # the trainer knows which version the engines sample from
                temperature=temperature,
                response_length=n - first,
            )

    @property
    def seconds(self) -> float:
        """Of the job since the first pass: what the share of reading is taken of."""
        return time.perf_counter() - self.began if self.began is not None else 0.0

    def info(self) -> dict[str, Any]:
        """Counts since the start, and the share of the job's time that reading took."""
        share = self.spent / self.seconds if self.began else 0.0
        known = {**self.counts, "samples": self.inbox.received, "dropped": self.inbox.dropped, "share": round(share, 4)}
        return known | ({"fault": self.fault} if self.fault else {})

    @contextlib.contextmanager
    def _left_out(self, what: str) -> Iterator[None]:
        """A fault ends the teaching and not the job."""
        try:
            yield
        except Exception as e:
            self.fault = f"{what}: {type(e).__name__}: {e}"
            self._states = None
            logger.warning("rollspec: the draft head gets no more samples of the policy (%s).", self.fault, exc_info=e)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        from drafter_online import wire
        from drafter_online.link import Link

        with self._left_out("sending samples"):
            endpoint, token = self.config.endpoint, None
            while endpoint is None:
                if self.fault is not None:
                    return
                endpoint, token = _of_job()
                if endpoint is None:
                    time.sleep(FIND_SECONDS)
            link = Link(endpoint, self._hello, token=token or wire.read_token(self.config.token_file))
            while self.fault is None:
                for _ in link.poll(TICK_SECONDS):
                    pass  # versions are for engines
                while link.ready and len(self.inbox):
                    for sample in self.inbox.take(1):
                        self.counts["sent"] += link.send_sample(sample)[0]
            link.close()


def _of_job() -> tuple[str | None, str | None]:
    """Endpoint and token of the trainer that the job's first engine has started; None where there is none yet."""
    import ray

    from rollspec.engine.daemon import actor_name

    try:
        actor = ray.get_actor(actor_name(ray))
    except ValueError:
        return None, None
    endpoint, token, _ = ray.get(actor.address.remote(), timeout=60.0)
    return endpoint, token


def _decoder_layers(module: Any) -> Any:
    """The model's list of decoder layers: the longest list of modules of one class in what transformers calls its
    decoder, which leaves out a tower that sees.

    Raises:
        RuntimeError: there is none.
    """
    decoder = module.get_decoder() if hasattr(module, "get_decoder") else module
    lists = [m for m in decoder.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    found = max((m for m in lists if len({type(layer) for layer in m}) == 1), key=len, default=None)
    if found is None:
        raise RuntimeError(f"{type(module).__name__} has no list of decoder layers")
    return found


def _read_by(head: str | None) -> tuple[int, ...]:
    """The layers that a given head reads; empty where a fresh one is made."""
    path = Path(head or "", "config.json")
    plain = json.loads(path.read_text()) if head is not None and path.exists() else {}
    return tuple(plain.get("eagle_aux_hidden_state_layer_ids") or ())
