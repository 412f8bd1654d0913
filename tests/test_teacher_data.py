"""Shards keep what they were given, resume by id, refuse other settings; loops are found where they begin."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from drafter.teacher_data import ShardWriter, TeacherRow, keep_only, loop_start, read_metadata, read_shards, shard_paths

SETTINGS = {"teacher": "t", "chat": {"thinking": "off"}, "nothing": None}


def rows(count=7, k=4):
    source = np.random.default_rng(0)
    made = []
    for at in range(count):
        n = int(source.integers(1, 9))
        made.append(TeacherRow(
            f"id{at}", "synthetic", "chat", f"greeting/{at:02d}", "train", list(range(at + 1)),
            source.integers(0, 999, n).tolist(), "stop", source.integers(0, 999, (n, k)).astype(np.int32),
            -np.sort(source.random((n, k))).astype(np.float16), source.random(n).astype(np.float32),
        ))  # fmt: skip
    return made


def same(a, b):
    plain = ("id", "source", "category", "family", "split", "prompt_ids", "continuation_ids", "finish_reason")
    arrays = ("topk_ids", "topk_logprobs", "tail_logprob")
    return all(getattr(a, name) == getattr(b, name) for name in plain) and all(
        getattr(a, name).dtype == getattr(b, name).dtype and (getattr(a, name) == getattr(b, name)).all()
        for name in arrays
    )


def test_rows_survive_in_order_over_several_shards(tmp_path):
    writer = ShardWriter(tmp_path, "pool", 4, SETTINGS, rows_per_shard=3)
    for row in rows():
        writer.add(row)
    writer.flush()
    assert [path.name for path in shard_paths(tmp_path, "pool")] == [f"pool-{at:05d}.parquet" for at in range(3)]
    back = read_shards(shard_paths(tmp_path, "pool"))
    assert all(same(a, b) for a, b in zip(rows(), back, strict=True))
    assert read_metadata(shard_paths(tmp_path, "pool")[0]) == {**SETTINGS, "top_k": 4}


def test_schema_is_the_declared_one(tmp_path):
    writer = ShardWriter(tmp_path, "pool", 4, SETTINGS)
    writer.add(rows(1)[0])
    writer.flush()
    schema = pq.read_schema(writer.paths[0])
    assert schema.names == [
        "id", "source", "category", "family", "split", "prompt_ids", "continuation_ids", "finish_reason",
        "topk_ids", "topk_logprobs", "tail_logprob",
    ]  # fmt: skip
    assert str(schema.field("topk_ids").type) == "list<element: fixed_size_list<element: int32>[4]>".replace(
        "element", "item"
    ) or (schema.field("topk_ids").type.value_type.list_size == 4)


def test_resume_goes_by_id_not_by_count(tmp_path):
    """A resume by number of lines skipped the wrong rows when the prompts were in another order."""
    writer = ShardWriter(tmp_path, "pool", 4, SETTINGS, rows_per_shard=2)
    for row in rows(4)[::2]:
        writer.add(row)
    writer.flush()
    again = ShardWriter(tmp_path, "pool", 4, SETTINGS)
    assert again.done == {"id0", "id2"}
    for row in rows(4):
        if row.id not in again.done:
            again.add(row)
    again.flush()
    assert sorted(row.id for row in read_shards(shard_paths(tmp_path, "pool"))) == ["id0", "id1", "id2", "id3"]


def test_other_settings_are_refused_with_the_difference(tmp_path):
    writer = ShardWriter(tmp_path, "pool", 4, SETTINGS)
    writer.add(rows(1)[0])
    writer.flush()
    with pytest.raises(ValueError, match="thinking"):
        ShardWriter(tmp_path, "pool", 4, {**SETTINGS, "chat": {"thinking": "on"}})
    ShardWriter(tmp_path, "other", 4, {**SETTINGS, "teacher": "u"}).flush()
    other = ShardWriter(tmp_path, "other", 4, {**SETTINGS, "teacher": "u"})
    other.add(rows(1)[0])
    other.flush()
    with pytest.raises(ValueError, match="teacher: 'u' there, 't' now"):
        read_shards([*shard_paths(tmp_path, "pool"), *shard_paths(tmp_path, "other")])


def test_answers_of_prompts_that_are_gone_are_dropped_and_the_rest_kept(tmp_path):
    """After an edit of the recipe, shards kept rows that no prompt file named any more, and training used them."""
    writer = ShardWriter(tmp_path, "pool", 4, SETTINGS, rows_per_shard=2)
    for row in rows(5):
        writer.add(row)
    writer.flush()
    assert keep_only(tmp_path, "pool", {"id0", "id4"}) == 3 and keep_only(tmp_path, "pool", {"id0", "id4"}) == 0
    again = ShardWriter(tmp_path, "pool", 4, SETTINGS)
    assert again.done == {"id0", "id4"}
    again.add(rows(5)[2])
    again.flush()
    back = {row.id: row for row in read_shards(shard_paths(tmp_path, "pool"))}
    assert all(same(back[f"id{at}"], rows(5)[at]) for at in (0, 2, 4)) and len(back) == 3


def test_pools_do_not_mix_by_prefix(tmp_path):
    for name in ("distill.data", "distill.data-more"):
        writer = ShardWriter(tmp_path, name, 4, SETTINGS)
        writer.add(rows(1)[0])
        writer.flush()
    assert len(shard_paths(tmp_path, "distill.data")) == 1


@pytest.mark.parametrize(("ids", "start"), [
    (list(range(60)), None),
    ([1, 2, 3] + [7, 8] * 13, 5),  # the first period stays
    ([1, 2, 3] + [7, 8] * 13 + [7], 5),  # an unfinished last period belongs to the loop
    ([1, 2] + [9] * 30, 3),
    ([1, 2] + [9] * 10, None),  # short: a row of dashes is no loop
    ([5, 6] * 4, None),
    ([*range(20)] * 4, 20),
    ([*range(20)] * 3, None),
])  # fmt: skip
def test_loop_start(ids, start):
    assert loop_start(ids) == start
