"""The one final check of a frozen archive, on prompts that nothing else has opened.

    python -m scripts.validate --recipe smollm2-quick --model model
    python -m scripts.validate --recipe smollm2-quick --model model --final my_final.jsonl

Verifies and loads the archive, holds it against the recipe, has the teacher answer the `final` prompts (by default
data/cache/RECIPE/prompts/final.jsonl), scores the packed model. A number that is looked at twice becomes a number that
is chosen: so MODEL/evidence/validation.json is written first (that the file was opened, then the result), and only then
is the result printed. A second run on the same archive is refused; one that was cut off before its result may be
finished.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafter.answers import answered_file
from drafter.archive import FORMAT
from drafter.console import run_command
from drafter.provenance import command_line, read_json, relative, run_record, sha256_file, utc_now, write_json
from drafter.recipe import Recipe, load_recipe
from model_io import load_model
from scripts.download_models import is_complete
from scripts.evaluate import Target, evaluate_targets, print_tables, train_families
from scripts.pack_model import generation_settings

# ---------------------------------------------------------------------------- evidence


def open_evidence(folder: Path, archive_id: str, final_sha256: str, run: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Writes that the final file is being opened for this archive -> (path, record), before anyone reads the file.

    Evidence of another archive that stood here before is kept under its own name. Raises ValueError, naming the
    evidence file, when this archive has its result, or was begun with another file.
    """
    path = folder / "evidence" / "validation.json"
    for other in sorted(path.parent.glob("validation*.json")):
        found = read_json(other)
        if found.get("archive_id") != archive_id:
            continue
        if found.get("result") is not None:
            raise ValueError(
                f"archive {archive_id[:12]} was validated on {found.get('opened')}: see {relative(other)}. The final "
                "prompts may be used once per archive; for other numbers use scripts.evaluate on development rows"
            )
        if found.get("final_sha256") != final_sha256:
            raise ValueError(
                f"{relative(other)} says that archive {archive_id[:12]} was already shown another final file "
                f"(sha256 {str(found.get('final_sha256'))[:12]}, now {final_sha256[:12]}): finish with that one"
            )
    if path.exists() and (before := str(read_json(path).get("archive_id"))) != archive_id:
        path.rename(path.with_name(f"validation-{before[:16]}.json"))
    record = {
        "archive_id": archive_id,
        "final_sha256": final_sha256,
        "command": run["command"],
        "opened": utc_now(),
        "run": run,
        "result": None,
    }
    write_json(path, record)
    return path, record


# ---------------------------------------------------------------------------- the check


def check_archive(recipe: Recipe, folder: Path) -> str:
    """archive_id of a model that loads and was made with this recipe; ValueError says what differs."""
    loaded = load_model(folder)  # verified, and built once: what can fail in loading fails here
    packed = {"recipe": loaded.info["recipe"], **loaded.generation}
    declared = {"recipe": recipe.name, "format": FORMAT, **generation_settings(recipe)}
    if packed != declared:
        differ = [f"{key}: {packed.get(key)!r} in the archive, {value!r} in the recipe"
                  for key, value in declared.items() if packed.get(key) != value]  # fmt: skip
        raise ValueError(
            f"{relative(folder)} was not made with recipe {recipe.name} as it is now ({'; '.join(differ)}): name the "
            f"recipe that it was made with, or pack it anew: python -m scripts.pack_model --recipe {recipe.name}"
        )
    return loaded.archive_id


def validate(recipe: Recipe, folder: Path, final: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Opens, answers, scores, writes -> the evidence record. ArchiveError or ValueError before the file is opened."""
    if not final.exists():
        raise ValueError(
            f"no final prompts at {relative(final)}: `python -m scripts.prepare_selection --recipe {recipe.name}` "
            "makes them, or name your own with --final"
        )
    # Everything that can fail without the prompts fails here, while the archive still has its one chance.
    archive_id = check_archive(recipe, folder)
    if not is_complete(recipe.cache_dir / "models" / "teacher", recipe.teacher):
        raise ValueError(
            "the teacher is missing, or its files are not those of the recipe: run "
            f"`python -m scripts.download_models --recipe {recipe.name}` first"
        )
    families = train_families(recipe)
    path, record = open_evidence(folder, archive_id, sha256_file(final), run_record(argv))
    rows = answered_file(final, recipe)
    [stage] = evaluate_targets([Target("packed", "packed", folder)], rows, recipe, families=families)
    record["result"] = {"finished": utc_now(), **stage}
    write_json(path, record)
    return record


def run(args: argparse.Namespace, command: Sequence[str]) -> None:
    recipe = load_recipe(args.recipe)
    final = args.final or recipe.cache_dir / "prompts" / "final.jsonl"
    if args.dry_run:
        missing = [] if final.exists() else [f"no {relative(final)}: prepare_selection makes it"]
        archive_id = check_archive(recipe, args.model) if args.model.exists() else None
        if archive_id is None:
            missing.append(f"no archive in {relative(args.model)}: pack_model makes it")
        rows = recipe.splits.final
        tokens = rows * recipe.generation.max_new_tokens
        each = recipe.generation.max_new_tokens
        print(f"{rows:,} final prompts x at most {each} ids = {tokens:,} ids of the teacher")
        plan = {"step": "validate", "recipe": recipe.name, "dry_run": True, "archive_id": archive_id,
                "final": relative(final), "rows": rows, "teacher_tokens_at_most": tokens, "missing": missing,
                "command": command_line(command)}  # fmt: skip
        print(json.dumps(plan))
        return
    record = validate(recipe, args.model, final, command)
    print_tables([record["result"]])
    print(f"kept in {relative(args.model / 'evidence' / 'validation.json')}")
    print(json.dumps(record, ensure_ascii=False, allow_nan=False))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recipe", required=True, help="the recipe that the archive was made with, for example smollm2-quick")
    add("--model", type=Path, default=Path("model"), metavar="DIR", help="the packed archive")
    add("--final", type=Path, metavar="FILE", help="prompts (JSONL); default data/cache/RECIPE/prompts/final.jsonl")
    add("--dry-run", action="store_true", help="verify the archive and say what would be opened; opens nothing")
    args = parser.parse_args(argv)
    command = ["python", "-m", "scripts.validate", *(sys.argv[1:] if argv is None else argv)]
    return run_command(lambda: run(args, command))


if __name__ == "__main__":
    raise SystemExit(main())
