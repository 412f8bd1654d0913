"""Small archives for tests: made of random weights, changed, and signed again. Fixtures of them: conftest.py."""

import contextlib
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from drafter.adapter import Adapter
from drafter.archive import document_bytes
from drafter.provenance import canonical_json, sha256_bytes
from drafter.streams import ArchiveError
from model_io import load_model, pack_adapter, pack_base, verify
from scripts.random_model import CONTROL, TEMPLATE

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


# ---------------------------------------------------------------------------- an archive below 20 kB

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .,:;!?'\"()*/+-=%<>[]_\n"  # 59, and 5 control tokens


def small_tokenizer(folder: Path) -> None:
    """64 ids: one a character, and the control tokens; what it does not know is a question mark."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    vocabulary = {character: at for at, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def small_archive(folder: Path, **changes) -> None:
    """base/ and model/ of one layer and 64 ids, the archive with its adapter below 20 kB (21 with plain weights)."""
    small_tokenizer(folder / "tokenizer")
    model = random_model(
        "qwen3", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=32, initializer_range=0.6, eos_token_id=[59, 61],
    )  # fmt: skip
    generation = {"stop_ids": [59, 61], "num_ids": 64, "thinking": "off", "context": 24}
    architecture = {
        "format": 1,
        "recipe_name": "small",
        "recipe": {"teacher": "none", "caps": [1, 2.5, True, None]},
        "phase_log": [{"phase": "qat", "steps": 3, "checkpoint_sha256": "0" * 64}],
    }
    pack(model, folder / "base", folder / "tokenizer", generation=generation, architecture=architecture,
         double_quant=True, source=("qat", "0" * 64), **changes)  # fmt: skip
    adapter = random_adapter(model, folder / "base", rank=2, alpha=4.0)
    policy = {"enabled": True, "limits": [0.0, 0.25, 1.5, 2.0, 3.0, None, None, None]}
    chosen = np.array([*range(0, 64, 3), 59, 61], np.int32)
    pack_adapter(folder / "model", base_dir=folder / "base", adapter=adapter, copy_policy=policy,
                 draft_vocabulary=np.sort(chosen))  # fmt: skip
    size = sum(path.stat().st_size for path in (folder / "model").iterdir())
    assert size <= (21_000 if changes else 20_000), size


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


class Bench:
    """A working copy of the archive. Each attempt changes some files, verifies, and puts them back."""

    def __init__(self, source: Path, folder: Path):
        self.folder = folder / "model"
        shutil.copytree(source, self.folder)
        self.original = {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}
        self.files = json.loads(self.original["manifest.json"])["files"]
        self.outcomes: Counter[str] = Counter()

    def signed(self, changed: dict[str, bytes | None]) -> dict[str, bytes | None]:
        """`changed` (None: taken away) with a manifest that fits."""
        kept = [entry for entry in self.files if entry["path"] not in changed]
        for name, data in changed.items():
            if data is not None:
                kept.append({"path": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        kept.sort(key=lambda entry: entry["path"])
        return {**changed, "manifest.json": manifest(kept)}

    def attempt(
        self, changed: dict[str, bytes | None], function: Callable[[Path], Any] = verify
    ) -> ArchiveError | None:
        """The error that refused it, None if it was accepted. Any other exception is a failed test."""
        for name, data in changed.items():
            if data is None:
                (self.folder / name).unlink()
            else:
                (self.folder / name).write_bytes(data)
        try:
            with peak_memory(MEMORY_LIMIT):
                function(self.folder)
            error = None
        except ArchiveError as caught:
            error = caught
            assert "Next: " in str(error) and len(str(error)) < 1000
        finally:
            for name in changed:
                if name in self.original:
                    (self.folder / name).write_bytes(self.original[name])
                else:
                    (self.folder / name).unlink()
        self.outcomes[type(error).__name__ if error else "accepted"] += 1
        return error

    def refused(self, changed: dict[str, bytes | None], what: Any = "") -> ArchiveError:
        error = self.attempt(changed)
        assert error is not None, f"accepted: {what}"
        return error

    def report(self, kind: str) -> None:
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(self.outcomes.items()))
        REPORTED.append(f"tampering: {kind}: {self.outcomes.total():,} tried: {counts}")
        left = {path.name: path.read_bytes() for path in sorted(self.folder.iterdir())}
        assert left == self.original, "verify() left something behind"
        verify(self.folder)


def manifest(files: list) -> bytes:
    return document_bytes({"format": 1, "files": files, "archive_id": sha256_bytes(canonical_json(files))})


# ---------------------------------------------------------------------------- what a reader may take

MEMORY_LIMIT = 300 << 20  # bytes that verifying and loading a small archive may take, whatever is in it
REPORTED: list[str] = []  # lines for the end of the run
PEAKS: list[int] = []  # bytes above the start, of each attempt


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
    try:
        yield
    finally:
        PEAKS.append(held("VmHWM") - before)
    assert PEAKS[-1] <= limit_bytes, f"{PEAKS[-1] >> 20} MiB"
