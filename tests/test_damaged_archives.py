"""Damaged, forged and misleading archives: each is refused with a typed error, and nothing is written or kept."""

import hashlib
import io
import json
import lzma
import os

import pytest
import torch
import zstandard
from archives import edit, refused, rewrite_weights, sign, write_manifest

from drafter import streams
from drafter.archive import check_tokenizer, stream_specs
from drafter.streams import ArchiveError, ContentError, HashError, HashingReader, ManifestError, StreamError
from model_io import load_model, verify

# ---------------------------------------------------------------------------- nothing altered gets past it


def test_a_changed_byte_in_any_file_is_refused_with_both_hashes(archive):
    for path in sorted(archive.iterdir()):
        data = path.read_bytes()
        for at in {0, len(data) // 3, len(data) - 1}:
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            error = refused(archive)
            if path.name != "manifest.json":
                assert isinstance(error, HashError) and error.file == path.name
                assert hashlib.sha256(data).hexdigest() in str(error)
                assert hashlib.sha256(path.read_bytes()).hexdigest() in str(error)
        for shorter in (data[:-1], b"", data + b"\0"):
            path.write_bytes(shorter)
            assert path.name == "manifest.json" or refused(archive).file == path.name
        path.write_bytes(data)
    verify(archive)


def test_no_byte_of_the_manifest_can_change(archive):
    """archive_id is the hash of what the list means, so spaces, key order and number spelling were free to change."""
    path = archive / "manifest.json"
    data = path.read_bytes()
    assert data == json.dumps(json.loads(data), indent=1).encode() + b"\n"
    for at, byte in enumerate(data):
        others = {byte ^ 1, byte ^ 32} | ({9, 10, 13, 32} if byte in b" \n" else set())
        for other in others - {byte}:
            path.write_bytes(data[:at] + bytes([other]) + data[at + 1 :])
            with pytest.raises(ArchiveError, match="Next: "):
                verify(archive)
    document = json.loads(data)
    turned = {**document, "files": [dict(reversed(entry.items())) for entry in document["files"]]}
    spellings = [json.dumps(document), json.dumps(turned, indent=1) + "\n", data.decode() + "\n", " " + data.decode()]
    for text in map(str.encode, spellings):
        path.write_bytes(text)
        refused(archive, HashError, "sha256 of its bytes")
    write_manifest(archive, document["files"][::-1])  # one list, one spelling, one archive_id
    refused(archive, HashError, "sha256 of its bytes")
    path.write_bytes(data)
    verify(archive)


def test_files_that_the_manifest_does_not_name(archive):
    (archive / "evidence").mkdir()
    (archive / "evidence" / "evaluate.json").write_text("{}")
    archive_id = verify(archive).archive_id
    assert archive_id == load_model(archive).archive_id, "evidence/ is written later and is no part of the archive"
    (archive / "notes.txt").write_text("x")
    assert "remove it" in str(refused(archive, ManifestError, "notes.txt"))
    (archive / "notes.txt").unlink()
    (archive / "more").mkdir()
    refused(archive, ManifestError, "more")
    (archive / "more").rmdir()
    (archive / "config.json").rename(archive.parent / "config.json")
    refused(archive, ManifestError, "config.json.*missing")
    (archive / "config.json").symlink_to(archive.parent / "config.json")
    refused(archive, ManifestError, "ordinary files")
    (archive / "config.json").unlink()
    os.mkfifo(archive / "config.json")  # opening one would hang for ever
    refused(archive, ManifestError, "ordinary files")


@pytest.mark.parametrize(
    "name",
    ["../x", "/tmp/x", "a/../../x", "a\0b", "config.json\0", "evidence/x", "", ".", "model.safetensors", 7, None],
)
def test_hostile_names(archive, name):
    """PCK-5: names from the manifest were joined to a folder unchecked."""
    files = json.loads((archive / "manifest.json").read_text())["files"]
    write_manifest(archive, [*files, {**files[0], "path": name}])
    before = sorted(path.name for path in archive.parent.rglob("*"))
    refused(archive, ManifestError, "name of an archive file")
    assert sorted(path.name for path in archive.parent.rglob("*")) == before


def test_manifests_that_lie(archive):
    good = json.loads((archive / "manifest.json").read_text())
    files = good["files"]
    faults = [
        ([*files, files[0]], "twice"),
        (files[1:], "not in manifest|missing"),
        ([{**files[0], "sha256": files[0]["sha256"][:63]}, *files[1:]], "64 hex"),
        ([{**files[0], "sha256": files[0]["sha256"].upper()}, *files[1:]], "64 hex"),
        ([{**files[0], "size_bytes": True}, *files[1:]], "size or sha256"),
        ([{**files[0], "size_bytes": -1}, *files[1:]], "size or sha256"),
        ([{**files[0], "size_bytes": files[0]["size_bytes"] + 1}, *files[1:]], "size in bytes"),
        ([{**files[0], "extra": 1}, *files[1:]], "fields"),
        ([{"path": files[0]["path"]}, *files[1:]], "fields"),
        ({"0": files[0]}, "a list"),
        (["config.json"], "fields"),
    ]
    for changed, match in faults:
        write_manifest(archive, changed)
        refused(archive, match=match)
    for changed in ({**good, "archive_id": "0" * 64}, {**good, "format": 2}, {**good, "more": 1}, [], None, 3):
        (archive / "manifest.json").write_text(json.dumps(changed))
        refused(archive)
    for text in (b"", b"{", b"\xff", b"[" * 100000, b'{"format":1,"format":1}', b'{"format":NaN}'):
        (archive / "manifest.json").write_bytes(text)
        refused(archive)
    (archive / "manifest.json").unlink()
    refused(archive, ManifestError, "not a packed archive")


@pytest.mark.parametrize(
    ("file", "change", "match"),
    [
        ("generation.json", lambda d: d.pop("stop_ids"), "fields"),
        ("generation.json", lambda d: d.update(stop_ids=[]), "stop_ids"),
        ("generation.json", lambda d: d.update(stop_ids=[261]), "stop_ids"),
        ("generation.json", lambda d: d.update(stop_ids=[256]), "stop ids are"),
        ("generation.json", lambda d: d.update(num_ids=273), "num_ids"),
        ("generation.json", lambda d: d.update(num_ids=260), "num_ids|ids below"),
        ("generation.json", lambda d: d.update(context=65), "context"),
        ("generation.json", lambda d: d.update(context=1.0), "context"),
        ("generation.json", lambda d: d.update(thinking="maybe"), "thinking"),
        ("generation.json", lambda d: d.update(thinking="absent"), "thinking switch"),
        ("generation.json", lambda d: d.update(temperature=0.6), "fields"),
        ("config.json", lambda d: d.update(model_type="gpt2"), "model_type"),
        ("config.json", lambda d: d.update(auto_map={"AutoModelForCausalLM": "evil.Model"}), "auto_map"),
        ("config.json", lambda d: d.update(_attn_implementation="hub/kernel"), "_attn_implementation"),
        ("config.json", lambda d: d.update(quantization_config={"quant_method": "x"}), "quantization_config"),
        ("config.json", lambda d: d.update(hidden_size=128), "hidden_size"),
        ("config.json", lambda d: d.update(intermediate_size=128), "tensor"),
        ("config.json", lambda d: d.update(head_dim=10**9), "head_dim"),
        ("config.json", lambda d: d.update(num_labels=10**9), "num_labels"),
        ("config.json", lambda d: d.update(adapter_merged=True), "adapter_merged"),  # LOR-3: it would count twice
        ("adapter.json", lambda d: d.update(size_bytes=float(d["size_bytes"])), "size_bytes"),  # was a TypeError
        ("adapter.json", lambda d: d.update(alpha=10**400), "two finite floats"),  # was an OverflowError
        ("quantization.json", lambda d: d.update(block_size=64.0), "block_size"),
        ("self_check.json", lambda d: d.pop("margin"), "fields"),
        ("self_check.json", lambda d: d.update(margin=0.01), "margin"),
        ("self_check.json", lambda d: d.update(margin=1), "margin"),
        ("self_check.json", lambda d: d.update(drafts=d["drafts"] * 3), "drafts"),
        ("self_check.json", lambda d: d.update(drafts={}), "drafts"),
        ("self_check.json", lambda d: d["drafts"].append([]), "fields"),
        ("self_check.json", lambda d: d["drafts"][1].update(tokens=[]), "tokens"),
        ("self_check.json", lambda d: d["drafts"][1].update(tokens=[261]), "ids below 261"),
        ("self_check.json", lambda d: d["drafts"][1].update(tokens=[True]), "ids below 261"),
        ("self_check.json", lambda d: d["drafts"][1].update(draft=[0] * 17), "length of prompt 1"),
        ("self_check.json", lambda d: d["drafts"][1]["draft"].__setitem__(0, 256), "stop id"),
        ("self_check.json", lambda d: d["drafts"][1]["gaps"].pop() and None, "gaps"),
        ("self_check.json", lambda d: d["drafts"][1]["gaps"].__setitem__(0, "1"), "gaps"),
        ("config.json", lambda d: d.update(num_hidden_layers=10**9), "num_hidden_layers"),
        ("config.json", lambda d: d.update(tie_word_embeddings=False), "ties"),
        ("config.json", lambda d: d.update(vocab_size=273), "vocab_size"),
        ("config.json", lambda d: d.update(num_attention_heads=0), "config.json"),
        ("config.json", lambda d: d.update(hidden_act="nothing"), "no model can be built"),
        ("copy_policy.json", lambda d: d.update(enabled=True), "enabled"),
        ("copy_policy.json", lambda d: d.update(enabled=True, limits=[0.5] * 7), "limits"),
        ("copy_policy.json", lambda d: d.update(enabled=True, limits=[None] * 7 + [1]), "limits"),
        ("copy_policy.json", lambda d: d.update(enabled=True, limits=[None] * 7 + ["inf"]), "limits"),
        ("architecture.json", lambda d: d.pop("recipe"), "fields"),
        ("architecture.json", lambda d: d.update(phase_log=7), "phase_log"),
        ("tokenizer.json", lambda d: d.pop("added_tokens"), "tokenizer.json"),
        ("quantization.json", lambda d: d["source"].update(dtype=[]), "source.dtype"),
        ("quantization.json", lambda d: d["source"].update(phase="qat"), "sha256 of its checkpoint"),
        ("quantization.json", lambda d: d["source"].update(phase=[], checkpoint_sha256="0" * 64), "sha256 of its"),
        ("quantization.json", lambda d: d.update(ties={"lm_head.weight": []}), "ties"),
        ("tokenizer_config.json", lambda d: d.update(auto_map={"AutoTokenizer": "evil.T"}), "auto_map"),
        ("adapter.json", lambda d: d.pop("alpha"), "fields"),
        ("adapter.json", lambda d: d.update(scale=8.0), "header|scale"),
        ("adapter.json", lambda d: d.update(alpha=4.0, scale=1.0), "header"),
        ("adapter.json", lambda d: d.update(rank=8, scale=1.0), "size_bytes"),
        ("adapter.json", lambda d: d.update(rank=10**9), "rank"),
        ("adapter.json", lambda d: d.update(base_sha256="0" * 64), "sha256 of the base"),
        ("adapter.json", lambda d: d.update(targets=d["targets"][1:]), "size_bytes"),
        ("adapter.json", lambda d: d.update(targets=["lm_head"]), "target"),
        ("adapter.json", lambda d: d["targets"].reverse(), "header"),
        ("adapter.json", lambda d: d.update(sha256="0" * 64), "decompressed"),
        ("quantization.json", lambda d: d.update(block_size=128), "block_size"),
        ("quantization.json", lambda d: d["weights"].update(file="../x"), "weights.file"),
        ("quantization.json", lambda d: d["weights"].update(file="weights.safetensors"), "weights.file"),
        ("quantization.json", lambda d: d["weights"].update(size_bytes=1 << 60), "size_bytes"),
        ("quantization.json", lambda d: d["weights"].update(size_bytes=1), "size_bytes"),
        ("quantization.json", lambda d: d["weights"].update(sha256="0" * 64), "decompressed"),
        (
            "quantization.json",
            lambda d: d["tensors"].update(x={"codec": "nf4", "shape": [1 << 31, 1 << 31]}),
            "size_bytes",
        ),
        ("quantization.json", lambda d: d["tensors"].update(x={"codec": "nf4", "shape": [-1, 4]}), "shape"),
        ("quantization.json", lambda d: d["tensors"].update(x={"codec": "zip", "shape": [4]}), "codec"),
        ("quantization.json", lambda d: d["tensors"].popitem() and None, "size_bytes"),
        ("quantization.json", lambda d: d["tensors"]["model.norm.weight"].update(dtype="F16"), "size_bytes"),
        ("quantization.json", lambda d: d.update(ties={"lm_head.weight": "model.norm"}), "ties"),
        ("quantization.json", lambda d: d.update(ties={}), "ties"),
        ("quantization.json", lambda d: d.update(tensors=dict(reversed(d["tensors"].items()))), "header|size_bytes"),
    ],
)
def test_documents_that_do_not_fit(archive, file, change, match):
    """Each document is signed again after the change, so only the check of its meaning can find it."""
    edit(archive, file, change)
    with pytest.raises(ArchiveError, match=match) as caught:
        load_model(archive)
    assert "Next: " in str(caught.value)


def test_messages_neither_flood_a_log_nor_fail_to_be_printed(archive):
    """Found by fuzzing: a manifest inside the field "format" of a manifest was repeated whole in the error."""
    good = json.loads((archive / "manifest.json").read_text())
    for change in (
        {"format": good},
        {"format": "\ud800" * 5000},
        {"\ud800" * 5000: 1},
        {"archive_id": "\udfff" * 5000},
    ):
        (archive / "manifest.json").write_text(json.dumps({**good, **change}))
        str(refused(archive)).encode("utf-8")  # and shorter than 1,000 characters
    error = ArchiveError("x" * 5000, "\ud800" * 5000, "y" * 5000, "z" * 5000)
    assert len(str(error).encode("utf-8")) < 4000 and "Next: " in str(error)


def test_names_are_held_against_the_config_without_a_model(archive):
    """verify() let an archive pass whose tensors were all there, under the names of another model."""
    document = json.loads((archive / "quantization.json").read_text())
    old, new = "model.norm.weight", "model.form.weight"  # as long, so that every size stays

    def rename(stream):
        return bytearray(bytes(stream).replace(old.encode(), new.encode()))

    tensors = {new if name == old else name: entry for name, entry in document["tensors"].items()}
    edit(archive, "quantization.json", lambda d: d.update(tensors=tensors))
    rewrite_weights(archive, rename)
    refused(archive, ContentError, "tensor model.(norm|form).weight")


TOKENIZERS = {
    "characters of no map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "pieces of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a trie of nothing": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAAAAA="}},
    "no token for the unknown": {"model": {"type": "WordLevel", "unk_token": "zz", "vocab": {"a": 0}}},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_that_make_their_library_panic(archive, name):
    """A panic in Rust reaches Python as no Exception: it went past `except Exception` in load_model() and in the
    server's worker, which then was loading for ever. Other tokenizers loaded, and failed at the first text."""
    edit(archive, "tokenizer.json", lambda document: document.update(TOKENIZERS[name]))
    verify(archive)  # its bytes are as listed, and nothing else of it is looked at
    with pytest.raises(ContentError, match="tokenizer.json.*Next: "):
        load_model(archive)


