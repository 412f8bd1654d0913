"""NF4 and INT8: one definition of every number, used by fake-quantization, packer, loader and kernels alike.

NF4   blocks of 64 along the flattened (row-major) tensor, 16 levels (those of bitsandbytes), one bf16 scale a block.
      value = LEVELS[code] * scale; two codes a byte, the first element in the high nibble.
      The scales may be stored double-quantized: one byte each, and two fp32 numbers for each group of 256.
INT8  one bf16 scale a row, codes -127..127: value = code * scale. For the embedding, which is the output head too.

A scale IS a bf16 tensor: what is decoded can therefore never differ between a trainer that holds it in memory,
an archive that stores it and a kernel that reads it. Products are taken in fp32.

    scales = nf4_scales(weight)                      # [blocks] bf16, searched
    codes = nf4_quantize(weight, scales)             # [ceil(n / 2)] uint8
    nf4_dequantize(codes, scales, weight.shape)      # fp32, bit-equal to fake_quant_nf4(weight, scales)

Legend: n elements, b blocks, g groups of blocks, R rows, D columns.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
# The levels of bitsandbytes' NF4 (QLoRA, appendix E: quantiles of N(0, 1) scaled to [-1, 1], with an exact 0).
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# Scales that are tried, as parts of the block's absmax; least squares then refines the best of them. On a block of
# SmolLM2-135M this takes 20 % off absmax's squared error. 43 steps of 1 % from 0.79 to 1.21 would take off another
# 0.7 % of it, in (43 + 3) / (7 + 3) = 4.6 times the passes.
CLIP_GRID = (1.0, 0.96, 0.92, 0.88, 0.84, 1.04, 1.08)
# The smallest normal bf16. Below it a scale would be denormal, and kernels that flush denormals would read 0.
MIN_SCALE = 2.0**-126
# Scales of one double-quantized group, as in QLoRA, and the largest relative change that one of them may suffer.
GROUP, GROUP_LOSS = 256, 0.01
# Blocks handled at once: 4096 * 64 * 4 bytes = 1 MB a temporary, so that the half dozen of them stay in the cache.
CHUNK = 4096


# ---------------------------------------------------------------------------- Checks


def check_finite(weight: Tensor, name: str = "tensor") -> None:
    """Raises ValueError with the tensor's name and the index of its first non-finite value."""
    if not _all_finite(weight):
        index = tuple((~torch.isfinite(weight)).nonzero()[0].tolist())
        raise ValueError(f"{name}{list(index)} is {weight[index].item()}: a non-finite weight cannot be quantized")


def _all_finite(weight: Tensor) -> bool:
    # NaN and inf survive a minimum and maximum, which need no temporaries (isfinite().all() takes several times longer)
    return weight.numel() == 0 or bool(torch.isfinite(torch.stack(torch.aminmax(weight))).all())


def check_scales(scales: Tensor, count: int, name: str = "tensor") -> None:
    """Raises ValueError unless `scales` is [count] bf16, every one finite, positive and normal."""
    if scales.dtype != torch.bfloat16 or tuple(scales.shape) != (count,):
        raise ValueError(f"{name}: scales are {scales.dtype} {list(scales.shape)}, expected bfloat16 [{count}]")
    good = torch.isfinite(scales) & (scales >= MIN_SCALE)
    if not bool(good.all()):
        at = int((~good).nonzero()[0])
        raise ValueError(f"{name}: scale {at} is {scales[at].item()}, expected a finite number >= {MIN_SCALE:.3g}")


def block_count(shape) -> int:
    return -(-prod(shape) // BLOCK)


# ---------------------------------------------------------------------------- chunks over cores


def _each_chunk(work: Callable[[int], Any], count: int, step: int, device: torch.device) -> list:
    """[work(0), work(step), ...] below `count`, in order; on the CPU one thread a chunk.

    A chunk's ten operations take a tenth of a millisecond each. Split over threads, each would end at a barrier, and
    where another process holds one core a barrier waits for a time slice: ten times slower than one thread, measured.
    """
    starts, threads = range(0, count, step), torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        return [work(first) for first in starts]
    try:
        if len(starts) < 2:
            torch.set_num_threads(1)
            return [work(first) for first in starts]
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(work, starts))
    finally:
        torch.set_num_threads(threads)  # a thread's own setting, but also the default of threads that start later


