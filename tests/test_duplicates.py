"""drafter/duplicates.py and its use: n-grams, exact nearness, clusters, reserved clusters, --against."""

import hashlib
import json
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archives import REPORTED
from hypothesis import given, settings
from hypothesis import strategies as st
from test_corpus import TURN, turn
from test_prepare import TRAIN, corpus, place, world  # noqa: F401

from drafter.corpus import read_parquet
from drafter.duplicates import (
    CHUNK_ROWS,
    NEAR_JACCARD,
    SLOTS,
    NearIndex,
    Overlap,
    Signatures,
    jaccard,
    ngrams,
    pack_hashes,
    unpack_hashes,
    user_text,
    words,
)
from scripts import extend_data, make_extra_prompts, make_focused, prepare_addon, prepare_data, prepare_selection

ROOT = Path(__file__).resolve().parents[1]
CHAIN = (prepare_selection, prepare_data, prepare_addon, extend_data, make_extra_prompts, make_focused)


def changed(text, count, rng):
    """The text with `count` of its words replaced."""
    found = text.split()
    for at in rng.sample(range(len(found)), count):
        found[at] = f"zebra{rng.randrange(10**6)}"
    return " ".join(found)


def story(rng, length=60):
    return " ".join(f"w{rng.randrange(5000)}" for _ in range(length))


# ---------------------------------------------------------------------------- n-grams


def test_words_ignore_case_punctuation_and_width():
    assert words("It's  ONE,\ttwo—three!") == ["it", "s", "one", "two", "three"]
    assert words("\uff21\uff22") == ["ab"]
    assert words("漢字かな 한국어 ไทย") == ["漢", "字", "か", "な", "한국어", "ไ", "ท", "ย"]
    assert words(" ,.!? ") == []


def test_a_short_text_is_one_ngram():
    assert len(ngrams("one two three", 5)) == 1 == len(ngrams("one two three four five", 5))
    assert ngrams("one two three", 5) == ngrams("One two, three.", 5)
    assert len(ngrams("one two three four five six", 5)) == 2
    assert ngrams("!!", 5) == set()


def test_ngrams_are_the_same_in_every_process():
    """Reserved rows travel as hashes: hash() of a string would name other n-grams in the next process."""
    program = "from drafter.duplicates import *; print(pack_hashes(ngrams('one two three four five six', 5)))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert unpack_hashes(done.stdout) == ngrams("one two three four five six", 5)


@given(st.sets(st.integers(0, 2**64 - 1), max_size=20))
def test_hashes_survive_packing(hashes):
    assert unpack_hashes(pack_hashes(hashes)) == hashes


# ---------------------------------------------------------------------------- few rows


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sets(st.integers(0, 30), max_size=12), max_size=8), st.sets(st.integers(0, 30), max_size=12))
def test_nearest_equals_a_loop_over_all_rows(rows, asked):
    index = NearIndex()
    for row in rows:
        index.add(row)
    row, similarity = index.nearest(asked)
    best = max((jaccard(asked, other) for other in rows), default=0.0)
    assert similarity == best
    assert row is None if best == 0 else jaccard(asked, rows[row]) == best


# ---------------------------------------------------------------------------- many rows


def test_clusters_find_what_exact_comparison_finds():
    """Against exact Jaccard on 800 texts with 0 to 4 changed words each: pairs of J >= .85 all join, of J < .5 none."""
    rng = random.Random(1)
    signatures, texts = Signatures(), []
    for _ in range(800):
        original = story(rng)
        texts += [original, changed(original, rng.randrange(5), rng)]
    sets = [ngrams(text, 5) for text in texts]
    for grams in sets:
        signatures.add(grams)
    labels = signatures.clusters()
    joined = [labels[at] == labels[at + 1] for at in range(0, len(sets), 2)]
    truth = [jaccard(sets[at], sets[at + 1]) for at in range(0, len(sets), 2)]
    just_near = [one for one, similarity in zip(joined, truth, strict=True) if similarity >= NEAR_JACCARD]
    assert sum(just_near) >= 0.97 * len(just_near) and len(just_near) > 200
    assert all(one for one, similarity in zip(joined, truth, strict=True) if similarity >= 0.85)
    assert not any(one for one, similarity in zip(joined, truth, strict=True) if similarity < 0.5)
    assert all(labels[at] in (at, at - 1) for at in range(len(sets))), "two different stories were joined"