def test_tokenizers_that_make_their_library_end_the_process(archive):
    """Found by fuzzing: a merge is cut at the length of a prefix, here inside a letter of two bytes; the panic cannot
    be told to Python, and the process is aborted. It must be refused before the library sees it."""
    path = archive / "tokenizer.json"
    good = json.loads(path.read_text())
    model = {"type": "BPE", "vocab": {"a": 0, "\u00e9": 1}, "merges": [["a", "\u00e9"]]}
    text = json.dumps({**good, "model": {**model, "continuing_subword_prefix": "a"}})
    for evil in (text, text.replace("_prefix", "\\u005fprefix"), text.replace("g_prefix", "g_prefi\\u0078")):
        for spaced in (evil, evil.replace('": "a"', '"\t : \n"a"')):
            path.write_text(spaced)
            sign(archive)
            refused(archive, ContentError, "tokenizer.json: (continuing_subword_prefix|letters spelled as escapes)")
    for sound in ('""', "null"):  # as it is written by the library
        check_tokenizer(b'{"continuing_subword_prefix": %s, "vocab": {"\\\\u0061": 0, "\\u00e9": 1}}' % sound.encode())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_load_is_no_fault_of_the_archive(archive, error, monkeypatch):
    def stopped(*_, **__):
        raise error

    monkeypatch.setattr("model_io.Chat.load", stopped)
    with pytest.raises(error):
        load_model(archive)


