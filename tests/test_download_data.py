"""download_data as people run it, against a hub on loopback: pins, lock, disk, cache, offline, real rows."""

import json
import multiprocessing
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from stub_hub import git_sha1, sha256

from drafter import fetch
from drafter.recipe import Corpus, FilePin, load_recipe
from scripts import download_data

ROOT = Path(__file__).resolve().parents[1]
REPO, REVISION, NAME = "openai/gsm8k", "0" * 40, "main/train-0.parquet"
LABEL = f"{REPO}@{REVISION}/{NAME}"
CONTENT = bytes(range(256)) * 500


def corpus(files=None, repo=REPO, revision=REVISION) -> Corpus:
    pins = {name: FilePin(**pin) for name, pin in (files or {NAME: {}}).items()}
    return Corpus(repo=repo, revision=revision, files=pins, licence="MIT", role="expanded.data", columns={"user": "q"})


@pytest.fixture
def world(hub, tmp_path, monkeypatch):
    """world.run(flags) runs the step below a temporary root on world.corpora; the hub has their one file."""
    hub.add("dataset", REPO, REVISION, {NAME: CONTENT, "main/train-1.parquet": CONTENT[::-1]})
    state = SimpleNamespace(hub=hub, corpora=(corpus(),), root=tmp_path)
    state.path = tmp_path / "data/cache/corpora/openai--gsm8k" / REVISION / NAME
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    monkeypatch.setattr(download_data, "LOCK", tmp_path / "corpora.lock.json")
    recipe = load_recipe("tiny")
    monkeypatch.setattr(download_data, "load_recipe", lambda name: recipe.model_copy(update={"corpora": state.corpora}))
    state.run = lambda *flags: download_data.main(["--recipe", "tiny", *flags])
    return state


def lock() -> dict:
    return json.loads(download_data.LOCK.read_text())["files"]


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


# ---------------------------------------------------------------------------- pins, lock, repair


def test_fetched_verified_locked_and_repaired(world, capsys):
    """DL-2: success was reported for bytes that differ from the published hash, or that an interruption had cut."""
    assert world.run("--offline") == 1
    assert f"{LABEL}: missing" in capsys.readouterr().err
    assert world.run() == 0
    assert last_line(capsys) == {"step": "download_data", "recipe": "tiny", "files": 1, "fetched": 1}
    assert world.path.read_bytes() == CONTENT
    assert [path.name for path in world.path.parent.iterdir()] == ["train-0.parquet"]
    assert lock() == {LABEL: {"sha256": sha256(CONTENT), "size_bytes": len(CONTENT)}}

    world.hub.requests.clear()
    assert world.run() == 0 and world.run("--offline") == 0 and world.hub.requests == []
    for damaged in (CONTENT[:-1], CONTENT[:999] + b"x" + CONTENT[1000:]):
        world.path.write_bytes(damaged)
        world.path.with_name("train-0.parquet.part").write_bytes(CONTENT[:500])
        capsys.readouterr()
        assert world.run("--offline") == 1
        assert f"sha256 is {sha256(damaged)}, expected {sha256(CONTENT)}" in capsys.readouterr().err
        assert world.run() == 0
        assert world.path.read_bytes() == CONTENT
        assert [path.name for path in world.path.parent.iterdir()] == ["train-0.parquet"]


def test_wrong_bytes_are_not_kept_and_a_moved_hash_is_refused(world, capsys):
    world.hub.faults.content[NAME] = CONTENT[::-1]
    assert world.run() == 1
    assert f"sha256 {sha256(CONTENT[::-1])}, expected {sha256(CONTENT)}; deleted" in capsys.readouterr().err
    assert list(world.path.parent.iterdir()) == [] and not download_data.LOCK.exists()
    world.hub.faults.content.clear()
    assert world.run() == 0
    world.path.unlink()
    world.hub.faults.published[NAME] = "e" * 64
    assert world.run() == 1
    assert f"sha256 {'e' * 64}, expected {sha256(CONTENT)}" in capsys.readouterr().err
    assert not world.path.exists()


def test_a_hash_that_the_hub_does_not_publish_is_learnt_once(world, capsys):
    """A small file is kept in git, not in LFS: the hub names no sha256. The first download tells it, checked by the
    git id that is published; a later one that differs is refused."""
    world.hub.small.add(NAME)
    assert world.run() == 0
    assert lock() == {LABEL: {"sha256": sha256(CONTENT), "size_bytes": len(CONTENT)}}
    world.path.unlink()
    world.hub.faults.content[NAME] = CONTENT[::-1]
    assert world.run() == 1
    assert f"expected {sha256(CONTENT)}; deleted" in capsys.readouterr().err
    download_data.LOCK.unlink()
    assert world.run() == 1
    assert f"git_sha1 {git_sha1(CONTENT[::-1])}, expected {git_sha1(CONTENT)}" in capsys.readouterr().err
    assert not world.path.exists() and not download_data.LOCK.exists()


