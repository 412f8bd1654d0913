"""How varied the prompts of a recipe are, beside a corpus: skeletons, distinct-2, compression ratio.

    python -m scripts.describe_prompts --recipe smollm2-135m
    python -m scripts.describe_prompts --recipe smollm2-135m --beside gsm8k=FILE.parquet:question --record

distinct-2 is the share of different pairs among all pairs of neighbouring words; the compression ratio is bytes over
bytes after zstd. Both change with the amount of text, so each is taken of the first SAMPLE_WORDS words of the user
turns in a seeded order. --record keeps the table in data/results/prompts.json and in data/README.md.
"""

import argparse
import json
import random
from pathlib import Path

from drafter import results
from drafter.console import run_command
from drafter.corpus import read_parquet, read_prompts
from drafter.duplicates import user_text, words
from drafter.provenance import ROOT
from drafter.recipe import Recipe, load_recipe, recipe_names
from scripts._prompts import TRAIN_STEPS, prompts_path, require

SAMPLE_WORDS, SEED, ZSTD_LEVEL = 40_000, 0, 19
DATASHEET = ROOT / "data" / "README.md"


def distinct_2(texts: list[str]) -> float:
    """Different pairs of neighbouring words over all such pairs; pairs do not cross from one text to the next."""
    pairs = [pair for text in texts for found in (words(text),) for pair in zip(found, found[1:], strict=False)]
    return len(set(pairs)) / max(1, len(pairs))


def compression_ratio(texts: list[str]) -> float:
    """Bytes of the texts, one a line, over their bytes in one zstd frame."""
    import zstandard

    data = "\n".join(texts).encode()
    return len(data) / len(zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(data))


def describe(name: str, texts: list[str], skeletons: int | None) -> dict:
    """One row of the table; the two measures are null where there are fewer than SAMPLE_WORDS words."""
    order = list(texts)
    random.Random(SEED).shuffle(order)
    counts = [len(words(text)) for text in order]
    sample, total = [], 0
    for text, count in zip(order, counts, strict=True):
        if total >= SAMPLE_WORDS:
            break
        sample.append(text)
        total += count
    enough = total >= SAMPLE_WORDS
    return {
        "prompts": name,
        "rows": len(texts),
        "distinct_rows": len(set(texts)),
        "skeletons": skeletons,
        "words_a_row": round(sum(counts) / max(1, len(texts)), 1),
        "distinct_2": round(distinct_2(sample), 4) if enough else None,
        "compression_ratio": round(compression_ratio(sample), 3) if enough else None,
    }


def table(recipe: Recipe, beside: list[str]) -> list[dict]:
    """A row for each train file of the recipe that holds rows, one for all, and one for each NAME=FILE:COLUMN."""
    pools = {
        name: read_prompts(require(prompts_path(recipe, name), recipe, script)) for name, script in TRAIN_STEPS.items()
    }
    pools = {name: rows for name, rows in pools.items() if rows} | {
        "all train prompts": [row for rows in pools.values() for row in rows]
    }
    lines = [
        describe(name, [user_text(row["messages"]) for row in rows], len({row["family"] for row in rows}))
        for name, rows in pools.items()
    ]
    for given in beside:
        name, equals, rest = given.partition("=")
        path, colon, column = rest.rpartition(":")
        if not (equals and colon):
            raise ValueError(f"--beside takes NAME=FILE.parquet:COLUMN, not {given!r}")
        lines.append(describe(name, [row[column] for row in read_parquet(Path(path), [column])], None))
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, choices=recipe_names(), help="recipe of architecture.json")
    parser.add_argument("--beside", action="append", default=[], metavar="NAME=FILE:COLUMN", help="a corpus to compare")
    parser.add_argument("--record", action="store_true", help="keep the table in data/results/ and data/README.md")
    arguments = parser.parse_args(argv)
    return run_command(lambda: _main(arguments))


def _main(arguments: argparse.Namespace) -> None:
    rows = table(load_recipe(arguments.recipe), arguments.beside)
    print(results.markdown_table(rows))
    if arguments.record:
        results.record(results.build("prompts", rows), readme=DATASHEET)
    print(json.dumps({"step": "describe_prompts", "recipe": arguments.recipe, "rows": rows}))


if __name__ == "__main__":
    raise SystemExit(main())
