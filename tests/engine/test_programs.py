"""Any vLLM program: `ROLLSPEC=default` and nothing else. Greedy outputs are those of an engine without it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import young_head
from engines import KV_BYTES, MAX_LEN, build, close
from models import chats, sums
from served import TRL, Server, counted, here

pytestmark = pytest.mark.engine

APPS = Path(__file__).with_name("apps")
MAX_TOKENS = 64
ENGINE: dict[str, Any] = {
    "dtype": "float32", "enforce_eager": True, "max_model_len": MAX_LEN, "max_num_seqs": 16,
    "enable_prefix_caching": False, "kv_cache_memory_bytes": KV_BYTES,
}  # fmt: skip


REAL = pytest.mark.parametrize(
    "model",
    [None, pytest.param("smollm2", marks=pytest.mark.slow)],
    ids=["small", "smollm2"],
    indirect=True,
    scope="module",
)
"""What `vllm serve` promises, it keeps with a real language model, too."""


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, model: Path) -> Path:
    """The example's policy, or the model that a test asks for by name."""
    from examples.models import resolve

    return resolve(name) if (name := getattr(request, "param", None)) else model


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    return sums(model)


@pytest.fixture(scope="module")
def reference(model: Path, prompts: list[list[int]]) -> list[Any]:
    """What an engine without rollspec says, greedily: one vLLM completion per prompt."""
    from vllm import SamplingParams

    llm = build(model, None)
    try:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=1)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [o.outputs[0] for o in outputs]
    finally:
        close(llm)


def run_app(
    run_bounded: Callable[..., Any], name: str, model: Path, prompts: list[list[int]], folder: Path
) -> dict[str, Any]:
    task = folder / "task.json"
    engine = {**ENGINE, "model": str(model)}
    task.write_text(json.dumps({"engine": engine, "prompts": prompts, "max_tokens": MAX_TOKENS}))
    done = run_bounded([sys.executable, APPS / name, task], 180, env={"ROLLSPEC": "default"})
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith('{"tokens"')))  # type: ignore[no-any-return]


@pytest.mark.supports("vLLM", "any program", "drafts")
@pytest.mark.parametrize("name", ["llm_app.py", "async_app.py"])
def test_a_program_needs_nothing_but_the_switch(
    name: str,
    model: Path,
    prompts: list[list[int]],
    reference: list[Any],
    run_bounded: Callable[..., Any],
    tmp_path: Path,
) -> None:
    result = run_app(run_bounded, name, model, prompts, tmp_path)
    assert result["tokens"] == [list(r.token_ids) for r in reference for _ in range(2)]
    assert result["accepted"][0] > 0
    if "parts" in result:
        assert result["parts"] > 1, "nothing was streamed"


# ---- vllm serve
# --------------------------------------------------------------------------------------------------------


GLOO = ("--worker-extension-cls", "gloo_transfer.Worker")
"""It stands in for NCCL."""


@pytest.fixture(scope="module")
def serving(model: Path) -> Iterator[Server]:
    """`vllm serve` as `trl vllm-serve` starts it."""
    server = Server(model, *GLOO, program=TRL, ROLLSPEC="default", VLLM_LOGGING_LEVEL="INFO", PYTHONPATH=here())
    try:
        server.wait()
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def server(serving: Server) -> str:
    """Its base URL."""
    return serving.url


@pytest.fixture(scope="module")
def client(server: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0, timeout=120)


def test_serve_starts_without_a_warning_of_its_scheduler(serving: Server) -> None:
    """vLLM warns so where a scheduler class of somebody's own schedules without overlap."""
    said = serving.said()
    assert "(EngineCore" in said, "what the scheduler's process says is not here"
    assert "degraded performance" not in said and "custom scheduler" not in said, said


