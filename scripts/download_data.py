"""Fetches the corpus files that a recipe names: train files only, at a pinned revision, checked by sha256.

Files go to data/cache/corpora/OWNER--NAME/REVISION/FILE, shared by all recipes, and appear there only after their hash
is verified. A hash that the recipe does not pin is taken from the hub's own metadata at that revision (or, where the
hub publishes none, from the first download) and kept in data/corpora.lock.json; from then on another hash is an error.
HF_ENDPOINT and the library's token settings apply. download_models fetches its hub files by the same functions.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drafter.console import run_command
from drafter.corpus import held_out_token
from drafter.provenance import ROOT, read_json, sha256_file, write_json
from drafter.recipe import Corpus, FilePin, Recipe, load_recipe

LOCK = ROOT / "data" / "corpora.lock.json"

# For --dry-run: a line of 100 Mbit/s; Python with the hub's library, the files themselves are streamed to disk.
BYTES_PER_S = 12_500_000
MEMORY_BYTES = 200_000_000


@dataclass
class Wanted:
    """One file of the hub and what is known about it; sha256 and size_bytes are None until the hub tells them."""

    repo_type: str  # "dataset" | "model"
    repo: str
    revision: str
    name: str
    path: Path
    sha256: str | None
    size_bytes: int | None

    @property
    def label(self) -> str:
        return f"{self.repo}@{self.revision}/{self.name}"


# ---------------------------------------------------------------------------- what is wanted, what is there


def _locked() -> dict[str, dict]:
    return read_json(LOCK)["files"] if LOCK.exists() else {}


def want(repo_type: str, repo: str, revision: str, name: str, pin: FilePin, path: Path) -> Wanted:
    """A file with its pinned or locked hash; ValueError where the two differ."""
    lock = _locked().get(f"{repo}@{revision}/{name}", {})
    file = Wanted(repo_type, repo, revision, name, path, pin.sha256, pin.size_bytes)
    if pin.sha256 and lock and lock["sha256"] != pin.sha256:
        raise ValueError(f"{file.label}: the recipe pins {pin.sha256}, {LOCK.name} holds {lock['sha256']}")
    file.sha256 = file.sha256 or lock.get("sha256")
    file.size_bytes = file.size_bytes or lock.get("size_bytes")
    return file


def corpus_path(recipe: Recipe, corpus: Corpus, name: str) -> Path:
    return recipe.cache_dir.parent / "corpora" / corpus.repo.replace("/", "--") / corpus.revision / name


def wanted_files(recipe: Recipe, corpora: Iterable[Corpus]) -> list[Wanted]:
    """The corpora's files with their pinned or locked hashes; ValueError for a held-out split or a conflict."""
    files = []
    for corpus in corpora:
        for name, pin in corpus.files.items():
            if token := held_out_token(name):
                raise ValueError(f"{corpus.repo}: {name} names a held-out split ({token!r}); no step opens it")
            path = corpus_path(recipe, corpus, name)
            files.append(want("dataset", corpus.repo, corpus.revision, name, pin, path))
    return files


def fault_of(file: Wanted) -> str | None:
    """Why the local copy cannot be used, or None. Bytes are compared by hash: a size proves nothing."""
    if not file.path.exists():
        return "missing"
    if file.sha256 is None:
        return f"its sha256 is neither pinned nor in {LOCK.name}"
    actual = sha256_file(file.path)
    return None if actual == file.sha256 else f"sha256 is {actual}, expected {file.sha256}"


def learn_hash(file: Wanted) -> None:
    """Asks the hub for sha256 and size at the pinned revision; ValueError where they contradict what is known.

    The hub publishes the sha256 of LFS files only. Of a small one (config.json) the first download tells it.
    """
    from huggingface_hub import HfApi

    try:
        found = HfApi().get_paths_info(file.repo, [file.name], revision=file.revision, repo_type=file.repo_type)
    except Exception as error:  # the library lets the errors of its HTTP client through, which are of no common kind
        raise ValueError(f"{file.label}: the hub cannot be asked ({error})") from None
    if not found:
        raise ValueError(f"{file.label}: the hub has no such file at this revision")
    known = {"size_bytes": found[0].size}
    if found[0].lfs is not None:
        known["sha256"] = found[0].lfs.sha256
    for name, published in known.items():
        expected = getattr(file, name)
        if expected is not None and published != expected:
            raise ValueError(f"{file.label}: the hub publishes {name} {published}, expected {expected}")
        setattr(file, name, published)


