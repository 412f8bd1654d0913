"""The audit on the whole `tiny` chain: clean as it was made, and each link that is tampered with is named."""

import dataclasses
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafter.adapter import Adapter
from drafter.archive import document_bytes, manifest_bytes
from drafter.provenance import canonical_json, read_json, sha256_bytes, sha256_file, sha256_json, write_json
from drafter.recipe import Corpus, FilePin, Recipe
from drafter.teacher_data import ShardWriter, read_metadata, read_shards
from model_io import pack_adapter
from scripts import audit, calibrate, pack_model
from scripts._audit_data import check_corpora
from scripts._audit_report import Report


@dataclasses.dataclass
class World:
    """A copy of the chain that may be spoilt."""

    recipe: Recipe
    root: Path

    @property
    def run(self) -> Path:
        return self.root / "runs" / "tiny"

    @property
    def cache(self) -> Path:
        return self.root / "data" / "cache" / "tiny"

    def faults(self, target: str = "model") -> list:
        return audit.audit(self.root / target)[0].faults


@pytest.fixture
def world(chain, tmp_path, monkeypatch) -> World:
    root = tmp_path / "root"
    shutil.copytree(chain.root, root, symlinks=True)
    monkeypatch.setattr("drafter.recipe.ROOT", root)
    return World(chain.recipe, root)


def change_json(path: Path, change) -> None:
    document = read_json(path)
    change(document)
    write_json(path, document)


def change_row(path: Path, change) -> None:
    """Rewrites the first row of a prompt file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    row = json.loads(lines[0])
    change(row)
    path.write_text("\n".join([json.dumps(row, ensure_ascii=False), *lines[1:]]) + "\n", encoding="utf-8")


def change_shard(path: Path) -> None:
    """One id of one answer is another; everything else as it was."""
    rows, metadata = read_shards([path]), read_metadata(path)
    rows[0].continuation_ids[0] ^= 1
    path.unlink()
    writer = ShardWriter(path.parent, path.name[: -len("-00000.parquet")], metadata.pop("top_k"), metadata)
    for row in rows:
        writer.add(row)
    writer.flush()
    assert writer.paths == [path]


def remake_manifest(folder: Path) -> None:
    """As a forger would: every hash of the archive is right again."""
    names = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "manifest.json")
    files = [{"path": one.name, "size_bytes": one.stat().st_size, "sha256": sha256_file(one)} for one in names]
    (folder / "manifest.json").write_bytes(manifest_bytes(files, sha256_bytes(canonical_json(files))))


# ---------------------------------------------------------------------------- clean


def test_what_quickstart_made_is_clean(chain):
    """It ends with the audit of its own output; a broken link would have ended it with an error."""
    document = read_json(chain.root / "runs" / "tiny" / "audit.json")
    assert document["ok"] and not document["faults"] and document["run"]["commit"] is not None
    walked = {link["link"].split()[0] for link in document["links"]}
    assert walked >= {name.split()[0] for name in audit.LINKS} - {"source", "history"}
    assert all(link["checked"] for link in document["links"] if link["link"] not in ("calibration", "who opens final"))
    assert document["figures"]["held_out_rows"] == 63 and document["figures"]["final_checks"] == 0


def test_the_command_line(world, capsys):
    assert audit.main([str(world.run)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"] and last["faults"] == [] and (world.run / "audit.json").exists()
    (world.run / "polish" / "model.safetensors").unlink()
    assert audit.main([str(world.root / "model")]) == 1
    said = capsys.readouterr().out
    assert "BROKEN  phases" in said and "model.safetensors" in said
    assert json.loads(said.splitlines()[-1])["ok"] is False and not read_json(world.run / "audit.json")["ok"]


def test_dry_run_lists_the_links_and_writes_nothing(world, capsys):
    (world.run / "audit.json").unlink()
    assert audit.main([str(world.root / "model"), "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["links"] == list(audit.LINKS)
    assert not (world.run / "audit.json").exists()


# ---------------------------------------------------------------------------- each link, tampered with


def text_of_a_prompt(world):
    change_row(world.cache / "prompts" / "distill.data.jsonl", lambda row: row["messages"][-1].update(content="Hi"))
    return "prompts", "distill.data.jsonl"


def text_of_a_prompt_rehashed(world):
    """Manifest, ledger and all: the row's own id still says which text it had."""
    path = world.cache / "prompts" / "focused.jsonl"
    change_row(path, lambda row: row["messages"][-1].update(content="Hi"))
    sha256 = sha256_file(path)
    change_json(path.with_name("focused.manifest.json"), lambda one: one["output"].update(sha256=sha256))
    ledger = world.cache / "teacher" / "manifest.json"
    change_json(ledger, lambda one: one["pools"]["focused"].update(prompts_sha256=sha256))
    return "splits", "focused.jsonl"