@REAL
def test_serve_answers_as_without(client: Any, prompts: list[list[int]], reference: list[Any]) -> None:
    """One request with all prompts, twice each; then each streamed."""
    kwargs = {"model": "policy", "temperature": 0.0, "max_tokens": MAX_TOKENS}
    answer = client.completions.create(prompt=[p for p in prompts for _ in range(2)], **kwargs)
    assert [c.text for c in answer.choices] == [r.text for r in reference for _ in range(2)]
    for prompt, r in zip(prompts, reference, strict=True):
        parts = [x.choices[0].text for x in client.completions.create(prompt=prompt, stream=True, **kwargs)]
        assert "".join(parts) == r.text
    # Several tokens may come at once: that is what acceptance looks like to a client. And vLLM's front end joins what
    # the engine said while it was busy, so that a short answer may come whole.
    long = kwargs | {"max_tokens": 240, "extra_body": {"ignore_eos": True}}
    assert len(list(client.completions.create(prompt=prompts[0], stream=True, **long))) > 1


@REAL
def test_serve_stop_strings_logprobs_and_seeds(
    server: str, client: Any, model: Path, prompts: list[list[int]], reference: list[Any]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    kwargs = {"model": "policy", "max_tokens": MAX_TOKENS}
    client.completions.create(prompt=prompts, temperature=0.0, **kwargs)  # the drafter knows what follows the stops
    before, counted = generated(server), 0
    for _ in range(8):
        for prompt, r in zip(prompts, reference, strict=True):
            counted += stopped(client, tokenizer, prompt, r)
        if until(lambda least=before + counted: generated(server) > least, 5):
            break
    else:
        pytest.fail("no step accepted a token past a stop string")
    sampled = client.completions.create(prompt=prompts, temperature=1.0, seed=1, n=2, **kwargs).choices
    assert len(sampled) == 2 * len(prompts) and {c.finish_reason for c in sampled} <= {"stop", "length"}
    # A seed is one text, whatever was drafted meanwhile.
    seeded = [client.completions.create(prompt=prompts[0], temperature=1.0, seed=5, **kwargs) for _ in range(3)]
    assert len({answer.choices[0].text for answer in seeded}) == 1


def stopped(client: Any, tokenizer: Any, prompt: list[int], r: Any) -> int:
    """Ask twice with a stop string in the middle of what is said: the same text, log-probs and usage as without drafts.
    Returns the tokens that both answers count.
    """
    kwargs = {"model": "policy", "max_tokens": MAX_TOKENS, "temperature": 0.0}
    stop = r.text[len(r.text) // 2 :][:2]
    answer = client.completions.create(prompt=prompt, stop=[stop], logprobs=1, **kwargs)
    choice = answer.choices[0]
    assert choice.text == r.text[: r.text.index(stop)] and choice.finish_reason == "stop"
    expected = [step[t].logprob for t, step in zip(r.token_ids, r.logprobs, strict=True)]
    got = choice.logprobs.token_logprobs
    assert got == pytest.approx(expected[: len(got)], abs=1e-3)
    # Tokens that a step accepted past the stop string are not counted: as many as without drafts.
    needed = next(n for n in range(1, len(r.token_ids) + 1) if stop in tokenizer.decode(r.token_ids[:n]))
    assert answer.usage.completion_tokens == len(got) == needed
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = client.completions.create(prompt=prompt, stop=[stop], **options, **kwargs)
    assert "".join(part.choices[0].text for part in parts) == choice.text
    assert last.usage.completion_tokens == needed
    return 2 * needed


@REAL
def test_serve_guides_json(client: Any, prompts: list[list[int]]) -> None:
    """A number is JSON, and all the JSON that the tests' tokens can say. Drafted from the second request on."""
    schema = {"type": "integer", "minimum": 100, "maximum": 999999}
    kwargs = {"model": "policy", "max_tokens": MAX_TOKENS, "extra_body": {"structured_outputs": {"json": schema}}}
    greedy = [client.completions.create(prompt=prompts, temperature=0.0, **kwargs).choices for _ in range(2)]
    assert [c.text for c in greedy[0]] == [c.text for c in greedy[1]]
    sampled = client.completions.create(prompt=prompts, temperature=1.0, n=4, **kwargs).choices
    for choice in (*greedy[0], *sampled):
        assert choice.finish_reason == "stop" and 100 <= json.loads(choice.text) <= 999999, choice


@REAL
def test_serve_chats_as_without(server: str, client: Any, prompts: list[list[int]], reference: list[Any]) -> None:
    """Log-probs, streams and their usage, a seed, several choices, and a JSON schema as OpenAI's clients give it."""
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before, chat = counted(server, accepted), client.chat.completions.create
    kwargs = {"model": "policy", "max_tokens": MAX_TOKENS}
    for messages, prompt, r in zip(chats(), prompts, reference, strict=True):
        answer = chat(messages=messages, temperature=0.0, logprobs=True, **kwargs)
        choice = answer.choices[0]
        assert choice.message.content == r.text
        expected = [step[t].logprob for t, step in zip(r.token_ids, r.logprobs, strict=True)]
        assert [x.logprob for x in choice.logprobs.content] == pytest.approx(expected, abs=1e-3)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *parts, last = chat(messages=messages, temperature=0.0, **options, **kwargs)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == r.text
        for usage in (answer.usage, last.usage):
            assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(r.token_ids))
    assert until(lambda: counted(server, accepted) > before), "nothing that was drafted was accepted"
    seeded = [chat(messages=messages, temperature=1.0, seed=5, **kwargs) for _ in range(3)]
    assert len({answer.choices[0].message.content for answer in seeded}) == 1
    schema = {"name": "sum", "schema": {"type": "integer", "minimum": 100, "maximum": 999999}}
    guided = {"response_format": {"type": "json_schema", "json_schema": schema}}
    for choice in chat(messages=messages, temperature=1.0, n=4, **guided, **kwargs).choices:
        assert choice.finish_reason == "stop" and 100 <= json.loads(choice.message.content) <= 999999, choice


@REAL
def test_serve_ends_what_its_client_gives_up(
    server: str, client: Any, prompts: list[list[int]], reference: list[Any]
) -> None:
    before, longest, samples = generated(server), 180, 8
    for prompt in prompts:
        kwargs = {"model": "policy", "temperature": 1.0, "max_tokens": longest, "extra_body": {"ignore_eos": True}}
        with client.completions.create(prompt=prompt, n=samples, stream=True, **kwargs) as stream:
            next(iter(stream))
    assert until(lambda: counted(server, "vllm:num_requests_running") == 0), "it still runs"
    time.sleep(1.0)  # until it is counted
    assert generated(server) - before < 0.9 * len(prompts) * samples * longest, "it was not aborted"
    after = client.completions.create(prompt=prompts, model="policy", temperature=0.0, max_tokens=MAX_TOKENS)
    assert [c.text for c in after.choices] == [r.text for r in reference]


def generated(server: str) -> float:
    """Tokens that came out of the engine so far, those past a stop string, too."""
    return counted(server, "vllm:generation_tokens_total")


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.5)
    return met


