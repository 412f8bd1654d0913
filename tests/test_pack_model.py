"""scripts.pack_model on a run folder made by hand: base, adapter, final archive, plain phase, verify, inventory."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from drafter import quantization as q
from drafter.adapter import Adapter, linear_names
from drafter.decoding import load_causal_lm
from drafter.provenance import read_json, write_json
from drafter.recipe import RunDocument, load_recipe
from model_io import load_base, load_model, verify
from scripts import pack_model
from scripts.random_model import make_random_model


@pytest.fixture
def run(tmp_path, monkeypatch):
    """(recipe, run folder) with a random qat checkpoint, its scales, and an adapter; nothing else of a run."""
    torch.set_num_threads(1)
    recipe = load_recipe("tiny")
    run_dir = tmp_path / "runs" / "tiny"
    monkeypatch.setattr(type(recipe), "run_dir", property(lambda _: run_dir))
    monkeypatch.setattr(type(recipe), "cache_dir", property(lambda _: tmp_path / "cache"))
    make_random_model(recipe.base, run_dir / "qat")
    model = load_causal_lm(run_dir / "qat", torch.float32)
    scales = {f"{name}.weight": q.nf4_scales(model.get_submodule(name).weight) for name in linear_names(model)}
    save_file(scales, run_dir / "qat" / "nf4_scales.safetensors")
    adapter = Adapter.create(model, recipe.adapter.rank, recipe.adapter.alpha)
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.normal_(std=0.1, generator=torch.Generator().manual_seed(3))
    adapter.save(run_dir / "adapter")
    log = [{"phase": "qat", "checkpoint_sha256": "0" * 64}]
    write_json(run_dir / "architecture.json", RunDocument(recipe, log).document())
    return recipe, run_dir


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_chain(run, tmp_path, capsys, monkeypatch):
    recipe, run_dir = run
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "model"))
    assert pack_model.main(["--recipe", "tiny", "--base", "--dry-run"]) == 0
    assert last_line(capsys)["weights"] > 0 and not (run_dir / "base").exists()
    assert pack_model.main(["--recipe", "tiny"]) == 1
    assert "pack_model --recipe tiny --base" in capsys.readouterr().err
    assert pack_model.main(["--recipe", "tiny", "--base"]) == 0
    base = last_line(capsys)
    assert base["base_sha256"] == load_base(run_dir / "base").base_sha256
    assert pack_model.main(["--recipe", "tiny"]) == 0
    final = last_line(capsys)
    assert final["base_sha256"] == base["base_sha256"] and final["path"] == str(tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.info["adapter_rank"] == recipe.adapter.rank and loaded.info["recipe"] == "tiny"
    assert loaded.context == recipe.serving.context and loaded.stop_ids == set(recipe.base.stop_ids)

    assert pack_model.main(["--verify", str(tmp_path / "model")]) == 0
    assert last_line(capsys)["archive_id"] == final["archive_id"]
    assert pack_model.main(["--inventory", str(tmp_path / "model")]) == 0
    assert last_line(capsys)["tensors"] == len(verify(tmp_path / "model").quantization["tensors"])
    (tmp_path / "model" / "config.json").write_text("{}")
    assert pack_model.main(["--verify", str(tmp_path / "model")]) == 1
    assert "config.json" in capsys.readouterr().err


def test_a_phase_by_itself(run, capsys):
    _, run_dir = run
    shutil.copytree(run_dir / "qat", run_dir / "polish", ignore=shutil.ignore_patterns("nf4*"))
    assert pack_model.main(["--recipe", "tiny", "--phase", "polish", "--storage", "plain"]) == 0
    report = last_line(capsys)
    assert report["path"] == str(run_dir / "packed_polish") and "weights.safetensors" in report["files"]
    assert load_model(run_dir / "packed_polish", "packed").info["adapter_rank"] is None
    assert pack_model.main(["--recipe", "tiny", "--phase", "focused"]) == 1
    assert "train.py --recipe tiny --phase focused" in capsys.readouterr().err


def test_the_base_follows_the_qat_checkpoint(run):
    """A base kept from an earlier training would be served under an adapter that was trained beside another one."""
    recipe, run_dir = run
    base = pack_model.pack_base_of_run(recipe)
    first = verify(base).archive_id
    assert pack_model.pack_base_of_run(recipe) == base and verify(base).archive_id == first
    document = read_json(run_dir / "architecture.json")
    document["phase_log"][0]["checkpoint_sha256"] = "1" * 64
    write_json(run_dir / "architecture.json", document)
    pack_model.pack_base_of_run(recipe)
    assert verify(base).architecture["phase_log"][0]["checkpoint_sha256"] == "1" * 64


def test_flags_that_contradict(capsys):
    for argv in ([], ["--recipe", "tiny", "--storage", "zst"], ["--recipe", "tiny", "--base", "--phase", "polish"]):
        with pytest.raises(SystemExit):
            pack_model.main(argv)
    assert "bytes unchanged" in capsys.readouterr().err
