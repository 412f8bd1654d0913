"""NF4 and INT8 against their definitions, against bitsandbytes, and at the ends of the number range."""

import io
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from drafter import quantization as q

SHAPES = [(1,), (63,), (65,), (3, 5), (1000, 7), (2, 64), (5, 192)]
WIDEST_GAP = 0.152  # half of it, in parts of absmax: (-0.6962 - -1) / 2


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def block_errors(weight: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Squared error of each block of 64, summed in fp64, the short last block over its real elements only."""
    error = (weight.double() - decoded.double()).square().reshape(-1)
    return torch.stack([piece.sum() for piece in error.split(q.BLOCK)])


def slow_nf4(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The definition, element by element: the nearest level, the lower one at a tie."""
    levels = torch.tensor(q.LEVELS)
    midpoints = (levels[1:] + levels[:-1]) / 2
    out = []
    for index, value in enumerate(weight.float().reshape(-1)):
        scale = scales[index // q.BLOCK].float()
        code = int((value * (1 / scale) > midpoints).sum())
        out.append(levels[code] * scale)
    return torch.stack(out).view(weight.shape)


# ---------------------------------------------------------------------------- NF4: definition


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_shapes(shape):
    """QNT-1: the last, partly filled block was scaled with whatever lay behind the tensor in memory."""
    size = torch.Size(shape).numel()
    memory = torch.full((size + 64,), 1e9)
    weight = memory[:size].view(shape).copy_(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    absmax, searched = q.nf4_scales(weight, search=False), q.nf4_scales(weight)
    codes = q.nf4_quantize(weight, absmax)
    decoded = q.nf4_dequantize(codes, absmax, shape)

    assert decoded.shape == weight.shape and decoded.dtype == torch.float32
    assert codes.shape == (-(-size // 2),)
    if size % 2:
        assert codes[-1] & 0xF == 0, "the spare nibble must be zero"
    assert torch.equal(decoded, slow_nf4(weight, absmax))
    own = weight.reshape(-1).split(q.BLOCK)
    for block, error in zip(own, (decoded - weight).abs().reshape(-1).split(q.BLOCK), strict=True):
        assert error.max() <= WIDEST_GAP * block.abs().max()
    better = q.fake_quant_nf4(weight, searched)
    assert bool((block_errors(weight, better) <= block_errors(weight, decoded)).all())
    memory[size:] = -1e9
    assert torch.equal(q.nf4_scales(weight), searched) and torch.equal(q.nf4_quantize(weight, absmax), codes)


def test_the_searched_scale_is_never_worse_and_usually_better():
    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    absmax = q.fake_quant_nf4(weight, q.nf4_scales(weight, search=False))
    searched = q.fake_quant_nf4(weight, q.nf4_scales(weight))
    before, after = block_errors(weight, absmax), block_errors(weight, searched)
    assert bool((after <= before).all())
    assert after.sum() < 0.9 * before.sum()


def test_moments_lower_the_weighted_error():
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(32, 128, generator=generator)
    moments = torch.rand(128, generator=generator) ** 4 * 10
    plain, weighted = q.nf4_scales(weight), q.nf4_scales(weight, moments=moments)

    def error(scales):
        return ((q.fake_quant_nf4(weight, scales) - weight).double().square() * moments).view(-1, 64).sum(1)

    absmax = error(q.nf4_scales(weight, search=False))
    assert bool((error(weighted) <= absmax).all())
    assert error(weighted).sum() < error(plain).sum()
    with pytest.raises(ValueError, match=r"moments are \[64\], expected \[128\]"):
        q.nf4_scales(weight, moments=moments[:64])


def test_table_lookup_equals_bucketize_on_every_neighbour_of_a_midpoint():
    """The fast code look-up must agree with the plain definition where it could go wrong: beside the midpoints."""
    levels = torch.tensor(q.LEVELS)
    midpoints = (levels[1:] + levels[:-1]) / 2
    points = torch.cat([midpoints, levels, torch.arange(-64, 65) / 64, torch.linspace(-1, 1, 10001)])
    near = torch.cat([points, torch.nextafter(points, torch.tensor(2.0)), torch.nextafter(points, torch.tensor(-2.0))])
    near = near.clamp(-1, 1)
    assert torch.equal(q._codes(near), torch.bucketize(near, midpoints, out_int32=True))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 130), exponent=st.integers(-30, 30), seed=st.integers(0, 99))
def test_fake_quant_is_the_packed_value_bit_for_bit(rows, columns, exponent, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    scales = q.nf4_scales(weight)
    packed = q.nf4_dequantize(q.nf4_quantize(weight, scales), scales, weight.shape)
    assert torch.equal(q.fake_quant_nf4(weight, scales), packed)
    assert torch.equal(packed, slow_nf4(weight, scales))
    table = q.int8_scales(weight)
    assert torch.equal(
        q.fake_quant_int8(weight, table), q.int8_dequantize(q.int8_quantize(weight, table), table)
    ) and torch.equal(q.fake_quant_int8(weight), q.fake_quant_int8(weight, table))


def test_chunks_meet_without_a_seam(monkeypatch):
    weight = torch.randn(50, 100, generator=torch.Generator().manual_seed(3))
    scales, table = q.nf4_scales(weight), q.int8_scales(weight)
    codes, rows = q.nf4_quantize(weight, scales), q.int8_quantize(weight, table)
    monkeypatch.setattr(q, "CHUNK", 3)
    assert torch.equal(q.nf4_scales(weight), scales) and torch.equal(q.nf4_quantize(weight, scales), codes)
    assert torch.equal(q.nf4_dequantize(codes, scales, (50, 100)), q.fake_quant_nf4(weight, scales))
    assert torch.equal(q.int8_quantize(weight, table), rows)
    torch.set_num_threads(2)
    assert torch.equal(q.nf4_scales(weight), scales) and torch.equal(q.nf4_quantize(weight, scales), codes)
    assert torch.equal(q.nf4_dequantize(codes, scales, (50, 100)), q.fake_quant_nf4(weight, scales))
    weight[49, 99] = 1e-39
    weight[49, 35:99] = 0
    with pytest.raises(ValueError, match="block 78 has absmax"):
        q.nf4_scales(weight)
    assert torch.get_num_threads() == 2


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 12),
    columns=st.integers(2, 80),
    step=st.integers(1, 3),
    skip=st.integers(0, 1),
    turn=st.booleans(),
)
def test_strided_views(rows, columns, step, skip, turn):
    """QNT-3: kernels read memory order, so a transposed or sliced tensor was quantized from the wrong values."""
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 100 + columns))
    view = (whole.t() if turn else whole)[::step]
    view = view[:, skip:] if view.shape[1] > skip else view
    plain = view.contiguous().clone()
    for weight in (view, view.bfloat16()):
        scales = q.nf4_scales(weight)
        assert torch.equal(scales, q.nf4_scales(plain.to(weight.dtype)))
        assert torch.equal(q.nf4_quantize(weight, scales), q.nf4_quantize(plain.to(weight.dtype), scales))
    assert torch.equal(q.int8_quantize(view, q.int8_scales(view)), q.int8_quantize(plain, q.int8_scales(plain)))


