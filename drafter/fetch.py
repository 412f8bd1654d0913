"""Files of the hub by ranged GET: a download goes on where an earlier process stopped, and a file gets its name last.

While it comes, NAME is NAME.part, with the ETag of its bytes in NAME.part.json. The next attempt, or the next process,
asks for the rest with `Range` and `If-Range` (RFC 9110, sections 13.1.5 and 14.2): a server whose file has changed
answers with all of it, and we begin anew. NAME.part is renamed when its sha256 is the expected one and deleted when it
is another. (The hub's library takes a half file over from no earlier process, and asks for metadata with no time
limit: what is used of it is its HTTP client, with the proxy and certificate settings of the environment, its token,
its cache folder and its offline switch.)

HF_ENDPOINT names another hub. A token goes to the hub's own scheme, host and port alone, never to the host that a
redirect names; errors hold no token and no query of an address, where signed links carry theirs.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from drafter.corpus import held_out_token
from drafter.provenance import read_json, sha256_file, write_json

Result = TypeVar("Result")
MAX_REDIRECTS = 5


@dataclass(frozen=True)
class Patience:
    """How long a bad line is borne. Waits are 1, 2, 4, 8, 16 s: about half a minute without progress, then an error."""

    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 120.0  # also of what a server asks for by Retry-After
    connect_s: float = 10.0
    read_s: float = 30.0  # without a single byte
    # A server that sends a byte now and then never meets read_s: it must bring this much in each window.
    window_s: float = 60.0
    window_bytes: int = 100_000
    # An attempt that brought so much counts as progress, and the attempts are counted anew.
    progress_bytes: int = 1_000_000


PATIENCE = Patience()


class HubError(ValueError):
    """The hub does not give the file as declared, or not at all; trying again does not help."""


class _TryAgain(Exception):
    """This attempt failed by what may be different next time."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass
