"""The pipeline that reads an archive's streams: the same as reading them straight, and nothing of it stays behind."""

import gc
import hashlib
import io
import itertools
import lzma
import os
import threading
from pathlib import Path

import pytest
import torch
import zstandard
from archives import edit, rewrite_weights

from drafter import archive as reading
from drafter import streams
from drafter.streams import ArchiveError, HashError, HashingReader, StreamError
from model_io import load_model, verify

HANG_S = 60  # a hundred times what each of these takes


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of 1,000 bytes and threads from the first byte on: kilobytes meet every border that gigabytes meet."""
    monkeypatch.setattr(streams, "PIECE", 1000)
    monkeypatch.setattr(streams, "THREAD_FROM", 0)
    monkeypatch.setattr(reading, "THREAD_FROM", 0)


def noise(size: int, levels: int = 256) -> bytes:
    generator = torch.Generator().manual_seed(size)
    return torch.randint(0, levels, (size,), generator=generator).to(torch.uint8).numpy().tobytes()


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


READERS = {"zstd": (streams.read_zstd, zstd), "xz": (streams.read_xz, lzma.compress)}


def bounded(work):
    """The result of `work()`, or its error; AssertionError when it hangs."""
    found = []

    def run():
        try:
            found.append((work(), None))
        except BaseException as error:  # noqa: BLE001  handed to the caller
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "the pipeline hangs"
    result, error = found.pop()
    if error is not None:
        raise error
    return result


def pipeline(read, stored: bytes, size: int) -> tuple[bytes, str, str]:
    """(decoded bytes, sha256 of what was read, sha256 of what was decoded) as the loader gets them."""
    out = bytearray(size)
    with HashingReader(io.BytesIO(stored), len(stored), "weights") as source, streams.Hasher(size) as decoded:
        read(source, memoryview(out), decoded.update)
        return bytes(out), source.drain(), decoded.hexdigest()


def left_behind() -> tuple[set, int, int]:
    gc.collect()
    return set(threading.enumerate()), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------- the same as the straight path

SIZES = [1, 2, 999, 1000, 1001, 1999, 2000, 2001, 4000, 5000, 6001, 131071, 131072, 131073, 400_000]


@pytest.mark.parametrize("kind", READERS)
def test_every_size_gives_the_bytes_and_hashes_of_the_straight_path(kind, small_pieces):
    read, compress = READERS[kind]
    before = left_behind()
    for size in SIZES:
        for levels in (1, 40, 256):  # run-length, Huffman and raw blocks
            payload = noise(size, levels)
            stored = compress(payload)
            hashes = [hashlib.sha256(data).hexdigest() for data in (stored, payload)]
            assert bounded(lambda: pipeline(read, stored, size)) == (payload, *hashes), (size, levels)  # noqa: B023
    assert left_behind() == before


def test_pieces_of_full_size():
    """At the real limits: the first size with threads, and a piece more than a hash may lag behind."""
    for size in (streams.THREAD_FROM - 1, streams.THREAD_FROM, (streams.AHEAD + 2) * streams.PIECE + 1):
        payload = noise(size, 100)
        stored = zstd(payload)
        found = bounded(lambda: pipeline(streams.read_zstd, stored, size))  # noqa: B023
        assert found == (payload, *(hashlib.sha256(data).hexdigest() for data in (stored, payload)))


def test_the_follower_is_told_of_every_byte_once_and_in_order(small_pieces):
    payload = noise(300_000, 30)
    for read, compress in READERS.values():
        stored, told = compress(payload), []
        source = HashingReader(io.BytesIO(stored), len(stored), "weights")
        with source:
            read(source, memoryview(bytearray(len(payload))), lambda piece: told.append(bytes(piece)))  # noqa: B023
        assert b"".join(told) == payload and len(told) > 1


def test_takes_across_the_borders_of_pieces(small_pieces):
    data = noise(10_500)
    with HashingReader(io.BytesIO(data), len(data), "x") as source:
        counts = (0, 999, 1, 1, 3000, 0, 998, 2001, 3499, 1)
        taken = [bytes(source.take(count)) for count in counts]
        assert [len(piece) for piece in taken] == list(counts) and b"".join(taken) == data and source.left == 0
        assert not source.take(0)
        with pytest.raises(StreamError, match="expected 1, found 0"):
            source.take(1)
        assert source.drain() == hashlib.sha256(data).hexdigest()
    with HashingReader(io.BytesIO(data[:-1]), len(data), "x") as source:  # the file became shorter after it was opened
        with pytest.raises(StreamError, match="the stream is cut"):
            source.take(len(data))
        assert source.drain() == hashlib.sha256(data[:-1]).hexdigest()


# ---------------------------------------------------------------------------- bounded


def test_a_slow_hash_is_waited_for(small_pieces, monkeypatch):
    """The decoder may not run away from the hash: pieces that wait are memory."""
    waiting, most, sha256 = set(), 0, hashlib.sha256

    class Slow:
        def __init__(self):
            self.digest = sha256()

        def update(self, piece):
            threading.Event().wait(0.001)
            waiting.discard(id(piece))
            self.digest.update(piece)

        def hexdigest(self):
            return self.digest.hexdigest()

    monkeypatch.setattr(streams.hashlib, "sha256", Slow)
    data = [noise(100) + bytes([at]) for at in range(50)]
    with streams.Hasher(1) as hasher:
        for piece in data:
            waiting.add(id(piece))
            hasher.update(piece)
            most = max(most, len(waiting))
        found = hasher.hexdigest()
    monkeypatch.undo()
    assert found == sha256(b"".join(data)).hexdigest()
    assert most <= streams.AHEAD + 2, "those that wait, one being hashed, one being handed over"


def test_a_buffer_that_no_machine_has():
    with pytest.raises(ArchiveError, match="cannot be had.*Next: "):
        streams.new_buffer(1 << 46, "weights.safetensors.zst")
    for size in (1, streams.THREAD_FROM, 5 << 20):
        buffer = streams.new_buffer(size, "x")
        buffer.fill_(7)
        assert (buffer.numel(), buffer.dtype) == (size, torch.uint8) and int(buffer.sum(dtype=torch.int64)) == 7 * size


def test_small_archives_start_no_thread(archive, monkeypatch):
    """Thousands of them are verified by tests; a thread costs more than hashing 20 kB."""

    def forbidden(self):
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", forbidden)
    verify(archive)


# ---------------------------------------------------------------------------- faults leave nothing behind


def flip(path: Path, at: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def longer(folder: Path) -> None:
    rewrite_weights(folder, lambda stream: stream + b"\0")


def other_bytes(folder: Path) -> None:
    edit(folder, "quantization.json", lambda document: document["weights"].update(sha256="0" * 64))


def bad_norm(folder: Path) -> None:
    # small tensors begin right behind the header, whose length stands in the first 8 bytes
    def change(stream):
        at = 8 + int.from_bytes(stream[:8], "little")
        stream[at : at + 4] = b"\0\0\xc0\x7f"  # NaN

    rewrite_weights(folder, change)


WEIGHTS, ADAPTER = "weights.safetensors.zst", "adapter.safetensors.xz"
FAULTS = {
    "first byte": (lambda folder: flip(folder / WEIGHTS, 0.0), HashError, WEIGHTS),
    "a block": (lambda folder: flip(folder / WEIGHTS, 0.5), HashError, WEIGHTS),
    "checksum": (lambda folder: flip(folder / WEIGHTS, 1.0), HashError, WEIGHTS),
    "too long": (longer, StreamError, WEIGHTS),
    "other bytes": (other_bytes, HashError, WEIGHTS),
    "not finite": (bad_norm, ArchiveError, WEIGHTS),
    "adapter": (lambda folder: flip(folder / ADAPTER, 0.5), HashError, ADAPTER),
    "both": (lambda folder: (flip(folder / ADAPTER, 0.1), flip(folder / WEIGHTS, 0.9)), HashError, WEIGHTS),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_refused_archive_leaves_nothing_behind(archive, name, small_pieces):
    damage, error, file = FAULTS[name]
    damage(archive)
    before = left_behind()
    for _ in range(3):
        with pytest.raises(error) as caught:
            bounded(lambda: verify(archive))
        assert caught.value.file == file
        del caught
    assert left_behind() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, RuntimeError])
@pytest.mark.parametrize("place", ["zstd", "xz", "hash", "file"])
def test_an_interrupted_load_leaves_nothing_behind(archive, place, error, small_pieces, monkeypatch):
    """Also what is no fault of the archive must not leave a thread that waits for more for ever."""

    def failing(function, call_number):
        calls = itertools.count()

        def call(*arguments):
            if next(calls) == call_number:
                raise error("stopped")
            return function(*arguments)

        return call

    if place == "hash":
        monkeypatch.setattr(streams.Output, "_tell", failing(streams.Output._tell, 2))
    elif place == "file":
        monkeypatch.setattr(HashingReader, "_read", failing(HashingReader._read, 2))
    else:
        monkeypatch.setattr(reading, f"read_{place}", failing(READERS[place][0], 0))
    before = left_behind()
    with pytest.raises((error, ArchiveError)):
        bounded(lambda: verify(archive))
    assert left_behind() == before
    monkeypatch.undo()
    verify(archive)


def test_refused_streams_give_their_memory_back(tmp_path):
    """64 MB that are decoded whole and then refused, ten times."""
    payload = bytes(64 << 20)
    (tmp_path / "weights").write_bytes(zstd(payload))
    data = (tmp_path / "weights").read_bytes()
    entry = {"path": "weights", "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    before = None
    for round_number in range(10):
        with pytest.raises(HashError, match="decompressed stream") as caught:
            reading._read_stream(tmp_path, entry, len(payload), "0" * 64, streams.read_zstd)
        del caught
        if round_number == 1:
            before = resident_bytes()
    assert resident_bytes() - before < 32 << 20


def test_a_loaded_model_keeps_one_copy_of_the_stream(archive):
    """The packed form is views into the buffer that was decoded into: nothing of its size is ever made again."""
    loaded = load_model(archive, "packed")
    assert len({tensor.untyped_storage().data_ptr() for tensor in loaded.tensors.values()}) == 1
    kept = {tensor.untyped_storage().data_ptr() for tensor in loaded.model.buffers() if tensor.dtype == torch.uint8}
    assert kept == {next(iter(loaded.tensors.values())).untyped_storage().data_ptr()}
