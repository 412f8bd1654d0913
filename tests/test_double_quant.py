"""Block scales in one byte each: what they decode to, that nothing drifts, and what an archive refuses of them."""

import json
import math
import struct

import archives
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import model_io
from drafter import quantization as q
from drafter.archive import WEIGHTS_METADATA, check_quantization, read_archive, stream_specs
from drafter.streams import ContentError, safetensors_header
from drafter.weights import MasterWeights

GROUP = q.GROUP


def again(found: q.DoubleQuantized, count: int) -> torch.Tensor:
    return q.double_dequantize(found.codes, found.groups, found.plain, count)


def spread(count: int, factor: float, seed: int, exponent: int = -6) -> torch.Tensor:
    """Scales within `factor` of each other, around 2 ** exponent."""
    generator = torch.Generator().manual_seed(seed)
    return (2.0**exponent * factor ** torch.rand(count, generator=generator)).bfloat16()


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 3 * GROUP + 1),
    factor=st.sampled_from([1.0, 1.001, 1.01, 1.5, 3.0, 10.0, 1000.0]),
    seed=st.integers(0, 1000),
    exponent=st.sampled_from([-100, -20, -6, 0, 30]),
)
def test_decoded_scales_are_scales_and_stay_what_they_are(count, factor, seed, exponent):
    scales = spread(count, factor, seed, exponent)
    found = q.double_quantize(scales)
    size, groups = q.double_sizes(count, found.plain)
    assert found.codes.shape == (size,) and found.groups.shape == (groups, 2)
    decoded = again(found, count)
    q.check_scales(decoded, count)
    change = (decoded.float() - scales.float()).abs() / scales.float()
    assert change.max() <= q.GROUP_LOSS
    assert torch.equal(q.double_quantized(scales), decoded)
    # a trainer that holds decoded scales hands them to the packer, which finds them bit for bit and keeps its bytes
    exact = q.double_quantize(decoded, 0.0)
    assert torch.equal(again(exact, count), decoded)
    assert exact.plain == found.plain


def test_no_scale_drifts_between_any_two_ends():
    """The grid next to the spacing of bf16, and groups over an edge where that spacing doubles, are where it could.

    All groups of bf16 numbers from 1 to 8 whose ends lie at most a factor of 8 apart, one end in five; each has its
    first and last 127 numbers. Random groups never meet most of these grids.
    """
    every = torch.arange(0x3F80, 0x4101, dtype=torch.int16).view(torch.bfloat16)  # 1, 1 + 2 ** -7, ... 8
    for first in range(0, len(every), 5):
        ends = torch.arange(first, len(every))
        inner = torch.arange(127)
        low_side = torch.minimum(first + inner, ends[:, None])
        high_side = torch.maximum(ends[:, None] - inner, torch.tensor(first))
        scales = every[torch.cat((low_side, high_side, ends[:, None], ends[:, None]), 1)].view(-1)  # [groups * 256]
        decoded = q.double_quantized(scales)
        assert torch.equal(q.double_quantized(decoded), decoded)


def test_nothing_is_made_on_another_device():
    """A trainer on a GPU held its scales there, and the flags of plain groups were made on the CPU.

    `meta` as the default device stands for any that the scales are not on: what is made without saying where fails.
    """
    scales = spread(3 * GROUP, 2.0, 0)
    scales[GROUP + 7] = 1000.0
    expected = q.double_quantized(scales)
    with torch.device("meta"):
        found = q.double_quantized(scales)
    assert torch.equal(found, expected)


def test_a_group_that_would_lose_more_than_a_hundredth_stays_as_it_is():
    scales = spread(3 * GROUP, 2.0, 0)
    scales[GROUP + 7] = 1000.0  # one outlier, and the grid is too wide for the 255 others
    found = q.double_quantize(scales)
    assert found.plain == [1]
    assert torch.equal(again(found, len(scales))[GROUP : 2 * GROUP], scales[GROUP : 2 * GROUP])
    assert torch.equal(found.groups[1], torch.zeros(2)) and found.codes.numel() == 4 * GROUP