def prompt_file_renamed(world):
    path = world.cache / "prompts" / "expanded.extra.jsonl"
    path.rename(path.with_name("expanded.other.jsonl"))
    return "prompts", "expanded.extra.jsonl"


def prompt_manifest_edited(world):
    path = world.cache / "prompts" / "distill.addon.manifest.json"
    change_json(path, lambda one: one["parameters"]["synthetic"][0].update(seed=99))
    return "prompts", "distill.addon.manifest.json"


def prompt_manifest_edited_rehashed(world):
    path = world.cache / "prompts" / "distill.addon.manifest.json"

    def change(one):
        one["parameters"]["caps"]["max_chars"] = 1
        kept = {key: one[key] for key in one if key not in ("key", "output", "counts", "counters")}
        one["key"] = sha256_json(kept)

    change_json(path, change)
    return "prompts", "distill.addon.manifest.json"


def counters_edited(world):
    path = world.cache / "prompts" / "focused.manifest.json"
    change_json(path, lambda one: one["counters"].update(rows_in=one["counters"]["rows_in"] + 1))
    return "prompts", "focused.manifest.json"


def input_of_unknown_origin(world):
    path = world.cache / "prompts" / "distill.data.manifest.json"
    extra = world.root / "data" / "cache" / "corpora" / "found.parquet"
    extra.parent.mkdir(exist_ok=True)
    extra.write_bytes(b"rows")

    def change(one):
        one["inputs"]["corpora/found.parquet"] = sha256_file(extra)
        one["key"] = sha256_json(
            {key: one[key] for key in one if key not in ("key", "output", "counts", "counters")}
        )  # fmt: skip

    change_json(path, change)
    return "prompts", "distill.data.manifest.json"


def train_row_that_is_held_out(world):
    held_out = json.loads((world.cache / "prompts" / "development.jsonl").read_text().splitlines()[0])
    change_row(world.cache / "prompts" / "focused.jsonl", lambda row: row.update(held_out, split="train"))
    return "splits", "focused.jsonl"


def final_row_in_train(world):
    """Known by reserved.json: the final file is not read."""
    final = read_json(world.cache / "prompts" / "reserved.json")["ids"]["final"][0]
    change_row(world.cache / "prompts" / "focused.jsonl", lambda row: row.update(id=final))
    return "splits", "focused.jsonl"


def final_file_changed(world):
    change_row(world.cache / "prompts" / "final.jsonl", lambda row: row.update(category="chat "))
    return "prompts", "final.jsonl"


def undeclared_source(world):
    change_row(world.cache / "prompts" / "distill.data.jsonl", lambda row: row.update(source="somebody/benchmark"))
    return "corpora", "distill.data.jsonl"


def answer_changed(world):
    path = world.cache / "teacher" / "distill.data-00000.parquet"
    change_shard(path)
    return "shards", path.name


def answer_changed_ledger_too(world):
    path = world.cache / "teacher" / "distill.data-00000.parquet"
    change_shard(path)
    sha256 = sha256_file(path)
    ledger = path.with_name("manifest.json")
    change_json(ledger, lambda one: one["pools"]["distill.data"]["shards"].update({path.name: sha256}))
    return "shards", "architecture.json"


def answer_changed_ledger_and_log_too(world):
    """The archive carries its own copy of the log."""
    answer_changed_ledger_too(world)
    shards = read_json(world.cache / "teacher" / "manifest.json")["pools"]["distill.data"]["shards"]

    def change(document):
        for entry in document["phase_log"]:
            if "data" in entry:
                entry["data"].update({name: sha256 for name, sha256 in shards.items() if name in entry["data"]})
                entry["data_sha256"] = sha256_json(entry["data"])

    change_json(world.run / "architecture.json", change)
    return "packed", "architecture.json"


def shards_swapped(world):
    first, second = (world.cache / "teacher" / f"distill.{name}-00000.parquet" for name in ("data", "addon"))
    first.rename(first.with_suffix(".was"))
    second.rename(first)
    first.with_suffix(".was").rename(second)
    return "shards", first.name


