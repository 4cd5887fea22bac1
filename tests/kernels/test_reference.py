"""The kernels that decide tokens against naive loops in plain Python, without Triton."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from installed import needs_vllm
from vllm_cpu_v2 import installation, noise
from vllm_cpu_v2.kernels import batch, rejection, sampling

M32 = 0xFFFFFFFF
VOCAB, K = 23, 3


def murmur3(words: list[int]) -> int:
    """The published algorithm over 32-bit words."""
    h = 0
    for k in words:
        k = k * 0xCC9E2D51 & M32
        k = (k << 15 | k >> 17) & M32
        h ^= k * 0x1B873593 & M32
        h = (h << 13 | h >> 19) & M32
        h = h * 5 + 0xE6546B64 & M32
    h ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h ^= h >> shift
        h = h * factor & M32
    return h


def gumbel(seed: int, position: int, token: int) -> float:
    u = (murmur3([seed & M32, seed >> 32 & M32, position & M32, token]) + 0.5) / 2**32
    return -math.log(-math.log1p(-u))


def philox(seed: int, offset: int) -> float:
    c, k = [offset & M32, offset >> 32 & M32, 0, 0], [seed & M32, seed >> 32 & M32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & M32, a >> 32 ^ c[3] ^ k[1], a & M32]
        k = [k[0] + 0x9E3779B9 & M32, k[1] + 0xBB67AE85 & M32]
    return max((c[0] if c[0] < 2**31 else M32 - c[0]) * 4.6566127342e-10, 4.6566127342e-10)


@pytest.mark.parametrize("seed", [0, 7, -1, 2**62 + 99, -(2**63)])
def test_noise(seed):
    seeds, positions = np.array([seed, seed]), np.array([3, (1 << 30) + 5])
    expected = [[gumbel(seed, p, t) for t in range(VOCAB)] for p in positions.tolist()]
    np.testing.assert_allclose(noise.gumbel(seeds, positions, VOCAB), expected, rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(noise.gumbel(seeds, positions, VOCAB, fp64=True).std(), np.std(expected), rtol=0.5)
    assert noise.uniform(seeds, positions).tolist() == pytest.approx([philox(seed, p) for p in positions.tolist()])


@pytest.mark.parametrize("scale", [0.01, 3.0, 50.0])
@pytest.mark.parametrize("odd", [None, -np.inf, np.inf, np.nan])
def test_tokens_whose_noise_is_not_computed_cannot_win(scale, odd):
    rng = np.random.default_rng(0)
    for vocab in (VOCAB, 3000, 40_000):
        logits = (rng.standard_normal((4, vocab)) * scale).astype(np.float32).round(1)  # some are equal
        if odd is not None:
            logits[0], logits[1, 5], logits[2, 1::7] = -np.inf, odd, odd
        seeds, positions = rng.integers(-(2**62), 2**62, 4), rng.integers(0, 1000, 4)
        expected = (noise.gumbel(seeds, positions, vocab) + logits).argmax(-1)
        drawn = sampling.draw(torch.from_numpy(logits), np.ones(4, np.float32), seeds, positions, False, False)
        assert drawn.tolist() == expected.tolist()


def test_noise_is_gumbel():
    values = noise.gumbel(np.arange(64), np.arange(64), 4000)
    assert values.mean() == pytest.approx(0.5772, abs=0.01)
    assert values.std() == pytest.approx(math.pi / 6**0.5, abs=0.01)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("apart", [0.3, 1.0, 3.0])
def test_a_draft_with_the_targets_noise_is_its_token_as_often_as_is_proved(seed, apart):
    """At least (1 - d) / (1 + d), d the total variation (Daliri et al., arXiv:2408.07978)."""
    rng, n = np.random.default_rng(seed), 10_000
    logits = rng.normal(0, 2, VOCAB)
    p, q = (np.array(softmax(row.tolist())) for row in (logits, logits + apart * rng.normal(0, 1, VOCAB)))
    values = noise.gumbel(rng.integers(-(2**62), 2**62, n), np.arange(n), VOCAB)
    same = ((values + np.log(p)).argmax(1) == (values + np.log(q)).argmax(1)).mean()
    d = 0.5 * np.abs(p - q).sum()
    # A token wins both where its exponential clock is the first of both: 1 / sum_y max(p_y / p_x, q_y / q_x).
    expected = (1 / np.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum()
    assert (1 - d) / (1 + d) <= expected <= 1 - d
    assert same == pytest.approx(expected, abs=4 * (0.25 / n) ** 0.5)


def launch_sample(logits, slots, temperatures, seeds, pos, **options):
    argmax, maxima = torch.full((len(logits), 2), -5), torch.full((len(logits), 2), float("nan"))
    sampling.gumbel_sample(
        argmax, 2, maxima, 2, options.pop("cache", None), 0, 0, options.pop("column", None), logits, VOCAB, logits,
        VOCAB, slots, seeds, pos, temperatures, VOCAB, IS_DRAFTING=options.pop("drafting", False),
        APPLY_TEMPERATURE=options.pop("scale", False), USE_FP64=False, PER_TOKEN_COL=False,
    )  # fmt: skip
    return argmax.gather(1, maxima.argmax(1, keepdim=True)).view(-1).tolist()


@pytest.mark.parametrize("drafting", [False, True])
def test_gumbel_sample(drafting):
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(0, 1, (200, VOCAB)).astype(np.float32))
    slots = torch.from_numpy(rng.integers(0, 6, 200))
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 0.0])
    seeds, pos = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 6)), torch.from_numpy(rng.integers(0, 999, 200))
    cache = torch.zeros(6, 2, VOCAB)
    found = launch_sample(
        logits, slots, temperatures, seeds, pos, drafting=drafting, scale=True, cache=cache, column=torch.tensor(1)
    )
    for i, row in enumerate(logits.tolist()):
        slot, t = int(slots[i]), float(temperatures[slots[i]])
        p = int(pos[i]) + (1 << 30 if drafting else 0)
        values = [v / t + gumbel(int(seeds[slot]), p, k) if t else v for k, v in enumerate(row)]
        assert found[i] == max(range(VOCAB), key=values.__getitem__)
    last = {int(s): i for i, s in enumerate(slots)}
    for slot in last:
        assert any(torch.equal(cache[slot, 1], logits[i]) for i in range(200) if int(slots[i]) == slot)
    assert not cache[:, 0].any()


def test_padding_rows_are_greedy():
    logits = torch.randn(3, VOCAB)
    found = launch_sample(
        logits, torch.tensor([0, -1, -1]), torch.tensor([1.0, 1.0]), torch.tensor([4, 4]), torch.tensor([1, 2, 3])
    )
    assert found[1:] == logits[1:].argmax(1).tolist()


def make_batch(rng: np.random.Generator, n: int) -> dict:
    num_drafts = rng.integers(0, K + 1, n)
    cu = np.concatenate([[0], np.cumsum(num_drafts + 1)])
    return {"idx": rng.permutation(n + 3)[:n], "num_drafts": num_drafts, "cu": cu, "total": int(cu[-1])}


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    e = [math.exp(v - top) for v in row]
    return [v / sum(e) for v in e]


@needs_vllm
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dense", [False, True])
def test_standard_rejection(seed, dense):
    """Leviathan et al.'s test per draft, then a draw from the residual, for one-hot and dense drafts."""
    installation.install()
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    rng = np.random.default_rng(seed)
    b = make_batch(rng, 7)
    idx, cu, total = b["idx"], b["cu"], b["total"]
    logits = rng.normal(0, 2, (total, VOCAB)).astype(np.float32)
    draft_logits = rng.normal(0, 1, (10, K, VOCAB)).astype(np.float32)
    temperatures = rng.choice([0.0, 1.0, 0.5], 10).astype(np.float32)
    seeds = rng.integers(-(2**63), 2**63 - 1, 10)
    pos = rng.integers(0, 500, total)
    tokens = rng.integers(0, 4, total).astype(np.int32)
    tokens[rng.random(total) < 0.1] = -1
    local = np.concatenate([np.arange(d + 1) for d in b["num_drafts"]]).astype(np.int32)
    slots = np.repeat(idx, b["num_drafts"] + 1)
    t = torch.from_numpy
    sampled, num = rejection_sample(
        t(logits), t(draft_logits) if dense else None, t(tokens), t(cu.astype(np.int32)), t(pos), t(idx), t(slots),
        t(local), t(temperatures), t(seeds), K,
    )  # fmt: skip
    for i, slot in enumerate(idx.tolist()):
        expected, temp, key = [], float(temperatures[slot]), int(seeds[slot])
        for step in range(int(b["num_drafts"][i]) + 1):
            row, bonus = int(cu[i]) + step, step == b["num_drafts"][i]
            values = logits[row].tolist()
            draft = -1 if bonus else int(tokens[row + 1])
            if temp == 0:
                expected.append(int(np.argmax(values)))
                if expected[-1] != draft:
                    break
                continue
            p = softmax(values)
            q = softmax((draft_logits[slot, step] / temp).tolist()) if dense and not bonus else None
            at = int(pos[row])
            if draft >= 0 and p[draft] > philox(key, at) * (q[draft] if q else 1.0):
                expected.append(draft)
                continue
            if draft >= 0 and q:
                values = [math.log(a - c) if a > c else -math.inf for a, c in zip(p, q, strict=True)]
            elif draft >= 0:
                values[draft] = -math.inf
            expected.append(max(range(VOCAB), key=lambda k, v=values, at=at: v[k] + gumbel(key, at, k)))
            break
        assert sampled[i, : int(num[i])].tolist() == expected


