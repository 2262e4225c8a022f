"""How far the index is believed for one worker: exact (its engine's own events), memory (what was routed there), load (nothing).

Every answer that reports its cached tokens is held against what each source would have predicted, also the source that is not
in use, so that a worker falls on persistent error and climbs back by itself. A source is judged by its last `WINDOW` predictions.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Literal

logger = logging.getLogger("warmroute.trust")

Level = Literal["exact", "memory", "load"]
LEVELS: tuple[Level, ...] = ("load", "memory", "exact")

WINDOW = 20  # predictions a source is judged by
LEAST = 8  # fewer say nothing
FALL_SHARE = 0.5  # of wrong predictions, above which events are no longer believed
CLIMB_SHARE = 0.2  # and at or below which they are again
# The same of routing memory, behind which there is only load. It is wrong wherever a worker evicts more than was assumed; as long as
# some of it is right it is better than nothing, and without it sessions would scatter, so that nothing could be right any more.
MEMORY_FALL_SHARE = 0.9
MEMORY_CLIMB_SHARE = 0.5
SILENT_S = 10.0  # events of blocks that were certainly computed are lost when they take longer than this


class Source:
    """The record of one source of predictions."""

    def __init__(self, fall_share: float = FALL_SHARE, climb_share: float = CLIMB_SHARE) -> None:
        self.believed = True
        self.fall_share = fall_share
        self.climb_share = climb_share
        self._wrong: deque[bool] = deque(maxlen=WINDOW)

    def observe(self, wrong: bool) -> str | None:
        """Note one prediction; says why when the source is believed no longer, or again."""
        self._wrong.append(wrong)
        seen, misses = len(self._wrong), sum(self._wrong)
        if seen < LEAST:
            return None
        if self.believed and misses > self.fall_share * seen:
            self.believed = False
        elif not self.believed and misses <= self.climb_share * seen:
            self.believed = True
        else:
            return None
        return f"{misses} of its last {seen} predictions were wrong"

    def clear(self) -> None:
        """Start over: what is judged has been rebuilt."""
        self.believed = True
        self._wrong.clear()

    def doubt(self) -> None:
        """Believe it only once it has proved right."""
        self.believed = False
        self._wrong.clear()


class Trust:
    """One worker's level, and why. `has_events` says that there is an event source at all (exact is out of reach otherwise)."""

    def __init__(self, worker_id: str):
        self.worker_id = worker_id
        self.has_events = False
        self.level: Level = "memory"
        self.exact = Source()
        self.memory = Source(MEMORY_FALL_SHARE, MEMORY_CLIMB_SHARE)
        self.changes = 0
        self._untold = 0  # answers in a row that did not report cached tokens
        self._lost = ""  # why the events cannot be relied on now
        self._heard_at = float("-inf")
        self._due = False  # blocks were computed, and no event has come since
        self._due_since: float | None = None  # when that was first noticed

    def events_attached(self) -> None:
        """The engine publishes events, and they are being followed."""
        self.has_events = True
        self.exact.clear()
        self._lost = ""
        self._settle("its KV events are followed")

    def events_detached(self, why: str) -> None:
        """The engine publishes no events any more."""
        self.has_events = False
        self._lost, self._due, self._due_since = "", False, None
        self._settle(why)

    def not_told(self) -> None:
        """An answer did not report its cached tokens, so nothing could be held against it. Said once, since nobody checks then."""
        self._untold += 1
        if self._untold == WINDOW and self.has_events:
            logger.warning(
                "worker %s does not report cached tokens, so nobody can check what is predicted of its cache: start vLLM with "
                "--enable-prompt-tokens-details, SGLang with --enable-cache-report", self.worker_id,
            )  # fmt: skip

    def events_lost(self, why: str) -> None:
        """Events are missing: exact is out of reach until `events_recovered`."""
        if not self._lost:
            self._lost = why
            self._settle(why)

    def events_incomplete(self, why: str) -> None:
        """The events go on, but not all of what the worker holds was reported: exact is out of reach until predictions prove right."""
        self.exact.doubt()
        self._settle(why)

    def events_recovered(self, why: str = "its KV events are complete again") -> None:
        if self._lost:
            self._lost = ""
            self._settle(why)

    def heard(self, now: float) -> None:
        """A batch of events came."""
        self._heard_at = now
        self._due, self._due_since = False, None
        if self._lost == _SILENT:
            self.events_recovered("its KV events come again")

    def computed(self, since: float) -> None:
        """The worker has computed at least one new block after `since`, so an event was due after that."""
        if self.has_events and self._heard_at < since:
            self._due = True

    def check_age(self, now: float) -> None:
        """To be called about once a second."""
        if not self._due:
            return
        if self._due_since is None:
            self._due_since = now
        elif now - self._due_since > SILENT_S:
            self.events_lost(_SILENT)

    def observe(self, *, exact_error: float | None, memory_error: float, exact_tolerance: float, memory_tolerance: float) -> None:
        """Judge what the sources predicted by what the engine reported; absolute errors in tokens, None where there was no prediction."""
        self._untold = 0
        why = self.memory.observe(memory_error > memory_tolerance)
        if exact_error is not None and self.has_events:
            why = self.exact.observe(exact_error > exact_tolerance) or why
        if why is not None:
            self._settle(why)

    def _settle(self, why: str) -> None:
        level: Level = "load"
        if self.has_events and not self._lost and self.exact.believed:
            level = "exact"
        elif self.memory.believed:
            level = "memory"
        if level == self.level:
            return
        better = LEVELS.index(level) > LEVELS.index(self.level)
        logger.log(
            logging.INFO if better else logging.WARNING,
            "worker %s: its cache is now known by %s, before by %s: %s", self.worker_id, _NAMES[level], _NAMES[self.level], why,
        )  # fmt: skip
        self.level = level
        self.changes += 1


_SILENT = f"no KV event came for {SILENT_S:g} s although it computed new blocks"
_NAMES: dict[Level, str] = {"exact": "its KV events", "memory": "routing memory", "load": "nothing (its load alone counts)"}
