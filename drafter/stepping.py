"""The decode loop over an own forward pass (native or plain): slots, prefill, steps, rows that leave.

A row enters a free slot: what the prefix cache knows of it is copied in, the rest is prefilled, several rows in a call,
without padding. Then each step takes the last token of every row, and those before it that a copy policy drafted
without the model. A row that ends leaves its slot to one that waits.
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
from drafter.draft_vocabulary import own_ids
from drafter.prefix_cache import PrefixCache


@dataclasses.dataclass
class _Row:
    decoded: Decoded
    limit: int
    slot: int
    text: list[int]  # the prompt, then what is drafted
    fed: int = 0  # tokens of the text whose keys and values are in the slot
    index: NgramIndex | None = None  # of the text, for the copy policy
    own: np.ndarray | None = None  # ids of the prompt that are not in the draft vocabulary
    started_s: float = 0.0
    top_k: list[tuple] = dataclasses.field(default_factory=list)

    def add(self, token: int, source: str) -> None:
        self.text.append(token)
        self.decoded.tokens.append(token)
        if self.index is not None:
            self.index.extend([token])
            self.decoded.sources.append(source)


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
    may put an id that the row's own text suggests in the place of the model's, or spare the model. ValueError also for
    a row that is longer than a slot.
    """
    assert not (top_k and copy_policy), "a copied token has no top-K list"
    limits = checked_limits(max_new_tokens, prompts, forward.decoder.num_ids)
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if len(prompt) + limit > cache.length:
            length = f"{len(prompt)} tokens + {limit} new"
            raise ValueError(f"prompt {index}: {length} are more than the {cache.length} positions of a slot")
    results: list[Decoded | None] = [None] * len(prompts)
    waiting = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))[::-1]  # longest leaves first
    free, active = list(range(cache.slots))[::-1], []
    refill = max(1, cache.slots // REFILL_SHARE)

    def ended(row: _Row) -> bool:
        tokens = row.decoded.tokens
        return len(tokens) == row.limit or bool(tokens and tokens[-1] in stop_ids)

    def copy(row: _Row) -> None:
        """Append what needs no model: the next call feeds it together with the token behind it."""
        while not ended(row) and (token := copy_policy.sure(row.index)) is not None:
            row.add(token, "copy")
            if progress is not None:
                progress(1)

    def emit(rows: Sequence[_Row], choice: Choice) -> None:
        """Append to each row what was chosen for it."""
        if top_k:
            for at, row in enumerate(rows):
                row.top_k.append(tuple(values[at] for values in choice.top_k))
        if progress is not None:
            progress(len(rows))
        for row, token, gap in zip(rows, choice.ids, choice.gaps, strict=True):
            if copy_policy is None:
                row.add(token, "model")
            else:
                row.add(*copy_policy.choose(row.index, token, gap))
                copy(row)

    def feed(rows: list[_Row]) -> None:
        """All that rows have not fed yet, one behind the other, cut into calls; wanted is the last token of each."""
        flat = []
        for row in rows:
            last = len(row.text) - 1
            flat += [(row.text[at], row.slot, at, row if at == last else None) for at in range(row.fed, last + 1)]
            row.fed = last + 1
        for first in range(0, len(flat), forward.max_tokens):
            tokens, slots, positions, ends = map(list, zip(*flat[first : first + forward.max_tokens], strict=True))
            wanted = [at for at, row in enumerate(ends) if row is not None]
            some = [ends[at] for at in wanted]
            own = None if vocabulary is None else [row.own for row in some]
            emit(some, forward(cache, tokens, slots, positions, wanted, rows=vocabulary, own=own, top_k=top_k))

    def retire(row: _Row) -> bool:
        if not ended(row):
            return False
        decoded = row.decoded
        decoded.finish_reason = "stop" if decoded.tokens[-1] in stop_ids else "length"
        decoded.decode_s = time.perf_counter() - row.started_s - decoded.prefill_s
        if top_k:
            columns = [np.stack(column) for column in zip(*row.top_k, strict=True)]
            decoded.topk_ids, decoded.topk_logprobs, decoded.tail_logprob = columns
        if prefix_cache is not None:
            prefix_cache.store(row.text[: row.fed], cache.keys[:, row.slot], cache.values[:, row.slot])
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
                prompt, slot = prompts[index], free.pop()
                row = _Row(Decoded(index, [], "length"), limits[index], slot, list(prompt), started_s=started_s)
                if prefix_cache is not None:
                    row.fed = prefix_cache.restore(prompt, cache.keys[:, slot], cache.values[:, slot])
                row.decoded.cached_tokens = row.fed
                if vocabulary is not None:
                    row.own = own_ids(prompt, vocabulary)
                if copy_policy is not None:
                    row.index, row.decoded.sources = NgramIndex(prompt, POLICY_NGRAM), []
                    copy(row)
                entering.append(row)
            feed([row for row in entering if not ended(row)])  # a draft may consist of copies alone
            for row in entering:
                row.decoded.prefill_s = time.perf_counter() - started_s
            active += entering
        else:
            feed(active)
        active = [row for row in active if not retire(row)]
    return [] if on_finish is not None else results
