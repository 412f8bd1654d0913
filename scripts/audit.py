"""Where did this drafter come from? Walks the hashes from packed weights back to the pins and fails on any gap.

    python -m scripts.audit model                  # an archive, its run, shards, prompts and files
    python -m scripts.audit runs/smollm2-quick     # the same from a run: its phases, and the archives in its folder
    python -m scripts.audit --source               # our own code and git history
    python -m scripts.audit model --dry-run        # the links that would be walked

Exit status 1 when a link is broken; each fault names link, file, expected and actual value. Needs what the recipe's
steps left below runs/ and data/cache/: what is missing is a gap too. Reads every file and every row, runs no model;
memory is that of the archive, one tensor and one pool's prompts. Writes audit.json into the run's folder. Final prompts
are hashed and never read. No network.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafter.console import run_command
from drafter.provenance import relative, run_record, write_json
from drafter.recipe import RunDocument
from scripts._audit_data import (
    check_calibration,
    check_corpora,
    check_final,
    check_prompts,
    check_rows,
    check_shards,
    check_splits,
)
from scripts._audit_report import Report
from scripts._audit_source import check_final_openers, check_history, check_readme, check_source
from scripts._audit_weights import (
    check_archive,
    check_lineage,
    check_models,
    check_not_teacher,
    check_packed,
    check_recipe,
    check_student,
)

LINKS = {
    "archive": "every byte is the one that the manifest names",
    "private": "no address, e-mail, token or local path in what people can read",
    "recipe": "as architecture.json declares it; base on the allow-list; licences given and listed",
    "packed": "the archive's log is the run's; its codes are those of the checkpoint that it names",
    "adapter": "the trained tensors, beside the base that they were trained beside",
    "not the teacher": "not all linear layers are the teacher's own",
    "phases": "each phase began with what the one before it left, and that is still there",
    "student": "the declared base without the layers that were taken out, tensor by tensor",
    "teacher": "source and revision as declared, every file as pinned or recorded",
    "base": "the same",
    "shards": "each phase trained on the shards of its mix, made by this teacher with these settings",
    "rows": "one answer a prompt, rendered as the template does, of existing ids",
    "prompts": "each file as its manifest says, from inputs that lead to a pin",
    "corpora": "train files only, pinned or locked; no source that the recipe does not declare",
    "splits": "no train row equal or near to a held-out one; ids are hashes of the texts",
    "calibration": "activation moments were measured on train rows and this checkpoint",
    "final": "opened once at most for this archive, and never without a record",
    "who opens final": "scripts/validate.py alone",
    "README": "every table is what its file in data/results/ holds",
    "source": "no loader, data set or split that no recipe declares; no credential",
    "history": "nor in any line that a commit added",
}
OF_SOURCE = ("source", "history", "who opens final", "README")

# ---------------------------------------------------------------------------- the walk


def audit(target: Path, run_dir: Path | None = None) -> tuple[Report, Path]:
    """Walks every link of an archive (a folder with manifest.json) or of a run -> (report, the run's folder).

    ValueError when `target` is neither.
    """
    is_archive = (target / "manifest.json").exists()
    if not (target / "architecture.json").exists():
        raise ValueError(f"{relative(target)} is neither an archive nor a run: it holds no architecture.json")
    report = Report()
    made = None
    with report.link("recipe", target / "architecture.json"):
        made = RunDocument.read(target / "architecture.json")
    if made is None:
        return report, run_dir or target  # without a recipe there is nothing to hold anything against
    run_dir = run_dir or (made.recipe.run_dir if is_archive else target)
    run = None
    with report.link("phases", run_dir / "architecture.json"):
        run = RunDocument.read(run_dir / "architecture.json")
    check_recipe(report, run or made)
    folders = [target] if is_archive else sorted(path.parent for path in run_dir.glob("*/manifest.json"))
    archive_id = None
    for folder in folders:
        archive = check_archive(report, folder)
        if archive is None:
            continue
        archive_id = archive.archive_id
        report.figures[f"archive_id of {relative(folder)}"] = archive_id
        check_packed(report, archive, run_dir, run.phase_log if run else [])
        check_not_teacher(report, archive, made.recipe.cache_dir / "models" / "teacher")
        del archive  # its tensors
    if run is not None:
        check_run(report, run, run_dir)
    check_final(report, made.recipe, target if is_archive else None, archive_id)
    check_final_openers(report)
    check_readme(report)
    return report, run_dir


def check_run(report: Report, run: RunDocument, run_dir: Path) -> None:
    recipe = run.recipe
    check_lineage(report, run_dir, run)
    check_student(report, recipe, run_dir, run)
    check_models(report, recipe)
    check_shards(report, recipe, run)
    check_rows(report, recipe)
    check_prompts(report, recipe)
    check_corpora(report, recipe)
    check_splits(report, recipe)
    check_calibration(report, recipe, run_dir, run)


def audit_source() -> Report:
    report = Report()
    check_source(report)
    check_history(report)
    check_final_openers(report)
    check_readme(report)
    return report


# ---------------------------------------------------------------------------- what people read


def print_report(report: Report) -> None:
    failed = {fault.link for fault in report.faults}
    totals: dict[str, int] = {}
    for name in report.links:
        totals[name] = report.checked[name] if name not in totals else max(totals[name], report.checked[name])
    for name, count in totals.items():
        print(f"  {'BROKEN' if name in failed else 'whole':<7} {name:<34} {count:>9,} checks")
    for note in report.notes:
        print(f"  note: {note}")
    for fault in report.faults[:40]:
        print(f"  {fault.text()}")
    if len(report.faults) > 40:
        print(f"  ... and {len(report.faults) - 40} more, in audit.json")
    print("  clean: every link is whole" if not report.faults else f"  {len(report.faults)} faults")


def keep(report: Report, target: Path, folder: Path, command: Sequence[str] | None = None) -> None:
    """Prints the report and writes audit.json into the run's folder, where there is one."""
    print_report(report)
    if folder.is_dir():
        document = {"target": relative(target), "run": run_record(command), **report.document()}
        write_json(folder / "audit.json", document)
        print(f"  kept in {relative(folder / 'audit.json')}")


def print_links(source_alone: bool) -> list[str]:
    names = [name for name in LINKS if not source_alone or name in OF_SOURCE]
    for name in names:
        print(f"  {name:<16} {LINKS[name]}")
    return names


# ---------------------------------------------------------------------------- command line


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document of the last line; the exit status is in it, as `ok`."""
    if args.dry_run:
        target = relative(args.target) if args.target else None
        return {"step": "audit", "dry_run": True, "target": target, "links": print_links(args.target is None)}
    report, folder = (audit_source(), None) if args.target is None else audit(args.target, args.run)
    if args.source and args.target is not None:
        check_source(report)
        check_history(report)
    if folder is None:
        print_report(report)
    else:
        keep(report, args.target, folder, args.command)
    document = report.document()
    brief = {"ok": document["ok"], "links": len(document["links"]), "faults": document["faults"][:5]}
    return {"step": "audit", "target": relative(args.target) if args.target else None, **brief}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", type=Path, nargs="?", metavar="MODEL_DIR|RUN_DIR", help="an archive, or runs/RECIPE")
    add("--run", type=Path, metavar="DIR", help="the run that made the archive (default: runs/RECIPE)")
    add("--source", action="store_true", help="scan our own code and git history; alone, or with a target")
    add("--dry-run", action="store_true", help="list the links; reads and writes nothing")
    args = parser.parse_args(argv)
    if args.target is None and not args.source:
        parser.error("name an archive or a run, or --source")
    args.command = ["python", "-m", "scripts.audit", *(sys.argv[1:] if argv is None else argv)]
    found: dict[str, Any] = {}

    def body() -> None:
        found.update(run(args))
        print(json.dumps(found, ensure_ascii=False))

    return run_command(body) or int(not found.get("ok", True))


if __name__ == "__main__":
    raise SystemExit(main())
