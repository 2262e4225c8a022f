"""The simulated engine in real time: its steps end when they would on the engine, whatever the event loop is doing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from workers.simengine import SimEngine, SimRequest, StepResult

# Called with the new tokens, whether they are the last, and the prompt tokens that were cached.
Deliver = Callable[[int, bool, int], None]

# Steps made up for at once when the loop is late; then others get a turn.
_CATCH_UP_STEPS = 64


class PacedEngine:
    """Drives a `SimEngine` by the event loop's clock.

    A step starts at the planned end of the one before, not when Python woke up, so that lateness does not add up. Steps that are
    overdue are taken at once and their tokens delivered together: one delivery per request and wake-up.
    """

    def __init__(self, engine: SimEngine) -> None:
        self.engine = engine
        self.steps = 0
        self.lag_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._deliver: dict[str, Deliver] = {}
        self._ends = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False

    def submit(self, request: SimRequest, deliver: Deliver) -> None:
        """Queue a request; `deliver` is called as its tokens come. Raises ValueError as `SimEngine.add` does."""
        self.engine.add(request)
        self._deliver[request.id] = deliver
        self._start()

    def abort(self, request_id: str) -> None:
        """Drop a request; nothing more is delivered for it."""
        self._deliver.pop(request_id, None)
        self.engine.abort(request_id)

    def pause(self) -> None:
        """Stop the engine's time; tokens stop coming."""
        self._paused = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def resume(self) -> None:
        """Let time go on. The step under way ends at once."""
        if not self._paused:
            return
        self._paused = False
        self._ends = self._loop.time()
        if self.engine.stepping:
            self._timer = self._loop.call_at(self._ends, self._wake)
        else:
            self._start()

    def _start(self) -> None:
        if self._paused or self.engine.stepping:
            return
        duration = self.engine.start_step()
        if duration is not None:
            self._ends = self._loop.time() + duration
            self._timer = self._loop.call_at(self._ends, self._wake)

    def _wake(self) -> None:
        self._timer = None
        now = self._loop.time()
        self.lag_s = max(0.0, now - self._ends)
        results: list[StepResult] = []
        for _ in range(_CATCH_UP_STEPS):
            results.append(self.engine.finish_step())
            duration = self.engine.start_step()
            if duration is None:
                break
            self._ends += duration
            if self._ends > now:
                break
        if self.engine.stepping:
            self._timer = self._loop.call_at(self._ends, self._wake)
        self.steps += len(results)
        self._deliver_all(results)

    def _deliver_all(self, results: list[StepResult]) -> None:
        if len(results) == 1:
            due = [(o.request_id, o.tokens, o.finished, o.cached_tokens) for o in results[0].outputs]
        else:
            merged: dict[str, tuple[str, int, bool, int]] = {}
            for result in results:
                for o in result.outputs:
                    before = merged.get(o.request_id)
                    merged[o.request_id] = (o.request_id, o.tokens + (before[1] if before else 0), o.finished, o.cached_tokens)
            due = list(merged.values())
        for request_id, tokens, finished, cached_tokens in due:
            deliver = self._deliver.pop(request_id, None) if finished else self._deliver.get(request_id)
            if deliver is not None:
                deliver(tokens, finished, cached_tokens)
