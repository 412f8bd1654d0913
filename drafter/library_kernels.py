"""The 4-bit product of bitsandbytes for the CPU: what the plain path multiplies few rows by where it is installed.

A decode step is bound by the bytes of its weights, and NF4 codes are a quarter of them. The library reads the codes in
an order of its own, so they are stored once more at load; it needs AVX512-BF16 and rows in multiples of 32.
This is the one place that imports bitsandbytes.

Legend: N tokens, R rows and K columns of a matrix, r rank.
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from drafter import quantization as q
from drafter.decoder import Matrix

# Tokens from which a product with decoded bf16 weights is the faster one: bitsandbytes took 0.7 ms for one token, 1.0
# for 4 and 3.3 for 16 of a 6,144 x 2,048 matrix where bf16 took 1.5 to 1.9.
FEW = 6


def bitsandbytes_functional() -> Any:
    """The module bitsandbytes.functional, silenced. ImportError where it is not installed."""
    # its advice to install `kernels`, which would call the hub when imported, is not for us
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    from bitsandbytes import functional

    return functional


@lru_cache(maxsize=1)
def _available() -> bool:
    if importlib.util.find_spec("bitsandbytes") is None or not torch.cpu._is_avx512_bf16_supported():
        return False
    return hasattr(bitsandbytes_functional(), "_convert_weight_packed_for_cpu")


def nf4_product(matrix: Matrix) -> Callable[[Tensor], Tensor] | None:
    """x bf16 [N, K] -> bf16 [N, R], adapter and bias included; None where the library cannot take the matrix."""
    rows, cols = matrix.shape
    if matrix.kind != "nf4" or rows % 32 or cols % 64 or not _available():
        return None
    bnb = bitsandbytes_functional()
    levels = torch.tensor(q.LEVELS)
    state = bnb.QuantState(
        absmax=matrix.scales.float(), shape=torch.Size(matrix.shape), code=levels, blocksize=q.BLOCK,
        quant_type="nf4", dtype=torch.bfloat16,
    )  # fmt: skip
    codes, state = bnb._convert_weight_packed_for_cpu(matrix.codes, state)

    def product(x: Tensor) -> Tensor:
        y = torch.ops.bitsandbytes.gemv_4bit(x.contiguous(), codes, list(matrix.shape), state.absmax, levels, q.BLOCK)
        if matrix.lora_a is not None:
            y = y + matrix.lora_scale * F.linear(F.linear(x, matrix.lora_a), matrix.lora_b)
        return y if matrix.bias is None else y + matrix.bias.to(y.dtype)

    return product
