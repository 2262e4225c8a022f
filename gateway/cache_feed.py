"""One worker's KV events: from its engine's publisher into the index, and what that means for how far the index is believed."""

from __future__ import annotations

import time

from kvindex.engine_blocks import EngineBlocks
from kvindex.event_stream import EventStream
from kvindex.index import KVIndex
from routing.fleet import Worker
from workers.kv_sources import KVEventSource

clock = time.perf_counter  # the router's


class CacheFeed:
    """Follows one publisher (one data-parallel rank). `start` returns when what it still has was replayed."""

    def __init__(self, source: KVEventSource, worker: Worker, index: KVIndex, block_tokens: int):
        self.source = source
        self.worker = worker
        self.blocks = EngineBlocks(index, f"kv:{worker.id}", block_tokens)
        self.stream = EventStream(
            source.endpoint, source.replay_endpoint, source.topic,
            on_batch=self._apply, on_reset=self._reset, on_state=self._changed, name=worker.id,
        )  # fmt: skip
        self._started = False

    async def start(self) -> None:
        """Follow from the beginning, or again after the worker was away: what it published in between is replayed.

        A publisher that is not there is waited for in the background; until then the worker is known by routing memory.
        """
        if self._started:
            await self.stream.resync()
        else:
            self._started = True
            await self.stream.start()

    async def stop(self) -> None:
        await self.stream.stop()
        self.blocks.reset()

    def _apply(self, payload: bytes) -> None:
        self.worker.trust.heard(clock())
        self.blocks.apply(payload)
        if self.blocks.mismatch:
            self.worker.trust.events_lost(self.blocks.mismatch)

    def _reset(self, why: str) -> None:
        misfit = self.blocks.mismatch
        self.blocks.reset()
        if misfit:  # another engine may fit
            self.worker.trust.events_recovered()
        if why != "restart":  # then nothing is cached, and that is all there is to know
            self.worker.trust.events_incomplete(why)

    def _changed(self, state: str) -> None:
        """The publisher was reached and has replayed what it has, or went away."""
        trust = self.worker.trust
        if state == "stale":
            trust.events_lost("its publisher of KV events went away")
        elif state == "live" and trust.has_events:
            trust.events_recovered()
        elif state == "live":
            trust.events_attached()
            if self.blocks.orphaned:
                trust.events_incomplete("the publisher no longer has the events of its first blocks")
            elif self.source.replay_endpoint is None:
                trust.events_incomplete("its KV events cannot be replayed, so what it held before is not known")
