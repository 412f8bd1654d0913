"""Plain batched greedy decoding on a transformers model: the teacher, and the oracle of every faster path.

A fixed number of slots decodes in step. A row that ends leaves its slot, a waiting row is prefilled into
it, so the batch stays full until the prompts run out. Each slot keeps its keys and values from position 0
in a buffer of its own: no left padding, no re-indexing, and position ids are the plain ones, so that a row
is computed the same way whatever shares the batch with it.

Settings are ours alone: argmax over existing ids, a limit of new tokens, a set of stop ids. No file of a
vendor (temperature, penalties, total length 20) can reach this loop, for it never calls `generate`.

Dims: B slots, T tokens, S buffer length, V ids, H key/value heads, E head width, K top-k.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Cache, GenerationConfig, PreTrainedModel

from drafter.attention import use_grouped_attention

# Prefill runs at GEMM speed per token and decoding does not, so a few empty slots cost less than many small
# prefills: rows enter once an eighth of the batch is free.
REFILL_SHARE = 8

# Ids that compete in fp32 for the first place (see top_logits).
CANDIDATES = 8


@dataclasses.dataclass
class Decoded:
    """One finished row. `tokens` keeps the stop id that ended it. Top-K arrays are [len(tokens), K] or None."""

    index: int
    tokens: list[int]
    finish_reason: str  # "stop" | "length"
    topk_ids: np.ndarray | None = None  # int32 [T, K]
    topk_logprobs: np.ndarray | None = None  # float16 [T, K], sorted down
    tail_logprob: np.ndarray | None = None  # float32 [T], log of the mass outside the top K
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0  # positions that a prefix cache had
    sources: list[str] | None = None  # "model" | "copy" of each token, where a copy policy chose


# ---------------------------------------------------------------------------- models


def neutral_generation_config(stop_ids: Sequence[int] = ()) -> GenerationConfig:
    """Greedy, no penalties, nothing inherited: what replaces a vendor's generation file."""
    return GenerationConfig(do_sample=False, eos_token_id=sorted(stop_ids) or None)


def load_causal_lm(
    folder: str | Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", stop_ids: Sequence[int] = ()
) -> PreTrainedModel:
    """A local checkpoint in eval mode, its generation settings replaced. ValueError when the folder is none.

    transformers fills a passed GenerationConfig from the model's own where a value is None, so a "fresh"
    config still ran with the vendor's repetition penalty; replacing the model's own one ends that.
    """
    if not (Path(folder) / "config.json").exists():
        raise ValueError(f"{folder} is not a model folder (no config.json)")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, trust_remote_code=False)
    model.generation_config = neutral_generation_config(stop_ids)
    return use_grouped_attention(model.to(device).eval())


# ---------------------------------------------------------------------------- cache


