"""The draft vocabulary: which ids it holds, how it is stored, and that a draft is an argmax over it and the request."""

import argparse
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from archives import edit, refused, sign
from hypothesis import given
from hypothesis import strategies as st

from drafter.acceptance import replay_rows, rounds_from_runs
from drafter.draft_vocabulary import from_text, most_frequent, own_ids, to_text
from drafter.engine import DraftEngine, DraftRequest
from drafter.provenance import write_json
from drafter.recipe import RecipeError, RunDocument, load_recipe
from drafter.scoring import score_forward
from drafter.teacher_data import id_counts, read_shards, shard_paths
from model_io import load_model, verify
from scripts import evaluate, pack_model

SIZE = 6  # of the 261 ids of `tiny`, whose answers repeat a few
FILE = "draft_vocabulary.json"


@pytest.fixture(scope="module")
def restricted(chain, tmp_path_factory) -> Path:
    """The chain's archive, packed once more with a draft vocabulary."""
    serving = chain.recipe.serving.model_copy(update={"draft_vocabulary": SIZE})
    folder = tmp_path_factory.mktemp("restricted") / "model"
    pack_model.pack_final(chain.recipe.model_copy(update={"serving": serving}), folder)
    return folder


@pytest.fixture
def archive(restricted, tmp_path) -> Path:
    return Path(shutil.copytree(restricted, tmp_path / "model"))


def development(chain):
    return read_shards(shard_paths(chain.recipe.cache_dir / "teacher", "development"))


# ---------------------------------------------------------------------------- the list


@given(st.lists(st.integers(0, 3), min_size=4, max_size=30), st.integers(0, 30), st.integers(0, 3))
def test_the_most_frequent_and_always_the_stop_ids(counts, size, stop):
    size = max(1, min(size, len(counts)))
    found = most_frequent(np.array(counts), size, [stop]).tolist()
    rest = sorted((at for at in range(len(counts)) if at != stop), key=lambda at: (-counts[at], at))
    assert found == sorted([stop, *rest[: size - 1]])


def test_counts_are_those_of_training_answers(chain, tmp_path):
    teacher, expected = chain.recipe.cache_dir / "teacher", np.zeros(261, np.int64)
    names = [path.name.rsplit("-", 1)[0] for path in sorted(teacher.glob("*.parquet"))]
    assert "selection" in names and "distill.data" in names
    for name in names:
        for row in read_shards(shard_paths(teacher, name)):
            if row.split == "train":
                np.add.at(expected, row.continuation_ids, 1)
    assert id_counts(sorted(teacher.glob("*.parquet")), 261).tolist() == expected.tolist() and expected.sum() > 1000
    assert pack_model.draft_vocabulary(chain.recipe, None) is None
    chosen = pack_model.draft_vocabulary(chain.recipe, SIZE)
    assert len(chosen) == SIZE and {256, 258} <= set(chosen.tolist())
    without = set(range(261)) - set(chosen.tolist())
    assert expected[list(without)].max() <= sorted(expected[chosen])[2]  # but for the stop ids
    assert own_ids([*sorted(without)[:3], *chosen[:3], sorted(without)[0]], chosen).tolist() == sorted(without)[:3]


def test_without_answers_packing_says_what_makes_them(chain, tmp_path, monkeypatch):
    monkeypatch.setattr(type(chain.recipe), "cache_dir", property(lambda _: tmp_path))
    with pytest.raises(ValueError, match=r"Next: python -m scripts\.generate_teacher --recipe tiny"):
        pack_model.draft_vocabulary(chain.recipe, SIZE)


@pytest.mark.parametrize("size", [1, 262, True])
def test_a_size_that_cannot_be_is_no_recipe(tmp_path, size):
    from test_recipe import edited

    path = edited(tmp_path, lambda recipe: recipe["serving"].update(draft_vocabulary=size))
    with pytest.raises(RecipeError, match="draft_vocabulary"):
        load_recipe("tiny", path)


def test_runs_begun_before_it_was_declared_go_on(tmp_path, monkeypatch):
    """A required field would make every run folder on a disk unreadable that was begun without it."""
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    recipe = load_recipe("tiny")
    document = RunDocument(recipe, []).document()
    del document["recipe"]["serving"]["draft_vocabulary"]
    write_json(recipe.run_dir / "architecture.json", document)
    assert RunDocument.open(recipe).recipe.serving.draft_vocabulary is None


# ---------------------------------------------------------------------------- the document


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_text_and_back(case):
    num_ids, ids = case
    assert from_text(to_text(sorted(ids), num_ids), num_ids).tolist() == sorted(ids)