def test_no_model_is_made_of_a_refused_archive(archive, monkeypatch):
    """PCK-5: faults of the list, a document, a stream and the adapter are found before there is a model."""

    def forbidden(*_):
        raise AssertionError("a model was made")

    monkeypatch.setattr("model_io.meta_model", forbidden)
    with pytest.raises(AssertionError, match="a model was made"):
        load_model(archive)
    for path in sorted(archive.iterdir()):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
        with pytest.raises(ArchiveError):
            load_model(archive)
        path.write_bytes(data)


def test_tensors_that_do_not_fit(archive):
    """PCK-5: shape x dtype is not the byte length, ranges overlap, a tensor is added, renamed or missing."""
    original = {path.name: path.read_bytes() for path in archive.iterdir()}

    def restore():
        for name, data in original.items():
            (archive / name).write_bytes(data)

    def header_of(stream):
        size = int.from_bytes(stream[:8], "little")
        return json.loads(stream[8 : 8 + size]), stream[8 + size :]

    def edited(change):
        def apply(stream):
            header, data = header_of(stream)
            length = len(stream) - len(data) - 8
            change(header)
            text = json.dumps(header, separators=(",", ":")).encode()
            text = text[:length].ljust(length)  # same length: only what it says changes
            return bytearray(length.to_bytes(8, "little") + text + data)

        return apply

    one, two = "model.norm.weight", "model.layers.0.input_layernorm.weight"
    changes = {
        "overlap": lambda h: h[one].update(data_offsets=h[two]["data_offsets"]),
        "shape": lambda h: h[one].update(shape=[63]),
        "dtype": lambda h: h[one].update(dtype="F16"),
        "renamed": lambda h: h.update(modelxnormxweight=h.pop(one)),
        "missing": lambda h: h.pop(one),
        "metadata": lambda h: h.update(__metadata__={"format": "2"}),
        "swapped": lambda h: h.update({one: h[two], two: h[one]}),
    }
    for change in changes.values():
        rewrite_weights(archive, edited(change))
        refused(archive, StreamError, "header")
        restore()

    specs = stream_specs(json.loads(original["quantization.json"]))
    at = len(streams.safetensors_header(specs, {"format": 1, "kind": "weights"}))
    places = {}
    for name, (dtype, shape) in specs.items():
        places[name] = at
        at += torch.Size(shape).numel() * dtype.itemsize
    scale = places["model.layers.0.mlp.up_proj.weight.scales"] + 2
    for value in (0.0, -1.0, float("inf"), float("nan")):
        bits = torch.tensor([value]).bfloat16().view(torch.uint8).tolist()
        rewrite_weights(archive, lambda stream, bits=bits: stream.__setitem__(slice(scale, scale + 2), bytes(bits)))
        refused(archive, ContentError, "scale 1 is")
        restore()
    norm = places[one]
    rewrite_weights(archive, lambda stream: stream.__setitem__(slice(norm, norm + 4), b"\0\0\xc0\x7f"))
    refused(archive, ContentError, "non-finite")
    restore()
    verify(archive)


