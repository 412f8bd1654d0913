"""Measures drafters against the teacher's stored answers: agreement, tau at k = 4, 8, 16, curves, intervals.

    python -m scripts.evaluate --recipe smollm2-quick prompt_lookup untrained runs/smollm2-quick/distill model
    python -m scripts.evaluate --recipe smollm2-quick --split selection packed_qat=runs/smollm2-quick/packed_qat
    python -m scripts.evaluate --recipe smollm2-quick --prompts my_prompts.jsonl model       # any file of your own
    python -m scripts.evaluate --recipe smollm2-quick --replay 64 model                      # with real drafts too

A TARGET is a checkpoint folder (config.json, model.safetensors), a packed model (manifest.json), `untrained` (the
pruned student), `prompt_lookup`, or NAME=PATH to name the stage. All share one process, and the rows are read once.

Needs the teacher's answers (scripts.generate_teacher), or, for --prompts, the teacher itself: its answers are then
made once and kept. Prints a table, then one JSON line (a result file); writes it to runs/RECIPE/NAME.json, NAME being
that of --record or `evaluation`. --dry-run estimates memory and time, and says what is missing.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from drafter import acceptance, results
from drafter import estimate as gpu_estimate
from drafter.answers import CHARS_PER_ID, answered_file, read_conversations
from drafter.console import progress_bar, run_command
from drafter.decoding import greedy_decode, load_causal_lm
from drafter.engine import KERNELS, DraftEngine, DraftRequest, TransformersEngine
from drafter.provenance import read_json, relative, sha256_file, write_json
from drafter.recipe import Recipe, RunDocument, load_recipe
from drafter.scoring import (
    FORWARD_FLOPS_PER_S,
    Score,
    StageResult,
    evaluate_prompt_lookup,
    replay_parity,
    score_forward,
    score_model,
    summarise,
)
from drafter.teacher_data import TeacherRow, read_shards, shard_paths
from drafter.weights import compute_dtype
from model_io import load_model
from scripts._prompts import PROMPT_TOKENS

SPLITS = ("development", "selection")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Whose training time a packed stage shows; the others have their phase's own name, or were not trained at all.
PHASE_OF = {"packed": "adapter", "packed_qat": "qat"}
VARIED = ("copy_policy", "draft_vocabulary")  # of a DraftEngine, also parameters of score_forward: None is without
UNTRAINED = ("untrained", "packed_ptq")

# ---------------------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    stage: str
    kind: str  # prompt_lookup | checkpoint | packed
    path: Path | None = None
    without: frozenset[str] = frozenset()  # documents of a packed model that are left out: see VARIED


def variants(target: Target, args: argparse.Namespace) -> list[Target]:
    """The target as asked for: with what VARIED names, without it, or both ways, one behind the other."""
    found = [target]
    for name in VARIED if target.kind == "packed" else ():
        off = [replace(one, without=one.without | {name}) for one in found]
        if (asked := getattr(args, name)) == "both":
            found = [replace(one, stage=f"{one.stage}-no-{name}") for one in off] + found
        elif asked == "off":
            found = off
    return found


def parse_target(text: str, recipe: Recipe) -> Target:
    """A TARGET of the command line. ValueError says what the folder lacks and which command makes it."""
    name, equals, given = text.rpartition("=")
    if text == "prompt_lookup":
        return Target(text, "prompt_lookup")
    path = recipe.run_dir / "student" if given == "untrained" else Path(given)
    stage = name if equals else "untrained" if path.name == "student" else path.resolve().name
    if (path / "manifest.json").exists():
        return Target(stage if equals else "packed", "packed", path)
    if (path / "config.json").exists() and (path / "model.safetensors").exists():
        return Target(stage, "checkpoint", path)
    if (path / "adapter.safetensors").exists():
        raise ValueError(
            f"{relative(path)} holds an adapter, which alone is no drafter: pack it with its base "
            f"(python -m scripts.pack_model --recipe {recipe.name}) and evaluate the packed folder"
        )
    maker = "prune_layers" if given == "untrained" else "pack_model (a packed model) or train.py (a checkpoint)"
    raise ValueError(f"{relative(path)} is neither a checkpoint nor a packed model; made by {maker}")


@dataclass(frozen=True)
class Opened:
    """A target ready to score; `draft_batch` makes real drafts of at most k ids for a list of prefixes."""

    layers: int
    score: Callable[..., list[Score]]  # (rows, with_gaps=, progress=)
    draft_batch: Callable[[list[list[int]], int], list[list[int]]]


def open_target(
    target: Target,
    recipe: Recipe,
    dtype: torch.dtype,
    engine: str = "own",
    kernel: str = "auto",
) -> Opened:
    """Loads through the loader and the engine that the server uses; checkpoints through the plain decode loop."""
    stop_ids, num_ids = recipe.base.stop_ids, recipe.base.num_ids

    def by_model(model: Any) -> Callable[..., list[Score]]:
        batch_tokens = recipe.evaluation.batch_tokens
        return functools.partial(score_model, model, num_ids=num_ids, batch_tokens=batch_tokens)

    if target.kind == "checkpoint":
        model = load_causal_lm(target.path, compute_dtype(dtype), stop_ids=stop_ids)

        def by_loop(prefixes: list[list[int]], k: int) -> list[list[int]]:
            return [row.tokens for row in greedy_decode(model, prefixes, k, stop_ids=stop_ids, num_ids=num_ids)]

        return Opened(model.config.num_hidden_layers, by_model(model), by_loop)

    loaded = load_model(target.path, form="packed" if engine == "own" else "merged", dtype=dtype)
    packed = {"thinking": loaded.chat.thinking, "stop_ids": sorted(loaded.stop_ids), "num_ids": loaded.num_ids}
    declared = {"thinking": recipe.chat.thinking, "stop_ids": sorted(stop_ids), "num_ids": num_ids}
    if packed != declared:
        raise ValueError(f"{relative(target.path)} was packed with {packed}, the recipe says {declared}")
    if engine == "own":
        drafter = DraftEngine(loaded, kernel=kernel)
        for name in target.without:
            setattr(drafter, name, None)
        served = {name: getattr(drafter, name) for name in VARIED}
        score = functools.partial(score_forward, drafter.forward, **served)
    else:
        drafter = TransformersEngine(loaded)
        score = by_model(loaded.model)

    def by_engine(prefixes: list[list[int]], k: int) -> list[list[int]]:
        return [draft.tokens for draft in drafter.draft([DraftRequest(prefix, k) for prefix in prefixes])]

    return Opened(loaded.model.config.num_hidden_layers, score, by_engine)


# ---------------------------------------------------------------------------- rows


def split_rows(recipe: Recipe, split: str) -> list[TeacherRow]:
    """The teacher's answers of a reserved split; ValueError names the command that makes them."""
    paths = shard_paths(recipe.cache_dir / "teacher", split)
    if not paths:
        raise ValueError(
            f"no answers of the teacher for {split} rows in data/cache/{recipe.name}/teacher; run "
            f"`python -m scripts.generate_teacher --recipe {recipe.name}` first"
        )
    return read_shards(paths)


