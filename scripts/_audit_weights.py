"""The upper half of an audit's walk: archive, packed weights, adapter, phases, student, base and teacher.

What a hash only claims is computed again where that is cheap: the codes of the archive from the checkpoint that it
names, the adapter's bf16 tensors from those that were trained, the student's layers from the base's.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from drafter import quantization as q
from drafter.adapter import Adapter
from drafter.archive import ADAPTER_FILES, Archive, read_archive
from drafter.checkpoint import Checkpoint
from drafter.provenance import ROOT, read_json, relative, sha256_json
from drafter.recipe import PHASES, HubSource, Model, Recipe, RunDocument, WheelSource, load_recipe
from scripts._audit_report import Report
from scripts.download_models import hub_files

# What says where or by whom something was made, and what opens a door.
PRIVATE = {
    "e-mail address": re.compile(r"\b[\w.+-]+@[\w-]+\.[a-z]{2,}\b", re.IGNORECASE),
    "web address": re.compile(r"\b(?:https?|ftp|ssh)://[^\s\"'<>]+", re.IGNORECASE),
    "network address": re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"),
    "local path": re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|mnt|media|var|opt|srv|work|workspace|data|scratch)/\w"
                             r"|\b[A-Z]:\\{1,2}\w|~/\w"),  # JSON doubles a backslash
}  # fmt: skip
SECRETS = {
    "hub token": re.compile(r"\bhf_[A-Za-z0-9]{30,}"),
    "GitHub token": re.compile(r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})"),
    "API key": re.compile(r"\bsk-[A-Za-z0-9_-]{32,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[0-9A-Za-z_-]{35}"),
    "bearer token": re.compile(r"\bBearer [A-Za-z0-9._-]{24,}"),
    "private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "password in an address": re.compile(r"\b[a-z]+://[^\s/:@\"']+:[^\s/@\"'{}<>]{3,}@"),
}
SAMPLE = 64 * q.BLOCK  # elements that are compared first, when a layer is looked for among the teacher's


# ---------------------------------------------------------------------------- archive


def check_archive(report: Report, folder: Path) -> Archive | None:
    """Every byte as packed, and nothing private in what people can read of it -> the archive, or None."""
    archive = None
    with report.link(f"archive {relative(folder)}", folder):
        archive = read_archive(folder)
        report.checked[report.links[-1]] += len(archive.files)
    with report.link("private", folder):
        texts = [path for path in sorted(folder.rglob("*")) if path.suffix in (".json", ".jinja", ".txt", ".log")]
        for path in texts:
            check_private(report, path, _text_of(path))
    return archive


def _text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.name != "tokenizer.json":
        return text
    document = json.loads(text)  # its vocabulary is what the tokenizer learnt, addresses of its corpus among it
    document["model"] = {key: value for key, value in document["model"].items() if key not in ("vocab", "merges")}
    return json.dumps(document, ensure_ascii=False)


def check_private(report: Report, path: Path, text: str) -> None:
    for kind, pattern in {**PRIVATE, **SECRETS}.items():
        found = pattern.search(text)
        # a secret is not repeated in the report
        shown = None if found is None else found.group()[:80] if kind in PRIVATE else "(not shown)"
        report.check(path, f"holds a {kind}", None, shown)


def check_recipe(report: Report, run: RunDocument) -> None:
    """The recipe that it was made with is the one declared here: pins, base, licences."""
    recipe = run.recipe  # reading it has held the base against the allow-list
    with report.link("recipe", "architecture.json"):
        declared, made = load_recipe(recipe.name).document(), recipe.document()
        for key in sorted({*declared, *made}):
            report.check("architecture.json", f"{key} of {recipe.name}", declared.get(key), made.get(key))
        licences = {"teacher": recipe.teacher.licence, "base": recipe.base.licence}
        for part, licence in licences.items():
            report.check("architecture.json", f"licence of the {part} is given", True, _is_licence(licence))
        datasheet = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
        for corpus in recipe.corpora:
            line = next((one for one in datasheet.splitlines() if f"| {corpus.repo} |" in one), "")
            listed = _is_licence(corpus.licence) and corpus.licence in line
            report.check("data/README.md", f"lists {corpus.repo} with its licence {corpus.licence}", True, listed)


def _is_licence(text: str) -> bool:
    return bool(text.strip()) and text.strip().casefold() not in ("unknown", "none", "other", "todo", "?")


# ---------------------------------------------------------------------------- packed weights


def check_packed(report: Report, archive: Archive, run_dir: Path, log: list[dict[str, Any]]) -> None:
    """The archive's log is the run's, and its weights are the codes of the checkpoint that it names."""
    where = relative(archive.path)
    source, phases = archive.quantization["source"], {entry["phase"]: entry for entry in log}
    with report.link(f"packed {where}", archive.path):
        own = archive.architecture["phase_log"]
        report.check(archive.path / "architecture.json", "phase_log is not how the run's begins", log[: len(own)], own)
        entry = phases.get(source["phase"])
        if entry is None:
            raise ValueError(f"quantization.json names the phase {source['phase']!r}, the run's log does not hold it")
        name = archive.path / "quantization.json"
        report.check(name, f"sha256 of {source['phase']}", entry["checkpoint_sha256"], source["checkpoint_sha256"])
        checkpoint = run_dir / source["phase"] / "model.safetensors"
        if report.file(checkpoint, entry["checkpoint_sha256"], "phase_log"):
            _compare_codes(report, archive, checkpoint.parent)
    if archive.adapter is not None:
        with report.link("adapter", archive.path / "adapter.json"):
            _compare_adapter(report, archive, run_dir, phases)


def _compare_codes(report: Report, archive: Archive, folder: Path) -> None:
    weights, tensors = Checkpoint(folder), archive.tensors
    given = folder / "nf4_scales.safetensors"
    scales = load_file(given) if given.exists() else {}
    for name, entry in archive.quantization["tensors"].items():
        if entry["codec"] == "none":
            same = torch.equal(tensors[name], weights[name].to(tensors[name].dtype))
        else:
            quantize = q.nf4_quantize if entry["codec"] == "nf4" else q.int8_quantize
            own = tensors[f"{name}.scales"]
            same = torch.equal(quantize(weights[name], own, name), tensors[f"{name}.codes"])
            if name in scales:
                same = same and torch.equal(scales[name], own)
        report.check(archive.path, f"{name} is packed from {relative(folder)}", True, same)


def _compare_adapter(report: Report, archive: Archive, run_dir: Path, phases: Mapping[str, dict]) -> None:
    entry, folder = phases.get("adapter"), run_dir / "adapter"
    if entry is None:
        raise ValueError("the archive has an adapter, the run's log has no adapter phase")
    documents = {"phase_log": entry["base_sha256"], "adapter.json": archive.adapter_document["base_sha256"]}
    for said_by, base_sha256 in documents.items():
        report.check(archive.path, f"base_sha256 of {said_by}", archive.base_sha256, base_sha256)
    if report.file(folder / "adapter.safetensors", entry["checkpoint_sha256"], "phase_log"):
        trained = Adapter.load(folder)
        for name, tensor in archive.adapter.state_dict().items():
            same = torch.equal(trained.state_dict()[name].to(torch.bfloat16), tensor.to(torch.bfloat16))
            report.check(archive.path / ADAPTER_FILES[0], f"{name} is the trained one", True, same)


def check_not_teacher(report: Report, archive: Archive, teacher: Path) -> None:
    """Not every linear layer is a quantized copy of one of the teacher's, wherever it stood there.

    Compared are codes under the archive's own scales: a copy has the same, a weight that training moved has not. The
    first 4,096 elements of a tensor leave few candidates, which are compared whole.
    """
    with report.link("not the teacher", archive.path):
        linear = {n: e["shape"] for n, e in archive.quantization["tensors"].items() if e["codec"] == "nf4"}
        found, checkpoint = set(), Checkpoint(teacher)
        for name in checkpoint:
            alike = [
                one for one, shape in linear.items() if tuple(shape) == checkpoint.shape(name) and one not in found
            ]
            if not alike:
                continue
            weight = checkpoint[name].flatten()
            for one in alike:
                scales, codes = archive.tensors[f"{one}.scales"], archive.tensors[f"{one}.codes"]
                size = min(SAMPLE, weight.numel())
                start = q.nf4_quantize(weight[:size], scales[: q.block_count((size,))], one)
                if torch.equal(start, codes[: len(start)]) and torch.equal(q.nf4_quantize(weight, scales, one), codes):
                    found.add(one)
        report.checked[report.links[-1]] += len(linear)
        report.figures["layers_of_the_teacher"] = f"{len(found)} of {len(linear)}"
        if linear and len(found) == len(linear):
            report.fault(archive.path, f"all {len(linear)} linear layers are the teacher's own tensors")


# ---------------------------------------------------------------------------- phases


def checkpoint_file(run_dir: Path, phase: str) -> Path:
    return run_dir / phase / ("adapter.safetensors" if phase == "adapter" else "model.safetensors")


def check_lineage(report: Report, run_dir: Path, run: RunDocument) -> None:
    """Each phase began with the weights that the one before it left, and its folder still holds what it left."""
    log_file = run_dir / "architecture.json"
    with report.link("phases", log_file):
        names = [entry["phase"] for entry in run.phase_log]
        report.check(log_file, "phases in order", ["student", *PHASES][: len(names)], names)
        for before, after in zip(run.phase_log, run.phase_log[1:], strict=False):
            problem = f"parent_sha256 of {after['phase']} is not what {before['phase']} left"
            report.check(log_file, problem, before["checkpoint_sha256"], after["parent_sha256"])
        for entry in run.phase_log:
            path = checkpoint_file(run_dir, entry["phase"])
            report.file(path, entry["checkpoint_sha256"], "phase_log")
            if entry["phase"] == "qat":
                report.file(path.with_name("nf4_scales.safetensors"), entry["scales_sha256"], "phase_log")
    with report.link("private"):
        check_private(report, log_file, log_file.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------- student, base, teacher


def check_models(report: Report, recipe: Recipe) -> None:
    """Teacher and base are what the recipe pins: source, revision, every file."""
    for role, model in (("teacher", recipe.teacher), ("base", recipe.base)):
        with report.link(role, recipe.cache_dir / "models" / role):
            _check_model(report, recipe.cache_dir / "models" / role, model)


def _check_model(report: Report, folder: Path, model: Model) -> None:
    record = read_json(folder / "source.json")
    declared = model.source.model_dump(mode="json")
    report.check(folder / "source.json", "source is not the declared one", declared, record["source"])
    for name, sha256 in record["files"].items():
        report.file(folder / name, sha256, "source.json")
    extra = {path.name for path in folder.iterdir() if path.is_file()} - {*record["files"], "source.json"}
    report.check(folder, "files that source.json does not name", [], sorted(extra))
    if isinstance(model.source, HubSource):
        for file in hub_files(model.source, folder):
            if report.check(file.path, "its sha256 is pinned, or in corpora.lock.json", True, file.sha256 is not None):
                report.check(file.path, "pin and source.json", file.sha256, record["files"].get(file.name))
    if isinstance(model.source, WheelSource):
        report.note(
            f"{relative(folder)} was converted from {model.source.member} (sha256 {model.source.member_sha256[:12]}), "
            "which is not kept: what it became is known by source.json"
        )


def check_student(report: Report, recipe: Recipe, run_dir: Path, run: RunDocument) -> None:
    """The student is the declared base without the layers that the log says were taken out: tensor by tensor."""
    with report.link("student", run_dir / "student"):
        entry, base, folder = run.finished("student"), recipe.cache_dir / "models" / "base", run_dir / "student"
        if entry is None:
            raise ValueError("phase_log has no student")
        files = read_json(base / "source.json")["files"]
        shards = {name: sha256 for name, sha256 in files.items() if name.endswith(".safetensors")}
        parent = next(iter(shards.values())) if len(shards) == 1 else sha256_json(shards)
        report.check(run_dir / "architecture.json", "parent_sha256 of student is not the base", parent,
                     entry["parent_sha256"])  # fmt: skip
        prune = read_json(folder / "prune.json")
        expected = {"base_source": recipe.base.source.model_dump(mode="json"), "base_files": shards,
                    "rule": recipe.base.layers.rule, "keep": entry["keep"]}  # fmt: skip
        for key, value in expected.items():
            report.check(folder / "prune.json", key, value, prune.get(key))
        student, whole = Checkpoint(folder), Checkpoint(base)
        for name in student:
            numbered = re.match(r"(model\.layers\.)(\d+)(\..*)", name)
            of_base = name
            if numbered:
                of_base = f"{numbered[1]}{entry['keep'][int(numbered[2])]}{numbered[3]}"
            same = of_base in whole and torch.equal(student[name], whole[of_base].to(student[name].dtype))
            report.check(folder / "model.safetensors", f"{name} is {of_base} of the base", True, same)
