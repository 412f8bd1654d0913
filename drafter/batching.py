"""The bounded queue before the engine, and the one thread that owns it. No tensors, no HTTP.

The event loop puts requests in (`Batcher.draft`, a coroutine); the worker thread loads and warms the engine,
then takes up to `max_batch_size` waiting requests at a time and hands the results back through the loop.
Model work never runs on the event loop, so that `/health` answers while a batch is under way.

    loading --> ready --> draining --> (thread ends)
       \\-> failed

The engine is anything with `draft(requests) -> drafts` and `warm_up(batch_size)`; requests are opaque here.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

log = logging.getLogger("drafter")


class QueueFull(Exception):
    """`queue_limit` requests wait already. `retry_after_s` guesses when there will be room."""

    def __init__(self, retry_after_s: int):
        self.retry_after_s = retry_after_s


class NotServing(Exception):
    """The engine is not loaded yet, could not be loaded, or the process is about to end."""

    def __init__(self, state: str):
        self.state = state


class DeadlinePassed(Exception):
    """No result within `deadline_s`."""


class EngineFailed(Exception):
    """`engine.draft` raised; the worker lives on."""


@dataclass(frozen=True)
class Answer:
    draft: Any
    queue_s: float  # from arrival to the start of its batch
    draft_s: float  # of the whole batch
    batch_size: int


@dataclass(eq=False)
class Waiting:
    request: Any
    future: asyncio.Future
    arrived_s: float

    def settle(self, result: Answer | Exception) -> None:
        """On the event loop only. The client may have gone since the batch began: its future is cancelled then,
        and setting a cancelled future raises InvalidStateError, which would end the worker."""
        if self.future.done():
            return
        if isinstance(result, Exception):
            self.future.set_exception(result)
        else:
            self.future.set_result(result)


class Batcher:
    def __init__(
        self,
        load_engine: Callable[[], Any],
        *,
        max_batch_size: int,
        queue_limit: int,
        batch_wait_s: float,
        deadline_s: float,
    ):
        self.state = "loading"
        self.engine: Any = None
        self.failure: Exception | None = None
        self.last_batch_s = 0.0
        self._load_engine = load_engine
        self._max_batch_size = max_batch_size
        self._queue_limit = queue_limit
        self._batch_wait_s = batch_wait_s
        self._deadline_s = deadline_s
        self._queue: deque[Waiting] = deque()
        self._running = 0  # requests in the batch under way
        self._changed = threading.Condition()  # guards state, _queue and _running
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # ------------------------------------------------------------------------ the event loop's side

    def start(self) -> None:
        """Called on the event loop: begins loading in the background."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def draft(self, request: Any) -> Answer:
        """Waits for the draft of one request. Raises NotServing, QueueFull, DeadlinePassed or EngineFailed.

        Cancelling this coroutine takes the request out of the queue: work for clients that have gone is not done.
        """
        waiting = self._enqueue(request)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await waiting.future
        except TimeoutError:
            raise DeadlinePassed from None
        finally:
            self._forget(waiting)

    def _enqueue(self, request: Any) -> Waiting:
        with self._changed:
            if self.state != "ready":
                raise NotServing(self.state)
            if len(self._queue) >= self._queue_limit:
                batches_ahead = len(self._queue) / self._max_batch_size + 1
                raise QueueFull(max(1, math.ceil(batches_ahead * self.last_batch_s)))
            waiting = Waiting(request, asyncio.get_running_loop().create_future(), time.monotonic())
            self._queue.append(waiting)
            self._changed.notify()
        return waiting

    def _forget(self, waiting: Waiting) -> None:
        with self._changed:
            if waiting in self._queue:
                self._queue.remove(waiting)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def idle(self) -> bool:
        with self._changed:
            return not self._queue and not self._running

    def drain(self) -> None:
        """From now on nothing enters; what waits is still answered."""
        with self._changed:
            if self.state in ("loading", "ready"):
                self.state = "draining"
            self._changed.notify()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Ends the worker after the batch under way; False when it is still at work after `timeout_s`."""
        self.drain()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------------ the worker thread

    def _work(self) -> None:
        try:
            engine = self._load_engine()
            engine.warm_up(self._max_batch_size)
        except Exception as error:
            with self._changed:
                self.failure, self.state = error, "failed"
            return
        with self._changed:
            self.engine = engine
            if self.state == "loading":
                self.state = "ready"
        while batch := self._take():
            self._answer(batch)
            with self._changed:
                self._running = 0

    def _take(self) -> list[Waiting]:
        """The next batch, never empty while the service lasts; [] ends the worker."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self.state == "draining")
                if not self._queue:
                    return []
                if self._batch_wait_s:  # let a few more arrive: worth it where clients come in bursts
                    self._changed.wait_for(
                        lambda: len(self._queue) >= self._max_batch_size or self.state == "draining", self._batch_wait_s
                    )
                batch: list[Waiting] = []
                oldest_s = time.monotonic() - self._deadline_s
                while self._queue and len(batch) < self._max_batch_size:
                    waiting = self._queue.popleft()
                    if not waiting.future.done() and waiting.arrived_s > oldest_s:
                        batch.append(waiting)
                self._running = len(batch)
                if batch:
                    return batch

    def _answer(self, batch: list[Waiting]) -> None:
        begun_s = time.monotonic()
        results: list[Answer | Exception]
        try:
            drafts = self.engine.draft([waiting.request for waiting in batch])
            assert len(drafts) == len(batch), f"{len(drafts)} drafts for {len(batch)} requests"
            self.last_batch_s = time.monotonic() - begun_s
            results = [
                Answer(draft, begun_s - waiting.arrived_s, self.last_batch_s, len(batch))
                for draft, waiting in zip(drafts, batch, strict=True)
            ]
        except Exception:
            log.exception("a batch of %d requests failed", len(batch))
            results = [EngineFailed() for _ in batch]
        try:
            self._loop.call_soon_threadsafe(self._settle, batch, results)
        except RuntimeError:  # the loop has closed: nobody is left to answer
            log.warning("the server ended before a batch of %d requests was answered", len(batch))

    @staticmethod
    def _settle(batch: list[Waiting], results: list[Answer | Exception]) -> None:
        for waiting, result in zip(batch, results, strict=True):
            waiting.settle(result)
