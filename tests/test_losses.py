"""The closed-form gradients against autograd, masses, chunking, memory (TRN-1, TRN-3, TRN-7 of the loss)."""

import math
from types import SimpleNamespace

import pytest
import torch

from drafter import losses
from drafter.losses import LossSums, Targets, distillation_loss

WEIGHTS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.85, 0.15, 0), (0, 0.1, 0.9), (0.6, 0.3, 0.1)]


def weights(kl, ce, tv):
    return SimpleNamespace(kl=kl, ce=ce, tv=tv)


def make(positions=9, width=16, ids=50, k=6, seed=0):
    torch.manual_seed(seed)
    hidden, head = torch.randn(positions, width), torch.randn(ids, width)
    logprobs = (torch.randn(positions, ids) * 2).log_softmax(-1)
    values, at = logprobs.topk(k)
    return hidden.requires_grad_(), head.requires_grad_(), Targets(at, values.exp(), 1 - values.exp().sum(-1))


def reference(hidden, head, targets, w):
    """The definitions, written out and left to autograd."""
    log_q = (hidden @ head.T).log_softmax(-1).gather(1, targets.ids)
    q_t = 1 - log_q.exp().sum(-1)
    p, p_t = targets.probabilities, targets.tail
    kl = (p * (p.log() - log_q)).sum() + (p_t * (p_t.log() - q_t.log())).sum()
    return w.kl * kl - w.ce * log_q[:, 0].sum() + w.tv * (1 - log_q[:, 0].exp()).sum()


@pytest.mark.parametrize("terms", WEIGHTS)
def test_loss_and_gradients_equal_autograd(terms, monkeypatch):
    monkeypatch.setattr(losses, "HEAD_ROWS", 4)  # three chunks, the last one short
    hidden, head, targets = make()
    w, sums = weights(*terms), LossSums()
    ours = distillation_loss(hidden, head, targets, w, sums)
    expected = reference(hidden, head, targets, w)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(
        torch.autograd.grad(ours, (hidden, head)), torch.autograd.grad(expected, (hidden, head)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert sums.positions == 9 and math.isclose(sums.total(w) * 9, expected.item(), rel_tol=1e-5)


def test_kl_of_a_student_equal_to_its_teacher_is_zero():
    """TRN-3: student and teacher logits taken at different positions gave a high loss that did not fall."""
    hidden, head, _ = make()
    logprobs = (hidden @ head.T).log_softmax(-1).detach()
    values, at = logprobs.topk(6)
    targets, w = Targets(at, values.exp(), 1 - values.exp().sum(-1)), weights(1, 0, 0)
    sums = LossSums()
    loss = distillation_loss(hidden, head, targets, w, sums)
    assert abs(loss.item()) < 1e-5 and sums.agreements == 9
    assert max(g.abs().max() for g in torch.autograd.grad(loss, (hidden, head))) < 1e-5
    shifted = Targets(at.roll(1, 0), values.exp().roll(1, 0), targets.tail.roll(1, 0))
    assert distillation_loss(hidden, head, shifted, w, LossSums()).item() > 5  # the test can fail


def test_impossible_ids_change_nothing():
    """TRN-1: doubling the vocabulary with ids of probability 0 changed the mean."""
    hidden, head, targets = make()
    w = weights(0.6, 0.3, 0.1)
    before = distillation_loss(hidden, head, targets, w, LossSums())
    lifted = torch.cat([hidden, torch.ones(9, 1)], 1)
    wide = torch.cat(
        [torch.cat([head, torch.zeros(50, 1)], 1), torch.cat([torch.zeros(50, 16), torch.full((50, 1), -1e4)], 1)]
    )
    after = distillation_loss(lifted, wide, targets, w, LossSums())
    torch.testing.assert_close(before, after)


def test_fp16_log_probabilities_are_made_to_sum_to_one():
    values = torch.tensor([[0.7, 0.2, 0.05]]).log().half()
    targets = Targets.from_logprobs(torch.tensor([[3, 1, 2]]), values, torch.tensor([0.05]).log())
    assert abs(float(targets.probabilities.sum() + targets.tail) - 1) < 1e-6
