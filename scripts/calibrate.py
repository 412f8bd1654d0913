"""Measure what the linear layers of a phase's checkpoint see: the mean square of each of their input columns.

    python -m scripts.calibrate --recipe smollm2-quick --phase polish
    python -m scripts.pack_model --recipe smollm2-quick --phase polish    # its scale search is then weighted by them

An error in a weight counts in a layer's output as often as its input column is large: sum m (w - s c)^2, m the second
moments, is the output's squared error where columns are not correlated. Reads train rows of the teacher's shards and
nothing else (a shard that holds another split is refused), evenly spread over all pools; rows go through the model and
are forgotten, sums are kept in fp64. Writes runs/RECIPE/PHASE/moments.safetensors, whose metadata names the checkpoint
and the rows. `qat` has no use for them: its scales come from training.

Legend: B rows, T tokens of a row, N tokens, D input columns of a layer.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from drafter import estimate as gpu_estimate
from drafter.adapter import linear_names
from drafter.checkpoint import checked_weights
from drafter.console import progress_bar, run_command
from drafter.decoding import load_causal_lm
from drafter.mixing import micro_batches, pad_rows, row_tokens
from drafter.provenance import atomic_write, relative, sha256_json
from drafter.recipe import PHASES, TRAIN_POOLS, Recipe, RunDocument, load_recipe, recipe_names
from drafter.scoring import FORWARD_FLOPS_PER_S
from drafter.teacher_data import TeacherRow, shard_paths
from drafter.weights import compute_dtype
from scripts._prompts import PROMPT_TOKENS
from scripts.evaluate import MEMORY_BYTES, shape_of, thin_out
from train import read_pool

FILE = "moments.safetensors"
# 7,000 tokens of smollm2-quick. Moments of 16, 64 and 256 rows differ by 6, 3 and 2 % from those of 500, and the scales
# that follow from them give the polish student a KL to bf16 of 0.045, 0.045 and 0.046 (without moments 0.074).
ROWS = 64

# ---------------------------------------------------------------------------- measuring


def train_rows(recipe: Recipe, count: int) -> list[TeacherRow]:
    """`count` train rows, evenly spread over the pools that the teacher has answered.

    ValueError without any, or when a shard holds a row of another split: scales chosen on selection or development
    rows would make these rows' numbers look better than they are.
    """
    folder = recipe.cache_dir / "teacher"
    rows = [row for name in TRAIN_POOLS if shard_paths(folder, name) for row in read_pool(recipe, name)]
    if not rows:
        raise ValueError(f"no teacher shards: run `python -m scripts.generate_teacher --recipe {recipe.name}` first")
    return thin_out(rows, count)


@torch.no_grad()
def walk_inputs(
    model: Any,
    rows: Sequence[Any],
    take: Callable[[str, torch.Tensor], None],
    *,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> None:
    """take(tensor name of a linear layer, its inputs [N, D]) for every layer and batch, N all tokens of the batch.

    Padding is left out, by lengths. `progress` gets the number of rows of each batch.
    """
    real = torch.empty(0, dtype=torch.bool)  # [B * T] of the batch under way

    def catch(name: str) -> Callable:
        return lambda module, inputs: take(name, inputs[0].flatten(0, 1)[real])

    layers = {f"{name}.weight": model.get_submodule(name) for name in linear_names(model)}
    hooks = [layer.register_forward_pre_hook(catch(name)) for name, layer in layers.items()]
    try:
        for batch in micro_batches(rows, batch_tokens):
            ids = torch.from_numpy(pad_rows(batch)[0])  # [B, T]
            lengths = torch.tensor([row_tokens(row) for row in batch])
            real = (torch.arange(ids.shape[1])[None] < lengths[:, None]).flatten()
            model.model(input_ids=ids, use_cache=False)
            if progress is not None:
                progress(len(batch))
    finally:
        for hook in hooks:
            hook.remove()


def second_moments(model: Any, rows: Sequence[Any], **walk: Any) -> dict[str, torch.Tensor]:
    """{tensor name of a linear layer: mean square of each input column, fp32 [D]} over every token of the rows.

    `walk`: batch_tokens and progress of `walk_inputs`.
    """
    sums: dict[str, torch.Tensor] = {}

    def add(name: str, x: torch.Tensor) -> None:
        squares = x.double().square().sum(0)  # [N, D] -> [D]
        sums[name] = sums[name] + squares if name in sums else squares

    walk_inputs(model, rows, add, **walk)
    tokens = sum(row_tokens(row) for row in rows)
    return {name: (total / tokens).float() for name, total in sums.items()}


# ---------------------------------------------------------------------------- the file


def write_moments(
    folder: Path, moments: dict[str, torch.Tensor], rows: Sequence[TeacherRow], **origin: Any
) -> dict[str, Any]:
    """moments.safetensors in a phase's folder, whole or not at all -> its metadata."""
    metadata = {
        **origin,
        "rows": len(rows),
        "rows_sha256": sha256_json([row.id for row in rows]),
        "tokens": sum(row_tokens(row) for row in rows),
    }
    with atomic_write(folder / FILE) as file:
        file.write(save(moments, {"moments": json.dumps(metadata, sort_keys=True)}))
    return metadata


