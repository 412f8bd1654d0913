"""Attention for short texts on the CPU: the query heads of a group share one matrix product.

PyTorch's fused kernel for the CPU is made for long texts. At the 60 to 250 tokens of a row here, plain products in
bf16, forward and backward, took 9 ms where it took 17 (8 rows of 160 tokens), and 2.3 ms where it took 13 (20 rows of
60): 9 query heads, 3 key heads, width 64, 2 cores. Scores of [B, H, G * T, T] are small at that length.

`use_grouped_attention(model)` registers it with transformers; texts longer than LONGEST, a step of one token and
any other device go to transformers' own SDPA.

Dims: B rows, H key/value heads, G query heads of each, T tokens, E head width.
"""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "drafter_grouped"
LONGEST = 512  # at 512 tokens the scores of a row are G * H * 0.5 MB; beyond, the fused kernel's tiling wins


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention: query [B, H * G, T, E], key and value [B, H, T, E] -> [B, T, H * G, E].

    No mask means causal, as everywhere here: rows are padded on the right, and a causal position never sees what
    stands right of it.
    """
    rows, heads, tokens, width = query.shape
    if attention_mask is not None or tokens == 1 or tokens > LONGEST or query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    groups = key.shape[1]
    grouped = (query * (scaling or width**-0.5)).reshape(rows, groups, -1, width)  # [B, H, G * T, E]
    scores = grouped @ key.transpose(-1, -2)  # [B, H, G * T, T]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1).repeat(heads // groups, 1)  # [G * T, T]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (weights @ value).view(rows, heads, tokens, width).transpose(1, 2).contiguous(), None


def use_grouped_attention(model: PreTrainedModel) -> PreTrainedModel:
    """Let `model` attend by `grouped_attention`; returns it."""
    AttentionInterface.register(NAME, grouped_attention)
    model.set_attn_implementation(NAME)
    return model
