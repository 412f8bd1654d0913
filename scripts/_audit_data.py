"""The lower half of an audit's walk: teacher shards, their rows, prompts, corpus files, splits, calibration, evidence.

`final.jsonl` is hashed, never read: what is known of its rows is what reserved.json says of them.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from safetensors import safe_open

from drafter.cached_answers import CachedAnswers
from drafter.chat import TOKENIZER_FILES, Chat
from drafter.corpus import duplicate_key, held_out_token, prompt_id, read_prompts
from drafter.duplicates import NEAR_JACCARD, NEAR_NGRAM, NearIndex, ngrams, unpack_hashes, user_text
from drafter.provenance import ROOT, read_json, relative, sha256_folder, sha256_json
from drafter.recipe import TRAIN_POOLS, Recipe, RunDocument
from drafter.teacher_data import check_settings, read_metadata, shard_paths
from drafter.wheel_text import read_wheel
from scripts._audit_report import Report
from scripts._prompts import TRAIN_STEPS, manifest_path, prompts_path, reserved_path
from scripts._texts import wheel_path
from scripts.calibrate import FILE as MOMENTS
from scripts.calibrate import train_rows
from scripts.download_data import fault_of, wanted_files

HELD_OUT = ("selection", "development", "final")
LABELS = ("source", "category", "family", "split")

# ---------------------------------------------------------------------------- shards


def check_shards(report: Report, recipe: Recipe, run: RunDocument) -> None:
    """Each phase trained on the shards of its own mix; they are those on disk, of this teacher and these settings."""
    folder, log_file = recipe.cache_dir / "teacher", recipe.run_dir / "architecture.json"
    with report.link("shards", folder / "manifest.json"):
        ledger = read_json(folder / "manifest.json")
        pools, teacher = ledger["pools"], recipe.cache_dir / "models" / "teacher"
        files = read_json(teacher / "source.json")["files"]
        report.check(folder / "manifest.json", "teacher_files is not the teacher's source.json", files,
                     ledger.get("teacher_files", "none: scripts.generate_teacher writes them"))  # fmt: skip
        named = {name: sha256 for pool in pools.values() for name, sha256 in pool["shards"].items()}
        found = sorted(path.name for path in folder.glob("*.parquet"))
        report.check(folder, "shards on disk are not those of manifest.json", sorted(named), found)
        tokenizer = sha256_folder(teacher, TOKENIZER_FILES)
        for name, sha256 in named.items():
            if report.file(folder / name, sha256, "teacher/manifest.json"):
                check_settings(recipe, folder / name)
                own = read_metadata(folder / name)
                report.check(folder / name, "made with another tokenizer", tokenizer, own["tokenizer_files"])
                if own.get("cached_answers"):
                    declared = recipe.generation.cached
                    report.check(folder / name, "took its ids from a file that the recipe does not name",
                                 declared and declared.sha256, own["cached_answers"])  # fmt: skip
        for pool, entry in pools.items():
            report.file(prompts_path(recipe, pool), entry["prompts_sha256"], "teacher/manifest.json")
        for entry in run.phase_log:
            if "data" not in entry:
                continue  # the student is cut, not trained
            mix = recipe.phase(entry["phase"]).mix
            expected = {name: sha256 for pool in sorted(mix) for name, sha256 in pools[pool]["shards"].items()}
            report.check(log_file, f"data of {entry['phase']} is not its mix's shards", expected, entry["data"])
            digest = sha256_json(entry["data"])
            report.check(log_file, f"data_sha256 of {entry['phase']}", digest, entry["data_sha256"])


def check_rows(report: Report, recipe: Recipe) -> None:
    """Every prompt has one answer and every answer one prompt, rendered as the template renders it today."""
    folder, teacher = recipe.cache_dir / "teacher", recipe.teacher
    with report.link("rows", folder):
        settings = {"thinking": recipe.chat.thinking, "stop_ids": teacher.stop_ids, "num_ids": teacher.num_ids}
        chat, stops = Chat.load(recipe.cache_dir / "models" / "teacher", **settings), set(teacher.stop_ids)
        columns = ["id", *LABELS, "prompt_ids", "continuation_ids", "finish_reason"]
        declared = recipe.generation.cached
        cached = CachedAnswers.read(ROOT / declared.file, declared.sha256) if declared else None
        for pool in (*TRAIN_POOLS, *HELD_OUT[:2]):
            prompts = {row["id"]: row for row in read_prompts(prompts_path(recipe, pool))}
            waiting = set(prompts)
            for path in shard_paths(folder, pool):
                known = cached if read_metadata(path).get("cached_answers") else None
                for row in pq.read_table(path, columns=columns).to_pylist():
                    if row["id"] not in waiting:
                        report.fault(path, "holds an answer without a prompt, or a second one", "one each", row["id"])
                        continue
                    waiting.remove(row["id"])
                    prompt = prompts[row["id"]]
                    report.check(path, f"labels of row {row['id'][:12]}", [prompt[name] for name in LABELS],
                                 [row[name] for name in LABELS])  # fmt: skip
                    rendered = chat.render(prompt["messages"])
                    report.check(path, f"prompt_ids of row {row['id'][:12]}", rendered, row["prompt_ids"])
                    ids, ended = row["continuation_ids"], row["continuation_ids"][-1] in stops
                    whole = 0 <= min(ids) <= max(ids) < teacher.num_ids and not stops & set(ids[:-1])
                    sound = whole and ended == (row["finish_reason"] == "stop")
                    report.check(path, f"answer of row {row['id'][:12]} is one", True, sound)
                    if known and (answer := known.find(row["id"], rendered)):
                        report.check(path, f"answer of row {row['id'][:12]} is the cached one", answer.ids, ids)
            report.check(prompts_path(recipe, pool), "prompts without an answer", [], sorted(waiting)[:3])


# ---------------------------------------------------------------------------- prompts


def check_prompts(report: Report, recipe: Recipe) -> None:
    """Every prompt file is what its manifest says, made from inputs that are still there and lead to a pin."""
    folder = recipe.cache_dir / "prompts"
    with report.link("prompts", folder):
        names = (*HELD_OUT, *TRAIN_STEPS)
        found = sorted(path.name for path in folder.glob("*.jsonl"))
        report.check(folder, "prompt files", sorted(f"{name}.jsonl" for name in names), found)
        text = json.dumps(recipe.document())
        pinned = {*re.findall(r"\b[0-9a-f]{64}\b", text)}
        for name in names:
            _check_manifest(report, recipe, name, pinned)
        reserved, path = read_json(reserved_path(recipe)), reserved_path(recipe)
        for split in HELD_OUT:
            manifest = read_json(manifest_path(recipe, split))
            report.check(path, f"sha256 of {split}", manifest["output"]["sha256"], reserved["sha256"][split])
            report.check(path, f"key of {split}", manifest["key"], reserved["keys"][split])


def _check_manifest(report: Report, recipe: Recipe, name: str, pinned: set[str]) -> None:
    path = manifest_path(recipe, name)
    manifest, cache = read_json(path), recipe.cache_dir.parent
    made = {key: value for key, value in manifest.items() if key not in ("key", "output", "counts", "counters")}
    report.check(path, "key is not the hash of what it stands for", sha256_json(made), manifest["key"])
    report.check(path, "recipe and step", [recipe.name, TRAIN_STEPS.get(name, "prepare_selection")],
                 [manifest["recipe"], manifest["step"]])  # fmt: skip
    report.file(prompts_path(recipe, name), manifest["output"]["sha256"], path.name)
    counters, rows = manifest["counters"], manifest["output"]["rows"]
    report.check(path, "rows in are not rows out and drops", counters["rows_in"],
                 counters["rows_out"] + sum(counters["dropped"].values()))  # fmt: skip
    report.check(path, "rows by category", rows, sum(manifest["counts"]["category"].values()))
    _check_parameters(report, recipe, path, manifest)

    own = f"{recipe.name}/"
    tokenizer = {f"{own}models/teacher/{file}" for file in TOKENIZER_FILES}
    prompts = {f"{own}prompts/{file.name}" for file in (recipe.cache_dir / "prompts").iterdir()}
    corpora = {file.path.relative_to(cache).as_posix() for file in wanted_files(recipe, recipe.corpora)}
    needed = [f"{own}prompts/{reserved_path(recipe).name}"] if name in TRAIN_STEPS else []
    needed += [f"{own}prompts/{step}.jsonl" for step in earlier(name)]
    report.check(path, "inputs that it must have had", [], sorted(set(needed) - set(manifest["inputs"])))
    for file, sha256 in manifest["inputs"].items():
        report.file(cache / file, sha256, path.name)
        if file not in tokenizer | prompts | corpora and sha256 not in pinned:
            report.fault(path, f"no pin of the recipe leads to its input {file}", "a declared file", sha256)
    changed = [file for file, sha256 in manifest["code"].items()
               if not (ROOT / file).is_file() or report.sha256(ROOT / file) != sha256]  # fmt: skip
    if changed:
        report.note(f"{path.name} was made by other code than lies here: {', '.join(changed)}")


def earlier(name: str) -> list[str]:
    """The train files whose prompts a train step had to leave out."""
    return list(TRAIN_STEPS)[: list(TRAIN_STEPS).index(name)] if name in TRAIN_STEPS else []


def _check_parameters(report: Report, recipe: Recipe, path: Path, manifest: Mapping[str, Any]) -> None:
    document, step, given = recipe.document(), manifest["step"], manifest["parameters"]
    role = path.name.removesuffix(".manifest.json")
    declared = {
        "corpora": [one for one in document["corpora"] if one["role"] == role],
        "synthetic": [one for one in document["synthetic"] if one["step"] == step],
        **{key: document[key] for key in ("caps", "history", "splits", "focused")},
    }
    for key, value in declared.items():
        # a step that reads all corpora keeps one hash over them; its inputs are held against the pins all the same
        if key in given and not isinstance(given[key], str):
            report.check(path, f"{key} is not what the recipe declares", value, given[key])
    report.check(path, "thinking is not what the recipe declares", document["chat"]["thinking"], given["thinking"])


# ---------------------------------------------------------------------------- corpora


def check_corpora(report: Report, recipe: Recipe) -> None:
    """Every corpus file is a train file with a pinned or locked hash, and is that file; every row names its source."""
    with report.link("corpora", "architecture.json"):
        for corpus in recipe.corpora:
            for name in corpus.files:
                report.check(f"{corpus.repo}/{name}", "names a held-out split", None, held_out_token(name))
        for file in wanted_files(recipe, recipe.corpora):
            report.check(file.path, f"{file.repo}@{file.revision}/{file.name}", None, fault_of(file))
        wheels = {f"{wheel.package}=={wheel.version}": wheel_path(recipe, wheel)
                  for wheel in (recipe.texts.wheels if recipe.texts else ())}  # fmt: skip
        declared = {"synthetic", *wheels, *(corpus.repo for corpus in recipe.corpora)}
        # what a task may show of a text: all of it, or a function without or with nothing but its docstring
        texts = {name: {part for text in read_wheel(path) for part in (text.text, text.bare, text.head) if part}
                 for name, path in wheels.items()}  # fmt: skip
        for name in TRAIN_STEPS:
            path = prompts_path(recipe, name)
            sources = {row["source"] for row in read_prompts(path)}
            report.check(path, "sources that the recipe does not declare", [], sorted(sources - declared))
            for row in read_prompts(path):
                shown = user_text(row["messages"])
                if row["source"] in texts and not any(part in shown for part in texts[row["source"]]):
                    report.fault(path, f"row {row['id'][:12]} holds no text of its wheel", row["source"], "none")


# ---------------------------------------------------------------------------- splits

def near_rows(held_out: Mapping[str, set[int]], rows: Iterable[Mapping]) -> list[tuple[str, str, float]]:
    """(id of a row, id of the nearest held-out row, similarity) of every row that is near to one. Exact.

    `held_out` is {id: hashed word n-grams}, by the rule with which the train steps drop rows (drafter/duplicates.py).
    """
    index, ids = NearIndex(), list(held_out)
    for grams in held_out.values():
        index.add(grams)
    near = []
    for row in rows:
        other, similarity = index.nearest(ngrams(user_text(row["messages"]), NEAR_NGRAM))
        if similarity >= NEAR_JACCARD:
            near.append((row["id"], ids[other], round(similarity, 3)))
    return near


def check_splits(report: Report, recipe: Recipe) -> None:
    """Ids are the hashes of their texts, stand once, and no train row is equal or near to a held-out one (of final rows
    the n-grams are in reserved.json)."""
    with report.link("splits", recipe.cache_dir / "prompts"):
        reserved = read_json(reserved_path(recipe))
        held_out = [row for name in HELD_OUT[:2] for row in read_prompts(prompts_path(recipe, name))]
        for name in HELD_OUT[:2]:
            own = [row["id"] for row in held_out if row["split"] == name]
            report.check(prompts_path(recipe, name), "ids are not those of reserved.json", reserved["ids"][name], own)
        where = {row_id: split for split, ids in reserved["ids"].items() for row_id in ids}
        total = sum(map(len, reserved["ids"].values()))
        report.check(reserved_path(recipe), "ids that stand in two splits", 0, total - len(where))
        keys, own = set(reserved["duplicate_keys"]), {duplicate_key(row["messages"]).hex() for row in held_out}
        report.check(reserved_path(recipe), "duplicate_keys of held-out rows that it lacks", [], sorted(own - keys)[:3])
        grams = {row_id: unpack_hashes(packed) for split in HELD_OUT
                 for row_id, packed in zip(reserved["ids"][split], reserved["ngrams"][split], strict=True)}  # fmt: skip
        for row in held_out:
            path = prompts_path(recipe, row["split"])
            report.check(path, "id is not the hash of the text", prompt_id(row["messages"]), row["id"])
            same = grams.get(row["id"]) == ngrams(user_text(row["messages"]), NEAR_NGRAM)
            report.check(reserved_path(recipe), f"n-grams of row {row['id'][:12]} are those of its text", True, same)
        for name in TRAIN_STEPS:
            path = prompts_path(recipe, name)
            for row in read_prompts(path):
                report.check(path, "id is not the hash of the text", prompt_id(row["messages"]), row["id"])
                report.check(path, f"row {row['id'][:12]} is of another split", "train", row["split"])
                report.check(path, f"row {row['id'][:12]} stands there too", None, where.get(row["id"]))
                where[row["id"]] = path.name
                if duplicate_key(row["messages"]).hex() in keys:
                    report.fault(path, "a held-out prompt but for case and white space", "none", row["id"])
                family = row["family"]
                if family in reserved["skeletons"] or family.partition("/")[0] in reserved["families"]:
                    report.fault(path, f"row {row['id'][:12]} is of a reserved skeleton", "none", family)
            for row_id, other, similarity in near_rows(grams, read_prompts(path)):
                report.fault(path, f"row {row_id[:12]} is near to the held-out row {other[:12]}",
                             f"Jaccard < {NEAR_JACCARD}", similarity)  # fmt: skip
        report.figures["held_out_rows"], report.figures["train_rows"] = total, len(where) - total


# ---------------------------------------------------------------------------- calibration and evidence


def check_calibration(report: Report, recipe: Recipe, run_dir: Path, run: RunDocument) -> None:
    """Moments that weighted a scale search were measured on rows of train shards and on the phase's own weights."""
    with report.link("calibration", run_dir):
        for path in sorted(run_dir.glob(f"*/{MOMENTS}")):
            with safe_open(path, "pt") as file:
                metadata = json.loads((file.metadata() or {}).get("moments", "{}"))
            entry = run.finished(path.parent.name) or {}
            report.check(path, "checkpoint_sha256", entry.get("checkpoint_sha256"), metadata.get("checkpoint_sha256"))
            rows = [row.id for row in train_rows(recipe, int(metadata.get("rows", 0)))]
            report.check(path, f"rows_sha256 of {len(rows)} train rows", sha256_json(rows), metadata.get("rows_sha256"))