def read_moments(folder: Path, checkpoint_sha256: str) -> dict[str, torch.Tensor] | None:
    """The moments that lie beside a checkpoint, None where there are none.

    ValueError when they were measured on other weights, or the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {}).get("moments", "{}"))
            moments = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{relative(path)} cannot be read ({error}): remove it") from None
    if metadata.get("checkpoint_sha256") != checkpoint_sha256:
        raise ValueError(
            f"{relative(path)} was measured on the checkpoint with sha256 {metadata.get('checkpoint_sha256')}, the one "
            f"beside it has {checkpoint_sha256}: measure anew (python -m scripts.calibrate --phase {folder.name} "
            f"--recipe {metadata.get('recipe')}) or remove the file"
        )
    if not all(bool((torch.isfinite(one) & (one >= 0)).all()) for one in moments.values()):
        raise ValueError(f"{relative(path)} holds a moment that is no finite number >= 0: remove the file")
    return moments


# ---------------------------------------------------------------------------- command line


def calibrate(recipe: Recipe, phase: str, count: int, run_dir: Path) -> dict[str, Any]:
    """Measures and writes -> metadata. ValueError when the phase is not finished or its bytes are not its log's."""
    folder = run_dir / phase
    checkpoint_sha256 = checked_weights(run_dir, RunDocument.read(run_dir / "architecture.json").phase_log, phase)
    rows = train_rows(recipe, count)
    model = load_causal_lm(folder, compute_dtype(torch.bfloat16), stop_ids=recipe.base.stop_ids)
    with progress_bar(len(rows), f"moments of {phase}", "row") as bar:
        moments = second_moments(model, rows, batch_tokens=recipe.evaluation.batch_tokens, progress=bar.update)
    origin = {"recipe": recipe.name, "phase": phase, "checkpoint_sha256": checkpoint_sha256}
    metadata = write_moments(folder, moments, rows, **origin)
    return {"file": relative(folder / FILE), "layers": len(moments), **metadata}


def plan(recipe: Recipe, phase: str, count: int, run_dir: Path) -> dict[str, Any]:
    """Rows, tokens, memory and seconds of a run, from rows and config alone; what is missing says its command."""
    missing: list[str] = []
    tokens = memory_bytes = seconds = None
    rows: list[TeacherRow] = []
    try:
        rows = train_rows(recipe, count)
        tokens = sum(row_tokens(row) for row in rows)
    except ValueError as error:
        missing.append(str(error))
    if not (run_dir / phase / "config.json").exists():
        missing.append(f"no checkpoint of {phase}: python train.py --recipe {recipe.name} --phase {phase}")
    elif tokens is not None:
        shape = shape_of(run_dir / phase)
        blocks = 4 * recipe.evaluation.batch_tokens * shape["width"]  # activations of a layer, and one fp64 copy
        memory_bytes = MEMORY_BYTES + 2 * (shape["weights"] + blocks)
        seconds = round(2 * shape["weights"] * tokens / FORWARD_FLOPS_PER_S)
    cost = {"rows": len(rows), "tokens": tokens, "memory_bytes": memory_bytes, "estimated_s": seconds}
    at = run_dir / phase if (run_dir / phase / "config.json").exists() else recipe.cache_dir / "models" / "base"
    expected = count * (PROMPT_TOKENS + recipe.generation.max_new_tokens)
    gpu = gpu_estimate.forward(recipe, recipe.base, at, tokens or expected)
    gpu_estimate.print_lines(gpu)
    return {"dry_run": True, **cost, "missing": missing, "gpu": gpu}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    add("--phase", required=True, choices=PHASES[:4], help="whose checkpoint; polish is what plain quantization packs")
    add("--run", type=Path, metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    add("--rows", type=int, default=ROWS, metavar="N", help=f"train rows, about 100 tokens each (default {ROWS})")
    add("--dry-run", action="store_true", help="rows, tokens, memory, time and what is missing; nothing is written")
    return made


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The JSON document of the last line."""
    if args.rows < 1:
        raise ValueError(f"--rows must be at least 1, not {args.rows}")
    recipe = load_recipe(args.recipe)
    work = plan if args.dry_run else calibrate
    found = work(recipe, args.phase, args.rows, args.run or recipe.run_dir)
    return {"step": "calibrate", "recipe": recipe.name, "phase": args.phase, **found}


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(lambda: print(json.dumps(run(args))))


if __name__ == "__main__":
    raise SystemExit(main())
