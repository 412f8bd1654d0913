"""The native forward pass: drafter/kernels.c, built by this machine's compiler at first use, called through ctypes.

    forward = NativeForward(decoder, threads=2)   # ValueError: the model does not fit; BuildError: no compiler
    cache = forward.new_cache(slots=16, length=2048)
    choice = forward(cache, tokens, slots, positions, wanted)

The library is kept in the user's cache folder, named by the hash of its source, flags, compiler and processor.
drafter/plain.py is the same pass in PyTorch; drafter/kernel_check.py holds the two together before the first use.

Legend: N tokens, W wanted, D hidden, V ids.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafter.decoder import Choice, Decoder, KeyValueCache, Matrix

SOURCES = ("kernels.c", "kernels.h", "kernels_bf16.h", "kernels_any.h")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
KINDS = {"nf4": 1, "dense": 2, "int8": 3}
# Tokens of one call: 128 rows make a product that is bound by arithmetic (128 x 2 FLOPs a weight byte), and keep what a
# call needs of the 1.7 B shape below 20 MB.
MAX_TOKENS = 128


class BuildError(RuntimeError):
    """The native library cannot be had on this machine; the message says why. The plain path runs instead."""


# ---------------------------------------------------------------------------- building


def _compiler() -> str:
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    raise BuildError("no C compiler (cc, gcc or clang) is installed")


def _processor() -> str:
    """What -march=native depends on: the model's name and flags, so that a shared home folder never mixes machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "drafter"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="drafter-"))  # a read-only home: built anew by each process


