"""The teacher's answers by vLLM, where that is installed: the same rows as `drafter.decoding.greedy_decode`.

Ids go in and ids come out; vLLM's tokenizer, template and the vendor's generation file take no part. Held against a
stub of vLLM's interface; **not run** on a GPU. What differs from the loops of our own:

- log-probabilities are what vLLM returns, at most `max_logprobs` of them a token (its default is 20, here it is set to
  K). The mass outside the top K is 1 minus their sum, which in fp32 has no digits below 1e-7: it is not taken lower.
- argmax and softmax leave out the rows of the table above the ids that exist by `allowed_token_ids` and
  `logprobs_mode="processed_logprobs"` (vLLM 0.11 or later). The list travels with each request: 0.5 MB for Qwen3.

Dims: T tokens, K top-k.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafter.decoding import Decoded, checked_limits

# One generate() hands its rows over when the last of them has ended: so many batches lose at most their own work when
# a run is cut off, and leave slots empty only while the last rows end.
BATCHES_PER_CALL = 8
LEAST_TAIL_MASS = 1e-7


def open_vllm(folder: str | Path, *, dtype: str, context: int, batch_size: int, top_k: int) -> Any:
    """vLLM's engine on a local checkpoint, greedy settings only. ValueError where vLLM is not installed."""
    try:
        from vllm import LLM
    except ImportError as error:
        raise ValueError(f"--decoder vllm: {error}; where it is not installed, --decoder transformers runs") from None
    return LLM(
        model=str(folder), dtype=dtype, max_model_len=context, max_num_seqs=batch_size, seed=0,
        max_logprobs=top_k, logprobs_mode="processed_logprobs",
        generation_config="vllm",  # its own neutral defaults, not the vendor's file
        enable_prefix_caching=False,  # a row's numbers must not depend on what was answered before it
        trust_remote_code=False,
    )  # fmt: skip


def top_k_of(token: int, found: Any, k: int) -> tuple[list[int], list[float], float]:
    """({id: Logprob} of one position) -> K ids with the chosen one first, their log-probabilities, log of the rest.

    vLLM gives the K best and, should a tie have put it outside, the chosen one. ValueError with fewer than K.
    """
    if token not in found or len(found) < k:
        raise ValueError(f"vLLM returned {len(found)} log-probabilities for a token, {k} and the chosen one are needed")
    others = sorted((id_ for id_ in found if id_ != token), key=lambda id_: (-found[id_].logprob, id_))
    ids = [token, *others[: k - 1]]
    logprobs = [float(found[id_].logprob) for id_ in ids]
    return ids, logprobs, float(np.log(max(LEAST_TAIL_MASS, 1.0 - np.exp(np.array(logprobs, np.float64)).sum())))


def decode(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    num_ids: int,
    table_rows: int,
    batch_size: int,
    stop_ids: Sequence[int],
    top_k: int,
    on_finish: Callable[[Decoded], None],
    progress: Callable[[int], None] | None = None,
) -> list[Decoded]:
    """Greedy continuations, each handed to `on_finish` when its call has ended; -> [].

    `table_rows` is the height of the embedding table: ids from num_ids to there do not exist and are never chosen.
    ValueError for an empty prompt, an id that does not exist, or an answer that is not as asked for.
    """
    from vllm import SamplingParams, TokensPrompt

    checked_limits(max_new_tokens, prompts, num_ids)
    stops = sorted(stop_ids)
    settings = SamplingParams(
        temperature=0.0, n=1, min_tokens=0, max_tokens=max_new_tokens, logprobs=top_k,
        stop_token_ids=stops, ignore_eos=True,  # the ids given here and no others end a row; a stop id is kept
        allowed_token_ids=list(range(num_ids)) if table_rows > num_ids else None,
        detokenize=False,
    )  # fmt: skip
    # Longest first, as everywhere: a length that does not fit shows at once, and rows of one call are of like length.
    order = sorted(range(len(prompts)), key=lambda index: (-len(prompts[index]), index))
    for first in range(0, len(order), batch_size * BATCHES_PER_CALL):
        indices = order[first : first + batch_size * BATCHES_PER_CALL]
        asked = [TokensPrompt(prompt_token_ids=list(prompts[index])) for index in indices]
        answers = engine.generate(asked, settings, use_tqdm=False)
        for index, answer in zip(indices, answers, strict=True):  # generate() keeps the order of its prompts
            if list(answer.prompt_token_ids) != list(prompts[index]):
                raise ValueError(f"vLLM answered another prompt than number {index}")
            row = _decoded(index, answer.outputs[0], frozenset(stops), max_new_tokens, top_k)
            on_finish(row)
            if progress is not None:
                progress(len(row.tokens))
    return []


def _decoded(index: int, output: Any, stops: frozenset[int], limit: int, top_k: int) -> Decoded:
    tokens = [int(token) for token in output.token_ids]
    ended = bool(tokens) and tokens[-1] in stops
    if output.finish_reason != ("stop" if ended else "length") or not (ended or len(tokens) == limit):
        raise ValueError(f"vLLM ended row {index} after {len(tokens)} tokens with {output.finish_reason!r}")
    if stops & set(tokens[:-1]) or output.logprobs is None or len(output.logprobs) != len(tokens):
        raise ValueError(f"vLLM's row {index} goes on behind a stop id, or lacks log-probabilities")
    columns = [top_k_of(token, found, top_k) for token, found in zip(tokens, output.logprobs, strict=True)]
    ids, logprobs, tails = zip(*columns, strict=True)
    return Decoded(
        index, tokens, output.finish_reason,
        np.array(ids, np.int32), np.array(logprobs, np.float16), np.array(tails, np.float32),
    )  # fmt: skip