def refuse_final(path: Path, recipe: Recipe) -> None:
    """ValueError for the recipe's final prompts, under whatever name."""
    final = recipe.cache_dir / "prompts" / "final.jsonl"
    if final.exists() and sha256_file(path) == sha256_file(final):
        raise ValueError(
            f"{relative(path)} holds the final prompts: only scripts.validate opens them, once per archive"
        )


def own_rows(path: Path, recipe: Recipe) -> list[TeacherRow]:
    """Rows of a user's prompts file, with the teacher's answers."""
    refuse_final(path, recipe)
    with progress_bar(None, "teacher's answers", "tok") as bar:
        return answered_file(path, recipe, progress=bar.update)


def train_families(recipe: Recipe) -> frozenset[str]:
    """The FAMILY/SKELETON names that occur in training rows: reads two columns, never the answers."""
    names: set[str] = set()
    for path in sorted((recipe.cache_dir / "teacher").glob("*.parquet")):
        table = pq.read_table(path, columns=["family", "split"])
        pairs = zip(table["family"].to_pylist(), table["split"].to_pylist(), strict=True)
        names.update(family for family, split in pairs if split == "train")
    return frozenset(names)


def thin_out(rows: Sequence[TeacherRow], limit: int | None) -> list[TeacherRow]:
    """`limit` rows evenly spaced over the file, which is ordered by category: the first ones would all be chats."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[at * len(rows) // limit] for at in range(limit)]


# ---------------------------------------------------------------------------- stages


def training_seconds(recipe: Recipe, stage: str) -> float | None:
    """Seconds of the phase that made a stage, from the run's phase_log; 0 where nothing was trained, None unknown."""
    if stage in UNTRAINED:
        return 0.0
    path = recipe.run_dir / "architecture.json"
    entry = RunDocument.read(path).finished(PHASE_OF.get(stage, stage)) if path.exists() else None
    return None if entry is None else entry["elapsed_s"]


