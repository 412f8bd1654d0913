"""The teacher's answers as one small file: their ids alone, to be committed, verified and used instead of generating.

    write("data/embedded/NAME.parquet", rows, settings)  # from teacher shards -> its sha256, for the recipe
    cached = CachedAnswers.read(path, sha256)            # ValueError unless it is that very file
    replay(forward, prompts, answers, top_k=32, ...)     # the top-K lists, which the file does not hold

A shard keeps 6 K + 8 bytes for an id of an answer, K of them its top-K list; the id takes two, half of that compressed.
The lists come back by one pass over prompt and answer: nothing waits for a token before it. An answer is found by the
prompt's id and by the sha256 of the rendered prompt, so that no other template or tokenizer can take it for its own.

Dims: T answer tokens, K top-k.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from drafter.decoding import Decoded
from drafter.provenance import atomic_write, sha256_file
from drafter.teacher_data import TeacherRow

# The same weights choose otherwise where two ids are nearly equal and sums run in another order or in bf16. A guard
# beside the hash of the weights, which a file could hold by mistake.
MOST_DIFFERENT = 0.05
FORMAT = 1


@dataclass(frozen=True)
class Answer:
    prompt_sha256: bytes  # of the prompt's ids
    ids: list[int]
    finish_reason: str


def prompt_sha256(prompt_ids: Sequence[int]) -> bytes:
    return hashlib.sha256(np.asarray(prompt_ids, "<i4").tobytes()).digest()


def write(path: str | Path, rows: Iterable[TeacherRow], settings: dict[str, Any]) -> str:
    """The file of these rows in the order of their prompts' ids, so that equal answers make equal bytes; -> sha256."""
    rows = sorted(rows, key=lambda row: row.id)
    columns = {
        "id": pa.array([bytes.fromhex(row.id) for row in rows], pa.binary(32)),
        "prompt_sha256": pa.array([prompt_sha256(row.prompt_ids) for row in rows], pa.binary(32)),
        "stopped": pa.array([row.finish_reason == "stop" for row in rows], pa.bool_()),
        "ids": pa.array([row.continuation_ids for row in rows], pa.list_(pa.int32())),
    }
    document = json.dumps({"format": FORMAT, "settings": settings}, sort_keys=True)
    schema = pa.schema([(name, column.type) for name, column in columns.items()], {"cached_answers": document})
    with atomic_write(path) as file:
        table = pa.Table.from_arrays(list(columns.values()), schema=schema)
        pq.write_table(table, file, compression="zstd", compression_level=19, use_dictionary=False)
    return sha256_file(path)


class CachedAnswers:
    """{prompt id: Answer} of one file, and the settings that made them (those of a teacher shard)."""

    def __init__(self, sha256: str, settings: dict[str, Any], answers: dict[str, Answer]):
        self.sha256, self.settings, self._answers = sha256, settings, answers

    def __len__(self) -> int:
        return len(self._answers)

    @classmethod
    def read(cls, path: str | Path, sha256: str) -> "CachedAnswers":
        """ValueError when the file is missing, has another hash, or is none of this format."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} is missing: take it from the repository, or --teacher generate")
        if (found := sha256_file(path)) != sha256:
            raise ValueError(f"{path} has sha256 {found}, the recipe says {sha256}: restore it, or --teacher generate")
        try:
            table = pq.read_table(path)
            document = json.loads(table.schema.metadata[b"cached_answers"])
            settings, number = document["settings"], document["format"]
            columns = (table[name].to_pylist() for name in ("id", "prompt_sha256", "stopped", "ids"))
        except (pa.ArrowException, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} holds no cached answers ({type(error).__name__})") from None
        if number != FORMAT:
            raise ValueError(f"{path} has format {number}, this code reads {FORMAT}")
        reasons = {True: "stop", False: "length"}
        rows = zip(*columns, strict=True)
        return cls(sha256, settings, {key.hex(): Answer(of, ids, reasons[ended]) for key, of, ended, ids in rows})

    def find(self, prompt_id: str, prompt_ids: Sequence[int]) -> Answer | None:
        """The answer to this prompt as it is rendered now, if the file has one."""
        found = self._answers.get(prompt_id)
        return found if found and found.prompt_sha256 == prompt_sha256(prompt_ids) else None


def replay(
    forward: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    *,
    top_k: int,
    on_finish: Callable[[Decoded], None],
    progress: Callable[[int], None] | None = None,
) -> float:
    """The top-K lists of known answers, as decoding would have given them; -> share of ids that it would not choose.

    `forward` is a NativeForward or PlainForward of the teacher with positions for the longest row. `on_finish` gets one
    Decoded a row, in order; its ids are the known ones, also where the teacher's best is another now (the known id then
    stands further down its list, or not in it). ValueError when that share is above 5 %: another teacher's answers.
    """
    longest = max((len(prompt) + len(answer.ids) for prompt, answer in zip(prompts, answers, strict=True)), default=1)
    cache, different, total = forward.new_cache(1, longest), 0, 0
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = [*prompt, *answer.ids][:-1]  # the last id is an answer to what stands before it
        first, lists = len(prompt) - 1, []
        for at in range(0, len(text), forward.max_tokens):
            piece = text[at : at + forward.max_tokens]
            wanted = list(range(max(0, first - at), len(piece)))
            choice = forward(cache, piece, [0] * len(piece), list(range(at, at + len(piece))), wanted, top_k=top_k)
            if wanted:
                lists.append(choice.top_k)
        topk_ids, logprobs, tails = (np.concatenate(parts) for parts in zip(*lists, strict=True))
        different += int((topk_ids[:, 0] != np.asarray(answer.ids)).sum())
        total += len(answer.ids)
        on_finish(Decoded(index, list(answer.ids), answer.finish_reason, topk_ids, logprobs, tails))
        if progress is not None:
            progress(len(answer.ids))
        if total >= 2000 and different > MOST_DIFFERENT * total:
            break
    share = different / max(1, total)
    if share > MOST_DIFFERENT and total >= 100:
        raise ValueError(
            f"of {total} cached ids {share:.1%} are not what this teacher chooses, at most {MOST_DIFFERENT:.0%} may "
            "differ by rounding: these answers are another teacher's. --teacher generate makes them anew"
        )
    return share
