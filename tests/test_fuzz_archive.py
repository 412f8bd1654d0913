"""Random damage to the small archive: verify() and load_model() answer with an ArchiveError, or accept; nothing else.

Bytes of the streams, documents, tokenizers, manifests and whole folders are mutated, under hashes that fit or not. By
default each kind runs some dozens of fixed examples; with --slow each runs new ones for two minutes.

FUZZ_SECONDS=60 python -m pytest -m slow tests/test_fuzz_archive.py     # each kind for 60 seconds
"""

import copy
import hashlib
import io
import json
import lzma
import os
import random
import time
from typing import Any

import hypothesis
import pytest
import zstandard
from archives import Bench
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafter import streams
from drafter.archive import KNOWN_FILES, document_bytes, stream_specs
from drafter.streams import ArchiveError, HashingReader
from model_io import load_model, verify

SECONDS = float(os.environ.get("FUZZ_SECONDS", 120))  # of each kind, with --slow
WEIGHTS, ADAPTER = "weights.safetensors.zst", "adapter.safetensors.xz"


# ---------------------------------------------------------------------------- damage


class Named:
    """A value that strategies print by its name: hypothesis writes down what each was made of."""

    def __init__(self, name: str, value: Any):
        self.name, self.value = name, value

    def __repr__(self) -> str:
        return self.name


