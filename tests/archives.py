"""Small archives for tests: made of random weights, changed, and signed again. Fixtures of them: conftest.py."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zstandard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from drafter.adapter import Adapter
from drafter.streams import ArchiveError
from model_io import load_model, pack_base, verify

GENERATION = {"stop_ids": [256, 258], "num_ids": 261, "thinking": "off", "context": 64}
ARCHITECTURE = {"format": 1, "recipe_name": "tiny", "recipe": {}, "phase_log": []}


def random_model(family: str, **changes):
    """Two layers of random weights; the widths leave ragged last blocks nowhere but in k_proj (32 x 64) none at all."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": [256, 258],
        **changes,
    }
    if family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **shape))
    else:
        model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **shape))
    return model.eval().requires_grad_(False)


def random_adapter(model, base=None, rank=4, alpha=8.0) -> Adapter:
    """Values that bf16 holds exactly, so that storing them loses nothing and equality can be asked for."""
    adapter = Adapter.create(model, rank, alpha)
    adapter.base_sha256 = verify(base).base_sha256 if base else None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in adapter.parameters():
            tensor.copy_((torch.randn(tensor.shape, generator=generator) * 0.1).bfloat16())
    return adapter


def pack(model, out_dir, tokenizer_dir, **changes):
    arguments = {
        "weights": model.state_dict(),
        "config": json.loads(model.config.to_json_string(use_diff=False)),
        "tokenizer_dir": tokenizer_dir,
        "generation": GENERATION,
        "architecture": ARCHITECTURE,
        **changes,
    }
    return pack_base(out_dir, **arguments)


# ---------------------------------------------------------------------------- changes, signed again


def sign(folder: Path) -> None:
    """Make manifest.json fit whatever lies in the folder: what a careful attacker, or a careless tool, would do."""
    files = []
    for path in sorted(folder.iterdir()):
        if path.name not in ("manifest.json", "evidence"):
            data = path.read_bytes()
            files.append({"path": path.name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    write_manifest(folder, files)


def write_manifest(folder: Path, files: list) -> None:
    text = json.dumps(files, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    document = {"format": 1, "files": files, "archive_id": hashlib.sha256(text).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(document, indent=1) + "\n")


def edit(folder: Path, name: str, change) -> None:
    """Change one JSON document of an archive and sign it again."""
    document = json.loads((folder / name).read_text())
    document = change(document) or document
    (folder / name).write_text(json.dumps(document))
    sign(folder)


def rewrite_weights(folder: Path, change) -> None:
    """Decode the weight stream, change its bytes, encode it and sign everything again."""
    stream = bytearray(zstandard.ZstdDecompressor().decompress((folder / "weights.safetensors.zst").read_bytes()))
    stream = change(stream) or stream
    (folder / "weights.safetensors.zst").write_bytes(
        zstandard.ZstdCompressor(write_checksum=True).compress(bytes(stream))
    )

    def redeclare(document):
        document["weights"]["sha256"] = hashlib.sha256(stream).hexdigest()

    edit(folder, "quantization.json", redeclare)
    if (folder / "adapter.json").exists():
        base = hashlib.sha256(stream).hexdigest()
        edit(folder, "adapter.json", lambda document: document.update(base_sha256=base))


def refused(folder: Path, error=ArchiveError, match: str | None = None) -> ArchiveError:
    with pytest.raises(error, match=match) as caught:
        verify(folder)
    with pytest.raises(ArchiveError):
        load_model(folder)
    assert "Next: " in str(caught.value) and len(str(caught.value)) < 1000
    return caught.value


# ---------------------------------------------------------------------------- what a reader may take

REPORTED: list[str] = []  # lines for the end of the run


@contextlib.contextmanager
def peak_memory(limit_bytes: int) -> Iterator[None]:
    """Fails when the block takes more memory than that above what the process held at its start."""
    status = Path("/proc/self/status")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is held now
    except OSError:
        yield  # no such file, or not ours to write: nothing can be measured
        return

    def held(name: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) << 10

    before = held("VmRSS")
    yield
    taken = held("VmHWM") - before
    REPORTED.append(f"memory: at most {taken >> 20} MiB above the start")
    assert taken <= limit_bytes, f"{taken >> 20} MiB"
