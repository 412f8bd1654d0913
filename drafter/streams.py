"""The byte streams of an archive: one safetensors layout, one bounded zstd frame, one bounded xz stream.

Everything here may be given hostile bytes. Two rules keep it small:
- Nothing is parsed that can be derived. The tensors of a stream are declared in a document that was checked before;
  from them follows the one header, byte for byte, that the stream must begin with. Names, dtypes, shapes, offsets
  without gap or overlap and the metadata are all checked by that one comparison.
- No step may make more bytes than were declared. zstd is fed block by block, and a block decodes to 128 KiB at most.

A large stream is read once, by three threads: one reads and decodes, one hashes what was read, one hashes what was
decoded. The two hashes trail behind by a few pieces, and hash the very bytes that the decoder saw and made.

Legend: a spec is (torch dtype, shape); specs are ordered, and so is the data of the stream.
"""

import contextlib
import hashlib
import json
import lzma
import mmap
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, BinaryIO

import torch
import zstandard
from torch import Tensor

DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
Filled = Callable[[memoryview], Any] | None

# Measured on SmolLM2-135M: level 6 packs NF4 codes to 98 %, int8 rows to 84 % and scales to 61 % of their size. Level
# 19 takes one more point off the scales, in more than ten times the time.
ZSTD_LEVEL = 6
ZSTD_WINDOW_LIMIT = 128 << 20  # bytes a reader may be asked to keep; our writer needs 2 MiB
ZSTD_BLOCK_LIMIT = 128 << 10  # by the format
XZ_MEMORY_LIMIT = 64 << 20  # preset 6 needs 9 MiB
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]
PIECE = 1 << 20  # bytes read, and handed over to a hash, at once
AHEAD = 4  # pieces that may wait for a hash: enough to bridge a time slice, and at most 4 MiB of stored bytes
# A hash gets a thread from here on. sha256 takes 0.5 ms for it; starting, feeding and joining a thread takes 0.1 ms.
THREAD_FROM = 1 << 20

COPY_AGAIN = "copy the archive again, or make it again: python -m scripts.pack_model --recipe RECIPE"


class ArchiveError(ValueError):
    """An archive that is refused. Says the file, what was expected, what was found, and what to do next."""

    def __init__(self, file: str, problem: str, expected: Any = None, found: Any = None, fix: str = COPY_AGAIN):
        self.file, self.expected, self.found, self.fix = file, expected, found, fix
        facts = "" if expected is None and found is None else f": expected {expected!s:.300}, found {found!s:.300}"
        message = f"{file:.80}: {problem:.400}{facts}. Next: {fix}"
        # what was found is the archive's own text: it must neither flood a log nor fail to be printed
        super().__init__(message.encode("utf-8", "backslashreplace").decode())


class ManifestError(ArchiveError):
    """The folder and its list of files disagree, or the list is not one."""


class HashError(ArchiveError):
    """The bytes of a file are not those that were packed."""


class StreamError(ArchiveError):
    """A compressed or safetensors stream is cut, too long, or not laid out as declared."""


class ContentError(ArchiveError):
    """Documents, tensors or adapter are whole but do not fit each other."""


# ---------------------------------------------------------------------------- safetensors


def safetensors_header(specs: Specs, metadata: Mapping[str, Any]) -> bytes:
    """Length prefix and JSON of a safetensors stream whose tensors lie in the order of `specs`.

    The library sorts and has no say about order; ours puts streams of one kind together, which compresses better.
    Metadata of the format is text only (null would become the word "None", numbers strings): each value is stored as
    JSON text. Padded with spaces to 8 bytes, so that data begins aligned.
    """
    header: dict[str, Any] = {
        "__metadata__": {key: json.dumps(value, sort_keys=True) for key, value in metadata.items()}
    }
    offset = 0
    for name, (dtype, shape) in specs.items():
        end = offset + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def stream_size(specs: Specs, metadata: Mapping[str, Any]) -> int:
    return len(safetensors_header(specs, metadata)) + _data_size(specs)


def _data_size(specs: Specs) -> int:
    return sum(prod(shape) * dtype.itemsize for dtype, shape in specs.values())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's own elements in logical order, never the storage behind a view."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def split_tensors(stream: Tensor, specs: Specs, metadata: Mapping[str, Any], file: str) -> dict[str, Tensor]:
    """Views by name into a whole safetensors stream (uint8 [n]); StreamError unless it is laid out as declared."""
    header = safetensors_header(specs, metadata)
    found = stream[: len(header)].numpy().tobytes()
    if found != header:
        raise StreamError(file, "the safetensors header is not the declared one", *_difference(header, found))
    size = len(header) + _data_size(specs)
    if stream.numel() != size:
        raise StreamError(file, "length of the safetensors stream in bytes", size, stream.numel())
    tensors, offset = {}, len(header)
    for name, (dtype, shape) in specs.items():
        end = offset + prod(shape) * dtype.itemsize
        tensors[name] = stream[offset:end].view(dtype).view(shape)
        offset = end
    return tensors


