"""The queue, the worker, and the life and end of the process, with a scripted engine."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient
from stub_server import (
    HANG_S,
    POST,
    StubEngine,
    assert_error,
    call,
    expected,
    metrics_text,
    running,
    wait_until,
)

import server
from drafter.batching import Batcher, DeadlinePassed
from server import Settings, create_app


@pytest.fixture
def engine():
    return StubEngine()


@pytest.fixture
def client(engine):
    app = create_app(engine_loader=lambda: engine, settings=Settings(max_batch_size=4, queue_limit=8))
    with TestClient(app, raise_server_exceptions=False) as client:
        wait_until(lambda: app.state.batcher.state == "ready")
        yield client


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
import server, stub_server
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
    with server_process(model_dir, "stub_server.StubEngine(delay_s=0.3)") as process:
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