def test_the_document_is_read_back(chain, restricted, archive):
    """And an archive without it drafts every existing id, as all did before there were draft vocabularies."""
    expected = pack_model.draft_vocabulary(chain.recipe, SIZE)
    for found in (verify(restricted), load_model(restricted)):
        assert found.draft_vocabulary.tolist() == expected.tolist() and found.draft_vocabulary.dtype == np.int32
    assert load_model(restricted).info["draft_vocabulary"] == SIZE
    assert not (chain.model_dir / FILE).exists() and load_model(chain.model_dir).draft_vocabulary is None
    (archive / FILE).unlink()
    refused(archive)
    sign(archive)
    assert verify(archive).archive_id == verify(chain.model_dir).archive_id


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.pop("count"), "fields"),
        (lambda d: d.update(format=2), "format"),
        (lambda d: d.update(count=SIZE + 1), "count"),
        (lambda d: d.update(count=float(SIZE)), "count"),
        (lambda d: d.update(ids=list(range(SIZE))), "base64"),
        (lambda d: d.update(ids=d["ids"] + "\n"), "ids"),
        (lambda d: d.update(ids=to_text([256, 258, 3], 269), count=3), "one bit for each of 261"),
        (lambda d: d.update(ids=to_text([256, 258, 261], 264), count=3), "id 261 does not exist"),
        (lambda d: d.update(ids=to_text([256, 3], 261), count=2), "every stop id"),
        (lambda d: d.update(ids=to_text([], 261), count=0), "2 at least"),
    ],
)
def test_a_document_that_lies_is_refused(archive, change, message):
    edit(archive, FILE, lambda document: change(document) and None)
    refused(archive, match=message)


def test_bits_that_mean_nothing_are_none():
    text = to_text([0, 3], 8)
    assert text == "CQ==" and from_text("CQ==", 8).tolist() == [0, 3]
    with pytest.raises(ValueError, match="spelled otherwise"):
        from_text("CR==", 8)


# ---------------------------------------------------------------------------- drafting


@torch.inference_mode()
def oracle(loaded, tokens, k) -> list[int]:
    """The best of the allowed ids by whole logits of a plain forward over everything so far."""
    allowed = sorted({*loaded.draft_vocabulary.tolist(), *tokens})
    drafted = []
    while len(drafted) < k and not set(drafted[-1:]) & loaded.stop_ids:
        ids = torch.tensor([[*tokens, *drafted]])
        logits = loaded.model(input_ids=ids).logits[0, -1, allowed]
        drafted.append(allowed[int(logits.argmax())])
    return drafted


def test_a_draft_is_the_argmax_over_the_list_and_the_request(chain, restricted):
    """Alone and in a batch, by the own engine; the self-check, made and compared over the whole head, lets it pass."""
    loaded = load_model(restricted, "packed", torch.float32)
    engine, free = DraftEngine(loaded), DraftEngine(load_model(chain.model_dir, "packed", torch.float32))
    random = np.random.default_rng(0)
    requests = [DraftRequest(random.integers(0, 256, 5 + 2 * at).tolist(), 12) for at in range(8)]
    together = [draft.tokens for draft in engine.draft(requests)]
    assert together == [oracle(loaded, request.tokens, 12) for request in requests]
    assert together == [engine.draft([request])[0].tokens for request in requests]
    assert together != [draft.tokens for draft in free.draft(requests)]
    outside = [set(draft) - set(loaded.draft_vocabulary.tolist()) for draft in together]
    assert any(outside) and all(ids <= set(one.tokens) for ids, one in zip(outside, requests, strict=True))
    packed = {token for case in loaded.self_check["drafts"] for token in case["draft"]}
    assert packed - set(loaded.draft_vocabulary.tolist())


def test_teacher_forcing_with_the_vocabulary_is_replay_with_it(chain, restricted):
    engine = DraftEngine(load_model(restricted, "packed", torch.float32))
    rows, vocabulary = development(chain), engine.draft_vocabulary
    scores = score_forward(engine.forward, rows, draft_vocabulary=vocabulary)
    free = score_forward(engine.forward, rows)
    assert any((one.runs != other.runs).any() for one, other in zip(scores, free, strict=True))

    def draft(prefixes):
        return [one.tokens for one in engine.draft([DraftRequest(prefix, 16) for prefix in prefixes])]

    replayed = replay_rows([(r.prompt_ids, r.continuation_ids, r.finish_reason) for r in rows], 16, draft)
    by_bits = [rounds_from_runs(one.runs, row.finish_reason, 16) for one, row in zip(scores, rows, strict=True)]
    assert [[one.accepted for one in row] for row in replayed] == [[one.accepted for one in row] for row in by_bits]


def test_evaluate_shows_both_ways(chain, restricted):
    asked = argparse.Namespace(draft_vocabulary="both", copy_policy="off")
    targets = evaluate.variants(evaluate.parse_target(f"new={restricted}", chain.recipe), asked)
    assert [target.stage for target in targets] == ["new-no-draft_vocabulary", "new"]
    records = evaluate.evaluate_targets(
        targets, development(chain), chain.recipe, families=frozenset(), dtype=torch.float32, replay=4
    )
    assert (
        records[0]["agreement"] != records[1]["agreement"] and records[1]["gain"]["over"] == "new-no-draft_vocabulary"
    )
    assert [record["replay"]["equal"] for record in records] == [4, 4]
