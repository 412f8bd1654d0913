"""The synthetic prompt families: rich enough, complete, reproducible, and reserved by skeleton."""

import collections
import hashlib
import itertools
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drafter import results
from drafter.corpus import prompt_id
from drafter.recipe import load_recipe
from scripts import describe_prompts
from scripts.families import CATEGORIES, FAMILIES, draw
from scripts.make_focused import declared_shares, parts

ROOT = Path(__file__).resolve().parents[1]
ALL = [family for families in FAMILIES.values() for family in families]
ENGLISH = [family for family in ALL if family.category != "multilingual"]


def family_of(row):
    return row["family"].split("/")[0]


def family_named(name):
    return next(family for family in ALL if family.name == name)


# ---------------------------------------------------------------------------------------------------- content
def test_there_are_enough_distinct_skeletons():
    skeletons = [skeleton for family in ENGLISH for skeleton in family.skeletons]
    assert len(set(skeletons)) == len(skeletons) >= 300
    assert tuple(FAMILIES) == CATEGORIES and len(CATEGORIES) == 8
    names = [family.name for family in ALL]
    assert len(set(names)) == len(names)
    assert all(family.category == category for category, families in FAMILIES.items() for family in families)
    assert all("/" not in name for name in names), "'/' separates family and skeleton in a row's family column"


def test_skeletons_differ_in_more_than_their_slots():
    """With the slots blanked out, letter case aside, no two skeletons are the same words."""
    skeletons = [skeleton for family in ENGLISH for skeleton in family.skeletons]
    frames = [re.sub(r"\{\w+\}", "_", skeleton).casefold() for skeleton in skeletons]
    twice = [frame for frame, count in collections.Counter(frames).items() if count > 1]
    assert not twice


@pytest.mark.parametrize("family", ALL, ids=lambda family: family.name)
def test_every_slot_is_filled(family):
    for seed in range(50):
        for index in range(len(family.skeletons)):
            messages = family.messages(index, random.Random(seed))
            content = messages[-1]["content"]
            assert messages[-1]["role"] == "user" and 8 <= len(content) <= 900
            assert not re.search(r"\{[a-z_]\w*\}|\{\}", content), content
            assert len(messages) == (2 if family.system else 1)
            assert not re.search(r"\ba (umbrella|owl|egg|apple|accountant|architect|electrician|octopus)\b", content)


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_category_yields_two_thousand_prompts_evenly(category):
    rows = draw(category, 2000, seed=3)
    assert len({row["id"] for row in rows}) == 2000
    assert len({" ".join(row["messages"][-1]["content"].casefold().split()) for row in rows}) == 2000
    by_family = collections.Counter(family_of(row) for row in rows)
    assert set(by_family) == {family.name for family in FAMILIES[category]}
    assert max(by_family.values()) - min(by_family.values()) <= 1
    by_skeleton = collections.Counter(row["family"] for row in rows)
    assert len(by_skeleton) == sum(len(family.skeletons) for family in FAMILIES[category])
    for row in rows[:100]:
        assert row["id"] == prompt_id(row["messages"])
        assert (row["source"], row["category"], row["split"]) == ("synthetic", category, "")


def table_rows(path, columns):
    """Cells of the first Markdown table of a file whose heading holds `columns`."""
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    split = lambda line: [cell.strip() for cell in line.strip("|").split("|")]  # noqa: E731
    assert any(split(line) == list(columns) for line in lines), f"{path.name} has no table {columns}"
    next(lines)  # the ruler
    return [split(line) for line in itertools.takewhile(lambda line: line.startswith("|"), lines)]


def test_the_datasheet_counts_what_there_is():
    """A count that nobody checks is wrong with the next skeleton."""
    rows = table_rows(ROOT / "data/README.md", ("category", "families", "skeletons"))
    told = {name: (int(families), int(skeletons)) for name, families, skeletons in rows}
    expected = {
        category: (len(families), sum(len(family.skeletons) for family in families))
        for category, families in FAMILIES.items()
    }
    expected["all English"] = (len(ENGLISH), sum(len(family.skeletons) for family in ENGLISH))
    assert told == expected


