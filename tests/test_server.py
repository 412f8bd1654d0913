"""POST /draft over a scripted engine: requests, limits, queue, life and end of the process."""

import asyncio
import contextlib
import functools
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest
import uvicorn
from starlette.testclient import TestClient

import server
from drafter.batching import Batcher, DeadlinePassed
from drafter.wire import FIELDS, ApiError, HttpProtocol, parse_call
from server import Server, Settings, create_app

HANG_S = 30  # far beyond what anything here takes; only a hang meets it
CONTEXT = 64
NUM_IDS = 1000


def expected(tokens, k=16):
    """What the scripted engine drafts: a function of the tokens alone."""
    return [(sum(tokens) + 7 * step) % NUM_IDS for step in range(k)]


class StubEngine:
    """Scripted drafts. Id 666 makes its batch fail; `gate` holds every batch back until it is set."""

    archive_id, context, num_ids = "a" * 64, CONTEXT, NUM_IDS
    example_tokens = (1, 2, 3)

    def __init__(self, delay_s=0.0, gated=False):
        self.delay_s = delay_s
        self.info = {"archive_id": self.archive_id, "context": CONTEXT, "num_ids": NUM_IDS}
        self.batches, self.warmed = [], []
        self.gate, self.begun = threading.Event(), threading.Event()
        if not gated:
            self.gate.set()

    def warm_up(self, batch_size):
        self.warmed.append(batch_size)

    def draft(self, requests):
        self.batches.append([request.tokens for request in requests])
        self.begun.set()
        assert self.gate.wait(HANG_S)
        time.sleep(self.delay_s)
        if any(666 in request.tokens for request in requests):
            raise RuntimeError("scripted failure")
        timings = {"prefill_ms": 1.0, "draft_ms": 2.0, "cached_tokens": 0, "batch_size": len(requests)}
        return [
            SimpleNamespace(tokens=expected(r.tokens, r.k), finish_reason="length", timings=timings) for r in requests
        ]


def wait_until(condition):
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, "hangs"
        time.sleep(0.005)


@pytest.fixture
def engine():
    return StubEngine()


@pytest.fixture
def client(engine):
    app = create_app(engine_loader=lambda: engine, settings=Settings(max_batch_size=4, queue_limit=8))
    with TestClient(app, raise_server_exceptions=False) as client:
        wait_until(lambda: app.state.batcher.state == "ready")
        yield client


@contextlib.contextmanager
def running(engine_loader, **settings):
    """The real server on a free port of the loopback; gives the port and the batcher."""
    settings = Settings(**{"max_batch_size": 4, "queue_limit": 64, **settings})
    app = create_app(engine_loader=engine_loader, settings=settings)
    config = uvicorn.Config(
        app, port=0, ws="none", lifespan="on", log_level="error", access_log=False, timeout_graceful_shutdown=1,
        http=functools.partial(HttpProtocol, head_timeout_s=settings.read_timeout_s),
    )  # fmt: skip
    served = Server(config, app.state.batcher, drain_s=1)
    served.said_ready = True
    thread = threading.Thread(target=served.run)
    thread.start()
    wait_until(lambda: served.started)
    try:
        yield served.servers[0].sockets[0].getsockname()[1], app.state.batcher
    finally:
        served.should_exit = True
        served.drain_until_s = 0
        thread.join(HANG_S)
        assert not thread.is_alive()


def call(port, method="POST", path="/draft", body=None, timeout_s=HANG_S):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, json.loads(response.read()), response.headers


def assert_error(document, kind=None):
    assert set(document) == {"error"} and {"type", "message"} <= set(document["error"]) <= {"type", "message", "index"}
    assert len(json.dumps(document)) < 4096
    assert kind is None or document["error"]["type"] == kind


# ---------------------------------------------------------------------------- requests


def test_a_draft_and_its_fields(client):
    response = client.post("/draft", json={"tokens": [1, 2, 3]})
    assert response.status_code == 200
    document = response.json()
    assert set(document) == {"draft", "finish_reason", "model", "timings"}
    assert document["draft"] == expected([1, 2, 3]) and document["model"] == "a" * 64
    assert set(document["timings"]) == {"queue_ms", "prefill_ms", "draft_ms", "cached_tokens", "batch_size"}
    full = {"tokens": [5], "num_draft_tokens": 3, "session": "s", "accepted": 2, "sources": True}
    document = client.post("/draft", json=full).json()
    assert document["draft"] == expected([5], 3) and document["sources"] == ["model"] * 3


