"""Hashes, atomic writes, run records: how every file of the project says where it came from.

Canonical JSON (sorted keys, no spaces, UTF-8, no NaN) is what gets hashed, so that the same content has
the same hash on every machine. Files are written to a temporary name beside their target and renamed, so
that a reader sees the old file or the new one and never half of one.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

ROOT = Path(__file__).resolve().parents[1]

# Packages whose version can change a number that we report.
RECORDED_PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "tokenizers",
    "safetensors",
    "bitsandbytes",
    "zstandard",
    "pyarrow",
    "numpy",
)


# ---------------------------------------------------------------------------- hashes


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def canonical_json(value: Any) -> bytes:
    """One spelling for one value; ValueError for NaN and infinities, which JSON cannot say."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sha256_json(value: Any) -> str:
    return sha256_bytes(canonical_json(value))


def code_hash(*modules: str) -> str:
    """One hash over source files (paths relative to the root): derived files are keyed by the code that made them."""
    return sha256_json({name: sha256_file(ROOT / name) for name in modules})


# ---------------------------------------------------------------------------- files


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; on success flush it to disk and rename it, on error remove it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes private files; ours are ordinary ones
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path: str | Path, value: Any) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(value, ensure_ascii=False, indent=2, allow_nan=False).encode() + b"\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file; ValueError names the file when it is not JSON."""
    try:
        return json.loads(Path(path).read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def relative(path: str | Path) -> str:
    """A path as records keep it: relative to the root where it lies below it, else its last name only.

    Records travel inside the packed archive, where a folder of one machine has no meaning.
    """
    path = Path(path).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def sha256_folder(folder: str | Path, patterns: Sequence[str]) -> dict[str, str]:
    """{relative name: sha256} of the files of a folder that match, sorted by name."""
    folder = Path(folder)
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}


# ---------------------------------------------------------------------------- records


def utc_now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ("git", "-C", str(ROOT), *arguments), capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # an unpacked copy without git still works; the record then says null
    return done.stdout


def git_state() -> dict[str, str | None]:
    """The commit, and the hash of what differs from it (null when nothing does)."""
    commit = _git("rev-parse", "HEAD")
    # Result files and tables are outputs of a run: writing them must not change the identity of the code.
    diff = _git("diff", "HEAD", "--", ".", ":!data/results", ":!README.md")
    return {
        "commit": commit.strip() if commit else None,
        "diff_sha256": sha256_bytes(diff.encode()) if diff else None,
    }


def machine() -> dict[str, Any]:
    """What the numbers were measured on: processor, cores, memory, GPU, instruction sets that matter here."""
    flags: set[str] = set()
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
            elif line.startswith(("flags", "Features")):
                flags = set(line.split(":", 1)[1].split())
                break
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    memory_bytes = 0
    with contextlib.suppress(ValueError, OSError):
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = None
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        gpu = sys.modules["torch"].cuda.get_device_name(0)
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(memory_bytes / 1e9, 1),
        "gpu": gpu,
        "isa": [name for name in wanted if name in flags],
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in RECORDED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command as typed, with absolute paths below the root made relative and others cut to their name."""
    words = []
    for word in list(sys.argv if argv is None else argv):
        name, equals, value = word.partition("=")
        if os.path.isabs(word):
            word = relative(word)
        elif equals and os.path.isabs(value):
            word = f"{name}={relative(value)}"
        words.append(word)
    return shlex.join(words)


def run_record(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Command, commit, versions, machine and date of this process: what a phase or a result file carries."""
    return {
        "command": command_line(argv),
        **git_state(),
        "date": utc_now(),
        "machine": machine(),
        "versions": versions(),
    }
