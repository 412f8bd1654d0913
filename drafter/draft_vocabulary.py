"""The draft vocabulary: a static list of ids that a draft may consist of, beside the ids of its own request.

The output head is read once a drafted token, and most of its rows are never chosen. A list of the ids that are frequent
in the teacher's training answers makes it shorter; what a list misses (names, numbers, foreign words) mostly stands in
the request itself, whose ids compete too. An id that is in neither is never drafted: a token less accepted, never a
wrong answer, for the target checks every one.

A drafted token is in the list or in the text before it, so drafting adds no id to those of the request: which ids
compete at a position follows from the text before it, whoever wrote that.
"""

import base64
from collections.abc import Collection, Sequence

import numpy as np


def most_frequent(counts: np.ndarray, size: int, always: Collection[int]) -> np.ndarray:
    """`size` rising int32 ids: those of `always`, then by falling count, of equal counts the lower id.

    Ids never seen follow in their own order, which is that of the tokenizer's merges: from frequent to rare.
    """
    assert len(always) <= size <= len(counts), (always, size, len(counts))
    order = np.lexsort((np.arange(len(counts)), -counts, ~np.isin(np.arange(len(counts)), list(always))))
    return np.sort(order[:size]).astype(np.int32)


def own_ids(tokens: Sequence[int], vocabulary: np.ndarray) -> np.ndarray:
    """Rising int32 ids of `tokens` that are not in the vocabulary."""
    return np.setdiff1d(np.array(tokens, np.int32), vocabulary)


# ---------------------------------------------------------------------------- as text


def to_text(ids: np.ndarray, num_ids: int) -> str:
    """A bit an id, the lowest first, in base64: 8 kB for 49,152 ids, where a list in JSON would take 200 kB."""
    bits = np.zeros(num_ids, np.uint8)
    bits[ids] = 1
    return base64.b64encode(np.packbits(bits, bitorder="little")).decode()


def from_text(text: str, num_ids: int) -> np.ndarray:
    """Rising int32 ids. ValueError for another text than `to_text` makes of them."""
    data = np.frombuffer(base64.b64decode(text, validate=True), np.uint8)
    if len(data) != -(-num_ids // 8):
        raise ValueError(f"{len(data)} bytes, not one bit for each of {num_ids} ids")
    ids = np.flatnonzero(np.unpackbits(data, bitorder="little")).astype(np.int32)
    if len(ids) and ids[-1] >= num_ids:
        raise ValueError(f"id {ids[-1]} does not exist, there are {num_ids}")
    if to_text(ids, num_ids) != text:  # base64 knows bits that mean nothing
        raise ValueError("spelled otherwise than it is written")
    return ids