# ---------------------------------------------------------------------------- streams


def decode(read, data: bytes, size: int) -> bytes:
    out = bytearray(size)
    read(HashingReader(io.BytesIO(data), len(data), "weights"), memoryview(out))
    return bytes(out)


def test_zstd_frames_of_every_shape():
    """PCK-3: several frames gave only the first, bytes after it were ignored, cut files came back short."""
    payload = (
        torch.randint(0, 40, (10_000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8).numpy().tobytes()
    )
    sized = zstandard.ZstdCompressor(write_checksum=True).compress(payload)
    streamed = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(streamed, closefd=False) as writer:
        writer.write(payload)
    streamed = streamed.getvalue()
    half = [zstandard.ZstdCompressor().compress(part) for part in (payload[:5000], payload[5000:])]
    empty = zstandard.ZstdCompressor().compress(b"")
    skippable = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"skip"

    assert decode(streams.read_zstd, sized, 10_000) == payload
    assert decode(streams.read_zstd, streamed, 10_000) == payload, "no size stated: bounded by what was declared"
    for data in (half[0] + half[1], sized + b"junk", sized + empty, empty + sized, skippable + sized, half[0], empty):
        with pytest.raises(StreamError):
            decode(streams.read_zstd, data, 10_000)
    for size in (9_999, 10_001, 0):
        for data in (sized, streamed):
            with pytest.raises(StreamError):
                decode(streams.read_zstd, data, size)
    for end in range(len(sized)):
        with pytest.raises(StreamError):
            decode(streams.read_zstd, sized[:end], 10_000)
    wrong = bytearray(sized)
    wrong[-1] ^= 1
    with pytest.raises(StreamError, match="damaged"):
        decode(streams.read_zstd, bytes(wrong), 10_000)


def test_archives_that_unfold_without_end():
    """16 MB of zeros in 2 kB: no more than the declared 1,000 bytes and one block of 128 KiB may be made of it."""
    parameters = zstandard.ZstdCompressionParameters(window_log=20, write_content_size=0)
    stream = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=parameters).stream_writer(stream, closefd=False) as writer:
        for _ in range(16):
            writer.write(bytes(1 << 20))
    with pytest.raises(StreamError, match="more than"):
        decode(streams.read_zstd, stream.getvalue(), 1000)
    with pytest.raises(StreamError, match="more than"):
        decode(streams.read_xz, lzma.compress(bytes(16 << 20)), 1000)
    wide = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=0)
    stream = io.BytesIO()
    with zstandard.ZstdCompressor(compression_params=wide).stream_writer(stream, closefd=False) as writer:
        writer.write(b"x" * 1000)
    with pytest.raises(StreamError, match="window"):
        decode(streams.read_zstd, stream.getvalue(), 1000)
    greedy = lzma.compress(b"x" * 1000, filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 512 << 20}])
    with pytest.raises(StreamError, match="memory"):
        decode(streams.read_xz, greedy, 1000)


def test_xz_streams_of_every_shape():
    payload = bytes(range(256)) * 20
    good = lzma.compress(payload)
    assert decode(streams.read_xz, good, len(payload)) == payload
    for data in (good + b"junk", good + good, good + b"\0\0\0\0", b"", lzma.compress(payload, lzma.FORMAT_ALONE)):
        with pytest.raises(StreamError):
            decode(streams.read_xz, data, len(payload))
    for end in range(len(good)):
        with pytest.raises(StreamError):
            decode(streams.read_xz, good[:end], len(payload))
    for size in (len(payload) - 1, len(payload) + 1, 0):
        with pytest.raises(StreamError):
            decode(streams.read_xz, good, size)
