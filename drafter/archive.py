"""What a packed archive is, and the checked way to read one. Writing and loading models: model_io.py.

A folder is refused before one weight is used when a byte, a size, a name, a shape or a link between two files is not as
packed. The order of the checks: the list of files, each small file, what the documents say, then the weights, streamed
once and hashed as they are decoded, then the adapter. Nothing is unpickled, extracted or written.

Every JSON document has exactly the fields written here; a missing or an unknown one is an error.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafter import draft_vocabulary
from drafter import quantization as q
from drafter.acceptance import NEAR_TIE_GAP
from drafter.adapter import FIELDS as ADAPTER_FIELDS
from drafter.adapter import Adapter, AdapterError
from drafter.chat import THINKING, TOKENIZER_FILES
from drafter.copy_policy import POLICY_NGRAM
from drafter.provenance import canonical_json, sha256_bytes
from drafter.streams import (
    DTYPE_NAMES,
    DTYPES,
    THREAD_FROM,
    ArchiveError,
    ContentError,
    Hasher,
    HashError,
    HashingReader,
    ManifestError,
    StreamError,
    new_buffer,
    read_xz,
    read_zstd,
    split_tensors,
    stream_size,
)

FORMAT = 1
WEIGHTS = {"zst": "weights.safetensors.zst", "plain": "weights.safetensors"}
ADAPTER_FILES = ("adapter.safetensors.xz", "adapter.json")
DOCUMENTS = (
    "config.json",
    "generation.json",
    "quantization.json",
    "copy_policy.json",
    "architecture.json",
    "self_check.json",
)
DRAFT_VOCABULARY = "draft_vocabulary.json"  # an archive without it drafts all existing ids
KNOWN_FILES = {*WEIGHTS.values(), *ADAPTER_FILES, *DOCUMENTS, DRAFT_VOCABULARY, *TOKENIZER_FILES}
# Ceilings: what a reader may be asked to hold. The tokenizer of Qwen3 is 11 MB; 32 B parameters in NF4 are 18 GB. A
# document takes up to 30 times its size once it is parsed; the largest of ours, quantization.json, has 50 kB.
TOKENIZER_LIMIT = 64 << 20
DOCUMENT_LIMIT = 1 << 20
STREAM_LIMIT = 32 << 30
# A stream may be this many times as long as its file, beyond a free part: ours are 1.02 to 1.7 times, while a bomb of
# zeros unfolds a thousandfold into whatever a document declares.
UNFOLD_RATIO, UNFOLD_FREE = 16, 64 << 20
CONTEXT_LIMIT = 1 << 18  # tokens; an engine computes and keeps tables of that length
LAYER_LIMIT = 256  # the largest dense models have 126
SELF_CHECK_LIMIT = 16  # prompts
WEIGHTS_METADATA = {"format": FORMAT, "kind": "weights"}
FAMILIES = ("llama", "qwen2", "qwen3")
# All that a config.json may say: what decides names, shapes and arithmetic of the families. Others could make
# transformers run code, reach a hub, choose another kernel, or build tables without end (num_labels).
CONFIG_KEYS = {
    *("model_type", "architectures", "dtype", "torch_dtype", "initializer_range", "use_cache"),
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
    *("max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling"),
    *("attention_bias", "attention_dropout", "mlp_bias", "pretraining_tp"),
    *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}

# What no tokenizer of these families has: merges that do not fit such a prefix make the tokenizers library end the
# process, past every `except`. Found in the text in 11 ms, because parsing the 11 MB of Qwen3's makes 300,000 objects;
# and so no letter may be spelled as an escape, which no writer does.
PREFIX = re.compile(rb'"continuing_subword_prefix"\s*+:\s*+(?!null\b|"")')
SPELLED = re.compile(rb"(?<!\\)(?:\\\\)*\\u00(?:5f|6[1-9a-f]|7[0-9a])", re.IGNORECASE)


# ---------------------------------------------------------------------------- documents


def parse_document(file: str, data: bytes) -> Any:
    def pairs(items):
        if len({key for key, _ in items}) != len(items):
            raise ValueError("a key occurs twice")
        return dict(items)

    def constant(word):
        raise ValueError(f"{word} is not JSON")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ContentError(file, f"not valid JSON ({error})") from None


def document_bytes(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False).encode() + b"\n"


def check_fields(file: str, value: Any, keys: set[str]) -> dict[str, Any]:
    """`value` as an object with exactly these keys and, where it has one, our format number."""
    if not isinstance(value, dict) or set(value) != keys:
        found = ascii(sorted(value))[:200] if isinstance(value, dict) else type(value).__name__
        raise ContentError(file, "fields", sorted(keys), found)
    if "format" in keys and (type(value["format"]) is not int or value["format"] != FORMAT):
        raise ContentError(file, "format", FORMAT, repr(value["format"]))
    return value


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_count(value: Any, low: int = 1, high: int = STREAM_LIMIT) -> bool:
    return type(value) is int and low <= value <= high


def _is_number(value: Any) -> bool:
    """A float that JSON can hold again: 1e999 is read as infinity."""
    return type(value) is float and math.isfinite(value)


def check_generation(value: Any) -> dict[str, Any]:
    """The content of generation.json: stop ids, existing ids, thinking switch, context."""
    keys = {"format", "stop_ids", "num_ids", "thinking", "context"}
    value, file = check_fields("generation.json", value, keys), "generation.json"
    # An argmax chooses between two at least, and a draft of one token has a prompt
    for key, limit in (("num_ids", 1 << 31), ("context", CONTEXT_LIMIT)):
        if not _is_count(value[key], 2, limit):
            raise ContentError(file, key, f"a whole number, 2 to {limit}", ascii(value[key])[:80])
    stop_ids = value["stop_ids"]
    if (
        not isinstance(stop_ids, list)
        or not stop_ids
        or not all(_is_count(i, 0, value["num_ids"] - 1) for i in stop_ids)
    ):
        raise ContentError(file, "stop_ids", f"ids below {value['num_ids']}", repr(stop_ids)[:80])
    if value["thinking"] not in THINKING:
        raise ContentError(file, "thinking", " or ".join(THINKING), repr(value["thinking"]))
    return value


def check_self_check(value: Any, generation: Mapping[str, Any]) -> dict[str, Any]:
    """The content of self_check.json (drafter/self_check.py): drafts that the engine can be asked for.

    No draft at all is allowed: so it is while the archive is packed, before the model can be loaded that drafts them.
    """
    file = "self_check.json"
    value = check_fields(file, value, {"format", "margin", "drafts"})

    def ids(numbers: Any) -> bool:
        existing = generation["num_ids"] - 1
        return isinstance(numbers, list) and bool(numbers) and all(_is_count(i, 0, existing) for i in numbers)

    if not _is_number(value["margin"]) or value["margin"] < NEAR_TIE_GAP:
        raise ContentError(file, "margin", f"a number >= {NEAR_TIE_GAP}", repr(value["margin"])[:80])
    if not isinstance(value["drafts"], list) or len(value["drafts"]) > SELF_CHECK_LIMIT:
        raise ContentError(file, "drafts", f"a list of at most {SELF_CHECK_LIMIT}", repr(value["drafts"])[:80])
    for number, case in enumerate(value["drafts"]):
        case = check_fields(file, case, {"tokens", "draft", "gaps"})
        tokens, draft, gaps = case["tokens"], case["draft"], case["gaps"]
        if not ids(tokens) or not ids(draft):
            expected = f"ids below {generation['num_ids']}, at least one each"
            raise ContentError(file, f"tokens and draft of prompt {number}", expected, repr([tokens, draft])[:80])
        if set(draft[:-1]) & set(generation["stop_ids"]):
            raise ContentError(file, f"draft of prompt {number}", "a stop id only at its end", repr(draft)[:80])
        if len(tokens) + len(draft) > generation["context"]:
            found = f"{len(tokens)} + {len(draft)}"
            raise ContentError(file, f"length of prompt {number} and its draft", generation["context"], found)
        if not isinstance(gaps, list) or len(gaps) != len(draft) or not all(map(_is_number, gaps)):
            raise ContentError(file, f"gaps of prompt {number}", f"{len(draft)} numbers", repr(gaps)[:80])
    return value


def check_copy_policy(value: Any) -> dict[str, Any]:
    """The content of copy_policy.json: {"enabled": false}, or true with a limit (null: none) a length of suffix."""
    file = "copy_policy.json"
    if not isinstance(value, dict) or value.get("enabled") is not True:
        value = check_fields(file, value, {"enabled"})
        if value["enabled"] is not False:
            raise ContentError(file, "enabled", "true or false", ascii(value["enabled"])[:80])
        return value
    limits = check_fields(file, value, {"enabled", "limits"})["limits"]
    right = isinstance(limits, list) and all(limit is None or _is_number(limit) for limit in limits)
    if not right or len(limits) != POLICY_NGRAM:
        raise ContentError(file, "limits", f"{POLICY_NGRAM} finite floats or null", ascii(limits)[:80])
    return value


def draft_vocabulary_document(ids: np.ndarray, num_ids: int) -> dict[str, Any]:
    return {"format": FORMAT, "count": len(ids), "ids": draft_vocabulary.to_text(ids, num_ids)}


def check_draft_vocabulary(value: Any, generation: Mapping[str, Any]) -> np.ndarray:
    """The content of draft_vocabulary.json -> its ids, rising int32: existing ones, all stop ids among them.

    Two at least, for the gap to a second best is part of every choice.
    """
    file = DRAFT_VOCABULARY
    value = check_fields(file, value, {"format", "count", "ids"})
    if not isinstance(value["ids"], str):
        raise ContentError(file, "ids", "a text in base64", type(value["ids"]).__name__)
    try:
        ids = draft_vocabulary.from_text(value["ids"], generation["num_ids"])
    except ValueError as error:
        raise ContentError(file, f"ids: {error}") from None
    if not _is_count(value["count"], 2) or value["count"] != len(ids):
        raise ContentError(file, "count", f"{len(ids)}, and 2 at least", ascii(value["count"])[:80])
    if missing := sorted(set(generation["stop_ids"]) - set(ids.tolist())):
        raise ContentError(file, "ids", "every stop id", f"without {missing[:8]}")
    return ids


def check_tokenizer(data: bytes) -> None:
    """tokenizer.json, as far as its library must not see it: that checks all else, when a model is made."""
    for pattern, problem in ((PREFIX, "continuing_subword_prefix"), (SPELLED, "letters spelled as escapes")):
        # the second pattern takes ten times as long as to see that there is nothing for it
        if (pattern is PREFIX or b"\\u00" in data) and (found := pattern.search(data)):
            raise ContentError("tokenizer.json", problem, "none", ascii(data[found.start() : found.end() + 20])[:80])


def stream_specs(quantization: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Every stored tensor in the order of the stream, derived from the codecs.

    Kinds lie together, because what is alike compresses together, and wide elements first, so that each tensor is
    aligned: groups of scales, small tensors (fp32, then bf16), bf16 scales, scales of a byte, int8 rows, NF4 codes.
    """
    groups, small, scales, byte_scales, rows, codes = {}, {}, {}, {}, {}, {}
    for name, entry in quantization["tensors"].items():
        shape = tuple(entry["shape"])
        if entry["codec"] == "nf4":
            codes[f"{name}.codes"] = (torch.uint8, (-(-math.prod(shape) // 2),))
            if "plain_groups" in entry:
                size, count = q.double_sizes(q.block_count(shape), entry["plain_groups"])
                byte_scales[f"{name}.scales"] = (torch.uint8, (size,))
                groups[f"{name}.scales2"] = (torch.float32, (count, 2))
            else:
                scales[f"{name}.scales"] = (torch.bfloat16, (q.block_count(shape),))
        elif entry["codec"] == "int8":
            rows[f"{name}.codes"] = (torch.int8, shape)
            scales[f"{name}.scales"] = (torch.bfloat16, shape[:1])
        else:
            small[name] = (DTYPES[entry["dtype"]], shape)
    small = dict(sorted(small.items(), key=lambda item: -item[1][0].itemsize))
    return {**groups, **small, **scales, **byte_scales, **rows, **codes}


def kind_of(name: str, dtype: torch.dtype) -> str:
    if name.endswith((".scales", ".scales2")):
        return "scales"
    return {torch.int8: "int8 rows", torch.uint8: "NF4 codes"}.get(dtype, "small tensors")


def check_quantization(value: Any) -> dict[str, Any]:
    """The content of quantization.json; every size that is allocated later follows from it, so it is checked hard."""
    file = "quantization.json"
    value = check_fields(file, value, {"format", "block_size", "source", "weights", "ties", "tensors"})
    source = check_fields(file, value["source"], {"dtype", "phase", "checkpoint_sha256"})
    weights = check_fields(file, value["weights"], {"file", "size_bytes", "sha256"})
    if weights["file"] not in WEIGHTS.values():
        raise ContentError(file, "weights.file", " or ".join(WEIGHTS.values()), repr(weights["file"])[:80])
    if not _is_count(value["block_size"], q.BLOCK, q.BLOCK):
        raise ContentError(file, "block_size", q.BLOCK, repr(value["block_size"])[:80])
    if source["dtype"] not in [str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES]:
        raise ContentError(file, "source.dtype", "a dtype", repr(source["dtype"])[:80])
    named = isinstance(source["phase"], str) and _is_sha256(source["checkpoint_sha256"])
    if not named and (source["phase"], source["checkpoint_sha256"]) != (None, None):
        found = repr([source["phase"], source["checkpoint_sha256"]])[:160]
        raise ContentError(file, "source", "a phase and the sha256 of its checkpoint, or null twice", found)
    if not isinstance(value["tensors"], dict) or not value["tensors"]:
        raise ContentError(file, "tensors", "an object", type(value["tensors"]).__name__)
    for name, entry in value["tensors"].items():
        codec = entry.get("codec") if isinstance(entry, dict) else None
        double = codec == "nf4" and "plain_groups" in entry  # its scales are double-quantized, but for these groups
        extra = {"dtype"} if codec == "none" else {"plain_groups"} if double else set()
        check_fields(file, entry, {"codec", "shape"} | extra)
        shape = entry["shape"]
        if codec not in ("nf4", "int8", "none") or not re.fullmatch(r"[A-Za-z0-9_.]{1,200}", name):
            raise ContentError(file, "codec of a tensor", "nf4, int8 or none", f"{name[:80]!r}: {codec!r}"[:120])
        if not isinstance(shape, list) or not 1 <= len(shape) <= 4 or not all(_is_count(side) for side in shape):
            raise ContentError(file, f"shape of {name}", "1 to 4 whole numbers >= 1", repr(shape)[:80])
        if double:
            plain, count = entry["plain_groups"], q.double_sizes(q.block_count(shape), ())[1]
            whole = isinstance(plain, list) and all(_is_count(group, 0, count - 1) for group in plain)
            if not whole or any(a >= b for a, b in itertools.pairwise(plain)):
                raise ContentError(file, f"plain_groups of {name}", f"rising, below {count}", repr(plain)[:80])
        if codec == "int8" and len(shape) != 2:
            raise ContentError(file, f"shape of {name}", "a matrix", shape)
        if codec == "none" and entry["dtype"] not in ("F32", "BF16", "F16"):
            raise ContentError(file, f"dtype of {name}", "F32, BF16 or F16", repr(entry["dtype"])[:80])
    if not isinstance(value["ties"], dict) or not all(
        isinstance(name, str) and name in value["tensors"] for name in value["ties"].values()
    ):
        raise ContentError(file, "ties", "{name: name of a stored tensor}", repr(value["ties"])[:80])
    specs = stream_specs(value)
    parts = sum(2 + ("plain_groups" in entry) if entry["codec"] != "none" else 1 for entry in value["tensors"].values())
    if len(specs) != parts:
        raise ContentError(file, "two tensors would be stored under one name")
    size = stream_size(specs, WEIGHTS_METADATA)
    if size > STREAM_LIMIT or weights["size_bytes"] != size or type(weights["size_bytes"]) is not int:
        raise ContentError(file, "weights.size_bytes", min(size, STREAM_LIMIT), repr(weights["size_bytes"])[:80])
    if not _is_sha256(weights["sha256"]):
        raise ContentError(file, "weights.sha256", "64 hex digits", repr(weights["sha256"])[:80])
    return value


def check_config(config: Any, quantization: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """config.json: a family that we know, nothing that runs code or reaches a hub, and room for ids and context."""
    file = "config.json"
    if not isinstance(config, dict) or config.get("model_type") not in FAMILIES:
        raise ContentError(file, "model_type of an object", " or ".join(FAMILIES), ascii(config)[:80])
    if bad := sorted(set(config) - CONFIG_KEYS):
        raise ContentError(file, "keys that an archive must not hold", "none", ascii(bad)[:200])
    table = quantization["tensors"].get("model.embed_tokens.weight")
    if table is None or not _is_count(config.get("vocab_size"), table["shape"][0], table["shape"][0]):
        raise ContentError(file, "vocab_size", table and table["shape"][0], ascii(config.get("vocab_size"))[:80])
    # Before any model is built: a config may claim 10^9 layers, or heads 10^9 wide, at no cost
    queries = [entry["shape"] for name, entry in quantization["tensors"].items() if name.endswith(".q_proj.weight")]
    layers = min(len(queries), LAYER_LIMIT)
    if not _is_count(config.get("num_hidden_layers"), len(queries), layers):
        raise ContentError(file, "num_hidden_layers", layers, ascii(config.get("num_hidden_layers"))[:80])
    if not _is_count(config.get("hidden_size"), width := table["shape"][-1], width):
        raise ContentError(file, "hidden_size", width, ascii(config.get("hidden_size"))[:80])
    if (width := config.get("head_dim")) is not None and not _is_count(width, 1, max(queries)[0] if queries else 0):
        raise ContentError(file, "head_dim", "no wider than q_proj", ascii(width)[:80])
    if generation["num_ids"] > table["shape"][0]:
        raise ContentError("generation.json", "num_ids", f"<= {table['shape'][0]} rows", generation["num_ids"])
    positions = config.get("max_position_embeddings")
    if not _is_count(positions) or generation["context"] > positions:
        raise ContentError("generation.json", "context", f"<= {ascii(positions)[:80]} positions", generation["context"])


# ---------------------------------------------------------------------------- reading a folder


@dataclasses.dataclass
class Archive:
    """A verified archive. `tensors` and `adapter` are dropped by `verify`, kept by the loader."""

    path: Path
    archive_id: str
    files: list[dict[str, Any]]
    config: dict[str, Any]
    generation: dict[str, Any]
    quantization: dict[str, Any]
    architecture: dict[str, Any]
    self_check: dict[str, Any]
    copy_policy: dict[str, Any]
    draft_vocabulary: np.ndarray | None  # rising int32 ids; None: all existing ones
    adapter_document: dict[str, Any] | None
    tensors: dict[str, Tensor]
    adapter: Adapter | None

    @property
    def base_sha256(self) -> str:
        """The name of the base: sha256 of its decompressed weight stream, the same however it is stored."""
        return self.quantization["weights"]["sha256"]


def manifest_bytes(files: list[Mapping[str, Any]], archive_id: str) -> bytes:
    """The one spelling of manifest.json: no byte of it can change, not even a space, and mean the same archive."""
    keys = ("path", "size_bytes", "sha256")
    listed = [{key: entry[key] for key in keys} for entry in sorted(files, key=lambda entry: entry["path"])]
    return document_bytes({"format": FORMAT, "files": listed, "archive_id": archive_id})


def _open(folder: Path, name: str):
    """An ordinary file of the folder, opened without following a link."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ManifestError(name, f"cannot be opened ({error.strerror})") from None
    file = os.fdopen(descriptor, "rb", buffering=0)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        file.close()
        raise ManifestError(name, "must be an ordinary file")
    return file, status.st_size


def _read_all(file, size_bytes: int) -> bytes:
    with file:
        return file.read(size_bytes) if size_bytes else b""


def _read_manifest(folder: Path) -> tuple[dict[str, dict], str]:
    """The list of files, equal to what lies in the folder -> ({name: entry}, archive_id)."""
    if not folder.is_dir() or not (folder / "manifest.json").exists():
        fix = "python -m scripts.pack_model --recipe RECIPE --output " + folder.name
        raise ManifestError("manifest.json", f"{folder.name or folder} is not a packed archive", fix=fix)
    file, size = _open(folder, "manifest.json")
    if size > 1 << 20:
        file.close()
        raise ManifestError("manifest.json", "size in bytes", f"<= {1 << 20}", size)
    data = _read_all(file, size)
    manifest = check_fields("manifest.json", parse_document("manifest.json", data), {"format", "files", "archive_id"})
    if not isinstance(manifest["files"], list):
        raise ManifestError("manifest.json", "files", "a list", type(manifest["files"]).__name__)
    listed: dict[str, dict] = {}
    for entry in manifest["files"]:
        entry = check_fields("manifest.json", entry, {"path", "size_bytes", "sha256"})
        path = entry["path"]
        # Known names only: no folder, no "..", no absolute path, no NUL can be among them
        if not isinstance(path, str) or path not in KNOWN_FILES:
            raise ManifestError("manifest.json", "path", "the name of an archive file", ascii(path)[:80])
        if path in listed:
            raise ManifestError("manifest.json", f"{path} is listed twice")
        if not _is_count(entry["size_bytes"], 0) or not _is_sha256(entry["sha256"]):
            raise ManifestError(
                "manifest.json", f"size or sha256 of {path}", "bytes and 64 hex digits", ascii(entry)[:160]
            )
        listed[path] = entry
    archive_id = sha256_bytes(canonical_json(manifest["files"]))
    if manifest["archive_id"] != archive_id:
        raise HashError(
            "manifest.json", "archive_id (sha256 of the list)", archive_id, ascii(manifest["archive_id"])[:80]
        )
    if data != (written := manifest_bytes(manifest["files"], archive_id)):
        raise HashError("manifest.json", "sha256 of its bytes", sha256_bytes(written), sha256_bytes(data))
    present = set()
    for item in os.scandir(folder):
        if item.name == "evidence" and item.is_dir(follow_symlinks=False):
            continue
        if not item.is_file(follow_symlinks=False):
            raise ManifestError(ascii(item.name), "only ordinary files belong into an archive")
        present.add(item.name)
    if unlisted := sorted(present - set(listed) - {"manifest.json"}):
        raise ManifestError(ascii(unlisted[0]), "lies in the folder but not in manifest.json", fix="remove it")
    if missing := sorted((set(listed) | set(DOCUMENTS) | {"tokenizer.json"}) - (present & set(listed))):
        raise ManifestError(missing[0], "is missing from the folder or from manifest.json")
    return listed, archive_id


def _hashed(folder: Path, entry: Mapping[str, Any], read) -> None:
    """Runs `read(source)` over one listed file. Wrong bytes are a HashError, whatever they did to the decoder."""
    name = entry["path"]
    file, size = _open(folder, name)
    with file:
        if size != entry["size_bytes"]:
            raise HashError(name, "size in bytes", entry["size_bytes"], size)
        fault = None
        with HashingReader(file, size, name) as source:
            try:
                read(source)
            except ArchiveError as error:
                fault = error
            found = source.drain()
        if found != entry["sha256"]:
            raise HashError(name, "sha256", entry["sha256"], found)
        if fault is not None:
            raise fault


def _small_files(folder: Path, listed: Mapping[str, dict]) -> dict[str, bytes]:
    data: dict[str, bytes] = {}
    for name, entry in listed.items():
        if name in WEIGHTS.values() or name == "adapter.safetensors.xz":
            continue
        limit = TOKENIZER_LIMIT if name == "tokenizer.json" else DOCUMENT_LIMIT
        if entry["size_bytes"] > limit:
            raise ManifestError(name, "size in bytes", f"<= {limit}", entry["size_bytes"])
        _hashed(folder, entry, lambda source, name=name: data.update({name: bytes(source.take(source.left))}))
    return data


def _read_stream(folder: Path, entry: Mapping[str, Any], size_bytes: int, sha256: str, decode) -> Tensor:
    """Decode one file into a buffer of the declared size (uint8 [n]) and compare the sha256 of what came out."""
    if size_bytes > (limit := UNFOLD_FREE + UNFOLD_RATIO * entry["size_bytes"]):
        raise StreamError(entry["path"], "declared bytes of the decompressed stream", f"<= {limit}", size_bytes)
    stream = new_buffer(size_bytes, entry["path"])
    with Hasher(size_bytes) as decoded:
        _hashed(folder, entry, lambda source: decode(source, memoryview(stream.numpy()), decoded.update))
        found = decoded.hexdigest()
    if found != sha256:
        raise HashError(entry["path"], "sha256 of the decompressed stream", sha256, found)
    return stream


def _map_plain(folder: Path, entry: Mapping[str, Any], sha256: str) -> Tensor:
    """The stored stream mapped read-only in effect (copy on write): replicas on one machine share its pages."""
    file, size = _open(folder, entry["path"])
    file.close()
    if size != entry["size_bytes"]:
        raise HashError(entry["path"], "size in bytes", entry["size_bytes"], size)
    stream = torch.from_file(str(folder / entry["path"]), shared=False, size=size, dtype=torch.uint8)
    found = sha256_bytes(stream.numpy())  # the file is the stream: one hash for both declarations
    for declared in (entry["sha256"], sha256):
        if found != declared:
            raise HashError(entry["path"], "sha256", declared, found)
    return stream


def _read_weights(folder: Path, listed: Mapping[str, dict], quantization: Mapping[str, Any]) -> dict[str, Tensor]:
    weights = quantization["weights"]
    stored = [name for name in WEIGHTS.values() if name in listed]
    if stored != [weights["file"]]:
        raise ContentError("quantization.json", "weights.file", stored, weights["file"])
    entry = listed[weights["file"]]
    if weights["file"] == WEIGHTS["plain"]:
        if entry["size_bytes"] != weights["size_bytes"]:
            raise ContentError("quantization.json", "weights.size_bytes", entry["size_bytes"], weights["size_bytes"])
        stream = _map_plain(folder, entry, weights["sha256"])
    else:
        stream = _read_stream(folder, entry, weights["size_bytes"], weights["sha256"], read_zstd)
    return checked_tensors(stream, quantization)


def checked_tensors(stream: Tensor, quantization: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the whole weight stream (uint8 [n]), views into it. StreamError or ContentError for a bad one.

    Scales that are stored double-quantized come out as what they decode to, so that all readers know one form.
    """
    file = quantization["weights"]["file"]
    tensors = split_tensors(stream, stream_specs(quantization), WEIGHTS_METADATA, file)
    for name, entry in quantization["tensors"].items():
        if "plain_groups" in entry:
            codes, groups = tensors[f"{name}.scales"], tensors.pop(f"{name}.scales2")
            count = q.block_count(entry["shape"])
            try:
                scales = q.double_dequantize(codes, groups, entry["plain_groups"], count, name)
            except ValueError as error:
                raise ContentError(file, str(error)) from None
            tensors[f"{name}.scales"] = scales
    for name, tensor in tensors.items():
        try:
            if name.endswith(".scales"):
                q.check_scales(tensor, tensor.numel(), name)
            elif tensor.is_floating_point():
                q.check_finite(tensor, name)
        except ValueError as error:
            raise ContentError(file, str(error)) from None
    return tensors


def adapter_specs(document: Mapping[str, Any], shapes: Mapping[str, tuple]) -> dict:
    rank, specs = document["rank"], {}
    for name in document["targets"]:
        if len(shapes.get(f"{name}.weight", ())) != 2:
            raise ContentError("adapter.json", "target", "a matrix of the base", name[:80])
        rows, columns = shapes[f"{name}.weight"]
        specs[f"{name}.lora_A"] = (torch.bfloat16, (rank, columns))
        specs[f"{name}.lora_B"] = (torch.bfloat16, (rows, rank))
    return specs


def adapter_metadata(document: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "kind": "adapter", **{key: document[key] for key in ("rank", "alpha", "scale")}}


def _check_adapter(document: Any, quantization: Mapping[str, Any]) -> tuple[dict, dict, dict]:
    """adapter.json beside its base -> (arguments of an Adapter, specs and metadata of its stream)."""
    file = "adapter.json"
    document = check_fields(file, document, ADAPTER_FIELDS | {"size_bytes", "sha256"})
    if not _is_count(document["rank"], high=4096) or not _is_sha256(document["sha256"]):
        raise ContentError(file, "rank or sha256", "1 to 4096 and 64 hex digits", ascii(document["rank"])[:80])
    fields = {key: document[key] for key in ADAPTER_FIELDS - {"format"}}
    if not _is_number(document["alpha"]) or not _is_number(document["scale"]):
        found = ascii([document["alpha"], document["scale"]])[:80]
        raise ContentError(file, "alpha and scale", "two finite floats", found)
    # a first look at the document alone: the sizes of the stream follow from it
    if not isinstance(fields["targets"], list) or not all(isinstance(name, str) for name in fields["targets"]):
        raise ContentError(file, "targets must be a list of layer names")
    shapes = {name: tuple(entry["shape"]) for name, entry in quantization["tensors"].items()}
    specs, metadata = adapter_specs(fields, shapes), adapter_metadata(fields)
    if not _is_count(document["size_bytes"], size := stream_size(specs, metadata), size):
        raise ContentError(file, "size_bytes", size, ascii(document["size_bytes"])[:80])
    return fields, specs, metadata


@contextlib.contextmanager
def _meanwhile(work: Callable[[], Any], size_bytes: int) -> Iterator[Callable[[], Any]]:
    """While the block runs, `work` is done on a thread that ends with it; what is yielded waits for its result.

    Work on few bytes is done straight, when its result is asked for.
    """
    if size_bytes < THREAD_FROM:
        yield work
    else:
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(work).result


def read_archive(folder: str | Path) -> Archive:
    """Everything verified and decoded, no model built. ArchiveError on the first fault."""
    folder = Path(folder)
    listed, archive_id = _read_manifest(folder)
    data = _small_files(folder, listed)
    documents = {name: parse_document(name, data[name]) for name in DOCUMENTS}
    generation = check_generation(documents["generation.json"])
    quantization = check_quantization(documents["quantization.json"])
    self_check = check_self_check(documents["self_check.json"], generation)
    keys = {"format", "recipe_name", "recipe", "phase_log"}
    architecture = check_fields("architecture.json", documents["architecture.json"], keys)
    log = architecture["phase_log"]
    if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
        raise ContentError("architecture.json", "phase_log", "a list of objects", ascii(log)[:80])
    copy_policy, vocabulary = check_copy_policy(documents["copy_policy.json"]), None
    if DRAFT_VOCABULARY in data:
        document = parse_document(DRAFT_VOCABULARY, data[DRAFT_VOCABULARY])
        vocabulary = check_draft_vocabulary(document, generation)
    config = documents["config.json"]
    check_config(config, quantization, generation)
    check_tokenizer(data["tokenizer.json"])
    tokenizer_config = parse_document("tokenizer_config.json", data.get("tokenizer_config.json", b"{}"))
    if not isinstance(tokenizer_config, dict) or "auto_map" in tokenizer_config:
        raise ContentError("tokenizer_config.json", "must be an object without auto_map (remote code)")
    if present := [name for name in ADAPTER_FILES if name in listed]:
        if len(present) != len(ADAPTER_FILES):
            raise ManifestError(present[0], "an adapter is two files", ADAPTER_FILES, present)
        document = documents["adapter.json"] = parse_document("adapter.json", data["adapter.json"])
        fields, specs, metadata = _check_adapter(document, quantization)
        name = ADAPTER_FILES[0]
        # xz decodes at a thirtieth of the rate of zstd: 7 % of the bytes take longer than all the others
        read = partial(_read_stream, folder, listed[name], document["size_bytes"], document["sha256"], read_xz)
        with _meanwhile(read, document["size_bytes"]) as finished:
            tensors = _read_weights(folder, listed, quantization)  # a fault of the weights comes first
            stream = finished()
        if document["base_sha256"] != (base := quantization["weights"]["sha256"]):
            trained_on = ascii(document["base_sha256"])[:80]
            raise ContentError("adapter.json", "sha256 of the base that the adapter was trained on", trained_on, base)
        try:
            adapter = Adapter(split_tensors(stream, specs, metadata, name), **fields)
        except AdapterError as error:
            raise ContentError("adapter.json", str(error)) from None
    else:
        tensors, adapter = _read_weights(folder, listed, quantization), None
    return Archive(
        folder,
        archive_id,
        list(listed.values()),
        config,
        generation,
        quantization,
        architecture,
        self_check,
        copy_policy,
        vocabulary,
        documents.get("adapter.json"),
        tensors,
        adapter,
    )