REFUSED = [
    '{"tokens":[true]}', '{"tokens":[1.0]}', '{"tokens":[1e2]}', '{"tokens":["5"]}', '{"tokens":[null]}',
    '{"tokens":[[1]]}', '{"tokens":"12"}', '{"tokens":{"0":1}}', "{}", "[]", '{"tokens":[]}', '{"tokens":null}',
    '{"tokens":[-1]}', '{"tokens":[1000]}', '{"tokens":[1],"extra":1}', '{"tokens":[1],"num_draft_tokens":0}',
    '{"tokens":[1],"num_draft_tokens":65}', '{"tokens":[1],"num_draft_tokens":true}', '{"tokens":[1],"session":7}',
    '{"tokens":[1],"num_draft_tokens":null}', '{"tokens":[1],"accepted":-1}', '{"tokens":[1],"accepted":1.0}',
    '{"tokens":[1],"session":""}', '{"tokens":[1],"sources":1}', "7", "null", '"x"',
]  # fmt: skip


@pytest.mark.parametrize("body", REFUSED)
def test_srv_1_nothing_is_coerced(client, engine, body):
    """JSON true became token 1, 1.0 became 1 and "5" became 5 in a server that trusted a plain list of int."""
    response = client.post("/draft", content=body)
    assert response.status_code == 422
    assert_error(response.json())
    assert engine.batches == []
    assert client.post("/draft", json={"tokens": [1]}).json()["draft"] == expected([1])


def test_the_first_bad_id_is_named(client):
    error = client.post("/draft", json={"tokens": [1, 2, 1000, "x"]}).json()["error"]
    assert error["index"] == 2 and "999" in error["message"]


BROKEN = {
    "empty": b"", "cut": b'{"tokens":[1', "nan": b'{"tokens":[NaN]}', "infinity": b'{"tokens":[-Infinity]}',
    "depth bomb": b"[" * 500_000, "objects": b'{"a":' * 100_000, "twice": b'{"tokens":[1],"tokens":[2]}',
    "latin-1": b'{"session":"\xe9"}', "utf-16": '{"tokens":[1]}'.encode("utf-16"), "digits": b"9" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_json_gets_400(client, name):
    """A body of 500,000 brackets ends json.loads with RecursionError, which came out as a 500."""
    response = client.post("/draft", content=BROKEN[name])
    assert response.status_code == 400
    assert_error(response.json(), "invalid_json")
    assert client.post("/draft", json={"tokens": [1]}).status_code == 200


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(0, 1100),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner),
    max_leaves=12,
)


@hypothesis.given(VALUES | st.binary(max_size=40), st.booleans())
@hypothesis.settings(max_examples=300, deadline=None)
def test_any_body_is_a_checked_call_or_a_typed_error(value, inside):
    """Every other exception would be a 500."""
    body = value if isinstance(value, bytes) else json.dumps({"tokens": value} if inside else value).encode()
    try:
        asked = parse_call(body, context=CONTEXT, num_ids=NUM_IDS, default_k=16)
    except ApiError as error:
        assert error.status in (400, 422)
        assert_error(error.body)
    else:
        assert all(type(token) is int and 0 <= token < NUM_IDS for token in asked.tokens)
        assert 1 <= len(asked.tokens) <= CONTEXT - asked.k and 1 <= asked.k <= 64


def test_srv_3_lengths_are_checked_before_queueing(client, engine):
    """An empty list of ids once killed an engine and every later request; an over-long one tripped an index check."""
    before = client.post("/draft", json={"tokens": [3]}).json()["draft"]
    for tokens, status in (([], 422), ([1] * 48, 200), ([1] * 49, 422), ([1] * 100_000, 422), (["x"] * 100_000, 422)):
        response = client.post("/draft", json={"tokens": tokens})
        assert response.status_code == status, len(tokens)
        if status == 422:
            assert_error(response.json())
            assert not tokens or "64" in response.json()["error"]["message"]  # the limit is named
        assert client.post("/draft", json={"tokens": [3]}).json()["draft"] == before
    assert client.post("/draft", json={"tokens": [1] * 63, "num_draft_tokens": 1}).status_code == 200
    assert all(len(tokens) <= 63 for batch in engine.batches for tokens in batch)


