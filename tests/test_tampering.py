"""Every way to change a small archive, tried one by one: what verify() must refuse, it refuses, with a typed error.

The archive has 64 ids, one layer, double-quantized scales and an adapter, below 20 kB in all, so that each of its bytes
can be changed and each of its lengths tried: 87,000 verifications in a minute or two (--slow). By default a seeded
sample of each kind runs. The number tried of each kind is asserted, and shown at the end of the run.
"""

import hashlib
import io
import itertools
import json
import lzma
import os
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zstandard
from archives import PEAKS, Bench, manifest, peak_memory, small_archive, write_manifest

from drafter import streams
from drafter.archive import adapter_metadata, adapter_specs, document_bytes, stream_specs
from drafter.engine import TransformersEngine
from drafter.provenance import sha256_bytes
from drafter.self_check import check
from drafter.streams import ContentError, HashError, ManifestError, StreamError
from model_io import load_model

SAMPLE = 400  # of each kind, by default
WEIGHTS, ADAPTER = "weights.safetensors.zst", "adapter.safetensors.xz"


def sampled(cases: list, count: int, full: bool) -> list:
    return cases if full else random.Random(0).sample(cases, min(count, len(cases)))


both = pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sample", "all"])


def test_the_measure_of_memory_bites():
    with pytest.raises(AssertionError, match="MiB"), peak_memory(32 << 20):
        bytearray(os.urandom(1 << 20) * 64)
    PEAKS.pop()


# ---------------------------------------------------------------------------- bytes


@both
def test_every_byte_changed_in_two_ways(bench, full):
    places = [(name, at) for name, data in bench.original.items() for at in range(len(data))]
    chosen = sampled(places, SAMPLE, full)
    for name, at in chosen:
        data = bytearray(bench.original[name])
        for change in (1 << at % 8, 0xFF):
            data[at] ^= change
            bench.refused({name: bytes(data)}, (name, at, change))
            data[at] ^= change
    assert bench.outcomes.total() == 2 * len(chosen)
    assert not full or len(chosen) == sum(map(len, bench.original.values()))
    bench.report("a byte changed")


@both
def test_every_byte_changed_and_signed_again(bench, full):
    """The two streams, under a manifest that fits: what is left to refuse them are the hashes of what they decode to,
    and a bit that decodes to the same stream (three of the zstd frame: one is unused by the format) is no fault."""
    places = [(name, at) for name in (WEIGHTS, ADAPTER) for at in range(len(bench.original[name]))]
    chosen, same = sampled(places, SAMPLE, full), Counter()
    for name, at in chosen:
        data = bytearray(bench.original[name])
        data[at] ^= 1 << at % 8
        if bench.attempt(bench.signed({name: bytes(data)})) is None:
            same[name] += 1
    assert bench.outcomes.total() == len(chosen) and same[WEIGHTS] <= 8 and same[ADAPTER] <= 8, same
    bench.report("a byte of a stream changed, signed again")


@both
def test_every_truncation(bench, full):
    lengths = [(name, length) for name, data in bench.original.items() for length in range(len(data))]
    chosen = sampled(lengths, SAMPLE, full)
    for name, length in chosen:
        bench.refused({name: bench.original[name][:length]}, (name, length))
    assert bench.outcomes.total() == len(chosen)
    bench.report("a file cut")


@both
def test_every_truncation_signed_again(bench, full):
    """Shorter streams with hashes that fit; a shorter document is mostly not JSON, and never the same document."""
    names = [
        name for name in bench.original if name not in ("manifest.json", "tokenizer.json", "tokenizer_config.json")
    ]
    lengths = [(name, length) for name in names for length in range(len(bench.original[name]))]
    chosen = sampled(lengths, SAMPLE, full)
    for name, length in chosen:
        shorter = bench.original[name][:length]
        error = bench.attempt(bench.signed({name: shorter}))
        # without its last line feed a document is the same document
        assert error is not None or json.loads(shorter) == json.loads(bench.original[name]), (name, length)
    assert bench.outcomes["accepted"] <= len(names)
    bench.report("a file cut, signed again")


