"""What comes in over the wire: requests and their checks, limits on bytes, the one shape of errors."""

import contextlib
import json
import resource
import socket
import time

import hypothesis
import hypothesis.strategies as st
import pytest
from starlette.testclient import TestClient
from stub_server import CONTEXT, HANG_S, NUM_IDS, POST, StubEngine, assert_error, call, expected, running, wait_until

from drafter.wire import FIELDS, ApiError, parse_call
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
    '{"tokens":[1],"accepted":3}', '{"tokens":[1],"session":""}', '{"tokens":[1],"sources":1}', "7", "null", '"x"',
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
    # a report counts with its answer: this client asks again, and would be counted twice
    assert client.post("/draft", json={"tokens": [666], "session": "s", "accepted": 5}).status_code == 500
    text = client.get("/metrics").text
    for line in (
        'drafter_requests_total{status="200"} 1.0', 'drafter_requests_total{status="422"} 1.0',
        "drafter_drafted_tokens_total 16.0", "drafter_accepted_tokens_total 3.0", "drafter_accepted_reports_total 1.0",
        "drafter_batch_size_count 1.0",
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
