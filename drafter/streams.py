"""The byte streams of an archive: one safetensors layout, one bounded zstd frame, one bounded xz stream.

Everything here may be given hostile bytes. Two rules keep it small:
- Nothing is parsed that can be derived. The tensors of a stream are declared in a document that was checked before;
  from them follows the one header, byte for byte, that the stream must begin with. Names, dtypes, shapes, offsets
  without gap or overlap and the metadata are all checked by that one comparison.
- No step may make more bytes than were declared. zstd is fed block by block, and a block decodes to 128 KiB at most.

Legend: a spec is (torch dtype, shape); specs are ordered, and so is the data of the stream.
"""

import hashlib
import json
import lzma
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

# Measured on SmolLM2-135M: level 6 packs NF4 codes to 98 %, int8 rows to 84 % and scales to 61 % of their size. Level
# 19 takes one more point off the scales, in more than ten times the time.
ZSTD_LEVEL = 6
ZSTD_WINDOW_LIMIT = 128 << 20  # bytes a reader may be asked to keep; our writer needs 2 MiB
ZSTD_BLOCK_LIMIT = 128 << 10  # by the format
XZ_MEMORY_LIMIT = 64 << 20  # preset 6 needs 9 MiB
PIECE = 1 << 20

COPY_AGAIN = "copy the archive again, or make it again: python -m scripts.pack_model --recipe RECIPE"


class ArchiveError(ValueError):
    """An archive that is refused. Says the file, what was expected, what was found, and what to do next."""

    def __init__(self, file: str, problem: str, expected: Any = None, found: Any = None, fix: str = COPY_AGAIN):
        self.file, self.expected, self.found, self.fix = file, expected, found, fix
        facts = "" if expected is None and found is None else f": expected {expected}, found {found}"
        super().__init__(f"{file}: {problem}{facts}. Next: {fix}")


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
    return len(safetensors_header(specs, metadata)) + sum(
        prod(shape) * dtype.itemsize for dtype, shape in specs.values()
    )


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's own elements in logical order, never the storage behind a view."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def split_tensors(stream: Tensor, specs: Specs, metadata: Mapping[str, Any], file: str) -> dict[str, Tensor]:
    """Views by name into a whole safetensors stream (uint8 [n]); StreamError unless it is laid out as declared."""
    header = safetensors_header(specs, metadata)
    found = stream[: len(header)].numpy().tobytes()
    if found != header:
        raise StreamError(file, "the safetensors header is not the declared one", *_difference(header, found))
    size = stream_size(specs, metadata)
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


class HashingReader:
    """A file read once, front to back: what is hashed is what was decoded."""

    def __init__(self, file: BinaryIO, size_bytes: int, name: str):
        self.file, self.left, self.name = file, size_bytes, name
        self.digest = hashlib.sha256()

    def take(self, count: int) -> bytes:
        """Exactly `count` bytes; StreamError when fewer are left."""
        data = self.file.read(count) if count <= self.left else b""
        if len(data) != count:
            raise StreamError(
                self.name, "the stream is cut: bytes needed", count, min(self.left, len(data) or self.left)
            )
        self.left -= count
        self.digest.update(data)
        return data

    def drain(self) -> str:
        """Reads to the end and returns the sha256 of the whole file."""
        while self.left > 0 and (data := self.file.read(min(PIECE, self.left))):
            self.left -= len(data)
            self.digest.update(data)
        return self.digest.hexdigest()


def read_zstd(source: HashingReader, out: memoryview) -> None:
    """Decode exactly one zstd frame that fills `out` and ends with the file. StreamError otherwise.

    The frame is walked by hand (RFC 8878, 3.1.1): a header, blocks of a 3-byte header and a body, 4 bytes of checksum.
    Python's own readers would not do: `decompress` ignores its limit when the frame states a size, `stream_reader`
    returns less on a cut file without an error, and both stop silently before a second frame. A frame that states no
    size is accepted: `out` bounds it, and the caller compares length and sha256.
    """
    start = source.take(5)
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
    done = 0

    def feed(data: bytes) -> None:
        nonlocal done
        try:
            piece = decoder.decompress(data)
        except (zstandard.ZstdError, MemoryError) as error:
            raise StreamError(source.name, f"zstd data is damaged ({error})") from None
        if done + len(piece) > len(out):
            raise StreamError(source.name, "decompressed bytes", len(out), f"more than {done + len(piece) - 1}")
        out[done : done + len(piece)] = piece
        done += len(piece)

    feed(start)
    last = False
    while not last:
        head = source.take(3)
        word = int.from_bytes(head, "little")
        last, kind, size = bool(word & 1), word >> 1 & 3, word >> 3
        if kind == 3 or size > ZSTD_BLOCK_LIMIT:
            raise StreamError(source.name, "zstd block", f"<= {ZSTD_BLOCK_LIMIT} bytes", f"kind {kind}, {size} bytes")
        feed(head + source.take(1 if kind == 1 else size))  # kind 1: one byte, repeated `size` times
    if has_checksum:
        feed(source.take(4))
    if not decoder.eof or decoder.unused_data or done != len(out):
        raise StreamError(source.name, "decompressed bytes", len(out), done)
    _expect_end(source)


def read_xz(source: HashingReader, out: memoryview) -> None:
    """Decode one .xz stream that fills `out` and ends with the file, in bounded memory. StreamError otherwise."""
    decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_LIMIT)
    done = 0
    try:
        while not decoder.eof:
            data = b""
            if decoder.needs_input:
                if source.left == 0:
                    raise StreamError(source.name, "the stream is cut: decompressed bytes", len(out), done)
                data = source.take(min(PIECE, source.left))
            # one byte more than is left would already be too many
            piece = decoder.decompress(data, min(PIECE, len(out) - done + 1))
            if done + len(piece) > len(out):
                raise StreamError(source.name, "decompressed bytes", len(out), f"more than {len(out)}")
            out[done : done + len(piece)] = piece
            done += len(piece)
    except (lzma.LZMAError, MemoryError) as error:
        raise StreamError(source.name, f"xz data is damaged or wants too much memory ({error})") from None
    if done != len(out):
        raise StreamError(source.name, "decompressed bytes", len(out), done)
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
