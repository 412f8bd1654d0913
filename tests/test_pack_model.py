"""scripts.pack_model on a run folder made by hand: base, adapter, final archive, plain phase, verify, inventory."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import quantization as q
from drafter.adapter import Adapter, linear_names
from drafter.checkpoint import checked_weights
from drafter.decoding import load_causal_lm
from drafter.provenance import sha256_file, write_json
from drafter.recipe import RunDocument, load_recipe
from model_io import load_base, load_model, verify
from scripts import pack_model
from scripts.random_model import make_random_model


def log_phase(run_dir, recipe, phase: str) -> None:
    """Put what lies in the folder of a phase into phase_log, as the end of its training does."""
    path = run_dir / "architecture.json"
    log = RunDocument.read(path).phase_log if path.exists() else []
    name = "adapter.safetensors" if phase == "adapter" else "model.safetensors"
    entry = {"phase": phase, "checkpoint_sha256": sha256_file(run_dir / phase / name)}
    if phase == "qat":
        entry["scales_sha256"] = sha256_file(run_dir / "qat" / "nf4_scales.safetensors")
    log = [other for other in log if other["phase"] != phase]
    write_json(path, RunDocument(recipe, [*log, entry]).document())


def train_adapter(run_dir, recipe) -> None:
    """A random adapter beside the base that the run has now."""
    base = load_base(run_dir / "base")
    adapter = Adapter.create(base.model, recipe.adapter.rank, recipe.adapter.alpha)
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    adapter.save(run_dir / "adapter", base_sha256=base.base_sha256)
    log_phase(run_dir, recipe, "adapter")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(recipe, run folder) with a random qat checkpoint, its scales, and a teacher; nothing else of a run."""
    torch.set_num_threads(1)
    recipe = load_recipe("tiny")
    run_dir = tmp_path / "runs" / "tiny"
    monkeypatch.setattr(type(recipe), "run_dir", property(lambda _: run_dir))
    monkeypatch.setattr(type(recipe), "cache_dir", property(lambda _: tmp_path / "cache"))
    make_random_model(recipe.teacher, tmp_path / "cache" / "models" / "teacher")
    source = recipe.base.source.model_copy(update={"seed": 8})  # the teacher's own weights are seed 7
    make_random_model(recipe.base.model_copy(update={"source": source}), run_dir / "qat")
    model = load_causal_lm(run_dir / "qat", torch.float32)
    scales = {f"{name}.weight": q.nf4_scales(model.get_submodule(name).weight) for name in linear_names(model)}
    save_file(scales, run_dir / "qat" / "nf4_scales.safetensors")
    log_phase(run_dir, recipe, "qat")
    return recipe, run_dir


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_chain(run, tmp_path, capsys, monkeypatch):
    recipe, run_dir = run
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "model"))
    assert pack_model.main(["--recipe", "tiny"]) == 1
    assert "pack_model --recipe tiny --base" in capsys.readouterr().err
    assert pack_model.main(["--recipe", "tiny", "--base"]) == 0
    base = last_line(capsys)
    assert base["base_sha256"] == load_base(run_dir / "base").base_sha256
    assert pack_model.main(["--recipe", "tiny"]) == 1
    assert "train.py --phase adapter --recipe tiny" in capsys.readouterr().err
    train_adapter(run_dir, recipe)
    assert pack_model.main(["--recipe", "tiny"]) == 0
    final = last_line(capsys)
    assert final["base_sha256"] == base["base_sha256"] and final["path"] == str(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.info["adapter_rank"] == recipe.adapter.rank and loaded.info["recipe"] == "tiny"
    assert loaded.context == recipe.serving.context and loaded.stop_ids == set(recipe.base.stop_ids)
    source = verify(tmp_path / "model").quantization["source"]
    assert source["phase"] == "qat" and source["checkpoint_sha256"] == sha256_file(run_dir / "qat/model.safetensors")

    assert pack_model.main(["--verify", str(tmp_path / "model")]) == 0
    assert last_line(capsys)["archive_id"] == final["archive_id"]
    assert pack_model.main(["--inventory", str(tmp_path / "model")]) == 0
    assert last_line(capsys)["tensors"] == len(verify(tmp_path / "model").quantization["tensors"])
    (tmp_path / "model" / "config.json").write_text("{}")
    assert pack_model.main(["--verify", str(tmp_path / "model")]) == 1
    assert "config.json" in capsys.readouterr().err


def test_dry_run_says_what_it_would_cost(run, capsys):
    recipe, run_dir = run
    assert pack_model.main(["--recipe", "tiny", "--base", "--dry-run"]) == 0
    base = last_line(capsys)
    assert not (run_dir / "base").exists() and base["missing"] == [] and base["estimated_s"] == 0
    assert "nf4_scales.safetensors" in base["reads"]  # below the root with its folders
    assert base["estimated_memory_bytes"] > 0
    assert pack_model.main(["--recipe", "tiny", "--base"]) == 0
    report = last_line(capsys)
    assert base["weights"] == report["weights"]
    assert pack_model.main(["--recipe", "tiny", "--phase", "qat", "--storage", "plain", "--dry-run"]) == 0
    plain = last_line(capsys)["estimated_bytes"]
    assert pack_model.main(["--recipe", "tiny", "--phase", "qat", "--storage", "plain"]) == 0
    packed = last_line(capsys)
    tokenizer = sum(packed["files"][name] for name in packed["files"] if name.startswith("tokenizer"))
    # of the plain form every byte is known before, but for the groups that keep their bf16 scales
    assert plain <= packed["files"]["weights.safetensors"] + tokenizer < 1.02 * plain
    assert pack_model.main(["--recipe", "tiny", "--dry-run"]) == 0
    final = last_line(capsys)
    assert "adapter.json" in final["missing"]
    assert final["estimated_bytes"] > base["estimated_bytes"]
    assert pack_model.main(["--recipe", "tiny", "--phase", "polish", "--dry-run"]) == 0
    nothing = last_line(capsys)
    assert nothing["reads"] == [] and "weights" not in nothing


def test_a_phase_by_itself(run, capsys):
    recipe, run_dir = run
    shutil.copytree(run_dir / "qat", run_dir / "polish", ignore=shutil.ignore_patterns("nf4*"))
    log_phase(run_dir, recipe, "polish")
    assert pack_model.main(["--recipe", "tiny", "--phase", "polish", "--storage", "plain"]) == 0
    report = last_line(capsys)
    assert report["path"] == str(run_dir / "packed_polish") and "weights.safetensors" in report["files"]
    assert load_model(run_dir / "packed_polish", "packed").info["adapter_rank"] is None
    assert pack_model.main(["--recipe", "tiny", "--phase", "focused"]) == 1
    assert "train.py --phase focused --recipe tiny" in capsys.readouterr().err


def test_the_base_follows_the_qat_checkpoint(run):
    """A base kept from an earlier training would be served under an adapter that was trained beside another one."""
    recipe, run_dir = run
    base = pack_model.pack_base_of_run(recipe)
    first = verify(base).archive_id
    assert pack_model.pack_base_of_run(recipe) == base and verify(base).archive_id == first
    shift_norm(run_dir / "qat")
    log_phase(run_dir, recipe, "qat")
    pack_model.pack_base_of_run(recipe)
    second = verify(base)
    assert second.archive_id != first
    assert second.quantization["source"]["checkpoint_sha256"] == sha256_file(run_dir / "qat/model.safetensors")


def shift_norm(folder) -> None:
    """Other weights of the same shapes."""
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_another_phase_in_the_place_of_the_base(run, tmp_path, capsys):
    """`--phase polish --output runs/R/base` left an archive whose log held qat, and it passed for the frozen base."""
    recipe, run_dir = run
    shutil.copytree(run_dir / "qat", run_dir / "polish", ignore=shutil.ignore_patterns("nf4*"))
    shift_norm(run_dir / "polish")
    log_phase(run_dir, recipe, "polish")
    polish = ["--recipe", "tiny", "--phase", "polish", "--output", str(run_dir / "base")]
    assert pack_model.main(polish) == 0
    base = pack_model.pack_base_of_run(recipe)
    assert verify(base).quantization["source"]["phase"] == "qat"
    train_adapter(run_dir, recipe)
    assert pack_model.main(polish) == 0
    capsys.readouterr()
    final = ["--recipe", "tiny", "--output", str(tmp_path / "model")]
    assert pack_model.main(final) == 1
    error = capsys.readouterr().err
    assert "polish" in error and "pack_model --recipe tiny --base" in error
    for phase in ("polish", "qat"):
        assert sha256_file(run_dir / phase / "model.safetensors") in error
    assert pack_model.main(["--recipe", "tiny", "--base"]) == 0 and pack_model.main(final) == 0


def test_checkpoints_that_phase_log_does_not_name(run, tmp_path, capsys):
    """Files of another training under the same name were packed with a log that spoke of the first one."""
    recipe, run_dir = run
    pack_model.pack_base_of_run(recipe)
    train_adapter(run_dir, recipe)
    final = ["--recipe", "tiny", "--output", str(tmp_path / "model")]
    logged = sha256_file(run_dir / "adapter" / "adapter.safetensors")
    Adapter.create(load_base(run_dir / "base").model, recipe.adapter.rank, recipe.adapter.alpha).save(
        run_dir / "adapter", base_sha256=verify(run_dir / "base").base_sha256
    )
    found = sha256_file(run_dir / "adapter" / "adapter.safetensors")
    capsys.readouterr()
    assert pack_model.main(final) == 1
    error = capsys.readouterr().err
    assert logged in error and found in error and "Move runs/tiny away" in error and error.count("\n") == 1

    logged = sha256_file(run_dir / "qat" / "model.safetensors")
    shift_norm(run_dir / "qat")
    for argv in (final, ["--recipe", "tiny", "--base"]):
        assert pack_model.main(argv) == 1
        error = capsys.readouterr().err
        assert logged in error and sha256_file(run_dir / "qat" / "model.safetensors") in error
    with pytest.raises(ValueError, match="lineage"):
        pack_model.pack_base_of_run(recipe)
    (run_dir / "qat" / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="the file is missing"):
        pack_model.pack_base_of_run(recipe)
    with pytest.raises(ValueError, match="scripts.prune_layers --recipe tiny"):
        checked_weights(run_dir, [], "student")


def test_an_adapter_of_another_base(run, tmp_path, capsys):
    """The base was packed anew after the adapter had been trained: shapes fit, and only acceptance was gone."""
    recipe, run_dir = run
    pack_model.pack_base_of_run(recipe)
    train_adapter(run_dir, recipe)
    old = verify(run_dir / "base").base_sha256
    shift_norm(run_dir / "qat")
    log_phase(run_dir, recipe, "qat")
    pack_model.pack_base_of_run(recipe)
    capsys.readouterr()
    assert pack_model.main(["--recipe", "tiny", "--output", str(tmp_path / "model")]) == 1
    error = capsys.readouterr().err
    assert old in error and verify(run_dir / "base").base_sha256 in error
    assert "python -m scripts.pack_model --recipe tiny --base" in error


def test_the_teacher_must_be_there_to_be_refused(run, capsys, tmp_path):
    """Without the teacher's files the check that the student is no copy of it was left out in silence."""
    recipe, run_dir = run
    teacher = tmp_path / "cache" / "models" / "teacher"
    shutil.copytree(teacher, run_dir / "polish")
    log_phase(run_dir, recipe, "polish")
    assert pack_model.main(["--recipe", "tiny", "--phase", "polish"]) == 1
    assert "the teacher's own tensors" in capsys.readouterr().err
    shutil.rmtree(teacher)
    for argv in (["--phase", "polish"], ["--base"]):
        assert pack_model.main(["--recipe", "tiny", *argv]) == 1
        assert "python -m scripts.download_models --recipe tiny" in capsys.readouterr().err
    assert not (run_dir / "base").exists() and not (run_dir / "packed_polish").exists()


def test_flags_that_contradict(capsys):
    for argv in ([], ["--recipe", "tiny", "--storage", "zst"], ["--recipe", "tiny", "--base", "--phase", "polish"]):
        with pytest.raises(SystemExit):
            pack_model.main(argv)
    assert "bytes unchanged" in capsys.readouterr().err


def test_scales_of_another_training_are_refused(run):
    """The block scales lay beside the checkpoint, in no hash: swapped ones packed other codes under the same log."""
    recipe, run_dir = run
    path = run_dir / "qat" / "nf4_scales.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"nf4_scales.*found {sha256_file(path)}.*lineage is broken"):
        pack_model.pack_phase(recipe, "qat", run_dir / "base")


def test_a_run_keeps_the_scales_that_it_was_begun_with(run):
    """A recipe that turned to double-quantized scales made another base of an old run, and its adapter was refused."""
    recipe, run_dir = run
    plain = recipe.model_copy(update={"packing": recipe.packing.model_copy(update={"double_quant": False})})
    assert recipe.packing.double_quant
    doubled = pack_model.pack_phase(recipe, "qat", run_dir / "base")
    log_phase(run_dir, plain, "qat")
    old = pack_model.pack_phase(plain, "qat", run_dir / "base")
    assert pack_model.pack_phase(recipe, "qat", run_dir / "base")["base_sha256"] == old["base_sha256"]
    assert old["base_sha256"] != doubled["base_sha256"] and old["bits_per_weight_linear"] == 4.25
