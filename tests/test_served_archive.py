"""A packed archive behind the real process: python server.py, cut off from the network, and its client."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import model_io
import server
from drafter.checkpoint import Checkpoint
from drafter.engine import DraftEngine, DraftRequest
from drafter.recipe import RunDocument, load_recipe
from scripts import draft_client
from scripts.pack_model import generation_settings
from scripts.random_model import make_random_model

ROOT = Path(__file__).resolve().parents[1]
HANG_S = 60
MESSAGES = [{"role": "user", "content": "2+2?"}]

# Imported by Python at start: whoever looks up or connects to anything but this machine fails, and says so.
NO_NETWORK = """
import sys

def refuse(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    if host not in (None, "", "127.0.0.1", "::1", "localhost"):
        print("NETWORK:", event, host, file=sys.stderr, flush=True)
        raise OSError("no network here")

sys.addaudithook(refuse)
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    recipe, folder = load_recipe("tiny"), tmp_path_factory.mktemp("archive")
    make_random_model(recipe.base, folder / "student")
    model_io.pack_base(
        folder / "model",
        weights=Checkpoint(folder / "student"),
        config=json.loads((folder / "student" / "config.json").read_text()),
        tokenizer_dir=folder / "student",
        generation=generation_settings(recipe),
        architecture=RunDocument(recipe, []).document(),
    )
    return folder / "model"


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("offline")
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    ours = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "MODEL_DIR", "HOST", "PORT", "WEB_CONCURRENCY")
    return {**{name: value for name, value in os.environ.items() if name not in ours}, "PYTHONPATH": str(folder)}