@pytest.mark.supports("vLLM", "any program", "metrics")
def test_serve_shows_its_metrics(server: str, client: Any, prompts: list[list[int]]) -> None:
    import requests
    from prometheus_client.parser import text_string_to_metric_families

    client.completions.create(model="policy", prompt=prompts, temperature=0.0, max_tokens=MAX_TOKENS)
    end = time.monotonic() + 30
    while True:
        text = requests.get(f"{server}/metrics", timeout=10).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        value = {s.name: s.value for s in samples if s.labels.get("model_name") == "policy"}
        if value.get("rollspec_accept_accepted_total", 0) > 0:
            break
        assert time.monotonic() < end, "nothing of rollspec at /metrics"
        time.sleep(0.5)
    rates = {s.labels["drafter"]: s.value for s in samples if s.name == "rollspec_accept_rate_by_drafter"}
    assert rates.keys() <= {"group", "global"} and 0 < max(rates.values()) <= 1
    assert value["rollspec_rollout_speculating"] == 1 and "vllm:num_requests_running" in value


def test_trl_generates_with_the_server(server: str, prompts: list[list[int]], reference: list[Any]) -> None:
    """TRL's own client, and the operations that `rollspec_trl` asks of a server."""
    client_module = pytest.importorskip("trl.generation.vllm_client")
    from rollspec_trl.engines import Server

    from rollspec.proposal.base import prompt_key

    engine = Server(server)
    assert engine.call("info")["state"] == "suffix"
    assert engine.call("set_version", {"version": 3}) == {"version": 3}
    client = client_module.VLLMClient(base_url=server, connection_timeout=10)
    twice = [p for p in prompts for _ in range(2)]
    out = client.generate(twice, temperature=0.0, max_tokens=MAX_TOKENS, logprobs=0)
    assert out["completion_ids"] == [list(r.token_ids) for r in reference for _ in range(2)]
    items = [[prompt_key(p), prompt_key(c), 1.0] for p, c in zip(twice, out["completion_ids"], strict=True)]
    assert engine.call("rewards", {"items": items})["matched"] == len(items)
    stats = engine.call("stats")
    assert stats["accepted"] > 0 and stats["version"] == 3


