"""Pack a trained student: NF4 linear layers, INT8 embedding = head, zstd, sha256 of everything.

    python -m scripts.pack_model --recipe smollm2-quick --base     # runs/R/qat with its scales -> runs/R/base, frozen
    python train.py --recipe smollm2-quick --phase adapter         # trains beside that base
    python -m scripts.pack_model --recipe smollm2-quick            # the base's bytes + the adapter -> model/
    python -m scripts.pack_model --recipe smollm2-quick --phase polish   # any phase, quantized without training
    python -m scripts.pack_model --verify model                    # every byte, size, name and link; no model is built
    python -m scripts.pack_model --inventory model                 # a row a tensor: codec, shape, bits, bytes, share
    python -m scripts.pack_model --recipe smollm2-quick --report   # every codec: bits, errors, KL, tau -> codecs.json

Needs no GPU; time is the scale search, about 40 ns a weight on one core (qat brings its scales: none), plus the reading
back of what was written. Disk: the archive, and once more while it replaces an older one. Every checkpoint is held
against the sha256 that phase_log names, and refused when it differs.
"""

import argparse
import json
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from drafter.chat import TOKENIZER_FILES
from drafter.console import run_command
from drafter.estimate import Shape, shape_of
from drafter.provenance import ROOT, read_json, relative
from drafter.recipe import TRAIN_POOLS, Recipe, RunDocument, load_recipe

# For --dry-run only, measured on trained weights: nanoseconds of the scale search a weight on one core, and bits a
# weight of NF4 (codes and scales) and of INT8 rows after zstd.
SEARCH_NS, ZSTD_BITS_NF4, ZSTD_BITS_INT8 = 40, 4.06, 6.7

# ---------------------------------------------------------------------------- what is packed


def generation_settings(recipe: Recipe) -> dict[str, Any]:
    """What a reader must know to run the drafter as it was trained: the fields of generation.json."""
    return {
        "stop_ids": sorted(recipe.base.stop_ids),
        "num_ids": recipe.base.num_ids,
        "thinking": recipe.chat.thinking,
        "context": recipe.serving.context,
    }


def pack_phase(
    recipe: Recipe, phase: str, out_dir: Path, *, run_dir: Path | None = None, storage: str | None = None
) -> dict[str, Any]:
    """One phase's checkpoint as an archive without adapter -> report.

    The scales of `qat` are used as training left them, all other phases are searched anew, weighted by the phase's
    moments where scripts.calibrate measured some. ValueError when the phase is not finished, its bytes are not those of
    phase_log or of the moments, the teacher is missing or the weights are the teacher's own.
    """
    from safetensors.torch import load_file

    from drafter.checkpoint import Checkpoint, checked_scales, checked_weights
    from model_io import pack_base
    from scripts.calibrate import read_moments

    run_dir = run_dir or recipe.run_dir
    folder, teacher = run_dir / phase, recipe.cache_dir / "models" / "teacher"
    run = RunDocument.read(run_dir / "architecture.json")
    checkpoint_sha256 = checked_weights(run_dir, run.phase_log, phase)
    if not (teacher / "config.json").exists():
        raise ValueError(
            f"no teacher in {teacher}: packing makes sure that the student is not a copy of it. "
            f"Next: python -m scripts.download_models --recipe {recipe.name}"
        )
    return pack_base(
        out_dir,
        weights=Checkpoint(folder),
        config=read_json(folder / "config.json"),
        tokenizer_dir=folder,
        generation=generation_settings(recipe),
        architecture=run.document(),
        scales=load_file(checked_scales(run_dir, run.phase_log)) if phase == "qat" else None,
        moments=None if phase == "qat" else read_moments(folder, checkpoint_sha256),
        # as the run was begun: the adapter knows the base's bytes, and scales trained without it would keep bf16 groups
        double_quant=run.recipe.packing.double_quant,
        storage=storage or recipe.packing.storage,
        teacher_dir=teacher,
        source=(phase, checkpoint_sha256),
    )


def packed_source(base: Path) -> list[str | None]:
    """[phase, sha256 of its checkpoint] that a packed folder was made from, as it says itself."""
    source = read_json(base / "quantization.json").get("source") or {}
    return [source.get("phase"), source.get("checkpoint_sha256")]