def test_gather_draft_sampled():
    local, slots = torch.tensor([0, 1, 2, 0, 0, 1], dtype=torch.int32), torch.tensor([2, 2, 2, 0, 1, 1])
    pos, ids = torch.tensor([9, 10, 11, 4, 5, 6]), torch.tensor([50, 51, 52, 53, 54, 55], dtype=torch.int32)
    drafts, where = torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    indices, prefill = torch.arange(6), torch.tensor([9, 6, 9], dtype=torch.int32)
    rejection.gather_draft_sampled(drafts, where, ids, pos, indices, slots, local, prefill, 6)
    assert drafts.tolist() == [50, 51, 52, 53, 54, -1]
    assert where.tolist() == pos.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_post_update(seed):
    rng = np.random.default_rng(seed)
    n, width = 6, 12
    idx = torch.from_numpy(rng.permutation(9)[:n])
    idx[2] = -1
    computed, total = (torch.from_numpy(rng.integers(2, 8, 9).astype(np.int32)) for _ in range(2))
    total[idx[0]] = width - 1  # its second token would fall behind the row
    history, bins = torch.zeros(9, width, dtype=torch.int32), torch.zeros(9, VOCAB, dtype=torch.int32)
    last, sampled = torch.zeros(9, 1, dtype=torch.int64), torch.from_numpy(rng.integers(0, VOCAB, (n, K + 1)))
    counts = torch.from_numpy(rng.integers(0, K + 2, n).astype(np.int32))
    rejected = torch.from_numpy(rng.integers(0, 3, n).astype(np.int32))
    starts = torch.arange(0, 4 * n + 1, 4, dtype=torch.int32)
    e = [x.clone() for x in (computed, total, history, bins, last)]
    for i, slot in enumerate(idx.tolist()):
        if slot < 0:
            continue
        for token in sampled[i, : int(counts[i])].tolist():
            if e[1][slot] < width:
                e[2][slot, e[1][slot]] = token
            e[1][slot] += 1
            e[3][slot, token] += 1
            e[4][slot] = token
        e[0][slot] += 4 - rejected[i]
    batch.post_update(
        idx, computed, last, bins, VOCAB, sampled, K + 1, counts, rejected, starts, history, width, total, num_warps=1
    )
    for found, expected in zip((computed, total, history, bins, last), e, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(4))
