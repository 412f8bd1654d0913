"""The scan of our own code: clean as it is, and what is planted is found, in the tree and in the history."""

import ast
import subprocess

import pytest

from scripts import audit
from scripts._audit_report import Report
from scripts._audit_source import (
    check_final_openers,
    check_history,
    check_readme,
    check_source,
    final_openers,
    foreign_data,
)

LOADER = "load_" + "dataset"  # in pieces: this file is scanned too
BENCHMARK = "cais/" + "mmlu"
TOKEN = "hf_" + "Z" * 34


def faults(check, *where) -> list[str]:
    report = Report()
    check(report, *where)
    return [fault.text() for fault in report.faults]


def commit(root, message):
    for words in (["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", message]):
        subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "step.py").write_text('"""A step that reads gsm8k? No: it only says so."""\n')
    commit(tmp_path, "first")
    return tmp_path


def test_our_own_code_is_clean():
    """Tables, tree and who opens the final prompts; the history is left to `audit --source`, a clone may have none."""
    for check in (check_source, check_final_openers, check_readme):
        assert faults(check) == []


def test_a_planted_loader_and_a_planted_token_are_found_and_stay_found(repository):
    assert faults(check_source, repository) == [] == faults(check_history, repository)
    planted = repository / "scripts" / "planted.py"
    planted.write_text(f'from datasets import {LOADER}\nrows = {LOADER}("{BENCHMARK}", "all", split="te" "st")\n')
    (repository / "notes.md").write_text(f"the token is {TOKEN}\n")
    found = faults(check_source, repository)
    assert any("planted.py:2" in one and LOADER in one and BENCHMARK in one for one in found)
    assert any("held-out split" in one for one in found)
    assert any("notes.md: holds a hub token" in one and "line 1" in one for one in found)
    assert not any(TOKEN in one for one in found)
    commit(repository, "oops")
    planted.unlink()
    (repository / "notes.md").unlink()
    commit(repository, "never happened")
    assert faults(check_source, repository) == []
    found = faults(check_history, repository)
    assert any("planted.py" in one and BENCHMARK in one for one in found)
    assert any("notes.md: once held a hub token" in one for one in found) and not any(TOKEN in one for one in found)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (f'datasets.{LOADER}("openai/gsm8k")', False),  # a corpus of qwen3-8b
        (f'datasets.{LOADER}("openai/gsm8k", split="validation")', True),
        (f"{LOADER}(name)", True),
        (f'{LOADER}(path="{BENCHMARK}")', True),
        ("import lm_" + "eval", True),
        ("from human_" + "eval.data import read_problems", True),
        (f'WHERE = "{BENCHMARK}"', True),
        ('FAMILY = "gsm8k/main"', False),
        ('"a sentence about gsm8k and humaneval / mbpp"', False),
        ("rows = read(split='dev')", True),
        ("rows = read(split='development')", False),
    ],
)
def test_what_brings_data(code, found):
    assert bool(list(foreign_data(ast.parse(code), {"openai/gsm8k"}))) is found


def test_the_downloader_may_name_what_it_brings_by_a_variable_alone():
    for repo, found in (("file.repo", False), (f'"{BENCHMARK}"', True)):
        code = f"hf_hub_{'download'}({repo}, name)"
        assert bool(list(foreign_data(ast.parse(code), {"openai/gsm8k"}, True))) is found


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('rows = read_prompts(folder / "prompts" / "final.jsonl")', True),
        ('def f(r):\n    path = prompts_path(r, "final")\n    return open(path)', True),
        ('path = folder / "final.jsonl"\ndef f():\n    return path.read_text()', True),
        ('def f():\n    path = g() or folder / "final.jsonl"\n    with open(path) as file: pass', True),
        ('def f():\n    path = folder / "final.jsonl"\n    return path.exists() and sha256_file(path)', False),
        ('def f():\n    path = folder / "final.jsonl"\ndef g(path):\n    return open(path)', False),
        ('print("final.jsonl is read by validate")', False),
        ('open(folder / "semifinal.jsonl")', False),
    ],
)
def test_who_opens_the_final_prompts(code, found):
    assert bool(list(final_openers(ast.parse(code)))) is found


def test_a_number_that_the_results_do_not_hold_is_found(tmp_path):
    from drafter import results

    text = results.README.read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    assert faults(check_readme, tmp_path / "README.md") == []
    begin = text.index("<!-- results:quickstart -->")
    at = text.index("| polish ", begin)
    changed = text[:at] + text[at:].replace("0.5", "0.9", 1)
    (tmp_path / "README.md").write_text(changed, encoding="utf-8")
    [fault] = faults(check_readme, tmp_path / "README.md")
    assert "quickstart" in fault


def test_source_alone_needs_no_target(capsys):
    with pytest.raises(SystemExit):
        audit.main([])
    assert audit.main(["--source", "--dry-run"]) == 0
    assert "who opens final" in capsys.readouterr().out