def pack_base_of_run(recipe: Recipe) -> Path:
    """runs/RECIPE/base, made when it is missing or was not made from the qat checkpoint that the run has now."""
    from drafter.checkpoint import checked_weights

    base, run = recipe.run_dir / "base", RunDocument.read(recipe.run_dir / "architecture.json")
    qat = checked_weights(recipe.run_dir, run.phase_log, "qat")
    if not (base / "quantization.json").exists() or packed_source(base) != ["qat", qat]:
        print_report(pack_phase(recipe, "qat", base))
    return base


def pack_final(recipe: Recipe, out_dir: Path, *, run_dir: Path | None = None) -> dict[str, Any]:
    """The frozen base, byte for byte, with the trained adapter -> report.

    ValueError when one of them is missing, the base was not made from the run's qat phase, the adapter is not the one
    that phase_log names, or it was trained beside another base.
    """
    from drafter.adapter import Adapter
    from drafter.checkpoint import checked_weights
    from model_io import pack_adapter

    run_dir = run_dir or recipe.run_dir
    run, base = RunDocument.read(run_dir / "architecture.json"), run_dir / "base"
    make_base = f"Next: python -m scripts.pack_model --recipe {recipe.name} --base"
    if not (base / "manifest.json").exists():
        raise ValueError(f"{base / 'manifest.json'} is missing. {make_base}")
    expected = ["qat", checked_weights(run_dir, run.phase_log, "qat")]
    if (found := packed_source(base)) != expected:
        raise ValueError(f"{base} was packed from {found}, the run's phase_log says {expected}. {make_base}")
    checked_weights(run_dir, run.phase_log, "adapter")
    policy = run_dir / "copy_policy.json"  # made by scripts.fit_copy_policy, where somebody asked for it
    return pack_adapter(
        out_dir,
        base_dir=base,
        adapter=Adapter.load(run_dir / "adapter"),
        architecture=run.document(),
        copy_policy=read_json(policy) if policy.exists() else None,
        draft_vocabulary=draft_vocabulary(recipe, recipe.serving.draft_vocabulary),
    )


def draft_vocabulary(recipe: Recipe, size: int | None) -> np.ndarray | None:
    """The `size` ids that are most frequent in the teacher's answers to training prompts, and the stop ids; None: all.

    ValueError when there are no answers.
    """
    from drafter.draft_vocabulary import most_frequent
    from drafter.teacher_data import id_counts, shard_paths

    if size is None:
        return None
    paths = [path for name in TRAIN_POOLS for path in shard_paths(recipe.cache_dir / "teacher", name)]
    if not paths:
        raise ValueError(
            f"serving.draft_vocabulary counts ids in the teacher's answers, and data/cache/{recipe.name}/teacher has "
            f"none. Next: python -m scripts.generate_teacher --recipe {recipe.name}"
        )
    return most_frequent(id_counts(paths, recipe.base.num_ids), size, recipe.base.stop_ids)


# ---------------------------------------------------------------------------- what is printed


def print_report(report: dict[str, Any]) -> None:
    print(f"{'stream':<14} {'bytes':>14} {'stored':>14} {'ratio':>7}")
    for kind, (size, stored) in report["streams"].items():
        print(f"{kind:<14} {size:>14,} {stored:>14,} {stored / size:>7.3f}")
    print(f"\n{'file':<28} {'bytes':>14}")
    for name, size in report["files"].items():
        print(f"{name:<28} {size:>14,}")
    print(f"{'all':<28} {report['size_bytes']:>14,}\n")
    print_bits(report)


def print_bits(sizes: dict[str, Any]) -> None:
    print(f"bits a weight, scales counted: {'linear':>8} {'all':>8}")
    for label, suffix in (("without adapter", ""), ("with adapter", "_with_adapter")):
        linear, everything = (sizes[f"bits_per_weight_{part}{suffix}"] for part in ("linear", "all"))
        print(f"{label:>30} {linear:>8} {everything:>8}")


