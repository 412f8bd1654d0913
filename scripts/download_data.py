"""Fetches the corpus files that a recipe names: train files only, at a pinned revision, checked by sha256.

Files go to data/cache/corpora/OWNER--NAME/REVISION/FILE, shared by all recipes, and appear there only after their hash
is verified. A hash that the recipe does not pin is taken from the hub's own metadata at that revision and kept in
data/corpora.lock.json; from then on another hash is an error. HF_ENDPOINT and the library's token settings apply.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drafter.corpus import held_out_token
from drafter.provenance import ROOT, canonical_json, read_json, sha256_file, write_json
from drafter.recipe import Corpus, Recipe, load_recipe

LOCK = ROOT / "data" / "corpora.lock.json"


@dataclass
class Wanted:
    """One file of a corpus and what is known about it; sha256 and size_bytes are None until the hub tells them."""

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


def corpus_path(recipe: Recipe, corpus: Corpus, name: str) -> Path:
    return recipe.cache_dir.parent / "corpora" / corpus.repo.replace("/", "--") / corpus.revision / name


def wanted_files(recipe: Recipe, corpora: Iterable[Corpus]) -> list[Wanted]:
    """The corpora's files with their pinned or locked hashes; ValueError for a held-out split or a conflict."""
    locked = read_json(LOCK)["files"] if LOCK.exists() else {}
    files = []
    for corpus in corpora:
        for name, pin in corpus.files.items():
            if token := held_out_token(name):
                raise ValueError(f"{corpus.repo}: {name} names a held-out split ({token!r}); no step opens it")
            path = corpus_path(recipe, corpus, name)
            file = Wanted(corpus.repo, corpus.revision, name, path, pin.sha256, pin.size_bytes)
            lock = locked.get(file.label, {})
            if pin.sha256 and lock and lock["sha256"] != pin.sha256:
                raise ValueError(f"{file.label}: the recipe pins {pin.sha256}, {LOCK.name} holds {lock['sha256']}")
            file.sha256 = file.sha256 or lock.get("sha256")
            file.size_bytes = file.size_bytes or lock.get("size_bytes")
            files.append(file)
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
    """Asks the hub for sha256 and size at the pinned revision; ValueError where they contradict what is known."""
    from huggingface_hub import HfApi

    found = HfApi().get_paths_info(file.repo, [file.name], revision=file.revision, repo_type="dataset")
    lfs = found[0].lfs if found else None
    if lfs is None:
        raise ValueError(f"{file.label}: the hub publishes no sha256 for it; pin it in the recipe")
    if file.sha256 and lfs.sha256 != file.sha256:
        raise ValueError(f"{file.label}: the hub publishes sha256 {lfs.sha256}, expected {file.sha256}")
    file.sha256, file.size_bytes = lfs.sha256, lfs.size


# ---------------------------------------------------------------------------- fetching


def fetch(file: Wanted) -> None:
    """Downloads into a staging folder, verifies, renames; nothing unverified ever bears the file's own name."""
    from huggingface_hub import hf_hub_download

    staging = file.path.parent / f".{file.path.name}.staging"
    try:
        got = hf_hub_download(file.repo, file.name, repo_type="dataset", revision=file.revision, local_dir=staging)
        actual = sha256_file(got)
        if actual != file.sha256:
            raise ValueError(f"{file.label}: fetched bytes have sha256 {actual}, expected {file.sha256}; not kept")
        os.replace(got, file.path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_disk(files: list[Wanted], recipe: Recipe) -> tuple[int, int]:
    """(bytes needed, bytes free); ValueError when they do not fit."""
    folder = recipe.cache_dir.parent
    while not folder.exists():
        folder = folder.parent
    needed, free = sum(file.size_bytes or 0 for file in files), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(f"the corpora need {needed} bytes and {free} are free; make room for data/cache/corpora")
    return needed, free


def remember(files: list[Wanted]) -> None:
    """Writes learnt hashes to the lock file, beside those that are there."""
    locked = read_json(LOCK)["files"] if LOCK.exists() else {}
    learnt = {file.label: {"sha256": file.sha256, "size_bytes": file.size_bytes} for file in files}
    if any(locked.get(label) != known for label, known in learnt.items()):
        write_json(LOCK, {"format": 1, "files": dict(sorted({**locked, **learnt}.items()))})


def download(recipe: Recipe, dry_run: bool, offline: bool) -> dict:
    files = wanted_files(recipe, recipe.corpora)
    summary = {"step": "download_data", "recipe": recipe.name, "files": len(files)}
    if not files:
        print(f"the recipe {recipe.name} names no corpora; nothing to fetch")
        return summary
    faults = {file.label: fault for file in files if (fault := fault_of(file))}
    to_fetch = [file for file in files if file.label in faults]
    for label, fault in faults.items():
        print(f"{label}: {fault}")
    if dry_run:
        known, unknown = sum(file.size_bytes or 0 for file in to_fetch), sum(not file.size_bytes for file in to_fetch)
        _, free = check_disk(to_fetch, recipe)
        print(f"to fetch: {len(to_fetch)} of {len(files)} files, {known} bytes and {unknown} file(s) of unknown size")
        return {**summary, "dry_run": True, "to_fetch": len(to_fetch), "size_bytes": known, "free_bytes": free}
    if offline and faults:
        raise ValueError(f"{len(faults)} of {len(files)} corpus files cannot be used offline (listed above)")

    for file in to_fetch:
        learn_hash(file)
    check_disk(to_fetch, recipe)
    for file in to_fetch:
        if fault_of(file) is not None:  # a file that was only waiting for its hash need not come again
            file.path.parent.mkdir(parents=True, exist_ok=True)
            fetch(file)
            print(f"{file.label}: {file.size_bytes} bytes, verified")
        remember([file])
    return {**summary, "fetched": len(to_fetch)}


# ---------------------------------------------------------------------------- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, help="a recipe of architecture.json, for example qwen3-8b")
    parser.add_argument("--dry-run", action="store_true", help="list files, bytes and free disk; no network")
    parser.add_argument("--offline", action="store_true", help="use what is there; name what is missing and fail")
    args = parser.parse_args(argv)
    try:
        result = download(load_recipe(args.recipe), args.dry_run, args.offline)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(canonical_json(result).decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