# ---------------------------------------------------------------------------- fetching


def fetch_file(file: Wanted) -> None:
    """Downloads into a staging folder, verifies, renames; nothing unverified ever bears the file's own name.

    Afterwards the file's sha256 and size_bytes are known and in the lock.
    """
    from huggingface_hub import hf_hub_download

    file.path.parent.mkdir(parents=True, exist_ok=True)
    staging = file.path.parent / f".{file.path.name}.staging"
    where = {"repo_type": file.repo_type, "revision": file.revision, "local_dir": staging}
    try:
        got = Path(hf_hub_download(file.repo, file.name, **where))
        actual = {"size_bytes": got.stat().st_size, "sha256": sha256_file(got)}
        for name, value in actual.items():
            expected = getattr(file, name)
            if expected is not None and value != expected:
                raise ValueError(f"{file.label}: fetched bytes have {name} {value}, expected {expected}; not kept")
            setattr(file, name, value)
        os.replace(got, file.path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    remember(file)


def remember(file: Wanted) -> None:
    """Writes a learnt hash to the lock file, beside those that are there."""
    locked, learnt = _locked(), {"sha256": file.sha256, "size_bytes": file.size_bytes}
    if locked.get(file.label) != learnt:
        write_json(LOCK, {"format": 1, "files": dict(sorted({**locked, file.label: learnt}.items()))})


def check_disk(files: list[Wanted], recipe: Recipe) -> tuple[int, int]:
    """(bytes needed, bytes free); ValueError when they do not fit."""
    folder = recipe.cache_dir.parent
    while not folder.exists():
        folder = folder.parent
    needed, free = sum(file.size_bytes or 0 for file in files), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f"the files to fetch need {needed} bytes and {free} are free; make room for data/cache")
    return needed, free


def plan(recipe: Recipe, files: list[Wanted]) -> dict:
    """--dry-run: bytes from pins and lock (at least, where some sizes are unknown), time at BYTES_PER_S; no hashing."""
    to_fetch = [file for file in files if not file.path.exists()]
    unknown = sum(file.size_bytes is None for file in to_fetch)
    needed, free = check_disk(to_fetch, recipe)
    print(f"to fetch: {len(to_fetch)} of {len(files)} files, {needed} bytes and {unknown} file(s) of unknown size")
    return {
        "dry_run": True,
        "to_fetch": len(to_fetch),
        "size_bytes": needed,
        "unknown_sizes": unknown,
        "free_bytes": free,
        "memory_bytes": MEMORY_BYTES,
        "estimated_s": None if unknown and not needed else round(needed / BYTES_PER_S),
    }


def download(recipe: Recipe, dry_run: bool, offline: bool) -> dict:
    files = wanted_files(recipe, recipe.corpora)
    summary = {"step": "download_data", "recipe": recipe.name, "files": len(files)}
    if dry_run:
        return {**summary, **plan(recipe, files)}
    if not files:
        print(f"the recipe {recipe.name} names no corpora; nothing to fetch")
        return summary
    faults = {file.label: fault for file in files if (fault := fault_of(file))}
    to_fetch = [file for file in files if file.label in faults]
    for label, fault in faults.items():
        print(f"{label}: {fault}")
    if offline and faults:
        raise ValueError(f"{len(faults)} of {len(files)} corpus files cannot be used offline (listed above)")

    for file in to_fetch:
        learn_hash(file)
    check_disk(to_fetch, recipe)
    for file in to_fetch:
        if fault_of(file) is None:  # it was only waiting for its hash and need not come again
            remember(file)
            continue
        fetch_file(file)
        print(f"{file.label}: {file.size_bytes} bytes, verified")
    return {**summary, "fetched": len(to_fetch)}


# ---------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, help="a recipe of architecture.json, for example qwen3-8b")
    parser.add_argument("--dry-run", action="store_true", help="files, bytes, free disk, time; no network, no hashing")
    parser.add_argument("--offline", action="store_true", help="use what is there; name what is missing and fail")
    args = parser.parse_args(argv)
    return run_command(lambda: print(json.dumps(download(load_recipe(args.recipe), args.dry_run, args.offline))))


if __name__ == "__main__":
    raise SystemExit(main())