def print_inventory(rows: list[dict[str, Any]]) -> None:
    print(f"{'tensor':<52} {'codec':<5} {'shape':>16} {'bits':>7} {'bytes':>13} {'share':>7}")
    for row in rows:
        shape = "x".join(map(str, row["shape"]))
        numbers = f"{row['bits']:>7} {row['size_bytes']:>13,} {row['share']:>7.2%}"
        print(f"{row['name']:<52} {row['codec']:<5} {shape:>16} {numbers}")


def estimate(recipe: Recipe, phase: str | None, folder: Path, storage: str) -> dict[str, Any]:
    """Weights, bytes, memory and seconds of packing, from the checkpoint's config alone.

    Memory is what the self-check holds beside Python and torch, once the rest is written: the packed form twice and a
    merged model in bf16. Seconds are those of the scale search; for the final archive nothing is quantized again.
    """
    import torch

    from drafter.archive import WEIGHTS_METADATA, stream_specs
    from drafter.checkpoint import codecs_of, meta_model, ties_of
    from drafter.streams import stream_size

    model = meta_model(read_json(folder / "config.json"))
    codecs, ties = codecs_of(model), ties_of(model)
    entries = {
        name: {"codec": codecs.get(name, "none"), "shape": list(tensor.shape), "dtype": "F32"}
        for name, tensor in model.state_dict().items()
        if name not in ties
    }
    if recipe.packing.double_quant:  # as if no group had to keep its bf16 scales
        for name in codecs:
            if codecs[name] == "nf4":
                entries[name]["plain_groups"] = []
    count = {name: prod(entry["shape"]) for name, entry in entries.items()}
    linear = sum(size for name, size in count.items() if codecs.get(name) == "nf4")
    stream = stream_size(stream_specs({"tensors": entries}), WEIGHTS_METADATA)
    size = stream
    if storage == "zst":
        size = int((linear * ZSTD_BITS_NF4 + (sum(count.values()) - linear) * ZSTD_BITS_INT8) / 8)
    size += sum(path.stat().st_size for name in TOKENIZER_FILES if (path := folder / name).exists())
    if phase is None:  # A and B, stored in bf16
        size += 2 * recipe.adapter.rank * sum(sum(entries[name]["shape"]) for name in codecs if codecs[name] == "nf4")
    searched = 0 if phase in (None, "qat") else linear
    return {
        "weights": sum(count.values()),
        "estimated_bytes": size,
        "estimated_memory_bytes": 2 * stream + 2 * sum(count.values()),
        "estimated_s": round(searched * SEARCH_NS / 1e9 / torch.get_num_threads(), 1),
    }


def plan(recipe: Recipe, phase: str | None, run_dir: Path, out_dir: Path, storage: str) -> dict[str, Any]:
    """What packing would read and write, and what it would cost; `missing` are files that it needs and lacks."""
    folder = run_dir / (phase or "qat")
    if phase is None:
        names = ["base/manifest.json", "adapter/adapter.json", "adapter/adapter.safetensors"]
    else:
        names = [f"{phase}/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")]
        names += [f"{phase}/nf4_scales.safetensors"] if phase == "qat" else []
    reads = [run_dir / name for name in names]
    found = {
        "step": "pack_model",
        "recipe": recipe.name,
        "dry_run": True,
        "reads": [relative(path) for path in reads if path.exists()],
        "missing": [relative(path) for path in reads if not path.exists()],
        "writes": relative(out_dir),
    }
    if (folder / "config.json").exists():
        return found | estimate(recipe, phase, folder, storage)
    shape = shape_of(recipe.base, recipe.cache_dir / "models" / "base")
    return found | (archive_size(recipe, shape) if shape else {})


