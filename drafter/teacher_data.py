"""Shards of teacher answers: write, resume, read, batch.

One Parquet row per prompt: prompt ids, the teacher's greedy continuation ids as generated (text is never
tokenised again), and for each continuation id the teacher's top-K log-probabilities with the log of the
remaining mass. The schema metadata says which model, revision, tokenizer, template settings, decoder,
dtype, batch and K made them; shards whose metadata differ are refused with the difference.

Dims: T continuation tokens, K top-k.
"""

import dataclasses
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from drafter.provenance import atomic_write

COLUMNS = ("id", "source", "category", "family", "split")

# A repeated tail: the last period of p tokens stands at least this many times in a row ...
MIN_REPEATS = 4
# ... and covers at least this many tokens, so that "ha ha ha ha" or a row of dashes is not one.
MIN_REPEATED_TOKENS = 24
MAX_PERIOD = 64

# A killed run loses at most this much of its work.
FLUSH_AFTER_S = 60.0


@dataclasses.dataclass(frozen=True)
class TeacherRow:
    id: str
    source: str
    category: str
    family: str  # FAMILY/SKELETON for authored prompts
    split: str
    prompt_ids: list[int]
    continuation_ids: list[int]
    finish_reason: str  # "stop" | "length"
    topk_ids: np.ndarray  # int32 [T, K], the chosen id first
    topk_logprobs: np.ndarray  # float16 [T, K], sorted down
    tail_logprob: np.ndarray  # float32 [T]

    @property
    def top2_gaps(self) -> np.ndarray:
        """Logit gap between the two best ids, float32 [T] (a difference of log-probabilities is one of logits)."""
        return self.topk_logprobs[:, 0].astype(np.float32) - self.topk_logprobs[:, 1].astype(np.float32)