def evaluate_target(
    target: Target,
    rows: Sequence[TeacherRow],
    recipe: Recipe,
    *,
    families: frozenset[str],
    dtype: torch.dtype = torch.bfloat16,
    replay: int = 0,
    engine: str = "own",
    kernel: str = "auto",
) -> StageResult:
    """One stage on the rows; with `replay`, its record holds the parity of that many rows with real drafts."""
    evaluation = recipe.evaluation
    summary = {
        "ks": evaluation.draft_lengths,
        "train_families": families,
        "resamples": evaluation.bootstrap_resamples,
    }
    if target.kind == "prompt_lookup":
        result = evaluate_prompt_lookup(rows, **summary)
        result.record["replay"] = None
        return result
    opened = open_target(target, recipe, dtype, engine, kernel)
    with progress_bar(len(rows), target.stage, "row") as bar:
        scores = opened.score(rows, with_gaps=replay > 0, progress=bar.update)
    result = summarise(
        target.stage,
        rows,
        scores,
        layers=opened.layers,
        seconds=training_seconds(recipe, target.stage),
        **summary,
    )
    result.record["replay"] = None
    if replay:
        chosen = thin_out(range(len(rows)), replay)
        k = max(evaluation.draft_lengths)
        result.record["replay"] = replay_parity(
            [rows[at] for at in chosen],
            [scores[at] for at in chosen],
            k,
            lambda prefixes: opened.draft_batch(prefixes, k),
        )
    return result


def evaluate_targets(
    targets: Sequence[Target], rows: Sequence[TeacherRow], recipe: Recipe, **options: Any
) -> list[dict[str, Any]]:
    """Records of all stages, each with its gain over the stage before it, paired on the same prompts."""
    near_ties = acceptance.near_tie_share([row.top2_gaps for row in rows])
    records, before = [], None
    for target in targets:
        result = evaluate_target(target, rows, recipe, **options)
        top = max(recipe.evaluation.draft_lengths)
        ours = (result.counts[top].emitted, result.counts[top].rounds)
        gain = None
        if before is not None:
            resamples = recipe.evaluation.bootstrap_resamples
            found = acceptance.paired_difference(ours, before[1], resamples=resamples)
            if found is not None:
                difference, interval = found
                gain = {"over": before[0], "tau": round(difference, 4), "interval": [round(x, 4) for x in interval]}
        result.record["gain"] = gain
        result.record["near_tie_share"] = None if near_ties is None else round(near_ties, 4)
        records.append(result.record)
        before = (target.stage, ours)
    return records


# ---------------------------------------------------------------------------- output


def print_tables(records: Sequence[dict[str, Any]]) -> None:
    print(results.markdown_table(records))
    categories = {name: f"by_category.{name}" for name in records[0]["by_category"]}
    print("\nτ@16 by category\n" + results.markdown_table(records, {"stage": "stage", **categories}))
    first = records[0]
    share = first["near_tie_share"]
    print(f"\n{first['rows']} rows, {first['tokens']} answer tokens", end="")
    print("" if share is None else f", near-ties of the teacher {100 * share:.2f} %")
    for record in records:
        if record["copied_share"]:
            print(f"{record['stage']}: {100 * record['copied_share']:.1f} % of the tokens are copied without the model")
        if parity := record["replay"]:
            print(
                f"replay of {parity['rows']} rows, {record['stage']}: tau {parity['tau_replay']} against "
                f"{parity['tau_bits']} by teacher forcing; {parity['equal']} rows equal, {parity['near_tie']} equal "
                f"up to near-ties, {parity['different']} different"
            )


