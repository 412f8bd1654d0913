"""Make the student: a copy of the base with the layers that the recipe keeps, in runs/RECIPE/student/.

    python -m scripts.prune_layers --recipe smollm2-quick

Rules (recipe, base.layers):
  all       every layer
  even      `count` layers spread evenly, both ends included: the first layers build features that nothing else
            does, the last ones read them out
  angular   drop the contiguous block whose input and output hidden states differ least in angle (Gromov et al.,
            "The Unreasonable Ineffectiveness of the Deeper Layers", 2024), measured on authored train prompts
  explicit  `keep`, as given

The choice, what it was made from and the hashes are written to student/prune.json and to the run's phase_log.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from drafter.console import run_command
from drafter.provenance import relative, run_record, sha256_file, sha256_json, write_json
from drafter.recipe import Layers, Recipe, RecipeError, RunDocument, load_recipe, recipe_names

PROBE_PROMPTS = 64

# For --dry-run: the base is read once, and the student written and hashed, at what a plain disk gives; 3 s to import.
DISK_BYTES_PER_S, START_S = 100_000_000, 3
MEMORY_BYTES = 800_000_000  # Python with torch and transformers


def evenly_spread(total: int, count: int) -> tuple[int, ...]:
    """`count` of `total` layer numbers at equal distances, both ends kept: round(i * (total - 1) / (count - 1)).

    >>> evenly_spread(30, 4)
    (0, 10, 19, 29)
    """
    if not 2 <= count <= total:
        raise ValueError(f"cannot keep {count} of {total} layers: the rule needs 2 .. {total}")
    return tuple((2 * i * (total - 1) + (count - 1)) // (2 * (count - 1)) for i in range(count))


def without_block(total: int, count: int, distances: Sequence[float]) -> tuple[int, ...]:
    """Keep all but the contiguous block of total - count layers with the smallest angular distance.

    distances[s] is that between the hidden states before layer s and after layer s + (total - count) - 1.
    """
    size = total - count
    start = min(range(len(distances)), key=lambda s: (distances[s], s))
    assert len(distances) == total - size + 1, (len(distances), total, size)
    return tuple(layer for layer in range(total) if not start <= layer < start + size)


def angular_distances(model, prompts: Sequence[Sequence[int]], size: int) -> list[float]:
    """arccos(cosine) / pi between the residual streams `size` layers apart, at the last token of each prompt, averaged.

    Layer inputs and the last layer's output are caught by hooks: the last of transformers' own `hidden_states` stands
    behind the final norm, and its angle to a raw stream says more of the norm's weights than of the layers.
    """
    import torch

    layers, states = model.model.layers, []
    catch = [layer.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0])) for layer in layers]
    catch.append(layers[-1].register_forward_hook(lambda _, inputs, output: states.append(output)))
    sums = torch.zeros(len(layers) + 1 - size)
    try:
        for prompt in prompts:
            states.clear()
            with torch.inference_mode():
                model.model(torch.tensor([prompt]), use_cache=False)
            last = torch.stack([state[0, -1].float() for state in states])  # [layers + 1, D]
            cosine = torch.cosine_similarity(last[: len(sums)], last[size:], dim=-1)
            sums += cosine.clamp(-1, 1).arccos() / math.pi
    finally:
        for hook in catch:
            hook.remove()
    return (sums / len(prompts)).tolist()


def choose_layers(recipe: Recipe, base: Path) -> tuple[tuple[int, ...], dict]:
    """The layers to keep and what the choice was made from."""
    rule: Layers = recipe.base.layers
    total = json.loads((base / "config.json").read_bytes())["num_hidden_layers"]
    if rule.rule == "all":
        return tuple(range(total)), {}
    if rule.rule == "explicit":
        if list(rule.keep) != sorted(set(rule.keep)) or not 0 <= rule.keep[0] <= rule.keep[-1] < total:
            raise ValueError(f"base.layers.keep must be rising layer numbers below {total}, not {list(rule.keep)}")
        return rule.keep, {}
    if rule.rule == "even":
        return evenly_spread(total, rule.count), {}
    if rule.count > total:
        raise ValueError(f"cannot keep {rule.count} of {total} layers: lower base.layers.count")
    from drafter.chat import Chat
    from drafter.corpus import read_prompts
    from drafter.decoding import load_causal_lm

    path = recipe.cache_dir / "prompts" / "distill.data.jsonl"
    if not path.exists():
        raise ValueError(
            f"the angular rule measures on train prompts: python -m scripts.prepare_data --recipe {recipe.name}"
        )
    chat = Chat.load(base, thinking=recipe.chat.thinking, stop_ids=recipe.base.stop_ids, num_ids=recipe.base.num_ids)
    prompts = [chat.render(row["messages"]) for row in read_prompts(path)[:PROBE_PROMPTS]]
    distances = angular_distances(load_causal_lm(base), prompts, total - rule.count)
    return without_block(total, rule.count, distances), {"angular_distances": [round(d, 5) for d in distances]}


def prune(recipe: Recipe) -> dict:
    """Write runs/RECIPE/student/, append the step to phase_log. Does nothing when the log has it already."""
    run = RunDocument.open(recipe)
    done = run.finished("student")
    folder = recipe.run_dir / "student"
    if done is not None:
        if (
            not (folder / "model.safetensors").exists()
            or sha256_file(folder / "model.safetensors") != done["checkpoint_sha256"]
        ):
            raise RecipeError(
                f"{folder} is not the student that phase_log names. Move runs/{recipe.name} away to start anew."
            )
        return {"keep": done["keep"], "made": False}
    from torch import nn

    from drafter.chat import copy_tokenizer
    from drafter.decoding import load_causal_lm, neutral_generation_config

    started_s = time.perf_counter()
    base = recipe.cache_dir / "models" / "base"
    if not (base / "source.json").exists():
        raise ValueError(f"no base model in {base}: python -m scripts.download_models --recipe {recipe.name}")
    keep, measured = choose_layers(recipe, base)
    model = load_causal_lm(base, dtype="auto", stop_ids=recipe.base.stop_ids)
    model.model.layers = nn.ModuleList([model.model.layers[layer] for layer in keep])
    model.config.num_hidden_layers = len(keep)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[layer] for layer in keep]
    model.generation_config = neutral_generation_config(recipe.base.stop_ids)
    source = json.loads((base / "source.json").read_bytes())
    shards = {name: sha256 for name, sha256 in source["files"].items() if name.endswith(".safetensors")}
    # One hash also for a base of several files, so that the chain of the log has one shape.
    parent_sha256 = next(iter(shards.values())) if len(shards) == 1 else sha256_json(shards)
    with tempfile.TemporaryDirectory(dir=recipe.run_dir, prefix=".student.") as temporary:
        made = Path(temporary) / "student"
        model.save_pretrained(made)
        copy_tokenizer(base, made)
        record = {
            "rule": recipe.base.layers.rule, "keep": list(keep), "base_source": source["source"],
            "base_files": shards, **measured,
        }  # fmt: skip
        write_json(made / "prune.json", record)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    run.append({
        "phase": "student", **run_record(), "keep": list(keep), "rule": recipe.base.layers.rule,
        "parent_sha256": parent_sha256,
        "checkpoint_sha256": sha256_file(folder / "model.safetensors"),
        "elapsed_s": round(time.perf_counter() - started_s, 1),
    })  # fmt: skip
    return {"keep": list(keep), "made": True}


def plan(recipe: Recipe) -> dict:
    """--dry-run. The layers (null where the rule needs the base, and for `angular`, which measures), and the cost.

    Memory: the base in its own dtype. Time: base read, student written and hashed (at most the base's size each); the
    angular rule adds PROBE_PROMPTS prompts through the base, at 2 FLOPs a weight and token and 2 bytes a weight.
    """
    rule, base = recipe.base.layers, recipe.cache_dir / "models" / "base"
    report = {"dry_run": True, "rule": rule.rule, "count": rule.count, "keep": rule.keep, "missing": []}
    if not (base / "config.json").exists():
        report["missing"].append(f"no base model: python -m scripts.download_models --recipe {recipe.name}")
        return {**report, "tokens": None, "memory_bytes": None, "estimated_s": None}
    if rule.rule in ("all", "even"):
        report["keep"], _ = choose_layers(recipe, base)
    size_bytes, tokens, seconds = sum(path.stat().st_size for path in base.glob("*.safetensors")), 0, START_S
    seconds += 3 * size_bytes / DISK_BYTES_PER_S
    if rule.rule == "angular":
        from drafter.scoring import FORWARD_FLOPS_PER_S
        from scripts._prompts import PROMPT_TOKENS

        tokens = PROBE_PROMPTS * PROMPT_TOKENS
        seconds += 2 * (size_bytes / 2) * tokens / FORWARD_FLOPS_PER_S
    memory_bytes = MEMORY_BYTES + size_bytes
    return {**report, "tokens": tokens, "memory_bytes": memory_bytes, "estimated_s": round(seconds)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument(
        "--dry-run", action="store_true", help="rule, layers, memory, time and what is missing; nothing written"
    )
    arguments = parser.parse_args(argv)
    return run_command(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe)
    report = plan(recipe) if arguments.dry_run else prune(recipe)
    folder = relative(recipe.run_dir / "student")
    print(json.dumps({"step": "prune_layers", "recipe": recipe.name, "folder": folder, **report}))


if __name__ == "__main__":
    raise SystemExit(main())