def test_errors_never_repeat_the_input(client):
    secret = "hunter2" * 300
    for body in ({"tokens": [1], secret: 1}, {"tokens": [secret]}, {"tokens": [1], "session": [secret]}, secret):
        response = client.post("/draft", json=body)
        assert response.status_code == 422 and "hunter2" not in response.text
    response = client.get("/" + secret)
    assert response.status_code == 404 and "hunter2" not in response.text
    assert_error(response.json(), "not_found")


def test_every_other_answer_has_the_same_shape(client):
    response = client.get("/draft")
    assert response.status_code == 405 and response.headers["allow"] == "POST"
    assert_error(response.json(), "method_not_allowed")
    for path in ("/draft/", "/docs", "/openapi.json"):
        assert client.post(path).status_code in (404, 405)
    assert client.get("/health").json() == {"status": "alive"}
    info = client.get("/info").json()
    assert info["num_draft_tokens"] == 16 and info["max_draft_tokens"] == 64 and "torch" in info["versions"]


def test_metrics_count(client):
    client.post("/draft", json={"tokens": [1], "session": "s", "accepted": 3})
    client.post("/draft", json={"tokens": []})
    text = client.get("/metrics").text
    for line in (
        'drafter_requests_total{status="200"} 1.0', 'drafter_requests_total{status="422"} 1.0',
        "drafter_drafted_tokens_total 16.0", "drafter_accepted_tokens_total 3.0", "drafter_batch_size_count 1.0",
    ):  # fmt: skip
        assert line in text


# ---------------------------------------------------------------------------- bytes on the wire