def test_combine(seed):
    rng = np.random.default_rng(seed)
    n, slots = 6, 9
    idx = rng.permutation(slots)[:n]
    num_drafts = rng.integers(0, K + 1, n)
    query = num_drafts + 1 + (rng.random(n) < 0.3) * 2
    starts, cu = np.concatenate([[0], np.cumsum(query)]), np.concatenate([[0], np.cumsum(num_drafts + 1)])
    ids, lengths = rng.integers(100, 200, int(starts[-1])), rng.integers(5, 15, n)
    prefill = rng.integers(3, 12, slots)
    last, drafts = rng.integers(0, 50, (slots, 1)), rng.integers(50, 100, (slots, K))
    expected, indices = ids.copy(), []
    for i, slot in enumerate(idx):
        end, d = starts[i + 1], int(num_drafts[i])
        indices += range(end - d - 1, end)
        if lengths[i] <= prefill[slot]:
            continue
        if lengths[i] - d - 1 >= prefill[slot]:
            expected[end - d - 1] = last[slot, 0]
        expected[end - d : end] = drafts[slot, :d]
    found, out = torch.from_numpy(ids.astype(np.int32)), torch.zeros(int(cu[-1]), dtype=torch.int64)
    t32 = lambda x: torch.from_numpy(x.astype(np.int32))  # noqa: E731
    batch.combine_sampled_and_draft_tokens(
        found, torch.from_numpy(idx), torch.from_numpy(last), t32(starts), t32(lengths), t32(prefill),
        torch.from_numpy(drafts), K, t32(cu), out, NUM_NEW_SAMPLED_TOKENS=1, BLOCK_SIZE=4,
    )  # fmt: skip
    assert found.tolist() == expected.tolist()
    assert out.tolist() == indices


def test_missing_kernels_say_their_name():
    def _some_kernel() -> None: ...

    with pytest.raises(NotImplementedError, match=r"Triton kernel .*_some_kernel: turn"):
        installation.MissingKernel(_some_kernel)[(1,)](1, BLOCK_SIZE=2)


def test_copies_and_owners_of_a_kernel_in_vllm_get_what_replaces_it(monkeypatch):
    kernel, other, replacement = object(), object(), object()
    owner, plain = SimpleNamespace(kernel=kernel, _kernel_arg_names=("a",)), SimpleNamespace(kernel=other)
    for name in ("vllm.copies", "elsewhere"):
        module = ModuleType(name)
        module.copy, module.other = kernel, other
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm.copies"].owner, sys.modules["vllm.copies"].plain = owner, plain
    installation.rebind([(kernel, replacement)])
    assert sys.modules["vllm.copies"].copy is replacement and sys.modules["vllm.copies"].other is other
    assert vars(owner) == {"kernel": replacement} and plain.kernel is other
    assert sys.modules["elsewhere"].copy is kernel, "only vLLM holds its kernels"
