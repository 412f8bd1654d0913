"""Every step of a recipe in one process: models, prompts, teacher, six phases, archive, evaluation, a draft, an audit.

    python -m scripts.quickstart --recipe smollm2-quick            # what scripts/quickstart.sh runs
    python -m scripts.quickstart --recipe smollm2-quick --record   # and keep the table in data/results/ and README

One process, because importing torch and opening a model costs seconds each time. Every step knows whether its
work is done: a second run skips what is finished. Ends with the table of stages and one JSON line.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from drafter import results
from drafter.acceptance import leading_matches
from drafter.chat import Chat
from drafter.console import run_command
from drafter.corpus import read_prompts
from drafter.memory import give_back, peak_bytes
from drafter.provenance import ROOT, read_json, relative, sha256_file, sha256_json, write_json
from drafter.recipe import PHASES, Recipe, RunDocument, load_recipe, recipe_names
from drafter.teacher_data import read_shards, shard_paths
from scripts import (
    audit,
    download_models,
    draft_client,
    extend_data,
    generate_teacher,
    make_extra_prompts,
    make_focused,
    pack_model,
    prepare_addon,
    prepare_data,
    prepare_selection,
    prune_layers,
)

PROMPT_STEPS = (prepare_selection, prepare_data, prepare_addon, extend_data, make_extra_prompts, make_focused)
SERVER_START_S = 120


def model_dir() -> Path:
    return Path(os.environ.get("MODEL_DIR", ROOT / "model"))


class Clock:
    """Prints a heading for each step and keeps what it cost: seconds, and the memory of this process at most."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int | None] = {}
        self.started_s = time.perf_counter()

    @contextlib.contextmanager
    def step(self, name: str):
        print(f"\n== {name} ({time.perf_counter() - self.started_s:.0f} s)", flush=True)
        began_s = time.perf_counter()
        peak_bytes(start_again=True)
        yield
        self.seconds[name] = round(time.perf_counter() - began_s, 1)
        self.peak_bytes[name] = peak_bytes()
        give_back()


# ---------------------------------------------------------------------------- steps


def make_prompts(recipe: Recipe) -> None:
    """Run the prompt scripts in order; what each would print as its JSON line becomes one short line."""
    for script in PROMPT_STEPS:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = script.main(["--recipe", recipe.name])
        if status:
            raise ValueError(f"{script.__name__} failed")
        report = json.loads(said.getvalue().strip().splitlines()[-1])
        files = report.get("files", [report])
        print("  " + ", ".join(f"{file['file']} {file['rows']} rows" for file in files))


def train_missing(recipe: Recipe) -> None:
    from train import train

    if not train(recipe, "all", resume=True):
        print("  every phase is in phase_log")


def pack_missing(recipe: Recipe) -> tuple[Path, Path]:
    """The served archive and, for the table, polish packed plainly; each only when it is not there already."""
    adapter = RunDocument.open(recipe).finished("adapter")
    target, plain = model_dir(), recipe.run_dir / "packed_polish"
    if not (target / "manifest.json").exists() or packed_checkpoint(target) != adapter["checkpoint_sha256"]:
        report = pack_model.pack_final(recipe, target)
        print(f"  {relative(target)}: {report['size_bytes'] / 1e6:.1f} MB, "
              f"{report['bits_per_weight_linear']} bits a weight in the linear layers")  # fmt: skip
    if not (plain / "manifest.json").exists():
        pack_model.pack_phase(recipe, "polish", plain)
    return target, plain


def packed_checkpoint(folder: Path) -> str | None:
    """sha256 of the adapter checkpoint that an archive was packed from, as its own phase_log says."""
    log = read_json(folder / "architecture.json")["phase_log"]
    return next((entry["checkpoint_sha256"] for entry in log if entry["phase"] == "adapter"), None)


def evaluate_stages(recipe: Recipe, packed: Path, plain: Path) -> dict:
    """The table of stages on development rows, kept in runs/RECIPE/stages.json under a key of all that went in."""
    from scripts import evaluate

    log = RunDocument.open(recipe).phase_log
    key = sha256_json({
        "checkpoints": {entry["phase"]: entry["checkpoint_sha256"] for entry in log},
        "archives": [read_json(folder / "manifest.json")["archive_id"] for folder in (packed, plain)],
        "rows": [sha256_file(path) for path in shard_paths(recipe.cache_dir / "teacher", "development")],
    })  # fmt: skip
    path = recipe.run_dir / "stages.json"
    if path.exists() and read_json(path).get("key") == key:
        return read_json(path)["document"]
    run = recipe.run_dir
    texts = ["prompt_lookup", "untrained", *(str(run / phase) for phase in PHASES[:4])]
    texts += [f"packed_ptq={plain}", f"packed_qat={run / 'base'}", f"packed={packed}"]
    targets = [evaluate.parse_target(text, recipe) for text in texts]
    rows = evaluate.split_rows(recipe, "development")
    records = evaluate.evaluate_targets(targets, rows, recipe, families=evaluate.train_families(recipe))
    name = "quickstart" if recipe.name == "smollm2-quick" else f"stages-{recipe.name}"
    document = results.build(name, records, ["bash", "scripts/quickstart.sh", recipe.name])
    write_json(path, {"key": key, "document": document})
    return document


