"""A small stand-in of the hub on loopback, with the faults that a network has.

Two servers, as with the real one: the hub itself (revision info, paths info, HEAD and GET of files) and a "CDN" on
another port, to which the hub redirects for LFS files by a signed link. Faults are attributes, to be set by a test.
"""

import contextlib
import dataclasses
import hashlib
import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from drafter import fetch
from drafter.fetch import HubError, HubFile

CHUNK_BYTES = 16 * 1024
SIGNATURE = "X-Amz-Signature=5ec4e7"  # in the query of every link to the CDN: whoever has it can read the file


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Faults:
    hub_statuses: list[int] = field(default_factory=list)  # the hub's next answers
    cdn_statuses: list[int] = field(default_factory=list)  # the CDN's
    retry_after: str | None = None  # sent along with those
    cuts: list[int] = field(default_factory=list)  # the next bodies are cut after so many bytes
    content: dict[str, bytes] = field(default_factory=dict)  # name -> what is sent instead (metadata as before)
    published: dict[str, str] = field(default_factory=dict)  # name -> sha256 in the metadata
    commit: str | None = None  # X-Repo-Commit instead of the right one
    ignores_range: bool = False
    ignores_if_range: bool = False
    etag: str | None = '"{sha256}"'  # the CDN's; None: it sends none
    wait_before_body_s: float = 0.0
    wait_between_chunks_s: float = 0.0
    redirect_to: str | None = None  # where the hub sends for LFS files, instead of the CDN
    answer: bytes | None = None  # of paths-info, instead of the right one