def test_a_cluster_is_named_by_its_first_row_over_chunks():
    rng = random.Random(2)
    original = story(rng)
    signatures = Signatures()
    for at in range(4200):  # more than one chunk
        signatures.add(ngrams(original if at in (7, 4100, 4150) else story(rng, 20), 5))
    labels = signatures.clusters()
    assert labels[[7, 4100, 4150]].tolist() == [7, 7, 7]
    assert np.count_nonzero(labels != np.arange(4200)) == 2


def test_rows_without_words_are_near_to_nothing():
    signatures = Signatures()
    for _ in range(3):
        signatures.add(set())
    assert signatures.clusters().tolist() == [0, 1, 2]
    assert Signatures().clusters().tolist() == []


def test_a_row_takes_less_than_300_bytes():
    """Signatures, and what clustering adds at its highest; the process around them not counted."""
    rng = np.random.default_rng(0)
    chunks = [rng.integers(0, 65536, (CHUNK_ROWS, SLOTS), dtype=np.uint16) for _ in range(50)]
    tracemalloc.start()
    signatures = Signatures()
    signatures.chunks = [chunk.copy() for chunk in chunks]
    signatures.clusters()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 128 < peak_bytes / len(signatures) < 200


def test_real_gsm8k_rows_have_few_near_duplicates():
    path = ROOT.parent / "shared/corpora/openai--gsm8k/main/train-00000-of-00001.parquet"
    if not path.exists():
        pytest.skip("no GSM8K train rows in ../shared/corpora on this machine")
    signatures = Signatures()
    sets = [ngrams(row["question"], 5) for row in read_parquet(path, ["question"])]
    for grams in sets:
        signatures.add(grams)
    labels = signatures.clusters()
    pairs = [(row, head) for row, head in enumerate(labels.tolist()) if row != head]
    assert 0 < len(pairs) < 75
    assert all(jaccard(sets[row], sets[head]) > 0.4 for row, head in pairs)


# ---------------------------------------------------------------------------- reserved clusters


