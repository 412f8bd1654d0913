"""DraftEngine: token ids in, drafted token ids out. No queue, no HTTP.

A draft is a function of weights and tokens alone: the same alone or in any batch, after any other request, with a cold
or a warm cache. Exactly so in fp32; in bf16 the width of a matrix product can move a near-tie.

    engine = DraftEngine(load_model("model", form="packed"))                       # the own forward pass
    engine = TransformersEngine(load_model("model", form="merged"))                # plain transformers: the oracle
    drafts = engine.draft([DraftRequest(tokens, 16)])
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafter import stepping
from drafter.copy_policy import CopyPolicy
from drafter.decoder import Decoder, decoder_of
from drafter.decoding import Decoded, greedy_decode
from drafter.kernel_check import check_kernels
from drafter.native import BuildError, NativeForward
from drafter.plain import PlainForward
from drafter.prefix_cache import PrefixCache
from drafter.self_check import check

EXAMPLE = "Write one sentence about the sea."
KERNELS = ("auto", "native", "plain")
PREFIX_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class DraftRequest:
    tokens: Sequence[int]  # prompt and what was emitted so far, as ids
    k: int  # drafted tokens wanted


@dataclass(frozen=True)
class Draft:
    tokens: list[int]  # k of them, or fewer: then the last one is a stop id
    finish_reason: str  # "length" | "stop"
    timings: dict[str, float]  # prefill_ms, draft_ms, cached_tokens, batch_size
    sources: list[str] | None = None  # "model" | "copy" of each token; None: all are the model's


class _Engine:
    """What both engines know of a loaded archive, and the contract of a draft."""

    name: str

    def __init__(self, loaded: Any, threads: int | None):
        if threads is not None:
            # The number belongs to the calling thread: make the engine on the thread that will use it.
            torch.set_num_threads(threads)
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
            "engine": self.name,
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
        rows = self._decode([request.tokens for request in requests], [request.k for request in requests])
        return [
            Draft(
                row.tokens,
                row.finish_reason,
                {
                    "prefill_ms": round(row.prefill_s * 1000, 3),
                    "draft_ms": round(row.decode_s * 1000, 3),
                    "cached_tokens": row.cached_tokens,
                    "batch_size": len(requests),
                },
                row.sources,
            )
            for row in rows
        ]

    def _decode(self, prompts: list[Sequence[int]], limits: list[int]) -> list[Decoded]:
        raise NotImplementedError

    def _sizes_to_warm(self, batch_size: int) -> Sequence[int]:
        return sorted({1, batch_size})

    def warm_up(self, batch_size: int) -> None:
        """Drafts once alone and once in a batch of `batch_size`, so that no client pays for first-use costs
        (kernel choice, thread pools, memory)."""
        k = min(16, self.context // 2)
        tokens = (self.example_tokens * self.context)[: min(256, self.context - k)]
        for size in self._sizes_to_warm(batch_size):
            self.draft([DraftRequest(tokens, k)] * size)


class TransformersEngine(_Engine):
    """Drafts with a loaded archive in merged form through the batched greedy loop: slower, and the oracle."""

    name = "transformers"

    def __init__(self, loaded: Any, *, threads: int | None = None):
        super().__init__(loaded, threads)
        self.model = loaded.model
        self.info["dtype"] = str(self.model.dtype).removeprefix("torch.")
        check(self, loaded.self_check)

    def _decode(self, prompts, limits):
        settings = {"stop_ids": self.stop_ids, "num_ids": self.num_ids, "batch_size": max(1, len(prompts))}
        return greedy_decode(self.model, prompts, limits, **settings)


class DraftEngine(_Engine):
    """Drafts with a loaded archive: own forward pass, prefix cache, ragged batches. Computes in the dtype that it was
    loaded with; the native kernels take the packed form as it is."""

    name = "own"

    def __init__(
        self,
        loaded: Any,
        *,
        kernel: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
        prefix_cache_bytes: int = PREFIX_CACHE_BYTES,
    ):
        super().__init__(loaded, threads)
        settings = {"num_ids": self.num_ids, "positions": self.context}
        decoder = decoder_of(loaded.model, loaded.tensors, loaded.adapter, **settings)
        self.forward = choose_forward(decoder, kernel, loaded.model.dtype, device)
        self.info |= {"kernel": self.forward.name, "dtype": str(self.forward.dtype).removeprefix("torch.")}
        self.cache = self.forward.new_cache(1, self.context)
        self.prefix_cache = None
        if prefix_cache_bytes:
            shape = (len(decoder.layers), decoder.kv_heads, decoder.head_dim)
            self.prefix_cache = PrefixCache(prefix_cache_bytes, *shape, self.cache.keys.dtype, device)
        # The self-check is about weights and kernels, and one for every engine: it runs over the whole head, without
        # the two documents that say which ids are drafted. Those are read as they are, under their own hashes.
        self.draft_vocabulary, self.copy_policy = None, None
        check(self, loaded.self_check)
        self.draft_vocabulary, self.copy_policy = loaded.draft_vocabulary, CopyPolicy.read(loaded.copy_policy)

    def _sizes_to_warm(self, batch_size):
        """On a GPU each size has graphs of its own."""
        return range(1, batch_size + 1) if self.forward.static_steps else super()._sizes_to_warm(batch_size)

    def _decode(self, prompts, limits):
        if len(prompts) > self.cache.slots:  # pages are taken as they are filled
            self.cache = None  # the old one first: what it held is in the prefix cache
            self.cache = self.forward.new_cache(len(prompts), self.context)
        return stepping.decode(
            self.forward,
            self.cache,
            prompts,
            limits,
            stop_ids=self.stop_ids,
            prefix_cache=self.prefix_cache,
            vocabulary=self.draft_vocabulary,
            copy_policy=self.copy_policy,
        )


def choose_forward(
    decoder: Decoder, kernel: str = "auto", dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> NativeForward | PlainForward:
    """The forward pass for this machine. `auto` takes the native one where it can be had, and says why not otherwise.

    ValueError for an unknown kernel, a device that is not there, or
    `native` where it cannot run (another dtype or device, shapes, no compiler).
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be {', '.join(KERNELS)}, not {kernel!r}")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: PyTorch finds no GPU here; --device cpu")
    fits = device == "cpu" and dtype == torch.bfloat16
    if kernel == "plain" or (kernel == "auto" and not fits):
        return PlainForward(decoder, dtype=dtype, device=device)
    try:
        if not fits:
            raise ValueError(f"the native kernels compute in bfloat16 on the CPU, not in {dtype} on {device}")
        check_kernels()
        return NativeForward(decoder, threads=torch.get_num_threads())
    except (BuildError, ValueError) as error:
        if kernel == "native":
            raise ValueError(f"--kernel native: {error}; --kernel plain runs without") from None
        print(f"native kernels are off: {error}; the plain path runs", file=sys.stderr, flush=True)
        return PlainForward(decoder, dtype=dtype, device=device)
