"""README.md is run, not believed: its commands parse, its files exist, its numbers are those of data/results/."""

import argparse
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from drafter import results

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)  # (language, text)
RESULTS = re.findall(r"<!-- results:([a-z0-9_-]+) -->\n(.*?)<!-- /results:\1 -->", README, flags=re.DOTALL)
PROSE = re.sub(r"<!-- results:.*?<!-- /results:[a-z0-9_-]+ -->|```.*?```", "", README, flags=re.DOTALL)
INLINE = re.findall(r"`([^`\n]+)`", PROSE)

# What the steps make, or a user brings: not in a fresh clone.
MADE = ("data/cache/", "runs/", "model/", "wheels/", "manifest.json")


def commands() -> list[str]:
    """Every `python` and `bash` line of the bash blocks and of the text, comments off, `$R` filled in."""
    lines = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
    lines = [line.split("#")[0].strip() for line in [*lines, *INLINE]]
    recipe = next(line.removeprefix("R=") for line in lines if line.startswith("R="))
    return list(dict.fromkeys(line.replace("$R", recipe) for line in lines if line.startswith(("python ", "bash "))))


class Parsed(Exception):
    """Ends a command behind its own argparse, before it does anything."""


@pytest.fixture
def parse(monkeypatch):
    """parse(command) -> (parser, arguments) by the command's own `main`; SystemExit(2) for what it does not take."""
    real = argparse.ArgumentParser.parse_args

    def parse_args(self, argv=None, namespace=None):
        raise Parsed(self, real(self, argv, namespace))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)

    def run(command: str):
        words = shlex.split(command)
        if words[1] == "-m":
            name, arguments = words[2], words[3:]
        else:
            name, arguments = words[1].removesuffix(".py").replace("/", "."), words[2:]
        with pytest.raises(Parsed) as parsed:
            importlib.import_module(name).main(arguments)
        return parsed.value.args

    return run


# ---------------------------------------------------------------------------- commands


def test_there_are_commands():
    """The collection below proves nothing when it collects nothing."""
    found = commands()
    for command in ("bash scripts/quickstart.sh", "bash scripts/test.sh", "bash serve.sh"):
        assert command in found
    assert sum(command.startswith("python -m scripts.") for command in found) > 12
    assert sum(command.startswith("python train.py") for command in found) >= 2


@pytest.mark.parametrize("command", [one for one in commands() if one.startswith("python ") and " pytest " not in one])
def test_python_commands_parse(command, parse, capsys):
    try:
        parse(command)
    except SystemExit:
        pytest.fail(f"{command}: {capsys.readouterr().err}")


@pytest.mark.parametrize("command", [one for one in commands() if one.startswith("bash ")])
def test_bash_scripts_exist_and_parse(command):
    script = ROOT / shlex.split(command)[1]
    assert script.exists(), command
    subprocess.run(["bash", "-n", script], check=True)


def test_every_step_by_hand_has_dry_run_and_help(parse):
    """The block says "every step has --dry-run and --help"."""
    [block] = [text for language, text in BLOCKS if language == "bash" and "R=" in text]
    steps = [one for one in commands() if one.startswith("python ") and one.split(" --recipe")[0] in block]
    assert len(steps) > 12
    for command in steps:
        parser, _ = parse(command)
        assert {"--dry-run", "--help"} <= set(parser._option_string_actions), command


# ---------------------------------------------------------------------------- files


def test_files_named_in_the_text_exist():
    names = [name for name in INLINE if re.fullmatch(r"[\w./-]+(\.(py|sh|md|json|txt)|/)", name)]
    assert len(names) > 4
    for name in names:
        if not name.startswith(MADE):
            assert any((ROOT / folder / name).exists() for folder in (".", "scripts", "drafter", "data")), name


def test_the_file_list_names_what_exists():
    [text] = [text for _, text in BLOCKS if text.startswith("architecture.json")]
    modules = re.search(r"^drafter/ .*?(?=^scripts/)", text, flags=re.DOTALL | re.MULTILINE).group()
    listed = sorted(re.findall(r"\w+\.py", modules))
    assert listed == sorted(path.name for path in (ROOT / "drafter").glob("*.py") if path.name != "__init__.py")
    for name in re.findall(r"[\w./-]+\.(?:py|sh|md|json)\b|\b[\w-]+/(?=[\s,])", text.replace(modules, "")):
        if not name.startswith(MADE) and "NAME" not in name:
            assert any((ROOT / folder / name).exists() for folder in (".", "scripts", "data")), name


# ---------------------------------------------------------------------------- numbers


def test_tables_are_those_of_the_result_files():
    """A table whose file does not exist yet must be empty; any other is what its file renders to, to the letter."""
    assert RESULTS
    for name, shown in RESULTS:
        path = ROOT / "data" / "results" / f"{name}.json"
        expected = results.markdown_table(results.read(path)["rows"]) if path.exists() else ""
        assert shown.strip() == expected, name


def test_measured_numbers_stand_in_tables_only():
    """A number typed into the text outlives the measurement: decimals, and whatever has a measured unit."""
    text = re.sub(r"`[^`]*`", "", PROSE)
    decimals = set(re.findall(r"(?<![\w.-])\d+[.,]\d+(?![\w.,])", text)) - {"3.11", "3.13", "3.12"}
    decimals = {number for number in decimals if not re.fullmatch(r"\d{1,3},\d{3}", number)}  # 1,000 resamples
    with_unit = re.findall(r"\d+ ?(?:tokens/s|ms|MB|GB|seconds|minutes|hours|s)\b", text)
    assert (decimals, with_unit) == (set(), [])


def test_no_placeholder_is_left():
    assert re.findall(r"@@\w+@@", README) == []
