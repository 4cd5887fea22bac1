"""Drafters under training: logits for a packed batch, targets from the target's hidden states, weights to publish.

Two kinds, one interface: `Eagle3` runs the `speculators` library's training-time-test forward as it is; `DraftModel` is
a separate small language model of the same vocabulary (Online Speculative Decoding, arXiv 2310.07177).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_online import architecture, attention
from drafter_online import head as heads
from drafter_online.errors import HeadError, Preempted, TrainingError
from drafter_online.packing import Batch
from drafter_online.versions import Kind


class Eagle3:
    """An EAGLE-3 head (`head.fresh`, `head.load`).

    The library feeds emitted tokens into the later steps; a hook on its embedding puts in the proposals of the columns
    that had an error, and in the place of its LM head stands one that keeps what it is given: which logits are
    computed, and when, is the objective's.
    """

    kind: Kind = "eagle3"
    trained_head: tuple[Tensor, ...] = ()  # parameters of `score` that are trained

    def __init__(self, head: Any) -> None:
        attention.use(head)
        self.head = self.module = head  # of `module` the parameters that require gradients are trained
        self.vocabulary = int(head.draft_vocab_size)  # tokens that it can draft
        self.base: str = head.config.drafter_online["base"]
        self.aux: tuple[int, ...] = tuple(head.config.eagle_aux_hidden_state_layer_ids)  # layers of the target it reads
        self.hidden = int(head.config.target_hidden_size or head.config.transformer_layer_config.hidden_size)

    def refresh(self, parts: Mapping[str, Tensor], counts: Mapping[int, int] | None = None) -> None:
        """Follow the target's `embed`, `norm` and `lm_head`, as far as they are given; `counts` as `head.refresh`."""
        heads.refresh(self.head, **parts, counts=counts)

    @property
    def to_draft(self) -> Tensor | None:
        """Draft id by target id [V], -1 where the head has no such token; None: the same vocabulary."""
        if not self.head.use_draft_vocab:
            return None
        ids = torch.full((len(self.head.t2d),), -1, dtype=torch.int64)
        ids[self.head.t2d.cpu()] = torch.arange(self.head.draft_vocab_size)
        return ids

    def score(self, states: Tensor) -> Tensor:
        """The drafter's logits [N, V] of its states [N, H]."""
        return self.head.lm_head(states)  # type: ignore[no-any-return]

    def states(self, batch: Batch, steps: int, interrupt: Callable[[], bool] | None = None) -> list[Tensor]:
        """What `score` reads, [1, L, H] of every step. Raises `Preempted` when `interrupt` says so before the last."""
        found: list[Tensor] = []
        step = -1

        def enter(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal step
            step += 1
            if interrupt is not None and interrupt():
                raise Preempted
            here = batch.replace_step == step
            if step == 0 or not bool(here.any()):
                return args
            ids = args[0].clone()
            ids[0, batch.replace_column[here]] = batch.replace_token[here]
            return (ids, *args[1:])

        def keep(states: Tensor) -> Tensor:
            found.append(states)
            return states[..., :1]

        hook = self.head.embed_tokens.register_forward_pre_hook(enter)
        self.head.lm_head.forward = keep
        # On an accelerator the library compiles this forward. The plain one is called: compiling would stall an engine
        # that trains in its worker, and torch's switch for it is global, so other threads would see it.
        compiled = type(self.head).forward
        plain = getattr(compiled, "_torchdynamo_orig_callable", compiled)
        try:
            with attention.documents(batch.document_ids):
                plain(
                    self.head,
                    hidden_states=batch.hidden_states,
                    input_ids=batch.input_ids,
                    document_ids=batch.document_ids,
                    position_ids=batch.position_ids,
                    ttt_steps=steps,
                )
        finally:
            hook.remove()
            del self.head.lm_head.forward  # the class's own again
        if len(found) != steps:
            raise TrainingError(
                f"speculators' forward ran its LM head {len(found)} times in {steps} steps; this "
                "version of the library is not supported."
            )
        return found

    def targets(self, states: Tensor) -> Tensor:
        """The target's logits [N, V] of its last hidden states [N, H], without gradient."""
        with torch.no_grad():
            return self.head.verifier_lm_head(self.head.verifier_norm(states))  # type: ignore[no-any-return]

    def weights(self, dtype: Any = None) -> dict[str, Tensor]:
        """What a version holds."""
        return heads.own_weights(self.head, dtype)

    def config(self, dtype: Any = None) -> dict[str, Any]:
        """config.json of a version."""
        return heads.config_of(self.head, dtype)


class DraftModel:
    """A causal language model of `transformers` that drafts for a target with the same vocabulary.

    The final norm and LM head of `target`, a folder, turn hidden states into targets. Raises `HeadError` where the
    vocabularies differ, or the target cannot be read.
    """

    kind: Kind = "draft_model"
    to_draft: Tensor | None = None  # the vocabulary is the target's
    aux: tuple[int, ...] = ()  # it reads tokens alone

    def __init__(self, model: Any, target: str | Path) -> None:
        from speculators.models.utils import GEMMA_STYLE_FINAL_NORM_MODEL_TYPES

        verifier = architecture.target_config(target)
        if model.config.vocab_size != verifier.vocab_size:
            raise HeadError(
                f"the draft model has {model.config.vocab_size} tokens and its target {target} "
                f"{verifier.vocab_size}; a draft model must have its target's vocabulary."
            )
        _, norm, lm_head = heads.of_target(target)
        self.model = self.module = model
        self.vocabulary = int(model.config.vocab_size)
        self.base = architecture.base_of(verifier)
        self.hidden = int(verifier.hidden_size)
        self._eps = float(getattr(verifier, "rms_norm_eps", 1e-6))
        self._gain = 1.0 if verifier.model_type in GEMMA_STYLE_FINAL_NORM_MODEL_TYPES else 0.0
        self._norm = norm.float() + self._gain  # [H]; goes where the model is
        self._lm_head = lm_head.float()  # [V, H]

    def refresh(self, parts: Mapping[str, Tensor], counts: Mapping[int, int] | None = None) -> None:
        """As `Eagle3.refresh`; a target with tied weights has no LM head of its own."""
        if (norm := parts.get("norm")) is not None:
            self._norm.copy_(norm + self._gain)
        if (lm_head := parts.get("lm_head", parts.get("embed"))) is not None:
            self._lm_head.copy_(lm_head)

    @property
    def trained_head(self) -> tuple[Tensor, ...]:
        """As `Eagle3.trained_head`."""
        return tuple(p for p in self.model.get_output_embeddings().parameters() if p.requires_grad)

    def score(self, states: Tensor) -> Tensor:
        """As `Eagle3.score`, from the last hidden states as the models of `transformers` do it."""
        logits: Tensor = self.model.get_output_embeddings()(states)
        config = self.model.config
        if scaling := getattr(config, "logits_scaling", None):  # Granite
            logits = logits / scaling
        if scale := getattr(config, "logit_scale", None):  # Cohere
            logits = logits * scale
        if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
            logits = (logits / cap).tanh() * cap
        return logits

    def states(self, batch: Batch, steps: int, interrupt: Callable[[], bool] | None = None) -> list[Tensor]:
        """As `Eagle3.states`; a model of sequences has one step."""
        if interrupt is not None and interrupt():
            raise Preempted
        d = batch.document_ids[0]
        out = self.model.base_model(
            input_ids=batch.input_ids,
            attention_mask=(d[:, None] == d[None, :]).tril()[None, None],  # causal within a document
            position_ids=batch.position_ids,
            use_cache=False,
        )
        return [out.last_hidden_state]

    def targets(self, states: Tensor) -> Tensor:
        """As `Eagle3.targets`."""
        with torch.no_grad():
            self._norm, self._lm_head = self._norm.to(states.device), self._lm_head.to(states.device)
            y = states.float()  # [N, H]
            y = y * (y.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt() * self._norm
            return y @ self._lm_head.T

    def weights(self, dtype: Any = None) -> dict[str, Tensor]:
        """As `Eagle3.weights`; tied weights are written once."""
        own: dict[int, tuple[str, Tensor]] = {}
        for name, t in self.model.state_dict().items():
            own.setdefault(t.data_ptr(), (name, t.detach()))
        return {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in own.values()}

    def config(self, dtype: Any = None) -> dict[str, Any]:
        """As `Eagle3.config`."""
        plain: dict[str, Any] = self.model.config.to_dict()
        name = str(dtype or self.model.dtype).removeprefix("torch.")
        return {**plain, "dtype": name, "torch_dtype": name}


TrainedDrafter = Eagle3 | DraftModel


def load(folder: str | Path, target: str | Path | None) -> TrainedDrafter:
    """The drafter in a folder, for training in float32: an EAGLE-3 head, or else a draft model, which needs `target`.

    Raises:
        HeadError: it cannot be read, or does not fit the target.
    """
    if architecture.is_draft_model(folder):
        from transformers import AutoModelForCausalLM

        if target is None:
            raise HeadError("a draft model does not say what it drafts for; give the target.")
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError, KeyError) as e:
            raise HeadError(f"{folder} is no draft model that transformers can read ({e}).") from e
        return DraftModel(model, target)
    return Eagle3(heads.load(folder, target))
