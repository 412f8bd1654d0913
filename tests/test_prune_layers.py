"""Which layers a student keeps: hand-worked rules, and the measured one on a model with a layer that does nothing."""

import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from drafter.recipe import Layers, RunDocument, load_recipe
from scripts import download_models, prepare_data, prepare_selection, prune_layers
from scripts.prune_layers import angular_distances, choose_layers, evenly_spread, prune, without_block


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """`tiny` (4 layers, 2 kept) below a temporary root, its models made."""
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    recipe = load_recipe("tiny")
    download_models.fetch_models(recipe)
    return recipe


def with_layers(recipe, **fields):
    return recipe.model_copy(update={"base": recipe.base.model_copy(update={"layers": Layers(**fields)})})


# ---------------------------------------------------------------------------- rules by hand


@pytest.mark.parametrize(
    ("total", "count", "kept"),
    [
        (30, 4, (0, 10, 19, 29)),  # distances 29 / 3 = 9.67: 9.67 and 19.33
        # 29 / 15 = 1.93: the one short step is in the middle
        (30, 16, (0, 2, 4, 6, 8, 10, 12, 14, 15, 17, 19, 21, 23, 25, 27, 29)),
        (5, 3, (0, 2, 4)),
        (6, 3, (0, 3, 5)),  # 2.5 is rounded up
        (4, 4, (0, 1, 2, 3)),
        (7, 2, (0, 6)),
    ],
)
def test_evenly_spread(total, count, kept):
    assert evenly_spread(total, count) == kept


def test_even_spread_keeps_both_ends_and_what_was_asked():
    for total in range(2, 40):
        for count in range(2, total + 1):
            kept = evenly_spread(total, count)
            steps = {later - earlier for earlier, later in zip(kept, kept[1:], strict=False)}
            assert (kept[0], kept[-1], len(kept)) == (0, total - 1, count)
            assert max(steps) - min(steps) <= 1 and min(steps) >= 1


@pytest.mark.parametrize("count", [0, 1, 31])
def test_even_spread_refuses_what_cannot_be(count):
    with pytest.raises(ValueError, match=f"cannot keep {count} of 30 layers"):
        evenly_spread(30, count)


def test_without_block():
    """5 layers, 3 kept: blocks of 2 begin at 0 .. 3. The nearest pair of states is that of block 2: layers 2, 3 go."""
    assert without_block(5, 3, [0.4, 0.3, 0.1, 0.2]) == (0, 1, 4)
    assert without_block(5, 3, [0.1, 0.3, 0.1, 0.2]) == (2, 3, 4)  # of equal ones the first
    assert without_block(3, 3, [0.0, 0.0, 0.0, 0.0]) == (0, 1, 2)


def test_explicit_keep(recipe):
    base = recipe.cache_dir / "models" / "base"
    assert choose_layers(with_layers(recipe, rule="explicit", keep=(0, 2, 3)), base) == ((0, 2, 3), {})
    for keep in ((0, 4), (2, 1), (1, 1), (-1, 2)):
        with pytest.raises(ValueError, match="rising layer numbers below 4"):
            choose_layers(with_layers(recipe, rule="explicit", keep=keep), base)
    assert choose_layers(with_layers(recipe, rule="all"), base)[0] == (0, 1, 2, 3)


@pytest.mark.parametrize("rule", ["even", "angular"])
def test_more_layers_than_there_are(recipe, rule):
    """A count above the layers gave the angular rule a block of negative size and an error of torch."""
    with pytest.raises(ValueError, match="cannot keep 5 of 4 layers"):
        choose_layers(with_layers(recipe, rule=rule, count=5), recipe.cache_dir / "models" / "base")


# ---------------------------------------------------------------------------- the angular rule


def model_with_identities(*idle: int, layers: int = 5) -> Qwen3ForCausalLM:
    """A random Qwen3 shape in which the layers `idle` add nothing to the residual stream."""
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(-3, 3, 32))  # a final norm that turns whatever passes it
        for layer in idle:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


PROMPTS = [[1, 2, 3, 4], [7, 8], [9] * 12]