def test_the_schema_describes_every_category_once():
    rows = table_rows(ROOT / "data/SCHEMA.md", ("category", "what belongs to it", "what does not"))
    assert tuple(name.strip("`") for name, *_ in rows) == CATEGORIES


def test_the_weights_of_focused_are_the_measured_ones():
    """A weight is 1/tau over the mean of the measured ones, to two digits; a category without a measurement has 1."""
    rows = results.read(ROOT / "data/results/focused_shares.json")["rows"]
    mean = sum(1 / row["tau16"] for row in rows) / len(rows)
    expected = {row["category"]: round(1 / row["tau16"] / mean, 2) for row in rows}
    assert declared_shares() == {category: expected.get(category, 1.0) for category in CATEGORIES}


def test_parts_add_up_and_follow_the_weights():
    assert parts(10, [1, 1, 1]) == [4, 3, 3] and parts(0, [1, 2]) == [0, 0] and parts(7, [1]) == [7]
    assert parts(100, [1.16, 0.84]) == [58, 42]


def test_variety_of_known_texts():
    assert describe_prompts.distinct_2(["a b a b a", "c"]) == 2 / 4
    assert describe_prompts.distinct_2(["one", ""]) == 0.0
    same, different = ["the same words again"] * 500, [f"word{at} and {at * 7919}" for at in range(500)]
    assert describe_prompts.compression_ratio(same) > 50 > 10 > describe_prompts.compression_ratio(different) > 1
    few = describe_prompts.describe("few", ["one two", "one two"], 1)
    assert (few["rows"], few["distinct_rows"], few["words_a_row"]) == (2, 1, 2.0)
    assert few["distinct_2"] is None and few["compression_ratio"] is None
    row = describe_prompts.describe("many", [f"w{at} x y z" for at in range(20_000)], None)
    assert row == describe_prompts.describe("many", [f"w{at} x y z" for at in range(20_000)], None)
    assert 0.33 < row["distinct_2"] < 0.34  # of the three pairs of a text one is its own


def test_the_real_recipe_declares_half_a_million_prompts():
    recipe = load_recipe("qwen3-8b")
    corpora = sum(corpus.max_rows for corpus in recipe.corpora)
    total = corpora + sum(entry.count for entry in recipe.synthetic) + recipe.focused.count
    assert 490_000 <= total <= 510_000


def test_the_datasheet_shows_the_recorded_variety():
    rows = results.read(ROOT / "data/results/prompts.json")["rows"]
    assert results.markdown_table(rows) in (ROOT / "data/README.md").read_text(encoding="utf-8")
    wheels = load_recipe("smollm2-135m").texts.wheels
    told = table_rows(ROOT / "data/README.md", ("package", "version", "licence"))
    assert told == [[wheel.package, wheel.version, wheel.licence] for wheel in wheels]