@lru_cache(maxsize=4)
def library(flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The built and loaded library. BuildError without a compiler, or when it fails or takes over two minutes."""
    here = Path(__file__).parent
    compiler = _compiler()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for part in (*((here / name).read_text() for name in SOURCES), *flags, compiler, version, _processor()):
        digest.update(part.encode() + b"\0")
    path = _cache_folder() / f"kernels-{digest.hexdigest()[:20]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / "kernels.so"
            command = [compiler, *flags, str(here / SOURCES[0]), "-o", str(built), "-lm"]
            try:
                result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{compiler} failed: {error}") from None
            if result.returncode:
                raise BuildError(f"{compiler} failed: {(result.stderr.strip() or 'no message')[:500]}")
            os.replace(built, path)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    loaded.engine_new.restype = ctypes.c_void_p
    loaded.engine_logits.restype = ctypes.POINTER(ctypes.c_float)
    loaded.engine_logits.argtypes = [ctypes.c_void_p]
    loaded.engine_free.argtypes = [ctypes.c_void_p]
    return loaded


# ---------------------------------------------------------------------------- the structures of kernels.h and kernels.c

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, _int) for name in ("kind", "rows", "cols", "rank")),
        *((name, _pointer) for name in ("codes", "scales", "bias", "lora_a", "lora_b")),
        ("lora_scale", _float),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, _pointer) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _int) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "num_ids")),
        *((name, _float) for name in ("eps", "attention_scale")),
        ("layer", _pointer),
        *((name, _Matrix) for name in ("embedding", "head")),
        *((name, _pointer) for name in ("final_norm", "cos", "sin")),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [("keys", _pointer), ("values", _pointer), ("slots", _int), ("length", _int)]


# ---------------------------------------------------------------------------- the pass


def check_fits(decoder: Decoder) -> None:
    """ValueError for shapes that the kernels do not take."""
    for index, layer in enumerate(decoder.layers):
        for matrix in layer.matrices:
            if matrix.kind == "nf4" and matrix.shape[1] % 64:
                raise ValueError(f"layer {index}: {matrix.shape[1]} columns are no multiple of 64, the block of NF4")
            if matrix.kind == "dense" and matrix.codes.dtype != torch.bfloat16:
                raise ValueError(f"layer {index}: dense weights are {matrix.codes.dtype}, the kernels take bfloat16")
    if decoder.head_dim % 2:
        raise ValueError(f"head width {decoder.head_dim} is odd")


class NativeForward:
    """The pass over one decoder; `threads` walk it together. Not for two callers at once: the buffers are its own."""

    name = "native"
    dtype = torch.bfloat16
    static_steps = False

    def __init__(
        self,
        decoder: Decoder,
        *,
        threads: int,
        max_tokens: int = MAX_TOKENS,
        flags: tuple[str, ...] = FLAGS,
    ):
        check_fits(decoder)
        self.decoder, self.threads, self.max_tokens = decoder, threads, max_tokens
        self.lib = library(flags)
        self._kept: list[object] = []  # what C holds pointers to
        self._scratch: int | None = None
        layers = (_Layer * len(decoder.layers))()
        for target, layer in zip(layers, decoder.layers, strict=True):
            for name in ("q", "k", "v", "o", "gate", "up", "down"):
                setattr(target, name, self._matrix(getattr(layer, name)))
            for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm"):
                setattr(target, name, self._keep(getattr(layer, name)))
        embedding = self._matrix(decoder.embedding)
        self._model = _Model(
            *(len(layers), decoder.hidden, decoder.intermediate, decoder.heads, decoder.kv_heads, decoder.head_dim),
            *(decoder.num_ids, decoder.eps, decoder.attention_scale),
            ctypes.addressof(layers),
            embedding,
            embedding if decoder.head is decoder.embedding else self._matrix(decoder.head),
            *map(self._keep, (decoder.final_norm, decoder.cos, decoder.sin)),
        )
        self._kept.append(layers)
        sizes = (threads, max_tokens, decoder.positions, decoder.rank)
        self._scratch = self.lib.engine_new(ctypes.byref(self._model), *sizes)
        if not self._scratch:
            raise MemoryError("the native engine's buffers")

    def __del__(self):
        with contextlib.suppress(AttributeError):
            if self._scratch:
                self.lib.engine_free(self._scratch)

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _matrix(self, matrix: Matrix) -> _Matrix:
        rows, cols = matrix.shape
        low_rank = (None, None)
        if matrix.lora_a is not None:
            low_rank = (self._keep(self._ordered(matrix)), self._keep(matrix.lora_b))
        rank = 0 if matrix.lora_a is None else matrix.lora_a.shape[0]
        stored = map(self._keep, (matrix.codes, matrix.scales, matrix.bias))
        return _Matrix(KINDS[matrix.kind], rows, cols, rank, *stored, *low_rank, matrix.lora_scale)

    def _ordered(self, matrix: Matrix) -> Tensor:
        """A [r, K] in the order in which the kernels keep activations beside NF4, zeros up to a multiple of 128."""
        a = matrix.lora_a.contiguous()
        out = torch.empty(a.shape[0], -(-a.shape[1] // 128) * 128, dtype=torch.bfloat16)
        for source, target in zip(a, out, strict=True):
            pointers = ctypes.c_void_p(source.data_ptr()), ctypes.c_void_p(target.data_ptr())
            self.lib.engine_order_row(*pointers, a.shape[1], KINDS[matrix.kind])
        return out

    def new_cache(self, slots: int, length: int) -> KeyValueCache:
        return KeyValueCache.new(self.decoder, slots, length)

    def __call__(
        self,
        cache: KeyValueCache,
        tokens: Sequence[int],
        slots: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        *,
        rows: np.ndarray | None = None,
        own: Sequence[np.ndarray] | None = None,
        hidden: bool = False,
        top_k: int = 0,
    ) -> Choice:
        """One pass over N tokens, at most `max_tokens`, each at its position of its slot.

        What lies before a token in its slot is in the cache, or in this call before it. `wanted` are indices into
        `tokens`. `rows`: the ids that compete, rising int32; all existing ones if None. `own` [W]: more ids, int32,
        none of them in `rows`, that compete for one wanted token. With `top_k` ids and gaps are those of the lists.
        """
        count, ids = len(tokens), np.empty(len(wanted), np.int32)
        assert 0 < count <= self.max_tokens and len(wanted) <= count, (count, len(wanted))
        assert max(positions) < cache.length and max(slots) < cache.slots, (max(positions), max(slots))
        gaps = np.empty(len(wanted), np.float32)
        states = torch.empty(len(wanted), self.decoder.hidden) if hidden else None
        arrays = [np.ascontiguousarray(values, np.int32) for values in (tokens, slots, positions, wanted)]
        tokens_at, slots_at, positions_at, wanted_at = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
        row_count = self.decoder.num_ids if rows is None else len(rows)
        assert 0 <= top_k <= row_count, (top_k, row_count)
        lists = [np.empty((len(wanted), top_k), kind) for kind in (np.int32, np.float32)]
        tails = np.empty(len(wanted), np.float32)
        own_ids = np.concatenate(own).astype(np.int32) if own else np.empty(0, np.int32)
        own_start = np.cumsum([0, *map(len, own or ())], dtype=np.int32)
        view = _Cache(cache.keys.data_ptr(), cache.values.data_ptr(), cache.slots, cache.length)
        self.lib.engine_forward(
            ctypes.byref(self._model),
            ctypes.byref(view),
            ctypes.c_void_p(self._scratch),
            *(count, tokens_at, slots_at, positions_at),
            *(len(wanted), wanted_at, row_count),
            None if rows is None else ctypes.c_void_p(rows.ctypes.data),
            *(ctypes.c_void_p(array.ctypes.data) if own else None for array in (own_ids, own_start)),
            ctypes.c_void_p(ids.ctypes.data),
            ctypes.c_void_p(gaps.ctypes.data),
            ctypes.c_void_p(states.data_ptr()) if hidden else None,
            top_k,
            *(ctypes.c_void_p(array.ctypes.data) for array in (*lists, tails)),
        )
        top = (lists[0], lists[1].astype(np.float16), tails) if top_k else None
        return Choice(ids.tolist(), gaps.tolist(), states, top)
