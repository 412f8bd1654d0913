"""The decode loop over an own forward pass (native or plain): slots, prefill, steps, rows that leave.

A row enters a free slot: what the prefix cache knows of it is copied in, the rest is prefilled, several rows in a call,
without padding. Then each step takes the last token of every row. A row that ends leaves its slot to one that waits.
The loop serves drafts (all rows enter at once) and the teacher (many prompts, few slots, top-K lists) alike. The same
loop over a transformers model, and its oracle, is drafter/decoding.py.

Legend: W wanted tokens, D hidden, V ids, K top-k.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from drafter.copy_policy import POLICY_NGRAM, CopyPolicy, NgramIndex
from drafter.decoder import Choice, KeyValueCache
from drafter.decoding import REFILL_SHARE, Decoded, checked_limits
from drafter.prefix_cache import PrefixCache


@dataclasses.dataclass
class _Row:
    decoded: Decoded
    prompt: Sequence[int]
    limit: int
    slot: int
    cached: int = 0
    index: NgramIndex | None = None  # of the row's text, for the copy policy
    own: np.ndarray | None = None  # ids of the prompt that are not in the draft vocabulary
    started_s: float = 0.0
    top_k: list[tuple] = dataclasses.field(default_factory=list)

    @property
    def position(self) -> int:
        """Of the last token, which the next step feeds."""
        return len(self.prompt) + len(self.decoded.tokens) - 1


@torch.inference_mode()
def decode(
    forward: Any,
    cache: KeyValueCache,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    stop_ids: frozenset[int],
    prefix_cache: PrefixCache | None = None,
    vocabulary: np.ndarray | None = None,
    copy_policy: CopyPolicy | None = None,
    top_k: int = 0,
    on_finish: Callable[[Decoded], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Decoded]:
    """Greedy continuations in the order given; see decoding.greedy_decode, whose contract this is.

    `forward` is a NativeForward or PlainForward, `cache` one of its caches: as many rows at a time as it has slots.
    `vocabulary`, rising int32 ids: a row may draft these and the ids of its own prompt, no others. `copy_policy`
    may put an id that the row's own text suggests in the place of the model's. ValueError also for a row that is longer
    than a slot.
    """
    limits = checked_limits(max_new_tokens, prompts, forward.decoder.num_ids)
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if len(prompt) + limit > cache.length:
            length = f"{len(prompt)} tokens + {limit} new"
            raise ValueError(f"prompt {index}: {length} are more than the {cache.length} positions of a slot")
    results: list[Decoded | None] = [None] * len(prompts)
    waiting = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))[::-1]  # longest leaves first
    free, active = list(range(cache.slots))[::-1], []
    refill = max(1, cache.slots // REFILL_SHARE)

    def emit(rows: Sequence[_Row], choice: Choice) -> None:
        """Append to each row what was chosen for it."""
        if top_k:
            for at, row in enumerate(rows):
                row.top_k.append(tuple(values[at] for values in choice.top_k))
        for row, token, gap in zip(rows, choice.ids, choice.gaps, strict=True):
            if copy_policy is not None:
                token, source = copy_policy.choose(row.index, token, gap)
                row.index.extend([token])
                row.decoded.sources.append(source)
            row.decoded.tokens.append(token)
        if progress is not None:
            progress(len(rows))

    def call(tokens: list[int], slots: list[int], positions: list[int], wanted: list[int], rows: list[_Row]) -> None:
        own = None if vocabulary is None else [row.own for row in rows]
        emit(rows, forward(cache, tokens, slots, positions, wanted, rows=vocabulary, own=own, top_k=top_k))

    def prefill(rows: list[_Row]) -> None:
        """All rows' tokens one behind the other, cut into calls; a row's last token is the one that is wanted."""
        flat = [
            (row.prompt[at], row.slot, at, row if at == len(row.prompt) - 1 else None)
            for row in rows
            for at in range(row.cached, len(row.prompt))
        ]
        for first in range(0, len(flat), forward.max_tokens):
            tokens, slots, positions, last = map(list, zip(*flat[first : first + forward.max_tokens], strict=True))
            wanted = [at for at, row in enumerate(last) if row is not None]
            call(tokens, slots, positions, wanted, [last[at] for at in wanted])

    def retire(row: _Row) -> bool:
        decoded = row.decoded
        if decoded.tokens[-1] in stop_ids:
            decoded.finish_reason = "stop"
        elif len(decoded.tokens) < row.limit:
            return False
        decoded.decode_s = time.perf_counter() - row.started_s - decoded.prefill_s
        if top_k:
            columns = [np.stack(column) for column in zip(*row.top_k, strict=True)]
            decoded.topk_ids, decoded.topk_logprobs, decoded.tail_logprob = columns
        if prefix_cache is not None:
            text = [*row.prompt, *decoded.tokens[:-1]]  # the last token was never fed: it has no keys yet
            prefix_cache.store(text, cache.keys[:, row.slot], cache.values[:, row.slot])
        free.append(row.slot)
        if on_finish is None:
            results[decoded.index] = decoded
        else:
            on_finish(decoded)
        return True

    while waiting or active:
        if waiting and len(free) >= min(refill, len(waiting)):
            started_s = time.perf_counter()
            entering = []
            while waiting and free:
                index = waiting.pop()
                row = _Row(Decoded(index, [], "length"), prompts[index], limits[index], free.pop(), started_s=started_s)
                if prefix_cache is not None:
                    row.cached = prefix_cache.restore(row.prompt, cache.keys[:, row.slot], cache.values[:, row.slot])
                row.decoded.cached_tokens = row.cached
                if copy_policy is not None:
                    row.index, row.decoded.sources = NgramIndex(row.prompt, POLICY_NGRAM), []
                if vocabulary is not None:
                    row.own = np.setdiff1d(np.array(row.prompt, np.int32), vocabulary)
                entering.append(row)
            prefill(entering)
            for row in entering:
                row.decoded.prefill_s = time.perf_counter() - started_s
            active += entering
        else:
            for first in range(0, len(active), forward.max_tokens):
                rows = active[first : first + forward.max_tokens]
                tokens, slots = [row.decoded.tokens[-1] for row in rows], [row.slot for row in rows]
                positions = [row.position for row in rows]
                call(tokens, slots, positions, list(range(len(rows))), rows)
        active = [row for row in active if not retire(row)]
    return [] if on_finish is not None else results
