"""Every loss term: its value by hand or by the library it is shared with, and its gradient by finite differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from drafter_online import losses

N, V, K = 5, 11, 4


def pair(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(N, V, generator=g, dtype=dtype).requires_grad_(), torch.randn(N, V, generator=g, dtype=dtype)


def test_forward_kl_is_that_of_speculators() -> None:
    from speculators.losses import eager

    assert gradcheck(lambda x: losses.forward_kl(x, pair()[1]), (pair()[0],))
    z, t = pair(1, torch.float32)
    z2 = z.detach().clone().requires_grad_()
    a, b = losses.forward_kl(z, t), eager.kl_div_loss(z2[None], t[None])[0]
    torch.testing.assert_close(a, b)
    a.sum().backward()
    b.sum().backward()
    torch.testing.assert_close(z.grad, z2.grad)


@pytest.mark.parametrize("name", losses.OBJECTIVES)
def test_least_where_the_drafter_says_what_the_target_says(name: str) -> None:
    _, t = pair(2)
    fn = losses.OBJECTIVES[name]
    best = t * 500 if name == "top1" else t
    assert float(fn(best, t).max()) < 1e-6
    assert float(fn(torch.zeros_like(t), t).min()) > 0.01


def kept(t: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top = t.topk(k, -1)
    return top.indices, top.values, t.logsumexp(-1)


def forward(z: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
    log_p, log_q = losses.truncated(z, *rows)
    return losses.divergence(log_p, log_q)


def test_with_all_logits_kept_the_truncated_divergence_is_exact() -> None:
    z, t = pair(3)
    torch.testing.assert_close(forward(z, *kept(t, V)), losses.forward_kl(z, t), atol=2e-5, rtol=1e-4)


def test_truncation_is_a_lower_bound_with_right_gradients() -> None:
    z, t = pair(4)
    ids, logits, lse = kept(t, K)
    assert gradcheck(lambda x: forward(x, ids, logits, lse), (z,))
    part = forward(z, ids, logits, lse)
    assert bool((part <= losses.forward_kl(z, t) + 1e-9).all()) and bool((part > 0).all())


def test_tokens_the_drafter_cannot_say_and_missing_logits_are_no_nan() -> None:
    z, t = pair(5)
    ids, logits, lse = kept(t, K)
    ids[0, 0] = -1  # not in the drafter's vocabulary
    ids[1], logits[1] = 0, -math.inf  # the engine kept nothing for this row
    out = forward(z, ids, logits, lse)
    out.sum().backward()
    assert z.grad is not None
    assert bool(out.isfinite().all()) and bool(z.grad.isfinite().all())
    assert float(out[1].detach().abs()) < 1e-5 and float(z.grad[1].abs().max()) < 1e-5
    assert gradcheck(lambda x: forward(x, ids, logits, lse)[[0, 2, 3, 4]], (z,))


def test_forward_kl_on_a_rejected_row_by_hand() -> None:
    # p = (0.7, 0.2, rest 0.1), q uniform over 4 tokens: KL = 0.7 ln 2.8 + 0.2 ln 0.8 + 0.1 ln 0.2
    logits = torch.tensor([[0.7, 0.2]]).log()
    value = forward(torch.zeros(1, 4), torch.tensor([[0, 1]]), logits, torch.zeros(1))
    assert float(value) == pytest.approx(0.7 * math.log(2.8) + 0.2 * math.log(0.8) + 0.1 * math.log(0.2), abs=1e-5)


def test_reward_weights() -> None:
    r = torch.tensor([1.0, 0.0, float("nan"), 1.0])
    w = losses.reward_weights(r, 0.5, 1.0, 1.0)
    assert float(w[2]) == 1.0 and float(w[0]) == float(w[3]) > 1 > float(w[1])
    assert float(w[[0, 1, 3]].mean()) == pytest.approx(1.0)
    assert float(w[0] / w[1]) == pytest.approx(math.exp(1.0))
    assert losses.reward_weights(torch.tensor([9.0, 0.0]), 0.0, 0.01, 1.0).tolist() == [2.0, pytest.approx(0.2)]
    for plain in (losses.reward_weights(r, 0.5, 0.0, 1.0), losses.reward_weights(r, 0.5, 1.0, 0.0)):
        assert plain.tolist() == [1.0] * 4