def stories(seed, count, near_each=2):
    """`count` stories, each followed by near copies of it (one word of 60 changed: J = .85)."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        original = story(rng)
        texts += [original, *(changed(original, 1, rng) for _ in range(near_each))]
    return texts


def grams_of(rows):
    return [ngrams(user_text(row["messages"]), 5) for row in rows]


def test_no_train_row_is_near_to_a_held_out_one(world):  # noqa: F811
    """Corpora hold rewordings of one question: reserved as single rows, their neighbours stayed in train."""
    texts = stories(3, 60)
    declared = corpus("main/train-0.parquet", place(world, texts))
    splits = world.recipe.splits.model_copy(update={"corpus_share": 0.5})
    world.change(corpora=(declared,), splits=splits)
    for script in CHAIN:
        assert world.run(script) == 0
    held_out = [row for name in ("selection", "development", "final") for row in world.rows(name)]
    from_corpus = [row for row in held_out if row["source"] == "openai/gsm8k"]
    assert len(held_out) == 85 and len(from_corpus) == 10 + 21 + 11
    assert {row["split"] for row in from_corpus} == {"selection", "development", "final"}

    index = NearIndex()
    for grams in grams_of(held_out):
        index.add(grams)
    train = [row for name in TRAIN for row in world.rows(name)]
    assert max(index.nearest(grams)[1] for grams in grams_of(train)) < NEAR_JACCARD

    kept = world.rows("expanded.data")
    assert len(kept) == 60 - len(from_corpus), "one row of each cluster that is not reserved"
    counters = world.manifest("expanded.data")["counters"]
    dropped = counters["dropped"]
    assert counters["rows_in"] == 180 == counters["rows_out"] + sum(dropped.values())
    assert dropped["near_duplicate"] + dropped["near_held_out"] == 180 - 60
    survey = json.loads((world.prompts / "reserved.json").read_text())["survey"]
    assert survey["rows_in"] == survey["rows_out"] == 180


def test_splits_are_not_near_to_each_other(world):  # noqa: F811
    world.run(prepare_selection)
    index = NearIndex()
    for name in ("selection", "development", "final"):
        sets = grams_of(world.rows(name))
        assert not any(index.is_near(grams) for grams in sets)
        for grams in sets:
            index.add(grams)


def test_other_corpora_are_refused_until_the_survey_is_made_anew(world, capsys):  # noqa: F811
    world.run(prepare_selection)
    world.change(corpora=(corpus("main/train-0.parquet", place(world, ["How many?"])),))
    assert world.run(prepare_data) == 1
    assert "other corpora" in capsys.readouterr().err


def test_too_few_clusters_are_an_error(world, capsys):  # noqa: F811
    declared = corpus("main/train-0.parquet", place(world, stories(4, 12)))
    splits = world.recipe.splits.model_copy(update={"corpus_share": 1.0})
    world.change(corpora=(declared,), splits=splits)
    assert world.run(prepare_selection) == 1
    assert "only 12 of 21 math rows for selection in the corpora" in capsys.readouterr().err


# ---------------------------------------------------------------------------- a file of full size

FULL_SIZE = """
import hashlib, json, sys, time
from pathlib import Path
import drafter.recipe
from drafter.recipe import Corpus, FilePin, load_recipe
from scripts import _prompts, download_data, prepare_data, prepare_selection
from scripts.random_model import make_random_model
root, name = Path(sys.argv[1]), sys.argv[2]
drafter.recipe.ROOT, download_data.LOCK = root, root / "lock.json"
tiny = load_recipe("tiny")
corpus = Corpus(repo="a/b", revision="0" * 40, files={name: FilePin(sha256=sys.argv[3])}, licence="MIT",
                role="distill.data", columns={"messages": "messages"}, category="chat")
splits = tiny.splits.model_copy(update={"corpus_share": 0.5})
recipe = tiny.model_copy(update={"corpora": (corpus,), "splits": splits})
_prompts.load_recipe = lambda name: recipe
make_random_model(recipe.teacher, recipe.cache_dir / "models" / "teacher")
for script in (prepare_selection, prepare_data):
    started = time.perf_counter()
    assert script.main(["--recipe", "tiny"]) == 0
    print(script.__name__, round(time.perf_counter() - started, 1), "s")