def shard_renamed(world):
    path = world.cache / "teacher" / "focused-00000.parquet"
    path.rename(path.with_name("focused-00007.parquet"))
    return "shards", path.name


def final_answered_as_a_pool(world):
    teacher = world.cache / "teacher"
    shutil.copyfile(teacher / "focused-00000.parquet", teacher / "final-00000.parquet")
    return "final", "teacher"


def phase_on_other_data(world):
    def change(document):
        entry = next(one for one in document["phase_log"] if one["phase"] == "polish")
        entry["data"].pop("focused-00000.parquet")
        entry["data_sha256"] = sha256_json(entry["data"])

    change_json(world.run / "architecture.json", change)
    return "shards", "architecture.json"


def phase_from_another_parent(world):
    change_json(world.run / "architecture.json", lambda one: one["phase_log"][3].update(parent_sha256="0" * 64))
    return "phases", "architecture.json"


def checkpoint_changed(world):
    path = world.run / "expanded" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    return "phases", "model.safetensors"


def scales_changed(world):
    path = world.run / "qat" / "nf4_scales.safetensors"
    save_file({name: scales * 2 for name, scales in load_file(path).items()}, path)
    return "phases", "nf4_scales.safetensors"


def foreign_base(world):
    foreign = {"kind": "hub", "repo": "somebody/EAGLE3-Qwen3-8B", "revision": "0" * 40, "files": {}}
    change_json(world.run / "architecture.json", lambda one: one["recipe"]["base"].update(source=foreign))
    return "phases", "architecture.json"


def base_weights_exchanged(world):
    """Hashes of the folder set right; the student's parent in the log is another base."""
    folder = world.cache / "models" / "teacher"
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    sha256 = sha256_file(folder / "model.safetensors")
    change_json(folder / "source.json", lambda one: one["files"].update({"model.safetensors": sha256}))
    return "student", "architecture.json"


def base_of_another_source(world):
    folder = world.cache / "models" / "teacher"
    change_json(folder / "source.json", lambda one: one["source"].update(seed=8))
    return "teacher", "source.json"


def recipe_is_not_the_declared_one(world):
    change_json(world.run / "architecture.json", lambda one: one["recipe"]["phases"][0].update(lr=0.5))
    return "recipe", "architecture.json"


def student_of_other_layers(world):
    change_json(world.run / "architecture.json", lambda one: one["phase_log"][0].update(keep=[0, 1]))
    return "student", "model.safetensors"


def archive_byte_changed(world):
    path = world.root / "model" / "weights.safetensors.zst"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return "archive", "model"


def archive_of_other_weights(world):
    """polish, packed plainly, that says it is the qat checkpoint; all its own hashes are right."""
    folder = world.root / "model"
    shutil.rmtree(folder)
    pack_model.pack_phase(world.recipe, "polish", folder)
    qat = read_json(world.run / "base" / "quantization.json")["source"]
    document = read_json(folder / "quantization.json")
    document["source"] |= {"phase": "qat", "checkpoint_sha256": qat["checkpoint_sha256"]}
    (folder / "quantization.json").write_bytes(document_bytes(document))
    remake_manifest(folder)
    return "packed", "model"


def archive_of_another_adapter(world):
    adapter = Adapter.load(world.run / "adapter")
    for tensor in adapter.parameters():
        tensor.data *= 2
    architecture = read_json(world.run / "architecture.json")
    pack_adapter(world.root / "model", base_dir=world.run / "base", adapter=adapter, architecture=architecture)
    return "adapter", "adapter.safetensors.xz"


def path_in_the_archive(world):
    folder = world.root / "model"
    document = read_json(folder / "architecture.json")
    document["recipe"]["description"] += " Made in /home/" + "somebody/work."
    (folder / "architecture.json").write_bytes(document_bytes(document))
    remake_manifest(folder)
    return "private", "architecture.json"


def final_opened_twice(world):
    archive_id = read_json(world.root / "model" / "manifest.json")["archive_id"]
    record = {"archive_id": archive_id, "final_sha256": sha256_file(world.cache / "prompts" / "final.jsonl")}
    record |= {"command": "", "opened": "", "run": {}, "result": {}}
    for name in ("validation.json", "validation-again.json"):
        write_json(world.root / "model" / "evidence" / name, record)
    return "final", "model"


