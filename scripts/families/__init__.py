"""Authored, seeded prompt families: the synthetic part of every recipe.

A category (chat, math, ...) holds families; a family holds skeletons, `str.format` templates whose slots one `fill`
function supplies. One prompt = one skeleton x one filling. Skeletons, not prompts, are what evaluation reserves: two
fillings of one skeleton are near-duplicates, and a split by prompt would measure memory.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from importlib import import_module

from drafter.corpus import prompt_id

CATEGORIES: tuple[str, ...] = (
    "chat", "math", "code", "rewrite", "constraints", "summarise", "extract", "multilingual",
)

# A skeleton is given up after this many fillings in a row that were all drawn before. While a share f of its
# fillings is still new, that is bad luck of probability (1 - f)^64: 1e-3 at f = 10 %, 4 % at f = 5 %.
TRIES_PER_PROMPT = 64


@dataclass(frozen=True)
class Family:
    """Skeletons that share slots. `fill(rng)` returns a value for every slot that any of them uses."""

    name: str
    category: str
    skeletons: tuple[str, ...]
    fill: Callable[[random.Random], Mapping[str, str]]
    system: str | None = None

    def messages(self, skeleton_index: int, rng: random.Random) -> list[dict[str, str]]:
        """One filled prompt: an optional system turn, then one user turn."""
        user = {"role": "user", "content": self.skeletons[skeleton_index].format(**self.fill(rng))}
        return [{"role": "system", "content": self.system}, user] if self.system else [user]


# The category modules import Family from here, so they are read after it.
FAMILIES: dict[str, tuple[Family, ...]] = {
    category: import_module(f"{__name__}.{category}").FAMILIES for category in CATEGORIES
}

# ---------------------------------------------------------------------------------------------------- drawing


def always(family: Family, skeleton_index: int) -> bool:
    """The filter of draw() that reserves nothing."""
    return True


def draw(
    category: str,
    count: int,
    seed: int,
    *,
    allow: Callable[[Family, int], bool] = always,
    exclude_ids: Set[str] = frozenset(),
) -> list[dict]:
    """Draw `count` distinct prompt rows of a category.

    Families take turns, and within a family its skeletons take turns, both in an order shuffled by the seed; so
    counts per family differ by at most one while no family is used up. `count` decides nothing but where the
    drawing stops: a smaller count gives a prefix of a larger one, so a recipe that grows keeps its answers.

    allow(family, skeleton_index) -> bool says which skeletons may be used; no row's id is in `exclude_ids`.
    Raises ValueError when the allowed skeletons cannot yield that many distinct prompts.
    """
    if category not in FAMILIES:
        raise ValueError(f"unknown category {category!r}; known: {', '.join(CATEGORIES)}")
    waiting = [_Turns(family, seed, allow) for family in FAMILIES[category]]
    _rng(seed, category).shuffle(waiting)
    seen = set(exclude_ids)
    rows: list[dict] = []
    while len(rows) < count:
        waiting = [turns for turns in waiting if turns.skeletons]
        if not waiting:
            raise ValueError(
                f"synthetic prompts of category {category!r}: {count} asked, {len(rows)} possible from the "
                f"allowed skeletons ({len(exclude_ids)} ids excluded). Lower this category's count in "
                f"architecture.json to {len(rows)} or less, or reserve fewer skeletons for evaluation."
            )
        for turns in waiting:
            row = turns.next_row(seen)
            if row is not None:
                rows.append(row)
                seen.add(row["id"])
    return rows[:count]


class _Turns:
    """The allowed skeletons of one family, taken in turn; a skeleton that yields nothing new is dropped."""

    def __init__(self, family: Family, seed: int, allow: Callable[[Family, int], bool]):
        self.family = family
        self.skeletons = [i for i in range(len(family.skeletons)) if allow(family, i)]
        _rng(seed, family.category, family.name).shuffle(self.skeletons)
        # One generator a skeleton: reserving one leaves the fillings of the others as they were.
        self.rngs = {i: _rng(seed, family.category, family.name, i) for i in self.skeletons}

    def next_row(self, seen: Set[str]) -> dict | None:
        """The next prompt whose id is not in `seen`; None once every skeleton is used up."""
        while self.skeletons:
            index = self.skeletons.pop(0)
            for _ in range(TRIES_PER_PROMPT):
                messages = self.family.messages(index, self.rngs[index])
                row_id = prompt_id(messages)
                if row_id not in seen:
                    self.skeletons.append(index)
                    return {
                        "id": row_id,
                        "source": "synthetic",
                        "category": self.family.category,
                        "family": f"{self.family.name}/{index:02d}",
                        "split": "",
                        "messages": messages,
                    }
        return None


def _rng(*key: object) -> random.Random:
    """A generator that depends on the key alone (hash() of a string changes from process to process)."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return random.Random(int.from_bytes(digest[:16], "big"))