def _difference(expected: bytes, found: bytes) -> tuple[str, str]:
    """The first 60 bytes from where two headers part: enough to read a tensor's name, too little to flood a log."""
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )
    start = max(0, at - 30)
    return repr(expected[start : at + 30]), repr(found[start : at + 30])


# ---------------------------------------------------------------------------- reading


class Hasher:
    """sha256 of a stream of `size_bytes`, taken on a thread that trails behind whoever calls `update`.

    The thread never fails and therefore always empties its queue, so `update` waits for it but cannot hang. Leaving
    the `with` block ends the thread, whatever happened; nothing of the stream is held afterwards. A piece must not
    change after it was given. A short stream has no thread: it is hashed where it stands.
    """

    def __init__(self, size_bytes: int):
        self.digest = hashlib.sha256()
        self.update: Callable[[Any], None] = self.digest.update
        self.thread = None
        if size_bytes >= THREAD_FROM:
            waiting: queue.Queue = queue.Queue(AHEAD)
            self.thread = threading.Thread(target=self._follow, args=(waiting,), name="sha256")
            self.thread.start()
            self.update = waiting.put

    def _follow(self, waiting: queue.Queue) -> None:
        while (piece := waiting.get()) is not None:
            self.digest.update(piece)

    def close(self) -> None:
        if self.thread:
            self.update(None)
            self.thread.join()
            self.thread, self.update = None, self.digest.update

    def hexdigest(self) -> str:
        self.close()
        return self.digest.hexdigest()

    def __enter__(self) -> "Hasher":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class HashingReader(Hasher):
    """A file read once, front to back: what is hashed is what was decoded."""

    def __init__(self, file: BinaryIO, size_bytes: int, name: str):
        super().__init__(size_bytes)
        self.file, self.name = file, name
        self.left = self.unread = size_bytes  # bytes not taken yet, and those of them that are still in the file
        self.ready = memoryview(b"")  # read but not taken

    def _read(self) -> bytes:
        """The next piece of the file, b"" at its end."""
        data = self.file.read(min(PIECE, self.unread))
        self.unread -= len(data)
        self.update(data)
        return data

    def take(self, count: int) -> memoryview | bytes:
        """Exactly `count` bytes; StreamError when fewer are left."""
        if count > self.left:
            raise StreamError(self.name, "the stream is cut: bytes needed", count, self.left)
        parts, missing = [], count
        while missing > len(self.ready):
            parts.append(self.ready)
            missing -= len(self.ready)
            self.ready = memoryview(self._read())
            if not self.ready:
                raise StreamError(self.name, "the stream is cut: bytes needed", count, count - missing)
        data, self.ready = self.ready[:missing], self.ready[missing:]
        self.left -= count
        return b"".join([*parts, data]) if parts else data

    def drain(self) -> str:
        """Reads to the end and returns the sha256 of the whole file."""
        while self.unread and self._read():
            pass
        return self.hexdigest()


def new_buffer(size_bytes: int, file: str) -> Tensor:
    """uint8 [size_bytes], not filled yet; a page is taken from the system when it is first written.

    Where the kernel has them, a large buffer is made of pages of 2 MiB: 1 GB of them costs 0.06 s instead of the 0.33 s
    of 260,000 faults for pages of 4 KiB, a quarter of what zstd takes. ArchiveError when there is not that much.
    """
    if size_bytes < THREAD_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size_bytes, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        fix = "load it on a machine with more memory"
        raise ArchiveError(file, f"{size_bytes} bytes of memory cannot be had ({error.strerror})", fix=fix) from None
    with contextlib.suppress(OSError):  # a kernel built without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping, and unmaps it when the last view is gone


class Output:
    """The declared bytes, filled front to back. StreamError for a byte too many, and at the end for one too few.

    `filled(piece)`, where there is one, is told of each piece of `out`, in order, once it is final.
    """

    def __init__(self, out: memoryview, name: str, filled: Filled):
        self.out, self.name, self.filled = out, name, filled
        self.done = self.told = 0

    def write(self, piece: bytes) -> None:
        end = self.done + len(piece)
        if end > len(self.out):
            raise StreamError(self.name, "decompressed bytes", len(self.out), f"more than {end - 1}")
        self.out[self.done : end] = piece
        self.done = end
        if end - self.told >= PIECE:
            self._tell()

    def finish(self) -> None:
        if self.done != len(self.out):
            raise StreamError(self.name, "decompressed bytes", len(self.out), self.done)
        self._tell()

    def _tell(self) -> None:
        if self.filled:
            self.filled(self.out[self.told : self.done])
        self.told = self.done


