"""The adapter against the formula y = base(x) + (alpha / rank) B A x, before saving, after loading, after merging."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from drafter.adapter import Adapter, AdapterError, check_document, check_unmerged, linear_names, mark_merged
from drafter.provenance import read_json, write_json


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def random_adapter(model, rank: int, alpha: float) -> Adapter:
    adapter = Adapter.create(model, rank, alpha)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return adapter


def merge(adapter: Adapter, weights: dict[str, torch.Tensor]) -> None:
    for name in adapter.targets:
        weights[f"{name}.weight"] = adapter.merged(name, weights[f"{name}.weight"])


@pytest.mark.parametrize("alpha", [64.0, 16.0])
def test_strength_is_alpha_over_rank_everywhere(alpha, tmp_path):
    """LOR-1: the update was multiplied by alpha, or its scale was dropped at load and made up by another rule.

    rank 32 and alpha 64 or 16: with alpha = rank every wrong rule gives the right answer.
    """
    model = tiny_model()
    adapter = random_adapter(model, 32, alpha)
    adapter.save(tmp_path)
    loaded = Adapter.load(tmp_path)
    assert loaded.document() == adapter.document() and loaded.scale == alpha / 32 and loaded.base_sha256 is None
    name = "model.layers.1.mlp.down_proj"
    a, b = (adapter.state_dict()[f"{name}.{part}"] for part in ("lora_A", "lora_B"))
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(2))
    base = model.get_submodule(name)(x)
    expected = (alpha / 32) * (x @ a.T @ b.T)

    for some in (adapter, loaded):
        beside = tiny_model()
        some.attach(beside)
        assert torch.allclose(beside.get_submodule(name)(x) - base, expected, atol=1e-6, rtol=1e-5)
    weights = dict(model.state_dict())
    merge(loaded, weights)
    merged = tiny_model()
    merged.load_state_dict(weights)
    assert torch.allclose(merged.get_submodule(name)(x) - base, expected, atol=1e-6, rtol=1e-5)


def test_targets_are_the_linear_layers_of_the_blocks():
    model = tiny_model()
    names = linear_names(model)
    assert len(names) == 2 * 7 and "lm_head" not in names
    assert Adapter.create(model, 4, 8.0).targets == tuple(names)


def test_training_starts_at_the_base_and_moves_the_adapter_alone():
    model = tiny_model(torch.bfloat16)
    ids = torch.arange(12).view(2, 6)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    logits = model(ids).logits
    adapter = Adapter.create(model, 4, 8.0, seed=3)
    adapter.attach(model)
    assert torch.equal(model(ids).logits, logits), "B = 0: nothing may change before the first step"

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {id(parameter) for parameter in trainable} == {id(parameter) for parameter in adapter.parameters()}
    assert all(parameter.dtype == torch.float32 for parameter in trainable)
    optimizer = torch.optim.SGD(adapter.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).logits.float().logsumexp(-1).sum().backward()
        optimizer.step()
    assert not torch.equal(model(ids).logits, logits)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(bool(tensor.any()) for tensor in adapter.state_dict().values())


def test_the_same_seed_gives_the_same_adapter():
    model = tiny_model()
    first, second, other = (Adapter.create(model, 4, 8.0, seed=seed) for seed in (7, 7, 8))
    assert all(torch.equal(second.state_dict()[name], tensor) for name, tensor in first.state_dict().items())
    assert not torch.equal(other.parameters()[0], first.parameters()[0])


def test_a_second_attach_is_refused():
    model = tiny_model()
    adapter = Adapter.create(model, 4, 8.0)
    adapter.attach(model)
    with pytest.raises(AdapterError, match="already has an adapter"):
        adapter.attach(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": None}, "alpha is None"),
        ({"alpha": "drop"}, r"missing \['alpha'\]"),
        ({"scale": "drop"}, r"missing \['scale'\]"),
        ({"scale": 16.0}, "alpha / rank"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"rank": True}, "rank is True"),
        ({"rank": 16}, "alpha / rank"),
        ({"targets": []}, "targets"),
        ({"colour": 1}, r"unknown \['colour'\]"),
        ({"format": 2}, "format is 2"),
        ({"base_sha256": "drop"}, r"missing \['base_sha256'\]"),
        ({"base_sha256": "abc"}, "base_sha256 is 'abc', expected 64 hex digits"),
        ({"base_sha256": 7}, "base_sha256 is 7"),
    ],
)
def test_documents_that_disagree_are_refused(change, message):
    document = Adapter.create(tiny_model(), 4, 8.0).document()
    document.update(change)
    document = {key: value for key, value in document.items() if value != "drop"}
    with pytest.raises(AdapterError, match=message):
        check_document(document)


def test_files_that_disagree_are_refused(tmp_path):
    """LOR-1: one layer of another rank was scaled with the rank of the first."""
    Adapter.create(tiny_model(), 8, 16.0).save(tmp_path)
    tensors = load_file(tmp_path / "adapter.safetensors")
    name = "model.layers.1.self_attn.v_proj"
    with safe_open(tmp_path / "adapter.safetensors", "pt") as file:
        metadata = file.metadata()

    def refuse(changed, message):
        save_file(changed, tmp_path / "adapter.safetensors", metadata)
        with pytest.raises(AdapterError, match=message):
            Adapter.load(tmp_path)

    smaller = {f"{name}.lora_A": torch.zeros(4, 64), f"{name}.lora_B": torch.zeros(32, 4)}
    refuse({**tensors, **smaller}, rf"{name}: lora_A is \[4, 64\]")
    refuse({**tensors, f"{name}.lora_B": torch.full((32, 8), torch.inf)}, "not finite")
    refuse({key: tensor for key, tensor in tensors.items() if not key.startswith(name)}, "missing")
    refuse({**tensors, "extra.lora_A": torch.zeros(8, 64)}, "unknown")
    save_file(tensors, tmp_path / "adapter.safetensors", metadata)
    document = read_json(tmp_path / "adapter.json")
    write_json(tmp_path / "adapter.json", {key: value for key, value in document.items() if key != "alpha"})
    with pytest.raises(AdapterError, match="alpha"):
        Adapter.load(tmp_path)


def test_the_base_is_named_and_an_edited_document_is_refused(tmp_path):
    """An adapter was packed onto another base than it was trained beside: it loaded, and accepted almost nothing."""
    adapter = Adapter.create(tiny_model(), 4, 8.0)
    adapter.save(tmp_path, base_sha256="a" * 64)
    assert read_json(tmp_path / "adapter.json")["base_sha256"] == Adapter.load(tmp_path).base_sha256 == "a" * 64
    Adapter.load(tmp_path).save(tmp_path)  # saved again, it keeps its base
    document = read_json(tmp_path / "adapter.json")
    assert document["base_sha256"] == "a" * 64
    for change in ({"base_sha256": "b" * 64}, {"base_sha256": None}, {"alpha": 4.0, "scale": 1.0}):
        write_json(tmp_path / "adapter.json", {**document, **change})
        with pytest.raises(AdapterError, match="is not the one that adapter.safetensors was written with"):
            Adapter.load(tmp_path)
    with pytest.raises(AdapterError, match="64 hex digits"):
        adapter.save(tmp_path / "other", base_sha256="short")
    assert not (tmp_path / "other").exists()


def test_merging_is_in_fp32_and_marks_the_config():
    """LOR-3: base weights near 1 in bf16, updates near 1e-3: half a bf16 step is 4e-3, a bf16 sum loses the update."""
    model = tiny_model()
    with torch.no_grad():
        for name in linear_names(model):
            weight = model.get_submodule(name).weight
            weight.copy_((1 + 0.01 * torch.randn_like(weight)).bfloat16().float() * torch.randn_like(weight).sign())
    adapter = Adapter.create(model, 4, 8.0)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.copy_(
                torch.randn(tensor.shape, generator=generator) * 0.016
            )  # B A of 4 terms: about 1e-3 with scale 2
    ids = torch.arange(10)[None]
    weights = dict(model.state_dict())
    merged = dict(weights)
    merge(adapter, merged)
    name = f"{adapter.targets[0]}.weight"
    assert 2e-4 < float((merged[name] - weights[name]).abs().mean()) < 2e-3

    rounded = {key: tensor.bfloat16().float() if key in merged else tensor for key, tensor in merged.items()}
    results = {}
    for label, state in (("fp32", merged), ("bf16", rounded)):
        copy = tiny_model()
        copy.load_state_dict(state)
        results[label] = copy(ids).logits.detach()
    adapter.attach(model)
    beside = model(ids).logits.detach()
    assert float((results["fp32"] - beside).abs().max()) < 1e-4
    assert float((results["bf16"] - beside).abs().max()) > 1e-4, "the bound must be one that a bf16 sum fails"

    check_unmerged(json.loads(model.config.to_json_string()))
    mark_merged(model.config)
    with pytest.raises(AdapterError, match="merged into these weights already"):
        check_unmerged(json.loads(model.config.to_json_string()))  # what a saved model carries
    with pytest.raises(AdapterError, match="float32"):
        adapter.merged(adapter.targets[0], weights[name].bfloat16())
