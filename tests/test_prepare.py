"""The prompt steps as people run them, on a small recipe in a folder of its own: splits, keys, reruns, corpora."""

import hashlib
import json
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafter.corpus import duplicate_key, prompt_id, read_prompts
from drafter.recipe import Caps, Corpus, FilePin, Focused, Splits, Synthetic, load_recipe
from scripts import (
    _prompts,
    download_data,
    extend_data,
    make_extra_prompts,
    make_focused,
    prepare_addon,
    prepare_data,
    prepare_selection,
)
from scripts.families import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
ENGLISH = ("chat", "math", "code", "rewrite", "constraints", "summarise", "extract")
RESERVED = ("selection", "development", "final")
CHAIN = (prepare_selection, prepare_data, prepare_addon, extend_data, make_extra_prompts, make_focused)
TRAIN = tuple(_prompts.TRAIN_STEPS)
REVISION = "0" * 40


class WordCounter:
    """Stands in for the tokenizer of a teacher: one id a word."""

    @classmethod
    def load(cls, folder, **settings):
        return cls()

    def render(self, messages):
        return [0] * sum(len(message["content"].split()) for message in messages)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A recipe that can be changed and run: world.run(script) uses world.recipe and writes below world.root."""
    synthetic = [
        Synthetic(step=step, category=category, count=count, seed=seed)
        for step, count, seed in (("prepare_data", 20, 11), ("prepare_addon", 10, 12), ("make_extra_prompts", 10, 13))
        for category in ENGLISH
    ]
    splits = Splits(
        selection=21,
        development=42,
        final=22,
        seed=10,
        skeleton_share=0.2,
        held_out_families={category: FAMILIES[category][-1].name for category in ENGLISH},
    )
    changes = {"splits": splits, "synthetic": tuple(synthetic), "focused": Focused(count=30, seed=14), "corpora": ()}
    changes |= {"caps": Caps(max_chars=4000, max_prompt_tokens=300)}
    state = SimpleNamespace(root=tmp_path, recipe=load_recipe("tiny").model_copy(update=changes))
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    monkeypatch.setattr(_prompts, "load_recipe", lambda name: state.recipe)
    monkeypatch.setattr(download_data, "load_recipe", lambda name: state.recipe)
    monkeypatch.setattr(download_data, "LOCK", tmp_path / "corpora.lock.json")
    monkeypatch.setattr(_prompts, "Chat", WordCounter)
    teacher = state.recipe.cache_dir / "models" / "teacher"
    teacher.mkdir(parents=True)
    (teacher / "tokenizer.json").write_text("{}")

    state.prompts = state.recipe.cache_dir / "prompts"
    state.run = lambda script, *flags: script.main(["--recipe", "tiny", *flags])
    state.rows = lambda name: read_prompts(state.prompts / f"{name}.jsonl")
    state.manifest = lambda name: json.loads((state.prompts / f"{name}.manifest.json").read_text())
    state.change = lambda **fields: setattr(state, "recipe", state.recipe.model_copy(update=fields))
    return state


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


# ---------------------------------------------------------------------------- the chain


def test_chain_splits_are_disjoint_and_reserved_text_never_trains(world):
    for script in CHAIN:
        assert world.run(script) == 0
    reserved = json.loads((world.prompts / "reserved.json").read_text())
    rows = {name: world.rows(name) for name in (*RESERVED, *TRAIN)}
    everything = [row for part in rows.values() for row in part]

    assert len({row["id"] for row in everything}) == len(everything)
    assert len({duplicate_key(row["messages"]) for row in everything}) == len(everything)
    assert all(row["id"] == prompt_id(row["messages"]) for row in everything)
    assert all(row["messages"][-1]["role"] == "user" for row in everything)
    assert {name: {row["split"] for row in rows[name]} for name in RESERVED} == {name: {name} for name in RESERVED}

    train = [row for name in TRAIN for row in rows[name]]
    assert {row["split"] for row in train} == {"train"}
    assert not {row["family"] for row in train} & set(reserved["skeletons"])
    assert not {row["family"].split("/")[0] for row in train} & set(reserved["families"])
    assert {name: reserved["ids"][name] for name in RESERVED} == {
        name: [row["id"] for row in rows[name]] for name in RESERVED
    }


def test_counts_and_shares(world):
    for script in CHAIN:
        world.run(script)
    reserved = json.loads((world.prompts / "reserved.json").read_text())
    for name, count in (("selection", 21), ("development", 42), ("final", 22)):
        rows = world.rows(name)
        categories = Counter(row["category"] for row in rows)
        assert len(rows) == count
        assert set(categories) == set(ENGLISH)
        assert max(categories.values()) - min(categories.values()) <= 1
        new_family = sum(row["family"].split("/")[0] in reserved["families"] for row in rows)
        new_skeleton = sum(row["family"] in reserved["skeletons"] for row in rows)
        assert new_family == count // 3
        assert new_skeleton == count // 3
    assert Counter(row["category"] for row in world.rows("distill.data")) == dict.fromkeys(ENGLISH, 20)
    assert world.rows("expanded.data") == []

    focused = world.rows("focused")
    categories = Counter(row["category"] for row in focused)
    weights = make_focused.declared_shares()
    shares = {category: 30 * weights[category] / sum(weights[one] for one in ENGLISH) for category in ENGLISH}
    assert len(focused) == 30 and all(abs(categories[category] - share) < 1 for category, share in shares.items())
    assert all(row["family"].startswith("focused-") for row in focused)
    for name in (*RESERVED, *TRAIN):
        manifest = world.manifest(name)
        output = (world.prompts / f"{name}.jsonl").read_bytes()
        assert manifest["output"]["sha256"] == hashlib.sha256(output).hexdigest()
        assert (
            manifest["counters"]["rows_out"]
            == manifest["output"]["rows"]
            == sum(manifest["counts"]["category"].values())
        )


def test_a_fifth_of_every_family_is_reserved(world):
    world.run(prepare_selection)
    reserved = json.loads((world.prompts / "reserved.json").read_text())
    by_family = Counter(name.split("/")[0] for name in reserved["skeletons"])
    for family in (family for category in ENGLISH for family in FAMILIES[category]):
        expected = 0 if family.name in reserved["families"] else max(1, round(0.2 * len(family.skeletons)))
        same_name = sum(other.name == family.name for group in FAMILIES.values() for other in group)
        assert same_name == 1, f"two families are called {family.name}: evaluation could not tell them apart"
        assert by_family[family.name] == expected


def test_every_transformation_makes_text(world):
    world.run(prepare_selection)
    world.run(prepare_data)
    import random

    rows = world.rows("distill.data")
    for rule in make_focused.TRANSFORMATIONS:
        for seed in range(8):
            messages, family = make_focused.transform(rule, random.Random(seed), rows[0], rows[-1])
            text = messages[-1]["content"]
            task = rows[0]["messages"][-1]["content"]
            assert (task[: len(task) // 3] if rule.name == "continue" else task) in text
            assert not any(f"{{{slot}}}" in text for slot in ("task", "other", "opening", "words", "few"))
            assert family.startswith(f"focused-{rule.name}/")


def test_sources_of_focused_are_a_seeded_choice_where_there_are_many(world, monkeypatch):
    """All rows of distill.data, each a dict of 2 kB, would be half a gigabyte for the real recipe."""
    world.run(prepare_selection)
    world.run(prepare_data)
    path, rows = world.prompts / "distill.data.jsonl", world.rows("distill.data")
    assert make_focused.read_sources(path, 1) == rows
    monkeypatch.setattr(make_focused, "MAX_SOURCES", 30)
    chosen = make_focused.read_sources(path, 1)
    assert len(chosen) == 30 and chosen == make_focused.read_sources(path, 1) != make_focused.read_sources(path, 2)
    assert chosen == [row for row in rows if row in chosen], "in the order of the file"


# ---------------------------------------------------------------------------- order, reruns, keys


def test_a_step_without_reservation_names_the_command(world, capsys):
    assert world.run(prepare_data) == 1
    assert "python -m scripts.prepare_selection --recipe tiny" in capsys.readouterr().err
    world.run(prepare_selection)
    assert world.run(prepare_addon) == 1
    assert "python -m scripts.prepare_data --recipe tiny" in capsys.readouterr().err
    assert not (world.prompts / "distill.addon.jsonl").exists()


def test_a_missing_tokenizer_names_the_command(world, capsys):
    shutil.rmtree(world.recipe.cache_dir / "models")
    assert world.run(prepare_selection) == 1
    assert "python -m scripts.download_models --recipe tiny" in capsys.readouterr().err


def test_a_rerun_does_nothing_and_a_fresh_run_gives_the_same_bytes(world, capsys):
    for script in CHAIN:
        world.run(script)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in world.prompts.iterdir()}
    capsys.readouterr()
    for script in CHAIN:
        assert world.run(script) == 0
        assert "up to date" in capsys.readouterr().out
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in world.prompts.iterdir()} == before
    shutil.rmtree(world.prompts)
    for script in CHAIN:
        world.run(script)
    assert {path.name: path.read_bytes() for path in world.prompts.iterdir()} == {
        name: content for name, (content, _) in before.items()
    }


def test_a_changed_cap_or_count_or_file_rebuilds(world, capsys):
    """DL-1: a cached transform was reused although its parameters or its input had changed."""
    for script in CHAIN:
        world.run(script)
    first = world.manifest("distill.data")["key"]
    world.change(caps=Caps(max_chars=4000, max_prompt_tokens=60))
    for script in CHAIN:
        assert world.run(script) == 0
    assert world.manifest("distill.data")["key"] != first
    assert all(len(WordCounter().render(row["messages"])) <= 60 for name in TRAIN for row in world.rows(name))

    second = world.manifest("distill.data")["output"]["sha256"]
    path = world.prompts / "distill.data.jsonl"
    path.write_bytes(path.read_bytes()[:-10])
    capsys.readouterr()
    assert world.run(prepare_data) == 0
    assert last_line(capsys)["up_to_date"] is False
    assert world.manifest("distill.data")["output"]["sha256"] == second

    (world.recipe.cache_dir / "models" / "teacher" / "tokenizer.json").write_text("{ }")
    assert world.run(prepare_selection) == 0
    assert last_line(capsys)["files"][0]["up_to_date"] is False


def test_other_splits_are_refused_until_the_reservation_is_made_anew(world, capsys):
    world.run(prepare_selection)
    world.change(splits=world.recipe.splits.model_copy(update={"seed": 99}))
    assert world.run(prepare_data) == 1
    assert "prepare_selection" in capsys.readouterr().err


def test_a_held_out_family_must_exist(world, capsys):
    held_out = {**world.recipe.splits.held_out_families, "chat": "nobody"}
    world.change(splits=world.recipe.splits.model_copy(update={"held_out_families": held_out}))
    assert world.run(prepare_selection) == 1
    assert "splits.held_out_families.chat: no family 'nobody'" in capsys.readouterr().err


def test_dry_run_writes_nothing(world, capsys):
    shutil.rmtree(world.recipe.cache_dir)
    plans = {}
    for script in (*CHAIN, download_data):
        assert world.run(script, "--dry-run") == 0
        plans[script] = last_line(capsys)
    assert not world.recipe.cache_dir.exists()
    assert [plans[script]["rows"] for script in CHAIN] == [85, 140, 70, 0, 70, 30]
    for plan in plans.values():
        assert plan["dry_run"] and plan["files"] is not None
        assert plan["memory_bytes"] > 0 and plan["estimated_s"] >= 0
    assert plans[prepare_data]["prompt_tokens"] == 140 * _prompts.PROMPT_TOKENS


def test_dry_run_knows_a_corpus_by_its_footer(world, capsys):
    """Rows at most: unknown before the file is there, then those of its footer, or max_rows where that is less."""
    declared = corpus("main/train-0.parquet")
    world.change(corpora=(declared,))
    assert world.run(extend_data, "--dry-run") == 0
    [plan] = last_line(capsys)["corpora"]
    assert (plan["present"], plan["rows_at_most"], plan["estimated_s"]) == (False, None, None)
    place(world, ["How many?"] * 9)
    for max_rows, rows in ((None, 9), (4, 4)):
        world.change(corpora=(declared.model_copy(update={"max_rows": max_rows}),))
        assert world.run(extend_data, "--dry-run") == 0
        whole = last_line(capsys)
        [plan] = whole["corpora"]
        assert (whole["rows"], whole["rows_at_most"]) == (0, rows)
        assert whole["disk_bytes"] == rows * _prompts.CORPUS_ROW_BYTES
        assert (plan["present"], plan["rows_at_most"]) == (True, rows)
        assert plan["prompt_tokens_at_most"] == rows * 300


def test_caps_that_leave_too_few_prompts_are_an_error(world, capsys):
    world.change(caps=Caps(max_chars=4000, max_prompt_tokens=1))
    assert world.run(prepare_selection) == 1
    assert "pass the rules and the caps (4000 characters, 1 tokens)" in capsys.readouterr().err
    assert not (world.prompts / "reserved.json").exists()


# ---------------------------------------------------------------------------- corpora


def corpus(path, sha256=None, role="expanded.data", **fields):
    files = {path: FilePin(sha256=sha256)}
    fields = {"columns": {"user": "question"}, "category": "math", **fields}
    return Corpus(repo="openai/gsm8k", revision=REVISION, files=files, licence="MIT", role=role, **fields)


def place(world, questions, name="main/train-0.parquet"):
    """Writes a corpus file where the downloader would have put it; -> its sha256."""
    path = world.root / "data/cache/corpora/openai--gsm8k" / REVISION / name
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"answer": ["never read"] * len(questions), "question": questions}), path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prepare_up_to_corpora(world, *corpora):
    """The steps before expanded.data, for a recipe with these corpora (those of distill.data are read on the way)."""
    world.change(corpora=corpora)
    for script in (prepare_selection, prepare_data, prepare_addon):
        assert world.run(script) == 0


def test_corpus_rows_are_cleaned_counted_and_kept_apart(world):
    world.run(prepare_selection)
    taken = world.rows("development")[0]["messages"][-1]["content"]
    questions = ["How many?", "  how  MANY? ", None, " ", taken.upper(), "word " * 301, "x" * 4001, "And now?"]
    prepare_up_to_corpora(world, corpus("main/train-0.parquet", place(world, questions)))
    assert world.run(extend_data) == 0
    rows, manifest = world.rows("expanded.data"), world.manifest("expanded.data")
    assert [row["messages"][0]["content"] for row in rows] == ["How many?", "And now?"]
    assert [(row["source"], row["category"], row["family"]) for row in rows] == [
        ("openai/gsm8k", "math", "gsm8k/main")
    ] * 2
    assert manifest["counters"]["dropped"] == {
        "blank_user": 2,
        "duplicate": 2,
        "too_many_chars": 1,
        "too_many_tokens": 1,
    }
    assert manifest["counters"]["rows_in"] == len(questions)
    assert any(REVISION in path for path in manifest["inputs"])
    assert b"never read" not in (world.prompts / "expanded.data.jsonl").read_bytes()


def test_max_rows_is_kept_and_changed_rows_rebuild(world):
    questions = [f"How many is {number}?" for number in range(9)]
    prepare_up_to_corpora(world, corpus("main/train-0.parquet", place(world, questions), max_rows=4))
    world.run(extend_data)
    assert len(world.rows("expanded.data")) == 4
    prepare_up_to_corpora(world, corpus("main/train-0.parquet", place(world, questions[::-1]), max_rows=4))
    world.run(extend_data)
    assert world.rows("expanded.data")[0]["messages"][0]["content"] == "How many is 8?"


def test_a_changed_or_unpinned_or_held_out_file_is_refused(world, capsys):
    actual = place(world, ["How many?"])
    for bad, message in (
        (corpus("main/train-0.parquet", "f" * 64), f"sha256 is {actual}, expected {'f' * 64}"),
        (corpus("main/train-0.parquet"), "neither pinned nor in corpora.lock.json"),
        (corpus("main/train-1.parquet", actual), "missing"),
        (corpus("main/test-0.parquet", actual), "held-out split ('test')"),
    ):
        world.change(corpora=(bad,))
        assert world.run(prepare_selection) == 1
        assert message in capsys.readouterr().err
    good = corpus("main/train-0.parquet", actual)
    prepare_up_to_corpora(world, good)
    place(world, ["How much?"])
    assert world.run(extend_data) == 1
    assert f"expected {actual}" in capsys.readouterr().err
    assert not (world.prompts / "expanded.data.jsonl").exists()


def test_the_real_gsm8k_rows_go_through(world):
    source = ROOT.parent / "shared/corpora/openai--gsm8k/main/train-00000-of-00001.parquet"
    if not source.exists():
        pytest.skip("no GSM8K train rows in ../shared/corpora on this machine")
    name = "main/train-00000-of-00001.parquet"
    path = world.root / "data/cache/corpora/openai--gsm8k" / REVISION / name
    path.parent.mkdir(parents=True)
    shutil.copyfile(source, path)
    prepare_up_to_corpora(world, corpus(name, hashlib.sha256(path.read_bytes()).hexdigest()))
    assert world.run(extend_data) == 0
    counters = world.manifest("expanded.data")["counters"]
    assert counters["rows_in"] == 7473 == counters["rows_out"] + sum(counters["dropped"].values())
    assert world.run(make_extra_prompts) == 0