@pytest.mark.parametrize("idle", range(5))
def test_an_idle_layer_is_the_one_dropped(idle):
    """Also the last one: its output was taken behind the final norm, so that its distance was never small."""
    distances = angular_distances(model_with_identities(idle), PROMPTS, 1)
    assert len(distances) == 5 and distances[idle] == pytest.approx(0, abs=1e-3)
    assert all(distance > 0.01 for layer, distance in enumerate(distances) if layer != idle)
    assert without_block(5, 4, distances) == tuple(layer for layer in range(5) if layer != idle)


def test_an_idle_block_of_two_is_dropped():
    distances = angular_distances(model_with_identities(3, 4), PROMPTS, 2)
    assert len(distances) == 4 and without_block(5, 3, distances) == (0, 1, 2)


def test_distances_against_one_prompt_by_hand():
    model = model_with_identities()
    states = [model.model.embed_tokens(torch.tensor([PROMPTS[0]]))]
    hooks = [layer.register_forward_hook(lambda _, i, output: states.append(output)) for layer in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([PROMPTS[0]]))
    for hook in hooks:
        hook.remove()
    for size in (0, 1, 3):
        expected = []
        for start in range(len(states) - size):
            before, after = states[start][0, -1].double(), states[start + size][0, -1].double()
            cosine = (before @ after / (before.norm() * after.norm())).clamp(-1, 1)
            expected.append(float(torch.arccos(cosine).detach() / torch.pi))
        assert angular_distances(model, PROMPTS[:1], size) == pytest.approx(expected, abs=1e-3)
    assert not model.model.layers[0]._forward_pre_hooks  # nothing of the measurement stays in the model


# ---------------------------------------------------------------------------- the step


def test_the_choice_is_recorded_and_a_second_run_makes_nothing(recipe):
    assert prune(recipe) == {"keep": [0, 3], "made": True}
    folder, base = recipe.run_dir / "student", recipe.cache_dir / "models" / "base"
    record = json.loads((folder / "prune.json").read_text())
    source = json.loads((base / "source.json").read_text())
    assert (record["rule"], record["keep"], record["base_source"]) == ("even", [0, 3], source["source"])
    assert record["base_files"] == {"model.safetensors": source["files"]["model.safetensors"]}
    entry = RunDocument.open(recipe).finished("student")
    assert entry["parent_sha256"] == source["files"]["model.safetensors"] and entry["keep"] == [0, 3]
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 2
    assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert prune(recipe) == {"keep": [0, 3], "made": False}
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (folder / "model.safetensors").write_bytes(b"another")
    with pytest.raises(ValueError, match="not the student that phase_log names"):
        prune(recipe)


def test_the_angular_rule_measures_on_train_prompts(recipe):
    changed = with_layers(recipe, rule="angular", count=3)
    with pytest.raises(ValueError, match="python -m scripts.prepare_data --recipe tiny"):
        prune(changed)
    for script in (prepare_selection, prepare_data):
        assert script.main(["--recipe", "tiny"]) == 0
    keep = prune(changed)["keep"]
    record = json.loads((changed.run_dir / "student" / "prune.json").read_text())
    assert len(record["angular_distances"]) == 4 and len(keep) == 3
    assert [layer for layer in range(4) if layer not in keep] == [
        min(range(4), key=record["angular_distances"].__getitem__)
    ]


def test_a_base_of_several_files_has_one_hash(recipe):
    """`parent_sha256` was a string for one file and an object for several: nothing could walk that chain."""
    marker = recipe.cache_dir / "models" / "teacher" / "source.json"  # base/ is a link to it
    source = json.loads(marker.read_text())
    source["files"]["model-00002.safetensors"] = "a" * 64
    marker.write_text(json.dumps(source))
    prune(recipe)
    parent = RunDocument.open(recipe).finished("student")["parent_sha256"]
    assert isinstance(parent, str) and len(parent) == 64 and parent != source["files"]["model.safetensors"]


def test_dry_run_on_a_fresh_clone_and_with_a_base(recipe, tmp_path, monkeypatch, capsys):
    assert prune_layers.main(["--recipe", "tiny", "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["keep"] == [0, 3] and plan["missing"] == [] and plan["memory_bytes"] > 0 and plan["estimated_s"] >= 3
    assert not (recipe.run_dir / "student").exists()
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path / "fresh")
    assert prune_layers.main(["--recipe", "tiny", "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert plan["keep"] is None and "python -m scripts.download_models --recipe tiny" in plan["missing"][0]
