"""scripts.calibrate: moments against a plain computation, train rows alone, a file that belongs to its checkpoint."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter import quantization as q
from drafter.adapter import linear_names
from drafter.decoding import load_causal_lm
from drafter.provenance import sha256_file
from model_io import load_model
from scripts import calibrate, pack_model


@pytest.fixture
def run_dir(chain, tmp_path):
    """A copy of what calibrating and packing polish read of the chain's run."""
    folder = tmp_path / "tiny"
    shutil.copytree(chain.root / "runs" / "tiny" / "polish", folder / "polish")
    shutil.copy(chain.root / "runs" / "tiny" / "architecture.json", folder)
    return folder


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_moments_are_the_mean_squares_of_every_row_by_itself(chain):
    """Batches are padded: had padding been counted, or a row's end been cut, short rows would weigh wrongly."""
    model = load_causal_lm(chain.root / "runs" / "tiny" / "polish", torch.float32)
    rows = calibrate.train_rows(chain.recipe, 12)
    lengths = {len(row.prompt_ids) + len(row.continuation_ids) for row in rows}
    assert len(lengths) > 3, "rows of different lengths, or this test cannot fail"
    seen: dict[str, list] = {}
    for name in linear_names(model):
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, inputs, name=name: seen.setdefault(f"{name}.weight", []).append(inputs[0][0].double())
        )
    with torch.inference_mode():
        for row in rows:
            model.model(torch.tensor([row.prompt_ids + row.continuation_ids[:-1]]), use_cache=False)
    done: list[int] = []
    fresh = load_causal_lm(chain.root / "runs" / "tiny" / "polish", torch.float32)
    found = calibrate.second_moments(fresh, rows, batch_tokens=400, progress=done.append)
    assert sum(done) == 12 and 1 < len(done) < 12
    assert set(found) == set(seen)
    for name, parts in seen.items():
        expected = torch.cat(parts).square().mean(0)
        assert found[name].dtype == torch.float32 and found[name].shape == expected.shape
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-4, atol=1e-9)
    assert not any(module._forward_pre_hooks for module in fresh.modules()), "no hook stays behind"


def test_only_train_rows(chain, tmp_path, monkeypatch):
    """Selection rows in a training shard would have chosen the scales that selection then judges."""
    rows = calibrate.train_rows(chain.recipe, 10**6)
    assert {row.split for row in rows} == {"train"} and len({row.category for row in rows}) > 1
    assert [row.id for row in calibrate.train_rows(chain.recipe, 7)] == [rows[i * len(rows) // 7].id for i in range(7)]
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    teacher = tmp_path / "data/cache/tiny/teacher"
    with pytest.raises(ValueError, match="scripts.generate_teacher --recipe tiny"):
        calibrate.train_rows(chain.recipe, 8)
    shutil.copytree(chain.root / "data/cache/tiny/teacher", teacher)
    shutil.copy(teacher / "selection-00000.parquet", teacher / "focused-00007.parquet")
    with pytest.raises(ValueError, match="of the selection split, expected train"):
        calibrate.train_rows(chain.recipe, 8)


def test_packing_uses_the_moments_of_its_checkpoint(chain, run_dir, capsys):
    argv = ["--recipe", "tiny", "--phase", "polish", "--run", str(run_dir)]
    assert pack_model.main(argv) == 0
    plain = last_line(capsys)["archive_id"]
    assert calibrate.main([*argv, "--rows", "9", "--dry-run"]) == 0
    planned = last_line(capsys)
    assert planned["missing"] == [] and planned["rows"] == 9 and planned["estimated_s"] is not None
    assert not (run_dir / "polish" / calibrate.FILE).exists()
    assert calibrate.main([*argv, "--rows", "9"]) == 0
    done = last_line(capsys)
    assert done["tokens"] == planned["tokens"] and done["rows"] == 9
    assert done["checkpoint_sha256"] == sha256_file(run_dir / "polish" / "model.safetensors")
    assert pack_model.main(argv) == 0
    assert last_line(capsys)["archive_id"] != plain
    weights, moments = load_file(run_dir / "polish/model.safetensors"), load_file(run_dir / "polish" / calibrate.FILE)
    packed = load_model(run_dir / "packed_polish", dtype=torch.float32).model.state_dict()
    for name, one in moments.items():
        scales = q.double_quantized(q.nf4_scales(weights[name], moments=one))  # as the recipe stores them
        assert torch.equal(packed[name], q.fake_quant_nf4(weights[name], scales))
    (run_dir / "polish" / calibrate.FILE).unlink()
    assert pack_model.main(argv) == 0
    assert last_line(capsys)["archive_id"] == plain


def test_moments_of_other_weights_are_refused(chain, run_dir, capsys):
    """A file left by an earlier training would weight the search of another student, and nobody would see it."""
    argv, path = ["--recipe", "tiny", "--phase", "polish", "--run", str(run_dir)], run_dir / "polish" / calibrate.FILE
    assert calibrate.main([*argv, "--rows", "4"]) == 0
    good = path.read_bytes()
    logged, other = sha256_file(run_dir / "polish" / "model.safetensors"), "0" * 64
    path.write_bytes(good.replace(logged.encode(), other.encode()))
    assert pack_model.main(argv) == 1
    error = capsys.readouterr().err
    assert logged in error and other in error and "scripts.calibrate --phase polish --recipe tiny" in error
    path.write_bytes(good[: len(good) // 2])
    assert pack_model.main(argv) == 1 and "cannot be read" in capsys.readouterr().err
    tensors = load_file(run_dir / "polish" / "model.safetensors")
    moments = {name: torch.full(tensors[name].shape[-1:], torch.nan) for name in list(tensors)[:2]}
    save_file(moments, path, {"moments": json.dumps({"checkpoint_sha256": logged})})
    assert pack_model.main(argv) == 1 and "finite number >= 0" in capsys.readouterr().err
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, run_dir / "polish/model.safetensors")
    assert calibrate.main(argv) == 1 and "lineage" in capsys.readouterr().err
    assert calibrate.main([*argv, "--rows", "0"]) == 1 and "at least 1" in capsys.readouterr().err
