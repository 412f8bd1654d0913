"""Block scales in one byte each: what they decode to, that nothing drifts, and what an archive refuses of them."""

import json

import archives
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import model_io
from drafter import quantization as q
from drafter.archive import read_archive
from drafter.streams import ContentError

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


@pytest.mark.parametrize("groups", [[0, 0], [-1], [9], [True], "0", [1.0], None])
def test_plain_groups_are_rising_numbers_of_groups(groups, tokenizer_dir, tmp_path):
    archives.pack(archives.random_model("qwen3"), tmp_path / "model", tokenizer_dir, double_quant=True)
    document = json.loads((tmp_path / "model" / "quantization.json").read_text())
    name = next(name for name, entry in document["tensors"].items() if entry["codec"] == "nf4")
    document["tensors"][name]["plain_groups"] = groups
    from drafter.archive import check_quantization

    with pytest.raises(ContentError, match="plain_groups"):
        check_quantization(document)