# ---------------------------------------------------------------------------------------------------- drawing
def test_rows_do_not_depend_on_the_process():
    """A draw that goes through hash() or set order gives other prompts in each process."""
    program = (
        "import hashlib; from scripts.families import CATEGORIES, draw\n"
        "print(hashlib.sha256(repr([draw(c, 60, 5) for c in CATEGORIES]).encode()).hexdigest())"
    )
    here = hashlib.sha256(repr([draw(category, 60, 5) for category in CATEGORIES]).encode()).hexdigest()
    for hash_seed in ("1", "77"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        result = subprocess.run(
            [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=100
        )
        assert result.stdout.strip() == here, result.stderr


@pytest.mark.parametrize("category", CATEGORIES)
def test_a_smaller_draw_is_a_prefix_and_seeds_differ(category):
    assert draw(category, 50, 9) == draw(category, 180, 9)[:50]
    assert draw(category, 50, 9) != draw(category, 50, 10)
    assert draw(category, 0, 9) == []


def test_reserved_skeletons_and_families_are_left_out():
    reserved = FAMILIES["chat"][0]

    def allow(family, index):
        return family is not reserved and index % 5 != 0

    rows = draw("chat", 400, 1, allow=allow)
    assert reserved.name not in {family_of(row) for row in rows}
    assert all(int(row["family"].split("/")[1]) % 5 for row in rows)
    # Reserving skeletons must not change the fillings of the others: their answers may exist already.
    ids = {row["id"] for row in rows}
    kept = [
        row for row in draw("chat", 400, 1) if family_of(row) != reserved.name and int(row["family"].split("/")[1]) % 5
    ]
    assert all(row["id"] in ids for row in kept)


def test_excluded_prompts_do_not_come_back():
    first = {row["id"] for row in draw("extract", 300, 2)}
    second = {row["id"] for row in draw("extract", 300, 2, exclude_ids=first)}
    assert len(second) == 300 and not first & second


def test_too_many_prompts_are_refused_with_the_possible_number():
    def allow(family, index):
        return family.name == "clock" and family.skeletons[index].startswith("Convert")

    with pytest.raises(ValueError, match=r"'math': 500 asked, (\d+) possible.*architecture\.json") as refusal:
        draw("math", 500, 1, allow=allow)
    possible = int(re.search(r"(\d+) possible", str(refusal.value)).group(1))
    assert len(draw("math", possible, 1, allow=allow)) == possible  # the number named does work
    with pytest.raises(ValueError, match="0 possible"):
        draw("math", 1, 1, allow=lambda family, index: False)
    with pytest.raises(ValueError, match="unknown category 'maths'"):
        draw("maths", 1, 1)


# ------------------------------------------------------------------------------------------------- arithmetic
def numbers(family_name, rng):
    """The slots of a family that are whole numbers."""
    filled = family_named(family_name).fill(rng)
    return {slot: int(value) for slot, value in filled.items() if re.fullmatch(r"-?\d+", value)}


def minutes(clock):
    hour, minute = clock.removesuffix(" pm").split(":")
    return int(hour) * 60 + int(minute)


@pytest.mark.parametrize("seed", range(200))
def test_word_problems_work_out(seed):
    """Numbers are positive, divisions even; nobody pays less than the bill or gives more than they have."""
    rng = random.Random(seed)
    for family in FAMILIES["math"]:
        assert all(value > 0 for value in numbers(family.name, rng).values()), family.name
    n = numbers("arithmetic", rng)
    assert n["dividend"] % n["divisor"] == 0 and n["big"] > n["small"]
    n = numbers("shopping", rng)
    assert n["paid"] > n["price"] * n["count"] + n["price2"] * n["count2"]
    n = numbers("sharing", rng)
    assert n["total"] == n["groups"] * n["each"] and 0 < n["rest"] < n["groups"]
    assert n["total_rest"] // n["groups"] == n["each"] and n["total_rest"] % n["groups"]
    n = numbers("travel", rng)
    assert n["distance"] == n["speed"] * n["hours"] and n["faster"] > n["speed"] and n["distance"] > 0
    n = numbers("percent", rng)
    assert n["price"] * n["percent"] % 100 == 0 and n["people"] * n["percent"] % 100 == 0
    n = numbers("shapes", rng)
    assert n["area"] == n["width"] * n["length"] and n["perimeter"] // 2 - n["length"] == n["width"]
    n = numbers("ages", rng)
    assert n["sum"] - n["young"] == n["old"] and n["multiple"] == n["times"] * n["young"]
    clock = family_named("clock").fill(rng)
    assert minutes(clock["end"]) - minutes(clock["start"]) == int(clock["duration"])
    assert minutes(clock["end"]) < 12 * 60
    series = family_named("series").fill(rng)
    sample = [int(value) for value in series["sample"].split(", ")]
    assert min(sample) > 0 and sum(sample) % 4 == 0
    rising = [int(value) for value in series["rising"].split(", ")]
    assert {later - earlier for earlier, later in zip(rising, rising[1:], strict=False)} == {int(series["step"])}