def read_zstd(source: HashingReader, out: memoryview, filled: Filled = None) -> None:
    """Decode exactly one zstd frame that fills `out` and ends with the file. StreamError otherwise.

    The frame is walked by hand (RFC 8878, 3.1.1): a header, blocks of a 3-byte header and a body, 4 bytes of checksum.
    Python's own readers would not do: `decompress` ignores its limit when the frame states a size, `stream_reader`
    returns less on a cut file without an error, and both stop silently before a second frame. A frame that states no
    size is accepted: `out` bounds it, and the caller compares length and sha256.
    """
    start = bytes(source.take(5))
    if start[:4] != zstandard.FRAME_HEADER:
        raise StreamError(source.name, "not a zstd frame: first bytes", zstandard.FRAME_HEADER.hex(), start[:4].hex())
    flags = start[4]
    single_segment, has_checksum = flags >> 5 & 1, flags >> 2 & 1
    # after the descriptor: window (absent in a single segment), dictionary id, content size
    start += source.take((1 - single_segment) + (0, 1, 2, 4)[flags & 3] + (single_segment, 2, 4, 8)[flags >> 6])
    try:
        frame = zstandard.get_frame_parameters(start)
    except zstandard.ZstdError as error:
        raise StreamError(source.name, f"the zstd frame header is damaged ({error})") from None
    if frame.content_size not in (len(out), zstandard.CONTENTSIZE_UNKNOWN):
        raise StreamError(source.name, "content size of the zstd frame", len(out), frame.content_size)
    if frame.window_size > ZSTD_WINDOW_LIMIT:
        raise StreamError(
            source.name, "window of the zstd frame in bytes", f"<= {ZSTD_WINDOW_LIMIT}", frame.window_size
        )
    if frame.dict_id:
        raise StreamError(source.name, "dictionary of the zstd frame", "none", frame.dict_id)

    decoder = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_LIMIT).decompressobj()
    output = Output(out, source.name, filled)

    def feed(data: bytes | memoryview) -> None:
        try:
            piece = decoder.decompress(data)
        except (zstandard.ZstdError, MemoryError) as error:
            raise StreamError(source.name, f"zstd data is damaged ({error})") from None
        output.write(piece)

    feed(start)
    last = False
    while not last:
        head = source.take(3)
        word = int.from_bytes(head, "little")
        last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
        if kind == 3 or size > ZSTD_BLOCK_LIMIT:
            raise StreamError(source.name, "zstd block", f"<= {ZSTD_BLOCK_LIMIT} bytes", f"kind {kind}, {size} bytes")
        feed(head)
        feed(source.take(1 if kind == 1 else size))  # kind 1: one byte, repeated `size` times
    if has_checksum:
        feed(source.take(4))
    if not decoder.eof or decoder.unused_data:
        raise StreamError(source.name, "the zstd frame does not end where its blocks say")
    output.finish()
    _expect_end(source)


def read_xz(source: HashingReader, out: memoryview, filled: Filled = None) -> None:
    """Decode one .xz stream that fills `out` and ends with the file, in bounded memory. StreamError otherwise."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT)
    output = Output(out, source.name, filled)
    try:
        while not decoder.eof:
            data = b""
            if decoder.needs_input:
                if source.left == 0:
                    raise StreamError(source.name, "the stream is cut: decompressed bytes", len(out), output.done)
                data = source.take(min(PIECE, source.left))
            # one byte more than is left would already be too many
            output.write(decoder.decompress(data, min(PIECE, len(out) - output.done + 1)))
    except (lzma.LZMAError, MemoryError) as error:
        raise StreamError(source.name, f"xz data is damaged or wants too much memory ({error})") from None
    output.finish()
    if decoder.unused_data:
        raise StreamError(source.name, "bytes after the stream", 0, f"{len(decoder.unused_data)} or more")
    _expect_end(source)


def _expect_end(source: HashingReader) -> None:
    if source.left:
        raise StreamError(source.name, "bytes after the stream", 0, source.left)


# ---------------------------------------------------------------------------- writing


def write_zstd(file: BinaryIO, size_bytes: int, pieces: Iterable[tuple[str, bytes | memoryview]]) -> tuple[str, dict]:
    """One frame with content size and checksum -> (sha256 of the stream, {kind: [bytes, stored bytes]}).

    `pieces` are (kind, data); where the kind changes the frame is flushed, so that each kind's share can be told.
    Two worker threads on every machine: the bytes depend on whether there are any, and must be the same everywhere.
    """
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True, write_content_size=True, threads=2)
    with compressor.stream_writer(file, size=size_bytes, closefd=False) as writer:
        return _write(writer.write, pieces, lambda: (writer.flush(zstandard.FLUSH_BLOCK), file.tell())[1])


def write_plain(file: BinaryIO, pieces: Iterable[tuple[str, bytes | memoryview]]) -> tuple[str, dict]:
    return _write(file.write, pieces, file.tell)


def _write(write: Callable, pieces: Iterable[tuple[str, bytes | memoryview]], position: Callable[[], int]):
    digest = hashlib.sha256()
    sizes: dict[str, list[int]] = {}
    current, start = None, 0
    for kind, data in pieces:
        if kind != current:
            now = position()
            if current is not None:
                sizes[current][1] += now - start
            current, start = kind, now
            sizes.setdefault(kind, [0, 0])
        for at in range(0, len(data), PIECE):
            write(data[at : at + PIECE])
        digest.update(data)
        sizes[kind][0] += len(data)
    if current is not None:
        sizes[current][1] += position() - start
    return digest.hexdigest(), sizes