@both
def test_every_byte_of_mapped_weights(full, tmp_path):
    """weights.safetensors is mapped, by another function than the one that reads streams: each byte changed and each
    length, under the manifest as it was and under one that fits."""
    small_archive(tmp_path, storage="plain")
    (tmp_path / "work").mkdir()
    bench, name = Bench(tmp_path / "model", tmp_path / "work"), "weights.safetensors"
    data = bench.original[name]
    places = sampled(list(range(len(data))), SAMPLE // 4, full)
    for at in places:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        for other in (bytes(changed), data[:at], data + data[: at + 1]):
            bench.refused({name: other}, (name, at, len(other)))
            bench.refused(bench.signed({name: other}), (name, at, len(other)))
    assert bench.outcomes.total() == 6 * len(places)
    bench.report("mapped weights: a byte changed, cut, added to; also signed again")


def test_bytes_behind_the_end(bench):
    for name, data in bench.original.items():
        for more in (b"\0", b"\n", b" ", data):
            bench.refused({name: data + more}, (name, more[:8]))
    for name in (WEIGHTS, ADAPTER):
        data = bench.original[name]
        for more in (b"\0", b"\0\0\0\0", b"junk", data):
            assert isinstance(bench.refused(bench.signed({name: data + more})), StreamError)
            bench.refused(bench.signed({name: more + data}))
    bench.report("bytes behind the end")


# ---------------------------------------------------------------------------- documents


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all values in a document, objects and lists themselves included."""
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))


def others(value: Any) -> list[Any]:
    """Another type and another value, in several ways."""
    types = [None, True, "x", 7, 1.5, [], {}, [value], {"x": value}]
    if type(value) is int:
        types += [value + 1, value - 1, -value, float(value), str(value), 1 << 40, 10**30]
    elif type(value) is float:
        types += [value + 1, -value, int(value), str(value), 1e300, 10**400]
    elif isinstance(value, str):
        types += [value + "x", value[:-1], value.upper(), value + "\0", "../" + value, "\ud800", ""]
    elif isinstance(value, bool):
        types += [not value]
    return [other for other in types if type(other) is not type(value) or other != value]


def changes(document: Any, full: bool, seed: str) -> list[tuple[str, tuple, Any]]:
    """(what, path, changed document): each value replaced, each removed, one added to each object and list."""
    found = []

    def copy_with(path: tuple, apply: Callable[[Any, Any], None]) -> Any:
        copied = json.loads(json.dumps(document))
        owner = copied
        for key in path[:-1]:
            owner = owner[key]
        apply(owner, path[-1])
        return copied

    for path in leaves(document):
        value = document
        for key in path:
            value = value[key]
        if not path:
            found += [("replaced", path, other) for other in others(value)]
        for other in others(value) if path else ():
            found.append(
                ("replaced", path, copy_with(path, lambda owner, key, other=other: owner.__setitem__(key, other)))
            )
        if path:
            found.append(("removed", path, copy_with(path, lambda owner, key: owner.pop(key))))
        more = (*path, "added")
        if isinstance(value, dict):
            found.append(("added", more, copy_with(more, lambda owner, key: owner.__setitem__(key, 1))))
        elif isinstance(value, list):
            extra = value[-1] if value else 1
            found.append(("added", more, copy_with(more, lambda owner, key, extra=extra: owner.append(extra))))
    return found if full else random.Random(seed).sample(found, min(SAMPLE, len(found)))


@both
def test_every_field_of_the_manifest(bench, full):
    """archive_id fits each change, unless it is what changes. With a list of files that means something else, that
    spells the same otherwise, or that is not one."""
    document = json.loads(bench.original["manifest.json"])
    for what, path, changed in changes(document, full, "manifest"):
        if isinstance(changed, dict) and isinstance(changed.get("files"), list) and path[0] == "files":
            changed["archive_id"] = sha256_bytes(json.dumps(changed["files"], sort_keys=True).encode())
            with_id = {**changed, "archive_id": sha256_bytes(canonical(changed["files"]))}
            bench.refused({"manifest.json": text(with_id)}, (what, path))
        bench.refused({"manifest.json": text(changed)}, (what, path))
    bench.report("a field of the manifest")


def text(document: Any) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"


def canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


# What verify() lets pass when it is signed again: (file, beginning of the path) -> why.
ANY = object()
HARMLESS = {
    ("architecture.json", "recipe_name"): "free text, shown in /info",
    ("architecture.json", "recipe"): "the recipe of the training; read by its own strict reader where it is used",
    ("architecture.json", "phase_log", ANY): "the log of the training, shown in /info",
    ("architecture.json", "phase_log"): "an entry more or less of that log",
    ("copy_policy.json", "limits", ANY): "any limits: what a copy overrides, never what a target accepts",
    ("generation.json", "context"): "what a request may hold; any length that the self-check's prompts fit into",
    ("generation.json", "stop_ids"): "the loader holds them against the tokenizer's and config.json's",
    ("quantization.json", "source"): "names the checkpoint; the packer compares it with phase_log before it packs",
    ("self_check.json", "margin"): "a witness of drafts, not a lock: wider or narrower, each engine still drafts alike",
    ("self_check.json", "drafts"): "likewise; wrong drafts are refused when an engine drafts otherwise",
    ("tokenizer_config.json",): "the loader holds ids, thinking switch and rendered texts against the rest",
}
# What decides the arithmetic of the same tensors, and fits them all: the engine's self-check is there for it.
ARITHMETIC = {
    *("rms_norm_eps", "rope_parameters", "hidden_act", "use_sliding_window", "sliding_window", "max_window_layers"),
    *("layer_types", "attention_dropout"),
}
# What transformers does not use to compute, or what another document decides.
UNUSED = {
    *("architectures", "dtype", "torch_dtype", "initializer_range", "use_cache", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "attention_bias"),
}


def expected_harmless(file: str, path: tuple) -> bool:
    if file == "config.json":
        return bool(path) and path[0] in ARITHMETIC | UNUSED
    return any(
        key[0] == file
        and len(path) >= len(key) - 1
        and all(want is ANY or want == have for want, have in zip(key[1:], path, strict=False))
        for key in HARMLESS
    )


@both
@pytest.mark.parametrize(
    "file",
    [
        "config.json",
        "generation.json",
        "quantization.json",
        "copy_policy.json",
        "draft_vocabulary.json",
        "architecture.json",
        "self_check.json",
        "adapter.json",
        "tokenizer_config.json",
    ],
)
def test_every_field_of_every_document_signed_again(bench, full, file):
    """Accepted is only what the tables above say is harmless, or left to the self-check; and it does load, or is
    refused with a typed error there."""
    accepted: dict[tuple, Any] = {}
    for what, path, changed in changes(json.loads(bench.original[file]), full, file):
        if bench.attempt(bench.signed({file: text(changed)})) is None:
            assert expected_harmless(file, path), (file, what, path)
            accepted.setdefault(path[:2], changed)
    bench.report(f"a field of {file}, signed again")

    def load_and_draft(folder):
        loaded = load_model(folder)
        check(TransformersEngine(loaded), loaded.self_check)

    loads = Bench(bench.folder, bench.folder.parent / "loads")
    for changed in accepted.values():
        loads.attempt(loads.signed({file: text(changed)}), load_and_draft)
    if accepted:
        loads.report(f"of these accepted, loaded and drafted with ({file})")


# ---------------------------------------------------------------------------- tensors


def stream_of(bench: Bench) -> bytes:
    return zstandard.ZstdDecompressor().decompress(bench.original[WEIGHTS])


def forged(bench: Bench, quantization: dict, stream: bytes, adapter: dict | None = None) -> dict[str, bytes]:
    """Weights and all the documents that name them, hashes and sizes fitting."""
    sha256 = hashlib.sha256(stream).hexdigest()
    quantization["weights"].update(size_bytes=len(stream), sha256=sha256)
    adapter = {**(adapter or json.loads(bench.original["adapter.json"])), "base_sha256": sha256}
    changed = {
        WEIGHTS: zstandard.ZstdCompressor(write_checksum=True).compress(stream),
        "quantization.json": document_bytes(quantization),
        "adapter.json": document_bytes(adapter),
    }
    return bench.signed(changed)


def split(quantization: dict, stream: bytes) -> dict[str, bytes]:
    """{stored name: its bytes} in the order of the stream."""
    specs = stream_specs(quantization)
    at, parts = len(streams.safetensors_header(specs, {"format": 1, "kind": "weights"})), {}
    for name, (dtype, shape) in specs.items():
        size = dtype.itemsize
        for side in shape:
            size *= side
        parts[name], at = stream[at : at + size], at + size
    return parts


def joined(quantization: dict, parts: dict[str, bytes]) -> bytes:
    specs = stream_specs(quantization)
    header = streams.safetensors_header(specs, {"format": 1, "kind": "weights"})
    return header + b"".join(parts[name] for name in specs)


def test_the_forger_can_forge(bench):
    """The tools of this chapter make a sound archive of unchanged parts: what they change is all that is refused."""
    quantization, stream = json.loads(bench.original["quantization.json"]), stream_of(bench)
    assert joined(quantization, split(quantization, stream)) == stream
    assert bench.attempt(forged(bench, quantization, stream)) is None


def test_tensors_swapped_renamed_added_and_removed(bench):
    original = json.loads(bench.original["quantization.json"])
    parts = split(original, stream_of(bench))
    names = list(original["tensors"])

    def attempt(tensors: dict, ties: dict | None = None, more: dict | None = None, what: Any = "") -> None:
        quantization = {**original, "weights": dict(original["weights"]), "tensors": tensors}
        if ties is not None:
            quantization["ties"] = ties
        # bytes for names that are new: those of the name they had, or zeros that decode
        stored = {**parts, **(more or {})}
        bench.refused(forged(bench, quantization, joined(quantization, stored)), what)

    def renamed(old: str, new: str) -> tuple[dict, dict]:
        tensors = {new if name == old else name: entry for name, entry in original["tensors"].items()}
        return tensors, {part.replace(old, new): data for part, data in parts.items() if part.startswith(old)}

    for name in names:
        tensors = {other: entry for other, entry in original["tensors"].items() if other != name}
        ties = {key: value for key, value in original["ties"].items() if value != name}
        attempt(tensors, ties=ties, what=("removed", name))
        for new in (name.upper(), name.replace("layers.0", "layers.1"), f"extra.{name}", name + "2"):
            if new != name:
                tensors, more = renamed(name, new)
                attempt(tensors, ties=ties, more=more, what=("renamed", name, new))
    for name, other in itertools.combinations(names, 2):  # the names change places, the bytes stay
        entries = original["tensors"]
        if entries[name] != entries[other]:  # of one shape and codec: other weights, not another archive
            swapped = {{name: other, other: name}.get(key, key): entry for key, entry in entries.items()}
            more = {
                part.replace(name, "\0").replace(other, name).replace("\0", other): data for part, data in parts.items()
            }
            attempt(swapped, more=more, what=("swapped", name, other))
    for name, entry, data in (
        ("extra.weight", {"codec": "none", "shape": [4], "dtype": "F32"}, {"extra.weight": bytes(16)}),
        (
            "model.layers.1.self_attn.q_proj.weight",
            original["tensors"]["model.layers.0.self_attn.q_proj.weight"],
            {p.replace("s.0", "s.1"): d for p, d in parts.items() if p.startswith("model.layers.0.self_attn.q_proj")},
        ),
        ("model.layers.0.self_attn.q_proj.bias", {"codec": "none", "shape": [32], "dtype": "F32"}, None),
        ("lm_head.weight", original["tensors"]["model.embed_tokens.weight"],
         {p.replace("model.embed_tokens", "lm_head"): d for p, d in parts.items() if p.startswith("model.embed")}),
    ):  # fmt: skip
        attempt({**original["tensors"], name: entry}, more=data or {name: bytes(128)}, what=("added", name))
    norm = original["tensors"]["model.norm.weight"]
    for changed, size in (({"codec": "none", "shape": [4, 8]}, 128), ({"codec": "none", "shape": [31]}, 124)):
        tensors = {**original["tensors"], "model.norm.weight": {**norm, **changed}}
        attempt(tensors, more={"model.norm.weight": parts["model.norm.weight"][:size]}, what=("shape", changed))
    assert bench.outcomes.total() > 100 and "accepted" not in bench.outcomes
    bench.report("tensors renamed, added, removed, swapped; headers, sizes and hashes fitting")


@both
def test_headers_of_the_stream(bench, full):
    """The safetensors header is derived, not read: no other one of the same length says anything."""
    quantization, stream = json.loads(bench.original["quantization.json"]), stream_of(bench)
    length = int.from_bytes(stream[:8], "little")
    header = json.loads(stream[8 : 8 + length])
    first, second = [name for name in header if name != "__metadata__"][:2]
    for change in (
        {first: header[second], second: header[first]},
        {first: {**header[first], "data_offsets": header[second]["data_offsets"]}},
        {first: {**header[first], "shape": [1]}},
        {first: {**header[first], "dtype": "U8"}},
        {"__metadata__": {"format": "2"}},
        {"__metadata__": {}},
    ):
        data = json.dumps({**header, **change}, separators=(",", ":")).encode()
        for written in (data[:length].ljust(length), data):
            changed = len(written).to_bytes(8, "little") + written + stream[8 + length :]
            bench.refused(forged(bench, quantization, changed), change)
    for count in (0, 7, length - 1, length + 1, 1 << 40, (1 << 64) - 1):
        bench.refused(forged(bench, quantization, count.to_bytes(8, "little") + stream[8:]), count)
    for at in sampled(list(range(length + 8)), SAMPLE, full):
        changed = bytearray(stream)
        changed[at] ^= 1
        bench.refused(forged(bench, quantization, bytes(changed)), at)
    bench.report("headers of the weight stream, hashes fitting")


# ---------------------------------------------------------------------------- the adapter


def test_adapters_that_do_not_belong(bench, small, tmp_path):
    """Of another base, of another rank or alpha, and streams with fitting hashes under a document of another."""
    document = json.loads(bench.original["adapter.json"])
    stream = lzma.decompress(bench.original[ADAPTER])
    shapes = {
        name: tuple(entry["shape"])
        for name, entry in json.loads(bench.original["quantization.json"])["tensors"].items()
    }

    def attempt(document, stream):
        data = {**document, "size_bytes": len(stream), "sha256": hashlib.sha256(stream).hexdigest()}
        bench.refused(bench.signed({"adapter.json": document_bytes(data), ADAPTER: lzma.compress(stream)}), document)

    attempt({**document, "base_sha256": "1" * 64}, stream)
    attempt({**document, "base_sha256": None}, stream)
    for change in ({"rank": 1, "scale": 4.0}, {"rank": 4, "scale": 1.0}, {"alpha": 8.0, "scale": 4.0}, {"scale": 4.0}):
        attempt({**document, **change}, stream)
    for change in ({"rank": 1, "scale": 4.0}, {"alpha": 2.0}):  # the stream fits its document, but not alpha / rank
        forged = {**document, **change} if "rank" not in change else {**document, **change, "scale": 2.0}
        specs, metadata = adapter_specs(forged, shapes), adapter_metadata(forged)
        body = streams.stream_size(specs, metadata) - len(streams.safetensors_header(specs, metadata))
        attempt(forged, streams.safetensors_header(specs, metadata) + bytes(body))
    specs, metadata = adapter_specs(document, shapes), adapter_metadata(document)
    head, name = streams.safetensors_header(specs, metadata), document["targets"][0]
    smaller = dict(specs)  # LOR-1: one layer of another rank
    for part in ("lora_A", "lora_B"):
        smaller[f"{name}.{part}"] = (
            specs[f"{name}.{part}"][0],
            tuple(1 if n == 2 else n for n in specs[f"{name}.{part}"][1]),
        )
    body = streams.stream_size(smaller, metadata) - len(streams.safetensors_header(smaller, metadata))
    attempt(document, streams.safetensors_header(smaller, metadata) + stream[len(head) : len(head) + body])
    for value in (b"\x80\x7f", b"\xc0\x7f", b"\x80\xff"):  # bf16 inf, nan, -inf
        attempt(document, stream[:-2] + value)
    for targets in (document["targets"][::-1], document["targets"][1:], document["targets"] * 2, ["lm_head"], []):
        attempt({**document, "targets": targets}, stream)
    bench.refused(bench.signed({ADAPTER: None}), "one of two files")
    bench.refused(bench.signed({"adapter.json": None}), "one of two files")
    bench.report("adapters of another base, rank, alpha or target")


# ---------------------------------------------------------------------------- files and names


def test_files_unlisted_and_missing(bench):
    for name in bench.original:
        bench.refused({name: None}, ("missing", name))
        if name not in ("manifest.json", "tokenizer_config.json", "draft_vocabulary.json"):  # these two may be missing
            bench.refused(bench.signed({name: None}), ("missing, and from the manifest", name))
    for name in ("notes.txt", ".hidden", "model.safetensors", "weights.safetensors", "pytorch_model.bin", "evidence"):
        bench.refused({name: b"x"}, ("unlisted", name))
        bench.refused(bench.signed({name: b"x"}), ("listed", name))
    bench.report("files unlisted, missing, unknown")


HOSTILE = [
    "../config.json", "/etc/passwd", "a/../../x", "evidence/x", "./config.json", "config.json/", "config.json\0",
    "a\0b", "", ".", "..", "manifest.json", "CONFIG.JSON", "config.json ", "con\u0133ig.json", "\u202econfig.json",
    "\ud800", "x" * 5000, 7, None, True, [], {}, ["config.json"], 1.5,
]  # fmt: skip


def test_hostile_names(bench):
    for name in HOSTILE:
        first = bench.files[0]
        for files in ([*bench.files, {**first, "path": name}], [{**first, "path": name}, *bench.files[1:]]):
            write_manifest(bench.folder, files) if name != "\ud800" else None
            data = (bench.folder / "manifest.json").read_bytes() if name != "\ud800" else text({"files": files})
            (bench.folder / "manifest.json").write_bytes(bench.original["manifest.json"])
            assert isinstance(bench.refused({"manifest.json": data}, name), ManifestError | ContentError | HashError)
    bench.refused({"manifest.json": manifest([*bench.files, bench.files[0]])}, "twice")
    bench.report("hostile names")


# ---------------------------------------------------------------------------- streams without end


def zeros(size: int, **settings) -> bytes:
    compressor = zstandard.ZstdCompressor(level=3, **settings).compressobj(size=-1)
    piece = bytes(1 << 20)
    return b"".join([*(compressor.compress(piece) for _ in range(size >> 20)), compressor.flush()])


def test_frames_of_every_shape(bench):
    stream, good = stream_of(bench), bench.original[WEIGHTS]
    compress = zstandard.ZstdCompressor().compress
    skippable = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"skip"
    half = len(stream) // 2
    for data in (
        compress(stream[:half]) + compress(stream[half:]),
        skippable + good,
        good + skippable,
        good + compress(b""),
        compress(b"") + good,
        b"",
        stream,
        lzma.compress(stream),
        zeros(1 << 20)[:-3],
    ):
        bench.refused(bench.signed({WEIGHTS: data}), data[:8])
    unsized = io.BytesIO()  # PCK-3: a frame that does not state its size, but is as long as was declared
    with zstandard.ZstdCompressor().stream_writer(unsized, closefd=False) as writer:
        writer.write(stream)
    assert bench.attempt(bench.signed({WEIGHTS: unsized.getvalue()})) is None
    own, compact = bench.original[ADAPTER], lzma.decompress(bench.original[ADAPTER])
    for data in (
        own + own,
        lzma.compress(compact[:100]) + lzma.compress(compact[100:]),
        lzma.compress(compact, lzma.FORMAT_ALONE),
        own + bytes(4),
        compress(compact),
        b"",
    ):
        bench.refused(bench.signed({ADAPTER: data}), data[:8])
    bench.report("frames: two, skippable, of another kind")


def test_archives_that_unfold_without_end(bench):
    """1 GiB of zeros in 100 kB, declared honestly, dishonestly or not at all; sizes beyond every ceiling."""
    bomb, size = zeros(1 << 30), 1 << 30
    bench.refused(bench.signed({WEIGHTS: bomb}), "undeclared")
    compressor = lzma.LZMACompressor(preset=0)
    xz = b"".join([*(compressor.compress(bytes(1 << 20)) for _ in range(256)), compressor.flush()])
    bench.refused(bench.signed({ADAPTER: xz}), "undeclared")

    def declared(shape: list[int]) -> dict:
        """The honest declaration of an archive whose norm has that many elements."""
        document = json.loads(bench.original["quantization.json"])
        document["tensors"]["model.norm.weight"]["shape"] = shape
        document["weights"]["size_bytes"] = streams.stream_size(
            stream_specs(document), {"format": 1, "kind": "weights"}
        )
        return document

    for shape in ([size // 4], [1 << 33], [1 << 35], [1 << 35, 1 << 35, 1 << 35, 1 << 35]):
        document = declared(shape)
        for data in (bomb, bench.original[WEIGHTS]):
            changed = {"quantization.json": document_bytes(document), WEIGHTS: data}
            bench.refused(bench.signed(changed), shape)
    document = json.loads(bench.original["adapter.json"])
    for rank in (4096, 1 << 20, 1 << 62):
        forged = {**document, "rank": rank, "scale": 4.0 / rank}
        specs = adapter_specs(forged, {f"{name}.weight": (1 << 20, 1 << 20) for name in forged["targets"]})
        forged["size_bytes"] = streams.stream_size(specs, adapter_metadata(forged))
        bench.refused(bench.signed({"adapter.json": document_bytes(forged), ADAPTER: xz}), rank)
    window = bytes.fromhex("28b52ffd 00 a8 01 00 00")  # a frame of no bytes that asks for a window of 2 GiB
    assert zstandard.get_frame_parameters(window).window_size == 2 << 30
    bench.refused(bench.signed({WEIGHTS: window}), "window")
    greedy = bytearray(bench.original[ADAPTER])
    end = 12 + 4 * (greedy[12] + 1) - 4  # of the block header, before its CRC
    greedy[greedy.index(b"\x21\x01", 12, end) + 2] = 40  # LZMA2: a dictionary of 4 GiB
    greedy[end : end + 4] = zlib.crc32(greedy[12:end]).to_bytes(4, "little")
    assert "memory" in str(bench.refused(bench.signed({ADAPTER: bytes(greedy)}), "dictionary"))
    for name in ("config.json", "architecture.json", "quantization.json", "tokenizer_config.json"):
        for data in (
            b"[" * 900_000,
            b"[" + b"{}," * 300_000 + b"{}]",
            b" " * (2 << 20),
            b'"' + b"x" * (2 << 20) + b'"',
        ):
            bench.refused(bench.signed({name: data}), (name, data[:8]))
    bench.refused(bench.signed({"tokenizer.json": bytes(65 << 20)}), "tokenizer.json")
    bench.report("archives that unfold without end")


def test_configs_without_end(bench):
    """Numbers that cost their writer nothing, and a reader that believes them 10^9 layers, labels or table entries."""
    config = json.loads(bench.original["config.json"])
    huge = 10**9
    for change in (
        {"num_hidden_layers": huge}, {"hidden_size": huge}, {"head_dim": huge}, {"num_attention_heads": huge},
        {"num_key_value_heads": huge}, {"vocab_size": huge}, {"intermediate_size": huge}, {"num_labels": huge},
        {"layer_types": ["full_attention"] * 70_000},
    ):  # fmt: skip
        bench.refused(bench.signed({"config.json": document_bytes({**config, **change})}), change)
    generation = json.loads(bench.original["generation.json"])
    changed = {
        "config.json": document_bytes({**config, "max_position_embeddings": huge}),
        "generation.json": document_bytes({**generation, "context": huge}),
    }
    bench.refused(bench.signed(changed), "context")
    bench.report("configs without end")
