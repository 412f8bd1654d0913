"""Every step of the real recipe says what it would take, with nothing on disk and no network."""

import importlib
import json
import socket

import pytest

from drafter import estimate
from drafter.recipe import load_recipe

RECIPE = "qwen3-8b"
STEPS = {
    "scripts.download_models": (),
    "scripts.download_data": (),
    "scripts.prepare_selection": (),
    "scripts.prepare_data": (),
    "scripts.prepare_addon": (),
    "scripts.extend_data": (),
    "scripts.make_extra_prompts": (),
    "scripts.make_focused": (),
    "scripts.prune_layers": (),
    "scripts.generate_teacher": (),
    "train": ("--phase", "all"),
    "scripts.calibrate": ("--phase", "polish"),
    "scripts.pack_model": (),
    "scripts.evaluate": ("prompt_lookup", "runs/qwen3-8b/polish", "model"),
    "scripts.validate": (),
}


@pytest.fixture
def empty(tmp_path, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a dry run opened a socket")

    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", forbidden)
    return tmp_path


def dry_run(step: str, capsys) -> tuple[str, dict]:
    assert importlib.import_module(step).main(["--recipe", RECIPE, "--dry-run", *STEPS[step]]) == 0
    said = capsys.readouterr().out
    return said, json.loads(said.strip().splitlines()[-1])


@pytest.mark.parametrize("step", STEPS)
def test_each_step_ends_with_one_document_and_leaves_nothing(step, empty, capsys):
    said, document = dry_run(step, capsys)
    assert document["recipe"] == RECIPE and document["step"] == step.removeprefix("scripts.")
    assert document["dry_run"] is True
    assert not list(empty.rglob("*")), "a dry run writes nothing"


def test_the_numbers_of_the_recipe_are_those_of_the_real_job():
    recipe = load_recipe(RECIPE)
    assert sum(estimate.declared_rows(recipe)) == pytest.approx(500_000, rel=0.02)
    assert (recipe.chat.thinking, recipe.generation.max_new_tokens, recipe.generation.top_k) == ("off", 512, 20)
    rates = [2e-5, 2e-5, 1e-5, 5e-6, 5e-6, 1e-4]
    assert [phase.lr for phase in recipe.phases] == rates
    assert {phase.tokens_per_step for phase in recipe.phases} == {262_144}


def test_teacher_and_training_agree_and_fit_one_gpu(empty, capsys):
    """Batch 256 at 2,560 positions was declared once: 97 GB of keys and values on a GPU of 80."""
    said, teacher = dry_run("scripts.generate_teacher", capsys)
    _, training = dry_run("train", capsys)
    for gpu in (teacher["gpu"], *(phase["gpu"] for phase in training["phases"])):
        assert gpu["fits"] and gpu["memory_bytes"] < 80e9 and gpu["measured"] is False
        assert 0 < gpu["hours"]["8"] < gpu["hours"]["1"] < 100
        assert all(line in said or "ids" in line or "B" in line for line in gpu["arithmetic"])
    assert teacher["generated_tokens_at_most"] == teacher["rows"] * 512
    # no phase asks for more ids than prompts and answers can give in two passes
    ids = teacher["prompt_tokens"] + teacher["generated_tokens_at_most"]
    assert max(phase["tokens"] for phase in training["phases"]) < 2 * ids


def test_shapes_are_those_of_the_models(tmp_path):
    """A shape's weights against a model that transformers builds of it, norms apart."""
    from drafter.checkpoint import meta_model
    from scripts.random_model import QWEN3_1_7B

    recipe = load_recipe(RECIPE)
    shape = estimate.shape_of(recipe.base, tmp_path)
    model = meta_model(QWEN3_1_7B)
    counted = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    assert shape.weights == counted
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_1_7B))
    assert estimate.shape_of(recipe.teacher, tmp_path) == shape
    assert estimate.shape_of(recipe.teacher, tmp_path / "none").weights == pytest.approx(8.19e9, rel=0.001)
