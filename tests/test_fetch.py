"""drafter/fetch.py against a hub on loopback with a network's faults: what was published comes, or nothing does."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from stub_hub import (
    CONTENT,
    NAME,
    OTHER,
    REPO,
    REVISION,
    SECRET,
    Faults,
    git_sha1,
    interrupt,
    is_there,
    one_file,
    ranges,
    sha256,
)

from drafter import fetch
from drafter.fetch import HubError, HubFile, ask_hub
from drafter.provenance import read_json

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def file(hub, tmp_path) -> HubFile:
    return one_file(hub, tmp_path / "got")


def impatient(monkeypatch, **changes):
    monkeypatch.setattr(fetch, "PATIENCE", dataclasses.replace(fetch.PATIENCE, **changes))


# ---------------------------------------------------------------------------- the stand-in itself


def test_the_librarys_own_client_understands_the_stand_in(hub, file, tmp_path):
    """What is proved against the stand-in holds for the hub only as far as the two speak alike."""
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_download, hf_hub_url

    hub.branches["main"] = REVISION
    hub.small.add("README.md")
    hub.files["dataset", REPO][REVISION]["README.md"] = b"text"
    api = HfApi(endpoint=hub.url)
    assert api.dataset_info(REPO, revision="main").sha == REVISION
    large, small = api.get_paths_info(REPO, [NAME, "README.md"], revision=REVISION, repo_type="dataset")
    assert (large.size, large.lfs.sha256) == (len(CONTENT), sha256(CONTENT))
    assert (small.size, small.lfs, small.blob_id) == (4, None, git_sha1(b"text"))
    where = {"repo_type": "dataset", "revision": REVISION, "endpoint": hub.url}
    metadata = get_hf_file_metadata(hf_hub_url(REPO, NAME, **where))
    assert (metadata.commit_hash, metadata.etag, metadata.size) == (REVISION, sha256(CONTENT), len(CONTENT))
    assert hf_hub_url(REPO, NAME, **where) == file.url
    assert Path(hf_hub_download(REPO, NAME, local_dir=tmp_path / "library", **where)).read_bytes() == CONTENT


def test_what_is_published_is_learnt_with_one_question(hub, file):
    hub.small.add("config.json")
    hub.files["dataset", REPO][REVISION]["config.json"] = b"{}"
    large = dataclasses.replace(file, sha256=None, size_bytes=None)
    small = dataclasses.replace(large, name="config.json")
    ask_hub([large, small])
    assert (large.sha256, large.size_bytes, large.git_sha1) == (sha256(CONTENT), len(CONTENT), None)
    assert (small.sha256, small.size_bytes, small.git_sha1) == (None, 2, git_sha1(b"{}"))
    assert len(hub.requests) == 1
    with pytest.raises(HubError, match="train-9.parquet: the hub has no such file at this revision"):
        ask_hub([dataclasses.replace(file, name="train-9.parquet")])
    with pytest.raises(HubError, match=f"publishes sha256 {sha256(CONTENT)}, expected {'e' * 64}"):
        ask_hub([dataclasses.replace(file, sha256="e" * 64)])
    with pytest.raises(HubError, match=f"publishes size_bytes {len(CONTENT)}, expected 5"):
        ask_hub([dataclasses.replace(file, size_bytes=5)])
    with pytest.raises(HubError, match="404"):
        ask_hub([dataclasses.replace(file, revision="b" * 40)])


@pytest.mark.parametrize(
    ("answer", "message"),
    [(b"<html>log in to the network", "not JSON"), (b'{"error": 1}', "another form"), (b'[{"type": "file"}]', "form")],
)
def test_an_answer_that_is_no_list_of_files_is_one_line(hub, file, answer, message):
    hub.faults.answer = answer
    with pytest.raises(HubError, match=message) as fault:
        ask_hub([file])
    assert "\n" not in str(fault.value)


# ---------------------------------------------------------------------------- lines that break


def test_a_file_comes_whole(hub, file):
    seen = []
    fetch.fetch(file, seen.append)
    assert is_there(file) and sum(seen) == len(CONTENT)


def test_a_cut_line_goes_on_where_it_was_cut(hub, file):
    """The library begins a file anew in each process; a line that is cut each gigabyte never brought one of five."""
    hub.faults.cuts = [100_000, 7, 1]
    seen = []
    fetch.fetch(file, seen.append)
    assert is_there(file) and sum(seen) == len(CONTENT)
    assert ranges(hub) == [None, "bytes=100000-", "bytes=100007-", "bytes=100008-"]
    assert {request.headers.get("if-range") for request in hub.asked("GET", "cdn")[1:]} == {f'"{sha256(CONTENT)}"'}


def test_a_line_that_brings_something_each_time_is_never_given_up(hub, file):
    """Attempts are counted without progress: 60,000 bytes a time bring any file in the end."""
    hub.faults.cuts = [60_000] * 4
    with pytest.MonkeyPatch.context() as patch:
        impatient(patch, attempts=2)
        fetch.fetch(file)
    assert is_there(file)


SCRIPT = """
import sys
from pathlib import Path
from drafter import fetch
repo, revision, name, path, sha256, size_bytes = sys.argv[1:]
fetch.fetch(fetch.HubFile("dataset", repo, revision, name, Path(path), sha256, int(size_bytes)))
"""


def test_a_killed_process_leaves_a_part_that_the_next_goes_on_with(hub, file, tmp_path):
    """Killed without warning in the middle. The endpoint and the token file are found through the environment alone."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text(SECRET + "\n")
    hub.token = SECRET
    hub.faults.wait_between_chunks_s = 0.2
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", SCRIPT, REPO, REVISION, NAME, str(file.path), file.sha256, str(file.size_bytes)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    end_s = time.monotonic() + 60
    while file.part_bytes < 50_000:
        assert time.monotonic() < end_s and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    have = file.part_bytes
    assert 0 < have < len(CONTENT) and not file.path.exists()

    hub.faults.wait_between_chunks_s = 0.0
    hub.requests.clear()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert is_there(file) and ranges(hub) == [f"bytes={have}-"]
    assert SECRET not in done.stdout + done.stderr


