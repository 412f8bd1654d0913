"""What `scripts.benchmark load` times: each stage of a load alone, whole loads, and the memory that a load takes.

Every stage works on bytes that are in memory already and makes what the load makes of them, with fresh memory for its
output as the load needs it. Rounds go through all stages and loads before the next begins, so that a slow minute of
the machine meets all of them alike. The files are in the page cache: what is measured is the machine, not its disk.
"""

import contextlib
import hashlib
import lzma
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard
from torch import nn

from drafter.archive import ADAPTER_FILES, WEIGHTS, checked_tensors
from drafter.chat import Chat
from drafter.checkpoint import meta_model
from drafter.engine import DraftEngine, DraftRequest
from drafter.streams import PIECE, new_buffer
from model_io import load_model, verify

LOADS = ("verify", "packed", "merged")


@dataclass(frozen=True)
class Stage:
    """`work` over `size_bytes` (None: bytes say nothing about its time); a whole load is a stage too."""

    name: str
    size_bytes: int | None
    work: Callable[[], Any]


# ---------------------------------------------------------------------------- stages


def single_stages(folder: Path) -> list[Stage]:
    """The stages of a load, each alone. Names say which bytes its rate counts: stored or decoded ones."""
    archive = verify(folder)
    weights = archive.quantization["weights"]
    path = folder / weights["file"]
    stored = path.read_bytes()
    settings = {key: archive.generation[key] for key in ("thinking", "stop_ids", "num_ids")}
    stages = [
        Stage("read file (stored)", len(stored), lambda: _read(path)),
        Stage("sha256 (stored)", len(stored), lambda: hashlib.sha256(stored).digest()),
    ]
    stream = new_buffer(weights["size_bytes"], path.name)
    if path.name == WEIGHTS["zst"]:
        _unzstd(stored, stream)
        stages += [
            Stage("zstd (decoded)", stream.numel(), lambda: _unzstd(stored, new_buffer(stream.numel(), path.name))),
            Stage("sha256 (decoded)", stream.numel(), lambda: hashlib.sha256(stream.numpy()).digest()),
        ]
    else:
        stream.numpy()[:] = memoryview(stored)
    stages.append(
        Stage("scales and checks (decoded)", stream.numel(), lambda: checked_tensors(stream, archive.quantization))
    )
    if archive.adapter_document:
        packed = (folder / ADAPTER_FILES[0]).read_bytes()
        stages.append(
            Stage("xz adapter (decoded)", archive.adapter_document["size_bytes"], lambda: lzma.decompress(packed))
        )
    stages.append(Stage("empty model", None, lambda: meta_model(archive.config)))
    stages.append(Stage("tokenizer", None, lambda: Chat.load(folder, **settings)))
    return stages


def whole_loads(folder: Path) -> list[Stage]:
    """Each counts the decoded bytes of the weights."""
    size = verify(folder).quantization["weights"]["size_bytes"]
    return [Stage(_load_name(form), size, lambda form=form: _load(folder, form)) for form in LOADS]


def _load_name(form: str) -> str:
    return form if form == "verify" else f"load {form}"


def _load(folder: Path, form: str) -> Any:
    return verify(folder) if form == "verify" else load_model(folder, form)


def _read(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        while file.read(PIECE):
            pass


def _unzstd(stored: bytes, out: Any) -> None:
    """At the library's own rate, straight into `out`."""
    view, done = memoryview(out.numpy()), 0
    reader = zstandard.ZstdDecompressor().stream_reader(stored)
    while done < len(view):
        done += reader.readinto(view[done : done + PIECE])


def time_rounds(stages: list[Stage], runs: int, progress: Callable[[], Any]) -> dict[str, list[float]]:
    """{stage: seconds of each round}, after one round that is not counted."""
    seconds: dict[str, list[float]] = {stage.name: [] for stage in stages}
    for round_number in range(runs + 1):
        for stage in stages:
            start = time.perf_counter()
            made = stage.work()
            elapsed_s = time.perf_counter() - start
            del made  # giving a gigabyte back takes a tenth of a second, which no load waits for
            if round_number:
                seconds[stage.name].append(elapsed_s)
            progress()
    return seconds


# ---------------------------------------------------------------------------- memory


def memory_of_load(folder: Path, form: str) -> dict[str, int]:
    """Bytes of one load in a process of its own, above what that held before, imports done.

    {"peak_bytes": at most, "kept_bytes": after the load, "model_bytes": those of the latter that are weights}; what is
    kept beside weights is the tokenizer.
    """
    return _in_own_process(_measure_load, folder, form)


def memory_of_server(folder: Path) -> dict[str, int]:
    """The same of an engine that has drafted 16 tokens for a batch of 16 prompts of 512 (or what its context takes).

    {"peak_bytes", "kept_bytes", "weights_bytes": packed, with the adapter, "cache_bytes": keys and values of those
    positions in the batch's own cache, and what the prefix cache keeps}.
    """
    return _in_own_process(_measure_server, folder)


def _in_own_process(measure: Callable[..., dict[str, int]], *arguments: Any) -> dict[str, int]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def _measure_load(folder: Path, form: str) -> dict[str, int]:
    before = _begin()
    loaded = _load(folder, form)
    return {**_taken(before), "model_bytes": _size_of(getattr(loaded, "model", None))}


def _measure_server(folder: Path) -> dict[str, int]:
    before = _begin()
    engine = DraftEngine(load_model(folder, form="packed"))
    length = min(512, engine.context - 16)
    prompts = [[(31 * at + 7919 * row) % (engine.num_ids - 3) + 3 for at in range(length)] for row in range(16)]
    engine.draft([DraftRequest(tokens, 16) for tokens in prompts])
    decoder, cached = engine.forward.decoder, engine.prefix_cache.size_bytes
    return {
        **_taken(before),
        "weights_bytes": sum(matrix.size_bytes for matrix in decoder.matrices),
        "cache_bytes": 16 * (length + 16) * decoder.cache_bytes_per_token + cached,
    }


def _begin() -> int:
    """Bytes held before what is measured; the peak counts from now on, for importing has one of its own."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM  # noqa: F401  what the load would import

    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _taken(before: int) -> dict[str, int]:
    return {"peak_bytes": _resident("VmHWM") - before, "kept_bytes": _resident("VmRSS") - before}


def _resident(field: str) -> int:
    """VmRSS (memory now) or VmHWM (its peak) of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: memory is measured on Linux alone")


def _size_of(model: nn.Module | None) -> int:
    """Bytes that a model keeps: each storage once, however many views are taken of it."""
    tensors = [] if model is None else [*model.parameters(), *model.buffers()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