def loop_start(ids: Sequence[int]) -> int | None:
    """Where a tail that repeats itself begins its second period, or None.

    The smallest period p <= 64 is taken for which the tail consists of at least 4 equal periods and of at
    least 24 tokens; a last, unfinished period counts. Cutting there keeps the text up to and including the
    first period:

        a b | c d | c d | c d | ... c     ->  index of the second "c d"
    """
    n = len(ids)
    for period in range(1, min(MAX_PERIOD, n // MIN_REPEATS) + 1):
        matched = 0
        while matched < n - period and ids[n - 1 - matched] == ids[n - 1 - matched - period]:
            matched += 1
        if matched + period >= max(MIN_REPEATS * period, MIN_REPEATED_TOKENS):
            return n - matched
    return None


def kept_length(tokens: Sequence[int], finish_reason: str) -> int:
    """How many tokens of an answer are kept: all, or those before the loop in which an unfinished one ended."""
    start = loop_start(tokens) if finish_reason == "length" else None
    return len(tokens) if start is None else start


# ---------------------------------------------------------------------------- schema


def schema(top_k: int, metadata: dict[str, Any]) -> pa.Schema:
    """The shard schema; `metadata` is kept as one JSON text, so that numbers and nulls keep their types."""
    fields = [pa.field(name, pa.string(), nullable=False) for name in COLUMNS]
    fields += [
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("continuation_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("topk_ids", pa.list_(pa.list_(pa.int32(), top_k)), nullable=False),
        pa.field("topk_logprobs", pa.list_(pa.list_(pa.float16(), top_k)), nullable=False),
        pa.field("tail_logprob", pa.list_(pa.float32()), nullable=False),
    ]
    return pa.schema(fields, metadata={"drafter": json.dumps(metadata, sort_keys=True)})


def read_metadata(path: str | Path) -> dict[str, Any]:
    found = pq.read_schema(path).metadata or {}
    if b"drafter" not in found:
        raise ValueError(f"{path} is not a teacher shard (no `drafter` metadata)")
    return json.loads(found[b"drafter"])


def _nested(arrays: Sequence[np.ndarray], value_type: pa.DataType, top_k: int) -> pa.Array:
    """[T, K] arrays of several rows -> one list<fixed_size_list<K>> array, without a Python object per number."""
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    flat = pa.array(np.concatenate([array.reshape(-1) for array in arrays]), type=value_type)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.FixedSizeListArray.from_arrays(flat, top_k))


def to_table(rows: Sequence[TeacherRow], top_k: int, metadata: dict[str, Any]) -> pa.Table:
    columns: list[Any] = [pa.array([getattr(row, name) for row in rows], pa.string()) for name in COLUMNS]
    columns += [
        pa.array([row.prompt_ids for row in rows], pa.list_(pa.int32())),
        pa.array([row.continuation_ids for row in rows], pa.list_(pa.int32())),
        pa.array([row.finish_reason for row in rows], pa.string()),
        _nested([row.topk_ids.astype(np.int32) for row in rows], pa.int32(), top_k),
        _nested([row.topk_logprobs.astype(np.float16) for row in rows], pa.float16(), top_k),
        pa.array([row.tail_logprob.astype(np.float32) for row in rows], pa.list_(pa.float32())),
    ]
    return pa.Table.from_arrays(columns, schema=schema(top_k, metadata))


# ---------------------------------------------------------------------------- writing


class ShardWriter:
    """Writes NAME-00000.parquet, NAME-00001.parquet, ... each whole or not at all; resumes by id.

    `done` holds the ids that shards on disk already have, so that a run that was cut off goes on with the
    rest. ValueError when shards on disk were made with other settings, naming what differs.
    """

    def __init__(self, folder: str | Path, name: str, top_k: int, metadata: dict[str, Any], rows_per_shard: int = 512):
        self.folder, self.name, self.top_k = Path(folder), name, top_k
        self.metadata, self.rows_per_shard = {**metadata, "top_k": top_k}, rows_per_shard
        self.pending: list[TeacherRow] = []
        self.paths = shard_paths(folder, name)
        self.done: set[str] = set()
        for path in self.paths:
            refuse_difference(path, read_metadata(path), self.metadata)
            self.done.update(pq.read_table(path, columns=["id"])["id"].to_pylist())

    def add(self, row: TeacherRow) -> None:
        """Keep a row; a full shard, or one whose oldest row waits for a minute, is written."""
        assert len(row.continuation_ids) == len(row.topk_ids) == len(row.tail_logprob) > 0
        self.done.add(row.id)
        if not self.pending:
            self.waiting_since_s = time.monotonic()
        self.pending.append(row)
        if len(self.pending) >= self.rows_per_shard or time.monotonic() - self.waiting_since_s > FLUSH_AFTER_S:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as the next shard."""
        if not self.pending:
            return
        # One above the last number, not the count: after a lost shard the count names one that exists.
        number = int(self.paths[-1].stem[-5:]) + 1 if self.paths else 0
        path = self.folder / f"{self.name}-{number:05d}.parquet"
        with atomic_write(path) as file:
            pq.write_table(to_table(self.pending, self.top_k, self.metadata), file, compression="zstd")
        self.paths.append(path)
        self.pending = []


def keep_only(folder: str | Path, name: str, ids: set[str]) -> int:
    """Drop rows whose prompt is no longer asked for (an edited recipe), keep the others' answers; returns how many."""
    dropped = 0
    for path in shard_paths(folder, name):
        table = pq.read_table(path)
        kept = [row in ids for row in table["id"].to_pylist()]
        dropped += len(kept) - sum(kept)
        if not all(kept):
            with atomic_write(path) as file:  # a shard may become empty: its number is still taken
                pq.write_table(table.filter(pa.array(kept, pa.bool_())), file, compression="zstd")
    return dropped


def refuse_difference(path: str | Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """ValueError when two settings differ, with each differing field and both values."""
    keys = sorted({*found, *expected})
    differing = [f"{key}: {found.get(key)!r} there, {expected.get(key)!r} now" for key in keys
                 if found.get(key) != expected.get(key)]  # fmt: skip
    if differing:
        raise ValueError(f"{path} was made with other settings ({'; '.join(differing)}). Move it away to make it anew.")


def declared_settings(recipe: Any) -> dict[str, Any]:
    """The part of a shard's metadata that follows from the recipe alone."""
    return {
        "teacher": recipe.teacher.source.model_dump(mode="json"),
        "chat": {
            "thinking": recipe.chat.thinking,
            "stop_ids": sorted(recipe.teacher.stop_ids),
            "num_ids": recipe.teacher.num_ids,
        },
        "max_new_tokens": recipe.generation.max_new_tokens,
        "top_k": recipe.generation.top_k,
    }


def check_settings(recipe: Any, path: str | Path) -> None:
    """ValueError when a shard was made by another teacher, template setting, limit or K than the recipe declares."""
    declared, found = declared_settings(recipe), read_metadata(path)
    refuse_difference(path, {key: found.get(key) for key in declared}, declared)


# ---------------------------------------------------------------------------- reading


def shard_paths(folder: str | Path, name: str) -> list[Path]:
    """The shards of one pool, in order (`NAME-00000.parquet`, ...)."""
    return sorted(Path(folder).glob(f"{name}-[0-9][0-9][0-9][0-9][0-9].parquet"))


def id_counts(paths: Iterable[Path], num_ids: int) -> np.ndarray:
    """How often each id stands in the answers to training prompts: int64 [num_ids]. Reads two columns, no lists."""
    counts = np.zeros(num_ids, np.int64)
    for path in paths:
        table = pq.read_table(path, columns=["continuation_ids", "split"])
        answers = table.filter(pc.equal(table["split"], "train"))["continuation_ids"].combine_chunks()
        counts += np.bincount(answers.flatten().to_numpy(zero_copy_only=False), minlength=num_ids)
    return counts


def _rows(table: pa.Table) -> Iterable[TeacherRow]:
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    offsets = columns["topk_ids"].offsets.to_numpy()
    k = columns["topk_ids"].type.value_type.list_size

    def flat(name: str) -> np.ndarray:
        # Read through the offsets of the column itself: a sliced table keeps its parent's values.
        return columns[name].values.flatten().to_numpy(zero_copy_only=False).reshape(-1, k)

    topk_ids, topk_logprobs = flat("topk_ids"), flat("topk_logprobs")
    tails, tail_offsets = columns["tail_logprob"].values.to_numpy(), columns["tail_logprob"].offsets.to_numpy()
    text = {name: columns[name].to_pylist() for name in (*COLUMNS, "finish_reason", "prompt_ids", "continuation_ids")}
    for row in range(len(table)):
        span = slice(offsets[row], offsets[row + 1])
        yield TeacherRow(
            *(text[name][row] for name in COLUMNS),
            prompt_ids=text["prompt_ids"][row],
            continuation_ids=text["continuation_ids"][row],
            finish_reason=text["finish_reason"][row],
            topk_ids=topk_ids[span],
            topk_logprobs=topk_logprobs[span],
            tail_logprob=tails[tail_offsets[row] : tail_offsets[row + 1]],
        )


def read_shards(paths: Sequence[str | Path]) -> list[TeacherRow]:
    """All rows of the shards, in order. ValueError when shards were made with different settings, or none are given."""
    if not paths:
        raise ValueError("no teacher shards: run `python -m scripts.generate_teacher --recipe RECIPE` first")
    first = read_metadata(paths[0])
    rows: list[TeacherRow] = []
    for path in paths:
        refuse_difference(path, read_metadata(path), first)
        rows.extend(_rows(pq.read_table(path)))
    return rows