def trl_job(run_bounded: Callable[..., Any], server: str, model: Path, folder: Path) -> dict[str, Any]:
    """What three steps of a TRL job with this server left behind; its weights are those of another policy then."""
    pytest.importorskip("trl")
    out = folder / "result.json"
    command = [sys.executable, APPS / "trl_server_app.py", model, server, out]
    done = run_bounded(command, 300, env={"PYTHONPATH": here(), "VLLM_HOST_IP": "127.0.0.1"})
    assert done.returncode == 0, done.stdout[-4000:]
    result: dict[str, Any] = json.loads(out.read_text())
    steps = result["steps"] = [row for row in result["log"] if "loss" in row]
    assert [row["rollspec/policy/version"] for row in steps] == [0, 1, 2]
    for row in steps:
        assert row["rollspec/history/rewarded"] == 8
        assert row["rollspec/faults"] == 0, {k: v for k, v in row.items() if "fault" in k}
        assert row["rollspec/health/nan_logprobs"] == 0 and row["rollspec/health/logprob_corr"] > 0.999
    return result


@pytest.mark.supports("TRL", "server", "drafts", "policy versions", "metrics")
def test_a_trl_job_with_a_server_tells_it_versions_and_rewards(
    server: str, model: Path, run_bounded: Callable[..., Any], tmp_path: Path
) -> None:
    """The last test of this server."""
    from rollspec_trl.engines import Server

    Server(server).call("stats")  # what was counted before is not this job's
    result = trl_job(run_bounded, server, model, tmp_path)
    assert result["steps"][1]["rollspec/accept/accepted"] > 0
    first, stale, synced = result["gaps"]
    assert max(first, synced) < 1e-5 < 1e-3 < stale, "the trainer's weights are there after a sync, not before"


@pytest.mark.supports("TRL", "server", "draft head")
@pytest.mark.slow  # the job above and `test_online_engine.py` are its shorter siblings
def test_a_server_trains_its_head_while_the_trainer_computes(
    model: Path, prompts: list[list[int]], run_bounded: Callable[..., Any], tmp_path: Path
) -> None:
    client_module = pytest.importorskip("trl.generation.vllm_client")
    from rollspec_trl.engines import Server as Asked

    config = json.dumps({"rollspec": {"preset": "long_tail", **young_head.SETTINGS, **young_head.VERIFIED}})
    server = Server(model, *GLOO, "--additional-config", config, program=TRL, PYTHONPATH=here())
    try:
        server.wait()
        steps = trl_job(run_bounded, server.url, model, tmp_path)["steps"]
        assert young_head.totals(steps, "captured")["captured"] > 0, steps
        asked, client = Asked(server.url), client_module.VLLMClient(base_url=server.url, connection_timeout=10)

        def head() -> dict[str, Any]:
            found: dict[str, Any] = asked.call("info")["drafter"]
            return found

        def swapped() -> bool:
            client.generate(prompts[:2], max_tokens=16)  # weights are swapped in when a step begins
            return bool(head()["version"])

        assert until(lambda: head()["training"].get("steps", 0) >= 2, 120), head()
        assert until(swapped, 60) and head()["training"]["error"] is None, head()
    finally:
        print(*(line for line in server.said().splitlines() if "rollspec: " in line), sep="\n")
        server.end()
