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
from drafter.provenance import relative, run_record, sha256_file, write_json
from drafter.recipe import Layers, Recipe, RecipeError, RunDocument, load_recipe, recipe_names

PROBE_PROMPTS = 64


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
    """arccos(cosine) / pi between the hidden states `size` layers apart, at the last token of each prompt, averaged."""
    import torch

    sums: list[float] = []
    for prompt in prompts:
        with torch.inference_mode():
            states = model.model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
        last = torch.stack([state[0, -1].float() for state in states])  # [layers + 1, D]; the last one is normed
        cosine = torch.cosine_similarity(last[:-size] if size else last, last[size:], dim=-1).clamp(-1, 1)
        values = (cosine.arccos() / math.pi).tolist()
        sums = [a + b for a, b in zip(sums, values, strict=True)] if sums else values
    return [value / len(prompts) for value in sums]


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
    parent = {name: sha256 for name, sha256 in source["files"].items() if name.endswith(".safetensors")}
    with tempfile.TemporaryDirectory(dir=recipe.run_dir, prefix=".student.") as temporary:
        made = Path(temporary) / "student"
        model.save_pretrained(made)
        copy_tokenizer(base, made)
        record = {
            "rule": recipe.base.layers.rule, "keep": list(keep), "base_source": source["source"],
            "base_files": parent, **measured,
        }  # fmt: skip
        write_json(made / "prune.json", record)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    run.append({
        "phase": "student", **run_record(), "keep": list(keep), "rule": recipe.base.layers.rule,
        "parent_sha256": next(iter(parent.values())) if len(parent) == 1 else parent,
        "checkpoint_sha256": sha256_file(folder / "model.safetensors"),
        "elapsed_s": round(time.perf_counter() - started_s, 1),
    })  # fmt: skip
    return {"keep": list(keep), "made": True}


def copy_tokenizer(source: Path, target: Path) -> None:
    """The tokenizer files as they are: text never goes through a second save, which may rewrite them."""
    from drafter.chat import TOKENIZER_FILES

    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument(
        "--dry-run", action="store_true", help="say which rule would choose how many layers; nothing written"
    )
    arguments = parser.parse_args(argv)
    return run_command(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe)
    if arguments.dry_run:
        report = {"rule": recipe.base.layers.rule, "count": recipe.base.layers.count, "keep": recipe.base.layers.keep}
    else:
        report = prune(recipe)
    folder = relative(recipe.run_dir / "student")
    print(json.dumps({"step": "prune_layers", "recipe": recipe.name, "folder": folder, **report}))


if __name__ == "__main__":
    raise SystemExit(main())