def test_statuses_that_pass_are_waited_for(hub, file, monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(fetch, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    hub.faults.hub_statuses, hub.faults.cdn_statuses = [500, 503], [502, 429, 403]
    fetch.fetch(file)
    assert is_there(file)
    assert waits == [0.001 * 2**failures for failures in range(5)]
    assert "127.0.0.1 answers 503; trying again in" in capsys.readouterr().out


@pytest.mark.parametrize(("asked", "waited_s"), [("7", 7.0), ("99999", 120.0), ("Wed, 21 Oct 2026", 0.001)])
def test_retry_after_is_honoured_within_bounds(hub, file, monkeypatch, asked, waited_s):
    waits = []
    monkeypatch.setattr(fetch, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    hub.faults.hub_statuses, hub.faults.retry_after = [429], asked
    fetch.fetch(file)
    assert waits == [waited_s]


def test_a_hub_that_stays_down_is_given_up_and_says_how_to_go_on(hub, file):
    interrupt(hub, file)
    hub.faults.hub_statuses = [500] * 99
    with pytest.raises(HubError, match=r"answers 500; given up after 6 attempts.*100000 bytes.*run the same command"):
        fetch.fetch(file)
    hub.faults.hub_statuses = []
    fetch.fetch(file)
    assert is_there(file)


def test_nobody_answers(hub, file, monkeypatch):
    with contextlib.closing(fetch_free_port()) as taken:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        for attempt in (lambda: ask_hub([file]), lambda: fetch.fetch(file)):
            with pytest.raises(HubError, match="given up after 6 attempts"):
                attempt()


def fetch_free_port():
    """A port that is bound and does not listen: connections to it are refused."""
    import socket

    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    return taken


def test_a_server_that_falls_silent_is_left_and_asked_again(hub, file, monkeypatch):
    """A silent line hung for ever: the library's client has no time limit of its own."""
    impatient(monkeypatch, read_s=0.2)
    hub.faults.wait_before_body_s = 1.0
    with pytest.raises(HubError, match="does not answer in time"):
        fetch.fetch(file)
    hub.faults.wait_before_body_s = 0.0
    fetch.fetch(file)
    assert is_there(file)


def test_a_server_that_trickles_is_left_too(hub, file, monkeypatch):
    """A byte now and then meets no read limit: such a download took days."""
    impatient(monkeypatch, window_s=0.1, window_bytes=10**9, attempts=2, progress_bytes=10**9)
    hub.faults.wait_between_chunks_s = 0.1
    with pytest.raises(HubError, match=r"bytes in 0\.1 s; given up after 2 attempts"):
        fetch.fetch(file)
    assert 0 < file.part_bytes < len(CONTENT)


# ---------------------------------------------------------------------------- bytes that are not the right ones


def test_wrong_bytes_at_the_right_size_are_deleted_and_both_hashes_shown(hub, file):
    """DL-2: a success was reported for bytes that differ from the published hash at the same size."""
    hub.faults.content[NAME] = OTHER
    with pytest.raises(HubError, match=f"sha256 {sha256(OTHER)}, expected {sha256(CONTENT)}; deleted"):
        fetch.fetch(file)
    assert list(file.path.parent.iterdir()) == []
    hub.faults.content.clear()
    fetch.fetch(file)
    assert is_there(file)


def test_a_spoilt_part_is_found_by_its_hash(hub, file):
    """DL-2 (c): a half-written file that an earlier run left is trusted as little as any other."""
    interrupt(hub, file)
    with open(file.part, "r+b") as part:
        part.write(b"\0")
    with pytest.raises(HubError, match="; deleted"):
        fetch.fetch(file)
    fetch.fetch(file)
    assert is_there(file)


def test_wrong_bytes_of_a_file_in_git_are_found_by_its_git_id(hub, file):
    """Of a small file the hub publishes no sha256: its first download was believed whatever it held."""
    hub.small.add(NAME)
    file.sha256 = None
    ask_hub([file])
    hub.faults.content[NAME] = OTHER
    with pytest.raises(HubError, match=f"git_sha1 {git_sha1(OTHER)}, expected {git_sha1(CONTENT)}"):
        fetch.fetch(file)
    hub.faults.content.clear()
    fetch.fetch(file)
    assert is_there(file) and file.sha256 == sha256(CONTENT)


def test_a_file_of_another_size_is_refused_before_its_bytes(hub, file):
    """A proxy's page was saved as the file."""
    hub.faults.content[NAME] = b"<html>"
    with pytest.raises(HubError, match="size_bytes 6, expected 300000"):
        fetch.fetch(file)
    assert file.part_bytes == 0


def test_more_bytes_than_declared_are_not_stored(hub, file, tmp_path):
    """Without a Content-Length nothing but our count ends a body: it must not fill the disk."""
    file.path.parent.mkdir()
    endless = SimpleNamespace(iter_raw=lambda: iter(lambda: bytes(100_000), None))
    with open(file.part, "ab") as out, pytest.raises(HubError, match="more than size_bytes 300000"):
        fetch._append(file, endless, out, lambda count: None)
    assert file.part_bytes == 0


def test_a_part_that_is_whole_is_only_verified(hub, file):
    file.path.parent.mkdir()
    file.part.write_bytes(CONTENT)
    fetch.fetch(file)
    assert is_there(file) and hub.requests == []


def test_a_part_of_another_revision_is_not_gone_on_with(hub, file):
    interrupt(hub, file)
    hub.add("dataset", REPO, "b" * 40, {NAME: OTHER})
    fetch.fetch(dataclasses.replace(file, revision="b" * 40, sha256=sha256(OTHER)))
    assert is_there(file, OTHER) and ranges(hub) == [None]


# ---------------------------------------------------------------------------- the file changes between two parts


@pytest.mark.parametrize("ignores_if_range", [False, True])
def test_another_etag_begins_anew(hub, file, ignores_if_range):
    """Halves of two files made one. If-Range prevents it; a server that does not know If-Range shows its new ETag."""
    hub.faults.content[NAME], hub.faults.etag = OTHER, '"first"'
    interrupt(hub, file)
    assert read_json(file.part_notes)["etag"] == '"first"'
    hub.faults.content[NAME], hub.faults.etag = CONTENT, '"second"'
    hub.faults.ignores_if_range = ignores_if_range
    seen = []
    fetch.fetch(file, seen.append)
    assert is_there(file) and sum(seen) == len(CONTENT) - 100_000  # the bar had begun with what was there
    assert ranges(hub) == (["bytes=100000-", None] if ignores_if_range else ["bytes=100000-"])


def test_a_server_that_ignores_range_begins_anew(hub, file):
    interrupt(hub, file)
    hub.faults.ignores_range = True
    fetch.fetch(file)
    assert is_there(file) and ranges(hub) == ["bytes=100000-"]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_strong_etag_the_sha256_has_to_tell(hub, file, etag):
    hub.faults.etag = etag
    interrupt(hub, file)
    fetch.fetch(file)
    assert is_there(file) and ranges(hub) == ["bytes=100000-"]
    assert "if-range" not in hub.asked("GET", "cdn")[0].headers


def test_without_etag_and_sha256_a_file_begins_anew(hub, file):
    hub.faults.etag = None
    file.sha256 = None
    interrupt(hub, file)
    fetch.fetch(file)
    assert is_there(file) and ranges(hub) == [None]


def test_a_server_whose_file_is_shorter_than_our_part(hub, file):
    interrupt(hub, file, after_bytes=250_000)
    hub.faults.content[NAME] = CONTENT[:200_000]
    with pytest.raises(HubError, match="size_bytes 200000, expected 300000"):
        fetch.fetch(file)


# ---------------------------------------------------------------------------- all of it together


@pytest.mark.parametrize("seed", range(25))
def test_any_mixture_of_faults_gives_the_file_or_nothing(hub, file, seed):
    """Whatever a network does, NAME is the published bytes or is not there, and a calm line brings it in the end."""
    dice = random.Random(seed)
    for _ in range(6):
        hub.faults = Faults(
            hub_statuses=[dice.choice((500, 429))] * dice.randrange(3),
            cdn_statuses=[dice.choice((403, 503))] * dice.randrange(4),
            cuts=[dice.randrange(200_000) for _ in range(dice.randrange(9))],
            content={NAME: dice.choice((OTHER, CONTENT[:-1], CONTENT))} if dice.random() < 0.5 else {},
            ignores_range=dice.random() < 0.3,
            ignores_if_range=dice.random() < 0.3,
            etag=dice.choice(('"{sha256}"', '"other"', 'W/"weak"', None)),
        )
        try:
            fetch.fetch(file)
        except HubError as fault:
            assert not file.path.exists() and "\n" not in str(fault)
        else:
            assert is_there(file)
            file.path.unlink()
    hub.faults = Faults()
    for attempt in range(2):  # what is left of a mixture may be a spoilt part: found, deleted, fetched anew
        try:
            fetch.fetch(file)
            break
        except HubError as fault:
            assert attempt == 0 and "; deleted" in str(fault)
    assert is_there(file)