@pytest.mark.parametrize(("field", "value"), [("sha256", "f" * 64), ("size_bytes", 5)])
def test_pin_and_lock_must_agree(world, capsys, field, value):
    assert world.run() == 0
    world.corpora = (corpus({NAME: {field: value}}),)
    assert world.run("--offline") == 1
    assert f"the recipe pins {field} {value}, corpora.lock.json holds {lock()[LABEL][field]}" in capsys.readouterr().err


def test_a_file_that_was_put_there_only_waits_for_its_hash(world, capsys):
    """It was fetched once more, although its bytes were the published ones."""
    world.path.parent.mkdir(parents=True)
    world.path.write_bytes(CONTENT)
    assert world.run("--offline") == 1
    assert "neither pinned nor in corpora.lock.json" in capsys.readouterr().err
    assert world.run() == 0
    assert last_line(capsys)["fetched"] == 0 and world.hub.asked("GET") == []
    assert lock()[LABEL]["sha256"] == sha256(CONTENT) and world.run("--offline") == 0


def test_only_what_the_recipe_names_is_fetched(world):
    """With hash and size pinned the hub is asked for nothing but the file itself; a file that two parts of a recipe
    name is fetched once."""
    world.corpora = (corpus({NAME: {"sha256": sha256(CONTENT), "size_bytes": len(CONTENT)}}),) * 2
    assert world.run() == 0
    assert [(request.server, request.method) for request in world.hub.requests] == [("hub", "GET"), ("cdn", "GET")]
    assert [path.name for path in world.root.rglob("*.parquet*")] == ["train-0.parquet"]


def test_an_interrupted_run_goes_on(world, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "PATIENCE", fetch.Patience(attempts=1))
        world.hub.faults.cuts = [40_000]
        assert world.run() == 1
    assert "40000 bytes have come and are kept; run the same command again to go on" in capsys.readouterr().err
    assert world.run("--dry-run") == 0
    assert last_line(capsys)["size_bytes"] == 0, "of unknown size: nothing was learnt for certain yet"
    assert world.run() == 0
    assert world.hub.asked("GET", "cdn")[-1].headers["range"] == "bytes=40000-"
    assert world.path.read_bytes() == CONTENT


# ---------------------------------------------------------------------------- revisions and held-out splits


def test_another_revision_is_never_taken(world, capsys):
    """DL-1: offline, the newest copy of the cache was taken although another revision was asked for."""
    from huggingface_hub import hf_hub_download

    other = "1" * 40
    world.hub.add("dataset", REPO, other, {NAME: CONTENT})
    world.corpora = (corpus(revision=other),)
    assert world.run() == 0
    hf_hub_download(REPO, NAME, repo_type="dataset", revision=other, endpoint=world.hub.url)
    world.corpora = (corpus({NAME: {"sha256": sha256(CONTENT)}}),)
    assert world.run("--offline") == 1
    assert f"{LABEL}: missing" in capsys.readouterr().err
    assert not world.path.exists()


def test_the_librarys_cache_saves_a_download(world, capsys):
    from huggingface_hub import hf_hub_download

    hf_hub_download(REPO, NAME, repo_type="dataset", revision=REVISION, endpoint=world.hub.url)
    world.hub.requests.clear()
    assert world.run() == 0  # its hash is asked for, its bytes are not
    assert last_line(capsys)["fetched"] == 0 and world.hub.asked("GET") == []
    assert world.path.read_bytes() == CONTENT
    world.path.unlink()
    assert world.run("--offline") == 0 and world.path.exists()


@pytest.mark.parametrize("flags", [(), ("--dry-run",), ("--offline",)])
def test_a_held_out_split_is_refused_whatever_the_recipe_says(world, capsys, flags):
    world.hub.add("dataset", REPO, REVISION, {"data/validation-0.parquet": CONTENT})
    world.corpora = (corpus({"data/validation-0.parquet": {"sha256": sha256(CONTENT), "size_bytes": len(CONTENT)}}),)
    assert world.run(*flags) == 1
    assert "held-out split ('validation')" in capsys.readouterr().err
    assert world.hub.requests == []


# ---------------------------------------------------------------------------- disk, dry run, no network


def test_all_missing_bytes_are_counted_before_the_first_is_fetched(world, monkeypatch, capsys):
    """Two files that fit one by one and not together filled the disk with the first."""
    world.corpora = (corpus({NAME: {}, "main/train-1.parquet": {}}),)
    free = len(CONTENT) * 2 - 1
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        assert world.run() == 1
        assert f"need {len(CONTENT) * 2} bytes and {free} are free" in capsys.readouterr().err
        assert world.hub.asked("GET") == []
        world.path.parent.mkdir(parents=True)  # of what has come already no room is needed
        world.path.with_name("train-0.parquet.part").write_bytes(CONTENT[:1])
        assert world.run() == 0