class HubFile:
    """One file of the hub and what is known about it; sha256 and size_bytes are None until the hub tells them."""

    repo_type: str  # "dataset" | "model"
    repo: str
    revision: str
    name: str
    path: Path
    sha256: str | None = None
    size_bytes: int | None = None
    git_sha1: str | None = None  # git's id of a file that is not in LFS: all that the hub publishes of such a one

    @property
    def label(self) -> str:
        return f"{self.repo}@{self.revision}/{self.name}"

    @property
    def url(self) -> str:
        prefix = "datasets/" if self.repo_type == "dataset" else ""
        return f"{endpoint()}/{prefix}{self.repo}/resolve/{self.revision}/{quote(self.name)}"

    @property
    def part(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part")

    @property
    def part_notes(self) -> Path:
        return self.path.with_name(f"{self.path.name}.part.json")

    @property
    def part_bytes(self) -> int:
        """Bytes that an interrupted download left."""
        return self.part.stat().st_size if self.part.exists() else 0

    def check_name(self) -> None:
        """ValueError for a held-out split, a name that leaves the folder, or a revision that can move."""
        if self.repo_type == "dataset" and (token := held_out_token(self.name)):
            raise ValueError(f"{self.repo}: {self.name} names a held-out split ({token!r}); no step opens it")
        if any(part in ("", ".", "..") for part in self.name.split("/")) or "\\" in self.name:
            raise ValueError(f"{self.repo}: {self.name!r} is no name of a file inside a repository")
        if not re.fullmatch("[0-9a-f]{40}", self.revision):
            raise ValueError(f"{self.repo}: {self.revision!r} can move; name a commit by its 40 hex digits")


# ---------------------------------------------------------------------------- the hub, its token, one request


def endpoint() -> str:
    from huggingface_hub import constants

    return (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")


def _token() -> str | None:
    """HF_TOKEN, else the token file of HF_HOME; None where HF_HUB_DISABLE_IMPLICIT_TOKEN is set."""
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _is_hub(url: str) -> bool:
    return _origin(url) == _origin(endpoint())


def _safe(text: object) -> str:
    """A text for people: one line, no query of an address, no token."""
    line = re.sub(r"(\w://[^\s?#'\"]*)[?#][^\s'\"]*", r"\1", " ".join(str(text).split()))
    line = re.sub(r"(\w://)[^\s/@]*@", r"\1", line)
    token = _token()
    return line.replace(token, "(token)") if token else line


@contextlib.contextmanager
def _request(method: str, url: str, headers: dict[str, str], **body: Any) -> Iterator[Any]:
    """One streamed request, redirects not followed. Raises _TryAgain for what a network does, HubError for the rest."""
    import httpx2
    from huggingface_hub import get_session

    if _is_hub(url) and (token := _token()):
        headers = {**headers, "authorization": f"Bearer {token}"}
    limits = httpx2.Timeout(PATIENCE.read_s, connect=PATIENCE.connect_s)
    try:
        with get_session().stream(method, url, headers=headers, timeout=limits, follow_redirects=False, **body) as got:
            yield got
    except httpx2.TimeoutException as error:
        raise _TryAgain(f"{urlsplit(url).hostname} does not answer in time ({type(error).__name__})") from None
    except (httpx2.NetworkError, httpx2.RemoteProtocolError, httpx2.ProxyError) as error:
        raise _TryAgain(f"{urlsplit(url).hostname}: {_safe(error) or type(error).__name__}") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError) as error:
        raise HubError(f"{_safe(url)}: {_safe(error)}") from None


def _check_status(response: Any, url: str, label: str) -> None:
    """Sorts what is no success into what another attempt can change and what it cannot."""
    status, host = response.status_code, urlsplit(url).hostname
    if status < 400:
        return
    if status in (408, 425, 429) or status >= 500 or (status == 403 and not _is_hub(url)):  # 403: a link that expired
        asked = response.headers.get("retry-after", "")
        raise _TryAgain(f"{host} answers {status}", float(asked) if asked.isdigit() else 0.0)
    if status in (401, 403):
        raise HubError(
            f"{label}: {host} refuses it ({status}): it does not exist there, or it needs HF_TOKEN with a token that "
            "may read it, of somebody who has accepted the terms on its page"
        )
    if status == 404:
        raise HubError(f"{label}: the hub has no such file at this revision (404)")
    raise HubError(f"{label}: {host} answers {status}")


def _patiently(label: str, attempt: Callable[[], Result], have_bytes: Callable[[], int] = lambda: 0) -> Result:
    """`attempt` until it returns; HubError after PATIENCE.attempts in a row that brought nothing to speak of."""
    failures = 0
    while True:
        before = have_bytes()
        try:
            return attempt()
        except _TryAgain as fault:
            failures = 1 if have_bytes() - before >= PATIENCE.progress_bytes else failures + 1
            if failures >= PATIENCE.attempts:
                kept = f"{have_bytes()} bytes have come and are kept; " if have_bytes() else ""
                raise HubError(
                    f"{label}: {fault}; given up after {failures} attempts; {kept}run the same command again to go on"
                ) from None
            wait_s = max(fault.wait_s, PATIENCE.first_wait_s * 2 ** (failures - 1))
            wait_s = min(wait_s, PATIENCE.longest_wait_s)
            print(f"{label}: {fault}; trying again in {wait_s:g} s", flush=True)
            time.sleep(wait_s)


# ---------------------------------------------------------------------------- what the hub publishes


def ask_hub(files: list[HubFile]) -> None:
    """Fills in sha256, size and git id as published; HubError where they contradict what is known.

    One question for each repository and revision. The sha256 is published of LFS files only.
    """
    groups: dict[tuple[str, str, str], list[HubFile]] = {}
    for file in files:
        file.check_name()
        groups.setdefault((file.repo_type, file.repo, file.revision), []).append(file)
    for (repo_type, repo, revision), members in groups.items():
        published = _paths_info(repo_type, repo, revision, [file.name for file in members])
        for file in members:
            if file.name not in published:
                raise HubError(f"{file.label}: the hub has no such file at this revision")
            for field, value in published[file.name].items():
                expected = getattr(file, field)
                if expected is not None and value is not None and value != expected:
                    raise HubError(f"{file.label}: the hub publishes {field} {value}, expected {expected}")
                setattr(file, field, value if value is not None else expected)


def _paths_info(repo_type: str, repo: str, revision: str, names: list[str]) -> dict[str, dict]:
    """{name: {"size_bytes", "sha256", "git_sha1"}} at this revision, as HfApi.get_paths_info asks for it."""
    label, url = f"{repo}@{revision}", f"{endpoint()}/api/{repo_type}s/{repo}/paths-info/{revision}"

    def attempt() -> list[dict]:
        with _request("POST", url, {}, data={"paths": names, "expand": False}) as response:
            _check_status(response, url, label)
            response.read()
            if response.status_code != 200:
                raise HubError(f"{label}: the hub answers {response.status_code} where a list of files is expected")
            try:
                return response.json()
            except ValueError:
                raise HubError(f"{label}: the hub's answer is not JSON; does a proxy stand in between?") from None

    try:
        return {
            entry["path"]: {
                "size_bytes": entry["size"],
                "sha256": entry["lfs"]["oid"] if entry.get("lfs") else None,
                "git_sha1": None if entry.get("lfs") else entry["oid"],
            }
            for entry in _patiently(label, attempt)
            if entry["type"] == "file"
        }
    except (KeyError, TypeError):
        raise HubError(f"{label}: the hub's list of files has another form than expected") from None


# ---------------------------------------------------------------------------- one file


def fetch(file: HubFile, advance: Callable[[int], object] = lambda count: None) -> None:
    """Makes file.path hold the file, verified; its size must be known. `advance` is told the bytes that came.

    HubError when other bytes come than expected (they are deleted) or nothing comes any more (what came is kept).
    """
    file.check_name()
    assert file.size_bytes is not None, file.label
    file.path.parent.mkdir(parents=True, exist_ok=True)
    with _open_part(file) as out:
        if out.seek(0, os.SEEK_END) > file.size_bytes or _notes(file).get("label", file.label) != file.label:
            advance(-out.tell())
            out.truncate(0)
        if file.part_bytes < file.size_bytes:
            _patiently(file.label, lambda: _fetch_rest(file, out, advance), lambda: file.part_bytes)
        _accept_part(file)


@contextlib.contextmanager
def _open_part(file: HubFile) -> Iterator[BinaryIO]:
    """NAME.part, for this process alone: two that append to one file would spoil it for both."""
    with open(file.part, "ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{file.label}: another process is fetching it ({file.part} is locked)") from None
        # Another process may have finished between our open and our lock: `out` is then its finished file.
        if not file.part.exists() or os.fstat(out.fileno()).st_ino != file.part.stat().st_ino:
            raise ValueError(f"{file.label}: another process has just fetched it; run the same command again")
        yield out


def _notes(file: HubFile) -> dict:
    return read_json(file.part_notes) if file.part_notes.exists() else {}


def _fetch_rest(file: HubFile, out: BinaryIO, advance: Callable[[int], object]) -> None:
    """One attempt: append what is missing to `out`, or begin anew where the server has it so."""
    etag = _notes(file).get("etag")
    have = out.seek(0, os.SEEK_END)
    if have and not etag and not file.sha256:  # nothing would tell whether the rest belongs to what is there
        advance(-have)
        have = out.truncate(0)
    headers = {"accept-encoding": "identity"}
    if have:
        headers["range"] = f"bytes={have}-"
        headers |= {"if-range": etag} if etag else {}  # without one, the sha256 at the end has to tell
    try:
        with _follow(file, headers) as response:
            begins_at = _begin_of(file, response, have)
            sent_etag = response.headers.get("etag", "")
            sent_etag = None if sent_etag.startswith("W/") else sent_etag or None  # a weak one compares no bytes
            if begins_at != have or (have and etag and sent_etag not in (None, etag)):
                advance(-have)
                out.truncate(0)
                if begins_at:
                    raise _TryAgain("the file has changed between two parts")
            if not out.seek(0, os.SEEK_END):
                write_json(file.part_notes, {"label": file.label, "etag": sent_etag})
            _append(file, response, out, advance)
    finally:
        out.flush()


@contextlib.contextmanager
def _follow(file: HubFile, headers: dict[str, str]) -> Iterator[Any]:
    """The response that bears the bytes. Of redirects, each hop gets the token only if it is the hub itself."""
    url = file.url
    for _ in range(MAX_REDIRECTS):
        with _request("GET", url, headers) as response:
            if _is_hub(url):
                _check_metadata(file, response.headers)
            if response.status_code not in (301, 302, 303, 307, 308):
                if response.status_code != 416:
                    _check_status(response, url, file.label)
                yield response
                return
            try:
                target = urljoin(url, response.headers.get("location", ""))
                scheme = urlsplit(target).scheme
            except ValueError:
                raise HubError(f"{file.label}: {_safe(url)} redirects to what is no address") from None
            if scheme not in ("https", urlsplit(url).scheme):
                raise HubError(f"{file.label}: {_safe(url)} leads away from https, to {_safe(target)}")
            url = target
    raise HubError(f"{file.label}: more than {MAX_REDIRECTS} redirects")


def _check_metadata(file: HubFile, headers: Any) -> None:
    """What the hub says of a file before it sends it, against what is known: no byte of another file is fetched."""
    linked = headers.get("x-linked-etag", "").strip('"')
    told = {
        "revision": headers.get("x-repo-commit"),
        "sha256": linked if re.fullmatch("[0-9a-f]{64}", linked) else None,
        "size_bytes": int(headers["x-linked-size"]) if headers.get("x-linked-size", "").isdigit() else None,
    }
    for field, value in told.items():
        expected = getattr(file, field)
        if None not in (value, expected) and value != expected:
            raise HubError(f"{file.label}: the hub would send {field} {value}, expected {expected}")


def _begin_of(file: HubFile, response: Any, have: int) -> int:
    """The offset of the first byte of this response; HubError when it belongs to a file of another size."""
    begins_at, total = 0, response.headers.get("content-length", "*")
    if response.status_code == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", "").strip())
        if found is None:
            raise HubError(f"{file.label}: a part without a usable Content-Range")
        begins_at, total = int(found[1]), found[2]
    elif response.status_code == 416:  # the server's file is shorter than our part
        return have + 1
    elif response.status_code != 200:
        raise HubError(f"{file.label}: {response.status_code} where the file is expected")
    if total.isdigit() and int(total) != file.size_bytes:
        raise HubError(f"{file.label}: the server sends size_bytes {total}, expected {file.size_bytes}")
    return begins_at


def _append(file: HubFile, response: Any, out: BinaryIO, advance: Callable[[int], object]) -> None:
    have = out.seek(0, os.SEEK_END)
    window_end_s, window_bytes = time.monotonic() + PATIENCE.window_s, 0
    for chunk in response.iter_raw():  # as they arrive: what stands in no buffer is not lost when the line is cut
        have += len(chunk)
        if have > file.size_bytes:
            out.truncate(0)
            raise HubError(f"{file.label}: the server sends more than size_bytes {file.size_bytes}; deleted")
        out.write(chunk)
        advance(len(chunk))
        window_bytes += len(chunk)
        if time.monotonic() > window_end_s:
            if window_bytes < PATIENCE.window_bytes:
                raise _TryAgain(f"{window_bytes} bytes in {PATIENCE.window_s:g} s")
            window_end_s, window_bytes = time.monotonic() + PATIENCE.window_s, 0
    if have < file.size_bytes:
        raise _TryAgain(f"the line was cut after {have} of {file.size_bytes} bytes")


def _accept_part(file: HubFile) -> None:
    """NAME.part -> NAME if its bytes are the expected ones, else HubError and it is deleted."""
    try:
        _check_bytes(file, file.part)
    except HubError as fault:
        file.part.unlink()
        file.part_notes.unlink(missing_ok=True)
        raise HubError(f"{file.label}: fetched bytes have {fault}; deleted, nothing of them is used") from None
    with open(file.part, "rb") as done:
        os.fsync(done.fileno())  # a name that survives a power cut must not stand for bytes that did not
    os.replace(file.part, file.path)
    file.part_notes.unlink(missing_ok=True)


def _check_bytes(file: HubFile, path: Path) -> None:
    """HubError with both values where the bytes are not the expected ones; fills in what was not known."""
    actual = {"size_bytes": path.stat().st_size, "sha256": sha256_file(path)}
    if file.git_sha1 is not None:
        actual["git_sha1"] = git_blob_sha1(path)
    for field, value in actual.items():
        expected = getattr(file, field)
        if expected is not None and value != expected:
            raise HubError(f"{field} {value}, expected {expected}")
    file.sha256, file.size_bytes = actual["sha256"], actual["size_bytes"]  # only now that all of them agree


def git_blob_sha1(path: Path) -> str:
    """Git's id of a file: sha1 over "blob SIZE" and a zero byte, then the content."""
    content = path.read_bytes()  # only of files that are not in LFS: they are small
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


# ---------------------------------------------------------------------------- the library's cache on this machine


def take_from_cache(file: HubFile) -> bool:
    """Takes the file from the library's own cache (HF_HOME, HF_HUB_CACHE) where it lies there at this very revision,
    with the known sha256. A file of another revision, or whose sha256 is not known, is never taken."""
    from huggingface_hub import try_to_load_from_cache

    file.check_name()
    found = try_to_load_from_cache(file.repo, file.name, revision=file.revision, repo_type=file.repo_type)
    if not isinstance(found, str) or file.sha256 is None:
        return False
    file.path.parent.mkdir(parents=True, exist_ok=True)
    # Not by way of NAME.part, which is appended to and cut: a second name of the cache's own bytes must never be.
    taken = file.path.with_name(f".{file.path.name}.cached")
    taken.unlink(missing_ok=True)
    try:
        os.link(Path(found).resolve(), taken)  # a copy would cost the disk twice
    except OSError:
        shutil.copyfile(found, taken)
    try:
        _check_bytes(file, taken)
    except HubError as fault:
        taken.unlink()
        print(f"{file.label}: the copy in the hub library's cache has {fault}; not taken")
        return False
    os.replace(taken, file.path)
    return True