class SlotCache(Cache):
    """Keys and values of B slots in buffers [B, H, S, E] a layer, written in place.

    `writing` says where the next forward pass writes: (slots [N], first position) for a prefill of N rows,
    or the position of each slot [B] for a decode step.
    """

    def __init__(self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device):
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (slots, heads, length, width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)]
        self.layers = []  # transformers looks here for layer kinds; ours are all full attention
        self.layer_class_to_replicate = None
        self.offloading = False
        self.prefill_slots: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None  # [B], of the token being decoded
        self.span = length  # keys visible to a decode step

    def update(self, key, value, layer_idx, *args, **kwargs):  # noqa: ANN001 - the signature of transformers
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if self.prefill_slots is not None:
            tokens = key.shape[2]  # key: [N, H, T, E]
            keys[self.prefill_slots, :, :tokens] = key
            values[self.prefill_slots, :, :tokens] = value
            return key, value
        slots = torch.arange(key.shape[0], device=key.device)
        keys[slots, :, self.positions] = key[:, :, 0]  # [B, H, E]
        values[slots, :, self.positions] = value[:, :, 0]
        return keys[: key.shape[0], :, : self.span], values[: key.shape[0], :, : self.span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self.prefill_slots is not None else self.span - 1

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first `length` positions into another slot (the batch closes its gaps from the end)."""
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :length] = buffer[source, :, :length]


# ---------------------------------------------------------------------------- choosing


def top_logits(
    hidden: torch.Tensor, head: torch.Tensor, k: int, logits: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k highest logits of each row, decided in fp32: hidden [N, D], head [V, D] -> (fp32 [N, k] sorted down, ids).

    A bf16 product rounds logits near 20 to steps of 0.125, so that several ids often share the first place and
    the winner depends on the kernel. The k best of the bf16 product (at least CANDIDATES, so that k = 1 has
    something to decide between) are therefore multiplied again in fp32: N * k * D products, nothing beside
    the N * V * D of the table. `logits` [N, V] may be given by a caller who has the product already.
    """
    logits = hidden @ head.T if logits is None else logits
    values, ids = logits.topk(min(max(k, CANDIDATES), head.shape[0]), dim=-1)
    if logits.dtype == torch.float32:
        return values[:, :k], ids[:, :k]
    exact = torch.einsum("nd,nkd->nk", hidden.float(), head[ids].float())
    exact, order = exact.sort(dim=-1, descending=True, stable=True)
    return exact[:, :k], ids.gather(-1, order)[:, :k]


def top_k_logprobs(hidden: torch.Tensor, head: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Top-K ids, their log-probabilities, and the log of the remaining mass, of hidden states [N, D].

    Returns int32 [N, K] with the argmax first, float16 [N, K] sorted down, float32 [N]. The tail mass is the
    sum over the other ids, not 1 minus the sum of the K: that difference of two numbers near 1 has no digits
    left for a tail of 1e-8. Log-softmax over existing ids at temperature 1.
    """
    logits = hidden @ head.T  # [N, V]
    values, ids = top_logits(hidden, head, k, logits)
    best = values[:, :1]
    masses = logits.float().sub_(best).exp_().scatter_(-1, ids, 0.0)  # one pass over V; the K are counted exactly
    tail = masses.sum(-1).clamp_min(1e-30)
    total = tail + (values - best).exp().sum(-1)
    logprobs = values - best - total.log()[:, None]
    return (
        ids.to(torch.int32).cpu().numpy(),
        logprobs.to(torch.float16).cpu().numpy(),
        (tail / total).log().cpu().numpy(),
    )


# ---------------------------------------------------------------------------- the loop


@dataclasses.dataclass
class _Slot:
    index: int  # of the prompt
    length: int  # positions filled so far
    limit: int  # new tokens allowed
    started_s: float
    prefill_s: float
    tokens: list[int] = dataclasses.field(default_factory=list)
    top_k: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)


def checked_limits(max_new_tokens: int | Sequence[int], prompts: Sequence[Sequence[int]], num_ids: int) -> list[int]:
    """One limit a prompt; ValueError for an empty prompt, an id that does not exist, a limit below 1."""
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(prompts):
        raise ValueError(f"{len(limits)} limits for {len(prompts)} prompts")
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        if limit < 1:
            raise ValueError(f"prompt {index}: max_new_tokens must be at least 1, not {limit}")
        if not 0 <= min(prompt) <= max(prompt) < num_ids:
            raise ValueError(f"prompt {index} has an id outside 0 .. {num_ids - 1}")
    return limits


@torch.inference_mode()
def greedy_decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    stop_ids: Sequence[int] | frozenset[int],
    num_ids: int,
    batch_size: int = 64,
    top_k: int = 0,
    on_finish: Callable[[Decoded], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Decoded]:
    """Greedy continuations of ragged prompts, in the order given.

    `max_new_tokens` is one limit or one a row. A row ends with the first of `stop_ids` (kept as its last
    token, finish_reason "stop") or at its limit ("length"). With `on_finish` each row is handed over as it ends
    and not kept: a long run is saved as it goes, in constant memory, and the list returned is empty. `progress`
    gets the number of tokens of each step.
    ValueError for an empty prompt, an id that does not exist, a limit below 1.
    """
    limits = checked_limits(max_new_tokens, prompts, num_ids)
    stops = frozenset(stop_ids)
    results: list[Decoded | None] = [None] * len(prompts)
    if not prompts:
        return []
    head = model.get_output_embeddings().weight[:num_ids]  # [V, D]: rows above the existing ids never take part
    device = head.device
    # Longest first: the buffer is allocated once, and rows of like length share a prefill.
    waiting = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    slots = min(batch_size, len(prompts))
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    cache = SlotCache(model.config, slots, longest, head.dtype, device)
    active: list[_Slot] = []

    def emit(slot_numbers: Sequence[int], hidden: torch.Tensor) -> None:
        """Append to each slot the token chosen from its hidden state. hidden: [N, D]."""
        if top_k:
            ids, logprobs, tails = top_k_logprobs(hidden, head, top_k)
            # The token is the first of its own top-K list, so that the two can never disagree about a tie.
            chosen = ids[:, 0].tolist()
            for row, number in enumerate(slot_numbers):
                active[number].top_k.append((ids[row], logprobs[row], tails[row]))
        else:
            chosen = top_logits(hidden, head, 1)[1][:, 0].tolist()
        for number, token in zip(slot_numbers, chosen, strict=True):
            active[number].tokens.append(token)
        if progress is not None:
            progress(len(chosen))

    def retire() -> None:
        """Take finished rows out; the last active slots move into the gaps."""
        for number in range(len(active) - 1, -1, -1):
            slot = active[number]
            ended = slot.tokens[-1] in stops
            if not ended and len(slot.tokens) < slot.limit:
                continue
            row = Decoded(slot.index, slot.tokens, "stop" if ended else "length")
            if top_k:
                columns = [np.stack(column) for column in zip(*slot.top_k, strict=True)]
                row.topk_ids, row.topk_logprobs, row.tail_logprob = columns
            row.prefill_s, row.decode_s = slot.prefill_s, time.perf_counter() - slot.started_s - slot.prefill_s
            if on_finish is None:
                results[slot.index] = row
            else:
                on_finish(row)
            last = active.pop()
            if last is not slot:
                cache.move(len(active), number, last.length)
                active[number] = last

    while waiting or active:
        free = slots - len(active)
        if waiting and free >= max(1, min(slots // REFILL_SHARE, len(waiting))):
            started_s = time.perf_counter()
            entering, waiting = waiting[:free], waiting[free:]
            lengths = torch.tensor([len(prompts[index]) for index in entering], device=device)
            width = int(lengths.max())
            # Right padding without a mask: a real position only looks left, where every token is real.
            ids = torch.zeros(len(entering), width, dtype=torch.long, device=device)
            for row, index in enumerate(entering):
                ids[row, : len(prompts[index])] = torch.tensor(prompts[index], device=device)
            numbers = range(len(active), len(active) + len(entering))
            cache.prefill_slots = torch.tensor(list(numbers), device=device)
            hidden = model.model(input_ids=ids, cache=cache, use_cache=True).last_hidden_state  # [N, T, D]
            cache.prefill_slots = None
            for index in entering:
                active.append(_Slot(index, len(prompts[index]), limits[index], started_s, 0.0))
            emit(numbers, hidden[torch.arange(len(entering), device=device), lengths - 1])
            for number in numbers:
                active[number].prefill_s = time.perf_counter() - started_s
            retire()
            continue
        positions = torch.tensor([slot.length for slot in active], device=device)  # [B]
        cache.positions, cache.span = positions, int(positions.max()) + 1
        visible = torch.arange(cache.span, device=device)[None] <= positions[:, None]  # [B, S], from lengths alone
        hidden = model.model(
            input_ids=torch.tensor([[slot.tokens[-1]] for slot in active], device=device),
            position_ids=positions[:, None],
            attention_mask=visible[:, None, None],  # [B, 1, 1, S]
            cache=cache,
            use_cache=True,
        ).last_hidden_state  # [B, 1, D]
        for slot in active:
            slot.length += 1
        emit(range(len(active)), hidden[:, 0])
        retire()
    if on_finish is not None:
        return []
    assert all(row is not None for row in results)
    return results
