"""Answers taken from a committed file: the same ids as generated, their lists computed, and nothing foreign let in."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafter import cached_answers
from drafter.cached_answers import CachedAnswers
from drafter.provenance import sha256_file
from drafter.recipe import CachedFile
from drafter.teacher_data import read_metadata, read_shards, shard_paths
from scripts import generate_teacher
from scripts._audit_data import check_rows, check_shards
from scripts._audit_report import Report


@pytest.fixture
def world(chain, tmp_path, monkeypatch):
    """(recipe with the chain's answers as its cached file, folder of generated shards); caches are a copy."""
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    monkeypatch.setattr(generate_teacher, "ROOT", tmp_path)
    monkeypatch.setattr("scripts._audit_data.ROOT", tmp_path)
    shutil.copytree(chain.root / "data/cache/tiny", tmp_path / "data/cache/tiny")
    teacher = tmp_path / "data/cache/tiny/teacher"
    exported = generate_teacher.export(chain.recipe, tmp_path / "data/embedded/tiny.parquet")
    generated = tmp_path / "generated"
    teacher.rename(generated)
    file = CachedFile(file="data/embedded/tiny.parquet", sha256=exported["sha256"])
    return with_cached(chain.recipe, file), generated


def with_cached(recipe, file):
    return recipe.model_copy(update={"generation": recipe.generation.model_copy(update={"cached": file})})


def rows_of(folder):
    return {row.id: row for row in read_shards(sorted(folder.glob("*.parquet")))}


def test_cached_shards_are_generated_shards(world):
    recipe, generated = world
    report = generate_teacher.generate(recipe)
    assert (report["made"], report["cached"]) == (0, report["rows"])
    expected, found = (rows_of(folder) for folder in (generated, recipe.cache_dir / "teacher"))
    assert expected.keys() == found.keys()
    for key, row in expected.items():
        other = found[key]
        assert (row.continuation_ids, row.finish_reason) == (other.continuation_ids, other.finish_reason)
        assert np.abs(row.topk_logprobs.astype(float) - other.topk_logprobs.astype(float)).max() < 0.05
        assert np.abs(row.tail_logprob - other.tail_logprob).max() < 0.1
    metadata = read_metadata(next((recipe.cache_dir / "teacher").glob("*.parquet")))
    assert metadata["cached_answers"] == recipe.generation.cached.sha256
    assert generate_teacher.generate(recipe)["cached"] == 0  # a second run finds all


def test_equal_answers_make_equal_bytes(world, tmp_path):
    _, generated = world
    rows = list(rows_of(generated).values())
    hashes = {cached_answers.write(tmp_path / name, some, {"a": 1}) for name, some in (("1", rows), ("2", rows[::-1]))}
    assert len(hashes) == 1


def test_a_run_that_was_cut_off_goes_on(world, monkeypatch):
    recipe, _ = world
    real, seen = cached_answers.replay, []

    def cut(forward, prompts, answers, *, on_finish, **settings):
        def save(decoded):
            if len(seen) == 9:
                raise KeyboardInterrupt
            seen.append(decoded)
            on_finish(decoded)

        return real(forward, prompts, answers, on_finish=save, **settings)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cached_answers, "replay", cut)
        generate_teacher.generate(recipe)
    report = generate_teacher.generate(recipe)
    assert report["cached"] == report["rows"] - 9 and report["made"] == 0


def test_prompts_without_a_cached_answer_are_answered(world, tmp_path):
    """A prompt of another text, and one that is rendered otherwise than when it was answered, find nothing."""
    recipe, generated = world
    rows = list(rows_of(generated).values())
    settings = CachedAnswers.read(tmp_path / recipe.generation.cached.file, recipe.generation.cached.sha256).settings
    rows[0].prompt_ids.append(65)  # the answer to a longer prompt
    file = tmp_path / "data/embedded/some.parquet"
    recipe = with_cached(recipe, CachedFile(file="data/embedded/some.parquet",
                                            sha256=cached_answers.write(file, rows[:-3], settings)))  # fmt: skip
    report = generate_teacher.generate(recipe)
    assert (report["made"], report["cached"]) == (4, len(rows) - 4)


@pytest.mark.parametrize("damage", ["byte", "missing", "not parquet"])
def test_a_file_that_is_not_the_declared_one_is_refused(world, tmp_path, damage):
    recipe, _ = world
    path = tmp_path / recipe.generation.cached.file
    if damage == "byte":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "missing":
        path.unlink()
    else:
        path.write_text("no table")
        recipe = with_cached(recipe, CachedFile(file=recipe.generation.cached.file, sha256=sha256_file(path)))
    with pytest.raises(ValueError, match="--teacher generate|no cached answers"):
        generate_teacher.generate(recipe)
    assert not list((recipe.cache_dir / "teacher").glob("*.parquet"))


def test_answers_of_other_settings_are_refused(world, tmp_path):
    recipe, _ = world
    longer = recipe.generation.model_copy(update={"max_new_tokens": recipe.generation.max_new_tokens + 1})
    with pytest.raises(ValueError, match="max_new_tokens"):
        generate_teacher.generate(recipe.model_copy(update={"generation": longer}))


def test_answers_of_another_teacher_are_refused(world, tmp_path):
    """Settings can be copied; what the weights choose cannot: ids that this teacher would not give."""
    recipe, generated = world
    path = tmp_path / recipe.generation.cached.file
    settings = CachedAnswers.read(path, recipe.generation.cached.sha256).settings
    rows = list(rows_of(generated).values())
    for row in rows:
        row.continuation_ids[:] = [(token + 1) % 250 for token in row.continuation_ids]
    sha256 = cached_answers.write(path, rows, settings)
    recipe = with_cached(recipe, CachedFile(file=recipe.generation.cached.file, sha256=sha256))
    with pytest.raises(ValueError, match="another teacher's"):
        generate_teacher.generate(recipe)


def test_without_a_declared_file_cached_is_refused(chain):
    with pytest.raises(ValueError, match="--teacher generate"):
        generate_teacher.open_cached(chain.recipe, "cached", {})
    assert generate_teacher.open_cached(chain.recipe, "auto", {}) is None


def test_the_audit_follows_the_chain_to_the_file(world, chain):
    """A row whose ids are not those of the file, and shards that took theirs from a file that no recipe names."""
    recipe, _ = world
    generate_teacher.generate(recipe)
    report = Report()
    check_rows(report, recipe)
    assert report.faults == []
    path = shard_paths(recipe.cache_dir / "teacher", "distill.data")[0]
    table = pq.read_table(path)
    ids = table["continuation_ids"].to_pylist()
    ids[0][0] = (ids[0][0] + 1) % 250
    column = table.schema.get_field_index("continuation_ids")
    changed = pa.array(ids, table.schema.field(column).type)
    pq.write_table(table.set_column(column, table.schema.field(column), changed), path)
    report = Report()
    check_rows(report, recipe)
    assert [fault.problem for fault in report.faults if "cached" in fault.problem]
    run = type("Run", (), {"phase_log": []})
    report = Report()
    check_shards(report, recipe.model_copy(update={"generation": chain.recipe.generation}), run)
    assert any("does not name" in fault.problem for fault in report.faults)