# ---------------------------------------------------------------------------- NF4


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(levels [16], low [129], split [129]): the nearest level by one look-up and one comparison.

    [-1, 1] is cut into 128 cells, narrower than the closest two midpoints (0.081), so a cell holds one at most:
    code(x) = low[cell] + (x > split[cell]). This is exact for every float, not only nearly, because cell() is
    monotone: a midpoint in a lower cell is below x, one in a higher cell above it, and its own cell's is compared.
    `torch.bucketize` gives the same codes (a test says so) and took more than four times as long.
    """
    levels = torch.tensor(LEVELS, device="cpu")
    midpoints = (levels[1:] + levels[:-1]) / 2  # [15]; a value on a midpoint takes the lower code, as in bitsandbytes
    home = _cell(midpoints)
    cells = torch.arange(129, device="cpu")
    low = (home[None, :] < cells[:, None]).sum(1).to(torch.int32)
    split = torch.full((129,), torch.inf, device="cpu")
    split[home] = midpoints
    return levels.to(device), low.to(device), split.to(device)


def _cell(x: Tensor) -> Tensor:
    return ((x + 1) * 64).int()


def _codes(unit: Tensor) -> Tensor:
    """Codes int32 [b, 64] of values already divided by their block's scale and clamped to [-1, 1]."""
    _, low, split = _tables(unit.device)
    flat = unit.reshape(-1)
    cell = _cell(flat)
    return (low.index_select(0, cell) + (flat > split.index_select(0, cell))).view(unit.shape)


def _nearest(blocks: Tensor, scales: Tensor) -> Tensor:
    # times 1/s, not by s: the order of operations of bitsandbytes, so that codes are equal to the last tie
    return _codes((blocks * (1.0 / scales.float())[:, None]).clamp_(-1, 1))


def _blocks_of(weight: Tensor, name: str) -> Callable[[int], Tensor]:
    """first -> [b, 64] fp32: up to CHUNK blocks of the flattened tensor, a short last one filled with zeros; finite."""
    # `reshape` copies a strided view in logical order: memory order, and what lies behind a view, never matter
    flat = weight.detach().reshape(-1)

    def blocks(first: int) -> Tensor:
        piece = flat[first * BLOCK : (first + CHUNK) * BLOCK].float()
        if not _all_finite(piece):
            check_finite(weight, name)  # raises, with the index
        return F.pad(piece, (0, -piece.numel() % BLOCK)).view(-1, BLOCK)

    return blocks


@torch.no_grad()
def nf4_scales(weight: Tensor, search: bool = True, moments: Tensor | None = None, name: str = "tensor") -> Tensor:
    """One bf16 scale for each block of 64 -> [b].

    Without `search` it is the block's absmax, cut (not rounded) to bf16: an error of at most half the widest gap
    of the levels, 0.152 * absmax, then holds for every element. With it, the clip grid and three rounds of least
    squares s = sum(m w c) / sum(m c^2), c = level of the nearest code, are tried, and the scale with the smallest
    error sum m (w - s c)^2 stays: never worse than absmax. `moments` [D]: mean square of each input column.
    A block of zeros gets scale 1. ValueError: non-finite weight, non-zero block too small for a normal bf16.
    """
    if moments is not None and moments.shape != weight.shape[-1:]:
        raise ValueError(f"{name}: moments are {list(moments.shape)}, expected [{weight.shape[-1]}], one a column")
    blocks_from = _blocks_of(weight, name)

    def work(first: int) -> Tensor:
        blocks = blocks_from(first)
        absmax = blocks.abs().amax(1)  # [b]
        tiny = (absmax > 0) & (absmax < MIN_SCALE)
        if bool(tiny.any()):
            at = int(tiny.nonzero()[0])
            raise ValueError(
                f"{name}: block {first + at} has absmax {absmax[at].item():.3g}; "
                f"its scale would become 0 (smallest: {MIN_SCALE:.3g})"
            )
        # cutting the low 16 bits of an fp32 = rounding to bf16 towards zero; it cannot overflow to inf either
        scales = torch.where(absmax > 0, (absmax.view(torch.int32) & -65536).view(torch.float32), 1.0)
        if search:
            scales = _search(blocks, scales, _block_moments(moments, first, blocks))
        return scales.bfloat16()

    found = _each_chunk(work, block_count(weight.shape), CHUNK, weight.device)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.bfloat16, device=weight.device)


def _block_moments(moments: Tensor | None, first: int, blocks: Tensor) -> Tensor | None:
    if moments is None:
        return None
    # element i of the flattened [R, D] tensor multiplies input column i % D
    index = torch.arange(first * BLOCK, first * BLOCK + blocks.numel(), device=blocks.device) % moments.numel()
    return moments.to(blocks.device, torch.float32)[index].view_as(blocks)