def final_answered_without_a_record(world):
    settings = {"file_sha256": sha256_file(world.cache / "prompts" / "final.jsonl")}
    source = world.cache / "teacher" / "focused-00000.parquet"
    writer = ShardWriter(world.cache / "answers", "0123", read_metadata(source)["top_k"], settings)
    writer.add(read_shards([source])[0])
    writer.flush()
    return "final", "0123-00000.parquet"


TAMPERINGS = [
    text_of_a_prompt, text_of_a_prompt_rehashed, prompt_file_renamed, prompt_manifest_edited,
    prompt_manifest_edited_rehashed, counters_edited, input_of_unknown_origin, train_row_that_is_held_out,
    final_row_in_train, final_file_changed, undeclared_source, answer_changed, answer_changed_ledger_too,
    answer_changed_ledger_and_log_too, shards_swapped, shard_renamed, final_answered_as_a_pool, phase_on_other_data,
    phase_from_another_parent, checkpoint_changed, scales_changed, foreign_base, base_weights_exchanged,
    base_of_another_source, recipe_is_not_the_declared_one, student_of_other_layers, archive_byte_changed,
    archive_of_other_weights, archive_of_another_adapter, path_in_the_archive, final_opened_twice,
    final_answered_without_a_record,
]  # fmt: skip


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda one: one.__name__)
def test_the_link_that_was_tampered_with_is_named(tamper, world):
    link, file = tamper(world)
    named = [fault for fault in world.faults() if fault.link.split()[0] == link]
    assert any(fault.file.endswith(file) for fault in named), [fault.text() for fault in world.faults()]


def test_a_hash_that_differs_is_shown_beside_the_expected_one(world):
    path = world.cache / "teacher" / "distill.data-00000.parquet"
    before = sha256_file(path)
    change_shard(path)
    [fault] = [one for one in world.faults() if one.link == "shards" and one.file.endswith(path.name)]
    assert (fault.expected, fault.actual) == (before, sha256_file(path))


def test_an_archive_alone_is_a_gap(world):
    """Somebody else's archive without its run: nothing behind it can be walked, and that is said, link by link."""
    shutil.rmtree(world.run)
    shutil.rmtree(world.cache)
    links = {fault.link.split()[0] for fault in world.faults()}
    assert {"phases", "packed", "final"} <= links and "archive" not in links


def test_a_folder_that_is_neither_is_refused(tmp_path):
    with pytest.raises(ValueError, match="neither an archive nor a run"):
        audit.audit(tmp_path)


# ---------------------------------------------------------------------------- parts


def test_calibration_rows_are_train_rows(world):
    """Moments of a polish checkpoint pass; those that name other rows, or other weights, do not."""
    calibrate.calibrate(world.recipe, "polish", 8, world.run)
    assert not world.faults("runs/tiny")
    path = world.run / "polish" / calibrate.FILE
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["moments"])
    for key, name in (("rows_sha256", "rows_sha256 of 8 train rows"), ("checkpoint_sha256", "checkpoint_sha256")):
        save_file(load_file(path), path, {"moments": json.dumps({**metadata, key: "0" * 64})})
        [fault] = world.faults("runs/tiny")
        assert (fault.link, fault.problem, fault.actual) == ("calibration", name, "0" * 64)


def test_corpus_files_are_pinned_train_files(world, monkeypatch):
    """A declared corpus: right, then missing, of other bytes, unpinned, and of a held-out split."""
    path = world.root / "data" / "cache" / "corpora" / "us--it" / ("1" * 40) / "train.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pq.read_table(world.cache / "teacher" / "focused-00000.parquet", columns=["id"]), path)
    monkeypatch.setattr("scripts.download_data.LOCK", world.root / "corpora.lock.json")

    own = sha256_file(path)

    def faults(name="train.parquet", sha256=own):
        fields = {"repo": "us/it", "revision": "1" * 40, "licence": "MIT", "role": "distill.data"}
        corpus = Corpus(**fields, files={name: FilePin(sha256=sha256)}, columns={"user": "id"}, category="chat")
        report = Report()
        check_corpora(report, world.recipe.model_copy(update={"corpora": (corpus,)}))
        return " | ".join(fault.text() for fault in report.faults)

    assert faults() == ""
    assert "f" * 64 in faults(sha256="f" * 64) and own in faults(sha256="f" * 64)
    assert "neither pinned" in faults(sha256=None)
    assert "missing" in faults(name="train-2.parquet")
    assert "held-out split" in faults(name="test-00000.parquet")