def check_final(report: Report, recipe: Recipe, folder: Path | None, archive_id: str | None) -> None:
    """The final prompts were opened by validate alone: at most one record for an archive, and none without a record."""
    path = prompts_path(recipe, "final")
    with report.link("final", path):
        final = report.sha256(path)
        teacher = recipe.cache_dir / "teacher"
        report.check(teacher, "shards of final", [], [one.name for one in shard_paths(teacher, "final")])
        records = []
        for one in sorted((folder / "evidence").glob("validation*.json")) if folder else []:
            records.append((one, read_json(one)))
        own = [(one, record) for one, record in records if record.get("archive_id") == archive_id]
        names = [relative(one) for one, _ in own]
        report.check(folder or path, "the final check of this archive ran more than once", names[:1], names)
        current = folder and folder / "evidence" / "validation.json"
        for one, record in records:
            if one == current:
                report.check(one, "archive_id is not this archive's", archive_id, record.get("archive_id"))
            missing = {"archive_id", "final_sha256", "command", "opened", "run", "result"} - set(record)
            report.check(one, "fields that a record lacks", [], sorted(missing))
        answers = [one for one in sorted((recipe.cache_dir / "answers").glob("*.parquet"))
                   if read_metadata(one).get("file_sha256") == final]  # fmt: skip
        if folder and answers and not any(record.get("final_sha256") == final for _, record in records):
            report.fault(answers[0], "the final prompts were answered, and no record says so", "a record", "none")
        report.figures["final_checks"] = len(own)
        report.figures["final_sha256"] = final
        if own and own[0][1].get("final_sha256") != final:
            report.note(f"{relative(own[0][0])} is of another final file than {path.name}")