def archive_size(recipe: Recipe, shape: Shape) -> dict[str, Any]:
    """Bytes on disk before there is a checkpoint, with the arithmetic; the adapter's xz saves some more."""
    import torch

    table = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    linear, rank = shape.weights - table, recipe.adapter.rank
    bits = 4 + (8 if recipe.packing.double_quant else 16) / recipe.packing.block_size
    wide = shape.head_dim * (shape.heads + shape.kv_heads)
    adapter = 2 * rank * shape.layers * (2 * wide + 4 * shape.hidden + 3 * (shape.hidden + shape.intermediate))
    size = round(linear * bits / 8) + table + adapter
    print(f"{linear:,} weights x {bits:.3f} bits + table {table:,} x 1 B + adapter {adapter:,} B = {size:,} B")
    memory_bytes = 2 * size + 2 * shape.weights  # two copies of the archive's bytes and the checkpoint in bf16
    print(f"memory: 2 x {size:,} + 2 B x {shape.weights:,} = {memory_bytes:,} B; no GPU is used")
    return {"weights": shape.weights, "estimated_bytes": size, "estimated_memory_bytes": memory_bytes,
            "estimated_s": round(linear * SEARCH_NS / 1e9 / torch.get_num_threads(), 1)}  # fmt: skip


# ---------------------------------------------------------------------------- command line


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recipe", help="a recipe of architecture.json, for example smollm2-quick")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--base", action="store_true", help="pack the qat phase as the frozen base of the adapter phase")
    what.add_argument("--phase", help="pack one phase as it is, without adapter: what plain quantization would cost")
    what.add_argument("--verify", type=Path, metavar="DIR", help="check an archive and change nothing")
    what.add_argument("--inventory", type=Path, metavar="DIR", help="check an archive and list its tensors")
    what.add_argument("--report", action="store_true", help="measure every codec on the run's student; some minutes")
    add("--run", type=Path, metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    add(
        "--output", type=Path, metavar="DIR", help="folder to write (default: RUN/base, RUN/packed_PHASE, or MODEL_DIR)"
    )
    add("--storage", choices=("zst", "plain"), help="plain: larger, but memory-mapped and shared by replicas")
    add("--llama-python", metavar="PATH", help="--report: python of an environment with llama-cpp-python==0.3.36")
    add("--full-size", action="store_true", help="--report: sizes at the shape of Qwen3-1.7B too; 5 GB of disk")
    add("--record", action="store_true", help="--report: keep it in data/results/ and refresh the README")
    add("--dry-run", action="store_true", help="say what would be read, its bytes, memory and seconds; writes nothing")
    args = parser.parse_args(argv)
    args.command = ["python", "-m", "scripts.pack_model", *(sys.argv[1:] if argv is None else argv)]
    if not (args.recipe or args.verify or args.inventory):
        parser.error("--recipe is needed, or --verify DIR, or --inventory DIR")
    if not args.report and (args.llama_python or args.full_size or args.record):
        parser.error("--llama-python, --full-size and --record belong to --report")
    if args.storage and not (args.base or args.phase):
        parser.error("--storage belongs to --base or --phase: the final archive takes the base's bytes unchanged")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    return run_command(lambda: print(json.dumps(run(args))))


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document of the last line."""
    from model_io import inventory, sizes, verify

    if args.verify or args.inventory:
        archive = verify(args.verify or args.inventory)
        summary = {"archive_id": archive.archive_id, "base_sha256": archive.base_sha256, **sizes(archive)}
        if args.inventory:
            rows = inventory(archive)
            print_inventory(rows)
            summary["tensors"] = len(rows)
        print_bits(summary)
        return summary
    recipe = load_recipe(args.recipe)
    run_dir = args.run or recipe.run_dir
    if args.report:
        from scripts.codec_report import report

        chosen = {name: getattr(args, name) for name in ("llama_python", "full_size", "record", "dry_run")}
        return report(recipe, run_dir, command=args.command, **chosen)
    phase = "qat" if args.base else args.phase
    if args.base:
        default = run_dir / "base"
    elif args.phase:
        default = run_dir / f"packed_{args.phase}"
    else:
        default = Path(os.environ.get("MODEL_DIR") or ROOT / "model")
    output = args.output or default
    if args.dry_run:
        return plan(recipe, phase, run_dir, output, args.storage or recipe.packing.storage)
    if phase:
        report = pack_phase(recipe, phase, output, run_dir=run_dir, storage=args.storage)
    else:
        report = pack_final(recipe, output, run_dir=run_dir)
    print_report(report)
    return report


if __name__ == "__main__":
    raise SystemExit(main())
