"""Fetches the corpus files that a recipe names: train files only, at a pinned revision, checked by sha256.

Files go to data/cache/corpora/OWNER--NAME/REVISION/FILE, shared by all recipes, and appear there only after their hash
is verified; an interrupted download goes on where it stopped. A hash that the recipe does not pin is taken from the
hub's own metadata at that revision (or, where the hub publishes none, from the first download) and kept in
data/corpora.lock.json; from then on another hash is an error. HF_ENDPOINT, HF_TOKEN, HF_HOME apply (drafter/fetch.py).
download_models fetches its hub files by the same functions.
"""

import argparse
import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from drafter.console import progress_bar, run_command
from drafter.fetch import HubFile, ask_hub, fetch, take_from_cache
from drafter.provenance import ROOT, read_json, sha256_file, write_json
from drafter.recipe import Corpus, FilePin, Recipe, load_recipe

LOCK = ROOT / "data" / "corpora.lock.json"

# For --dry-run: a line of 100 Mbit/s; Python with the hub's library, the files themselves are streamed to disk.
BYTES_PER_S = 12_500_000
MEMORY_BYTES = 200_000_000


# ---------------------------------------------------------------------------- what is wanted, what is there


def _locked() -> dict[str, dict]:
    return read_json(LOCK)["files"] if LOCK.exists() else {}


def want(repo_type: str, repo: str, revision: str, name: str, pin: FilePin, path: Path) -> HubFile:
    """A file with its pinned or locked hash and size; ValueError where pin and lock differ, or for a held-out split."""
    file = HubFile(repo_type, repo, revision, name, path, pin.sha256, pin.size_bytes)
    file.check_name()
    for field, locked in _locked().get(file.label, {}).items():
        pinned = getattr(file, field)
        if pinned is not None and locked != pinned:
            raise ValueError(f"{file.label}: the recipe pins {field} {pinned}, {LOCK.name} holds {locked}")
        setattr(file, field, locked)
    return file


def remember(file: HubFile) -> None:
    """Writes a learnt hash to the lock file, beside what is there: also what another process wrote meanwhile."""
    learnt = {"sha256": file.sha256, "size_bytes": file.size_bytes}
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(LOCK.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # one process at a time from reading to writing; closing ends it
        locked = _locked()
        if locked.get(file.label) != learnt:
            write_json(LOCK, {"format": 1, "files": dict(sorted({**locked, file.label: learnt}.items()))})
    finally:
        os.close(folder)


def corpus_path(recipe: Recipe, corpus: Corpus, name: str) -> Path:
    return recipe.cache_dir.parent / "corpora" / corpus.repo.replace("/", "--") / corpus.revision / name


def wanted_files(recipe: Recipe, corpora: Iterable[Corpus]) -> list[HubFile]:
    """The corpora's files with their pinned or locked hashes; ValueError for a held-out split or a conflict."""
    return [
        want("dataset", corpus.repo, corpus.revision, name, pin, corpus_path(recipe, corpus, name))
        for corpus in corpora
        for name, pin in corpus.files.items()
    ]


def fault_of(file: HubFile) -> str | None:
    """Why the local copy cannot be used, or None. Bytes are compared by hash: a size proves nothing."""
    if not file.path.exists():
        return "missing"
    if file.sha256 is None:
        return f"its sha256 is neither pinned nor in {LOCK.name}"
    actual = sha256_file(file.path)
    return None if actual == file.sha256 else f"sha256 is {actual}, expected {file.sha256}"


# ---------------------------------------------------------------------------- bringing them


def check_disk(files: list[HubFile], recipe: Recipe) -> tuple[int, int]:
    """(bytes still to come, bytes free); ValueError when they do not fit. Unknown sizes count as nothing."""
    folder = recipe.cache_dir.parent
    while not folder.exists():
        folder = folder.parent
    needed = sum(max(0, (file.size_bytes or 0) - file.part_bytes) for file in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f"the files to fetch need {needed} bytes and {free} are free; make room for data/cache")
    return needed, free


def bring(files: list[HubFile], recipe: Recipe, offline: bool = False) -> int:
    """Makes every file be there, verified and in the lock; returns how many were fetched.

    In this order: what is there, what the hub library's cache has at this revision, what the hub sends. ValueError
    when a file cannot be had as declared; `offline` asks no hub and names every file that is missing.
    """
    faults = {file.label: fault for file in files if (fault := fault_of(file)) and not take_from_cache(file)}
    for label, fault in faults.items():
        print(f"{label}: {fault}")
    if offline and faults:
        named = "; ".join(f"{label}: {fault}" for label, fault in faults.items())
        raise ValueError(f"{len(faults)} of {len(files)} files cannot be used offline: {named}")

    to_fetch = list({file.path: file for file in files if file.label in faults}.values())
    ask_hub([file for file in to_fetch if file.sha256 is None or file.size_bytes is None])
    # With its hash from the hub, a file may turn out to be what is there, or what the library's cache has.
    to_fetch = [file for file in to_fetch if fault_of(file) and not take_from_cache(file)]
    needed, _ = check_disk(to_fetch, recipe)
    begun = sum(file.part_bytes for file in to_fetch)
    with progress_bar(begun + needed, "download", "B", unit_scale=True, initial=begun, disable=not to_fetch) as bar:
        for file in to_fetch:
            bar.set_postfix_str(file.path.name, refresh=False)
            fetch(file, bar.update)
            remember(file)
            print(f"{file.label}: {file.size_bytes} bytes, verified", flush=True)
    for file in files:  # those that had only waited for their hash
        if file.label in faults:
            remember(file)
    return len(to_fetch)


def download(recipe: Recipe, dry_run: bool, offline: bool) -> dict:
    files = wanted_files(recipe, recipe.corpora)
    summary = {"step": "download_data", "recipe": recipe.name, "files": len(files)}
    if not files:
        print(f"the recipe {recipe.name} names no corpora; nothing to fetch")
    if dry_run:
        return {**summary, **plan(recipe, files)}
    return {**summary, "fetched": bring(files, recipe, offline)}


def plan(recipe: Recipe, files: list[HubFile]) -> dict:
    """--dry-run: bytes from pins and lock (at least, where some sizes are unknown), time at BYTES_PER_S; no hashing."""
    for file in files:
        state = "there" if file.path.exists() else f"{file.part_bytes} bytes there" if file.part_bytes else "to fetch"
        size = "unknown size" if file.size_bytes is None else f"{file.size_bytes} bytes"
        print(f"{file.label}: {size}, {'sha256 known' if file.sha256 else 'unknown sha256'}, {state}")
    to_fetch = [file for file in files if not file.path.exists()]
    unknown = sum(file.size_bytes is None for file in to_fetch)
    needed, free = check_disk(to_fetch, recipe)
    estimated_s = None if unknown and not needed else round(needed / BYTES_PER_S)
    at_least = "at least " if unknown else ""
    print(
        f"to fetch: {len(to_fetch)} of {len(files)} files, {at_least}{needed} bytes ({unknown} of unknown size, which "
        f"the hub tells at the first run), {free} bytes free; "
        + ("time unknown" if estimated_s is None else f"{at_least}{estimated_s / 60:.1f} minutes at 100 Mbit/s")
    )
    return {
        "dry_run": True,
        "to_fetch": len(to_fetch),
        "size_bytes": needed,
        "unknown_sizes": unknown,
        "free_bytes": free,
        "memory_bytes": MEMORY_BYTES,
        "estimated_s": estimated_s,
    }


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
