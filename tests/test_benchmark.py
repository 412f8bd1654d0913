"""The benchmarks run, on an archive where everything takes milliseconds, and say what they promise to say."""

import json

import pytest

from drafter import results
from scripts import _load_benchmark as bench
from scripts import _teacher_benchmark, benchmark

STAGES = [
    "read file (stored)",
    "sha256 (stored)",
    "zstd (decoded)",
    "sha256 (decoded)",
    "scales and checks (decoded)",
    "xz adapter (decoded)",
    "empty model",
    "tokenizer",
]


def test_load(archive, tmp_path, monkeypatch, capsys):
    """Table, last line and result file of one command; the memory of a load is measured in a process of its own."""
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(
        results.record, "__kwdefaults__", {"results": tmp_path / "results", "readme": tmp_path / "none"}
    )
    assert benchmark.main(["load", str(archive), "--runs", "3", "--record"]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    [found] = document.pop("models")
    assert results.read(tmp_path / "results" / "load.json") == document
    rows = document["rows"]
    assert [row["stage"] for row in rows] == [*STAGES, "verify", "load packed", "load merged"]
    for row in rows:
        assert set(row) == {"model", "stage", "mb_per_s", "seconds", "peak_memory_bytes", "runs", "min", "max"}
        assert row["model"] == "tiny" and row["runs"] == 3 and 0 < row["min"] <= row["seconds"] <= row["max"]
        assert (row["peak_memory_bytes"] is None) == (row["stage"] in STAGES)
        assert (row["mb_per_s"] is None) == (row["stage"] in ("empty model", "tokenizer"))
        assert any(row["stage"] in line for line in lines)
    floor = max(rows[: len(STAGES)], key=lambda row: row["seconds"])
    assert (found["floor"], found["floor_s"]) == (floor["stage"], floor["seconds"])
    assert found["packed_to_floor"] == pytest.approx(rows[-2]["seconds"] / floor["seconds"], abs=0.01)
    assert found["packed_peak_bytes"] == rows[-2]["peak_memory_bytes"] >= found["packed_kept_bytes"] > 0
    # tied weights once, in bf16: a table of 272 x 64, two layers of 64 x (64 + 32 + 32 + 64 + 3 x 96), norms
    assert found["merged_model_bytes"] >= 2 * (272 * 64 + 2 * 64 * (64 + 32 + 32 + 64 + 3 * 96))
    assert 0 < found["packed_model_bytes"] < found["merged_model_bytes"]


def test_memory_of_a_server(archive, tmp_path, monkeypatch, capsys):
    """A server of the 1.7 B shape held 9 GB for 2.4 GB of weights, keys and values, and no figure showed it."""
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)
    assert benchmark.main(["memory", str(archive)]) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["peak_bytes"] >= row["kept_bytes"] > row["weights_bytes"] + row["cache_bytes"] > row["weights_bytes"] > 0


def test_rounds_go_through_all_stages_in_turn_and_do_not_count_the_first():
    calls = []
    stages = [bench.Stage(name, None, lambda name=name: calls.append(name)) for name in "ab"]
    seconds = bench.time_rounds(stages, 3, lambda: None)
    assert calls == ["a", "b"] * 4
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3}


def test_what_is_not_an_archive_is_one_line(tmp_path, capsys):
    assert benchmark.main(["load", str(tmp_path)]) == 1
    assert "is not a packed archive" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        benchmark.main(["load", "--runs", "0"])


def test_teacher_rates_are_of_equal_work(chain):
    """Each decoder answers the same prompts with as many ids, but for near-ties."""
    half = chain.recipe.generation.model_copy(update={"dtype": "bfloat16"})  # the kernels' own
    recipe = chain.recipe.model_copy(update={"generation": half})
    rows = _teacher_benchmark.measure(recipe, 8, lambda count: None)
    assert [row["decoder"] for row in rows] == ["generate", "transformers", "own"]
    assert len({row["prompt_tokens"] for row in rows}) == 1 and all(row["tokens_per_s"] > 0 for row in rows)
    counts = [row["generated_tokens"] for row in rows]
    assert max(counts) <= 1.2 * min(counts)
