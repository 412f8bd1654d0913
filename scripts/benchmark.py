"""How long the project's own steps take on this machine, beside the floor that the machine sets.

    python -m scripts.benchmark load                    # the archive in model/: each stage, whole loads, peak memory
    python -m scripts.benchmark load --qwen3-1.7b runs/benchmark/qwen3-1.7b --record
    python -m scripts.benchmark memory                  # what a server of it holds, beside weights, keys and values
    python -m scripts.benchmark draft                   # a decode step and a prefill of every engine
    python -m scripts.benchmark teacher                 # tokens a second of the decoders that answer prompts

Times are medians of rounds that go through everything in turn, with the least and the most; other work on the machine
shows between the two.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafter import results
from drafter.console import progress_bar, run_command
from drafter.provenance import ROOT, machine, relative, write_json

# ---------------------------------------------------------------------------- shared


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    return {"seconds": statistics.median(seconds), "runs": len(seconds), "min": min(seconds), "max": max(seconds)}


def machine_line() -> str:
    found = machine()
    isa = ", ".join(found["isa"])
    return f"{found['cpu']}, {found['cores']} cores ({isa}), {found['memory_gb']} GB, GPU: {found['gpu'] or 'none'}"


def finish(name: str, rows: list[dict[str, Any]], command: Sequence[str], record: bool) -> dict[str, Any]:
    """The result file of `rows`, written to data/results/ when it is to be recorded, else to runs/benchmark/."""
    document = results.build(name, rows, command)
    if record:
        print(f"recorded in {relative(results.record(document))}")
    else:
        write_json(path := ROOT / "runs" / "benchmark" / f"{name}.json", document)
        print(f"kept in {relative(path)}; --record copies it to data/results/")
    return document


# ---------------------------------------------------------------------------- load


def load_rows(model: str, folder: Path, runs: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows of load.json, what follows from them): stages and loads of one archive."""
    from scripts import _load_benchmark as bench

    stages, loads = bench.single_stages(folder), bench.whole_loads(folder)
    with progress_bar((runs + 1) * len(stages + loads), model, " steps", delay=10) as bar:
        seconds = bench.time_rounds(stages + loads, runs, bar.update)
    memory = {stage.name: bench.memory_of_load(folder, form) for stage, form in zip(loads, bench.LOADS, strict=True)}
    rows = []
    for stage in stages + loads:
        times = summary(seconds[stage.name])
        rate = stage.size_bytes and round(stage.size_bytes / times["seconds"] / 1e6, 1)
        peak = memory[stage.name]["peak_bytes"] if stage.name in memory else None
        times = {key: round(value, 5) for key, value in times.items()}
        rows.append({"model": model, "stage": stage.name, "mb_per_s": rate, "peak_memory_bytes": peak, **times})
    floor = max(rows[: len(stages)], key=lambda row: row["seconds"])
    found: dict[str, Any] = {"model": model, "floor": floor["stage"], "floor_s": floor["seconds"]}
    for row in rows[len(stages) :]:
        key = row["stage"].removeprefix("load ")
        found[f"{key}_to_floor"] = round(row["seconds"] / floor["seconds"], 2)
        found |= {f"{key}_{name}": value for name, value in memory[row["stage"]].items()}
    found["folder_bytes"] = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return rows, found


def print_loads(rows: list[dict[str, Any]], found: dict[str, Any]) -> None:
    print(f"\n{found['model']}, {found['folder_bytes'] / 1e6:,.1f} MB in the folder")
    print(f"{'stage':<28} {'MB/s':>8} {'seconds':>9} {'min':>9} {'max':>9} {'peak MB':>9}")
    for row in rows:
        rate = "" if row["mb_per_s"] is None else f"{row['mb_per_s']:,.0f}"
        peak = "" if row["peak_memory_bytes"] is None else f"{row['peak_memory_bytes'] / 1e6:,.1f}"
        times = " ".join(f"{row[key]:>9.4f}" for key in ("seconds", "min", "max"))
        print(f"{row['stage']:<28} {rate:>8} {times} {peak:>9}")
    print(f"floor, the slowest single stage: {found['floor']}, {found['floor_s']:.3f} s")
    for form in ("verify", "packed", "merged"):
        peak, kept, weights = (found[f"{form}_{name}_bytes"] for name in ("peak", "kept", "model"))
        memory = f"keeps {kept / 1e6:,.1f} MB ({weights / 1e6:,.1f} of weights), had {peak / kept:.2f} x that at most"
        print(f"{form:<6} takes {found[f'{form}_to_floor']} x the floor; {memory if weights else 'keeps no weights'}")


def archives(args: argparse.Namespace) -> list[tuple[str, Path]]:
    """(name, folder) of the archive that is given and of one of Qwen3-1.7B's shape, made where it is missing."""
    from model_io import verify
    from scripts.random_model import QWEN3_1_7B, pack_random_model

    recipe = verify(args.model).architecture["recipe_name"]
    models = [("smollm2-student" if recipe.startswith("smollm2") else recipe, args.model)]
    if args.qwen3:
        if not (args.qwen3 / "manifest.json").exists():
            print(f"packing random weights of Qwen3-1.7B's shape into {relative(args.qwen3)}, some minutes", flush=True)
            pack_random_model(QWEN3_1_7B, args.qwen3, tokenizer_dir=args.tokenizer)
        models.append(("qwen3-1.7b", args.qwen3))
    return models