status = Path("/proc/self/status").read_text()
peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
manifest = json.loads((recipe.cache_dir / "prompts/distill.data.manifest.json").read_text())
print(json.dumps({"peak_bytes": peak, "counters": manifest["counters"]}))
"""


@pytest.mark.slow
def test_a_full_size_file_takes_less_than_one_and_a_half_gb(tmp_path):
    """A reader that takes whole row groups holds all answers of a 240 MB file, unpacked, at once."""
    name = "data/train_sft-0.parquet"
    path = tmp_path / "data/cache/corpora/a--b" / ("0" * 40) / name
    path.parent.mkdir(parents=True)
    rng, rows = np.random.default_rng(0), 69_000  # as one file of UltraChat: 69,000 rows, 244 MB, 1,000 rows a group
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", dtype=np.uint8)
    schema = pa.schema([("prompt", pa.string()), ("messages", pa.list_(TURN))])
    with pq.ParquetWriter(path, schema, compression="snappy", use_dictionary=False) as writer:
        for start in range(0, rows, 23_000):
            text = letters[rng.integers(0, 32, 3500 * 23_000, dtype=np.uint8)].tobytes().decode()
            parts = [text[at * 3500 : (at + 1) * 3500] for at in range(23_000)]
            parts = parts[: min(23_000, rows - start)]
            messages = [[turn("user", part[:300]), turn("assistant", part[300:])] for part in parts]
            prompts = [part[:300] for part in parts]
            writer.write_table(pa.table({"prompt": prompts, "messages": messages}, schema=schema))
    assert path.stat().st_size > 230_000_000
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    command = [sys.executable, "-c", FULL_SIZE, str(tmp_path), name, digest]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    REPORTED.append(f"corpus of {path.stat().st_size} bytes: peak {report['peak_bytes'] >> 20} MiB")
    counters = report["counters"]
    assert counters["rows_in"] == rows + 7 * 8 == counters["rows_out"] + sum(counters["dropped"].values())
    assert report["peak_bytes"] < 1_500_000_000


# ---------------------------------------------------------------------------- --against


def test_the_list_may_be_text_or_json_lines(tmp_path):
    text = "the quick brown fox jumps over the lazy dog today"
    plain, lines = tmp_path / "list.txt", tmp_path / "list.jsonl"
    plain.write_text(f"nothing here\n[ not json: {text}\n")
    row = {"id": 7, "messages": [{"role": "user", "content": text}], "tags": ["short text"]}
    lines.write_text(json.dumps({"prompt": "x"}) + "\n" + json.dumps(row) + "\n")
    for path in (plain, lines):
        overlap = Overlap(path)
        assert overlap.line("He said: THE QUICK, brown fox jumps over the lazy cat.") == 2
        assert overlap.line("the quick brown fox jumps over a lazy dog today") is None
    assert Overlap(lines).line("Short text!") == 2 and Overlap(lines).line("short text and more") is None
    plain.write_text("\n \n")
    with pytest.raises(ValueError, match="holds no text"):
        Overlap(plain)


def test_against_removes_rows_and_reports_them(world, tmp_path, capsys):  # noqa: F811
    texts = [story(random.Random(seed)) for seed in range(20)]
    world.change(corpora=(corpus("main/train-0.parquet", place(world, texts)),))
    for script in CHAIN[:4]:
        world.run(script)
    before = world.rows("expanded.data")
    own = tmp_path / "own.txt"
    own.write_text("first line\n" + " ".join(before[3]["messages"][0]["content"].split()[10:18]) + "\n")
    assert world.run(extend_data, "--against", str(own)) == 0
    after, manifest = world.rows("expanded.data"), world.manifest("expanded.data")
    assert [row["id"] for row in after] == [row["id"] for row in before if row != before[3]]
    assert manifest["counters"]["dropped"] == {"against": 1}
    report = json.loads((world.prompts / "expanded.data.against.json").read_text())
    assert report["sha256"] == hashlib.sha256(own.read_bytes()).hexdigest() and report["file"] == "own.txt"
    assert (report["rows"], report["lines"]) == (1, 1)
    assert report["matches"] == [{"id": before[3]["id"], "line": 2}]
    capsys.readouterr()
    assert world.run(extend_data) == 0 and len(world.rows("expanded.data")) == 20
    assert not (world.prompts / "expanded.data.against.json").exists()
    assert world.run(extend_data, "--against", str(tmp_path / "nowhere.txt")) == 1
    assert "nowhere.txt" in capsys.readouterr().err


def test_against_replaces_authored_prompts(world, tmp_path):  # noqa: F811
    """Authored prompts that overlap are drawn anew, so that the categories stay equal; reserved ones too."""
    world.run(prepare_selection)
    world.run(prepare_data)
    taken = [world.rows("distill.data")[0], world.rows("selection")[0]]
    own = tmp_path / "own.jsonl"
    own.write_text("".join(json.dumps(row) + "\n" for row in taken))
    for script in CHAIN:
        assert world.run(script, "--against", str(own)) == 0
    ids = {row["id"] for name in (*TRAIN, "selection", "development", "final") for row in world.rows(name)}
    assert not ids & {row["id"] for row in taken}
    assert len(world.rows("distill.data")) == 140 and len(world.rows("selection")) == 21