@dataclass
class StubHub:
    """files[(repo type, repo)][revision][name] is a content; a name in `small` is kept in git, not in LFS."""

    files: dict = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)  # name -> revision
    small: set[str] = field(default_factory=set)
    token: str | None = None  # without it the hub answers 401
    faults: Faults = field(default_factory=Faults)
    requests: list = field(default_factory=list)  # .server, .method, .path, .headers (lower case)
    url: str = ""
    cdn_url: str = ""

    def add(self, repo_type: str, repo: str, revision: str, files: dict[str, bytes]) -> None:
        self.files.setdefault((repo_type, repo), {})[revision] = dict(files)

    def asked(self, method: str = "GET", server: str | None = None) -> list:
        return [r for r in self.requests if r.method == method and server in (None, r.server)]

    def find(self, repo_type: str, repo: str, revision: str) -> tuple[str, dict] | None:
        revisions = self.files.get((repo_type, repo), {})
        revision = self.branches.get(revision, revision)
        return (revision, revisions[revision]) if revision in revisions else None

    def by_sha256(self, wanted: str) -> tuple[str, bytes] | None:
        for revisions in self.files.values():
            for files in revisions.values():
                for name, content in files.items():
                    if sha256(content) == wanted:
                        return name, content
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: StubHub
    kind: str  # "hub" | "cdn"

    def log_message(self, *arguments):
        pass

    def _note(self) -> list[int]:
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = SimpleNamespace(server=self.kind, method=self.command, path=self.path, headers=headers)
        self.stub.requests.append(seen)
        faults = self.stub.faults
        return faults.hub_statuses if self.kind == "hub" else faults.cdn_statuses

    def _send(self, status: int, body: bytes = b"", **headers: str | None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _fails(self) -> bool:
        """Whether a scripted status was the answer, or the token is not the right one."""
        statuses = self._note()
        if statuses:
            self._send(statuses.pop(0), b"scripted", Retry_After=self.stub.faults.retry_after)
            return True
        if self.kind == "hub" and self.stub.token and self.headers.get("authorization") != f"Bearer {self.stub.token}":
            self._send(401, b"no access", X_Error_Code="GatedRepo")
            return True
        return False

    # ---- the hub

    def do_POST(self):
        body = parse_qs(self.rfile.read(int(self.headers.get("content-length", 0))).decode())
        if self._fails():
            return
        match = re.fullmatch(r"/api/(dataset|model)s/([^/]+/[^/]+)/paths-info/([^/]+)", urlsplit(self.path).path)
        found = match and self.stub.find(match[1], match[2], unquote(match[3]))
        if not found:
            self._send(404, b"{}", X_Error_Code="RevisionNotFound")
            return
        infos = [self._info(name, found[1][name]) for name in body.get("paths", []) if name in found[1]]
        answer = self.stub.faults.answer
        self._send(200, json.dumps(infos).encode() if answer is None else answer, Content_Type="application/json")

    def _info(self, name: str, content: bytes) -> dict:
        info = {"type": "file", "path": name, "size": len(content), "oid": git_sha1(content)}
        if name not in self.stub.small:
            oid = self.stub.faults.published.get(name, sha256(content))
            info["lfs"] = {"oid": oid, "size": len(content), "pointerSize": 130}
            info["oid"] = git_sha1(b"version https://git-lfs.github.com/spec/v1")  # that of the pointer
        return info

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        if self._fails():
            return
        path = urlsplit(self.path).path
        if self.kind == "cdn":
            self._cdn(path)
        elif match := re.fullmatch(r"/api/(dataset|model)s/([^/]+/[^/]+)/revision/([^/]+)", path):
            found = self.stub.find(match[1], match[2], unquote(match[3]))
            body = json.dumps({"id": match[2], "sha": found[0], "siblings": []}).encode() if found else b"{}"
            self._send(200 if found else 404, body, Content_Type="application/json")
        elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve("dataset" if match[1] else "model", match[2], unquote(match[3]), unquote(match[4]))
        else:
            self._send(404)

    def _resolve(self, repo_type: str, repo: str, revision: str, name: str) -> None:
        found = self.stub.find(repo_type, repo, revision)
        if not found or name not in found[1]:
            self._send(404, X_Error_Code="EntryNotFound" if found else "RevisionNotFound")
            return
        content, faults = found[1][name], self.stub.faults
        headers = {"X_Repo_Commit": faults.commit or found[0]}
        if name in self.stub.small:
            self._send_body(faults.content.get(name, content), f'"{git_sha1(content)}"', headers)
            return
        headers |= {
            "X_Linked_Etag": f'"{faults.published.get(name, sha256(content))}"',
            "X_Linked_Size": str(len(content)),
            "ETag": f'"{git_sha1(content)}"',
            "Location": faults.redirect_to or f"{self.stub.cdn_url}/{sha256(content)}?{SIGNATURE}",
        }
        self._send(302, **headers)

    # ---- the CDN

    def _cdn(self, path: str) -> None:
        found = self.stub.by_sha256(path.lstrip("/"))
        if not found or SIGNATURE not in self.path:
            self._send(404 if not found else 403)
            return
        name, content = found
        content = self.stub.faults.content.get(name, content)
        etag = self.stub.faults.etag and self.stub.faults.etag.format(sha256=path.lstrip("/"))
        self._send_body(content, etag, {})

    def _send_body(self, content: bytes, etag: str | None, headers: dict) -> None:
        faults, begin = self.stub.faults, 0
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        same = self.headers.get("if-range") in (None, etag) or faults.ignores_if_range
        if wanted and same and not faults.ignores_range:
            begin = int(wanted[1])
            if begin >= len(content):
                self._send(416, Content_Range=f"bytes */{len(content)}")
                return
        self.send_response(206 if begin else 200)
        headers = headers | {"ETag": etag, "Accept_Ranges": "bytes", "Content_Length": str(len(content) - begin)}
        if begin:
            headers["Content_Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        for header, value in headers.items():
            if value is not None:
                self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        time.sleep(faults.wait_before_body_s)
        body = content[begin:]
        cut = faults.cuts.pop(0) if faults.cuts else None
        with contextlib.suppress(OSError):  # a client that has given up
            for at in range(0, len(body) if cut is None else cut, CHUNK_BYTES):
                self.wfile.write(body[at : at + CHUNK_BYTES if cut is None else min(cut, at + CHUNK_BYTES)])
                time.sleep(faults.wait_between_chunks_s)
        if cut is not None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, address):
        pass  # a client that is gone


@contextlib.contextmanager
def running_hub() -> Iterator[StubHub]:
    """A hub and its CDN on free ports of the loopback."""
    stub = StubHub()
    servers = []
    for kind in ("hub", "cdn"):
        handler = type(f"{kind.title()}Handler", (_Handler,), {"stub": stub, "kind": kind})
        servers.append(_Quiet(("127.0.0.1", 0), handler))
    stub.url, stub.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield stub
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join(10)


# ---------------------------------------------------------------------------- one file, for test_fetch*.py

REPO, REVISION, NAME = "openai/gsm8k", "a" * 40, "main/train-0.parquet"
CONTENT = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(300_000)
SECRET = "hf_" + "s3cr3tToken" * 3


def one_file(hub: StubHub, folder: Path) -> HubFile:
    """The one file of the hub, its hash and size known."""
    hub.add("dataset", REPO, REVISION, {NAME: CONTENT})
    return HubFile("dataset", REPO, REVISION, NAME, folder / "train-0.parquet", sha256(CONTENT), len(CONTENT))


def is_there(file: HubFile, content=CONTENT) -> bool:
    """The file with its bytes, and nothing beside it."""
    return file.path.read_bytes() == content and [path.name for path in file.path.parent.iterdir()] == [file.path.name]


def ranges(hub: StubHub) -> list[str | None]:
    return [request.headers.get("range") for request in hub.asked("GET", "cdn")]


def interrupt(hub: StubHub, file: HubFile, after_bytes=100_000) -> None:
    """A download that ends for good after so many bytes, as when its process ends."""
    hub.faults.cuts = [after_bytes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "PATIENCE", dataclasses.replace(fetch.PATIENCE, attempts=1))
        with pytest.raises(HubError, match="run the same command again to go on"):
            fetch.fetch(file)
    assert file.part_bytes == after_bytes and not file.path.exists()
    hub.requests.clear()
