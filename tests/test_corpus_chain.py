"""The data half of a recipe in one command, behind the stand-in of the hub: tiny models, a corpus file made here."""

import json
import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from drafter import fetch, recipe
from scripts import corpus_chain, download_data

NAMES = ("Ann", "Bo", "Cy", "Di", "Eve", "Flo", "Gus", "Hal")


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """60 questions and two that stand twice; the chain works below tmp_path."""
    monkeypatch.setattr(corpus_chain, "ROOT", tmp_path)
    monkeypatch.setattr(fetch, "PATIENCE", fetch.Patience(first_wait_s=0.001))
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    source = random.Random(0)
    words, pick = [f"thing{number}" for number in range(200)], source.choice
    texts = [
        f"{pick(NAMES)} has {source.randint(2, 99)} {' and '.join(source.sample(words, 8))}. How many are left?"
        for _ in range(60)
    ]
    texts += [texts[0], texts[1].upper()]
    path = tmp_path / "questions.parquet"
    pq.write_table(pa.table({"question": texts, "answer": ["never read"] * len(texts)}), path)
    return path


def test_from_a_corpus_file_to_a_clean_audit(questions, tmp_path, capsys):
    before = recipe.ROOT, download_data.LOCK
    assert corpus_chain.main(["--recipe", "tiny-corpus", "--stand-in", str(questions)]) == 0
    document = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    rows = {row["step"]: row for row in document["rows"]}
    assert rows["expanded.data"]["rows_out"] == 20 and rows["audit"]["faults"] == 0 < rows["audit"]["checks"]
    assert rows["generate_teacher"]["rows_in"] == rows["generate_teacher"]["rows_out"] > 20
    made = tmp_path / "runs" / "corpus-chain"
    assert json.loads((made / "corpora.lock.json").read_text())["files"]
    prompts = (made / "data/cache/tiny-corpus/prompts/expanded.data.jsonl").read_text()
    assert "thing" in prompts and "never read" not in prompts
    assert before == (recipe.ROOT, download_data.LOCK) and "HF_ENDPOINT" not in os.environ
    # a second run finds everything, and the audit is as clean
    assert corpus_chain.main(["--recipe", "tiny-corpus", "--stand-in", str(questions)]) == 0
    again = {row["step"]: row for row in json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]}
    assert again["generate_teacher"]["rows_out"] == 0 and again["audit"]["faults"] == 0


def test_a_row_that_is_changed_behind_its_back_is_found(questions, tmp_path, capsys):
    """The link from the answers back to the corpus file: another question in the prompts, another file in the cache."""
    assert corpus_chain.main(["--recipe", "tiny-corpus", "--stand-in", str(questions)]) == 0
    made = tmp_path / "runs" / "corpus-chain"
    [file] = (made / "data/cache/corpora").rglob("*.parquet")
    table = pq.read_table(file)
    pq.write_table(table.slice(1), file)
    with corpus_chain.stand_in(recipe.load_recipe("tiny-corpus"), questions):
        report, _ = corpus_chain.audit.audit(made / "runs" / "tiny-corpus")
    assert any(fault.link == "corpora" and "sha256" in fault.text() for fault in report.faults)


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--recipe", "tiny"], "names no corpora"), (["--stand-in", "nowhere.parquet"], "no such file")],
)
def test_what_cannot_be_run_is_said_at_once(flags, message, capsys):
    assert corpus_chain.main(flags) == 1
    assert message in capsys.readouterr().err
