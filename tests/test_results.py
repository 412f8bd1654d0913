"""Result files and the tables made of them: one shape, and a README that can say nothing else."""

import json

import pytest

from drafter import results


def flat_document(name="draft", **row):
    return results.build(name, [{"engine": "ours", "batch": 1, "ms_per_step": 12.345, **row}], ["python", "x.py"])


def test_result_file_shape():
    document = flat_document()
    assert tuple(document) == ("name", "command", "commit", "date", "machine", "versions", "rows")
    assert set(document["machine"]) == {"cpu", "cores", "memory_gb", "gpu", "isa"}
    assert json.loads(json.dumps(document)) == document
    bad = {**document, "rows": [{"a": 1.0}, {"b": 2.0}, {"a": float("nan")}], "note": ""}
    del bad["date"]
    with pytest.raises(ValueError) as fault:
        results.validate(bad)
    for part in ("missing date", "unknown note", "rows[1] has other columns", "rows[2].a is not finite"):
        assert part in str(fault.value)
    with pytest.raises(ValueError, match="rows must be a non-empty list"):
        results.validate({**document, "rows": []})


def test_markdown_tables():
    table = results.markdown_table(flat_document(p50=None, note="a|b")["rows"]).splitlines()
    assert table[0] == "| engine | batch | ms_per_step | p50 | note |"
    assert table[2] == "| ours   |     1 |       12.35 |   – | a\\|b |".replace("12.35", f"{12.345:.2f}")
    assert len(table) == 3
    stage = {"stage": "distill", "layers": 17, "agreement": 0.771, "tau": {"4": 3.1, "8": 3.8, "16": 4.15}}
    lines = results.markdown_table([stage, {**stage, "stage": "polish", "tau16_interval": [3.9, 4.4]}]).splitlines()
    assert "τ@16" in lines[0] and lines[2].startswith("| distill |     17 |     0.771 |")
    assert "3.90 – 4.40" in lines[3] and len({len(line) for line in lines}) == 1


def test_record_refreshes_the_readme(tmp_path):
    readme = tmp_path / "README.md"
    tail = "tail <!-- results:other --> <!-- /results:other -->\n"
    before = f"# x\n<!-- results:draft -->\nold\n<!-- /results:draft -->\n{tail}"
    readme.write_text(before)
    document = flat_document()
    path = results.record(document, results=tmp_path / "results", readme=readme)
    assert results.read(path) == document
    text = readme.read_text()
    assert results.markdown_table(document["rows"]) in text and "old" not in text
    assert text.startswith("# x\n<!-- results:draft -->\n") and text.endswith(tail)
    results.record(document, results=tmp_path / "results", readme=readme)
    assert readme.read_text() == text  # writing the same twice changes nothing
    with pytest.raises(OSError):
        results.refresh_readme(readme, tmp_path / "results")  # a table without a file is not left stale
    with pytest.raises(ValueError, match="once each"):
        results.replace_block("<!-- results:a --> <!-- results:a --> <!-- /results:a -->", "a", "")
    path.rename(path.with_name("load.json"))
    with pytest.raises(ValueError, match="says its name is 'draft'"):
        results.read(path.with_name("load.json"))