def serve_once(recipe: Recipe, packed: Path) -> dict:
    """Start serve.sh, send one real request made from text, stop it: drafted text beside the teacher's own."""
    rows = read_shards(shard_paths(recipe.cache_dir / "teacher", "development"))
    row = next((row for row in rows if row.category == "chat" and len(row.continuation_ids) > 16), rows[0])
    prompts = read_prompts(recipe.cache_dir / "prompts" / "development.jsonl")
    messages = next(prompt["messages"] for prompt in prompts if prompt["id"] == row.id)
    settings = {"thinking": recipe.chat.thinking, "stop_ids": recipe.base.stop_ids, "num_ids": recipe.base.num_ids}
    chat = Chat.load(packed, **settings)
    tokens = chat.render(messages)
    assert tokens == row.prompt_ids, "the archive's own tokenizer renders what the teacher saw"
    command = ["bash", str(ROOT / "serve.sh"), "--port", "0"]
    environment = {**os.environ, "MODEL_DIR": str(packed), "VENV": sys.prefix}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(SERVER_START_S, process.kill)  # ends the reading below when nothing comes
    watchdog.start()
    try:
        began_s = time.perf_counter()
        url = next((line.split()[1] for line in process.stdout if line.startswith("ready: ")), None)
        if url is None:
            raise ValueError("serve.sh ended before the model was ready; its own message stands above")
        ready_s = time.perf_counter() - began_s
        answer = draft_client.ask(f"{url}/draft", {"tokens": tokens})
        again = draft_client.ask(f"{url}/draft", {"tokens": tokens})
        assert again["draft"] == answer["draft"], "a draft is a function of weights and tokens alone"
        server_peak_bytes = peak_bytes(pid=process.pid)
    finally:
        process.terminate()
        process.wait()
        watchdog.cancel()
    target = row.continuation_ids[: len(answer["draft"])]
    accepted = leading_matches(answer["draft"], target)
    print(f"  prompt   {messages[-1]['content']!r}")
    print(f"  teacher  {chat.decode(target)!r}")
    print(f"  draft    {chat.decode(answer['draft'])!r}  ({accepted} of {len(target)} accepted)")
    return {
        "ready_s": round(ready_s, 1), "accepted": accepted, "drafted": len(target), "timings": again["timings"],
        "peak_memory_bytes": server_peak_bytes,
    }  # fmt: skip


def audit_made(packed: Path) -> None:
    """Walks the archive back to the pins; ValueError when a link is broken."""
    report, run_dir = audit.audit(packed)
    audit.keep(report, packed, run_dir)
    if report.faults:
        raise ValueError(f"the audit found {len(report.faults)} faults; the first: {report.faults[0].text()}")


# ---------------------------------------------------------------------------- the whole


def quickstart(recipe: Recipe, record: bool) -> dict:
    clock = Clock()
    with clock.step("models"):
        report = download_models.fetch_models(recipe)
        print(f"  teacher {report['teacher']['size_bytes'] / 1e6:.0f} MB")
    with clock.step("prompts"):
        make_prompts(recipe)
    with clock.step("student"):
        print(f"  layers kept: {prune_layers.prune(recipe)['keep']}")
    with clock.step("teacher"):
        teacher = generate_teacher.generate(recipe)
        print(
            f"  {teacher['made']} of {teacher['rows']} rows answered now, {teacher['tokens_per_s'] or 0:.0f} tokens/s"
        )
    with clock.step("train"):
        train_missing(recipe)
    with clock.step("pack"):
        packed, plain = pack_missing(recipe)
    with clock.step("evaluate"):
        document = evaluate_stages(recipe, packed, plain)
    with clock.step("serve"):
        served = serve_once(recipe, packed)
    with clock.step("audit"):
        audit_made(packed)
    clock.peak_bytes["serve"] = served["peak_memory_bytes"]  # the server's, a process of its own
    peak = max(peak for peak in clock.peak_bytes.values() if peak)
    summary = {
        "elapsed_s": round(time.perf_counter() - clock.started_s, 1), "seconds": clock.seconds,
        "peak_memory_bytes": peak, "served": served,
    }  # fmt: skip
    print(f"\n{results.markdown_table(document['rows'])}\n")
    print(f"{summary['elapsed_s']:.0f} s in all, peak memory {peak / 1e9:.2f} GB. Serve it: bash serve.sh")
    if record:
        print(f"recorded in {relative(results.record(document))}")
        costs = [
            {"step": step, "seconds": spent, "peak_memory_bytes": clock.peak_bytes[step]}
            for step, spent in clock.seconds.items()
        ]
        costs.append({"step": "all", "seconds": summary["elapsed_s"], "peak_memory_bytes": peak})
        results.record(results.build("quickstart-cost", costs, ["bash", "scripts/quickstart.sh", recipe.name]))
    return {"step": "quickstart", "recipe": recipe.name, **summary, "rows": document["rows"]}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smollm2-quick", choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument("--record", action="store_true", help="keep the table in data/results/ and refresh the README")
    arguments = parser.parse_args(argv)
    return run_command(lambda: print(json.dumps(quickstart(load_recipe(arguments.recipe), arguments.record))))


if __name__ == "__main__":
    raise SystemExit(main())
