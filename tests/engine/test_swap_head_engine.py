"""Versions of a draft head in a running engine: published ones, other vocabularies, pre-emption, a killed engine.

float32 and greedy, so every comparison is token identity.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from engines import ALWAYS, bridge, build, call, close, during, generate, metric, promote_all, swap, until
from heads import random_head, random_weights

pytestmark = pytest.mark.engine


@pytest.mark.slow  # `test_a_version_may_draft_other_tokens` is its shorter sibling
def test_versions_of_a_head_with_the_targets_embedding_in_them(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """A published version; a payload with the target's embedding in it, which must stay as it is; captured samples."""
    import json

    import torch
    from safetensors.torch import save_file

    from drafter_online.architecture import base_of
    from drafter_online.samples import Sample
    from drafter_online.versions import Versions

    config = json.loads((model / "config.json").read_text())
    head = random_head(tmp_path / "head", model)
    store = Versions(tmp_path / "store")
    base = base_of(config)
    mine = json.loads((head / "config.json").read_text())
    for seed in (1, 2):
        store.publish(random_weights(config, seed), mine, base=base, target_version=0)
    store.publish(random_weights(config, 3), mine, base="another", target_version=0)
    options = {"proposal.drafters": ["suffix", "eagle3"], "proposal.head.model": str(head), **ALWAYS}
    options |= {"drafter.mode": "capture", "drafter.capture.share": 1.0, "proposal.head.canary_drafts": 20}
    llm = build(model, options, max_num_batched_tokens=64, enable_chunked_prefill=True, num_gpu_blocks_override=14)
    try:
        llm.collective_rpc(promote_all)
        out = during(llm, prompts, lambda: swap(llm, store.path(2)))
        assert out == plain["long"]
        info = call(llm, "info")["drafter"]
        assert info["version"] == 2 and info["last"]["verdict"] == "promoted" and not info["rolled_back"]
        assert [(e.version, e.verdict) for e in store.events()] == [(2, "promoted")]
        assert "not newer" in swap(llm, store.path(1))["error"]
        assert "is for the target" in swap(llm, store.path(3))["error"]
        for damage, words in ((lambda b: b[:-100], "truncated or altered"), (flipped, "does not match its checksum")):
            number = store.publish(random_weights(config, 5), mine, base=base, target_version=0)
            file = store.path(number) / "model.safetensors"
            file.write_bytes(damage(file.read_bytes()))
            refused: list[dict[str, Any]] = []
            out = during(llm, prompts[:2], lambda n=number, r=refused: r.append(swap(llm, store.path(n))))
            assert words in refused[0]["error"] and out == plain["long"][:4]
        shutil.rmtree(store.folder)
        assert "is not in" in swap(llm, store.path(number))["error"]
        # Embedding and LM head of another model: left out, never written.
        payload = random_weights(config, 4)
        payload["embed_tokens.weight"] = torch.randn(config["vocab_size"], config["hidden_size"])
        payload["lm_head.weight"] = torch.randn(config["vocab_size"], config["hidden_size"])
        poisoned = tmp_path / "poisoned"
        poisoned.mkdir()
        save_file(payload, poisoned / "model.safetensors")
        out = during(llm, prompts, lambda: swap(llm, poisoned, version=9, canary=False))
        assert out == plain["long"]
        assert metric(llm, "num_preemptions") > 0, "the cache was meant to be too small: swaps among preemptions"
        assert call(llm, "info")["drafter"]["version"] == 9
        stats = call(llm, "stats")
        assert not stats["faults"]
        drained = call(llm, "samples", dir=str(tmp_path / "samples"))
        assert drained["samples"] >= 24 and drained["held"] == 0, drained
        samples = [Sample.from_bytes(p.read_bytes()) for p in sorted((tmp_path / "samples").iterdir())]
        check_samples(samples, model, prompts)
    finally:
        close(llm)


