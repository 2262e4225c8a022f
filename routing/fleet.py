"""The fleet as the router sees it: what each worker is, what it was given, and how it has performed.

Assigned work is counted here from the moment of a decision, since scraped metrics are too old to balance by (10 ms of
staleness costs 14 % of TTFT p99). A `Reservation` has two parts: its prefill ends with the first token, the rest with
`release`, which every exit path of a request calls and which may be called twice.

Where several gateways share the fleet, each counts its own and hears of the others' (`Share`, kept by `routing.others`): what a
worker has to do is the sum of both. A worker works on one prefill at a time whoever sent it, so of all the queues in front of it
one second passes per second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from routing.calibration import ConfigurationScale, WorkerScale
from routing.trust import Trust
from workers.profile import WorkerProfile

# What a gateway can have to tell is far below these; sums of greater numbers could overflow.
MOST_AMOUNT = 1e12
MOST_COUNT = 1_000_000_000

DEFAULT_OUTPUT_TOKENS = 200.0  # agent traces: median 216 (Weka), mean 440


class Claimant(Protocol):
    """Whose requests a worker is reserved for (`routing.sessions.Session`)."""

    def begun(self) -> None: ...
    def ended(self, now: float) -> None: ...
    def begins_as_others(self, tokens: float) -> None: ...


class Reservation:
    """One request's claim on a worker."""

    __slots__ = (
        "after", "claimant", "decode_s", "kv_tokens", "phase", "prefill_s", "prompt_tokens", "root", "streamed", "uncached", "worker",
    )  # fmt: skip

    PREFILL: ClassVar[int] = 0
    DECODE: ClassVar[int] = 1
    RELEASED: ClassVar[int] = 2

    def __init__(
        self,
        worker: Worker,
        prefill_s: float,
        prompt_tokens: float,
        streamed: bool,
        now: float,
        root: int | None = None,
        uncached: float = 0.0,
        claimant: Claimant | None = None,
        shared: float = 0.0,
    ):
        self.worker = worker
        self.claimant = claimant
        if claimant is not None:
            claimant.begun()
        self.prefill_s = prefill_s
        self.prompt_tokens = prompt_tokens
        self.streamed = streamed
        self.root = root  # the prompt's first block
        self.uncached = uncached  # prompt tokens to prefill
        self.kv_tokens = prompt_tokens - shared  # what begins as other requests do is in the KV memory once for all
        self.phase = self.PREFILL
        # what other gateways have sent before comes first
        self.after = now + worker.others_wait_s(now) if worker.others else now
        if not worker.prefilling:
            worker.head_since = self.after
        worker.prefilling[self] = None
        worker.pending_s += prefill_s
        worker.pending_tokens += uncached
        worker.active_tokens += prompt_tokens
        worker.kv_tokens += self.kv_tokens
        worker.touched.add(worker)

    def first_token(self, now: float) -> None:
        """The prefill is over."""
        if self.phase == self.PREFILL:
            self._leave_prefill(now)
            self.phase = self.DECODE
            worker = self.worker
            worker.decoding += 1
            worker.touched.add(worker)

    def recount(self, prefill_s: float, uncached: float) -> None:
        """The prefill turns out to be of so many seconds and tokens: what it shares with another request is that one's, or is not."""
        if self.phase == self.PREFILL:
            worker = self.worker
            worker.pending_tokens += uncached - self.uncached
            worker.pending_s += prefill_s - self.prefill_s
            worker.kv_tokens += uncached - self.kv_tokens
            self.prefill_s, self.uncached, self.kv_tokens = prefill_s, uncached, uncached
            worker.touched.add(worker)

    def release(self, now: float) -> None:
        """The request is over, however it ended."""
        if self.phase == self.RELEASED:
            return
        worker = self.worker
        if self.phase == self.PREFILL:
            self._leave_prefill(now)
        else:
            worker.decoding -= 1
        self.phase = self.RELEASED
        if self.claimant is not None:
            self.claimant.ended(now)
        if worker.decoding or worker.prefilling:
            worker.active_tokens -= self.prompt_tokens
            worker.kv_tokens -= self.kv_tokens
        else:  # an idle worker has none at all, whatever rounding has left
            worker.active_tokens = worker.kv_tokens = 0.0
        worker.touched.add(worker)

    def _leave_prefill(self, now: float) -> None:
        worker = self.worker
        was_head = next(iter(worker.prefilling)) is self
        if was_head and worker.others_pending_s:
            worker.settle_others(now)
        del worker.prefilling[self]
        if was_head:
            worker.head_since = now
            if worker.others and worker.prefilling:
                worker.head_since = max(now, next(iter(worker.prefilling)).after)
        # an empty queue resets the sums, so that rounding never accumulates
        worker.pending_s = worker.pending_s - self.prefill_s if worker.prefilling else 0.0
        worker.pending_tokens = worker.pending_tokens - self.uncached if worker.prefilling else 0.0