def _power_of_two(exponent: Tensor) -> Tensor:
    # written as bits, because pow(2, e) may be off in its last bit
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def _search(blocks: Tensor, absmax: Tensor, moments: Tensor | None) -> Tensor:
    """Scales [b] (fp32, bf16-representable) with the smallest (weighted) squared error among those tried."""
    levels = _tables(blocks.device)[0]
    # Errors are compared on blocks of absmax about 1: squares of 1e-30 would vanish in fp32, those of 1e30 overflow.
    # Times a power of two a unit block has the very bits of the block, its exponents moved, and so has its bf16 scale.
    up = _power_of_two(torch.frexp(absmax)[1].clamp(-125, 126))
    unit, best = blocks / up[:, None], absmax / up

    def measure(scales):
        level = levels.index_select(0, _nearest(unit, scales).reshape(-1)).view_as(unit)  # [b, 64]
        error = (unit - scales[:, None] * level).square()
        weighted = level if moments is None else level * moments
        if moments is not None:
            error = error * moments
        least_squares = (unit * weighted).sum(1) / (level * weighted).sum(1)
        return error.sum(1), least_squares

    start = best
    best_error, best_ls = measure(best)

    def attempt(candidate):
        nonlocal best, best_error, best_ls
        # a candidate that is not usable (0/0 in a block of zeros) is replaced by the scale that we have
        candidate = torch.where((candidate > 2.0**-6) & (candidate < 2), candidate, best).bfloat16().float()
        error, least_squares = measure(candidate)
        # an fp32 sum of 64 squares is good to 4e-6: a smaller gain could be a loss in truth
        better = error < best_error * (1 - 1e-5)
        best = torch.where(better, candidate, best)
        best_error = torch.where(better, error, best_error)
        best_ls = torch.where(better, least_squares, best_ls)

    for part in CLIP_GRID[1:]:
        attempt(start * part)
    for _ in range(3):
        attempt(best_ls)
    found = best * up
    usable = torch.isfinite(found) & (found >= MIN_SCALE)  # at the very ends of the range absmax stays
    return torch.where(usable, found, absmax)


@dataclass(frozen=True)
class DoubleQuantized:
    """Block scales as an archive stores them; see `double_quantize`."""

    codes: Tensor  # uint8: 256 codes of a group (fewer of the last), or the bf16 bytes of a plain one
    groups: Tensor  # fp32 [g, 2]: lowest scale and step; zeros for a plain group
    plain: list[int]  # groups that keep bf16 scales, rising


