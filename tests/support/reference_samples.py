"""Samples from a `transformers` model: the plain definition of what engines capture while they generate.

Slow (one forward per call) and exact; engines' captures are tested against it, and a buffer can be filled without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafter_online.samples import Sample, Verify, VerifyStep


def capture(
    model: Any,
    input_ids: Sequence[int],
    prompt_length: int,
    aux: Sequence[int],
    *,
    request_id: str,
    prompt_key: str = "",
    target_version: int = 0,
    steps: Sequence[VerifyStep] = (),
    **fields: Any,
) -> Sample:
    """What the target computes when it reads `input_ids`.

    Args:
        model: a causal language model of `transformers` with `model.model.layers` and `model.model.norm`.
        input_ids: prompt and response.
        prompt_length: tokens of the prompt.
        aux: auxiliary layers, in the convention of `samples`.
        request_id: of the sample; so `prompt_key`, `target_version` and further `fields`.
        steps: verify steps (`verify`).
    """
    import torch

    taken: dict[int, Any] = {}
    layers = list(model.model.layers)

    def keep(i: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...]) -> None:
            taken[i] = args[0][0].detach().to("cpu", copy=True)

        return hook

    hooks = [layers[i].register_forward_pre_hook(keep(i)) for i in sorted(set(aux)) if i < len(layers)]
    hooks.append(model.model.norm.register_forward_pre_hook(keep(len(layers))))
    ids = torch.tensor([list(input_ids)], dtype=torch.int64)  # [1, T]
    try:
        with torch.no_grad():
            model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Sample(
        input_ids=ids[0],
        hidden_states=torch.cat([taken[i] for i in aux], -1),  # [T, A*H]
        verifier_last_hidden_states=taken[len(layers)],  # [T, H]
        loss_mask=torch.arange(ids.shape[1]) >= prompt_length,
        position_ids=torch.arange(ids.shape[1]),
        prompt_key=prompt_key,
        request_id=request_id,
        target_version=target_version,
        response_length=ids.shape[1] - prompt_length,
        verify=Verify.gather(steps),
        **fields,
    )


def verify(
    model: Any,
    input_ids: Sequence[int],
    position: int,
    proposed: Sequence[int],
    *,
    k: int = 8,
    drafter: str = "head",
) -> VerifyStep:
    """What the target says about `proposed` after `input_ids[: position + 1]`. A proposal counts as accepted while it
    is the token that `input_ids` goes on with.

    Args:
        model: as in `capture`.
        input_ids: the whole sequence.
        position: index of the last token known before the step.
        proposed: K token ids.
        k: logits kept per position.
        drafter: who proposed.
    """
    import torch

    known = list(input_ids[: position + 1])
    with torch.no_grad():
        read = torch.tensor([known + list(proposed[:-1])], device=model.device)
        logits = model(input_ids=read, use_cache=False).logits[0, position:].float().cpu()  # [K, V]
    top = logits.topk(min(k, logits.shape[1]), -1)
    accepted = min(_accepted(input_ids, position, proposed), len(proposed))
    return VerifyStep(position, drafter, list(proposed), accepted, top.indices, top.values, logits.logsumexp(-1))


def proposals(drafter: Any, sample: Sample, k: int) -> Any:
    """What a greedy drafter proposes after every token: [T, k] token ids, row t after `input_ids[: t + 1]`.

    Row 0 is -1: an EAGLE-3 head drafts from the hidden state before the last known token, and there is none.
    """
    import dataclasses

    import torch

    from drafter_online.modes import evaluating
    from drafter_online.packing import pack

    batch = pack([sample], steps=k).to(drafter.module.device, drafter.module.dtype)
    columns = batch.input_ids.shape[1]
    if drafter.kind != "eagle3":
        raise ValueError("only a head drafts at every place of a sequence in one pass")
    to_draft = drafter.to_draft
    to_target = None if to_draft is None else (to_draft >= 0).nonzero()[:, 0]
    found: list[Any] = []
    with evaluating(drafter.module):
        for i in range(k):
            # Each pass is one step deeper, with what the passes before it proposed as the inputs of its steps.
            led = dataclasses.replace(
                batch,
                replace_column=torch.arange(columns).repeat(i),
                replace_step=torch.arange(1, i + 1).repeat_interleave(columns),
                replace_token=torch.cat(found) if found else torch.zeros(0, dtype=torch.int64),
            ).to(drafter.module.device)
            ids = logits(drafter, led, i + 1)[i][0].argmax(-1).cpu()
            found.append(ids if to_target is None else to_target[ids])
    rows = torch.stack(found, -1)  # [T - 1, k]
    return torch.cat([torch.full((1, k), -1), rows])


def logits(drafter: Any, batch: Any, steps: int, interrupt: Any = None) -> list[Any]:
    """A drafter's logits [1, L, V] of every step, all at once."""
    return [drafter.score(x) for x in drafter.states(batch, steps, interrupt)]