def test_a_swap_while_a_request_is_preempted(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """New weights come between a request's preemption and its return; its samples say which drafted what."""
    import json

    from safetensors.torch import save_file
    from vllm import SamplingParams

    from drafter_online.samples import Sample

    def watch(worker: Any) -> None:
        from rollspec.engine.vllm.v2.install import bridge

        runner, swapper = worker.model_runner, bridge(worker).head.swapper
        execute = runner.execute_model
        runner.seen = []  # per step: version, preempted, resumed

        def observed(output: Any, *args: Any, **kwargs: Any) -> Any:
            begun = [new.req_id for new in output.scheduled_new_reqs]  # a request that comes back begins again
            runner.seen.append((swapper.version, sorted(output.preempted_req_ids or ()), begun))
            return execute(output, *args, **kwargs)

        runner.execute_model = observed

    def seen(worker: Any) -> Any:
        return worker.model_runner.seen

    def away(steps: list[Any]) -> set[str]:
        """Who is preempted after these steps."""
        out: set[str] = set()
        for _, preempted, resumed in steps:
            out = (out | set(preempted)) - set(resumed)
        return out

    head, other = random_head(tmp_path / "head", model), tmp_path / "other"
    other.mkdir()
    config = json.loads((model / "config.json").read_text())
    save_file(random_weights(config, 1), other / "model.safetensors")
    options = {"proposal.drafters": ["eagle3"], "proposal.head.model": str(head), **ALWAYS}
    options |= {"drafter.mode": "capture", "drafter.capture.share": 1.0}
    llm = build(model, options, max_num_batched_tokens=64, enable_chunked_prefill=True, num_gpu_blocks_override=14)
    try:
        llm.collective_rpc(watch)
        core, done, version = llm.llm_engine, {}, 0
        for i, prompt in enumerate(p for p in prompts for _ in range(2)):
            params = SamplingParams(temperature=0.0, max_tokens=160 - 7 * (i % 5), ignore_eos=True, detokenize=False)
            core.add_request(f"s-{i}", {"prompt_token_ids": prompt}, params)
        while core.has_unfinished_requests():
            for out in core.step():
                if out.finished:
                    done[int(out.request_id.split("-")[1])] = list(out.outputs[0].token_ids)
            (steps,) = llm.collective_rpc(seen)
            if not version and away(steps):
                version = swap(llm, other, version=7, canary=False)["version"]
        assert version == 7 and [done[i] for i in range(2 * len(prompts))] == plain["long"]
        (steps,) = llm.collective_rpc(seen)
        first = next(i for i, (v, _, _) in enumerate(steps) if v == 7)
        waiting = away(steps[:first])
        assert waiting, "no request was preempted when the new weights came"
        assert waiting <= {q for _, _, resumed in steps[first:] for q in resumed}, "and all of them came back"
        assert not call(llm, "stats")["faults"]
        call(llm, "samples", dir=str(tmp_path / "samples"))
        samples = [Sample.from_bytes(p.read_bytes()) for p in sorted((tmp_path / "samples").iterdir())]
        each = [v for v in (s.verify.draft_version.tolist() for s in samples) if v]
        assert {0, 7} in map(set, each) and all(v == sorted(v) for v in each), "old weights first, then the new ones"
    finally:
        close(llm)


def test_an_engine_killed_in_a_canary_comes_back_with_a_version_of_the_store(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    import json
    import os
    import signal

    from drafter_online.architecture import base_of
    from drafter_online.versions import Versions

    head = random_head(tmp_path / "head", model)
    config, mine = json.loads((model / "config.json").read_text()), json.loads((head / "config.json").read_text())
    options = {"proposal.drafters": ["eagle3"], "proposal.head.model": str(head), **ALWAYS}
    options |= {"drafter.mode": "idle", "drafter.dir": str(tmp_path), "drafter.publish_every": 1_000_000}
    options |= {"drafter.capture.share": 1.0, "proposal.head.canary_drafts": 100_000}
    store = Versions(tmp_path / "versions")
    for seed in (1, 2):
        store.publish(random_weights(config, seed), mine, base=base_of(config), target_version=0)
    store.record(1, "promoted")

    def on_canary(llm: Any, versions: tuple[int, ...]) -> bool:
        """Texts stay what they are, whichever weights run."""
        assert generate(llm, prompts) == plain["greedy"]
        info = call(llm, "info")["drafter"]
        assert info["refused"] == 0 and store.promoted() == 1
        return bool(info["version"] in versions and info["state"] == "canary")

    llm = build(model, options)
    try:
        until(lambda: on_canary(llm, (2,)), 240)
        manager = llm.llm_engine.engine_core.resources.engine_manager
        pids = {*llm.collective_rpc(lambda worker: os.getpid()), *(p.pid for p in manager.processes)}
        for pid in pids - {os.getpid()}:
            os.kill(pid, signal.SIGKILL)
    finally:
        close(llm)
    assert [(e.version, e.verdict) for e in store.events()] == [(1, "promoted")], (
        "a canary that was cut off has no verdict"
    )

    llm = build(model, options)
    try:
        # What was promoted, while the trainer takes the dead engine for one that tries the newer one; else that one.
        until(lambda: on_canary(llm, (1, 2)), 240)
        assert [(e.version, e.verdict) for e in store.events()] == [(1, "promoted")]
    finally:
        close(llm)


def flipped(data: bytes) -> bytes:
    """One bit of a weight is another."""
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]


def check_samples(samples: list[Any], model: Path, prompts: list[list[int]]) -> None:
    """Against what transformers computes for the same tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from rollspec.proposal.base import prompt_key

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    keys = {prompt_key(p): p for p in prompts}
    steps = 0
    for s in samples:
        prompt = keys[s.prompt_key]
        ids = s.input_ids.tolist()
        assert s.position_ids[0] == 0 and ids[: len(prompt)] == prompt
        assert s.loss_mask.tolist() == [i >= len(prompt) for i in range(len(ids))]
        assert s.temperature == 0.0 and s.response_length >= len(ids) - len(prompt)
        with torch.no_grad():
            out = target.model(s.input_ids[None], output_hidden_states=True)
        layers = (1, 2, 3)
        aux = torch.cat([out.hidden_states[i][0] for i in layers], dim=-1)
        torch.testing.assert_close(s.hidden_states, aux, rtol=2e-3, atol=2e-3)
        normed = target.model.norm(s.verifier_last_hidden_states)
        torch.testing.assert_close(normed, out.last_hidden_state[0], rtol=2e-3, atol=2e-3)
        logits = target.lm_head(out.last_hidden_state[0])
        at = 0
        for j in range(len(s.verify)):
            p, n, a = (int(x[j]) for x in (s.verify.position, s.verify.lengths, s.verify.accepted))
            said = ids[p + 1 : p + 1 + a]
            assert s.verify.proposed[at : at + a].tolist()[: len(said)] == said
            if a < n and p + 1 + a < len(ids):
                assert int(s.verify.proposed[at + a]) != ids[p + 1 + a], "a rejected token was emitted"
            assert int(s.verify.top_ids[at, 0]) == int(logits[p].argmax())
            torch.testing.assert_close(s.verify.top_logits[at, 0], logits[p].max(), rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(s.verify.logsumexp[at], logits[p].logsumexp(-1), rtol=2e-3, atol=2e-3)
            at += n
            steps += 1
    assert steps > 50 and {"suffix", "head"} <= {d for s in samples for d in s.verify.drafter}


def _drafts_of(worker: Any) -> list[int]:
    ids = bridge(worker).head.drafter.model.draft_id_to_target_id
    return [i + int(n) for i, n in enumerate(ids)]


def _drafts_as_vllm_would(worker: Any) -> bool:
    """Whether tokens and confidence over what the head can draft are those over the whole vocabulary."""
    import torch

    run = bridge(worker).head.drafter
    hidden = torch.randn(8, run.speculator.hidden_size, dtype=run.speculator.dtype)
    with torch.inference_mode():
        some, offsets = run._logits(hidden, 0)
        every = run.speculator.compute_draft_logits(hidden, 0).float()
    best = some.argmax(-1)
    same = torch.equal(best + offsets[best], every.argmax(-1))
    return some.shape[1] < every.shape[1] and same and torch.allclose(some.logsumexp(-1), every.logsumexp(-1))


def test_a_version_may_draft_other_tokens(
    model: Path, prompts: list[list[int]], plain: dict[str, Any], tmp_path: Path
) -> None:
    """A head of a part of the vocabulary: which part, comes with its weights."""
    import torch

    from drafter_online import head as heads
    from drafter_online.versions import Versions

    started = heads.save(heads.fresh(model, draft_vocab_size=64), tmp_path / "head", torch.float32)
    other = heads.fresh(model, draft_vocab_size=64, counts={t: 1 for t in range(100, 164)})
    weights = {n: t.contiguous() for n, t in heads.own_weights(other).items()}
    base = other.config.drafter_online["base"]
    Versions(tmp_path / "versions").publish(weights, heads.config_of(other), base=base, target_version=0)
    given = {"proposal.drafters": ["eagle3"], "proposal.head.model": str(started), "tuning.strategy": "static"}
    llm = build(model, {**given, "tuning.guard.enabled": False})
    try:
        assert llm.collective_rpc(_drafts_of)[0] == list(range(64))
        assert llm.collective_rpc(_drafts_as_vllm_would)[0]
        assert generate(llm, prompts) == plain["greedy"]
        answer = swap(llm, tmp_path / "versions" / "1", canary=False)
        assert "error" not in answer, answer
        assert generate(llm, prompts) == plain["greedy"]
        assert llm.collective_rpc(_drafts_of)[0] == list(range(100, 164))
        assert llm.collective_rpc(_drafts_as_vllm_would)[0]
        stats = call(llm, "stats")
        assert stats["drafted"] > 0 and not stats["faults"]
    finally:
        close(llm)
