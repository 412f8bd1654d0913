"""From a corpus of the hub to the teacher's answers and a clean audit, in one command: the data half of a recipe.

    python -m scripts.corpus_chain --recipe smollm2-gsm8k                               # from the hub
    python -m scripts.corpus_chain --recipe smollm2-gsm8k --stand-in FILE.parquet --record   # the same without one

Models, corpus files, prompts (each kept or dropped row counted), the student as it is cut, the teacher's answers, audit
of the run. --stand-in serves FILE as the recipe's one corpus file from a small hub on loopback, with an error and a cut
line on the way; all then lies below runs/corpus-chain/, so that a stand-in's hashes are never taken for the hub's.
"""

import argparse
import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drafter import recipe as recipes
from drafter import results
from drafter.console import run_command
from drafter.provenance import ROOT, read_json, relative
from drafter.recipe import TRAIN_POOLS, Recipe, load_recipe, recipe_names
from scripts import audit, download_data, download_models, generate_teacher, prune_layers
from scripts._prompts import manifest_path
from scripts.quickstart import PROMPT_STEPS, Clock

NAMES = ("selection", "development", "final", *TRAIN_POOLS)
CUT_AFTER_BYTES = 300_000


@contextlib.contextmanager
def stand_in(recipe: Recipe, file: Path) -> Iterator[None]:
    """A hub that has `file` as the one corpus file of the recipe; ValueError when the recipe names several."""
    from tests.stub_hub import running_hub

    wanted = [(corpus, name) for corpus in recipe.corpora for name in corpus.files]
    if len(wanted) != 1:
        raise ValueError(f"--stand-in serves one file, the recipe {recipe.name} names {len(wanted)}")
    corpus, name = wanted[0]
    root, lock, before = recipes.ROOT, download_data.LOCK, os.environ.get("HF_ENDPOINT")
    with running_hub() as hub:
        hub.add("dataset", corpus.repo, corpus.revision, {name: file.read_bytes()})
        hub.faults.hub_statuses, hub.faults.cuts = [503], [CUT_AFTER_BYTES]
        os.environ["HF_ENDPOINT"] = hub.url
        recipes.ROOT = ROOT / "runs" / "corpus-chain"
        download_data.LOCK = recipes.ROOT / "corpora.lock.json"
        try:
            yield
        finally:
            recipes.ROOT, download_data.LOCK = root, lock
            os.environ.pop("HF_ENDPOINT")
            if before is not None:
                os.environ["HF_ENDPOINT"] = before


def run_step(main: Any, *flags: str) -> dict[str, Any]:
    """A step's own command line; its last line. ValueError when it ends with an error, which it has printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = main(list(flags))
    if status:
        raise ValueError(f"{main.__module__} failed; its own message stands above")
    return json.loads(said.getvalue().strip().splitlines()[-1])


def prompt_rows(recipe: Recipe) -> list[dict[str, Any]]:
    """One row a prompt file: rows in, out, and dropped by reason, as its manifest counts them."""
    rows = []
    for name in NAMES:
        counters = read_json(manifest_path(recipe, name))["counters"]
        dropped = ", ".join(f"{reason} {count}" for reason, count in sorted(counters["dropped"].items()) if count)
        counted = {key: counters[key] for key in ("rows_in", "rows_out")}
        rows.append({"step": name, **counted, "dropped": dropped})
    return rows


def chain(recipe: Recipe) -> list[dict[str, Any]]:
    """Runs the steps -> rows of corpus_chain.json. ValueError at the first that fails, or for a fault of the audit."""
    clock, flags = Clock(), ("--recipe", recipe.name)
    rows: list[dict[str, Any]] = []

    def add(step: str, **values: Any) -> None:
        seconds = clock.seconds.get(step)
        columns = {"rows_in": None, "rows_out": None, "dropped": "", "tokens": None, "checks": None, "faults": None}
        rate = round(values["rows_out"] / seconds, 1) if seconds and values.get("rows_out") else None
        rows.append({"step": step, **columns, **values, "seconds": seconds, "rows_per_s": rate,
                     "peak_memory_bytes": clock.peak_bytes.get(step)})  # fmt: skip

    with clock.step("download_models"):
        run_step(download_models.main, *flags)
    add("download_models")
    with clock.step("download_data"):
        found = run_step(download_data.main, *flags)
    add("download_data")
    print(f"  {found['files']} files, {found['fetched']} fetched now")
    for script in PROMPT_STEPS:
        with clock.step(name := script.__name__.removeprefix("scripts.")):
            report = run_step(script.main, *flags)
        count = sum(file["rows"] for file in report.get("files", [report]))
        add(name, rows_out=count)
        print(f"  {count} rows")
    with clock.step("prune_layers"):
        run_step(prune_layers.main, *flags)
    add("prune_layers")
    with clock.step("generate_teacher"):
        teacher = generate_teacher.generate(recipe)
    add("generate_teacher", rows_in=teacher["rows"], rows_out=teacher["made"], tokens=teacher["generated_tokens"])
    with clock.step("audit"):
        report, folder = audit.audit(recipe.run_dir)
        audit.keep(report, recipe.run_dir, folder)
    add("audit", checks=sum(report.checked.values()), faults=len(report.faults))
    if report.faults:
        raise ValueError(f"the audit found {len(report.faults)} faults; the first: {report.faults[0].text()}")
    for row in prompt_rows(recipe):
        add(**row)
    return rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    recipe = load_recipe(args.recipe)
    if not recipe.corpora:
        raise ValueError(f"the recipe {recipe.name} names no corpora: smollm2-gsm8k and qwen3-8b do")
    if args.stand_in is not None and not args.stand_in.is_file():
        raise ValueError(f"--stand-in {relative(args.stand_in)}: no such file")
    command = ["python", "-m", "scripts.corpus_chain", "--recipe", recipe.name]
    with stand_in(recipe, args.stand_in) if args.stand_in else contextlib.nullcontext():
        rows = chain(recipe)
    if args.stand_in:
        command += ["--stand-in", args.stand_in.name]
    print(f"\n{results.markdown_table(rows)}\n")
    if args.record:
        print(f"recorded in {relative(results.record(results.build('corpus_chain', rows, command)))}")
    return {"step": "corpus_chain", "recipe": recipe.name, "rows": rows}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recipe", default="smollm2-gsm8k", choices=recipe_names(), help="a recipe of architecture.json with corpora")
    add("--stand-in", type=Path, metavar="FILE", help="serve FILE (Parquet) instead of asking the hub")
    add("--record", action="store_true", help="write data/results/corpus_chain.json and refresh its table")
    args = parser.parse_args(argv)
    return run_command(lambda: print(json.dumps(run(args))))


if __name__ == "__main__":
    raise SystemExit(main())