def targets(drafter: Any, batch: Any) -> Any:
    """Its target's logits [1, L, V], over the drafter's vocabulary."""
    return drafter.targets(batch.verifier_last_hidden_states[0])[None]


def replay(model: Any, drafter: Any, sample: Sample, k: int, *, keep: int = 8) -> Sample:
    """The sample with the verify steps an engine would have had, had it drafted `k` tokens at a time with `drafter`.

    Args:
        model: the target, as in `capture`.
        drafter: an EAGLE-3 drafter.
        sample: a whole sequence.
        k: drafted tokens per step.
        keep: logits kept per position.
    """
    import dataclasses

    drafts = proposals(drafter, sample, k).tolist()
    ids = sample.input_ids.tolist()
    at = max(1, int(sample.loss_mask.int().argmax()))  # prefill emits the first response token
    positions = []
    while at < len(ids) - 1:
        positions.append(at)
        at += _accepted(ids, at, drafts[at]) + 1
    steps = verify_all(model, ids, positions, [drafts[p] for p in positions], k=keep)
    return dataclasses.replace(sample, verify=Verify.gather(steps))


def verify_all(
    model: Any,
    input_ids: Sequence[int],
    positions: Sequence[int],
    proposed: Sequence[Sequence[int]],
    *,
    k: int = 8,
    drafter: str = "head",
) -> list[VerifyStep]:
    """`verify` of many steps of one sequence in one pass: each step's proposals stand behind the sequence, and see it
    up to their own position and each other.
    """
    import torch

    if not positions:
        return []
    ids = list(input_ids)
    tokens, places, blocks = list(ids), list(range(len(ids))), []
    for p, said in zip(positions, proposed, strict=True):
        blocks.append((p, len(tokens), len(said) - 1))  # the last proposal need not be read
        tokens += said[:-1]
        places += range(p + 1, p + len(said))
    n, base = len(tokens), len(ids)
    seen = torch.zeros(n, n, dtype=torch.bool)
    seen[:base, :base] = torch.ones(base, base, dtype=torch.bool).tril()
    for p, start, m in blocks:
        seen[start : start + m, : p + 1] = True
        seen[start : start + m, start : start + m] = torch.ones(m, m, dtype=torch.bool).tril()
    mask = torch.zeros(n, n, dtype=model.dtype).masked_fill_(~seen, torch.finfo(model.dtype).min)
    with torch.no_grad():
        logits = model(
            input_ids=torch.tensor([tokens], device=model.device),
            position_ids=torch.tensor([places], device=model.device),
            attention_mask=mask[None, None].to(model.device),
            use_cache=False,
        ).logits[0].float().cpu()  # fmt: skip
    steps = []
    for (p, start, m), said in zip(blocks, proposed, strict=True):
        rows = torch.cat([logits[p : p + 1], logits[start : start + m]])  # [K, V]
        top = rows.topk(min(k, rows.shape[1]), -1)
        accepted = min(_accepted(ids, p, said), len(said))
        steps.append(VerifyStep(p, drafter, list(said), accepted, top.indices, top.values, rows.logsumexp(-1)))
    return steps


def _accepted(ids: Sequence[int], position: int, proposed: Sequence[int]) -> int:
    """Proposals that are the tokens which `ids` goes on with after `position`."""
    goes_on = list(ids[position + 1 : position + 1 + len(proposed)])
    return next((i for i, (a, b) in enumerate(zip(proposed, goes_on, strict=False)) if a != b), len(goes_on))