def double_sizes(count: int, plain: Sequence[int]) -> tuple[int, int]:
    """(bytes of codes, groups) of `count` scales."""
    groups = -(-count // GROUP)
    return count + sum(min(GROUP, count - GROUP * group) for group in plain), groups


@torch.no_grad()
def double_quantize(scales: Tensor, loss: float = GROUP_LOSS) -> DoubleQuantized:
    """bf16 [b] -> one byte a scale: code = round((scale - low) / step), low and step = (high - low) / 255 of a group.

    After QLoRA (Dettmers et al., 2023, section 3), which takes the mean off and stores what is left as 8-bit floats;
    scales of a group lie within a small factor of each other, and for such numbers an even grid loses less. A group
    in which a scale would change by more than `loss` of itself stays as it is; with 0 all scales are kept exactly.

    Quantizing what was decoded gives the same scales again, so a trainer that holds decoded scales hands them to the
    packer unchanged. `low` and `high` are bf16 and decode to themselves: the grid stays. Let v be the grid point of a
    scale s, and d what v rounds to. No bf16 number is nearer to v than d, and s is one: |v - d| <= |v - s| <= step / 2,
    hence v is the grid point of d too. Two points tie only where step is the spacing of s and d and the grid lies on
    the midpoints between bf16 numbers; but then high = low + 255 step would be such a midpoint itself.
    """
    size, grouped = scales.numel(), F.pad(scales.float(), (0, -scales.numel() % GROUP)).view(-1, GROUP)  # [g, 256]
    real = torch.arange(grouped.numel(), device=scales.device).view_as(grouped) < size
    low = torch.where(real, grouped, torch.inf).amin(1)
    step = (torch.where(real, grouped, 0).amax(1) - low) / 255  # [g]
    codes = ((grouped - low[:, None]) / torch.where(step > 0, step, 1)[:, None]).round().clamp(0, 255).to(torch.uint8)
    change = (_grid(codes, low, step) - grouped).abs() / torch.where(real, grouped, 1)
    flags = torch.where(real, change, 0).amax(1) > loss  # [g]
    stored = _stored(flags, size)
    both = scales.contiguous().view(torch.uint8).view(-1, 2).clone()
    both[:, 0] = torch.where(stored[:, 1], both[:, 0], codes.view(-1)[:size])
    groups = torch.stack((low, step), 1)
    groups[flags] = 0
    return DoubleQuantized(both[stored], groups, flags.nonzero()[:, 0].tolist())


def _stored(flags: Tensor, count: int) -> Tensor:
    """bool [b, 2]: which bytes of each scale are stored: two in a flagged group, elsewhere the first, as the code."""
    plain = flags.repeat_interleave(GROUP)[:count]
    return torch.stack((torch.ones_like(plain), plain), 1)


def _grid(codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
    """fp32 [g, 256] of codes, rounded to bf16. A product, then a sum: never fused, so that all machines agree."""
    product = codes.float() * step[:, None]
    return (product + low[:, None]).bfloat16().float()


@torch.no_grad()
def double_dequantize(codes: Tensor, groups: Tensor, plain: Sequence[int], count: int, name: str = "tensor") -> Tensor:
    """The parts of a `DoubleQuantized` of `count` scales -> bf16 [b]; ValueError for groups that are never made.

    Scales that are not finite, positive and normal can come of codes that are never made: `check_scales` finds them.
    """
    low, step = groups[:, 0], groups[:, 1]
    flags = torch.zeros(groups.shape[0], dtype=torch.bool, device=groups.device)
    flags[list(plain)] = True
    good = torch.isfinite(groups).all(1) & torch.where(flags, (groups == 0).all(1), (low > 0) & (step >= 0))
    if not bool(good.all()):
        at = int((~good).nonzero()[0])
        raise ValueError(f"{name}: group {at} of the scales has low and step {groups[at].tolist()}")
    if not plain:
        return _grid(F.pad(codes, (0, -count % GROUP)).view(-1, GROUP), low, step).view(-1)[:count].bfloat16()
    stored = _stored(flags, count)
    both = torch.zeros_like(stored, dtype=torch.uint8)
    both[stored] = codes
    grid = _grid(F.pad(both[:, 0], (0, -count % GROUP)).view(-1, GROUP), low, step).view(-1)[:count]
    return torch.where(stored[:, 1], both.view(torch.bfloat16)[:, 0], grid.bfloat16())


def double_quantized(scales: Tensor) -> Tensor:
    """What scales [b] decode to once they were double-quantized: the state of a trainer whose packer does it."""
    found = double_quantize(scales)
    return double_dequantize(found.codes, found.groups, found.plain, scales.numel())


@torch.no_grad()
def nf4_quantize(weight: Tensor, scales: Tensor, name: str = "tensor") -> Tensor:
    """Nearest codes, two a byte -> uint8 [ceil(n / 2)]; the spare nibble of an odd tensor is 0.

    ValueError: non-finite weight, or scales that are not [b] bf16, finite, positive and normal.
    """
    check_scales(scales, block_count(weight.shape), name)
    size, blocks_from = weight.numel(), _blocks_of(weight, name)

    def work(first: int) -> Tensor:
        codes = _nearest(blocks_from(first), scales[first : first + CHUNK]).to(torch.uint8).view(-1)
        return (codes[0::2] << 4) | codes[1::2]

    packed = _each_chunk(work, scales.numel(), CHUNK, weight.device)
    if not packed:
        return torch.empty(0, dtype=torch.uint8, device=weight.device)
    out = torch.cat(packed)[: -(-size // 2)]
    if size % 2:
        out[-1] &= 0xF0
    return out


@torch.no_grad()
def nf4_dequantize(codes: Tensor, scales: Tensor, shape) -> Tensor:
    """uint8 [ceil(n / 2)], bf16 [b] -> fp32 of `shape`: LEVELS[code] * scale."""
    size = prod(shape)
    assert codes.dtype == torch.uint8 and codes.shape == (-(-size // 2),), (codes.dtype, codes.shape, tuple(shape))
    assert scales.dtype == torch.bfloat16 and scales.shape == (block_count(shape),), (scales.dtype, scales.shape)
    levels = _tables(codes.device)[0]
    out = torch.empty(size, dtype=torch.float32, device=codes.device)

    def work(first: int) -> None:
        piece = codes[first * BLOCK // 2 : (first + CHUNK) * BLOCK // 2]
        both = torch.stack((piece >> 4, piece & 0xF), 1).view(-1).int()
        target = out[first * BLOCK : (first + CHUNK) * BLOCK]
        value = levels.index_select(0, both[: target.numel()])
        scale = scales[first : first + CHUNK].float()
        if target.numel() % BLOCK == 0:
            torch.mul(value.view(-1, BLOCK), scale[:, None], out=target.view(-1, BLOCK))
        else:  # the tensor's end, with a short block
            torch.mul(value, scale.repeat_interleave(BLOCK)[: target.numel()], out=target)

    _each_chunk(work, scales.numel(), CHUNK, codes.device)
    return out.view(tuple(shape))


@torch.no_grad()
def fake_quant_nf4(weight: Tensor, scales: Tensor, name: str = "tensor") -> Tensor:
    """What the archive will decode to, without packing: fp32, bit-equal to nf4_dequantize(nf4_quantize(...)).

    No gradient flows through it; a trainer writes `weight + (fake_quant_nf4(weight, scales) - weight).detach()`,
    or better a function whose backward is the identity, which does not round the sum.
    """
    check_scales(scales, block_count(weight.shape), name)
    levels = _tables(weight.device)[0]
    out = torch.empty(weight.numel(), dtype=torch.float32, device=weight.device)
    blocks_from = _blocks_of(weight, name)

    def work(first: int) -> None:
        blocks, scale = blocks_from(first), scales[first : first + CHUNK]
        value = levels.index_select(0, _nearest(blocks, scale).view(-1)).view_as(blocks) * scale.float()[:, None]
        target = out[first * BLOCK : (first + CHUNK) * BLOCK]
        target.copy_(value.view(-1)[: target.numel()])

    _each_chunk(work, scales.numel(), CHUNK, weight.device)
    return out.view(weight.shape)


# ---------------------------------------------------------------------------- INT8 per row


def _each_rows(work: Callable[[slice, Tensor], Any], weight: Tensor, name: str) -> list:
    """[work(slice, rows [r, D] fp32)] over the matrix, about CHUNK blocks' worth of elements at once; finite."""
    if weight.dim() != 2:
        raise ValueError(f"{name}: INT8 is per row of a matrix, the shape is {list(weight.shape)}")
    step = max(1, CHUNK * BLOCK // max(1, weight.shape[1]))

    def chunk(first: int) -> Any:
        at = slice(first, first + step)
        rows = weight[at].detach().float()
        if not _all_finite(rows):
            check_finite(weight, name)  # raises, with the index
        return work(at, rows)

    return _each_chunk(chunk, weight.shape[0], step, weight.device)


@torch.no_grad()
def int8_scales(weight: Tensor, name: str = "tensor") -> Tensor:
    """absmax / 127 of each row, rounded to bf16 -> [R]; a row of zeros gets 1. ValueError as for NF4."""
    absmax = torch.cat(_each_rows(lambda _, rows: rows.abs().amax(1), weight, name))
    scales = torch.where(absmax > 0, absmax / 127, 1.0).bfloat16()
    check_scales(scales, weight.shape[0], name)
    return scales


def _int8_codes(rows: Tensor, scales: Tensor) -> Tensor:
    # A bf16 scale may be rounded down, absmax / scale is then up to 127.5: clamp before the cast, or 128 wraps to -128.
    return (rows / scales.float()[:, None]).round_().clamp_(-127, 127)


@torch.no_grad()
def int8_quantize(weight: Tensor, scales: Tensor, name: str = "tensor") -> Tensor:
    """[R, D] -> int8 [R, D], round half to even, clamped to -127..127."""
    check_scales(scales, weight.shape[0], name)
    out = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    _each_rows(lambda at, rows: out[at].copy_(_int8_codes(rows, scales[at])), weight, name)
    return out


@torch.no_grad()
def int8_dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """int8 [R, D], bf16 [R] -> fp32 [R, D]."""
    return codes.float() * scales.float()[:, None]


@torch.no_grad()
def fake_quant_int8(weight: Tensor, scales: Tensor | None = None, name: str = "tensor") -> Tensor:
    """fp32 [R, D], bit-equal to int8_dequantize(int8_quantize(...)); `scales` default to those of the rows now."""
    scales = int8_scales(weight, name) if scales is None else scales
    check_scales(scales, weight.shape[0], name)
    out = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)

    def work(at: slice, rows: Tensor) -> None:
        torch.mul(_int8_codes(rows, scales[at]), scales[at].float()[:, None], out=out[at])

    _each_rows(work, weight, name)
    return out