def send_until_closed(port, head, piece=b"", limit_bytes=0, pause_s=0.0):
    """Sends `head`, then `piece` again and again until the server ends it; the answer and the bytes sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
        sent_bytes = len(head)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(head)
            while sent_bytes < limit_bytes:
                connection.sendall(piece)
                sent_bytes += len(piece)
                time.sleep(pause_s)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):  # b"": the server has closed
                answer += part
    return answer, sent_bytes


POST = b"POST /draft HTTP/1.1\r\nHost: x\r\n"


def test_srv_5_the_body_limit_holds_while_bytes_arrive():
    """A limit read from the length header was passed by chunked transfer, and the whole body sat in memory."""
    engine = StubEngine()
    with running(lambda: engine, read_timeout_s=0.5) as (port, batcher):
        wait_until(lambda: batcher.state == "ready")
        call(port, body={"tokens": [1]})
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        answer, _ = send_until_closed(port, POST + b"Content-Length: 2097152\r\n\r\n")  # refused unread
        assert answer.startswith(b"HTTP/1.1 413") and b"1048576" in answer and b"connection: close" in answer.lower()

        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        answer, sent_bytes = send_until_closed(port, POST + b"Transfer-Encoding: chunked\r\n\r\n", chunk, 1 << 28)
        assert sent_bytes < 1 << 26  # ended long before 256 MiB: limit + what the sockets buffer
        assert answer.startswith(b"HTTP/1.1 413")

        body = b'{"tokens":[1,2,3]}'  # sent under a header that says less
        answer, _ = send_until_closed(port, POST + b"Content-Length: 9\r\n\r\n" + body + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400") and b"HTTP/1.1 200" not in answer

        for head in (POST + b"Content-Length: 100\r\n\r\n" + body[:10], POST):  # stalls in the body, in the head
            answer, _ = send_until_closed(port, head)
            assert answer == b"" if head == POST else answer.startswith(b"HTTP/1.1 408")

        answer, _ = send_until_closed(port, b"\x16\x03\x01 not http\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400") and b'"invalid_http"' in answer

        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 32 * 1024
        status, document, _ = call(port, body={"tokens": [1]})
        assert status == 200 and document["draft"] == expected([1])
    assert engine.batches == [[[1]], [[1]]]


# ---------------------------------------------------------------------------- queue and worker


def test_concurrent_requests_share_batches_and_keep_their_own_answers():
    engine = StubEngine(gated=True)
    with running(lambda: engine) as (port, batcher), ThreadPoolExecutor(12) as pool:
        wait_until(lambda: batcher.state == "ready")
        answers = [pool.submit(call, port, body={"tokens": [i], "num_draft_tokens": 1 + i}) for i in range(9)]
        wait_until(lambda: sum(map(len, engine.batches)) + batcher.waiting == 9)
        engine.gate.set()
        for i, answer in enumerate(answers):
            status, document, _ = answer.result(HANG_S)
            assert status == 200 and document["draft"] == expected([i], 1 + i)
    assert max(map(len, engine.batches)) == 4  # max_batch_size, and never more
    assert engine.warmed == [4]


def test_srv_7_clients_that_leave(caplog):
    """The result was set on a future that had been cancelled meanwhile: the only worker died with
    InvalidStateError, /health stayed green and nothing was answered any more."""
    engine = StubEngine(delay_s=0.03)
    with running(lambda: engine) as (port, batcher), ThreadPoolExecutor(16) as pool:
        wait_until(lambda: batcher.state == "ready")
        body = json.dumps({"tokens": [900]}).encode()
        request = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
        for _ in range(15):
            leaving = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
            for connection in leaving:
                connection.sendall(request)
            staying = [pool.submit(call, port, body={"tokens": [i]}) for i in range(4)]
            time.sleep(0.01)
            for connection in leaving:
                connection.close()
            staying += [pool.submit(call, port, body={"tokens": [i]}) for i in range(4, 12)]
            for i, answer in enumerate(staying):
                status, document, _ = answer.result(HANG_S)
                assert status == 200 and document["draft"] == expected([i])
        wait_until(lambda: batcher.idle)
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_srv_7_queued_but_gone_requests_never_enter_a_batch():
    engine = StubEngine(gated=True)
    with running(lambda: engine, max_batch_size=1) as (port, batcher), ThreadPoolExecutor(4) as pool:
        wait_until(lambda: batcher.state == "ready")
        first = pool.submit(call, port, body={"tokens": [1]})
        assert engine.begun.wait(HANG_S)
        body = json.dumps({"tokens": [900]}).encode()
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            wait_until(lambda: batcher.waiting == 1)
        wait_until(lambda: batcher.waiting == 0)
        last = pool.submit(call, port, body={"tokens": [2]})
        wait_until(lambda: batcher.waiting == 1)
        engine.gate.set()
        assert first.result(HANG_S)[0] == last.result(HANG_S)[0] == 200
    assert engine.batches == [[[1]], [[2]]]


def test_srv_7_cancelled_exactly_when_the_batch_ends():
    """Cancels the waiting task from inside the engine, after the last check and before the result is set."""

    async def play():
        loop, tasks = asyncio.get_running_loop(), []
        faults = []
        loop.set_exception_handler(lambda _loop, context: faults.append(context))

        class Cancels(StubEngine):
            def draft(self, requests):
                drafts = super().draft(requests)
                loop.call_soon_threadsafe(tasks[-1].cancel)
                return drafts

        batcher = Batcher(Cancels, max_batch_size=4, queue_limit=8, batch_wait_s=0, deadline_s=HANG_S)
        batcher.start()
        while batcher.state != "ready":
            await asyncio.sleep(0.005)
        for _ in range(20):
            tasks.append(asyncio.ensure_future(batcher.draft(SimpleNamespace(tokens=[1], k=2))))
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait_for(asyncio.shield(tasks[-1]), HANG_S)
        assert batcher.state == "ready" and batcher.stop(HANG_S) and not faults

    asyncio.run(play())


def test_a_failing_batch_is_a_500_and_the_worker_lives(client, caplog):
    response = client.post("/draft", json={"tokens": [666]})
    assert response.status_code == 500
    assert_error(response.json(), "internal")
    assert "scripted failure" in caplog.text and "scripted failure" not in response.text
    assert client.post("/draft", json={"tokens": [1]}).json()["draft"] == expected([1])


def test_a_request_past_its_deadline_gets_504_and_is_not_drafted():
    engine = StubEngine(gated=True)
    with running(lambda: engine, max_batch_size=1, deadline_s=0.2) as (port, batcher), ThreadPoolExecutor(2) as pool:
        wait_until(lambda: batcher.state == "ready")
        answers = [pool.submit(call, port, body={"tokens": [i]}) for i in range(2)]
        for answer in answers:
            status, document, _ = answer.result(HANG_S)
            assert status == 504
            assert_error(document, "deadline")
        engine.gate.set()
        wait_until(lambda: batcher.idle)
        assert call(port, body={"tokens": [5]})[1]["draft"] == expected([5])
    assert len(engine.batches) == 2  # the one that held the gate, and [5]; the queued one was dropped


def test_batch_wait_lets_a_batch_fill():
    async def play():
        engine = StubEngine()
        batcher = Batcher(lambda: engine, max_batch_size=3, queue_limit=8, batch_wait_s=HANG_S, deadline_s=HANG_S)
        batcher.start()
        while batcher.state != "ready":
            await asyncio.sleep(0.005)
        requests = [SimpleNamespace(tokens=[i], k=1) for i in range(3)]
        answers = await asyncio.gather(*map(batcher.draft, requests))  # the third fills it, long before HANG_S
        assert [answer.batch_size for answer in answers] == [3, 3, 3] and batcher.stop(HANG_S)

        slow = Batcher(lambda: engine, max_batch_size=3, queue_limit=8, batch_wait_s=HANG_S, deadline_s=0.05)
        slow.start()
        while slow.state != "ready":
            await asyncio.sleep(0.005)
        with pytest.raises(DeadlinePassed):
            await slow.draft(requests[0])
        assert slow.stop(HANG_S)

    asyncio.run(play())


def test_srv_9_alive_at_once_ready_when_warm_healthy_under_load():
    """Ready was reported before the weights were usable; under load /health waited behind inference and the
    process was killed for it."""
    engine, loaded = StubEngine(gated=True), threading.Event()

    def load():
        assert loaded.wait(HANG_S)
        return engine

    with running(load, max_batch_size=2) as (port, batcher), ThreadPoolExecutor(64) as pool:
        assert call(port, "GET", "/health")[0] == 200
        for method, path in (("GET", "/ready"), ("POST", "/draft"), ("GET", "/info")):
            status, document, headers = call(port, method, path, {"tokens": [1]} if method == "POST" else None)
            assert status == 503 and int(headers["Retry-After"]) >= 1
            assert_error(document, "not_ready")
        assert engine.warmed == []
        loaded.set()
        wait_until(lambda: call(port, "GET", "/ready")[0] == 200)
        assert engine.warmed == [2]
        answers = [pool.submit(call, port, body={"tokens": [i]}) for i in range(60)]
        assert engine.begun.wait(HANG_S)
        wait_until(lambda: batcher.waiting > 50)
        for _ in range(5):  # a batch is under way and stays so until the gate opens: health does not wait for it
            assert call(port, "GET", "/health")[0] == 200
        engine.gate.set()
        assert [answer.result(HANG_S)[0] for answer in answers] == [200] * 60


def test_srv_12_a_full_queue_is_429_at_once():
    """A queue without a bound let latency grow until the clients gave up; a full one was a 500."""
    engine = StubEngine(gated=True)
    settings = {"max_batch_size": 1, "queue_limit": 8}
    with running(lambda: engine, **settings) as (port, batcher), ThreadPoolExecutor(100) as pool:
        wait_until(lambda: batcher.state == "ready")
        answers = [pool.submit(call, port, body={"tokens": [1]}) for _ in range(100)]
        wait_until(lambda: sum(answer.done() for answer in answers) >= 91)  # refused while the batch still runs
        for answer in answers:
            if answer.done():
                status, document, headers = answer.result()
                assert status == 429 and int(headers["Retry-After"]) >= 1
                assert_error(document, "queue_full")
        engine.gate.set()
        statuses = sorted(answer.result(HANG_S)[0] for answer in answers)
        assert statuses == [200] * 9 + [429] * 91  # one in the batch, eight in the queue


# ---------------------------------------------------------------------------- the process


@pytest.fixture
def model_dir(tmp_path):
    """What the server reads of an archive before it is verified: the recipe."""
    from drafter.recipe import RunDocument, load_recipe

    folder = tmp_path / "model"
    folder.mkdir()
    document = RunDocument(load_recipe("tiny"), []).document()
    (folder / "architecture.json").write_text(json.dumps(document))
    return folder


def test_settings_flags_before_environment_before_recipe(model_dir, monkeypatch):
    monkeypatch.delenv("QUEUE_LIMIT", raising=False)
    flags = ["--model-dir", str(model_dir)]
    settings = server.resolve_settings(server.parse_args(flags))
    assert (settings.max_batch_size, settings.queue_limit, settings.read_timeout_s) == (4, 8, 10)
    monkeypatch.setenv("QUEUE_LIMIT", "5")
    assert server.resolve_settings(server.parse_args(flags)).queue_limit == 5
    assert server.resolve_settings(server.parse_args([*flags, "--queue-limit", "6"])).queue_limit == 6
    for wrong in (["--queue-limit", "0"], ["--batch-wait-ms", "-1"], ["--threads", "x"]):
        with pytest.raises(SystemExit):
            server.parse_args([*flags, *wrong])


def test_srv_12_more_than_one_worker_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WEB_CONCURRENCY", "2")
    with pytest.raises(SystemExit) as stopped:
        server.main([])
    assert stopped.value.code == 2 and "each worker would load a model of its own" in capsys.readouterr().err


def test_a_missing_model_is_one_sentence(tmp_path, capsys):
    assert server.main(["--model-dir", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err
    assert "is no packed model" in error and "quickstart.sh" in error and error.count("\n") == 1


def test_srv_9_a_failed_load_ends_the_process(model_dir, monkeypatch, capsys):
    def broken(*_):
        raise ValueError("weights.safetensors.zst: sha256 differs")

    monkeypatch.setattr(server, "load_engine", broken)
    assert server.main(["--model-dir", str(model_dir), "--port", "0"]) == 1
    error = capsys.readouterr().err
    assert "cannot be served: weights.safetensors.zst: sha256 differs" in error and "Traceback" not in error


def test_a_port_that_is_taken_is_one_sentence(model_dir, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert server.main(["--model-dir", str(model_dir), "--port", str(port)]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error and "--port" in error and error.count("\n") == 1


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
import server, test_server
server.load_engine = lambda *_: {loader}
raise SystemExit(server.main(["--model-dir", {model!r}, "--port", "0", "--max-batch-size", "1"]))
"""


