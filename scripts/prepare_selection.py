"""Reserves prompts before any train prompt is drawn: selection, development and final.

About a fifth of every family's skeletons and one whole family per category are set aside (a hash split of templated
prompts would measure memory). Each reserved file holds every category equally, and in each category a third

    seen          other prompts of skeletons that the train steps also use
    new_skeleton  skeletons that no train step uses, of families that they do use
    new_family    a family that no train step uses

Selection chooses checkpoints and codecs, development is what tables report, final is opened by validate.py alone.
prompts/reserved.json names what is set aside; every train step reads it and refuses to run without it.
"""

import itertools
import random
from collections.abc import Callable

from drafter.corpus import Counters, duplicate_key
from drafter.provenance import read_json, write_json
from drafter.recipe import Recipe
from scripts._prompts import (
    PROMPT_TOKENS,
    Step,
    draw_rows,
    equal_parts,
    estimate,
    new_cleaner,
    report,
    reserved_path,
    run_script,
    skeleton_name,
    tokenizer_files,
)
from scripts.families import FAMILIES

RESERVED_SPLITS = ("selection", "development", "final")
NOVELTIES = ("seen", "new_skeleton", "new_family")


def reserved_skeletons(recipe: Recipe) -> list[str]:
    """Names of the skeletons set aside: the declared share of each family, one at least, never all of them."""
    held_out = set(recipe.splits.held_out_families.values())
    names = []
    for family in itertools.chain.from_iterable(FAMILIES.values()):
        total = len(family.skeletons)
        if family.name in held_out or total < 2:
            continue
        count = min(max(1, round(recipe.splits.skeleton_share * total)), total - 1)
        # A seed of its own for each family: a family added later does not move the choice in the others.
        chosen = random.Random(f"{recipe.splits.seed}/{family.name}").sample(range(total), count)
        names += [skeleton_name(family, skeleton) for skeleton in sorted(chosen)]
    return names


def checked_categories(recipe: Recipe) -> list[str]:
    """Categories with a held-out family; ValueError where a category or family does not exist or is the only one."""
    for category, held_out in recipe.splits.held_out_families.items():
        where = f"splits.held_out_families.{category}"
        names = [family.name for family in FAMILIES.get(category, ())]
        if held_out not in names:
            raise ValueError(f"{where}: no family {held_out!r}; this category has: {', '.join(names) or 'none'}")
        if len(names) < 2:
            raise ValueError(f"{where}: {held_out!r} is the only family of its category; train would have none")
    return list(recipe.splits.held_out_families)


def novelty_rules(recipe: Recipe, skeletons: set[str]) -> dict[str, Callable[[object, int], bool]]:
    held_out = set(recipe.splits.held_out_families.values())
    return {
        "seen": lambda family, k: family.name not in held_out and skeleton_name(family, k) not in skeletons,
        "new_skeleton": lambda family, k: skeleton_name(family, k) in skeletons,
        "new_family": lambda family, k: family.name in held_out,
    }


def draw_split(recipe, split, categories, skeletons, cleaner, exclude_ids) -> list[dict]:
    """The rows of one reserved split: categories in equal parts, each in thirds by novelty."""
    rules = novelty_rules(recipe, skeletons)
    base_seed = 10_000 * recipe.splits.seed + 100 * RESERVED_SPLITS.index(split)
    rows = []
    for category, total in zip(categories, equal_parts(getattr(recipe.splits, split), len(categories)), strict=True):
        for index, (novelty, count) in enumerate(zip(NOVELTIES, equal_parts(total, len(NOVELTIES)), strict=True)):
            rows += draw_rows(
                cleaner, category, count, base_seed + index, split, allow=rules[novelty], exclude_ids=exclude_ids
            )
    return rows


def make(recipe: Recipe, dry_run: bool) -> dict:
    counts = {split: getattr(recipe.splits, split) for split in RESERVED_SPLITS}
    categories, skeletons = checked_categories(recipe), reserved_skeletons(recipe)
    held_out = sorted(recipe.splits.held_out_families.values())
    summary = {"step": "prepare_selection", "recipe": recipe.name, "skeletons": len(skeletons), "families": held_out}
    if dry_run:
        for split, count in counts.items():
            thirds = ", ".join(NOVELTIES)
            print(f"{split}.jsonl: {count} prompts in {len(categories)} categories, a third each {thirds}")
        files = {f"{split}.jsonl": count for split, count in counts.items()}
        return {**summary, "dry_run": True, "files": files, **estimate(sum(counts.values()), PROMPT_TOKENS)}

    splits = recipe.splits.model_dump(mode="json")
    # Rows of a corpus are reserved here too, by near-duplicate cluster, once a recipe declares how many.
    parameters = {"splits": splits, "caps": recipe.caps.model_dump(mode="json"), "thinking": recipe.chat.thinking}
    steps = {
        split: Step(recipe, split, "prepare_selection", {**parameters, "split": split}, tokenizer_files(recipe))
        for split in RESERVED_SPLITS
    }
    manifests = {split: step.current() for split, step in steps.items()}
    path = reserved_path(recipe)
    if all(manifests.values()) and path.exists():
        document, keys = read_json(path), {split: step.manifest["key"] for split, step in steps.items()}
        if document["keys"] == keys:
            return {**summary, "files": [report(manifest, True) for manifest in manifests.values()]}

    # Reserved.json goes first and comes back last: while it is missing no train step runs on half a reservation.
    path.unlink(missing_ok=True)
    cleaner = new_cleaner(recipe)
    exclude_ids: set[str] = set()
    document = {"format": 1, "recipe": recipe.name, "splits": splits, "skeletons": skeletons, "families": held_out}
    document |= {"keys": {}, "sha256": {}, "ids": {}, "duplicate_keys": []}
    reports = []
    for split, step in steps.items():
        rows = draw_split(recipe, split, categories, set(skeletons), cleaner, exclude_ids)
        manifest = step.write(rows, cleaner.counters.as_dict)
        cleaner.counters = Counters()  # each file's manifest counts its own rows
        reports.append(report(manifest, False))
        document["keys"][split] = manifest["key"]
        document["sha256"][split] = manifest["output"]["sha256"]
        document["ids"][split] = [row["id"] for row in rows]
        document["duplicate_keys"] += [duplicate_key(row["messages"]).hex() for row in rows]
    write_json(path, document)
    return {**summary, "files": reports}


def main(argv: list[str] | None = None) -> int:
    return run_script(make, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
