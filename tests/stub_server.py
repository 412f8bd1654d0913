"""A scripted engine and the real server around it, for test_server.py and test_wire.py."""

import contextlib
import functools
import http.client
import json
import threading
import time
from types import SimpleNamespace

import uvicorn

from drafter.wire import HttpProtocol
from server import Server, Settings, create_app

HANG_S = 30  # far beyond what anything here takes; only a hang meets it
CONTEXT = 64
NUM_IDS = 1000
POST = b"POST /draft HTTP/1.1\r\nHost: x\r\n"


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
            SimpleNamespace(tokens=expected(r.tokens, r.k), finish_reason="length", timings=timings, sources=None)
            for r in requests
        ]


def wait_until(condition):
    end_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end_s, "hangs"
        time.sleep(0.005)


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


def metrics_text(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read()