def run_load(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    print(machine_line())
    rows, found = [], []
    for model, folder in archives(args):
        new_rows, summary_of_model = load_rows(model, folder, args.runs)
        print_loads(new_rows, summary_of_model)
        rows += new_rows
        found.append(summary_of_model)
    return {**finish("load", rows, command, args.record), "models": found}


# ---------------------------------------------------------------------------- draft


def print_drafts(rows: list[dict[str, Any]]) -> None:
    columns = f"{'ms/step':>9} {'min':>8} {'max':>8} {'floor':>8} {'512 ms':>8}"
    print(f"\n{'model':<16} {'engine':<20} {'batch':>5} {columns}")
    for row in rows:
        prefill = "" if row["prefill_ms"] is None else f"{row['prefill_ms']:,.0f}"
        times = " ".join(f"{row[key]:>8.2f}" for key in ("min", "max", "floor_ms_per_step"))
        print(
            f"{row['model']:<16} {row['engine']:<20} {row['batch']:>5} {row['ms_per_step']:>9.2f} {times} {prefill:>8}"
        )


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each model and batch: our step over every other engine's, and the share of the floor that it reaches."""
    found = []
    for ours in (row for row in rows if row["engine"] == "ours"):
        others = [row for row in rows if (row["model"], row["batch"]) == (ours["model"], ours["batch"])]
        others.remove(ours)
        entry = {"model": ours["model"], "batch": ours["batch"]}
        entry["floor_share"] = round(ours["floor_ms_per_step"] / ours["ms_per_step"], 3)
        entry |= {row["engine"]: round(row["ms_per_step"] / ours["ms_per_step"], 2) for row in others}
        if ours["prefill_ms"]:
            entry |= {f"{row['engine']}, prefill": round(row["prefill_ms"] / ours["prefill_ms"], 2) for row in others}
        found.append(entry)
    return found


def run_draft(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    import torch

    from drafter.checkpoint import Checkpoint
    from drafter.provenance import read_json
    from model_io import load_model, pack_base
    from scripts import _draft_benchmark as bench
    from scripts.random_model import QWEN3_1_7B, RandomWeights, pack_random_model

    if args.device != "cpu" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here")
    work, teacher = ROOT / "runs" / "benchmark", args.teacher
    jobs = {"smollm2-student": (args.model, None, ("Q4_0", "Q4_1"))}
    if teacher is not None:
        if not (work / "smollm2-135m" / "manifest.json").exists():
            generation = read_json(args.model / "generation.json")
            del generation["format"]
            architecture = {"format": 1, "recipe_name": "benchmark", "recipe": {}, "phase_log": []}
            pack_base(
                work / "smollm2-135m", weights=Checkpoint(teacher), config=read_json(teacher / "config.json"),
                tokenizer_dir=teacher, generation=generation, architecture=architecture, double_quant=True,
            )  # fmt: skip
        jobs["smollm2-135m"] = (work / "smollm2-135m", None, ("Q4_0", "Q4_1"))
    if args.qwen3:
        if not (args.qwen3 / "manifest.json").exists():
            print(f"packing random weights of Qwen3-1.7B's shape into {relative(args.qwen3)}, some minutes", flush=True)
            pack_random_model(QWEN3_1_7B, args.qwen3, tokenizer_dir=args.tokenizer)
        jobs["qwen3-1.7b"] = (args.qwen3, (RandomWeights(QWEN3_1_7B), QWEN3_1_7B), ("Q4_0", "Q4_K_M"))
    threads = torch.get_num_threads()
    bandwidth, rate = bench.read_bandwidth(threads, args.device), bench.gemm_rate(args.device)
    print(f"{machine_line()}; reads {bandwidth / 1e9:.1f} GB/s, bf16 products {rate / 1e12:.2f} TFLOP/s")
    rows = []
    for name, (folder, source, kinds) in jobs.items():
        loaded, merged = load_model(folder, form="packed"), load_model(folder, form="merged").model
        weights, config = source or (merged.state_dict(), read_json(folder / "config.json"))
        gguf = {}
        if args.llama_python:
            gguf = {
                kind: bench.gguf_file(work / "gguf" / name, weights, config, kind, args.llama_python) for kind in kinds
            }
        steps = len(args.batches) * (args.runs + 1) * (4 + len(gguf))
        with progress_bar(steps, name, " runs", delay=10) as bar:
            rows += bench.time_model(
                name, loaded, merged, gguf, python=args.llama_python, batches=args.batches, rounds=args.runs,
                bandwidth=bandwidth, device=args.device, progress=bar.update,
            )  # fmt: skip
        del loaded, merged
    print_drafts(rows)
    rates = {"read_gb_per_s": round(bandwidth / 1e9, 1), "gemm_tflop_per_s": round(rate / 1e12, 2)}
    document = finish("draft", [{**row, "rates": rates} for row in rows], command, args.record)
    return {**document, "ratios": ratios(rows)}


# ---------------------------------------------------------------------------- teacher


# ---------------------------------------------------------------------------- memory


def run_memory(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    """What an engine holds behind a batch of 16 prompts of 512, over its packed weights and those keys and values."""
    from scripts._load_benchmark import memory_of_server

    rows = []
    for model, folder in archives(args):
        found = memory_of_server(folder)
        parts = found["weights_bytes"] + found["cache_bytes"]
        rows.append({"model": model, **found, "over_weights_and_cache": round(found["kept_bytes"] / parts, 3)})
        kept = found["kept_bytes"]
        print(f"{model}: {kept / 1e6:,.1f} MB, {kept / parts:.2f} x weights, keys and values")
    return finish("memory", rows, command, args.record)


def run_teacher(args: argparse.Namespace, command: Sequence[str]) -> dict[str, Any]:
    from drafter.recipe import load_recipe
    from scripts._teacher_benchmark import measure

    print(machine_line())
    with progress_bar(3, "teacher", " decoders", delay=10) as bar:
        rows = measure(load_recipe(args.recipe), args.prompts, bar.update)
    print(f"\n{'decoder':<14} {'batch':>5} {'top-K':>5} {'tokens':>8} {'seconds':>8} {'tokens/s':>9}")
    for row in rows:
        counts = f"{row['batch']:>5} {row['top_k']:>5} {row['generated_tokens']:>8,}"
        print(f"{row['decoder']:<14} {counts} {row['seconds']:>8.1f} {row['tokens_per_s']:>9.0f}")
    document = finish("teacher", rows, command, args.record)
    own = rows[-1]["tokens_per_s"]
    return {**document, "own_over": {row["decoder"]: round(own / row["tokens_per_s"], 2) for row in rows[:-1]}}


# ---------------------------------------------------------------------------- command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    default = Path(os.environ.get("MODEL_DIR") or ROOT / "model")
    advice = "made there when missing: 5 minutes, 9 GB of memory, 3 GB of disk"
    for name, run, words in (
        ("load", run_load, "verify and load a packed archive: rates of its stages, seconds, memory"),
        ("memory", run_memory, "what a server of a packed archive holds"),
    ):
        command = commands.add_parser(name, help=words)
        add = command.add_argument
        add("model", nargs="?", type=Path, default=default, metavar="MODEL_DIR", help="an archive (default: model)")
        add("--qwen3-1.7b", dest="qwen3", type=Path, metavar="DIR", help=f"and one of its shape; {advice}")
        add("--tokenizer", type=Path, metavar="DIR", help="Qwen3's tokenizer for that (default: 256 bytes as ids)")
        if name == "load":
            add("--runs", type=int, default=5, help="timed rounds, after one that is not counted (default 5)")
        add("--record", action="store_true", help=f"write data/results/{name}.json and refresh the README's table")
        command.set_defaults(run=run)
    draft = commands.add_parser("draft", help="a decode step and a prefill of every engine, beside the floor")
    add = draft.add_argument
    add("model", nargs="?", type=Path, default=default, metavar="MODEL_DIR", help="a packed archive (default: model)")
    add("--teacher", type=Path, metavar="DIR", help="and a whole checkpoint, packed without training: SmolLM2-135M")
    add("--qwen3-1.7b", dest="qwen3", type=Path, metavar="DIR", help=f"and an archive of its shape; {advice}")
    add("--tokenizer", type=Path, metavar="DIR", help="Qwen3's tokenizer for the latter (default: 256 bytes as ids)")
    add("--llama-python", metavar="PYTHON", help="and llama.cpp: the python of an environment with llama-cpp-python")
    add("--batches", type=int, nargs="+", default=[1, 4, 16], help="rows of a step (default 1 4 16)")
    add("--runs", type=int, default=5, help="timed rounds, after one that is not counted (default 5)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda is not run yet")
    add("--record", action="store_true", help="write data/results/draft.json and refresh the README's table")
    draft.set_defaults(run=run_draft)
    teacher = commands.add_parser("teacher", help="answers a second of generate_teacher's decoders and of generate()")
    add = teacher.add_argument
    add("--recipe", default="smollm2-quick", help="its prompts and teacher must be there (default smollm2-quick)")
    add("--prompts", type=int, default=192, help="how many (default 192: three batches of 64)")
    add("--record", action="store_true", help="write data/results/teacher.json and refresh the README's table")
    teacher.set_defaults(run=run_teacher)
    args = parser.parse_args(argv)
    if getattr(args, "runs", 1) < 1:
        parser.error("--runs must be at least 1")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    command = ["python", "-m", "scripts.benchmark", *(sys.argv[1:] if argv is None else argv)]
    return run_command(lambda: print(json.dumps(args.run(args, command))))


if __name__ == "__main__":
    raise SystemExit(main())