# ---------------------------------------------------------------------------- --dry-run

MEMORY_BYTES = 800_000_000  # Python with torch and transformers
HEAD_ROWS = 512  # positions whose logits exist at one time (drafter.scoring.score_model)


def shape_of(folder: Path) -> dict[str, int]:
    """Weights that a token passes, V and the MLP's width, from config.json (checkpoints and packed models hold one)."""
    config = read_json(folder / "config.json")
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * config["num_key_value_heads"])  # q and o; k and v
    weights = config["num_hidden_layers"] * (attention + 3 * hidden * width) + config["vocab_size"] * hidden
    return {"weights": weights, "vocabulary": config["vocab_size"], "width": width}


def expected_rows(recipe: Recipe, args: argparse.Namespace, missing: list[str]) -> tuple[int | None, int | None, int]:
    """(rows, tokens through the model, tokens that the teacher may have to write); bounds where rows are not there.

    Tokens of rows that do not exist yet: PROMPT_TOKENS a prompt, or a third of its characters in a file of your own,
    and max_new_tokens an answer.
    """
    longest = recipe.generation.max_new_tokens
    if args.prompts is not None:
        if not args.prompts.exists():
            missing.append(f"no file {relative(args.prompts)}")
            return None, None, 0
        refuse_final(args.prompts, recipe)
        found = read_conversations(args.prompts, max_chars=recipe.serving.context * CHARS_PER_ID)
        turns = [turn for one in found for turn in one.pending]
        rows = sum(turn["role"] == "user" for turn in turns)
        return rows, sum(len(turn["content"]) // 3 for turn in turns) + rows * longest, rows * longest
    try:
        rows = thin_out(split_rows(recipe, args.split), args.max_rows)
    except ValueError as error:
        missing.append(str(error))
        count = getattr(recipe.splits, args.split)
        count = min(count, args.max_rows or count)
        return count, count * (PROMPT_TOKENS + longest), 0
    return len(rows), sum(len(row.prompt_ids) + len(row.continuation_ids) for row in rows), 0


def plan(recipe: Recipe, args: argparse.Namespace) -> dict[str, Any]:
    """What a run would do; whatever it lacks is listed under `missing`. Reads configurations and rows, no weights.

    Time, without the teacher's: 2 FLOPs a weight and token at FORWARD_FLOPS_PER_S, summed over the targets. Memory, of
    the largest: its weights, HEAD_ROWS rows of logits over V ids, four blocks [batch_tokens, MLP width], MEMORY_BYTES.
    Null where a target is not there.
    """
    missing: list[str] = []
    rows, tokens, generated = expected_rows(recipe, args, missing)
    targets, item_bytes = [], DTYPES[args.dtype].itemsize
    seconds, memory_bytes = 0.0, MEMORY_BYTES
    for text in args.targets:
        try:
            target = parse_target(text, recipe)
        except ValueError as error:
            missing.append(str(error))
            targets.append({"stage": text, "kind": None})
            continue
        targets.append({"stage": target.stage, "kind": target.kind})
        if target.path is not None and (target.path / "config.json").exists():
            shape = shape_of(target.path)
            targets[-1]["weights"] = shape["weights"]
            blocks = HEAD_ROWS * shape["vocabulary"] + 4 * recipe.evaluation.batch_tokens * shape["width"]
            memory_bytes = max(memory_bytes, MEMORY_BYTES + item_bytes * (shape["weights"] + blocks))
            seconds += 2 * shape["weights"] * (tokens or 0) / FORWARD_FLOPS_PER_S
    base = recipe.cache_dir / "models" / "base"
    gpu = gpu_estimate.forward(recipe, recipe.base, base, len(targets) * (tokens or 0))
    gpu_estimate.print_lines(gpu)
    unknown = tokens is None or any(target["kind"] is None for target in targets)
    return {
        "step": "evaluate",
        "recipe": recipe.name,
        "dry_run": True,
        "targets": targets,
        "rows": rows,
        "tokens": tokens,
        "teacher_tokens_at_most": generated,
        "memory_bytes": None if unknown else memory_bytes,
        "estimated_s": None if unknown else round(seconds),
        "missing": missing,
        "gpu": gpu,
    }


# ---------------------------------------------------------------------------- command line


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("targets", nargs="+", metavar="TARGET", help="a folder, `untrained`, `prompt_lookup`, or NAME=PATH")
    add("--recipe", required=True, help="a recipe of architecture.json, for example smollm2-quick")
    add("--split", choices=SPLITS, default=SPLITS[0], help="decide on selection rows, report development rows")
    add("--prompts", type=Path, metavar="FILE", help="a JSONL file (messages, turns or prompt) instead of a split")
    add("--max-rows", type=int, metavar="N", help="an evenly spaced part of the rows, for a quick look")
    add("--replay", type=int, default=0, metavar="N", help="compare N rows with real drafts; 64 is plenty")
    add(
        "--engine",
        choices=("own", "transformers"),
        default="own",
        help="of packed models: what the server runs, or not",
    )
    add("--kernel", choices=KERNELS, default="auto", help="of the own engine; plain needs no compiler")
    how = "as the own engine serves it, as if the archive had none, or the two as two stages"
    for name in VARIED:
        add(f"--{name.replace('_', '-')}", choices=("on", "off", "both"), default="on", help=how)
    add("--dtype", choices=tuple(DTYPES), default="bf16", help="fp32 makes replay exact, several times slower")
    add("--output", type=Path, metavar="FILE", help="result file (default runs/RECIPE/NAME.json)")
    add("--record", metavar="NAME", help="also keep it as data/results/NAME.json and refresh the README")
    add("--dry-run", action="store_true", help="rows, tokens, memory, time, what is missing; opens no model")
    return made


def run(args: argparse.Namespace, argv: Sequence[str] | None) -> None:
    recipe = load_recipe(args.recipe)
    for flag, value, least in (("--max-rows", args.max_rows, 1), ("--replay", args.replay, 0)):
        if value is not None and value < least:
            raise ValueError(f"{flag} must be at least {least}, not {value}")
    name = args.record or (args.output.stem if args.output else "evaluation")
    if not results.NAME.fullmatch(name):  # before the work, not behind it
        raise ValueError(f"the result's name must be lower-case letters, digits, - and _, not {name!r}")
    if args.dry_run:
        print(json.dumps(plan(recipe, args)))
        return
    targets = [one for text in args.targets for one in variants(parse_target(text, recipe), args)]
    if len({target.stage for target in targets}) < len(targets):
        raise ValueError("two targets have the same stage name; tell them apart with NAME=PATH")
    rows = own_rows(args.prompts, recipe) if args.prompts is not None else split_rows(recipe, args.split)
    rows = thin_out(rows, args.max_rows)
    started_s = time.perf_counter()
    records = evaluate_targets(
        targets,
        rows,
        recipe,
        families=train_families(recipe),
        dtype=DTYPES[args.dtype],
        replay=args.replay,
        engine=args.engine,
        kernel=args.kernel,
    )
    print_tables(records)
    print(f"{len(targets)} stages in {time.perf_counter() - started_s:.0f} s")
    command = ["python", "-m", "scripts.evaluate", *(sys.argv[1:] if argv is None else argv)]
    document = results.build(name, records, command)
    write_json(args.output or recipe.run_dir / f"{name}.json", document)
    if args.record:
        print(f"recorded in {relative(results.record(document))}")
    print(json.dumps(document, ensure_ascii=False, allow_nan=False))
    # In fp32 equality is exact, so a row that differs is a fault; in bf16 the width of a product moves more than ties.
    different = [record["stage"] for record in records if record["replay"] and record["replay"]["different"]]
    if different and args.dtype == "fp32":
        raise ValueError(f"real drafts differ from the teacher-forced pass in fp32, for: {', '.join(different)}")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(lambda: run(args, argv))


if __name__ == "__main__":
    raise SystemExit(main())
