"""drafter/fetch.py: which file, at which revision, from whom, and who gets to see a token."""

import contextlib
import dataclasses
import fcntl
from pathlib import Path
from types import SimpleNamespace

import pytest
from stub_hub import CONTENT, NAME, OTHER, REPO, REVISION, SECRET, SIGNATURE, interrupt, is_there, one_file, sha256

from drafter import fetch
from drafter.fetch import HubError, HubFile, ask_hub, take_from_cache


@pytest.fixture
def file(hub, tmp_path) -> HubFile:
    return one_file(hub, tmp_path / "got")


# ---------------------------------------------------------------------------- the revision


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"commit": "c" * 40}, f"revision {'c' * 40}, expected {REVISION}"),
        ({"published": {NAME: "d" * 64}}, f"sha256 {'d' * 64}, expected {sha256(CONTENT)}"),
    ],
)
def test_metadata_that_contradicts_is_refused_before_a_byte(hub, file, fault, message):
    for name, value in fault.items():
        setattr(hub.faults, name, value)
    with pytest.raises(HubError, match=message):
        fetch.fetch(file)
    assert hub.asked("GET", "cdn") == [] and file.part_bytes == 0


def test_a_branch_that_moves_changes_nothing(hub, file):
    """Each request names the commit; between two requests a branch may go anywhere."""
    hub.branches["main"] = REVISION
    interrupt(hub, file)
    hub.add("dataset", REPO, "b" * 40, {NAME: OTHER})
    hub.branches["main"] = "b" * 40
    ask_hub([file])
    fetch.fetch(file)
    assert is_there(file)
    assert all(REVISION in request.path for request in hub.requests if request.server == "hub")
    for revision in ("main", "a" * 39, "refs/convert/parquet"):
        with pytest.raises(ValueError, match="can move; name a commit by its 40 hex digits"):
            fetch.fetch(dataclasses.replace(file, revision=revision))


@pytest.mark.parametrize(
    "name", ["main/test-0.parquet", "data/Validation-0.parquet", "eval/train.parquet", "dev.jsonl", "x/valid_1.parquet"]
)
def test_a_held_out_split_is_never_asked_for(hub, file, name):
    hub.add("dataset", REPO, REVISION, {name: CONTENT})
    held_out = dataclasses.replace(file, name=name)
    for attempt in (fetch.fetch, take_from_cache, lambda file: ask_hub([file])):
        with pytest.raises(ValueError, match="held-out split"):
            attempt(held_out)
    assert hub.requests == [] and not file.path.parent.exists()


@pytest.mark.parametrize("name", ["../train.parquet", "/etc/train", "data//train.parquet", "..\\train"])
def test_a_name_that_leaves_its_folder_is_refused(hub, file, name):
    with pytest.raises(ValueError, match="no name of a file inside a repository"):
        fetch.fetch(dataclasses.replace(file, name=name))


# ---------------------------------------------------------------------------- tokens


def test_a_token_goes_to_the_hub_and_never_to_the_cdn(hub, file, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.token = SECRET
    hub.faults.cuts, hub.faults.hub_statuses = [1000], [500]
    ask_hub([file])
    fetch.fetch(file)
    sent = {server: {request.headers.get("authorization") for request in hub.requests if request.server == server}
            for server in ("hub", "cdn")}  # fmt: skip
    assert sent == {"hub": {f"Bearer {SECRET}"}, "cdn": {None}}
    assert SECRET not in "".join(capsys.readouterr())


def test_no_token_is_sent_where_the_library_would_send_none(hub, file, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    fetch.fetch(file)
    assert {request.headers.get("authorization") for request in hub.requests} == {None}


def test_errors_hold_no_token_and_no_signature(hub, file, monkeypatch, capsys):
    """An error that quotes the address of a signed link gives the file to whoever reads the log."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    for faults in (
        {"redirect_to": f"{hub.cdn_url}/{SECRET}?{SIGNATURE}"},  # 404
        {"redirect_to": f"https://127.0.0.1:1/{SECRET}?{SIGNATURE}"},  # refused
        {"redirect_to": f"http://[{SECRET}?{SIGNATURE}"},  # no address at all
        {"redirect_to": f"gopher://host/{SECRET}?{SIGNATURE}"},
        {"cdn_statuses": [418]},
        {"cdn_statuses": [403] * 99},
        {"hub_statuses": [401]},
    ):
        hub.faults.__init__(**faults)
        with pytest.raises(ValueError) as fault:
            fetch.fetch(file)
        text = str(fault.value) + "".join(capsys.readouterr())
        assert SECRET not in text and "5ec4e7" not in text and "\n" not in str(fault.value)
        assert fault.value.__suppress_context__ or fault.value.__context__ is None


def test_a_refusal_names_what_helps(hub, file):
    hub.token = SECRET
    with pytest.raises(HubError, match=r"refuses it \(401\).*HF_TOKEN"):
        fetch.fetch(file)


def test_a_redirect_never_leaves_https(hub, file, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")

    @contextlib.contextmanager
    def leads_away(method, url, headers, **body):
        yield SimpleNamespace(status_code=302, headers={"location": "http://hub.example/x?secret"})

    monkeypatch.setattr(fetch, "_request", leads_away)
    with pytest.raises(HubError, match="leads away from https, to http://hub.example/x$"):
        fetch.fetch(file)


def test_a_circle_of_redirects_ends(hub, file):
    hub.faults.redirect_to = file.url
    with pytest.raises(HubError, match="more than 5 redirects"):
        fetch.fetch(file)


def test_the_librarys_offline_switch_holds(hub, file, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="offline mode is enabled"):
        fetch.fetch(file)
    assert hub.requests == []


# ---------------------------------------------------------------------------- other processes, the library's cache


def test_two_processes_do_not_write_one_part(hub, file):
    file.path.parent.mkdir()
    with open(file.part, "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is fetching it"):
            fetch.fetch(file)
    fetch.fetch(file)
    assert is_there(file)


def cached(hub, revision: str, tmp_path) -> Path:
    """The file in the library's own cache, put there by the library."""
    from huggingface_hub import hf_hub_download

    hf_hub_download(REPO, NAME, repo_type="dataset", revision=revision, endpoint=hub.url)
    hub.requests.clear()
    [blob] = (path for path in (tmp_path / "hf_home/hub").rglob("blobs/*") if path.is_file())
    return blob


def test_the_librarys_cache_serves_the_same_revision_alone(hub, file, tmp_path):
    """DL-1: the newest copy of the cache was taken, although another revision was asked for."""
    hub.add("dataset", REPO, "b" * 40, {NAME: CONTENT})
    cached(hub, "b" * 40, tmp_path)
    assert not take_from_cache(file) and not file.path.exists()
    other = dataclasses.replace(file, revision="b" * 40)
    assert not take_from_cache(dataclasses.replace(other, sha256=None)), "nothing says that these bytes are right"
    assert take_from_cache(other) and is_there(file)
    assert hub.requests == []


def test_the_librarys_cache_is_checked_and_left_alone(hub, file, tmp_path, capsys):
    blob = cached(hub, REVISION, tmp_path)
    blob.write_bytes(OTHER)
    assert not take_from_cache(file) and list(file.path.parent.iterdir()) == []
    assert f"sha256 {sha256(OTHER)}, expected {sha256(CONTENT)}; not taken" in capsys.readouterr().out
    fetch.fetch(file)
    assert is_there(file) and blob.read_bytes() == OTHER
