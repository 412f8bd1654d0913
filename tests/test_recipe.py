"""architecture.json: every recipe is whole, every fault is reported with its path, runs keep their declaration."""

import json

import pytest

from drafter import recipe as recipes
from drafter.provenance import ROOT
from drafter.recipe import RecipeError, RunDocument, load_recipe, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_survives_a_round_trip(name):
    recipe = load_recipe(name)
    document = RunDocument(recipe, []).document()
    assert recipes._check(name, json.loads(json.dumps(document["recipe"]))).document() == recipe.document()


def edited(tmp_path, edit, name="tiny"):
    document = json.loads((ROOT / "architecture.json").read_text())
    edit(document["recipes"][name])
    path = tmp_path / "architecture.json"
    path.write_text(json.dumps(document))
    return path


def test_all_faults_are_reported_at_once_each_with_its_path(tmp_path):
    def edit(recipe):
        recipe["serving"]["contxt"] = recipe["serving"].pop("context")
        recipe["phases"][0]["lr"] = "fast"
        recipe["teacher"]["num_ids"] = 0

    with pytest.raises(RecipeError) as caught:
        load_recipe("tiny", edited(tmp_path, edit))
    for path in ("serving.contxt", "serving.context", "phases.0.lr", "teacher.num_ids"):
        assert path in str(caught.value)


def test_types_are_not_guessed(tmp_path):
    """JSON true was once taken for the number 1 in a count: strict types refuse it."""
    with pytest.raises(RecipeError, match="splits.selection"):
        load_recipe("tiny", edited(tmp_path, lambda recipe: recipe["splits"].update(selection=True)))


@pytest.mark.parametrize("repo", ["yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "FasterDecoding/medusa-vicuna-7b-v1.3"])
def test_another_projects_drafter_is_refused_as_base(tmp_path, repo):
    with pytest.raises(RecipeError, match="not an allowed base"):
        load_recipe("qwen3-8b", edited(tmp_path, lambda r: r["base"]["source"].update(repo=repo), "qwen3-8b"))


def test_a_branch_name_is_no_revision(tmp_path):
    with pytest.raises(RecipeError, match="revision"):
        load_recipe("qwen3-8b", edited(tmp_path, lambda r: r["base"]["source"].update(revision="main"), "qwen3-8b"))


def test_loss_weights_and_phase_order_are_checked(tmp_path):
    with pytest.raises(RecipeError, match="must be 1"):
        load_recipe("tiny", edited(tmp_path, lambda r: r["phases"][0]["loss"].update(kl=0.5)))
    with pytest.raises(RecipeError, match="in this order"):
        load_recipe("tiny", edited(tmp_path, lambda r: r["phases"].reverse()))


def test_extends_merges_objects_and_replaces_lists(tmp_path):
    quick, full = load_recipe("smollm2-quick"), load_recipe("smollm2-135m")
    assert quick.teacher == full.teacher and quick.generation.top_k == full.generation.top_k
    assert quick.splits.selection < full.splits.selection and quick.splits.seed == full.splits.seed
    path = edited(tmp_path, lambda r: r.update(extends="tiny"))
    with pytest.raises(RecipeError, match="extends itself"):
        load_recipe("tiny", path)


def test_pins_of_the_real_recipe():
    recipe = load_recipe("qwen3-8b")
    assert (recipe.teacher.num_ids, set(recipe.teacher.stop_ids)) == (151669, {151645, 151643})
    assert recipe.base.source.files["model-00001-of-00002.safetensors"].size_bytes == 3441185608
    assert all(len(corpus.revision) == 40 for corpus in recipe.corpora)
    assert sum(name.endswith(".safetensors") for name in recipe.teacher.source.files) == 5


def test_a_run_refuses_a_changed_recipe(tmp_path, monkeypatch):
    """A resumed run once went on with an edited learning rate; its phase_log then told of a run that never was."""
    monkeypatch.setattr(recipes, "ROOT", tmp_path)
    run = RunDocument.open(load_recipe("tiny"))
    run.append({"phase": "student", "checkpoint_sha256": "0" * 64})
    assert RunDocument.open(load_recipe("tiny")).finished("student")
    changed = load_recipe("tiny", edited(tmp_path, lambda r: r["adapter"].update(alpha=3.0)))
    with pytest.raises(RecipeError, match="changed since.*adapter"):
        RunDocument.open(changed)
