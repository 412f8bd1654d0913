"""DraftEngine: token ids in, drafted token ids out. No queue, no HTTP.

A draft is a function of weights and tokens alone: the same alone or in any batch, after any other request.
Exactly so in fp32; in bf16 the width of a matrix product can move a near-tie (drafter/decoding.py keeps every
row at its own positions and masks by length, so that nothing but rounding can).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafter.decoding import greedy_decode

EXAMPLE = "Write one sentence about the sea."


@dataclass(frozen=True)
class DraftRequest:
    tokens: Sequence[int]  # prompt and what was emitted so far, as ids
    k: int  # drafted tokens wanted


@dataclass(frozen=True)
class Draft:
    tokens: list[int]  # k of them, or fewer: then the last one is a stop id
    finish_reason: str  # "length" | "stop"
    timings: dict[str, float]  # prefill_ms, draft_ms, cached_tokens, batch_size


class DraftEngine:
    """Drafts with a loaded archive (model_io.load_model, merged form) through the batched greedy loop."""

    def __init__(self, loaded: Any, *, threads: int | None = None):
        if threads is not None:
            # The number belongs to the calling thread: make the engine on the thread that will use it.
            torch.set_num_threads(threads)
        self.model = loaded.model
        self.archive_id: str = loaded.archive_id
        self.context: int = loaded.context
        self.num_ids: int = loaded.num_ids
        self.stop_ids = frozenset(loaded.stop_ids)
        self.example_tokens = loaded.chat.render([{"role": "user", "content": EXAMPLE}])
        self.info = {
            **loaded.info,
            "archive_id": self.archive_id,
            "context": self.context,
            "stop_ids": sorted(self.stop_ids),
            "num_ids": self.num_ids,
            "thinking": loaded.chat.thinking,
            "engine": "transformers",
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order, all in one batch.

        ValueError, naming the request, for empty tokens, an id that does not exist, k below 1, or a request
        longer than the context. Times are those of the row: of the batch's one prefill, then to the row's end.
        """
        for index, request in enumerate(requests):
            if len(request.tokens) + request.k > self.context:
                length = f"{len(request.tokens)} tokens + {request.k} drafted"
                raise ValueError(f"prompt {index}: {length} is more than the context of {self.context}")
        rows = greedy_decode(
            self.model,
            [request.tokens for request in requests],
            [request.k for request in requests],
            stop_ids=self.stop_ids,
            num_ids=self.num_ids,
            batch_size=max(1, len(requests)),
        )
        return [
            Draft(
                row.tokens,
                row.finish_reason,
                {
                    "prefill_ms": round(row.prefill_s * 1000, 3),
                    "draft_ms": round(row.decode_s * 1000, 3),
                    "cached_tokens": 0,
                    "batch_size": len(requests),
                },
            )
            for row in rows
        ]

    def warm_up(self, batch_size: int) -> None:
        """Drafts once alone and once in a batch of `batch_size`, so that no client pays for first-use costs
        (kernel choice, thread pools, memory)."""
        k = min(16, self.context // 2)
        tokens = (self.example_tokens * self.context)[: min(256, self.context - k)]
        for size in {1, batch_size}:
            self.draft([DraftRequest(tokens, k)] * size)