def test_dry_run_needs_no_network(world, monkeypatch, capsys):
    def forbidden(*arguments, **settings):
        raise AssertionError("--dry-run did more than look")

    world.corpora = (corpus({NAME: {"sha256": sha256(CONTENT), "size_bytes": 10**9}, "main/train-1.parquet": {}}),)
    monkeypatch.setattr(socket, "socket", forbidden)
    monkeypatch.setattr(download_data, "sha256_file", forbidden)
    assert world.run("--dry-run") == 0
    out = capsys.readouterr().out
    plan = json.loads(out.splitlines()[-1])
    assert (plan["to_fetch"], plan["size_bytes"], plan["unknown_sizes"], plan["estimated_s"]) == (2, 10**9, 1, 80)
    assert f"{LABEL}: 1000000000 bytes, sha256 known, to fetch" in out
    assert "train-1.parquet: unknown size, unknown sha256, to fetch" in out
    assert "to fetch: 2 of 2 files, at least 1000000000 bytes (1 of unknown size" in out
    assert "at least 1.3 minutes" in out
    assert not (world.root / "data").exists()


def test_dry_run_of_the_real_recipe(monkeypatch, capsys, tmp_path):
    """Every file pinned to 40 digits and none of a held-out split; what is not known is said to be unknown."""
    monkeypatch.setattr("drafter.recipe.ROOT", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**12))
    assert download_data.main(["--recipe", "qwen3-8b", "--dry-run"]) == 0
    plan = last_line(capsys)
    assert plan["files"] == plan["to_fetch"] == 14 and plan["size_bytes"] >= 886_086_827


def test_a_recipe_without_corpora(world, capsys):
    world.corpora = ()
    assert world.run() == 0 and world.run("--dry-run") == 0
    assert "names no corpora" in capsys.readouterr().out
    assert world.hub.requests == []


def test_a_hub_out_of_reach_is_one_line(world, monkeypatch, capsys):
    """The library lets its HTTP client's errors through, and those are no OSError: it ended in a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert world.run() == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: {REPO}@{REVISION}: 127.0.0.1: ") and "given up after 6 attempts" in error


# ---------------------------------------------------------------------------- real rows


def test_the_real_gsm8k_rows_come_through_a_bad_line(world, monkeypatch, capsys):
    """Cut lines, errors, a token that only the hub may see, an end in the middle and a second run: 7,473 rows."""
    source = ROOT.parent / "shared/corpora/openai--gsm8k/main/train-00000-of-00001.parquet"
    if not source.exists():
        pytest.skip("no GSM8K train rows in ../shared/corpora on this machine")
    content, name, revision = source.read_bytes(), "main/train-00000-of-00001.parquet", "2" * 40
    world.hub.add("dataset", REPO, revision, {name: content, "main/test-00000-of-00001.parquet": b"never asked for"})
    world.hub.token = "hf_onlyForTheHub"
    monkeypatch.setenv("HF_TOKEN", world.hub.token)
    world.corpora = (corpus({name: {}}, revision=revision),)
    with monkeypatch.context() as patch:
        patch.setattr(fetch, "PATIENCE", fetch.Patience(attempts=2, first_wait_s=0.001))
        world.hub.faults.cuts, world.hub.faults.hub_statuses = [300_000, 400_000], [503]
        assert world.run() == 1
    world.hub.faults.cuts, world.hub.faults.hub_statuses = [500_000], [500]
    assert world.run() == 0
    path = world.root / "data/cache/corpora/openai--gsm8k" / revision / name
    assert path.read_bytes() == content and os.listdir(path.parent) == [path.name]
    assert pq.read_metadata(path).num_rows == 7473
    begun = [request.headers.get("range") for request in world.hub.asked("GET", "cdn")]
    assert begun == [None, "bytes=300000-", "bytes=700000-", "bytes=1200000-"]
    assert all("authorization" not in request.headers for request in world.hub.asked("GET", "cdn"))
    assert not any("test" in request.path for request in world.hub.requests)
    assert world.hub.token not in "".join(capsys.readouterr())


# ---------------------------------------------------------------------------- several processes


def _remember(lock_path: str, number: int) -> None:
    download_data.LOCK = Path(lock_path)
    for part in range(5):
        name = f"main/train-{number}-{part}.parquet"
        file = fetch.HubFile("dataset", REPO, REVISION, name, Path("unused"), sha256=f"{number:064x}", size_bytes=part)
        download_data.remember(file)


def test_two_downloads_at_once_lose_no_hash(tmp_path):
    """Both read the lock file, each wrote it with its own hash alone, and the other's was gone."""
    path = tmp_path / "data" / "corpora.lock.json"
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=_remember, args=(str(path), number)) for number in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
        assert job.exitcode == 0
    assert len(json.loads(path.read_text())["files"]) == 20
    assert os.listdir(path.parent) == [path.name]
