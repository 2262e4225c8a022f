"""The fleet as the router sees it: what each worker is, what it was given, and how it has performed.

Assigned work is counted here from the moment of a decision, since scraped metrics are too old to balance by (10 ms of
staleness costs 14 % of TTFT p99). A `Reservation` has two parts: its prefill ends with the first token, the rest with
`release`, which every exit path of a request calls and which may be called twice.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from routing.calibration import ConfigurationScale, WorkerScale
from routing.trust import Trust
from workers.profile import WorkerProfile

DEFAULT_OUTPUT_TOKENS = 200.0  # agent traces: median 216 (Weka), mean 440


class Reservation:
    """One request's claim on a worker."""

    __slots__ = ("decode_s", "phase", "prefill_s", "prompt_tokens", "root", "streamed", "worker")

    PREFILL, DECODE, RELEASED = 0, 1, 2

    def __init__(self, worker: Worker, prefill_s: float, prompt_tokens: float, streamed: bool, now: float, root: int | None = None):
        self.worker = worker
        self.prefill_s = prefill_s
        self.prompt_tokens = prompt_tokens
        self.streamed = streamed
        self.root = root  # the prompt's first block
        self.phase = self.PREFILL
        if not worker.prefilling:
            worker.head_since = now
        worker.prefilling[self] = None
        worker.pending_s += prefill_s
        worker.active_tokens += prompt_tokens

    def first_token(self, now: float) -> None:
        """The prefill is over."""
        if self.phase == self.PREFILL:
            self._leave_prefill(now)
            self.phase = self.DECODE
            self.worker.decoding += 1

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
        worker.active_tokens -= self.prompt_tokens

    def _leave_prefill(self, now: float) -> None:
        worker = self.worker
        was_head = next(iter(worker.prefilling)) is self
        del worker.prefilling[self]
        if was_head:
            worker.head_since = now
        # an empty queue resets the sum, so that rounding never accumulates
        worker.pending_s = worker.pending_s - self.prefill_s if worker.prefilling else 0.0


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
    head_since: float = 0.0
    decoding: int = 0
    active_tokens: float = 0.0
    # sessions that live here (kept by SessionTable)
    live_sessions: int = 0
    working_set: float = 0.0
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
        """Requests assigned and not yet released."""
        return len(self.prefilling) + self.decoding

    def prefill_s(self, uncached: float, total: float) -> float:
        """Calibrated seconds to prefill `uncached` of `total` prompt tokens once it runs."""
        return self.prefill_calibration.value * (self.base + uncached * (self.per_token + self.per_pair * total))

    def token_s(self, context: float) -> float:
        """Calibrated seconds to recompute one token in a context of this length."""
        return self.prefill_calibration.value * (self.per_token + self.per_pair * context)

    def step_s(self) -> float:
        """Calibrated seconds per output token of the batch as it is."""
        step = self.step_base + self.step_seq * self.decoding + self.step_kv * self.active_tokens
        return self.decode_calibration.value * step / self.tokens_per_step

    def joined_step_s(self, prompt_tokens: float) -> float:
        """Expected seconds per output token of a request that joins the batch now, as a mean over its decode.

        Those that decode now are on average half done, so each is there for half of that time.
        """
        step = self.step_base + self.step_seq * (0.5 * self.decoding + 1.0) + self.step_kv * (0.5 * self.active_tokens + prompt_tokens)
        return self.decode_calibration.value * step / self.tokens_per_step

    def wait_s(self, now: float) -> float:
        """Seconds until the engine could start another prefill, from what this gateway has assigned to it."""
        prefilling = self.prefilling
        if not prefilling:
            return 0.0 if self.decoding < self.slots else self._slot_wait()
        head = next(iter(prefilling))
        elapsed = now - self.head_since
        while not head.streamed and elapsed > head.prefill_s:
            # the answer comes whole, so the end of its prefill is not seen: take it as predicted
            ended = self.head_since + head.prefill_s
            head.first_token(ended)
            if not prefilling:
                return 0.0 if self.decoding < self.slots else self._slot_wait()
            head = next(iter(prefilling))
            elapsed = now - self.head_since
        late = elapsed - head.prefill_s
        # a head that is late is expected to take as long again: a frozen worker soon looks as slow as it is
        wait = self.pending_s - head.prefill_s + late if late > 0 else self.pending_s - elapsed
        if len(prefilling) + self.decoding >= self.slots:
            wait += self._slot_wait()
        return wait if wait > 0.0 else 0.0

    def _slot_wait(self) -> float:
        """Seconds until a batch slot is free: slots empty one by one, evenly over a decode's length."""
        ahead = len(self.prefilling) + self.decoding - self.slots + 1
        return ahead * DEFAULT_OUTPUT_TOKENS * self.step_s() / self.slots

    def observe_prefill(self, observed_s: float, modelled_s: float) -> None:
        """Correct the prefill calibration: `modelled_s` is what the current calibration said of the observed time."""
        self.prefill_calibration.observe(observed_s, modelled_s)

    def observe_decode(self, observed_s: float, modelled_s: float) -> None:
        """Correct the decode calibration by one request's mean time per output token."""
        self.decode_calibration.observe(observed_s, modelled_s)