@dataclass(slots=True)
class Share:
    """What one other gateway has assigned to a worker, in absolute numbers: its last word."""

    wait_s: float  # until its last prefill there would be over, were the worker its alone
    prefilling: int
    decoding: int
    active_tokens: float
    live_sessions: int
    working_set: float
    computed: float  # tokens prefilled there for this gateway since it started
    kv_tokens: float

    @classmethod
    def read(cls, numbers: Any) -> Share:
        """From a message's list. Raises ValueError."""
        if not isinstance(numbers, list) or len(numbers) != 8:
            raise ValueError("a worker's share is a list of 8 numbers")
        if not all(type(n) in (int, float) and 0 <= n <= MOST_AMOUNT for n in numbers):
            raise ValueError(f"the numbers of a worker's share are from 0 to {MOST_AMOUNT:g}")
        wait_s, prefilling, decoding, active_tokens, live_sessions, working_set, computed, kv_tokens = numbers
        if max(prefilling, decoding, live_sessions) > MOST_COUNT:
            raise ValueError(f"the counts of a worker's share are at most {MOST_COUNT}")
        return cls(wait_s, int(prefilling), int(decoding), active_tokens, int(live_sessions), working_set, computed, kv_tokens)


@dataclass(eq=False)
class Worker:
    """One worker (one URL). Times are seconds, sizes are tokens."""

    id: str
    profile: WorkerProfile = field(default_factory=WorkerProfile)
    up: bool = True
    network_s: float = 0.0

    # assigned by this gateway
    prefilling: OrderedDict[Reservation, None] = field(default_factory=OrderedDict)
    pending_s: float = 0.0
    pending_tokens: float = 0.0  # uncached prompt tokens of requests before their first token
    head_since: float = 0.0
    decoding: int = 0
    active_tokens: float = 0.0  # prompts of the requests in flight
    kv_tokens: float = 0.0  # what they take of the KV memory: what they have in common, once
    computed: float = 0.0  # tokens prefilled in all
    # sessions that live here (kept by SessionTable)
    live_sessions: int = 0
    working_set: float = 0.0  # contexts of those that are awake
    # the same of all other gateways together; none where there is one gateway
    others: dict[str, Share] = field(default_factory=dict)  # gateway id -> its share
    others_pending_s: float = 0.0  # their waits, as of `others_since`
    others_since: float = 0.0
    others_prefilling: int = 0
    others_decoding: int = 0
    others_active_tokens: float = 0.0
    others_kv_tokens: float = 0.0
    others_live_sessions: int = 0
    others_working_set: float = 0.0
    touched: set[Worker] = field(default_factory=set)  # workers whose own numbers have changed: the router's, shared by all
    # scraped: for health and dashboards, never the primary load signal
    scraped_running: float = 0.0
    scraped_waiting: float = 0.0
    scraped_kv_use: float = 0.0

    def __post_init__(self) -> None:
        self.trust = Trust(self.id)
        self.calibrate_with(ConfigurationScale(), ConfigurationScale())
        self.reconfigure(self.profile)

    def calibrate_with(self, prefill: ConfigurationScale, decode: ConfigurationScale) -> None:
        """Learn together with the workers of these; what was learned alone is dropped."""
        self.prefill_calibration, self.decode_calibration = WorkerScale(prefill), WorkerScale(decode)

    @property
    def prefill_scale(self) -> float:
        """Observed over modelled prefill time."""
        return self.prefill_calibration.value

    @property
    def decode_scale(self) -> float:
        """Observed over modelled decode time."""
        return self.decode_calibration.value

    def leave_calibration(self) -> None:
        """Learn no longer together with others (before the worker is removed or calibrates with others)."""
        self.prefill_calibration.leave()
        self.decode_calibration.leave()

    def reconfigure(self, profile: WorkerProfile) -> None:
        """Take another engine configuration (after discovery)."""
        self.profile = profile
        model = profile.latency_model()
        # plain attributes: these are read for every candidate of every decision
        self.base, self.per_token, self.per_pair = model.prefill_base, model.prefill_token, model.prefill_attention
        self.step_base, self.step_seq, self.step_kv = model.decode_base, model.decode_seq, model.decode_kv
        self.tokens_per_step = model.tokens_per_step
        self.capacity = float(profile.kv_capacity_tokens)
        self.slots = profile.max_num_seqs
        self.dropped_hit = float(profile.dropped_hit_tokens)

    @property
    def in_flight(self) -> int:
        """Requests that this gateway has assigned and not yet released."""
        return len(self.prefilling) + self.decoding

    @property
    def others_in_flight(self) -> int:
        """The same of the other gateways."""
        return self.others_prefilling + self.others_decoding

    def share(self, now: float) -> list[float]:
        """This gateway's own numbers, rounded, in the order of `Share`'s fields."""
        return [
            round(self.own_wait_s(now), 4), len(self.prefilling), self.decoding, round(self.active_tokens),
            self.live_sessions, max(0, round(self.working_set)), round(self.computed),
            max(0, round(self.kv_tokens)),
        ]  # fmt: skip

    def hear(self, gateway: str, share: Share | None, now: float) -> None:
        """Another gateway's share is this from now on; None where it has none."""
        if share is None and gateway not in self.others:
            return
        if self.others_pending_s:
            self.settle_others(now)
        if share is None:
            del self.others[gateway]
        else:
            self.others[gateway] = share
        shares = self.others.values()
        self.others_since = now
        self.others_pending_s = sum([s.wait_s for s in shares])
        self.others_prefilling = sum([s.prefilling for s in shares])
        self.others_decoding = sum([s.decoding for s in shares])
        self.others_active_tokens = sum([s.active_tokens for s in shares])
        self.others_kv_tokens = sum([s.kv_tokens for s in shares])
        self.others_live_sessions = sum([s.live_sessions for s in shares])
        self.others_working_set = sum([s.working_set for s in shares])

    def settle_others(self, now: float) -> None:
        """What the others have said earlier has become less by as much as the worker has done of it since."""
        wait = self.others_wait_s(now)
        left = wait / self.others_pending_s
        for share in self.others.values():
            share.wait_s *= left
        self.others_pending_s, self.others_since = wait, now

    def others_wait_s(self, now: float) -> float:
        """Seconds of the other gateways' prefills that are left. While the worker is at one of this gateway's, they stand still."""
        until = self.head_since if self.prefilling and self.head_since < now else now
        done = until - self.others_since
        if done <= 0.0:
            return self.others_pending_s
        return self.others_pending_s - done if self.others_pending_s > done else 0.0

    def prefill_s(self, uncached: float, total: float) -> float:
        """Calibrated seconds to prefill `uncached` of `total` prompt tokens once it runs."""
        return self.prefill_calibration.value * (self.base + uncached * (self.per_token + self.per_pair * (total - uncached / 2)))

    def token_s(self, context: float) -> float:
        """Calibrated seconds to recompute one token in a context of this length."""
        return self.prefill_calibration.value * (self.per_token + self.per_pair * context)

    def step_s(self) -> float:
        """Calibrated seconds per output token of the batch as it is."""
        decoding, tokens = self.decoding + self.others_decoding, self.active_tokens + self.others_active_tokens
        step = self.step_base + self.step_seq * decoding + self.step_kv * tokens
        return self.decode_calibration.value * step / self.tokens_per_step

    def joined_step_s(self, prompt_tokens: float) -> float:
        """Expected seconds per output token of a request that joins the batch now, as a mean over its decode.

        Those that decode now are on average half done, so each is there for half of that time.
        """
        decoding, tokens = self.decoding, self.active_tokens
        if self.others:
            decoding += self.others_decoding
            tokens += self.others_active_tokens
        step = self.step_base + self.step_seq * (0.5 * decoding + 1.0) + self.step_kv * (0.5 * tokens + prompt_tokens)
        return self.decode_calibration.value * step / self.tokens_per_step

    def wait_s(self, now: float, kv_tokens: float = 0.0) -> float:
        """Seconds until the engine could start a prefill that takes so many tokens of KV memory, from what the gateways have assigned
        to it: those ahead have had theirs, a batch slot is free, and there is room beside what running requests hold."""
        prefilling = self.prefilling
        wait = 0.0
        if prefilling:
            elapsed = now - self.head_since
            # the usual case is told here, since this is asked of every candidate of every decision
            wait = self.pending_s - elapsed if 0.0 <= elapsed <= next(iter(prefilling)).prefill_s else self.own_wait_s(now)
            if wait < 0.0:
                wait = 0.0
        in_flight = len(prefilling) + self.decoding
        if self.others:
            wait += self.others_wait_s(now)
            in_flight += self.others_prefilling + self.others_decoding
        if in_flight >= self.slots:
            wait += self._slot_wait()
        held = self.kv_tokens + self.others_kv_tokens
        lacking = held + kv_tokens - self.capacity
        if lacking > 0.0 < held:
            # running requests end one by one over a decode's length, and give back what they hold
            wait += min(lacking / held, 1.0) * DEFAULT_OUTPUT_TOKENS * self.step_s()
        return wait

    def own_wait_s(self, now: float) -> float:
        """Seconds of this gateway's own prefills that are left."""
        prefilling = self.prefilling
        if not prefilling:
            return 0.0
        head = next(iter(prefilling))
        elapsed = now - self.head_since
        while not head.streamed and elapsed > head.prefill_s:
            # the answer comes whole, so the end of its prefill is not seen: take it as predicted
            ended = self.head_since + head.prefill_s
            head.first_token(ended)
            if not prefilling:
                return 0.0
            head = next(iter(prefilling))
            elapsed = now - self.head_since
        if elapsed <= 0.0:  # the worker is still busy with what others have sent before
            return self.pending_s
        late = elapsed - head.prefill_s
        # a head that is late is expected to take as long again: a frozen worker soon looks as slow as it is
        wait = self.pending_s - head.prefill_s + late if late > 0 else self.pending_s - elapsed
        return wait if wait > 0.0 else 0.0

    def _slot_wait(self) -> float:
        """Seconds until a batch slot is free: slots empty one by one, evenly over a decode's length."""
        ahead = self.in_flight + self.others_in_flight - self.slots + 1
        return ahead * DEFAULT_OUTPUT_TOKENS * self.step_s() / self.slots

    def observe_prefill(self, observed_s: float, modelled_s: float) -> None:
        """Correct the prefill calibration: `modelled_s` is what the current calibration said of the observed time."""
        self.prefill_calibration.observe(observed_s, modelled_s)

    def observe_decode(self, observed_s: float, modelled_s: float) -> None:
        """Correct the decode calibration by one request's mean time per output token."""
        self.decode_calibration.observe(observed_s, modelled_s)

    def tell_observed(self) -> tuple[list[float], list[float]]:
        """What was observed of prefill and of decode since this was last asked, for other gateways' `learn`."""
        told = []
        for scale in (self.prefill_calibration, self.decode_calibration):
            told.append([round(seen, 3) for seen in scale.untold])
            scale.untold.clear()
        return told[0], told[1]

    def learn(self, prefill: Iterable[float], decode: Iterable[float]) -> None:
        """Another gateway has observed this."""
        for seen in prefill:
            self.prefill_calibration.learn(seen)
        for seen in decode:
            self.decode_calibration.learn(seen)
