"""The plan of a phase and its tensors: shares, determinism, the one shift, masks from lengths (TOK-5, TRN-3)."""

from collections import Counter

import numpy as np
import pytest
import torch

from drafter.mixing import collate, micro_batches, plan_steps, row_tokens
from drafter.teacher_data import TeacherRow


def row(name, prompt, continuation, category="chat", k=3):
    n = len(continuation)
    ids = np.tile(np.arange(k, dtype=np.int32), (n, 1))
    ids[:, 0] = continuation
    return TeacherRow(name, "synthetic", category, "f/00", "train", list(prompt), list(continuation), "stop", ids,
                      np.log(np.full((n, k), 0.2)).astype(np.float16), np.full(n, np.log(0.4), np.float32))  # fmt: skip


def pool(name, count, categories=("chat", "math"), length=10):
    return [row(f"{name}{at}", range(length), range(5), categories[at % len(categories)]) for at in range(count)]


def test_mix_and_categories_get_their_share_of_the_tokens():
    pools = {"a": pool("a", 30), "b": pool("b", 9, ("chat", "math", "code"), length=40)}
    plan = plan_steps(pools, {"a": 0.75, "b": 0.25}, tokens=20_000, tokens_per_step=500, seed=1)
    tokens = Counter()
    for one in (one for step in plan for one in step):
        tokens[one.id[0], one.category] += row_tokens(one)
    total = sum(tokens.values())
    for category in ("chat", "math"):
        assert abs(tokens["a", category] / total - 0.375) < 0.01
    for category in ("chat", "math", "code"):
        assert abs(tokens["b", category] / total - 0.25 / 3) < 0.01
    assert all(sum(map(row_tokens, step)) >= 500 for step in plan) and total >= 20_000


def test_every_row_of_a_pool_comes_once_an_epoch_and_the_plan_is_a_function_of_the_seed():
    pools = {"a": pool("a", 20, ("chat",))}
    settings = {"tokens": 14 * 40, "tokens_per_step": 14 * 5}

    def order(seed):
        return [[one.id for one in step] for step in plan_steps(pools, {"a": 1}, **settings, seed=seed)]

    flat = [name for step in order(1) for name in step]
    assert sorted(flat[:20]) == sorted(flat[20:40]) == sorted(one.id for one in pools["a"])
    assert flat[:20] != flat[20:40] and order(1) == order(1) != order(2)


def test_an_empty_pool_is_refused_by_name():
    with pytest.raises(ValueError, match="no teacher rows for focused"):
        plan_steps({"a": pool("a", 3)}, {"a": 0.5, "focused": 0.5}, tokens=10, tokens_per_step=5, seed=0)


def test_targets_stand_one_position_ahead_and_padding_is_never_supervised():
    """TRN-3: data code and model both shifted, and position t learned token t + 2."""
    rows = [row("x", [11, 12, 13], [21, 22]), row("y", [14], [23, 24, 25])]
    batch = collate(rows)
    assert batch.ids.tolist() == [[11, 12, 13, 21], [14, 23, 24, 0]]
    flat = batch.ids.flatten()
    seen = [(int(flat[at]), int(target)) for at, target in zip(batch.supervised, batch.targets.ids[:, 0], strict=True)]
    assert seen == [(13, 21), (21, 22), (14, 23), (23, 24), (24, 25)]
    assert batch.tokens == 7


def test_a_pad_id_that_is_also_the_stop_id_keeps_its_label():
    """TOK-5: masks made by comparing ids with the pad id removed the genuine end from the labels."""
    batch = collate([row("x", [1, 0], [5, 0]), row("y", [1] * 9, [7, 8, 0])])  # 0 is what padding is written with
    assert batch.targets.ids[:, 0].tolist() == [5, 0, 7, 8, 0]


def test_micro_batches_keep_every_row_and_the_bound():
    rows = [row(str(at), range(1 + at * 7 % 40), range(3)) for at in range(25)]
    batches = list(micro_batches(rows, 64))
    assert sorted(one.id for batch in batches for one in batch) == sorted(one.id for one in rows)
    assert all(max(map(row_tokens, batch)) * len(batch) <= 64 for batch in batches)
    assert list(micro_batches([rows[24]], 1)) == [[rows[24]]]  # a row longer than the bound goes alone


def test_mass_of_the_targets():
    targets = collate([row("x", [1], [2])]).targets
    torch.testing.assert_close(targets.probabilities.sum(-1) + targets.tail, torch.ones(1))
