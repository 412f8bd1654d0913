"""The archive: what is packed comes back exactly, everything in it is used, and what cannot be packed is refused."""

import hashlib
import json
import lzma
import os
import socket

import pytest
import torch
import zstandard
from archives import GENERATION, pack, random_adapter, random_model, rewrite_weights
from safetensors import safe_open
from safetensors.torch import load as load_safetensors

import model_io
from drafter import quantization as q
from drafter import streams
from drafter.adapter import AdapterError, linear_names
from drafter.archive import kind_of, stream_specs
from drafter.checkpoint import Checkpoint
from drafter.streams import ContentError, ManifestError
from model_io import load_base, load_model, pack_adapter, verify

IDS = torch.tensor([[72, 105, 257, 10, 65, 66, 67, 258]])


def logits(loaded) -> torch.Tensor:
    with torch.no_grad():
        return loaded.model(IDS).logits


# ---------------------------------------------------------------------------- what is packed comes back


@pytest.mark.parametrize("storage", ["zst", "plain"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_round_trip_in_both_forms(family, storage, tokenizer_dir, tmp_path):
    model = random_model(family)
    report = pack(model, tmp_path / "base", tokenizer_dir, storage=storage)
    adapter = random_adapter(model, tmp_path / "base")
    final = pack_adapter(tmp_path / "model", base_dir=tmp_path / "base", adapter=adapter)
    assert final["base_sha256"] == report["base_sha256"] and final["archive_id"] != report["archive_id"]

    # the oracle: fake-quantization as a trainer does it, then W + scale * B A, in fp32
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name in [f"{name}.weight" for name in linear_names(model)]:
        expected[name] = q.fake_quant_nf4(expected[name], q.nf4_scales(expected[name]))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        expected[name] = q.fake_quant_int8(expected[name])
    base = load_base(tmp_path / "base", torch.float32)
    assert all(torch.equal(base.model.state_dict()[name], tensor) for name, tensor in expected.items())
    assert base.base_sha256 == report["base_sha256"]

    for name in adapter.targets:
        expected[f"{name}.weight"] = adapter.merged(name, expected[f"{name}.weight"])
    merged, packed = (load_model(tmp_path / "model", form, torch.float32) for form in ("merged", "packed"))
    assert all(torch.equal(merged.model.state_dict()[name], tensor) for name, tensor in expected.items())
    model.load_state_dict(expected)
    # the weights are equal to the bit; the loaded model attends by a grouped product, which sums in another order
    assert torch.allclose(logits(merged), model(IDS).logits, atol=1e-5, rtol=1e-5)
    assert torch.allclose(logits(packed), logits(merged), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(merged), logits(base), atol=1e-2)

    low = load_model(tmp_path / "model", "merged", "bfloat16").model.state_dict()
    assert all(torch.equal(low[name], tensor.bfloat16()) for name, tensor in expected.items()), "cast once, at the end"


@pytest.mark.parametrize("alpha", [64.0, 16.0])
def test_strength_of_a_packed_adapter(alpha, tokenizer_dir, tmp_path):
    """LOR-1: the scale was dropped at load and made up by another rule.

    (alpha / 32) B A x, written out in fp64 from the stored tensors; with alpha = rank every wrong rule would do.
    """
    model, name = random_model("qwen3"), "model.layers.1.mlp.up_proj"
    pack(model, tmp_path / "base", tokenizer_dir)
    adapter = random_adapter(model, tmp_path / "base", rank=32, alpha=alpha)
    pack_adapter(tmp_path / "model", base_dir=tmp_path / "base", adapter=adapter)
    stored = load_safetensors(lzma.decompress((tmp_path / "model" / "adapter.safetensors.xz").read_bytes()))
    a, b = (stored[f"{name}.{part}"].double() for part in ("lora_A", "lora_B"))
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(2)) * 0.1
    expected = (alpha / 32) * (x.double() @ a.T @ b.T)
    assert float(expected.abs().max()) > 0.01, "ten thousand times the bound below: any other factor is seen"
    for form in ("packed", "merged"):
        with torch.no_grad():
            base, beside = (
                load_model(tmp_path / folder, form, torch.float32).model.get_submodule(name)(x).double()
                for folder in ("base", "model")
            )
        assert float((beside - base - expected).abs().max()) < 1e-6, form


def test_what_a_loaded_model_knows(packed):
    loaded = load_model(packed[0] / "model")
    assert (loaded.stop_ids, loaded.num_ids, loaded.context) == (frozenset({256, 258}), 261, 64)
    assert loaded.chat.thinking == "off"
    assert loaded.archive_id == json.loads((packed[0] / "model" / "manifest.json").read_text())["archive_id"]
    assert loaded.info["recipe"] == "tiny" and loaded.info["adapter_rank"] == 4 and loaded.info["layers"] == 2
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    settings = loaded.model.generation_config
    assert not settings.do_sample and settings.temperature in (None, 1.0) and settings.repetition_penalty in (None, 1.0)
    json.dumps(loaded.info)
    with pytest.raises(ValueError, match="merged or packed"):
        load_model(packed[0] / "model", "fused")


def test_the_packed_form_exposes_its_tensors_and_survives_casts(packed):
    """QNT-5: casting a loaded model to bf16 or fp16 rounded its scales."""
    loaded = load_model(packed[0] / "model", "packed")
    before = {name: tensor.clone() for name, tensor in loaded.tensors.items()}
    name = "model.layers.1.mlp.up_proj"
    layer = loaded.model.get_submodule(name)
    for dtype in (torch.bfloat16, torch.float16):
        loaded.model.to(dtype)
        assert torch.equal(layer.codes, before[f"{name}.weight.codes"]) and layer.codes.dtype == torch.uint8
        assert torch.equal(layer.scale_bits.view(torch.bfloat16), before[f"{name}.weight.scales"])
    table = loaded.model.lm_head.table
    assert table is loaded.model.model.embed_tokens.table, "tied: one table"
    assert torch.equal(table.scale_bits.view(torch.bfloat16), before["model.embed_tokens.weight.scales"])
    assert load_model(packed[0] / "model", "merged").tensors == {}


@pytest.mark.parametrize("double_quant", [False, True])
def test_blocks_of_every_size_come_back(double_quant, tokenizer_dir, tmp_path):
    """QNT-5: scales of 1e-9, 1 and 1e5 in one matrix, through an archive and back, bit for bit."""
    model, name = random_model("llama"), "model.layers.0.mlp.up_proj.weight"
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state[name] *= torch.tensor([1e-9, 1.0, 1e5]).repeat(32)[:, None]
    pack(model, tmp_path / "base", tokenizer_dir, weights=state, double_quant=double_quant)
    loaded = load_model(tmp_path / "base", "packed", torch.float32)
    scales = q.nf4_scales(state[name])
    scales = q.double_quantized(scales) if double_quant else scales
    assert torch.equal(loaded.tensors[f"{name}.scales"].view(torch.int16), scales.view(torch.int16))
    merged = load_model(tmp_path / "base", "merged", torch.float32).model.state_dict()
    assert torch.equal(merged[name], q.fake_quant_nf4(state[name], scales))
    assert float(scales.min()) < 1e-9 and float(scales.max()) > 1e4, "the case must occur"


def test_strided_weights_pack_to_the_same_bytes(packed, tokenizer_dir, tmp_path):
    """QNT-3: a transposed or sliced tensor of a checkpoint in memory, in every kind of codec."""

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1:
            return torch.stack((tensor, -tensor), 1)[:, 0]
        wide = torch.full((tensor.shape[1] + 1, tensor.shape[0] * 2), torch.nan)
        wide[1:, ::2] = tensor.t()
        return wide.t()[::2, 1:]

    weights = {name: strided(tensor) for name, tensor in packed[1].state_dict().items()}
    assert not any(tensor.is_contiguous() for tensor in weights.values())
    report = pack(packed[1], tmp_path / "base", tokenizer_dir, weights=weights)
    assert report["archive_id"] == verify(packed[0] / "base").archive_id


def test_the_files_are_those_of_the_format(packed):
    folder = packed[0] / "model"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest) == {"format", "files", "archive_id"}
    assert {entry["path"] for entry in manifest["files"]} == {path.name for path in folder.iterdir()} - {
        "manifest.json"
    }
    for entry in manifest["files"]:
        data = (folder / entry["path"]).read_bytes()
        assert entry == {"path": entry["path"], "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    frame = zstandard.get_frame_parameters((folder / "weights.safetensors.zst").read_bytes())
    quantization = json.loads((folder / "quantization.json").read_text())
    assert frame.has_checksum and frame.content_size == quantization["weights"]["size_bytes"]
    assert quantization["ties"] == {"lm_head.weight": "model.embed_tokens.weight"}
    stream = zstandard.ZstdDecompressor().decompress((folder / "weights.safetensors.zst").read_bytes())
    tensors = load_safetensors(stream)  # the public library reads what we write
    assert set(tensors) == set(stream_specs(quantization)) and "lm_head.weight.codes" not in tensors
    assert tensors["model.embed_tokens.weight.codes"].dtype == torch.int8
    assert tensors["model.layers.0.mlp.up_proj.weight.scales"].dtype == torch.bfloat16
    assert json.loads((folder / "copy_policy.json").read_text()) == {"enabled": False}
    own = load_safetensors(lzma.decompress((folder / "adapter.safetensors.xz").read_bytes()))
    assert torch.equal(
        own["model.layers.0.mlp.up_proj.lora_A"].float(), packed[2].state_dict()["model.layers.0.mlp.up_proj.lora_A"]
    )


def test_the_same_input_gives_the_same_bytes(packed, tokenizer_dir, tmp_path):
    model = random_model("qwen3")
    pack(model, tmp_path / "base", tokenizer_dir)
    adapter = random_adapter(model, tmp_path / "base")
    pack_adapter(tmp_path / "model", base_dir=tmp_path / "base", adapter=adapter)
    for name in ("base", "model"):
        for path in (packed[0] / name).iterdir():
            assert path.read_bytes() == (tmp_path / name / path.name).read_bytes(), path.name


def test_the_base_stays_as_it_is_and_names_the_adapter(packed):
    """The adapter was trained beside these very codes; re-quantizing on the way would break it without an error."""
    folder = packed[0]
    for path in (folder / "base").iterdir():
        if path.name not in ("manifest.json", "self_check.json"):  # with an adapter it drafts something else
            assert path.read_bytes() == (folder / "model" / path.name).read_bytes()
    document = json.loads((folder / "model" / "adapter.json").read_text())
    assert document["base_sha256"] == verify(folder / "base").base_sha256
    assert (document["rank"], document["alpha"], document["scale"]) == (4, 8.0, 2.0)


def test_given_scales_are_used_unchanged(tokenizer_dir, tmp_path):
    model = random_model("llama")
    names = [f"{name}.weight" for name in linear_names(model)]
    state = model.state_dict()
    scales = {name: (q.nf4_scales(state[name], search=False).float() * 0.75).bfloat16() for name in names}
    pack(model, tmp_path / "base", tokenizer_dir, scales=scales)
    loaded = load_model(tmp_path / "base", "packed", torch.float32)
    for name in names:
        assert torch.equal(loaded.tensors[f"{name}.scales"], scales[name])
    merged = load_model(tmp_path / "base", "merged", torch.float32).model.state_dict()
    assert all(torch.equal(merged[name], q.fake_quant_nf4(state[name], scales[name])) for name in names)
    with pytest.raises(ContentError, match="exactly the linear layers"):
        pack(model, tmp_path / "other", tokenizer_dir, scales=dict(list(scales.items())[1:]))
    with pytest.raises(ValueError, match="finite number"):
        pack(model, tmp_path / "other", tokenizer_dir, scales={**scales, names[3]: scales[names[3]] * 0})
    assert os.listdir(tmp_path) == ["base"]


def test_moments_weigh_the_scale_search(tokenizer_dir, tmp_path):
    model = random_model("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    moments = {name: torch.rand(64, generator=torch.Generator().manual_seed(2)) ** 4 * 10}
    pack(model, tmp_path / "base", tokenizer_dir, moments=moments)
    tensors, state = load_model(tmp_path / "base", "packed").tensors, model.state_dict()
    assert torch.equal(tensors[f"{name}.scales"], q.nf4_scales(state[name], moments=moments[name]))
    assert not torch.equal(tensors[f"{name}.scales"], q.nf4_scales(state[name]))
    other = name.replace("q_proj", "k_proj")
    assert torch.equal(tensors[f"{other}.scales"], q.nf4_scales(state[other]))


def test_real_tokenizer_and_rows(qwen3_tokenizer, tmp_path):
    """A Qwen3-shaped student with the real 151,936 rows, of which 151,669 exist, and the real template."""
    model = random_model("qwen3", vocab_size=151936, eos_token_id=[151645, 151643]).bfloat16()
    generation = {**GENERATION, "stop_ids": [151643, 151645], "num_ids": 151669}
    report = pack(model, tmp_path / "model", qwen3_tokenizer, generation=generation)
    rows = 151936 * 64
    assert report["streams"]["int8 rows"][0] == rows, "tied weights are stored once"
    loaded = load_model(tmp_path / "model", "packed")
    ids = loaded.chat.render([{"role": "user", "content": "2+2?"}])
    assert ids[-4:-1] == [151667, 271, 151668], "thinking off: the prompt ends with an empty think block"
    with torch.no_grad():
        packed_logits = loaded.model(torch.tensor([ids])).logits
        merged_logits = load_model(tmp_path / "model").model(torch.tensor([ids])).logits
    assert packed_logits.shape == (1, len(ids), 151936)
    assert float((packed_logits - merged_logits).abs().max()) < 0.05


def test_loading_needs_no_network_and_no_git(packed, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("a socket or a process was opened")

    monkeypatch.setattr(socket.socket, "connect", forbidden)
    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr("subprocess.Popen.__init__", forbidden)
    monkeypatch.setenv("PATH", "")
    assert load_model(packed[0] / "model").model(IDS).logits.shape == (1, 8, 272)


# ---------------------------------------------------------------------------- everything in it is used


def test_a_zeroed_adapter_and_a_changed_block_change_the_logits(packed, archive):
    before = logits(load_model(archive, dtype=torch.float32))
    base = load_model(packed[0] / "base", dtype=torch.float32)

    zeroed = random_adapter(base.model, packed[0] / "base")
    with torch.no_grad():
        for tensor in zeroed.parameters():
            tensor.zero_()
    pack_adapter(archive, base_dir=packed[0] / "base", adapter=zeroed)
    without = logits(load_model(archive, dtype=torch.float32))
    assert torch.equal(without, logits(base)) and not torch.allclose(without, before, atol=1e-3)

    specs = stream_specs(json.loads((archive / "quantization.json").read_text()))
    header = len(streams.safetensors_header(specs, {"format": 1, "kind": "weights"}))
    offset = header
    for name, (dtype, shape) in specs.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if name == "model.layers.1.self_attn.v_proj.weight.codes":
            break
        offset += size

    def change(stream):
        for at in range(offset, offset + 32):  # one block: 64 codes in 32 bytes
            stream[at] ^= 0x77

    rewrite_weights(archive, change)
    assert not torch.allclose(logits(load_model(archive, dtype=torch.float32)), without, atol=1e-4)


# ---------------------------------------------------------------------------- what is stored


def test_metadata_keeps_its_types_and_views_their_size(tmp_path):
    """PCK-1: null came back as the word "None", numbers as strings; a small view dragged its whole storage along."""
    view = torch.arange(1_000_000, dtype=torch.float32)[:2]
    assert bytes(streams.tensor_bytes(view)) == view.clone().numpy().tobytes()
    turned = torch.arange(6, dtype=torch.bfloat16).view(2, 3).t()
    assert bytes(streams.tensor_bytes(turned)) == bytes(streams.tensor_bytes(turned.contiguous()))
    metadata = {"rank": 32, "adapter": None, "eos": [151645, 151643]}
    header = streams.safetensors_header({"view": (view.dtype, tuple(view.shape))}, metadata)
    assert len(header) + 8 < 250
    (tmp_path / "view").write_bytes(header + bytes(streams.tensor_bytes(view)))
    with safe_open(tmp_path / "view", "pt") as file:  # the public library reads what we write
        assert {key: json.loads(text) for key, text in file.metadata().items()} == metadata
        assert torch.equal(file.get_tensor("view"), view)


def test_stored_bytes_are_those_that_the_codecs_need(packed):
    """PCK-1: tied weights are stored once; the size is within 1 % of shapes x codecs."""
    document = json.loads((packed[0] / "base" / "quantization.json").read_text())
    linear = sum(
        tensor.numel() for name, tensor in packed[1].named_parameters() if ".layers." in name and tensor.dim() == 2
    )
    norms = sum(tensor.numel() for tensor in packed[1].parameters() if tensor.dim() == 1)
    expected = linear // 2 + linear // 64 * 2 + 272 * 64 + 272 * 2 + norms * 4
    header = len(streams.safetensors_header(stream_specs(document), {"format": 1, "kind": "weights"}))
    assert document["weights"]["size_bytes"] - header == expected
    kinds = [kind_of(name, dtype) for name, (dtype, _) in stream_specs(document).items()]
    assert [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before] == [
        "small tensors",
        "scales",
        "int8 rows",
        "NF4 codes",
    ]


# ---------------------------------------------------------------------------- packing refuses


def test_weights_that_cannot_be_packed(tokenizer_dir, tmp_path):
    model = random_model("qwen3")
    state = model.state_dict()
    name = "model.layers.1.mlp.gate_proj.weight"
    bad = state[name].clone()
    bad[3, 5] = float("nan")
    config = json.loads(model.config.to_json_string(use_diff=False))
    for weights, match in (
        ({**state, name: bad}, r"gate_proj.weight\[3, 5\] is nan"),
        ({**state, "model.norm.weight": torch.full((64,), torch.inf)}, r"model.norm.weight\[0\] is inf"),
        ({**state, "extra.weight": bad}, "extra.weight"),
        ({key: tensor for key, tensor in state.items() if key != name}, "gate_proj"),
        ({**state, name: bad[:, :1]}, "gate_proj"),
        ({**state, name: bad.to(torch.int8)}, "int8"),
        ({**state, "lm_head.weight": state["lm_head.weight"] + 1}, "tied"),
    ):
        with pytest.raises(ValueError, match=match):
            pack(model, tmp_path / "base", tokenizer_dir, weights=weights)
    with pytest.raises(ContentError, match="stop_ids"):
        pack(model, tmp_path / "base", tokenizer_dir, generation={**GENERATION, "stop_ids": [9999]})
    with pytest.raises(ContentError, match="model_type"):
        pack(model, tmp_path / "base", tokenizer_dir, config={**config, "model_type": "gpt2"})
    with pytest.raises(ValueError, match="storage"):
        pack(model, tmp_path / "base", tokenizer_dir, storage="zip")
    with pytest.raises(ManifestError, match="tokenizer.json"):
        pack(model, tmp_path / "base", tmp_path)
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_what_stands_at_the_output(packed, tokenizer_dir, tmp_path):
    out = tmp_path / "model"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="not a packed archive"):
        pack(packed[1], out, tokenizer_dir)
    assert (out / "thesis.txt").read_text() == "years of work"
    (out / "thesis.txt").unlink()
    pack(packed[1], out, tokenizer_dir)
    (out / "evidence").mkdir()
    (out / "evidence" / "final.json").write_text("{}")
    pack(packed[1], out, tokenizer_dir)
    assert (out / "evidence" / "final.json").exists(), "the same bytes: the evidence still speaks of them"
    before = verify(out).archive_id
    with pytest.raises(ValueError, match="is nan|gate_proj"):
        state = {**packed[1].state_dict()}
        state["model.layers.0.mlp.gate_proj.weight"] = torch.full((96, 64), torch.nan)
        pack(packed[1], out, tokenizer_dir, weights=state)
    assert verify(out).archive_id == before, "a refused packing leaves the old archive as it was"
    pack(packed[1], out, tokenizer_dir, generation={**GENERATION, "context": 32})
    assert not (out / "evidence").exists() and verify(out).generation["context"] == 32
    assert os.listdir(tmp_path) == ["model"]


def test_an_adapter_is_never_applied_twice(packed, tokenizer_dir, tmp_path):
    """LOR-3: merging was applied a second time by packing a merged folder with the adapter given again."""
    loaded = load_model(packed[0] / "model", dtype=torch.float32)
    loaded.model.save_pretrained(tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    with pytest.raises(AdapterError, match="merged into these weights already"):
        pack(loaded.model, tmp_path / "again", tokenizer_dir, config=config, weights=Checkpoint(tmp_path / "merged"))
    with pytest.raises(ContentError, match="has an adapter already"):
        pack_adapter(tmp_path / "again", base_dir=packed[0] / "model", adapter=packed[2])
    with pytest.raises(ValueError, match="starts from the base"):
        load_base(packed[0] / "model")
    other = random_adapter(random_model("qwen3", intermediate_size=128), packed[0] / "base")
    with pytest.raises(ContentError, match="down_proj|up_proj|gate_proj"):
        pack_adapter(tmp_path / "again", base_dir=packed[0] / "base", adapter=other)
    assert not (tmp_path / "again").exists()


def test_an_adapter_is_packed_onto_its_own_base_alone(packed, tokenizer_dir, tmp_path):
    """Of the right shapes, an adapter trained beside another base packs and loads, and only acceptance is gone."""
    own = verify(packed[0] / "base").base_sha256
    changed = {name: tensor * 1.5 for name, tensor in packed[1].state_dict().items()}
    other = pack(packed[1], tmp_path / "base", tokenizer_dir, weights=changed)["base_sha256"]
    with pytest.raises(ContentError, match=r"python -m scripts.pack_model --recipe tiny --base") as caught:
        pack_adapter(tmp_path / "model", base_dir=tmp_path / "base", adapter=packed[2])
    assert own in str(caught.value) and other in str(caught.value)
    with pytest.raises(ContentError, match="found None"):
        pack_adapter(tmp_path / "model", base_dir=tmp_path / "base", adapter=random_adapter(packed[1]))
    assert not (tmp_path / "model").exists()


def test_the_teacher_itself_is_refused(tokenizer_dir, tmp_path):
    """A pruned student starts as a copy of some of the teacher's layers, under other names."""
    teacher = random_model("llama", num_hidden_layers=4)
    teacher.save_pretrained(tmp_path / "teacher")
    student = random_model("llama")
    state = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    for name in state:
        if ".layers." in name:
            state[name] = teacher.state_dict()[name.replace(".layers.1.", ".layers.3.")].clone()
    with pytest.raises(ValueError, match="the teacher's own tensors"):
        pack(student, tmp_path / "base", tokenizer_dir, weights=state, teacher_dir=tmp_path / "teacher")
    state["model.layers.0.mlp.up_proj.weight"] += 0.01
    pack(student, tmp_path / "base", tokenizer_dir, weights=state, teacher_dir=tmp_path / "teacher")


def test_a_checkpoint_in_several_files(packed, tokenizer_dir, tmp_path):
    packed[1].save_pretrained(tmp_path / "split", max_shard_size="50KB")
    assert len(list((tmp_path / "split").glob("model-*.safetensors"))) > 1
    report = pack(packed[1], tmp_path / "base", tokenizer_dir, weights=Checkpoint(tmp_path / "split"))
    assert report["base_sha256"] == verify(packed[0] / "base").base_sha256
    with pytest.raises(ValueError, match="no model"):
        Checkpoint(tmp_path)


def test_inventory(packed):
    rows = model_io.inventory(verify(packed[0] / "model"))
    codecs = [row["codec"] for row in rows]
    assert (codecs.count("nf4"), codecs.count("int8")) == (14, 1)
    assert all(row["bits"] == 4.25 for row in rows if row["codec"] == "nf4")
    assert abs(sum(row["share"] for row in rows) - 1) < 1e-3