@st.composite
def damaged(draw, source: Named) -> bytes:
    """Up to four splices, repeats, cuts, insertions and overwritten places."""
    data = bytearray(source.value)
    for _ in range(draw(st.integers(1, 4))):
        size = len(data)
        start = draw(st.integers(0, size))
        length = draw(st.one_of(st.integers(0, 8), st.integers(0, size)))
        piece = bytes(data[start : start + length])
        kind = draw(
            st.sampled_from(["flip", "overwrite", "insert", "delete", "repeat", "move", "cut", "zero", "number"])
        )
        if kind == "flip" and start < size:
            data[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "overwrite":
            new = draw(st.binary(max_size=16))
            data[start : start + len(new)] = new
        elif kind == "insert":
            data[start:start] = draw(st.binary(max_size=64))
        elif kind == "delete":
            del data[start : start + length]
        elif kind == "repeat":
            data[start:start] = piece * draw(st.integers(1, 3))
        elif kind == "move":
            to = draw(st.integers(0, size))
            data[to : to + len(piece)] = piece
        elif kind == "cut":
            del data[start:]
        elif kind == "zero":
            data[start : start + length] = bytes(len(piece))
        elif kind == "number":
            width = draw(st.sampled_from([1, 2, 4, 8]))
            value = draw(st.sampled_from([0, 1, (1 << 8 * width) - 1, 1 << 8 * width - 1]))
            data[start : start + width] = value.to_bytes(width, "little")
    return bytes(data[: 1 << 20])


ODD = [
    *(0, -1, 1, 2, 64, 255, 1 << 31, 1 << 53, 1 << 63, 1 << 64, 10**30, 10**400),
    *(-0.0, 5e-324, 1e308, float("inf"), float("nan"), True, False, None),
    *("", "\0", "\ud800", "../x", "x" * 5000, "nf4", "F32", "weights.safetensors", "model.norm.weight"),
    *([], {}, [[]] * 50, [0] * 100, [1 << 40] * 4),
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(ODD),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


def paths(value: Any, path: tuple = ()) -> list[tuple]:
    found = [path]
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            found += paths(value[key], (*path, key))
    return found


@st.composite
def changed(draw, source: Named) -> Any:
    """Up to four values replaced, removed, renamed, added, copied or nudged anywhere in a JSON document."""
    document = {"": copy.deepcopy(source.value)}
    for _ in range(draw(st.integers(1, 4))):
        places = paths(document)[1:]
        path = draw(st.sampled_from(places))
        owner = document
        for key in path[:-1]:
            owner = owner[key]
        key = path[-1]
        kind = draw(st.sampled_from(["odd", "random", "remove", "rename", "add", "copy", "nudge"]))
        if kind == "odd":
            owner[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif kind == "random":
            owner[key] = copy.deepcopy(draw(values))
        elif kind == "remove" and len(path) > 1:
            del owner[key]
        elif kind == "rename" and isinstance(owner, dict) and len(path) > 1:
            new = draw(st.text(max_size=8) | st.sampled_from(sorted(owner)))
            owner[new] = owner.pop(key)
        elif kind == "add" and isinstance(owner, dict) and len(path) > 1:
            owner[draw(st.text(max_size=8))] = copy.deepcopy(draw(values))
        elif kind == "copy":
            other = document
            for step in draw(st.sampled_from(places)):
                other = other[step]
            owner[key] = copy.deepcopy(other)
        elif kind == "nudge" and type(owner[key]) in (int, float):
            owner[key] = owner[key] + draw(st.sampled_from([-1, 1, 0.5, 1 << 20]))
    return document[""]


def text(document: Any) -> bytes:
    return json.dumps(document, indent=1).encode() + b"\n"


# ---------------------------------------------------------------------------- what must hold


def load_too(folder) -> None:
    verify(folder)
    load_model(folder)


def load_and_render(folder) -> None:
    verify(folder)
    load_model(folder).chat.render([{"role": "user", "content": "Write one sentence."}])


class Fuzz:
    """Runs a property for a fixed number of examples, or anew until its time is up."""

    def __init__(self, bench: Bench):
        self.bench = bench

    def run(self, kind: str, strategy: st.SearchStrategy, body, slow: bool) -> None:
        common = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
        if not slow:
            settings(max_examples=60, derandomize=True, **common)(given(strategy)(body))()
        else:
            end_s, number = time.monotonic() + SECONDS, random.SystemRandom().randrange(1 << 32)
            while time.monotonic() < end_s:
                number += 1
                hypothesis.seed(number)(settings(max_examples=300, **common)(given(strategy)(body)))()
        self.bench.report(f"fuzzing {kind}")


@pytest.fixture
def fuzz(bench) -> Fuzz:
    return Fuzz(bench)


both = pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "minutes"])


@both
def test_streams(fuzz, slow):
    """zstd, xz and what they hold, with hashes that fit the file; weights and adapter alike."""
    bench = fuzz.bench
    plain = {
        WEIGHTS: zstandard.ZstdDecompressor().decompress(bench.original[WEIGHTS]),
        ADAPTER: lzma.decompress(bench.original[ADAPTER]),
    }
    squeeze = {WEIGHTS: zstandard.ZstdCompressor().compress, ADAPTER: lzma.compress}
    reader = {WEIGHTS: streams.read_zstd, ADAPTER: streams.read_xz}
    whole = st.sampled_from(sorted(bench.original.values()))

    def bad(name: str) -> st.SearchStrategy:
        stored, inside = Named(name, bench.original[name]), Named("decoded", plain[name])
        return st.one_of(
            damaged(stored),
            damaged(inside).map(squeeze[name]),
            damaged(inside).map(squeeze[name]).flatmap(lambda data: damaged(Named("encoded", data))),
            damaged(Named("zeros", squeeze[name](bytes(1 << 20)))),
            st.binary(max_size=200).map(lambda data: stored.value[:6] + data),
            st.lists(whole, max_size=3).map(b"".join),
        )

    case = st.one_of([st.tuples(st.just(name), bad(name)) for name in (WEIGHTS, ADAPTER)])

    def body(case):
        name, data = case
        bench.attempt(bench.signed({name: data}))
        out = bytearray(len(plain[name]))
        try:
            reader[name](HashingReader(io.BytesIO(data), len(data), name), memoryview(out))
        except ArchiveError:
            return
        assert len(out) == len(plain[name])

    fuzz.run("streams", case, body, slow)


DOCUMENTS = (
    "config.json", "generation.json", "quantization.json", "copy_policy.json", "architecture.json", "self_check.json",
    "draft_vocabulary.json", "adapter.json", "tokenizer_config.json", "tokenizer.json",
)  # fmt: skip


# Parts of a tokenizer.json, of each kind that the library knows: damage to one of a kind never makes one of another.
lengths = st.sampled_from([0, 1, 2, 64, 1 << 32])
words = st.sampled_from(["", "a", "##", "\u00e9", "zz", "<|im_end|>"])
patterns = st.fixed_dictionaries({"Regex": st.sampled_from(["", ".", "a", "(", "[a-z]+|."])})
flags = st.booleans()


def part(kind: str, **fields: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({"type": st.just(kind), **fields})


behaviors = st.sampled_from(["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous", "No"])
vocabularies = st.dictionaries(words | st.sampled_from("abcdefgh"), st.integers(0, 70), max_size=8)
scored = st.lists(st.tuples(words, st.floats()), max_size=5)
PARTS = {
    "normalizer": st.one_of(
        part("Precompiled", precompiled_charsmap=st.sampled_from(["", "AAAAAAAAAAA=", "BAAAAP////9hAA==", "?"])),
        part("Replace", pattern=patterns, content=words),
        part("Prepend", prepend=words),
        part("Strip", strip_left=flags, strip_right=flags),
        *(part(kind) for kind in ("NFC", "NFKD", "Lowercase", "StripAccents", "Nmt", "ByteLevel")),
    ),
    "pre_tokenizer": st.one_of(
        part("Split", pattern=patterns, behavior=behaviors, invert=flags),
        part("Metaspace", replacement=words, prepend_scheme=st.sampled_from(["always", "never", "first"]), split=flags),
        part("ByteLevel", add_prefix_space=flags, trim_offsets=flags, use_regex=flags),
        part("FixedLength", length=lengths),
        part("Digits", individual_digits=flags),
        *(part(kind) for kind in ("Whitespace", "BertPreTokenizer", "UnicodeScripts")),
    ),
    "post_processor": st.one_of(
        part("RobertaProcessing", sep=st.tuples(words, lengths), cls=st.tuples(words, lengths), trim_offsets=flags,
             add_prefix_space=flags),
        part("TemplateProcessing", single=st.just([{"SpecialToken": {"id": "zz", "type_id": 0}}]), pair=st.just([]),
             special_tokens=st.sampled_from([{}, {"zz": {"id": "zz", "ids": [], "tokens": ["zz"]}}])),
    ),
    "decoder": st.one_of(
        part("Strip", content=words, start=lengths, stop=lengths),
        part("BPEDecoder", suffix=words),
        part("CTC", pad_token=words, word_delimiter_token=words, cleanup=flags),
        part("ByteFallback"),
    ),
    "model": st.one_of(
        part("BPE", vocab=vocabularies, merges=st.lists(st.tuples(words, words), max_size=3), unk_token=words,
             continuing_subword_prefix=words, end_of_word_suffix=words, dropout=st.none() | st.floats(),
             byte_fallback=flags),
        part("WordPiece", vocab=vocabularies, unk_token=words, continuing_subword_prefix=words,
             max_input_chars_per_word=lengths),
        part("WordLevel", vocab=vocabularies, unk_token=words),
        part("Unigram", vocab=scored, unk_id=st.none() | lengths, byte_fallback=flags),
    ),
}  # fmt: skip


@both
def test_tokenizers(fuzz, slow):
    """Parts of other tokenizers, with the vocabulary of this one or another; each is loaded and renders a text."""
    bench = fuzz.bench
    original = json.loads(bench.original["tokenizer.json"])
    case = st.fixed_dictionaries({}, optional=PARTS).filter(len)
    own_ids = st.booleans()

    def body(case):
        parts, keep_vocabulary = case
        if keep_vocabulary and parts.get("model", {}).get("type") in ("BPE", "WordPiece", "WordLevel"):
            parts = {**parts, "model": {**parts["model"], "vocab": original["model"]["vocab"]}}
        bench.attempt(bench.signed({"tokenizer.json": text({**original, **parts})}), load_and_render)

    fuzz.run("tokenizers", st.tuples(case, own_ids), body, slow)


@both
def test_documents(fuzz, slow):
    """Each document replaced, changed or damaged as text, hashes fitting; what verifies is loaded too."""
    bench = fuzz.bench

    def bad(name: str) -> st.SearchStrategy:
        data = bench.original[name]
        parsed, raw = Named(name, json.loads(data)), Named(name, data)
        return st.one_of(changed(parsed).map(text), damaged(raw), values.map(text))

    case = st.one_of([st.tuples(st.just(name), bad(name)) for name in DOCUMENTS])

    def body(case):
        bench.attempt(bench.signed(dict([case])), load_too)

    fuzz.run("documents", case, body, slow)


@both
def test_manifests(fuzz, slow):
    bench = fuzz.bench
    document = json.loads(bench.original["manifest.json"])

    def body(data: bytes) -> None:
        assert bench.attempt({"manifest.json": data}) is not None or data == bench.original["manifest.json"]

    def fitting(files: Any) -> bytes:
        try:
            listed = json.dumps(files, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        except ValueError:
            listed = b""
        return text({"format": 1, "files": files, "archive_id": hashlib.sha256(listed).hexdigest()})

    case = st.one_of(
        changed(Named("manifest", document)).map(text),
        changed(Named("files", document["files"])).map(fitting),
        damaged(Named("bytes", bench.original["manifest.json"])),
        values.map(text),
        values.map(fitting),
    )
    fuzz.run("manifests", case, body, slow)


@both
def test_whole_folders(fuzz, slow):
    """Several files at once: damaged, exchanged, taken away, added, some with fitting hashes."""
    bench = fuzz.bench
    names = sorted(bench.original)

    whole = st.sampled_from(sorted(bench.original.values()))

    def content(name: str) -> st.SearchStrategy:
        choices = [damaged(Named(name, bench.original[name])), st.none(), whole]
        if name in DOCUMENTS:
            choices.append(changed(Named(name, json.loads(bench.original[name]))).map(text))
        return st.one_of(choices)

    contents = {name: content(name) for name in names if name != "manifest.json"}
    some = st.dictionaries(st.sampled_from(sorted(contents)), st.none(), min_size=1, max_size=4).flatmap(
        lambda chosen: st.fixed_dictionaries({name: contents[name] for name in chosen})
    )
    others = sorted(KNOWN_FILES - set(names)) + ["x", "model.bin"]
    extra = st.dictionaries(st.sampled_from(others), st.binary(max_size=50), max_size=2)
    case = st.tuples(some, extra, st.booleans())

    def body(case):
        files, more, sign = case
        files = {**files, **more}
        bench.attempt(bench.signed(files) if sign else files, load_too)

    fuzz.run("folders", case, body, slow)


@both
def test_headers(fuzz, slow):
    """Declared shapes, codecs and names with a stream that is written as declared: only their meaning can be wrong."""
    bench = fuzz.bench
    original = json.loads(bench.original["quantization.json"])
    body_of = zstandard.ZstdDecompressor().decompress(bench.original[WEIGHTS])
    body_of = body_of[8 + int.from_bytes(body_of[:8], "little") :]

    def body(tensors: Any) -> None:
        quantization = {**original, "tensors": tensors, "weights": dict(original["weights"])}
        try:
            specs = stream_specs(quantization)
            header = streams.safetensors_header(specs, {"format": 1, "kind": "weights"})
            size = streams.stream_size(specs, {"format": 1, "kind": "weights"}) - len(header)
            stream = header + (body_of * (size // len(body_of) + 1))[:size] if 0 <= size < 1 << 22 else header
            size += len(header)
        except Exception:  # nothing that could be declared
            stream, size = body_of, len(body_of)
        sha256 = hashlib.sha256(stream).hexdigest()
        quantization["weights"].update(size_bytes=size, sha256=sha256)
        adapter = {**json.loads(bench.original["adapter.json"]), "base_sha256": sha256}
        try:
            written = {"quantization.json": document_bytes(quantization), "adapter.json": document_bytes(adapter)}
        except ValueError:
            return
        written[WEIGHTS] = zstandard.ZstdCompressor().compress(stream)
        bench.attempt(bench.signed(written), load_too)

    fuzz.run("declared tensors", changed(Named("tensors", original["tensors"])), body, slow)
