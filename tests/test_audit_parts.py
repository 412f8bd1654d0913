"""Single checks of the audit: copies of the teacher, near-duplicates, what must not be published."""

import json

import pytest
import torch

from drafter.archive import read_archive
from drafter.checkpoint import Checkpoint
from drafter.duplicates import NEAR_NGRAM, ngrams
from drafter.provenance import read_json
from model_io import pack_base
from scripts import pack_model
from scripts._audit_data import near_rows
from scripts._audit_report import Report
from scripts._audit_weights import check_not_teacher, check_private


def test_a_packed_copy_of_the_teacher_is_found(chain, tmp_path):
    """The student before training: layers of the teacher, quantized. Moved by 0.02 a weight they are its own."""
    folder = chain.root / "runs" / "tiny" / "student"
    teacher = chain.recipe.cache_dir / "models" / "teacher"
    settings = pack_model.generation_settings(chain.recipe)
    architecture = read_json(chain.root / "runs" / "tiny" / "architecture.json")
    weights = dict(Checkpoint(folder))
    for moved in (False, True):
        if moved:
            weights = {name: one.clone() + (one.dim() > 1) * 0.02 * torch.randn_like(one)
                       for name, one in weights.items()}  # fmt: skip
        pack_base(tmp_path / str(moved), weights=weights, config=read_json(folder / "config.json"),
                  tokenizer_dir=folder, generation=settings, architecture=architecture)  # fmt: skip
        report = Report()
        check_not_teacher(report, read_archive(tmp_path / str(moved)), teacher)
        assert bool(report.faults) is not moved
        assert report.figures["layers_of_the_teacher"] == ("0 of 14" if moved else "14 of 14")


def test_near_rows_are_found_and_templates_are_not():
    def row(name, text):
        return {"id": name, "messages": [{"role": "user", "content": text}]}

    text = " ".join(f"word{at}" for at in range(100))
    texts = {"a": text, "b": "two words", "c": " ".join(f"other{at}" for at in range(30))}
    held_out = {name: ngrams(of, NEAR_NGRAM) for name, of in texts.items()}
    near = row("near", text.replace("word50 ", "changed "))
    far = row("far", " ".join(f"word{at}" if at % 9 else "gap" for at in range(100)))
    found = near_rows(held_out, [near, far, row("short", "Two words!"), row("none", "")])
    assert found == [("near", "a", round(91 / 101, 3)), ("short", "b", 1.0)]


@pytest.mark.parametrize(
    "text",
    ["see me@example" + ".org", "http://" + "10.example/x", "at 192.168" + ".0.7", "/home" + "/me/x", "C:" + "\\Users",
     "hf_" + "a" * 34, "ghp_" + "b" * 36, "-----BEGIN " + "PRIVATE KEY-----", "Bearer " + "c" * 40],
)  # fmt: skip
def test_what_must_not_be_published(text, tmp_path):
    report = Report()
    with report.link("private"):
        check_private(report, tmp_path / "notes.json", json.dumps({"note": text}))
    assert report.faults and all("hf_a" not in fault.text() and "ghp_b" not in fault.text() for fault in report.faults)


def test_what_may_be_published(tmp_path):
    report = Report()
    texts = ["torch 2.13.0+cpu", "runs/tiny/polish", "2026-12-01T03:15:27Z", "python -m scripts.x --recipe tiny",
             "a/b/data/c", "{{ messages[0]['role'] }}", "openai/gsm8k"]  # fmt: skip
    with report.link("private"):
        check_private(report, tmp_path / "notes.json", json.dumps(texts))
    assert not report.faults
