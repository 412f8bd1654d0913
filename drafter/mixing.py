"""Which teacher rows a phase trains on, in which order, and how they become tensors.

A phase mixes pools of rows by weight. Within a pool the categories get equal shares of the tokens; each
(pool, category) cell is an endless sequence of shuffled epochs. The whole plan follows from rows, weights and
seed, so that a run that goes on at step n sees exactly the rows it would have seen.

Dims: B rows, T tokens, N supervised positions, K top-k.
"""

import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from drafter.losses import Targets
from drafter.teacher_data import TeacherRow


def row_tokens(row: Any) -> int:
    """Tokens of a row that pass through the student: the last continuation id predicts nothing."""
    return len(row.prompt_ids) + len(row.continuation_ids) - 1


# ---------------------------------------------------------------------------- the plan


class _Cell:
    """The rows of one category of one pool: epoch after epoch, each in its own order."""

    def __init__(self, name: str, rows: Sequence[TeacherRow], share: float, seed: int):
        self.name, self.rows, self.share, self.seed = name, rows, share, seed
        self.served_tokens, self.epoch, self.order = 0, 0, []

    def next(self) -> TeacherRow:
        if not self.order:
            self.order = list(range(len(self.rows)))
            # Seeded by text: the same order on every Python, whatever the hash seed.
            random.Random(f"{self.seed}/{self.name}/{self.epoch}").shuffle(self.order)
            self.epoch += 1
        row = self.rows[self.order.pop()]
        self.served_tokens += row_tokens(row)
        return row


def plan_steps(
    pools: Mapping[str, Sequence[TeacherRow]],
    weights: Mapping[str, float],
    *,
    tokens: int,
    tokens_per_step: int,
    seed: int,
) -> list[list[TeacherRow]]:
    """Rows of every optimizer step. Each step holds at least `tokens_per_step` tokens, all together at least `tokens`.

    The next row always comes from the cell that is furthest behind its share of the tokens, so that even a
    short phase keeps the mix. ValueError for a pool without rows.
    """
    empty = sorted(pool for pool, weight in weights.items() if weight > 0 and not pools.get(pool))
    if empty:
        raise ValueError(f"no teacher rows for {', '.join(empty)}: run generate_teacher for this recipe first")
    cells = []
    for pool in sorted(weights):
        by_category: dict[str, list[TeacherRow]] = {}
        for row in pools.get(pool, ()):
            by_category.setdefault(row.category, []).append(row)
        for category, rows in sorted(by_category.items()):
            share = weights[pool] / len(by_category)
            if share > 0:
                cells.append(_Cell(f"{pool}/{category}", rows, share, seed))
    steps: list[list[TeacherRow]] = []
    planned = 0
    while planned < tokens:
        step: list[TeacherRow] = []
        step_tokens = 0
        while step_tokens < tokens_per_step:
            row = min(cells, key=lambda cell: cell.served_tokens / cell.share).next()
            step.append(row)
            step_tokens += row_tokens(row)
        steps.append(step)
        planned += step_tokens
    return steps


# ---------------------------------------------------------------------------- tensors


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor  # int64 [B, T], right-padded
    supervised: torch.Tensor  # int64 [N], positions in the flattened [B * T] that predict a continuation id
    targets: Targets  # N rows
    tokens: int  # without padding


def pad_rows(rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids int64 [B, T], supervised positions int64 [N] in the flattened [B * T], and the ids they predict, int64 [N].

    The one place that shifts: position t predicts the id at t + 1. The supervised positions of a row with P prompt and
    C continuation ids are P - 1 .. P + C - 2: the last prompt position predicts the first continuation id. They
    follow from lengths, never from comparing ids; no attention mask is needed, for a causal position sees only what
    stands left of it, which is never padding.
    """
    width = max(row_tokens(row) for row in rows)
    ids = np.zeros((len(rows), width), dtype=np.int64)
    supervised = []
    for at, row in enumerate(rows):
        prompt, tokens = len(row.prompt_ids), row_tokens(row)
        ids[at, :prompt] = row.prompt_ids
        ids[at, prompt:tokens] = row.continuation_ids[:-1]
        supervised.append(np.arange(at * width + prompt - 1, at * width + tokens))
    predicted = np.concatenate([np.asarray(row.continuation_ids, dtype=np.int64) for row in rows])
    return ids, np.concatenate(supervised), predicted


def collate(rows: Sequence[TeacherRow], device: torch.device | str = "cpu") -> Batch:
    """Rows -> one batch with the teacher's targets."""
    ids, supervised, predicted = pad_rows(rows)
    columns = [
        np.concatenate([getattr(row, name) for row in rows]) for name in ("topk_ids", "topk_logprobs", "tail_logprob")
    ]
    assert (columns[0][:, 0] == predicted).all(), "the first of the top K is the token that was chosen"
    return Batch(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(supervised).to(device),
        Targets.from_logprobs(*(torch.from_numpy(column).to(device) for column in columns)),
        sum(row_tokens(row) for row in rows),
    )


def micro_batches(rows: Sequence[Any], micro_batch_tokens: int) -> Iterator[list[Any]]:
    """A step's rows, sorted by length and cut so that each padded batch holds at most `micro_batch_tokens`."""
    batch: list[Any] = []
    for row in sorted(rows, key=lambda row: (-row_tokens(row), row.id)):
        if batch and row_tokens(batch[0]) * (len(batch) + 1) > micro_batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