# ---------------------------------------------------------------------------- bitsandbytes


def test_codes_and_values_of_bitsandbytes():
    """Its kernels can take our codes as they are: same levels, same nibble order, same ties.

    bitsandbytes keeps fp32 absmax; blocks whose absmax is a bf16 number have equal scales in both.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)  # it advises a package that calls a hub at import
    from bitsandbytes import functional

    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(4))
    blocks = weight.view(-1, 64)
    blocks[:, 5] = blocks.abs().amax(1).mul(1.01).bfloat16().float()  # absmax, representable
    blocks[0] = 0
    scales = q.nf4_scales(weight, search=False)
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(state.code, torch.tensor(q.LEVELS))
    assert torch.equal(state.absmax[1:], scales[1:].float())
    ours = q.nf4_quantize(weight, scales)
    assert torch.equal(ours, theirs.view(-1))
    decoded = functional.dequantize_4bit(theirs, state)
    assert torch.equal(q.nf4_dequantize(ours, scales, weight.shape), decoded)


# ---------------------------------------------------------------------------- ends of the range


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1.0, 1e5, 3.3e38, torch.finfo(torch.float32).max])
def test_scales_survive_a_round_trip(size):
    """QNT-5: scales were clamped to a coarse minimum, or came back as the other 16-bit type."""
    weight = torch.rand(2, 64, generator=torch.Generator().manual_seed(5)) * size
    for scales in (q.nf4_scales(weight), q.nf4_scales(weight, search=False), q.int8_scales(weight)):
        back = load(save({"scales": scales}))["scales"]
        assert back.dtype == torch.bfloat16 and torch.equal(back.view(torch.int16), scales.view(torch.int16))
        assert bool((scales > 0).all())
    scales = q.nf4_scales(weight, search=False)
    buffer = io.BytesIO(save({"codes": q.nf4_quantize(weight, scales), "scales": scales}))
    back = load(buffer.getvalue())
    decoded = q.nf4_dequantize(back["codes"], back["scales"], weight.shape)
    assert torch.equal(decoded, q.fake_quant_nf4(weight, scales))
    assert float((decoded - weight).abs().max()) <= WIDEST_GAP * float(weight.max())


def test_a_scale_that_would_vanish_is_refused():
    weight = torch.zeros(3, 64)
    weight[1, 7] = 1e-39
    with pytest.raises(ValueError, match="up_proj: block 1 has absmax 1e-39"):
        q.nf4_scales(weight, name="up_proj")
    with pytest.raises(ValueError, match="scale 1 is"):
        q.int8_scales(weight)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan"), 1e-39])
def test_given_scales_are_checked(value):
    weight = torch.ones(2, 64)
    scales = torch.tensor([1.0, value]).bfloat16()
    for use in (q.nf4_quantize, q.fake_quant_nf4, q.int8_quantize, q.fake_quant_int8):
        with pytest.raises(ValueError, match="gate: scale 1 is"):
            use(weight, scales, name="gate")
        with pytest.raises(ValueError, match="float32"):
            use(weight, torch.ones(2), name="gate")
        with pytest.raises(ValueError, match="float16"):  # QNT-5: read back as the wrong 16-bit type
            use(weight, torch.ones(2).half(), name="gate")
        with pytest.raises(ValueError, match=r"\[3\]"):
            use(weight, torch.ones(3).bfloat16(), name="gate")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_refused_with_their_index(bad):
    weight = torch.ones(4, 64)
    weight[2, 33] = bad
    ones = torch.ones(4).bfloat16()
    for use in (
        lambda: q.nf4_scales(weight, name="k_proj"),
        lambda: q.int8_scales(weight, name="k_proj"),
        lambda: q.nf4_quantize(weight, ones, name="k_proj"),
        lambda: q.fake_quant_nf4(weight, ones, name="k_proj"),
        lambda: q.fake_quant_int8(weight, ones, name="k_proj"),
    ):
        with pytest.raises(ValueError, match=r"k_proj\[2, 33\] is -?(nan|inf)"):
            use()


def test_zeros_decode_to_zeros():
    weight = torch.zeros(3, 65)
    scales = q.nf4_scales(weight)
    q.check_scales(scales, 4)
    assert torch.equal(q.nf4_dequantize(q.nf4_quantize(weight, scales), scales, weight.shape), weight)
    assert torch.equal(q.fake_quant_int8(weight), weight)


def test_int8_clamps_before_the_cast():
    """A bf16 scale rounded down makes absmax / scale 127.4 or more: without the clamp 128 wrapped to -128."""
    weight = torch.linspace(0.5, 2.0, 4001)[:, None] * torch.tensor([1.0, -1.0, 0.3])
    scales = q.int8_scales(weight)
    codes = q.int8_quantize(weight, scales)
    assert int(codes.max()) == 127 and int(codes.min()) == -127
    assert bool((weight.abs().amax(1) / scales.float() > 127).any()), "the case must occur for the test to bite"
    error = (q.int8_dequantize(codes, scales) - weight).abs()
    assert bool((error <= scales.float()[:, None] * 0.51).all())
