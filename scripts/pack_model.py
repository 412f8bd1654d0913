"""Pack a trained student: NF4 linear layers, INT8 embedding = head, zstd, sha256 of everything.

    python -m scripts.pack_model --recipe smollm2-quick --base     # runs/R/qat with its scales -> runs/R/base, frozen
    python train.py --recipe smollm2-quick --phase adapter         # trains beside that base
    python -m scripts.pack_model --recipe smollm2-quick            # the base's bytes + the adapter -> model/
    python -m scripts.pack_model --recipe smollm2-quick --phase polish   # any phase, quantized without training
    python -m scripts.pack_model --verify model                    # every byte, size, name and link; no model is built
    python -m scripts.pack_model --inventory model                 # a row a tensor: codec, shape, bits, bytes, share

Needs no GPU; time is the scale search, about 40 ns a weight and core (6 s for 135 M weights, 1 minute for 1.7 B), plus
the reading back of what was written. Disk: the archive, and once more while it replaces an older one.
"""

import argparse
import json
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

from drafter.provenance import ROOT, read_json
from drafter.recipe import Recipe, RunDocument, load_recipe

# ---------------------------------------------------------------------------- what is packed


def generation_settings(recipe: Recipe) -> dict[str, Any]:
    """What a reader must know to run the drafter as it was trained: the fields of generation.json."""
    return {
        "stop_ids": sorted(recipe.base.stop_ids),
        "num_ids": recipe.base.num_ids,
        "thinking": recipe.chat.thinking,
        "context": recipe.serving.context,
        "num_draft_tokens": recipe.serving.num_draft_tokens,
    }


def pack_phase(
    recipe: Recipe, phase: str, out_dir: Path, *, run_dir: Path | None = None, storage: str | None = None
) -> dict[str, Any]:
    """One phase's checkpoint as an archive without adapter -> report.

    The scales of `qat` are used as training left them, all other phases are searched anew. ValueError when the phase
    is not finished or the checkpoint is the teacher's own.
    """
    from safetensors.torch import load_file

    from drafter.checkpoint import Checkpoint
    from model_io import pack_base

    if recipe.packing.double_quant:
        raise ValueError("packing.double_quant is not supported yet: set it to false in architecture.json")
    run_dir = run_dir or recipe.run_dir
    folder, teacher = run_dir / phase, recipe.cache_dir / "models" / "teacher"
    needed = ("config.json", "nf4_scales.safetensors") if phase == "qat" else ("config.json",)
    if not all((folder / name).exists() for name in needed):
        raise ValueError(
            f"{folder} holds no {' or '.join(needed)}. Next: python train.py --recipe {recipe.name} --phase {phase}"
        )
    scales = load_file(folder / "nf4_scales.safetensors") if phase == "qat" else None
    return pack_base(
        out_dir,
        weights=Checkpoint(folder),
        config=read_json(folder / "config.json"),
        tokenizer_dir=folder,
        generation=generation_settings(recipe),
        architecture=RunDocument.read(run_dir / "architecture.json").document(),
        scales=scales,
        storage=storage or recipe.packing.storage,
        teacher_dir=teacher if teacher.exists() else None,
    )


def pack_base_of_run(recipe: Recipe) -> Path:
    """runs/RECIPE/base, made when it is missing or was made from another qat checkpoint than the run has now."""
    base, run = recipe.run_dir / "base", RunDocument.read(recipe.run_dir / "architecture.json")
    if (base / "architecture.json").exists():
        packed = RunDocument.read(base / "architecture.json").finished("qat")
        if packed is not None and packed == run.finished("qat"):
            return base
    print_report(pack_phase(recipe, "qat", base))
    return base


def pack_final(recipe: Recipe, out_dir: Path, *, run_dir: Path | None = None) -> dict[str, Any]:
    """The frozen base, byte for byte, with the trained adapter -> report. ValueError when one of them is missing."""
    from drafter.adapter import Adapter
    from model_io import pack_adapter

    run_dir = run_dir or recipe.run_dir
    for name, fix in (
        ("base/manifest.json", f"python -m scripts.pack_model --recipe {recipe.name} --base"),
        ("adapter/adapter.json", f"python train.py --recipe {recipe.name} --phase adapter"),
    ):
        if not (run_dir / name).exists():
            raise ValueError(f"{run_dir / name} is missing. Next: {fix}")
    return pack_adapter(
        out_dir,
        base_dir=run_dir / "base",
        adapter=Adapter.load(run_dir / "adapter"),
        architecture=RunDocument.read(run_dir / "architecture.json").document(),
    )


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


def plan(recipe: Recipe, folder: Path, out_dir: Path) -> dict[str, Any]:
    """What packing would read and make, from the headers of the checkpoint alone."""
    from drafter.checkpoint import Checkpoint

    found = {"from": str(folder), "to": str(out_dir), "weights": None, "estimated_bytes": None}
    if (folder / "config.json").exists():
        checkpoint = Checkpoint(folder)
        count = {name: prod(checkpoint.shape(name)) for name in checkpoint}
        linear = sum(size for name, size in count.items() if ".layers." in name and name.endswith("_proj.weight"))
        # measured on trained weights: NF4 codes and scales 4.14 bits a weight once compressed, int8 rows 6.7
        found |= {"weights": sum(count.values())}
        found["estimated_bytes"] = int(linear * 4.14 / 8 + (found["weights"] - linear) * 6.7 / 8)
    return found


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
    add("--run", type=Path, metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    add(
        "--output", type=Path, metavar="DIR", help="folder to write (default: RUN/base, RUN/packed_PHASE, or MODEL_DIR)"
    )
    add("--storage", choices=("zst", "plain"), help="plain: larger, but memory-mapped and shared by replicas")
    add("--dry-run", action="store_true", help="say what would be packed and how large it would be; writes nothing")
    args = parser.parse_args(argv)
    if not (args.recipe or args.verify or args.inventory):
        parser.error("--recipe is needed, or --verify DIR, or --inventory DIR")
    if args.storage and not (args.base or args.phase):
        parser.error("--storage belongs to --base or --phase: the final archive takes the base's bytes unchanged")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        result = run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


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
    phase = "qat" if args.base else args.phase
    if args.base:
        default = run_dir / "base"
    elif args.phase:
        default = run_dir / f"packed_{args.phase}"
    else:
        default = Path(os.environ.get("MODEL_DIR") or ROOT / "model")
    output = args.output or default
    if args.dry_run:
        found = plan(recipe, run_dir / (phase or "qat"), output)
        print(f"would pack {found['weights'] or 'a missing checkpoint'} from {found['from']} to {found['to']}")
        return found
    if phase:
        report = pack_phase(recipe, phase, output, run_dir=run_dir, storage=args.storage)
    else:
        report = pack_final(recipe, output, run_dir=run_dir)
    print_report(report)
    return report


if __name__ == "__main__":
    raise SystemExit(main())
