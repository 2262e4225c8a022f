"""The simulated engine's core: what an engine does step by step, without a clock.

It schedules as vLLM's v1 scheduler does (0.32): continuous batching with chunked prefill under one token budget per step, running
requests in the order of their admission before waiting ones, `long_prefill_token_threshold` for each chunk unless its request is alone,
admission of a prompt only if it fits whole, by arrival or by priority, a paged prefix cache, and preemption by recomputation when
blocks run out. The caller owns time: `start_step` says how long the next step takes, the caller lets that time pass (really or
virtually), and `finish_step` says what the step produced.

A step is one forward pass. Its fixed cost (weights read, launches) is there once, also where prompt chunks and decodes share the pass:
max(prefill_base, decode_base). Chunks add their tokens and the attention to all that is before them, which over a prompt's chunks sums up
to `LatencyModel.prefill_s`; only the fixed cost is one per step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workers.profile import WorkerProfile
from workers.simcache import PrefixCache
from workers.simdecode import DecodeBatch
from workers.simrequest import EngineCounters, Output, SimRequest, SimSequence, StepResult

__all__ = ["EngineCounters", "Output", "SimEngine", "SimRequest", "StepResult"]


@dataclass(slots=True)
class _Flight:
    """The step under way."""

    batch: int  # requests that decode in it
    kv_tokens: float  # that these hold
    chunks: dict[SimSequence, int]
    chunk_s: float  # what the chunks add
    speed: float
    arrived: list[SimSequence]  # transferred prompts that begin to decode
    steps: int = 1


class SimEngine:
    """One simulated engine. `speed` divides every duration.

    `add` and `abort` may be called at any time, also while a step is under way. An arrival joins at the next step, as in an engine.

    With `stream` every step tells the new tokens of every request. Without, only first and last tokens are told (the last output has all
    that came since the first) and `counters` count a request's output when it leaves the batch: steps then cost what changes in them, not
    the size of the batch. Nothing else differs.
    """

    def __init__(self, profile: WorkerProfile, speed: float = 1.0, stream: bool = True) -> None:
        self.profile = profile
        self.latency = profile.latency_model()
        self.speed = speed
        self.stream = stream
        self.block_size = profile.block_size
        self.cache = PrefixCache(profile.kv_capacity_tokens // profile.block_size)
        self.counters = EngineCounters()
        # Requests that the last `start_step` took out of the queue for the first time.
        self.admitted: list[str] = []
        self._by_priority = profile.scheduling_policy == "priority"
        self._decode_width = math.ceil(self.latency.tokens_per_step)  # of the token budget, for one decoding request
        self._sequences: dict[str, SimSequence] = {}
        self._waiting: list[tuple[tuple[int, int], SimSequence]] = []
        self._waiting_count = 0
        self._prefilling: dict[SimSequence, None] = {}
        self._decodes = DecodeBatch(self.latency.tokens_per_step, self.block_size)
        self._arrivals = self._admissions = 0
        self._flight: _Flight | None = None

    @property
    def running(self) -> int:
        """Requests that hold a batch slot."""
        return len(self._prefilling) + len(self._decodes)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._waiting_count

    @property
    def decoding(self) -> int:
        """Running requests whose prompt is computed."""
        return len(self._decodes)

    @property
    def stepping(self) -> bool:
        """Whether a step is under way."""
        return self._flight is not None

    @property
    def steps_under_way(self) -> int:
        """Steps taken together at the moment; 0 between steps."""
        return self._flight.steps if self._flight is not None else 0

    @property
    def kv_use(self) -> float:
        """Share of the KV blocks that running requests hold (idle cached blocks do not count)."""
        return self.cache.used / self.cache.capacity

    def cached_prefix(self, hashes: Sequence[int]) -> int:
        """Tokens of the prompt prefix `hashes` that are in the cache."""
        return self.cache.lookup(hashes, len(hashes)).blocks * self.block_size

    def add(self, request: SimRequest) -> None:
        """Queue a request. Raises ValueError if it could never fit the KV cache, or if its id is already known."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id!r} is already in the engine")
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        needed = self._blocks(request.prompt_tokens + request.max_tokens - 1)
        if needed > self.cache.capacity:
            raise ValueError(f"request {request.id!r} needs {needed} KV blocks, the engine has {self.cache.capacity}")
        key = (request.priority if self._by_priority else 0, self._arrivals)
        sequence = SimSequence(request, key, self.cache.root, request.prompt_tokens, request.transferred)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is and free its blocks; False if it is not here (any more).

        What the steps under way would have given it is lost: shorten and finish steps taken together first, where that matters.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence.decoding or sequence in self._prefilling:
            self._remove(sequence)
        else:
            self._waiting_count -= 1
        self._forget(sequence)
        self.counters.aborted += 1
        return True

    def step(self, max_steps: int = 1) -> StepResult | None:
        """`start_step` and `finish_step` in one, for callers whose time can jump; None when there is nothing to do."""
        if self.start_step(max_steps) is None:
            return None
        return self.finish_step()

    def start_step(self, max_steps: int = 1) -> float | None:
        """Schedule the next step and return its duration in seconds; None when there is nothing to do.

        With `max_steps` above 1, decode steps that are all alike are taken together, up to the next request's end.
        """
        if self._flight is not None:
            raise RuntimeError("finish the step under way first")
        self.admitted = []
        if not self._sequences:
            return None
        chunks: dict[SimSequence, int] = {}
        arrived: list[SimSequence] = []
        limit = self._chunk_limit()
        preemptions = self.counters.preemptions
        self._grow_decodes()
        budget = self._continue_prefills(chunks, limit)
        preempted = self.counters.preemptions > preemptions
        if not preempted:
            self._admit(chunks, arrived, budget, limit)
        if not chunks and not self._decodes:
            return None
        batch = len(self._decodes)
        self._flight = flight = _Flight(batch, self._decodes.kv_tokens, chunks, self._chunk_s(chunks, batch), self.speed, arrived)
        if max_steps > 1 and not (chunks or arrived or preempted):
            flight.steps = self._decodes.steps_within(min(max_steps, self._decodes.steps_to_end()), self.cache.available)
        return self._duration_s(flight, flight.steps)

    def shorten_step(self, elapsed_s: float) -> float:
        """Cut steps that were taken together at the first boundary at or after `elapsed_s`; returns their new duration in seconds.

        For a request that arrives in between: it may join there.
        """
        flight = self._require_flight()
        low, high = 1, flight.steps
        while low < high:
            middle = (low + high) // 2
            if self._duration_s(flight, middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        flight.steps = low
        return self._duration_s(flight, low)

    def finish_step(self) -> StepResult:
        """Apply the step under way and return what it produced."""
        flight = self._require_flight()
        duration = self._duration_s(flight, flight.steps)
        self._flight = None
        outputs: list[Output] = []
        decodes = self._decodes
        decodes.steps += flight.steps
        if flight.steps > 1:
            self._give_blocks(decodes.growing(0), 0)
        due: Iterable[SimSequence] = decodes.ended()
        if self.stream:
            due = list(decodes.members)
        elif flight.arrived:
            due = dict.fromkeys((*flight.arrived, *due))
        for sequence in due:
            if sequence.decoding:
                self._deliver(sequence, decodes.emitted(sequence), outputs)
        for sequence, tokens in flight.chunks.items():
            if not sequence.gone:
                sequence.computed += tokens
                self._cache_blocks(sequence, sequence.computed)
                if sequence.computed == sequence.target:
                    self._begin_decoding(sequence, outputs)
        return StepResult(duration, flight.steps, outputs)

    # What a step does

    def _deliver(self, sequence: SimSequence, emitted: int, outputs: list[Output]) -> None:
        """Tell what a request has gained, where there is something to tell."""
        finished = emitted == sequence.request.max_tokens
        tokens, first = emitted - sequence.delivered, sequence.delivered == 0
        if tokens and (first or finished or self.stream):
            sequence.delivered = emitted
            outputs.append(Output(sequence.request.id, tokens, first, finished, sequence.cached_tokens))
            self._count(sequence, emitted)
            if first:
                self.counters.prompt_tokens += sequence.request.prompt_tokens
        if finished:
            self._remove(sequence)
            self._forget(sequence)
            self.counters.finished += 1

    def _begin_decoding(self, sequence: SimSequence, outputs: list[Output]) -> None:
        """A prompt is computed, which gives a token."""
        sequence.base += 1
        self._deliver(sequence, sequence.base, outputs)
        if not sequence.gone:
            del self._prefilling[sequence]
            self._decodes.join(sequence)

    def _count(self, sequence: SimSequence, emitted: int) -> None:
        self.counters.generation_tokens += emitted - sequence.counted
        sequence.counted = emitted

    # Scheduling

    def _chunk_limit(self) -> int:
        """Most tokens of one prompt in the next step. A request that is alone keeps nobody waiting and has the whole budget."""
        threshold = self.profile.long_prefill_token_threshold
        budget = self.profile.max_num_batched_tokens
        return min(threshold, budget) if threshold and self.running + self._waiting_count > 1 else budget

    def _grow_decodes(self) -> None:
        """Give every decoding request the block that its next step needs, preempting where there is none."""
        growing = self._decodes.growing(1)
        while growing and sum(self._decodes.missing_blocks(sequence, 1) for sequence in growing) > self.cache.available:
            self._preempt()
            growing = [sequence for sequence in growing if sequence.decoding]
        self._give_blocks(growing, 1)

    def _give_blocks(self, growing: list[SimSequence], ahead: int) -> None:
        for sequence in growing:
            self._allocate(sequence, self._decodes.missing_blocks(sequence, ahead))
            self._decodes.blocks_given(sequence)

    def _continue_prefills(self, chunks: dict[SimSequence, int], limit: int) -> int:
        """Next chunks of prompts already begun; returns the tokens left of the budget.

        vLLM goes through the batch in the order of admission; the decodes may go first all the same. Who is admitted behind unfinished
        prompts found budget left by them, and they never take more later; only the last prompt can be short of budget.
        """
        budget = max(0, self.profile.max_num_batched_tokens - self._decode_width * len(self._decodes))
        for sequence in list(self._prefilling):
            tokens = min(sequence.target - sequence.computed, limit, budget)
            if not tokens or sequence not in self._prefilling:
                continue
            needed = self._blocks(sequence.computed + tokens) - sequence.blocks
            while needed > self.cache.available:
                victim = self._preempt()
                budget += chunks.pop(victim, 0)
                if victim is sequence:
                    break
            else:
                self._allocate(sequence, needed)
                chunks[sequence] = tokens
                budget -= tokens
        return budget

    def _admit(self, chunks: dict[SimSequence, int], arrived: list[SimSequence], budget: int, limit: int) -> None:
        """Start waiting requests in order while slots, the token budget and KV blocks for their whole prompt last."""
        while budget > 0 and self._waiting_count and self.running < self.profile.max_num_seqs:
            sequence = self._first_waiting()
            request = sequence.request
            # At least one token is always computed: the engine needs its logits.
            match = self.cache.lookup(request.hashes, (sequence.target - 1) // self.block_size)
            first_step = min(int(self._decodes.rate + 1e-9), request.max_tokens) - 1 if sequence.transferred else 0
            if self._blocks(sequence.target + first_step) - match.blocks + match.idle > self.cache.available:
                return
            heapq.heappop(self._waiting)
            self._waiting_count -= 1
            sequence.admission = self._admissions
            self._admissions += 1
            sequence.tail = self.cache.hold(match)
            sequence.blocks = sequence.cached_blocks = match.blocks
            sequence.computed = match.blocks * self.block_size
            if sequence.cached_tokens < 0:
                self.admitted.append(request.id)
                sequence.cached_tokens = sequence.computed
                self.counters.prefix_queries += sequence.target
                self.counters.prefix_hits += sequence.computed
            if sequence.transferred:
                self._allocate(sequence, self._blocks(sequence.target + first_step) - sequence.blocks)
                self._cache_blocks(sequence, sequence.target)
                self._decodes.join(sequence)
                arrived.append(sequence)
                budget -= self._decode_width
                continue
            tokens = min(sequence.target - sequence.computed, limit, budget)
            self._allocate(sequence, self._blocks(sequence.computed + tokens) - sequence.blocks)
            self._prefilling[sequence] = None
            chunks[sequence] = tokens
            budget -= tokens

    def _preempt(self) -> SimSequence:
        """Send the running request that is last in order back to the queue; it keeps its output and recomputes its KV."""
        victim = max((*self._prefilling, *self._decodes.members), key=lambda sequence: sequence.key)
        self._remove(victim)
        victim.target = victim.request.prompt_tokens + victim.base
        victim.computed = 0
        victim.transferred = False
        self.counters.preemptions += 1
        self._enqueue(victim)
        return victim

    # Blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _allocate(self, sequence: SimSequence, blocks: int) -> None:
        self.cache.allocate(blocks)
        sequence.blocks += blocks

    def _cache_blocks(self, sequence: SimSequence, kv_tokens: int) -> None:
        """Offer the request's full blocks, computed up to `kv_tokens`, to others."""
        full = min(kv_tokens // self.block_size, len(sequence.request.hashes))
        if full > sequence.cached_blocks:
            sequence.tail = self.cache.extend(sequence.tail, sequence.request.hashes, sequence.cached_blocks, full)
            sequence.cached_blocks = full

    def _remove(self, sequence: SimSequence) -> None:
        """Take a running request out of the batch and free its blocks; those with a hash stay cached."""
        if sequence.decoding:
            self._decodes.leave(sequence)
            self._count(sequence, sequence.base)
            self._cache_blocks(sequence, sequence.request.prompt_tokens + sequence.base - 1)
        else:
            del self._prefilling[sequence]
        self.cache.release(sequence.tail)
        self.cache.free(sequence.blocks - sequence.cached_blocks)
        sequence.tail = self.cache.root
        sequence.blocks = sequence.cached_blocks = 0

    # The queue

    def _enqueue(self, sequence: SimSequence) -> None:
        heapq.heappush(self._waiting, (sequence.key, sequence))
        self._waiting_count += 1

    def _first_waiting(self) -> SimSequence:
        while self._waiting[0][1].gone:
            heapq.heappop(self._waiting)
        return self._waiting[0][1]

    def _forget(self, sequence: SimSequence) -> None:
        sequence.gone = True
        del self._sequences[sequence.request.id]

    # Durations

    def _chunk_s(self, chunks: dict[SimSequence, int], batch: int) -> float:
        """What prompt chunks add to a step in which `batch` requests decode."""
        if not chunks:
            return 0.0
        latency = self.latency
        fixed = max(0.0, latency.prefill_base - latency.decode_base) if batch else latency.prefill_base
        return fixed + sum(
            latency.prefill_s(tokens, sequence.computed + tokens) - latency.prefill_base for sequence, tokens in chunks.items()
        )

    def _duration_s(self, flight: _Flight, steps: int) -> float:
        duration = flight.chunk_s
        if flight.batch:
            # Each step reads what the steps before it have added.
            grown = flight.batch * self.latency.tokens_per_step * (steps - 1) / 2
            duration += steps * self.latency.step_s(flight.batch, flight.kv_tokens + grown)
        return duration / flight.speed

    def _require_flight(self) -> _Flight:
        if self._flight is None:
            raise RuntimeError("no step is under way")
        return self._flight
