"""Reserves prompts before any train prompt is drawn: selection, development and final.

About a fifth of every family's skeletons and one whole family per category are set aside (a hash split of templated
prompts would measure memory). Each reserved file holds every category equally, and in each category a third

    seen          other prompts of skeletons that the train steps also use
    new_skeleton  skeletons that no train step uses, of families that they do use
    new_family    a family that no train step uses

Where the recipe names corpora, all their rows are first clustered by near-duplicates (scripts/_corpora.py), and
`splits.corpus_share` of each reserved file is drawn from the clusters, equally over the corpora's categories. No train
step uses a row that is near to a reserved one.

Selection chooses checkpoints and codecs, development is what tables report, final is opened by validate.py alone.
prompts/reserved.json names what is set aside; every train step reads it and refuses to run without it.
"""

import itertools
import math
import random
from collections.abc import Callable

from drafter.corpus import Cleaner, Counters, duplicate_key
from drafter.duplicates import NEAR_NGRAM, NearIndex, ngrams, pack_hashes, user_text
from drafter.provenance import read_json, write_json
from drafter.recipe import CATEGORIES, Recipe
from scripts._corpora import rows_by_id, survey, survey_estimate, verified_files
from scripts._prompts import (
    PROMPT_TOKENS,
    Against,
    Step,
    corpora_key,
    draw_rows,
    equal_parts,
    estimate,
    near_rule,
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


def corpus_counts(recipe: Recipe) -> dict[str, dict[str, int]]:
    """{split: {category: rows to be drawn from the corpora}}."""
    names = sorted({corpus.category for corpus in recipe.corpora}, key=CATEGORIES.index)
    totals = {split: round(recipe.splits.corpus_share * getattr(recipe.splits, split)) for split in RESERVED_SPLITS}
    return {
        split: dict(zip(names, equal_parts(total, len(names)), strict=True)) if names else {}
        for split, total in totals.items()
    }


class Candidates:
    """Rows that stand for clusters of near-duplicates, drawn by a seeded choice among all clusters of a category.

    A third more are fetched than are wanted: some are over the token cap, or near to a row that is reserved already.
    """

    def __init__(self, recipe: Recipe, heads: dict[str, list[int]]) -> None:
        counts = corpus_counts(recipe)
        self.waiting: dict[str, list[int]] = {}
        for category in counts["selection"]:
            wanted = sum(of_split[category] for of_split in counts.values())
            rng = random.Random(f"{recipe.splits.seed}/corpora/{category}")
            have = heads.get(category, [])
            self.waiting[category] = rng.sample(have, min(len(have), math.ceil(4 / 3 * wanted) + 8 if wanted else 0))
        self.rows = rows_by_id(recipe, set().union(*self.waiting.values())) if any(self.waiting.values()) else {}

    def draw(self, category: str, count: int, cleaner: Cleaner, split: str) -> list[dict]:
        """`count` rows, each once; ValueError where the clusters do not suffice."""
        rows = []
        while len(rows) < count and self.waiting[category]:
            row = self.rows[self.waiting[category].pop(0)]
            if cleaner(row["messages"]) is not None:
                rows.append({**row, "split": split})
        if len(rows) < count:
            raise ValueError(
                f"only {len(rows)} of {count} {category} rows for {split} in the corpora; lower splits.corpus_share"
            )
        return rows


def draw_split(recipe, split, categories, skeletons, candidates, cleaner, exclude_ids) -> list[dict]:
    """The rows of one reserved split: authored ones, categories in equal parts, each in thirds by novelty; then those
    of the corpora."""
    rules = novelty_rules(recipe, skeletons)
    base_seed = 10_000 * recipe.splits.seed + 100 * RESERVED_SPLITS.index(split)
    rows, from_corpora = [], corpus_counts(recipe)[split]
    authored = getattr(recipe.splits, split) - sum(from_corpora.values())
    for category, total in zip(categories, equal_parts(authored, len(categories)), strict=True):
        for index, (novelty, count) in enumerate(zip(NOVELTIES, equal_parts(total, len(NOVELTIES)), strict=True)):
            rows += draw_rows(
                cleaner, category, count, base_seed + index, split, allow=rules[novelty], exclude_ids=exclude_ids
            )
    for category, count in from_corpora.items():
        rows += candidates.draw(category, count, cleaner, split)
    return rows


def make(recipe: Recipe, dry_run: bool, against: Against | None) -> dict:
    counts = {split: getattr(recipe.splits, split) for split in RESERVED_SPLITS}
    categories, skeletons = checked_categories(recipe), reserved_skeletons(recipe)
    held_out = sorted(recipe.splits.held_out_families.values())
    summary = {"step": "prepare_selection", "recipe": recipe.name, "skeletons": len(skeletons), "families": held_out}
    if dry_run:
        for split, count in counts.items():
            thirds = ", ".join(NOVELTIES)
            corpus_rows = sum(corpus_counts(recipe)[split].values())
            print(f"{split}.jsonl: {count - corpus_rows} authored prompts in {len(categories)} categories, a third "
                  f"each {thirds}; {corpus_rows} rows of corpora")  # fmt: skip
        files = {f"{split}.jsonl": count for split, count in counts.items()}
        plan = estimate(sum(counts.values()), PROMPT_TOKENS)
        return {**summary, "dry_run": True, "files": files, **survey_estimate(recipe, plan)}

    splits = recipe.splits.model_dump(mode="json")
    parameters = {"splits": splits, "caps": recipe.caps.model_dump(mode="json"), "thinking": recipe.chat.thinking}
    parameters |= {"history": recipe.history, "corpora": corpora_key(recipe)}
    inputs = [*tokenizer_files(recipe), *verified_files(recipe, list(recipe.corpora))]
    steps = {split: Step(recipe, split, {**parameters, "split": split}, inputs, against) for split in RESERVED_SPLITS}
    manifests = {split: step.current() for split, step in steps.items()}
    path = reserved_path(recipe)
    if all(manifests.values()) and path.exists():
        document, keys = read_json(path), {split: step.manifest["key"] for split, step in steps.items()}
        if document["keys"] == keys:
            return {**summary, "files": [report(manifest, True) for manifest in manifests.values()]}

    # Reserved.json goes first and comes back last: while it is missing no train step runs on half a reservation.
    path.unlink(missing_ok=True)
    surveyed = survey(recipe)
    candidates = Candidates(recipe, surveyed.heads)
    cleaner, reserved = new_cleaner(recipe, against), NearIndex()
    cleaner.rules.append(near_rule(reserved))  # a split holds nothing near to a row of the splits before it
    exclude_ids: set[str] = set()
    document = {"format": 1, "recipe": recipe.name, "splits": splits, "skeletons": skeletons, "families": held_out}
    document |= {"corpora": corpora_key(recipe), "survey": surveyed.counters}
    document |= {"near_duplicates": pack_hashes(surveyed.near_duplicates)}
    document |= {"keys": {}, "sha256": {}, "ids": {}, "ngrams": {}, "duplicate_keys": []}
    reports = []
    for split, step in steps.items():
        rows = draw_split(recipe, split, categories, set(skeletons), candidates, cleaner, exclude_ids)
        manifest = step.write(rows, cleaner.counters.as_dict)
        cleaner.counters = Counters()  # each file's manifest counts its own rows
        reports.append(report(manifest, False))
        document["keys"][split] = manifest["key"]
        document["sha256"][split] = manifest["output"]["sha256"]
        document["ids"][split] = [row["id"] for row in rows]
        document["duplicate_keys"] += [duplicate_key(row["messages"]).hex() for row in rows]
        grams = [ngrams(user_text(row["messages"]), NEAR_NGRAM) for row in rows]
        document["ngrams"][split] = [pack_hashes(of_row) for of_row in grams]
        for of_row in grams:
            reserved.add(of_row)
    write_json(path, document)
    return {**summary, "files": reports}


def main(argv: list[str] | None = None) -> int:
    return run_script(make, __doc__, argv)


if __name__ == "__main__":
    raise SystemExit(main())
