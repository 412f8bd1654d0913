"""The whole chain on `tiny`: every step in one process, then what its outputs must satisfy together."""

import json
import shutil

import pytest
import torch

from drafter.acceptance import RoundCounts, replay_rows
from drafter.engine import DraftEngine, DraftRequest
from drafter.provenance import sha256_file
from drafter.recipe import PHASES, RunDocument
from drafter.scoring import evaluate_model
from drafter.teacher_data import read_shards, shard_paths
from model_io import load_model, verify
from scripts import generate_teacher, quickstart


def development(chain):
    return read_shards(shard_paths(chain.recipe.cache_dir / "teacher", "development"))


def test_lineage_can_be_walked_from_the_archive(chain):
    """Each entry's parent is the checkpoint of the one before it, in the archive's own copy of the log."""
    log = RunDocument.read(chain.model_dir / "architecture.json").phase_log
    assert [entry["phase"] for entry in log] == ["student", *PHASES]
    for before, after in zip(log, log[1:], strict=False):
        assert after["parent_sha256"] == before["checkpoint_sha256"]
    source = json.loads((chain.recipe.cache_dir / "models" / "base" / "source.json").read_text())
    assert log[0]["parent_sha256"] == source["files"]["model.safetensors"]
    for entry in log[1:]:
        assert entry["cost"]["hours"] >= 0 and entry["cost"]["tokens"] >= chain.recipe.phase(entry["phase"]).tokens
        assert entry["data"] == {name: sha256_file(chain.recipe.cache_dir / "teacher" / name) for name in entry["data"]}


def test_the_table_has_every_stage_in_order(chain):
    stages = [row["stage"] for row in chain.report["rows"]]
    assert stages == ["prompt_lookup", "untrained", *PHASES[:4], "packed_ptq", "packed_qat", "packed"]
    assert all(row["agreement"] is not None and set(row["tau"]) == {"4", "8", "16"} for row in chain.report["rows"])


def test_final_is_never_answered_and_splits_are_disjoint(chain):
    teacher = chain.recipe.cache_dir / "teacher"
    assert not shard_paths(teacher, "final") and (chain.recipe.cache_dir / "prompts" / "final.jsonl").exists()
    ids = {}
    for path in sorted(teacher.glob("*.parquet")):
        for row in read_shards([path]):
            assert row.id not in ids, f"{row.id} stands in {path.name} and {ids[row.id]}"
            ids[row.id] = path.name


def test_stored_continuations_are_the_teachers_greedy_tokens(chain):
    """Masks, template and cache: a plain forward over a stored row finds the same argmax at every position."""
    model = generate_teacher_model(chain)
    for row in development(chain)[:6]:
        tokens = torch.tensor([row.prompt_ids + row.continuation_ids[:-1]])
        with torch.inference_mode():
            logits = model(input_ids=tokens).logits[0, len(row.prompt_ids) - 1 :, : chain.recipe.teacher.num_ids]
        assert logits.argmax(-1).tolist() == row.continuation_ids


def generate_teacher_model(chain):
    from drafter.decoding import load_causal_lm

    return load_causal_lm(chain.recipe.cache_dir / "models" / "teacher", torch.float32)


def test_a_second_run_makes_nothing_new(chain, capsys):
    before = {path: path.stat().st_mtime_ns for path in chain.root.rglob("*.safetensors*")}
    report = generate_teacher.generate(chain.recipe)
    assert report["made"] == 0 and report["tokens_per_s"] is None
    quickstart.train_missing(chain.recipe)
    quickstart.pack_missing(chain.recipe)
    assert before == {path: path.stat().st_mtime_ns for path in chain.root.rglob("*.safetensors*")}


def test_teacher_resumes_by_id(chain, tmp_path, monkeypatch):
    """A shard lost, its ids are answered again, and only they; the answers are the same."""
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    shutil.copytree(chain.root / "data", tmp_path / "data", symlinks=True)
    recipe = chain.recipe
    path = shard_paths(recipe.cache_dir / "teacher", "focused")[0]
    lost = read_shards([path])
    path.unlink()
    assert generate_teacher.generate(recipe)["made"] == len(lost)
    again = {row.id: row.continuation_ids for row in read_shards(shard_paths(recipe.cache_dir / "teacher", "focused"))}
    assert again == {row.id: row.continuation_ids for row in lost}


def test_tau_by_teacher_forcing_is_tau_by_replay_of_the_served_engine(chain):
    loaded = load_model(chain.model_dir, dtype=torch.float32)
    engine, rows = DraftEngine(loaded), development(chain)
    result = evaluate_model(loaded.model, rows, num_ids=loaded.num_ids)
    for k in (4, 16):

        def draft(prefixes, k=k):
            return [one.tokens for one in engine.draft([DraftRequest(prefix, k) for prefix in prefixes])]

        replayed = replay_rows([(r.prompt_ids, r.continuation_ids, r.finish_reason) for r in rows], k, draft)
        assert RoundCounts.of(replayed, k).tau() == pytest.approx(result.tau[k], abs=1e-12)


def test_drafts_of_the_archive_do_not_depend_on_what_shares_the_batch(chain):
    engine = DraftEngine(load_model(chain.model_dir, dtype=torch.float32))
    requests = [DraftRequest(row.prompt_ids[: 5 + 9 * at], 1 + at % 16) for at, row in enumerate(development(chain))]
    alone = [engine.draft([request])[0].tokens for request in requests]
    for size in (2, 5, len(requests)):
        batches = [requests[at : at + size] for at in range(0, len(requests), size)]
        assert [one.tokens for batch in batches for one in engine.draft(batch)] == alone


def test_every_part_of_the_archive_is_used(chain, tmp_path):
    """A quantized drafter that loads without an error and accepts nothing: adapter and blocks must reach the logits."""
    from drafter.adapter import Adapter

    loaded = load_model(chain.model_dir, dtype=torch.float32)
    base = load_model(chain.root / "runs" / "tiny" / "base", dtype=torch.float32)
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        assert not torch.equal(loaded.model(input_ids=ids).logits, base.model(input_ids=ids).logits)
    adapter = Adapter.load(chain.root / "runs" / "tiny" / "adapter")
    assert all(tensor.abs().max() > 0 for tensor in adapter.state_dict().values())


def test_a_changed_byte_in_any_file_of_the_model_is_refused(chain, tmp_path):
    manifest = verify(chain.model_dir)
    names = sorted(path.name for path in chain.model_dir.iterdir() if path.is_file())
    assert len(names) >= 9 and manifest
    for name in names:
        folder = tmp_path / name
        shutil.copytree(chain.model_dir, folder, ignore=shutil.ignore_patterns("evidence"))
        data = bytearray((folder / name).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(ValueError) as caught:
            load_model(folder)
        assert name in str(caught.value)
        if name != "manifest.json":
            assert sha256_file(folder / name) in str(caught.value) and sha256_file(chain.model_dir / name) in str(
                caught.value
            )