def test_equal_scales_have_no_step():
    found = q.double_quantize(torch.full((300,), 0.5, dtype=torch.bfloat16))
    assert found.plain == [] and found.groups[:, 1].tolist() == [0, 0]
    assert torch.equal(again(found, 300), torch.full((300,), 0.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("bad", [(-1.0, 0.1), (1.0, -0.1), (float("nan"), 0.1), (1.0, float("inf")), (0.0, 0.0)])
def test_groups_that_no_packer_writes_are_refused(bad):
    found = q.double_quantize(spread(GROUP, 2.0, 0))
    with pytest.raises(ValueError, match="group 0"):
        q.double_dequantize(found.codes, torch.tensor([bad]), [], GROUP)
    with pytest.raises(ValueError, match="group 0"):  # a plain group has no numbers
        q.double_dequantize(torch.cat((found.codes, found.codes)), found.groups, [0], GROUP)


@pytest.mark.parametrize("storage", ["zst", "plain"])
def test_an_archive_of_doubled_scales_loads_as_its_weights_say(storage, tokenizer_dir, tmp_path):
    model = archives.random_model("qwen3")
    report = archives.pack(model, tmp_path / "model", tokenizer_dir, storage=storage, double_quant=True)
    plain = archives.pack(model, tmp_path / "plain", tokenizer_dir, storage=storage)
    assert report["bits_per_weight_linear"] < plain["bits_per_weight_linear"] == 4.25
    read = read_archive(tmp_path / "model")
    loaded = model_io.load_model(tmp_path / "model", form="packed")
    merged = model_io.load_model(tmp_path / "model", form="merged", dtype=torch.float32).model.state_dict()
    for name, entry in read.quantization["tensors"].items():
        if entry["codec"] != "nf4":
            continue
        scales = loaded.tensors[f"{name}.scales"]
        weight = model.state_dict()[name]
        assert torch.equal(scales, q.double_quantized(q.nf4_scales(weight)))
        assert torch.equal(merged[name], q.fake_quant_nf4(weight, scales))  # codes fit the scales that are decoded
        assert f"{name}.scales2" not in loaded.tensors


def test_given_scales_are_kept_bit_for_bit(tokenizer_dir, tmp_path):
    """Training without doubled scales, packing with them: no scale may move, so groups that would stay plain."""
    model = archives.random_model("qwen3")
    for name, weight in model.named_parameters():  # scales over two powers of two: narrower groups lose nothing at all
        if name.endswith("_proj.weight"):
            weight.mul_(torch.linspace(1, 4, weight.shape[0])[:, None])
    linear = [name for name in model.state_dict() if name.endswith("_proj.weight")]
    searched = {name: q.nf4_scales(model.state_dict()[name]) for name in linear}
    doubled = {name: q.double_quantized(scales) for name, scales in searched.items()}
    expected = {name: q.double_quantize(scales).plain for name, scales in searched.items()}
    for number, scales in enumerate((searched, doubled)):
        out = tmp_path / str(number)
        archives.pack(model, out, tokenizer_dir, scales=scales, double_quant=True)
        loaded = model_io.load_model(out, form="packed")
        assert all(torch.equal(loaded.tensors[f"{name}.scales"], scales[name]) for name in linear)
        entries = json.loads((out / "quantization.json").read_text())["tensors"]
        plain = {name: entries[name]["plain_groups"] for name in linear}
        if number:
            assert plain == expected
        else:
            assert sum(map(len, plain.values())) > sum(map(len, expected.values()))


def test_scales_of_training_go_into_the_packer_unchanged(tokenizer_dir, tmp_path):
    """What QAT computed with is what the archive decodes to, and its bytes are those of a packer that searched."""
    model = archives.random_model("qwen3")
    weights = MasterWeights(model, quantize=True, double_quant=True)
    weights.search_scales()
    given = archives.pack(model, tmp_path / "given", tokenizer_dir, scales=weights.scales, double_quant=True)
    searched = archives.pack(model, tmp_path / "searched", tokenizer_dir, double_quant=True)
    assert given["base_sha256"] == searched["base_sha256"]
    weights.publish()
    merged = model_io.load_model(tmp_path / "given", dtype=torch.float32).model.state_dict()
    assert all(torch.equal(merged[name], model.state_dict()[name]) for name in weights.linear)


def test_changed_numbers_of_a_group_are_refused_in_an_archive(tokenizer_dir, tmp_path):
    """Each is signed again, so that only the check of what it means can find it; bits count what is stored."""
    model = archives.random_model("qwen3")
    name = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad():
        model.get_parameter(name)[0].mul_(1000)  # one block in 96 far above the rest: the group keeps its bf16 scales
    folder = tmp_path / "model"
    archives.pack(model, folder, tokenizer_dir, double_quant=True)
    original = {path.name: path.read_bytes() for path in folder.iterdir()}
    document = json.loads(original["quantization.json"])
    other = next(other for other, entry in document["tensors"].items() if entry.get("plain_groups") == [])
    assert document["tensors"][name]["plain_groups"] == [0]
    bits = {row["name"]: row["bits"] for row in model_io.inventory(model_io.verify(folder))}
    assert bits[name] == round(4 + 8 * (2 * 96 + 8) / (96 * 64), 3)
    count = document["tensors"][other]["shape"][0]  # rows of 64: a block each, one group
    assert bits[other] == round(4 + 8 * (count + 8) / (count * 64), 3)

    specs = stream_specs(document)
    places, at = {}, len(safetensors_header(specs, WEIGHTS_METADATA))
    for stored, (dtype, shape) in specs.items():
        assert at % dtype.itemsize == 0, "wide elements first: each tensor is aligned"
        places[stored], at = at, at + torch.Size(shape).numel() * dtype.itemsize
    floats = {key: struct.pack("<f", value) for key, value in {"nan": math.nan, "inf": math.inf, "-1": -1.0}.items()}
    low, plain = places[f"{other}.scales2"], places[f"{name}.scales2"]
    faults = [(at, data, f"{other}: group 0") for at in (low, low + 4) for data in floats.values()]
    faults += [
        (low, struct.pack("<f", 0.0), f"{other}: group 0"),
        (low, struct.pack("<f", 3.4e38), f"{other}.scales: scale"),  # finite, but bf16 rounds it to inf
        (low, struct.pack("<f", 1e-40), f"{other}.scales: scale"),  # positive, but denormal
        (low + 4, struct.pack("<f", 3e38), f"{other}.scales: scale"),
        (plain + 4, struct.pack("<f", 0.1), f"{name}: group 0"),
        (places[f"{name}.scales"], b"\0\0", f"{name}.scales: scale 0"),
    ]
    for at, data, match in faults:
        archives.rewrite_weights(
            folder, lambda stream, at=at, data=data: stream.__setitem__(slice(at, at + len(data)), data)
        )
        archives.refused(folder, ContentError, match)
        for file, content in original.items():
            (folder / file).write_bytes(content)
    model_io.verify(folder)


@pytest.mark.parametrize("groups", [[0, 0], [-1], [9], [True], "0", [1.0], None])
def test_plain_groups_are_rising_numbers_of_groups(groups, tokenizer_dir, tmp_path):
    archives.pack(archives.random_model("qwen3"), tmp_path / "model", tokenizer_dir, double_quant=True)
    document = json.loads((tmp_path / "model" / "quantization.json").read_text())
    name = next(name for name, entry in document["tensors"].items() if entry["codec"] == "nf4")
    document["tensors"][name]["plain_groups"] = groups
    with pytest.raises(ContentError, match="plain_groups"):
        check_quantization(document)
