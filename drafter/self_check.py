"""The self-check of an archive: a few prompts with what was drafted when it was packed, drafted again at each load.

Hashes tell that the bytes are those that were packed. They cannot tell that the bytes mean the same: weights changed by
a tool that signed them again, another rope theta, a kernel that reads a matrix the wrong way round, a template rendered
by a library that changed. Each of them drafts something else.

    document = make(partial(load_model, folder))     # at packing -> self_check.json
    check_prompts(chat, num_ids, context, document)  # at loading: the texts are still rendered to the same ids
    check(engine, document)                          # before the first draft: they are still continued alike

`gaps` are the leads of the drafted tokens over the best other token, from one fp32 forward pass over the packed form,
the oracle of all kernels. A lead of at most `margin` is a near-tie: rounding may turn it. Drafts are compared up to a
near-tie, and again behind it, with the token that was packed as prefix. Damage that moves no lead by more than `margin`
is not seen: of 22 kinds tried on a student of SmolLM2, 15 were (a zeroed v_proj in the middle of 10 layers was not).

Legend: B prompts, T tokens, N drafted tokens of all prompts, D hidden, V ids.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from drafter.acceptance import NEAR_TIE_GAP
from drafter.decoding import greedy_decode
from drafter.streams import ArchiveError

FORMAT = 1
DRAFTED = 16
# Rounding moves the gap of the two best logits, and turns it where it is smaller than what it moves by. On a student of
# SmolLM2 bf16 moves it by 0.06 in the mean and 0.38 at most over these drafts; three times the largest leaves room for
# an engine that rounds elsewhere, and 71 of 93 positions to compare. (The two logits move by up to 1.5, together.)
MARGIN_OF_ERROR = 3
# One of each kind of text that a template and a tokenizer may treat in their own way, a second turn, and a list to be
# copied: what stands 100 tokens back is found only with the right positions.
GOODS = ("nails", "glass", "paper", "salt", "wool", "tiles", "lamps", "rope", "cups", "seeds", "wire", "soap", "chalk")
STOCK = "\n".join(f"{at * 37 % 91} boxes of {name}" for at, name in enumerate(GOODS, 3))
CONVERSATIONS = (
    [("user", f"Copy this list word by word:\n{STOCK}")],
    [("user", "Write one sentence about the sea.")],
    [("user", "def mean(xs):\n    return sum(xs) / len(x)\n\nFix the bug.")],
    [("user", "Übersetze ins Englische: „Morgen regnet es.“ 然后用中文说。")],
    [("user", "What is 17 * 23?"), ("assistant", "391"), ("user", "And half of that?")],
)
RAW_IDS, STRIDE = 24, 7919  # a prompt of no text: ids from all over the table
FIX = (
    "server.py --kernel plain tells whether the native kernels are at fault; else make the archive again: "
    "python -m scripts.pack_model --recipe RECIPE"
)
FIX_TEXT = (
    "pip install -r requirements-serve.txt installs the libraries that render alike; else make the archive again: "
    "python -m scripts.pack_model --recipe RECIPE"
)


class SelfCheckError(ArchiveError):
    """The archive is whole, but drafts otherwise than when it was packed: other weights, or a fault of the engine."""


def prompts(chat: Any, num_ids: int, context: int) -> tuple[list[list[int]], int]:
    """(prompts as ids, tokens to draft): as much of each prompt's end as the context has room for."""
    drafted = min(DRAFTED, context // 2)
    messages = [[{"role": role, "content": text} for role, text in turns] for turns in CONVERSATIONS]
    raw = [STRIDE * at % num_ids for at in range(1, RAW_IDS + 1)]
    return [ids[-(context - drafted) :] for ids in (*map(chat.render, messages), raw)], drafted


# ---------------------------------------------------------------------------- at packing


@torch.inference_mode()
def make(load: Callable[[str, torch.dtype], Any]) -> dict[str, Any]:
    """The content of self_check.json. `load(form, dtype)` is model_io.load_model of the folder being packed.

    The merged form in bf16 drafts, the packed form in fp32 measures the leads: 2.6 bytes a weight in memory (3.2 while
    the second is loaded), where a merged model in fp32 would take 4 more (6.8 GB for 1.7 B weights), and one pass of
    slow decoding instead of one a token.
    On one thread, so that sums are taken in one order and the same input gives the same bytes.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        served, reference = load("merged", torch.bfloat16), load("packed", torch.float32)
        num_ids = served.num_ids
        texts, drafted = prompts(served.chat, num_ids, served.context)
        rows = greedy_decode(served.model, texts, drafted, stop_ids=served.stop_ids, num_ids=num_ids)
        drafts = [row.tokens for row in rows]
        logits = reference.model.lm_head(_states(reference.model, texts, drafts))[:, :num_ids].float()  # [N, V]
        best, ids = logits.topk(2)  # [N, 2]
        head = served.model.get_output_embeddings().weight
        low = torch.einsum("nd,nkd->nk", _states(served.model, texts, drafts).float(), head[ids].float())
    finally:
        torch.set_num_threads(threads)
    moved = (low[:, 0] - low[:, 1]) - (best[:, 0] - best[:, 1])
    margin = max(NEAR_TIE_GAP, MARGIN_OF_ERROR * float(moved.abs().max()))
    tokens = torch.tensor(sum(drafts, []))[:, None]  # [N, 1]
    other = torch.where(ids[:, :1] == tokens, best[:, 1:], best[:, :1])
    gaps = iter((logits.gather(1, tokens) - other)[:, 0].tolist())
    return {
        "format": FORMAT,
        "margin": math.ceil(margin * 1000) / 1000,
        "drafts": [
            {"tokens": text, "draft": draft, "gaps": [round(next(gaps), 3) for _ in draft]}
            for text, draft in zip(texts, drafts, strict=True)
        ],
    }


def _states(model: nn.Module, texts: Sequence[list[int]], drafts: Sequence[list[int]]) -> Tensor:
    """Last hidden states [N, D] at the positions that choose the drafted tokens, each given those before it."""
    rows = [text + draft[:-1] for text, draft in zip(texts, drafts, strict=True)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)  # [B, T], padded on the right: never looked at
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [B, T, D]
    return torch.cat([hidden[row, len(text) - 1 : len(rows[row])] for row, text in enumerate(texts)])


# ---------------------------------------------------------------------------- at loading


def check_prompts(chat: Any, num_ids: int, context: int, document: Mapping[str, Any]) -> None:
    """Renders the texts above again. SelfCheckError when template or tokenizer make other ids of one.

    An engine takes ids: `check` cannot see it. The texts are part of the format, who changes them raises FORMAT.
    """
    # a template that writes today's date makes other ids tomorrow; and while it is packed, an archive has no drafts
    if not document["drafts"] or "strftime_now" in str(chat.tokenizer.chat_template):
        return
    packed, (found, _) = [case["tokens"] for case in document["drafts"]], prompts(chat, num_ids, context)
    if packed != found:
        at = next(at for at in count() if packed[at : at + 1] != found[at : at + 1])
        problem = f"prompt {at} is rendered otherwise than when it was packed"
        raise SelfCheckError("self_check.json", problem, packed[at : at + 1], found[at : at + 1], FIX_TEXT)


def check(engine: Any, document: Mapping[str, Any]) -> None:
    """Drafts through `engine.draft`, all prompts in a batch, and compares. SelfCheckError at the first difference.

    Behind a near-tie each text goes on with the token that was packed, in a further batch, so that every position but
    the near-ties is compared. An engine with a prefix cache pays for each position once.
    """
    from drafter.engine import DraftRequest  # engine.py calls this function

    ends = [0] * len(document["drafts"])
    while True:
        expected = {}
        for number, case in enumerate(document["drafts"]):
            sure = [gap > document["margin"] for gap in case["gaps"]] + [False]
            start = next((at for at in range(ends[number], len(sure)) if sure[at]), None)
            if start is not None:
                ends[number] = sure.index(False, start)
                expected[number] = (case["tokens"] + case["draft"][:start], case["draft"][start : ends[number]])
        if not expected:
            return
        found = engine.draft([DraftRequest(tokens, len(draft)) for tokens, draft in expected.values()])
        for (number, (tokens, draft)), answer in zip(expected.items(), found, strict=True):
            if answer.tokens != draft:
                problem = f"prompt {number} drafts otherwise than when it was packed, from its token {len(tokens)} on"
                raise SelfCheckError("self_check.json", problem, draft, answer.tokens, FIX)
