"""The simulated engine's core: what an engine does step by step, without a clock.

It schedules as vLLM does: continuous batching with chunked prefill under one token budget per step, a paged prefix cache, and
preemption by recomputation when blocks run out. The caller owns time: `start_step` says how long the next step takes, the caller lets that
time pass (really or virtually), and `finish_step` says what the step produced.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from workers.profile import WorkerProfile
from workers.simcache import PrefixCache, Run


@dataclass(slots=True, frozen=True)
class SimRequest:
    """A request as the engine sees it.

    `hashes` has one cumulative hash per full KV block of the prompt; it may go on over the output, so that a later prompt which
    contains the answer finds it cached. `max_tokens` is what is generated, to the token. Lower `priority` goes first.
    """

    id: str
    hashes: Sequence[int]
    prompt_tokens: int
    max_tokens: int
    priority: int = 0


@dataclass(slots=True)
class Output:
    """What a step gave one request: `tokens` new output tokens, the first ones if `first`, the last ones if `finished`."""

    request_id: str
    tokens: int
    first: bool
    finished: bool
    cached_tokens: int


@dataclass(slots=True)
class StepResult:
    """`steps` engine steps that took `duration_s` seconds together; more than one only where all were alike (decode only)."""

    duration_s: float
    steps: int
    outputs: list[Output]


@dataclass(slots=True)
class EngineCounters:
    """Totals since the start, as vLLM counts them (tokens, except `preemptions`, `finished` and `aborted`)."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    finished: int = 0
    aborted: int = 0


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request and where it stands. `target` tokens are to be prefilled: the prompt, and after a preemption also the output so far."""

    request: SimRequest
    key: tuple[int, int]
    tail: Run
    target: int
    computed: int = 0
    blocks: int = 0
    cached_blocks: int = 0
    cached_tokens: int = -1
    emitted: int = 0
    # While decoding, output is counted from these: `base` tokens were out when the engine had done `start` decode steps.
    base: int = 0
    start: int = 0
    decoding: bool = False
    gone: bool = False


@dataclass(slots=True)
class _Flight:
    """The step under way."""

    decoding: list[_Sequence]
    chunks: dict[_Sequence, int]
    kv_tokens: int
    prefill_s: float
    speed: float
    steps: int = 1


class SimEngine:
    """One simulated engine. `speed` divides every duration.

    `add` and `abort` may be called at any time, also while a step is under way. An arrival joins at the next step, as in an engine.
    """

    def __init__(self, profile: WorkerProfile, speed: float = 1.0) -> None:
        self.profile = profile
        self.latency = profile.latency_model()
        self.speed = speed
        self.block_size = profile.block_size
        self.cache = PrefixCache(profile.kv_capacity_tokens // profile.block_size)
        self.counters = EngineCounters()
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: list[tuple[tuple[int, int], _Sequence]] = []
        self._waiting_count = 0
        self._prefilling: list[_Sequence] = []
        self._decoding: dict[_Sequence, None] = {}
        self._kv_tokens = 0
        self._decode_steps = 0
        self._arrivals = 0
        self._flight: _Flight | None = None

    @property
    def running(self) -> int:
        """Requests that hold a batch slot."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._waiting_count

    @property
    def stepping(self) -> bool:
        """Whether a step is under way."""
        return self._flight is not None

    def add(self, request: SimRequest) -> None:
        """Queue a request. Raises ValueError if it could never fit the KV cache, or if its id is already known."""
        if request.id in self._sequences:
            raise ValueError(f"request {request.id!r} is already in the engine")
        if request.prompt_tokens < 1 or request.max_tokens < 1:
            raise ValueError("a request has at least one prompt token and one output token")
        needed = self._blocks(request.prompt_tokens + request.max_tokens - 1)
        if needed > self.cache.capacity:
            raise ValueError(f"request {request.id!r} needs {needed} KV blocks, the engine has {self.cache.capacity}")
        sequence = _Sequence(request, (request.priority, self._arrivals), self.cache.root, request.prompt_tokens)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is and free its blocks; False if it is not here (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        if sequence in self._decoding or sequence in self._prefilling:
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
        chunks: dict[_Sequence, int] = {}
        preempted = self._grow_decodes()
        budget = max(0, self.profile.max_num_batched_tokens - len(self._decoding) * math.ceil(self.latency.tokens_per_step))
        budget, preempted_too = self._continue_prefills(chunks, budget)
        if not (preempted or preempted_too):
            self._admit(chunks, budget)
        if not chunks and not self._decoding:
            return None
        flight = _Flight(list(self._decoding), chunks, self._kv_tokens, self._prefill_s(chunks), self.speed)
        if not chunks and max_steps > 1:
            flight.steps = self._alike_steps(max_steps)
        self._flight = flight
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
        if flight.decoding:
            self._decode_steps += flight.steps
            self._emit_decoded(flight.decoding, outputs)
        for sequence, tokens in flight.chunks.items():
            if sequence.gone:
                continue
            sequence.computed += tokens
            self._cache_blocks(sequence, sequence.computed)
            if sequence.computed == sequence.target:
                self._emit_prefilled(sequence, outputs)
        return StepResult(duration, flight.steps, outputs)

    # What a step does

    def _emit_decoded(self, decoding: list[_Sequence], outputs: list[Output]) -> None:
        rate, steps = self.latency.tokens_per_step, self._decode_steps
        for sequence in decoding:
            if sequence.gone:
                continue
            emitted = sequence.base + int((steps - sequence.start) * rate + 1e-9)
            limit = sequence.request.max_tokens
            if emitted > limit:
                emitted = limit
            tokens = emitted - sequence.emitted
            sequence.emitted = emitted
            self._kv_tokens += tokens
            self.counters.generation_tokens += tokens
            finished = emitted == limit
            outputs.append(Output(sequence.request.id, tokens, False, finished, sequence.cached_tokens))
            if finished:
                self._finish(sequence)

    def _emit_prefilled(self, sequence: _Sequence, outputs: list[Output]) -> None:
        first = sequence.emitted == 0
        sequence.emitted += 1
        self.counters.generation_tokens += 1
        if first:
            self.counters.prompt_tokens += sequence.request.prompt_tokens
        finished = sequence.emitted == sequence.request.max_tokens
        outputs.append(Output(sequence.request.id, 1, first, finished, sequence.cached_tokens))
        if finished:
            self._finish(sequence)
            return
        self._prefilling.remove(sequence)
        sequence.decoding = True
        sequence.base, sequence.start = sequence.emitted, self._decode_steps
        self._decoding[sequence] = None
        self._kv_tokens += sequence.request.prompt_tokens + sequence.emitted

    def _finish(self, sequence: _Sequence) -> None:
        self._remove(sequence)
        self._forget(sequence)
        self.counters.finished += 1

    # Scheduling

    def _grow_decodes(self) -> bool:
        """Give every decoding request the block its next step may need, preempting where there is none; True if one was preempted."""
        needed = self._decode_growth(1)
        if not needed:
            return False
        preempted = False
        while needed > self.cache.available:
            self._preempt()
            preempted = True
            needed = self._decode_growth(1)
        self._allocate_growth(1)
        return preempted

    def _continue_prefills(self, chunks: dict[_Sequence, int], budget: int) -> tuple[int, bool]:
        """Next chunks of prompts already begun; returns the tokens left of the budget and whether a request was preempted."""
        preempted = False
        for sequence in list(self._prefilling):
            if budget == 0:
                break
            if sequence not in self._prefilling:
                continue
            tokens = min(sequence.target - sequence.computed, budget)
            needed = self._blocks(sequence.computed + tokens) - sequence.blocks
            while needed > self.cache.available:
                victim = self._preempt()
                preempted = True
                budget += chunks.pop(victim, 0)
                if victim is sequence:
                    break
            else:
                self._allocate(sequence, needed)
                chunks[sequence] = tokens
                budget -= tokens
        return budget, preempted

    def _admit(self, chunks: dict[_Sequence, int], budget: int) -> None:
        """Start waiting requests in order while slots, the token budget and KV blocks for their whole prompt last."""
        while budget > 0 and self._waiting_count and self.running < self.profile.max_num_seqs:
            sequence = self._first_waiting()
            # At least one token is always computed: the engine needs its logits.
            match = self.cache.lookup(sequence.request.hashes, (sequence.target - 1) // self.block_size)
            if self._blocks(sequence.target) - match.blocks + match.idle > self.cache.available:
                return
            heapq.heappop(self._waiting)
            self._waiting_count -= 1
            sequence.tail = self.cache.hold(match)
            sequence.blocks = sequence.cached_blocks = match.blocks
            sequence.computed = match.blocks * self.block_size
            if sequence.cached_tokens < 0:
                sequence.cached_tokens = sequence.computed
                self.counters.prefix_queries += sequence.target
                self.counters.prefix_hits += sequence.computed
            tokens = min(sequence.target - sequence.computed, budget)
            self._allocate(sequence, self._blocks(sequence.computed + tokens) - sequence.blocks)
            self._prefilling.append(sequence)
            chunks[sequence] = tokens
            budget -= tokens

    def _preempt(self) -> _Sequence:
        """Send the running request that is last in order back to the queue; it keeps its output and recomputes its KV."""
        victim = max((*self._prefilling, *self._decoding), key=lambda sequence: sequence.key)
        self._remove(victim)
        victim.target = victim.request.prompt_tokens + victim.emitted
        victim.computed = 0
        self.counters.preemptions += 1
        self._enqueue(victim)
        return victim

    def _alike_steps(self, max_steps: int) -> int:
        """How many decode steps can be taken together: until the first request ends, and no further than the blocks last."""
        rate = self.latency.tokens_per_step
        steps = max_steps
        for sequence in self._decoding:
            left = math.ceil((sequence.request.max_tokens - sequence.base) / rate) - (self._decode_steps - sequence.start)
            if left < steps:
                steps = left
        steps = max(1, steps)
        while steps > 1 and self._decode_growth(steps) > self.cache.available:
            steps //= 2
        if steps > 1:
            self._allocate_growth(steps)
        return steps

    # Blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _decode_blocks(self, sequence: _Sequence, steps: int) -> int:
        """Blocks that a decoding request fills in `steps` more steps. The newest token's KV is only written by the step after it."""
        emitted = sequence.base + int((self._decode_steps + steps - sequence.start) * self.latency.tokens_per_step + 1e-9)
        return -(-(sequence.request.prompt_tokens + min(emitted, sequence.request.max_tokens) - 1) // self.block_size)

    def _decode_growth(self, steps: int) -> int:
        return sum(max(0, self._decode_blocks(sequence, steps) - sequence.blocks) for sequence in self._decoding)

    def _allocate_growth(self, steps: int) -> None:
        for sequence in self._decoding:
            growth = self._decode_blocks(sequence, steps) - sequence.blocks
            if growth > 0:
                self._allocate(sequence, growth)

    def _allocate(self, sequence: _Sequence, blocks: int) -> None:
        self.cache.allocate(blocks)
        sequence.blocks += blocks

    def _cache_blocks(self, sequence: _Sequence, kv_tokens: int) -> None:
        """Offer the request's full blocks, computed up to `kv_tokens`, to others."""
        full = min(kv_tokens // self.block_size, len(sequence.request.hashes))
        if full > sequence.cached_blocks:
            sequence.tail = self.cache.extend(sequence.tail, sequence.request.hashes, sequence.cached_blocks, full)
            sequence.cached_blocks = full

    def _remove(self, sequence: _Sequence) -> None:
        """Take a running request out of the batch and free its blocks; those with a hash stay cached."""
        if sequence.decoding:
            del self._decoding[sequence]
            self._kv_tokens -= sequence.request.prompt_tokens + sequence.emitted
            self._cache_blocks(sequence, sequence.request.prompt_tokens + sequence.emitted - 1)
            sequence.decoding = False
        else:
            self._prefilling.remove(sequence)
        self.cache.release(sequence.tail)
        self.cache.free(sequence.blocks - sequence.cached_blocks)
        sequence.tail = self.cache.root
        sequence.blocks = sequence.cached_blocks = 0

    # The queue

    def _enqueue(self, sequence: _Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.key, sequence))
        self._waiting_count += 1

    def _first_waiting(self) -> _Sequence:
        while self._waiting[0][1].gone:
            heapq.heappop(self._waiting)
        return self._waiting[0][1]

    def _forget(self, sequence: _Sequence) -> None:
        sequence.gone = True
        del self._sequences[sequence.request.id]

    # Durations

    def _prefill_s(self, chunks: dict[_Sequence, int]) -> float:
        if not chunks:
            return 0.0
        latency = self.latency
        return latency.prefill_base + sum(
            tokens * (latency.prefill_token + latency.prefill_attention * sequence.target) for sequence, tokens in chunks.items()
        )

    def _duration_s(self, flight: _Flight, steps: int) -> float:
        duration = flight.prefill_s
        batch = len(flight.decoding)
        if batch:
            # Each step reads what the steps before it have added.
            grown = batch * self.latency.tokens_per_step * (steps - 1) / 2
            duration += steps * self.latency.step_s(batch, flight.kv_tokens + grown)
        return duration / flight.speed

    def _require_flight(self) -> _Flight:
        if self._flight is None:
            raise RuntimeError("no step is under way")
        return self._flight
