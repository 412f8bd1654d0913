"""serve.sh in a folder of its own: what it says when something is missing, and that its curl line works."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HANG_S = 60

# Stands in for the archive's loader: a small random model, made on the spot.
MODEL_IO = """
import os
from types import SimpleNamespace
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

def load_model(model_dir, form, dtype):
    assert form == "packed" and os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=1, head_dim=16,
                         num_attention_heads=2, num_key_value_heads=1, bos_token_id=None, eos_token_id=None)
    chat = SimpleNamespace(render=lambda messages: [3, 1, 4], thinking="off")
    return SimpleNamespace(model=Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval(), chat=chat,
                           archive_id="c" * 64, context=512, num_ids=290, stop_ids=(2,), info={"recipe": "tiny"},
                           tensors={}, adapter=None, self_check={"margin": 1.0, "drafts": []},
                           copy_policy={"enabled": False}, draft_vocabulary=None)
"""


@pytest.fixture
def root(tmp_path):
    """A copy of what serving needs, without a virtual environment and without a model."""
    shutil.copy(ROOT / "serve.sh", tmp_path)
    shutil.copy(ROOT / "server.py", tmp_path)
    shutil.copytree(ROOT / "drafter", tmp_path / "drafter", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "model_io.py").write_text(MODEL_IO)
    return tmp_path


def add_model(root):
    from drafter.recipe import RunDocument, load_recipe

    (root / "model").mkdir()
    document = RunDocument(load_recipe("tiny"), []).document()
    (root / "model" / "architecture.json").write_text(json.dumps(document))


def environment(**more):
    """This interpreter first as python3, and nothing of the caller's settings."""
    ours = ("MODEL_DIR", "HOST", "PORT", "WEB_CONCURRENCY", "QUEUE_LIMIT", "PYTHONPATH")
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


def run(root, *args, **more):
    command = ["bash", str(root / "serve.sh"), *args]
    return subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=HANG_S, cwd="/")


def assert_one_sentence(result, *parts):
    assert result.returncode != 0
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


@contextlib.contextmanager
def python_without_packages(folder):
    """A python3 that sees the standard library only."""
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    (folder / "python3").chmod(0o755)
    yield f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_a_missing_model_is_one_sentence_with_the_command_that_makes_it(root):
    assert_one_sentence(run(root), str(root / "model"), "make one: bash scripts/quickstart.sh")
    assert_one_sentence(run(root, MODEL_DIR="/nowhere"), "/nowhere")


def test_missing_packages_are_one_sentence_with_the_command_that_installs_them(root):
    add_model(root)
    with python_without_packages(root / "bin") as path:
        result = run(root, PATH=path)
    assert_one_sentence(result, "lacks torch, transformers,", "-m pip install -r requirements-serve.txt")


def paste(line):
    """Runs the curl line; where there is no curl, does what it says."""
    if shutil.which("curl"):
        return subprocess.run(["bash", "-c", line], capture_output=True, timeout=HANG_S, check=True).stdout
    words = shlex.split(line)
    url, data = next(word for word in words if word.startswith("http://")), words[words.index("-d") + 1]
    return urllib.request.urlopen(url, data.encode(), timeout=HANG_S).read()


def test_the_curl_line_can_be_pasted(root):
    """Ids in it are real, host and port are those in use; ended by SIGTERM, the process exits with 0."""
    add_model(root)
    process = subprocess.Popen(
        ["bash", str(root / "serve.sh"), "--dtype", "float32"], cwd="/", env=environment(PORT="0"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        line = next(line for line in process.stdout if line.startswith("curl "))
        assert '{"tokens":[3,1,4]}' in line
        document = json.loads(paste(line))
        assert document["model"] == "c" * 64 and 1 <= len(document["draft"]) <= 16
        process.send_signal(signal.SIGTERM)  # to the shell's own process id: it has become the server
        assert process.wait(HANG_S) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


# ---------------------------------------------------------------------------- wheels/


def make_wheel(folder: Path, name: str) -> str:
    """A pure wheel that holds one empty module; its requirement line with hash."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}==1.0 --hash=sha256:{sha256(path.read_bytes()).hexdigest()}"


def test_wheels_are_installed_offline_and_by_hash(root):
    """Stand-in wheels: the install must take them, from that folder only, and refuse one whose bytes differ."""
    names = ["torch", "transformers", "safetensors", "zstandard", "pydantic", "fastapi", "uvicorn", "prometheus_client"]
    (root / "wheels").mkdir()
    lines = [make_wheel(root / "wheels", name) for name in names]
    (root / "server.py").write_text("import sys, torch; print('served by', sys.executable, sys.argv[1:])")

    (root / "requirements-serve.txt").write_text("\n".join([*lines[1:], "torch==1.0 --hash=sha256:" + "0" * 64]))
    result = run(root, "--port", "1")
    assert result.returncode != 0 and "serve.sh: wheels/ lacks what requirements-serve.txt pins" in result.stderr
    assert not (root / ".venv").exists()  # half an environment would pass for a whole one next time

    (root / "requirements-serve.txt").write_text("\n".join(lines))
    for _ in range(2):  # the second start installs nothing
        result = run(root, "--port", "1")
        assert result.returncode == 0, result.stderr
        assert f"served by {root}/.venv/bin/python ['--port', '1']" in result.stdout
    assert "installing" not in result.stdout


@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_that_is_no_environment_is_never_touched(root, tmp_path_factory, linked):
    """With VENV=$HOME and incomplete wheels/ the clean-up of a failed install removed the home folder."""
    home = tmp_path_factory.mktemp("home")
    (home / "thesis.txt").write_text("years of work")
    (root / "wheels").mkdir()
    (root / "requirements-serve.txt").write_text("torch==1.0 --hash=sha256:" + "0" * 64)
    venv = home
    if linked:
        venv = root / "link"
        venv.symlink_to(home)
    result = run(root, VENV=str(venv))
    assert_one_sentence(result, str(venv), "bin/python", "VENV")
    assert (home / "thesis.txt").read_text() == "years of work" and list(home.iterdir()) == [home / "thesis.txt"]
    assert not linked or venv.is_symlink()
    (root / "gone").symlink_to(root / "nowhere")  # a link to nothing is there as well
    assert_one_sentence(run(root, VENV=str(root / "gone")), "bin/python")
    assert (root / "gone").is_symlink()