@contextlib.contextmanager
def serving(model_dir, environment, *flags):
    """The url of the running process. It has to say nothing on stderr until it ends with 0."""
    command = ["bash", str(ROOT / "serve.sh"), "--port", "0", "--dtype", "float32", "--threads", "1", *flags]
    process = subprocess.Popen(
        command,
        env={**environment, "MODEL_DIR": str(model_dir), "VENV": sys.prefix},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready = next((line for line in process.stdout if line.startswith("ready: ")), None)
        assert ready, process.stderr.read()
        yield ready.split()[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def served(model_dir, offline):
    with serving(model_dir, offline) as url:
        yield url


def test_the_cut_off_bites(offline):
    """Without this, a server that never tries and a hook that never works would look the same."""
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    result = subprocess.run([sys.executable, "-c", code], env=offline, capture_output=True, text=True)
    assert result.returncode != 0 and "NETWORK: socket" in result.stderr


def test_without_a_network_drafts_are_those_of_the_loaded_model(served, model_dir):
    loaded = model_io.load_model(model_dir, form="merged", dtype="float32")
    engine = DraftEngine(loaded)
    prompts = [loaded.chat.render([{"role": "user", "content": text}]) for text in ("2+2?", "Say hello.", "x" * 99)]
    for tokens in (*prompts, [0], [260, 1, 260]):
        answer = draft_client.ask(f"{served}/draft", {"tokens": tokens})
        direct = engine.draft([DraftRequest(tokens, 16)])[0]
        assert (answer["draft"], answer["finish_reason"]) == (direct.tokens, direct.finish_reason)
        assert answer["model"] == loaded.archive_id
        with pytest.raises(ValueError, match="422"):  # a bad request in between changes nothing
            draft_client.ask(f"{served}/draft", {"tokens": [*tokens, 261]})
    info = draft_client.ask(f"{served}/info")
    assert info["recipe"] == "tiny" and info["stop_ids"] == [256, 258] and info["thinking"] == "off"


def test_tok_1_the_client_sends_the_ids_of_training(served, model_dir, capsys, tmp_path):
    """Prompts at inference were rendered with another thinking setting than the rows for tuning."""
    chat = model_io.load_model(model_dir).chat
    arguments = ["--url", served, "--model-dir", str(model_dir)]
    assert draft_client.main(["2+2?", *arguments]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["prompt_ids"] == chat.render(MESSAGES)
    assert answer["prompt_ids"][-len(chat.encode("</think>\n\n")) :] == chat.encode("</think>\n\n")
    assert answer["text"] == chat.decode(answer["draft"])
    (tmp_path / "messages.json").write_text(json.dumps(MESSAGES))
    three = ["--messages", str(tmp_path / "messages.json"), "--num-draft-tokens", "3"]
    assert draft_client.main([*three, *arguments]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["prompt_ids"] == answer["prompt_ids"] and again["draft"] == answer["draft"][:3]


def test_the_client_says_what_is_wrong(served, model_dir, capsys, tmp_path):
    other = shutil.copytree(model_dir, tmp_path / "other")
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "archive_id": "0" * 64}))
    assert draft_client.main(["x", "--url", served, "--model-dir", str(other)]) == 1
    assert "but the server serves" in capsys.readouterr().err
    assert draft_client.main(["x" * 600, "--url", served, "--model-dir", str(model_dir)]) == 1
    assert "answers 422" in capsys.readouterr().err
    assert draft_client.main(["x", "--url", "http://127.0.0.1:9", "--model-dir", str(model_dir)]) == 1
    assert "start one: bash serve.sh" in capsys.readouterr().err


def test_a_changed_byte_is_never_served(model_dir, tmp_path, capsys):
    broken = shutil.copytree(model_dir, tmp_path / "broken")
    name = "weights.safetensors.zst"
    data = bytearray((broken / name).read_bytes())
    data[len(data) // 2] ^= 1
    (broken / name).write_bytes(data)
    assert server.main(["--model-dir", str(broken), "--port", "0"]) == 1
    captured = capsys.readouterr()
    assert name in captured.err and "sha256" in captured.err and "ready" not in captured.out


def test_the_real_vocabulary_through_pack_load_and_serve(qwen3_tokenizer, offline, tmp_path):
    """A Qwen3-shaped random student: 151,936 rows of which 151,669 ids exist, tied, with the real tokenizer.

    The rows that are padding are four times as large as the others, so that an argmax over the whole table falls on
    one of them at almost every step. Drafted over HTTP, such ids end a client's own tokenizer.
    """
    recipe = load_recipe("qwen3-8b")
    num_ids, rows = recipe.base.num_ids, 151936
    assert num_ids == 151669
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=rows, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=recipe.serving.context, tie_word_embeddings=True,
        initializer_range=0.3, bos_token_id=None, eos_token_id=sorted(recipe.base.stop_ids),
    )  # fmt: skip
    student = Qwen3ForCausalLM(config).bfloat16().requires_grad_(False)
    student.model.embed_tokens.weight[num_ids:] *= 4
    model_io.pack_base(
        tmp_path / "model",
        weights=student.state_dict(),
        config=json.loads(config.to_json_string(use_diff=False)),
        tokenizer_dir=qwen3_tokenizer,
        generation=generation_settings(recipe),
        architecture=RunDocument(recipe, []).document(),
    )
    loaded = model_io.load_model(tmp_path / "model", dtype="float32")
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    engine = DraftEngine(loaded, threads=1)
    source = random.Random(0)
    texts = ("What is 2 + 2?", "Wie geht's? 你好")
    prompts = [loaded.chat.render([{"role": "user", "content": text}]) for text in texts]
    prompts += [[source.randrange(num_ids) for _ in range(length)] for length in (1, 33, 200)]
    with torch.inference_mode():
        logits = loaded.model(input_ids=torch.tensor([prompts[0]])).logits[0]
    assert (logits.argmax(-1) >= num_ids).float().mean() > 0.5, "padding must win without the cut for the test to bite"
    with serving(tmp_path / "model", offline, "--max-batch-size", "2") as url:
        for tokens in prompts:
            answer = draft_client.ask(f"{url}/draft", {"tokens": tokens})
            direct = engine.draft([DraftRequest(tokens, recipe.serving.num_draft_tokens)])[0]
            assert (answer["draft"], answer["finish_reason"]) == (direct.tokens, direct.finish_reason)
            assert all(0 <= token < num_ids for token in answer["draft"]) and answer["model"] == loaded.archive_id
        with pytest.raises(ValueError, match="422"):
            draft_client.ask(f"{url}/draft", {"tokens": [num_ids]})
