"""POST /draft and its neighbours: one process, one engine thread, no tensors in this file.

    python server.py --model-dir model

    POST /draft   {"tokens": [1, 2, 3]} -> {"draft", "finish_reason", "model", "timings"}
    GET  /health  the process lives     GET /ready    the archive is verified and the engine warm
    GET  /info    what is served        GET /metrics  Prometheus text

drafter/wire.py checks what comes in, drafter/batching.py queues it, drafter/engine.py drafts.
"""

import argparse
import asyncio
import functools
import importlib.metadata
import json
import math
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive

from drafter.batching import Batcher, DeadlinePassed, EngineFailed, NotServing, QueueFull
from drafter.recipe import RunDocument
from drafter.wire import MAX_DRAFT_TOKENS, ApiError, Edge, HttpProtocol, parse_call

MAKE_MODEL = "bash scripts/quickstart.sh"
ROOT = Path(__file__).resolve().parent
CLIENT_GONE = 499  # no such code in the standard; the usual one in logs and metrics. Nobody receives it.


@dataclass(frozen=True)
class Settings:
    num_draft_tokens: int = 16
    max_batch_size: int = 16
    queue_limit: int = 256
    batch_wait_ms: float = 0.0
    deadline_s: float = 30.0
    max_body_bytes: int = 1 << 20
    read_timeout_s: float = 10.0


# ---------------------------------------------------------------------------- metrics


class Metrics:
    def __init__(self, batcher: Batcher):
        self.registry = prometheus.CollectorRegistry()
        seconds = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = prometheus.Counter("drafter_requests", "POST /draft by status", ["status"], **own)
        self.drafted = prometheus.Counter("drafter_drafted_tokens", "tokens in drafts", **own)
        self.accepted = prometheus.Counter("drafter_accepted_tokens", "accepted tokens, as clients tell", **own)
        self.reports = prometheus.Counter("drafter_accepted_reports", "requests that told `accepted`", **own)
        self.batch = prometheus.Histogram(
            "drafter_batch_size", "requests in a draft's batch", buckets=(1, 2, 4, 8, 16, 32, 64), **own
        )
        self.queue_s = prometheus.Histogram("drafter_queue_seconds", "from arrival to batch", buckets=seconds, **own)
        self.draft_s = prometheus.Histogram("drafter_draft_seconds", "of the whole batch", buckets=seconds, **own)
        waiting = prometheus.Gauge("drafter_waiting_requests", "requests in the queue", **own)
        waiting.set_function(lambda: batcher.waiting)

    def status(self, path: str, status: int) -> None:
        if path == "/draft":
            self.requests.labels(str(status)).inc()


# ---------------------------------------------------------------------------- the application


