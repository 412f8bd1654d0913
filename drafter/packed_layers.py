"""Layers of a transformers model that keep the codes: the oracle of every fused kernel. Plain, correct, slow.

Each call decodes in fp32 and casts once to the activations' dtype. Scales are held as int16 bit patterns, so that
`.to(dtype)` of a whole model cannot touch them.

Legend: R rows and D columns of a matrix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafter import quantization as q


class PackedLinear(nn.Module):
    """x [..., D] -> x W^T (+ bias) [..., R], W = the NF4 weight [R, D]."""

    def __init__(self, codes: Tensor, scales: Tensor, shape, bias: Tensor | None = None):
        super().__init__()
        self.out_features, self.in_features = shape
        self.register_buffer("codes", codes)
        self.register_buffer("scale_bits", scales.view(torch.int16))
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        scales = self.scale_bits.view(torch.bfloat16)
        weight = q.nf4_dequantize(self.codes, scales, (self.out_features, self.in_features)).to(x.dtype)
        return F.linear(x, weight, self.bias if self.bias is None else self.bias.to(x.dtype))


class PackedTable(nn.Module):
    """The INT8 table [R, D]; `PackedEmbedding` looks rows up in it, `PackedHead` multiplies by it. Tied = one table."""

    def __init__(self, codes: Tensor, scales: Tensor):
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scale_bits", scales.view(torch.int16))

    def rows(self, at) -> Tensor:
        """fp32 [..., D] of an index tensor or a slice."""
        return self.codes[at].float() * self.scale_bits.view(torch.bfloat16)[at].float()[..., None]


class PackedEmbedding(nn.Module):
    """ids [B, T] -> [B, T, D] in `dtype`, which the rest of the model computes in."""

    def __init__(self, table: PackedTable, dtype: torch.dtype):
        super().__init__()
        self.table, self.dtype = table, dtype

    def forward(self, ids: Tensor) -> Tensor:
        return self.table.rows(ids).to(self.dtype)


class PackedHead(nn.Module):
    """x [..., D] -> logits [..., R]."""

    def __init__(self, table: PackedTable):
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        # 8,192 rows at once: at D = 2,048 a decoded piece is 67 MB, the whole table of Qwen3 would be 1.2 GB
        starts = range(0, self.table.codes.shape[0], 8192)
        return torch.cat([F.linear(x, self.table.rows(slice(at, at + 8192)).to(x.dtype)) for at in starts], -1)
