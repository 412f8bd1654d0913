"""The distillation loss, over supervised positions only, in chunks, with its gradient in closed form.

One position: z are the student's logits over the V existing ids, q = softmax(z). The teacher is known by its
top-K ids with probabilities p_i and by the mass p_t of all other ids together. y is its chosen token, the
first of the K. Three terms, weighted by `Loss(kl, ce, tv)`:

    KL   sum_i p_i log(p_i / q_i) + p_t log(p_t / q_t)      q_t = 1 - sum_i q_i   (forward KL, tail included)
    CE   -log q_y
    TV   1 - q_y                                            (total variation to the greedy one-hot)

All three have a gradient of the form  dL/dz_j = c q_j  for every id outside the K, plus corrections at the K:

    KL   outside K: q_j (1 - p_t / q_t)      in K: q_j - p_j
    CE   q_j - [j = y]
    TV   q_y q_j - q_y [j = y]

so one softmax in place and one multiplication give the gradient, and no second copy of [N, V] is kept: at
V = 151,936 a chunk of 512 positions is 311 MB in fp32 where 2,048 of them would be 1.2 GB. TV is the loss of
acceptance itself (Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding",
2023: acceptance = 1 - TV), and a greedy target is a one-hot.

Sums over positions are returned; the caller divides by the supervised positions of the whole optimizer step,
so that a gradient does not depend on how a step is cut into micro-batches.

Dims: N supervised positions, D hidden, V existing ids, K top-k.
"""

import dataclasses
from typing import Any

import torch

HEAD_ROWS = 512  # positions whose logits exist at one time


@dataclasses.dataclass
class Targets:
    """The teacher at N supervised positions."""

    ids: torch.Tensor  # int64 [N, K], the chosen id first
    probabilities: torch.Tensor  # fp32 [N, K]
    tail: torch.Tensor  # fp32 [N], mass of all other ids

    @classmethod
    def from_logprobs(
        cls, topk_ids: torch.Tensor, topk_logprobs: torch.Tensor, tail_logprob: torch.Tensor
    ) -> "Targets":
        """From shard columns; the mass is made to add up to 1 again after the cast of the log-probabilities to fp16."""
        probabilities, tail = topk_logprobs.float().exp(), tail_logprob.float().exp()
        total = probabilities.sum(-1) + tail
        return cls(topk_ids.long(), probabilities / total[:, None], tail / total)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, at: slice) -> "Targets":
        return Targets(self.ids[at], self.probabilities[at], self.tail[at])


@dataclasses.dataclass
class LossSums:
    """Sums over positions: divide by `positions` for a mean. `agreements`: positions whose argmax is the teacher's."""

    kl: float = 0.0
    ce: float = 0.0
    tv: float = 0.0
    agreements: int = 0
    positions: int = 0

    def __iadd__(self, other: "LossSums") -> "LossSums":
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    def total(self, weights: Any) -> float:
        """The weighted loss, mean over positions; `weights` has kl, ce and tv."""
        return (weights.kl * self.kl + weights.ce * self.ce + weights.tv * self.tv) / max(1, self.positions)


def chunk_loss_and_gradient(logits: torch.Tensor, targets: Targets, weights: Any) -> tuple[LossSums, torch.Tensor]:
    """Loss sums and dL/dz, fp32 [N, V], written over `logits` (fp32 [N, V]) itself."""
    at_k = logits.gather(1, targets.ids)  # [N, K]
    best = logits.amax(-1, keepdim=True)
    agreements = int((at_k[:, :1] == best).sum())  # y shares the first place; ties count for the teacher
    q = logits.sub_(best).exp_()
    total = q.sum(-1, keepdim=True)
    q.div_(total)
    q_k = q.gather(1, targets.ids)  # [N, K]
    log_q_k = at_k - best - total.log()
    q_y, log_q_y = q_k[:, 0], log_q_k[:, 0]
    # The student's tail is the sum over the other ids: 1 - sum of the K has no digits left for a tail of 1e-8.
    q_t = q.scatter_(1, targets.ids, 0.0).sum(-1).clamp_min(1e-12)
    p, p_t = targets.probabilities, targets.tail.clamp_min(1e-12)
    kl = (p * (p.clamp_min(1e-12).log() - log_q_k)).sum() + (p_t * (p_t.log() - q_t.log())).sum()
    sums = LossSums(float(kl), float(-log_q_y.sum()), float((1 - q_y).sum()), agreements, len(targets))
    # dL/dz = outside * q, then the K columns are set to what they are.
    outside = weights.kl * (1 - p_t / q_t) + weights.ce + weights.tv * q_y  # [N]
    inside = q_k * (weights.kl + weights.ce + weights.tv * q_y)[:, None] - weights.kl * p
    inside[:, 0] -= weights.ce + weights.tv * q_y
    gradient = q.mul_(outside[:, None])
    gradient.scatter_(1, targets.ids, inside)
    return sums, gradient


class _HeadLoss(torch.autograd.Function):
    """Weighted loss sum of hidden states under a head, with gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, head, targets, weights, sums):  # noqa: ANN001
        loss = hidden.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        for first in range(0, len(targets), HEAD_ROWS):
            at = slice(first, first + HEAD_ROWS)
            chunk, gradient = chunk_loss_and_gradient((hidden[at] @ head.T).float(), targets.rows(at), weights)
            sums += chunk
            loss += weights.kl * chunk.kl + weights.ce * chunk.ce + weights.tv * chunk.tv
            gradient = gradient.to(hidden.dtype)
            grad_hidden[at] = gradient @ head
            if grad_head is not None:
                grad_head += gradient.T @ hidden[at]
        ctx.save_for_backward(grad_hidden, *(() if grad_head is None else (grad_head,)))
        return loss

    @staticmethod
    def backward(ctx, grad_loss):  # noqa: ANN001
        grad_hidden, *rest = ctx.saved_tensors
        grad_head = rest[0] * grad_loss.to(rest[0].dtype) if rest else None
        return grad_hidden * grad_loss.to(grad_hidden.dtype), grad_head, None, None, None


def distillation_loss(
    hidden: torch.Tensor, head: torch.Tensor, targets: Targets, weights: Any, sums: LossSums
) -> torch.Tensor:
    """Weighted loss, summed over positions. hidden [N, D] and head [V, D] (existing ids only) in one dtype.

    Differentiable in hidden and head; `sums` gets the parts added. The head's gradient is accumulated over the
    chunks in the head's own dtype.
    """
    assert len(hidden) == len(targets), (hidden.shape, len(targets))
    assert head.shape[1] == hidden.shape[1], (head.shape, hidden.shape)
    return _HeadLoss.apply(hidden, head, targets, weights, sums)