@contextlib.contextmanager
def server_process(model_dir, loader):
    tests = os.path.dirname(__file__)
    script = SCRIPT.format(tests=tests, root=os.path.dirname(tests), model=str(model_dir), loader=loader)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_while_loading_ends_the_process_at_once(model_dir):
    with server_process(model_dir, "__import__('time').sleep(600)") as process:
        assert process.stdout.readline().startswith("loading ")
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == 0


def test_sigterm_answers_what_waits_and_exits_0(model_dir):
    with server_process(model_dir, "test_server.StubEngine(delay_s=0.3)") as process:
        _, ready, curl = (process.stdout.readline() for _ in range(3))
        assert ready.startswith("ready: http://127.0.0.1:") and '{"tokens":[1,2,3]}' in curl
        port = int(ready.split()[1].rsplit(":", 1)[1])
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(call, port, body={"tokens": [i]}) for i in range(4)]
            wait_until(lambda: b"drafter_waiting_requests 3.0" in metrics_text(port))
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: call(port, "GET", "/ready")[0] == 503)
            status, document, headers = call(port, body={"tokens": [9]})
            assert status == 503 and "Retry-After" in headers
            assert_error(document, "draining")
            for i, answer in enumerate(answers):
                assert answer.result(HANG_S)[1]["draft"] == expected([i])
        assert process.wait(HANG_S) == 0
        assert process.stderr.read() == ""


def metrics_text(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
