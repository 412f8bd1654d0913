"""The native kernels held against the plain path on a random model, before a process uses them for the first time.

A compiler, a flag or a processor that computes something else must not show as a drafter that accepts nothing: every
kind of product (NF4 with adapter, dense, INT8; one token, a few, enough to decode rows first), norms, rotation and
attention take part, at widths that end in half a chunk.
"""

from functools import lru_cache

import torch
from torch import Tensor

from drafter import quantization as q
from drafter.decoder import Decoder, Layer, Matrix
from drafter.native import FLAGS, BuildError, NativeForward
from drafter.plain import PlainForward

# Relative error of the logits' vector. Eight bits of an activation (2^-9 at most each) average out to about 0.3 % over
# two layers; a wrong nibble, scale or head gives 50 % and more.
LIMIT = 0.02


def random_decoder(
    *,
    packed: bool = True,
    layers: int = 2,
    hidden: int = 192,
    intermediate: int = 320,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    num_ids: int = 203,
    norms: bool = True,
    biases: bool = False,
    tied: bool = False,
    rank: int = 4,
    positions: int = 64,
    seed: int = 0,
) -> Decoder:
    """A random member of the family; `packed`: NF4, INT8 and an adapter of `rank`, else dense bf16 without."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def matrix(rows: int, cols: int) -> Matrix:
        weight = normal(rows, cols, scale=cols**-0.5)
        bias = normal(rows, scale=0.1) if biases else None
        if not packed:
            return Matrix("dense", (rows, cols), weight.bfloat16(), bias=bias)
        scales = q.nf4_scales(weight, search=False)
        codes = q.nf4_quantize(weight, scales)
        if not rank:
            return Matrix("nf4", (rows, cols), codes, scales, bias)
        a, b = normal(rank, cols, scale=cols**-0.5).bfloat16(), normal(rows, rank, scale=0.2).bfloat16()
        return Matrix("nf4", (rows, cols), codes, scales, bias, a, b, 0.5)

    def table() -> Matrix:
        weight = normal(num_ids + 5, hidden, scale=1.0)
        if not packed:
            return Matrix("dense", tuple(weight.shape), weight.bfloat16())
        scales = q.int8_scales(weight)
        return Matrix("int8", tuple(weight.shape), q.int8_quantize(weight, scales), scales)

    def layer() -> Layer:
        shapes = [(heads * head_dim, hidden), (kv_heads * head_dim, hidden), (kv_heads * head_dim, hidden)]
        shapes += [(hidden, heads * head_dim), (intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
        one = [1 + normal(width, scale=0.1) for width in (hidden, hidden, head_dim, head_dim)]
        return Layer(*(matrix(*shape) for shape in shapes), *one[:2], *(one[2:] if norms else (None, None)))

    embedding = table()
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2)[None] / head_dim)
    return Decoder(
        layers=tuple(layer() for _ in range(layers)),
        embedding=embedding,
        head=embedding if tied else table(),  # a tied one would repeat its input: nothing but the table speaks
        final_norm=torch.ones(hidden),
        cos=angles.cos(),
        sin=angles.sin(),
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=1e-6,
        attention_scale=head_dim**-0.5,
        num_ids=num_ids,
        rank=rank if packed else 0,
    )


def states_of(forward: NativeForward | PlainForward, calls: list[tuple]) -> Tensor:
    """fp32 [W, D] of all tokens of some calls (tokens, slots, positions), one after the other on one cache."""
    cache = forward.new_cache(2, forward.decoder.positions)
    found = [forward(cache, *call, list(range(len(call[0]))), hidden=True).hidden for call in calls]
    return torch.cat(found).cpu()


def calls_of(num_ids: int, lengths: tuple[int, ...] = (21, 1, 5)) -> list[tuple]:
    """A prefill of slot 0, a step, then a call of both slots."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(num_ids, (sum(lengths) + 3,), generator=generator).tolist()
    first, second = lengths[0], lengths[0] + lengths[1]
    return [
        (tokens[:first], [0] * first, list(range(first))),
        (tokens[first:second], [0] * lengths[1], list(range(first, second))),
        (tokens[second:], [0] * lengths[2] + [1] * 3, [*range(second, second + lengths[2]), 0, 1, 2]),
    ]


@lru_cache(maxsize=4)
def check_kernels(flags: tuple[str, ...] = FLAGS) -> float:
    """The largest relative error that was found; BuildError when it is above LIMIT, or nothing could be built."""
    worst = 0.0
    for packed in (True, False):
        decoder = random_decoder(packed=packed)
        calls = calls_of(decoder.num_ids)
        native = NativeForward(decoder, threads=min(2, torch.get_num_threads()), flags=flags)
        found, expected = (
            states_of(forward, calls) for forward in (native, PlainForward(decoder, dtype=torch.float32))
        )
        head = decoder.head.weight()
        error = ((found - expected) @ head.T).norm() / (expected @ head.T).norm()
        worst = max(worst, float(error))
    if not worst <= LIMIT:
        raise BuildError(f"the kernels differ from the plain path by {worst:.3g} of the logits, more than {LIMIT}")
    return worst