def not_serving(state: str) -> ApiError:
    message = {
        "loading": "the model is being verified and warmed up",
        "draining": "the server is about to end",
    }.get(state, "the model could not be loaded")
    return ApiError(503, "draining" if state == "draining" else "not_ready", message, retry_after_s=2)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _versions() -> dict[str, str]:
    names = ("torch", "transformers", "fastapi", "uvicorn")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def create_app(*, engine_loader: Callable[[], Any], settings: Settings) -> FastAPI:
    """The ASGI application. `engine_loader` runs on the worker thread and returns the engine: `draft`, `warm_up`,
    `archive_id`, `context`, `num_ids`, `info`."""
    batcher = Batcher(
        engine_loader,
        max_batch_size=settings.max_batch_size,
        queue_limit=settings.queue_limit,
        batch_wait_s=settings.batch_wait_ms / 1000,
        deadline_s=settings.deadline_s,
    )
    metrics = Metrics(batcher)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        batcher.stop()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    app.state.batcher = batcher
    app.add_middleware(
        Edge,
        max_body_bytes=settings.max_body_bytes,
        read_timeout_s=settings.read_timeout_s,
        on_status=metrics.status,
    )

    def engine_or_503() -> Any:
        if batcher.state != "ready":
            raise not_serving(batcher.state)
        return batcher.engine

    @app.post("/draft")
    async def draft(request: Request) -> Response:
        engine = engine_or_503()
        body = await request.body()
        call = parse_call(body, context=engine.context, num_ids=engine.num_ids, default_k=settings.num_draft_tokens)
        drafting = asyncio.ensure_future(batcher.draft(call))
        gone = asyncio.ensure_future(_gone(request.receive))
        try:
            await asyncio.wait({drafting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not drafting.done():
                return Response(status_code=CLIENT_GONE)
            answer = drafting.result()
        except QueueFull as full:
            message = f"{settings.queue_limit} requests wait already"
            raise ApiError(429, "queue_full", message, retry_after_s=full.retry_after_s) from None
        except NotServing as error:
            raise not_serving(error.state) from None
        except DeadlinePassed:
            raise ApiError(504, "deadline", f"no draft within {settings.deadline_s:g} s") from None
        except EngineFailed:
            raise ApiError(500, "internal", "the batch of this request failed; the server's log says why") from None
        finally:
            drafting.cancel()  # takes the request out of the queue when its client has gone
            gone.cancel()
        # Counted with the answer: a client that got 429 or 504 sends its report again with the next try.
        if call.accepted is not None:
            metrics.accepted.inc(call.accepted)
            metrics.reports.inc()
        metrics.drafted.inc(len(answer.draft.tokens))
        metrics.batch.observe(answer.batch_size)
        metrics.queue_s.observe(answer.queue_s)
        metrics.draft_s.observe(answer.draft_s)
        document = {
            "draft": answer.draft.tokens,
            "finish_reason": answer.draft.finish_reason,
            "model": engine.archive_id,
            "timings": {"queue_ms": round(answer.queue_s * 1000, 3), **answer.draft.timings},
        }
        if call.sources:
            document["sources"] = answer.draft.sources or ["model"] * len(answer.draft.tokens)
        return JSONResponse(document)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready", "model": engine_or_503().archive_id}

    @app.get("/info")
    async def info() -> dict[str, Any]:
        drafting = {"num_draft_tokens": settings.num_draft_tokens, "max_draft_tokens": MAX_DRAFT_TOKENS}
        return {**engine_or_503().info, **drafting, "versions": _versions()}

    @app.get("/metrics")
    async def metrics_text() -> Response:
        return Response(prometheus.generate_latest(metrics.registry), media_type=prometheus.CONTENT_TYPE_PLAIN_0_0_4)

    @app.exception_handler(ApiError)
    async def api_error(_request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def http_error(_request: Request, error: HTTPException) -> Response:
        status = HTTPStatus(error.status_code)
        kind = status.phrase.lower().replace(" ", "_")
        return ApiError(status, kind, status.description or status.phrase).response(**(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(_request: Request, _error: Exception) -> Response:
        return ApiError(500, "internal", "unexpected fault; the server's log says what").response()

    return app


# ---------------------------------------------------------------------------- the process


class Server(uvicorn.Server):
    """uvicorn's server, which ends when loading fails, and on SIGTERM first answers what waits (503 to the new)."""

    def __init__(self, config: uvicorn.Config, batcher: Batcher, drain_s: float):
        super().__init__(config)
        self.batcher = batcher
        self.drain_s = drain_s
        self.drain_until_s = math.inf
        self.said_ready = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        # Not uvicorn's own handler: it raises the signal once more at the end, and the exit status would not be 0.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        if not self.should_exit:
            self.should_exit = True
            self.drain_until_s = time.monotonic() + self.drain_s

    async def on_tick(self, counter: int) -> bool:
        await super().on_tick(counter)
        if self.batcher.failure:
            return True
        if self.should_exit:
            self.batcher.drain()
            return self.force_exit or self.batcher.idle or time.monotonic() > self.drain_until_s
        if self.batcher.state == "ready" and not self.said_ready:
            self.said_ready = True
            self._say_ready()
        return False

    def _say_ready(self) -> None:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        engine = self.batcher.engine
        print(f"ready: {url} serves archive {engine.archive_id[:12]}. Try it:", flush=True)
        body = json.dumps({"tokens": list(engine.example_tokens)}, separators=(",", ":"))
        print(f"curl -s {url}/draft -H 'Content-Type: application/json' -d '{body}'", flush=True)


def load_engine(model_dir: Path, dtype: str, threads: int | None, engine: str, kernel: str, device: str) -> Any:
    # Imported here, on the worker thread: torch takes seconds to import, and /health answers meanwhile.
    from drafter.engine import DraftEngine, TransformersEngine
    from model_io import load_model

    if engine == "transformers":
        return TransformersEngine(load_model(model_dir, form="merged", dtype=dtype), threads=threads)
    loaded = load_model(model_dir, form="packed", dtype=dtype)
    return DraftEngine(loaded, threads=threads, kernel=kernel, device=device)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    def env(name: str, default: Any = None) -> Any:
        return os.environ.get(name) or default

    parser = argparse.ArgumentParser(
        description="Serve drafts over HTTP.",
        epilog="Each flag has an environment variable of its name (MODEL_DIR, QUEUE_LIMIT, ...). "
        "What neither says is taken from the recipe in the archive.",
    )
    add = parser.add_argument
    add("--model-dir", type=Path, default=env("MODEL_DIR", ROOT / "model"), help="packed archive (default: model)")
    add("--host", default=env("HOST", "127.0.0.1"), help="address to listen on; 0.0.0.0 opens it to the network")
    add("--port", type=int, default=env("PORT", 8000), help="0 takes a free one and prints it")
    add("--max-batch-size", type=int, default=env("MAX_BATCH_SIZE"), help="requests in one batch")
    add("--queue-limit", type=int, default=env("QUEUE_LIMIT"), help="waiting requests before clients get 429")
    add("--batch-wait-ms", type=float, default=env("BATCH_WAIT_MS", 0), help="wait this long for a batch to fill")
    add("--deadline-s", type=float, default=env("DEADLINE_S"), help="a request older than this gets 504")
    add("--max-body-bytes", type=int, default=env("MAX_BODY_BYTES"), help="larger bodies get 413")
    add("--threads", type=int, default=env("THREADS"), help="CPU threads of the engine (default: all cores)")
    dtypes = ("bfloat16", "float32")
    add("--dtype", choices=dtypes, default=env("DTYPE", dtypes[0]), help="float32: slower, exact in every batch")
    engines, kernels = ("own", "transformers"), ("auto", "native", "plain")
    add("--engine", choices=engines, default=env("ENGINE", "own"), help="transformers: slower, to compare with")
    add("--kernel", choices=kernels, default=env("KERNEL", "auto"), help="of the own engine; plain needs no compiler")
    add("--device", default=env("DEVICE", "cpu"), help="cpu, or cuda (of the own engine; not run on a GPU yet)")
    args = parser.parse_args(argv)
    for name in ("max_batch_size", "queue_limit", "deadline_s", "max_body_bytes", "threads"):
        if (value := getattr(args, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {value}")
    if args.batch_wait_ms < 0:
        parser.error(f"--batch-wait-ms must be 0 or more, not {args.batch_wait_ms:g}")
    if (workers := env("WEB_CONCURRENCY", "1")) != "1":
        parser.error(
            f"WEB_CONCURRENCY={workers}: each worker would load a model of its own. One process batches all clients; "
            "unset it, or start further servers on ports (and machines) of their own."
        )
    return args


def resolve_settings(args: argparse.Namespace) -> Settings:
    """Flags before environment before the recipe in the archive. ValueError when that cannot be read."""
    serving = RunDocument.read(args.model_dir / "architecture.json").recipe.serving
    declared = {name: getattr(serving, name) for name in Settings.__dataclass_fields__ if hasattr(serving, name)}
    said = {name: getattr(args, name, None) for name in Settings.__dataclass_fields__}
    return Settings(**{**declared, **{name: value for name, value in said.items() if value is not None}})


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        settings = resolve_settings(args)
    except (OSError, ValueError) as error:
        print(f"server: {args.model_dir} is no packed model ({error}); make one: {MAKE_MODEL}", file=sys.stderr)
        return 1
    try:
        # Before the model is loaded: a port that is taken should cost no minute.
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family)
    except OSError as error:
        print(f"server: cannot listen on {args.host}:{args.port} ({error}); choose another: --port", file=sys.stderr)
        return 1
    app = create_app(
        engine_loader=functools.partial(
            load_engine, args.model_dir, args.dtype, args.threads, args.engine, args.kernel, args.device
        ),
        settings=settings,
    )
    config = uvicorn.Config(
        app,
        http=functools.partial(HttpProtocol, head_timeout_s=settings.read_timeout_s),
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(settings.deadline_s),
    )
    batcher = app.state.batcher
    print(f"loading {args.model_dir}", flush=True)
    Server(config, batcher, drain_s=settings.deadline_s).run(sockets=[listener])
    if batcher.failure:
        if not isinstance(batcher.failure, ValueError):  # a ValueError is for the user and says all; others are ours
            traceback.print_exception(batcher.failure)
        print(f"server: {args.model_dir} cannot be served: {batcher.failure}", file=sys.stderr)
    sys.stdout.flush()
    if not batcher.stop():
        # A load or a batch is still at work in native code; ending the interpreter under it may crash.
        os._exit(1 if batcher.failure else 0)
    return 1 if batcher.failure else 0


if __name__ == "__main__":
    raise SystemExit(main())
