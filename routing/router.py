"""The router: one decision per request. Joins the index, the fleet, the sessions and a policy; pure logic, clock handed in."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from xxhash import xxh3_128_digest

from kvindex.index import KVIndex
from kvindex.routing_memory import RoutingMemory
from kvindex.token_ratio import TokenRatio
from routing.calibration import ConfigurationScale
from routing.elsewhere import EventsElsewhere
from routing.fleet import DEFAULT_OUTPUT_TOKENS, Reservation, Share, Worker
from routing.policies import POLICIES, Congestion, Placement, Policy, Terms
from routing.sessions import Session, SessionRecord, SessionTable, root_of
from routing.tickets import Tickets
from workers.profile import WorkerProfile

# How much a second of decoding weighs against a second before the first token.
DECODE_WEIGHT = {"latency": 1.0, "standard": 1.0, "throughput": 1.0}


class NoWorker(Exception):
    """No worker can take the request: none serves the model (`known` is false), or all that do are down."""

    def __init__(self, model: str, known: bool):
        super().__init__(f"no worker for model {model!r}")
        self.model = model
        self.known = known


class CacheEvents(Protocol):
    """What one worker holds as its engine reports it (`kvindex.engine_blocks.EngineBlocks`). Depths count index blocks."""

    @property
    def tiers(self) -> tuple[str, ...]: ...  # holders in the index, cumulative: accelerator; it or host memory; all

    def usable(self, hashes: Sequence[int], depth: int) -> int: ...
    def expect(self, hashes: Sequence[int], held: int, until: float) -> None: ...
    def withdraw(self, hashes: Sequence[int]) -> None: ...
    def expire(self, now: float) -> None: ...


@dataclass(slots=True)
class RouteRequest:
    """What the router needs of a request. `length` is the prompt in the chain's units (bytes in text mode).

    In token mode `tokens` is the prompt's exact length and `block_tokens` the chain's block; both are 0 in text mode.
    """

    model: str
    hashes: Sequence[int]
    length: int
    session: Hashable | None = None
    tier: str = "standard"
    max_output_tokens: int | None = None
    streamed: bool = True
    tokens: int = 0
    block_tokens: int = 0
    pinned: str | None = None  # the worker that must take it, when that is up
    session_id: bytes | None = None  # what all gateways know the session by: see `Router.session_id`
    shared: SessionRecord | None = None  # what other gateways know of the session
    ticket: int = 0  # its place among the new sessions of all gateways, see `tickets`; 0 where it has drawn none


_EXPLAINED = ("cost", "wait", "restore", "own", "congestion", "decode", "evict", "crowd", "cached", "live_sessions", "in_flight")


@dataclass(slots=True)
class Decision:
    """Where a request goes and why. `reason`: home (its session's worker), moved (another one), prefix (a first turn where a
    shared prefix is warm), cold (a first turn with nothing cached there), pinned (the request named its worker)."""

    request: RouteRequest
    worker: Worker
    session: Session | None
    reservation: Reservation
    reason: str
    policy: str
    prompt_tokens: float
    cached_tokens: float  # predicted
    wait_s: float  # predicted
    prefill_s: float  # predicted, own work
    placed_at: float  # the clock's time of the decision
    candidates: list[tuple[Any, ...]]  # the chosen one first, each with the terms of its cost (fields of `Terms`)
    by_events: float | None = None  # cached tokens as the worker's events have it, believed or not; None where there are none
    by_memory: float = 0.0  # the same of routing memory
    certain: bool = True  # no request that was computing this prompt's beginning, or was not heard of yet, can have been before it
    gateway: str = ""

    def session_record(self) -> SessionRecord | None:
        """What to tell the other gateways of the session, under the request's `session_id`; None where there is nothing to tell.
        To be asked for right after the decision."""
        session = self.session
        if session is None or session.id is None or session.home is None:
            return None
        return SessionRecord(session.home.id, self.gateway, session.turns, session.context, session.regret, session.shared)

    def explain(self) -> dict[str, object]:
        """The decision as plain data, for logs and people."""
        terms = [Terms(*entry) for entry in self.candidates]
        weighed = {t.worker.id: {name: round(getattr(t, name), 6) for name in _EXPLAINED} for t in terms if t.worker is not None}
        return {
            "worker": self.worker.id, "reason": self.reason, "policy": self.policy, "known_by": self.worker.trust.level,
            "prompt_tokens": round(self.prompt_tokens), "cached_tokens": round(self.cached_tokens), "candidates": weighed,
        }  # fmt: skip


ROOT_TOKENS = 128  # conversations of one client that differ only later than this count as one session (text mode: one block)
# Events come this long after the tokens they tell of, at most: until then a chain that was sent counts as held.
EVENTS_LAG_S = 5.0
LONGEST_EXPECTATION_S = 60.0


def _depth(events: CacheEvents, worker: Worker, request: RouteRequest, matches: Mapping[str, int]) -> tuple[int, float]:
    """(leading blocks that the worker holds, seconds to restore those that are not on the accelerator)."""
    accelerator, *below = events.tiers
    depth = matches.get(accelerator, 0)
    if depth or isinstance(events, EventsElsewhere):
        depth = events.usable(request.hashes, depth)
    restore_s = 0.0
    for holder in below:
        deeper = matches.get(holder, 0)
        if deeper > depth:
            restore_s += (deeper - depth) * request.block_tokens * worker.profile.restore_token_s(holder.rpartition("@")[2])
            depth = deeper
    return depth, restore_s


def _root_blocks(request: RouteRequest) -> int:
    return max(1, ROOT_TOKENS // request.block_tokens) if request.tokens else 1


def _hit_tokens(depth: int, block: float, most: float, worker: Worker) -> float:
    return max(0.0, min(depth * block, most) - worker.dropped_hit)


def _configuration(profile: WorkerProfile) -> WorkerProfile:
    """What makes two workers equally fast: the profile without sizes and price."""
    return profile.model_copy(update={"model": None, "kv_capacity_tokens": 1, "block_size": 1, "price_per_hour": 0.0, "role": "both"})


class Router:
    """Owns the fleet's state. `block_units` is the index block in the chain's units (bytes in text mode)."""

    def __init__(
        self,
        index: KVIndex,
        memory: RoutingMemory,
        *,
        block_units: int = 512,
        policy: str = "warm",
        sessions: SessionTable | None = None,
    ):
        self.index = index
        self.memory = memory
        self.block_units = block_units
        self.sessions = sessions if sessions is not None else SessionTable()
        self.tokens = TokenRatio()
        self.events: dict[str, CacheEvents] = {}  # worker -> what its engine reports
        self.token_blocks: dict[str, int] = {}  # model in token mode -> index block in tokens
        self._elsewhere: dict[str, EventsElsewhere] = {}  # worker -> what another gateway's index says its engine reports
        self.gateway_id = ""
        self.tickets = Tickets()
        self.touched: set[Worker] = set()  # workers whose own numbers have changed since somebody emptied this
        self._load_only: set[str] = set()  # workers whose cache is not known well enough to count
        self.congestion = Congestion()
        self.workers: dict[str, Worker] = {}
        self._serving: dict[str, list[Worker]] = {}  # model -> workers, up or not
        self._up: dict[str, list[Worker]] = {}  # the same without those that are down; made when first asked for
        self._scales: dict[WorkerProfile, tuple[ConfigurationScale, ConfigurationScale]] = {}
        self.policy: Policy = POLICIES[policy]()

    # --- the fleet ---

    def add_worker(self, worker_id: str, models: Collection[str], profile: WorkerProfile | None = None) -> Worker:
        """Add a worker, or take over what was learned of one: the models it serves and its engine configuration."""
        worker = self.workers.get(worker_id)
        if worker is None:
            worker = self.workers[worker_id] = Worker(worker_id, profile or WorkerProfile(), touched=self.touched)
            self._calibrate(worker)
        elif profile is not None and profile != worker.profile:
            same = _configuration(profile) == _configuration(worker.profile)
            worker.reconfigure(profile)
            if not same:
                self._calibrate(worker)
        for serving in self._serving.values():
            if worker in serving:
                serving.remove(worker)
        for model in models:
            self._serving.setdefault(model, []).append(worker)
        self._up.clear()
        self._size_memory(worker)
        return worker

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker altogether."""
        worker = self.workers.pop(worker_id)
        for serving in self._serving.values():
            if worker in serving:
                serving.remove(worker)
        self._up.clear()
        self.memory.remove(worker_id)
        self.sessions.forget_home(worker)
        self.tickets.lost_cache(worker)
        self._elsewhere.pop(worker_id, None)
        self._load_only.discard(worker_id)
        # requests that are under way there still end, and are nobody's affair
        self.touched.discard(worker)
        worker.touched = set()
        worker.leave_calibration()
        worker.calibrate_with(ConfigurationScale(), ConfigurationScale())
        self._drop_unused_scales()

    def _calibrate(self, worker: Worker) -> None:
        """Let a worker learn together with those of its configuration."""
        prefill, decode = self._scales.setdefault(_configuration(worker.profile), (ConfigurationScale(), ConfigurationScale()))
        worker.leave_calibration()
        worker.calibrate_with(prefill, decode)
        self._drop_unused_scales()

    def _drop_unused_scales(self) -> None:
        for unused in [configuration for configuration, (prefill, _) in self._scales.items() if not prefill.members]:
            del self._scales[unused]

    def set_up(self, worker: Worker, up: bool) -> None:
        """Take a worker out of the candidates, or back in."""
        worker.up = up
        self._up.clear()

    def others_computed(self, worker: Worker, tokens: float, now: float) -> None:
        """Other gateways' requests have filled so many tokens of a worker's cache: routing memory makes room for them."""
        model = worker.profile.model or ""
        block_tokens = self.token_blocks.get(model) or self.block_units / self.tokens.of(model)
        self.memory.others_computed(worker.id, round(tokens / block_tokens), now)

    def lost_cache(self, worker: Worker) -> None:
        """The worker died or restarted: nothing is cached there, and its sessions have no home."""
        self.memory.forget(worker.id)
        self.sessions.forget_home(worker)
        self.tickets.lost_cache(worker)

    @property
    def models(self) -> list[str]:
        """Models that some worker serves, in order of appearance."""
        return [model for model, serving in self._serving.items() if serving]

    def serving(self, model: str) -> Sequence[Worker]:
        """The workers of a model, up or not."""
        return self._serving.get(model, ())

    def use_policy(self, name: str) -> None:
        """Switch the policy and forget what was routed, so that what follows starts cold. Raises KeyError."""
        policy = POLICIES[name]()
        for worker in self.workers.values():
            self.memory.forget(worker.id)
        self.sessions.clear()
        self.congestion = Congestion()
        self.policy = policy

    def expire(self, now: float) -> None:
        """Forget what is older than its time to live: a bounded amount of work, to be called about once a second."""
        self.sessions.expire(now)
        self.memory.expire(now)
        for worker_id, events in self.events.items():
            events.expire(now)
            self.workers[worker_id].trust.check_age(now)
        for worker_id in [w for w in self._elsewhere if w in self.events]:
            del self._elsewhere[worker_id]  # this gateway follows them itself now
        for elsewhere in self._elsewhere.values():
            elsewhere.expire(now)

    def _size_memory(self, worker: Worker) -> None:
        model = worker.profile.model or ""
        block_tokens = self.token_blocks.get(model) or self.block_units / self.tokens.of(model)
        blocks = int(worker.profile.kv_capacity_tokens / block_tokens)
        self.memory.set_capacity(worker.id, max(1, blocks))

    # --- decisions ---

    def session_id(self, request: RouteRequest) -> bytes | None:
        """What all gateways know the request's session by (16 bytes); kept in the request. None for a session without a key: its
        turns go where their prefix is. Under another policy it is another one, so that a switch starts cold for all of them."""
        if request.session is None or not request.hashes:
            return None
        root = root_of(request.hashes, _root_blocks(request))
        request.session_id = xxh3_128_digest(f"{self.policy.name} {request.session!r}".encode(), root)
        return request.session_id

    def is_settled(self, request: RouteRequest) -> bool:
        """Whether nothing that other gateways know could change the decision: this one counts the request's session, and the worker
        where that is at home has nothing to prefill and holds what this gateway has sent there."""
        if request.session is None or not request.hashes:
            return False
        session = self.sessions.known(request.session, root_of(request.hashes, _root_blocks(request)))
        if session is None or session.elsewhere:
            return False
        home = session.home
        return (
            home is not None
            and home.up
            and not home.prefilling
            and not home.others_prefilling
            and home.decoding + home.others_decoding < home.slots
            and self.memory.holds(home.id, session.key)
        )

    def decide(
        self, request: RouteRequest, now: float, exclude: Collection[Worker] = (), known: Mapping[str, int] | None = None
    ) -> Decision:
        """Choose a worker and reserve it. Raises NoWorker. The caller releases `Decision.reservation` on every exit path.

        `known` is the match of the index that all gateways share, None where that cannot be asked: holder -> leading blocks.
        """
        model = request.model
        candidates = self._up.get(model)
        if candidates is None:
            serving = self._serving.get(model)
            if not serving:
                raise NoWorker(model, known=False)
            candidates = self._up[model] = [worker for worker in serving if worker.up]
        if exclude:
            candidates = [worker for worker in candidates if worker not in exclude]
        if not candidates:
            raise NoWorker(model, known=True)
        pinned = False
        if request.pinned is not None:
            named = [worker for worker in candidates if worker.id == request.pinned]
            candidates, pinned = named or candidates, bool(named)
        hashes = request.hashes
        block: float
        most: float
        if request.tokens:
            total = float(request.tokens)
            block = float(request.block_tokens)
            most = float((request.tokens - 1) // request.block_tokens * request.block_tokens)  # an engine computes at least the last token
        else:
            ratio = self.tokens.of(model)
            total = request.length / ratio
            if total < 1.0:
                total = 1.0
            block = self.block_units / ratio
            most = total
        cached: dict[str, float] = {}
        restore: dict[str, float] = {}
        matches: Mapping[str, int] = {}
        session: Session | None = None
        if hashes:
            matches = self.index.match(hashes)
            longest = 0
            for holder, blocks in matches.items():
                if holder not in self.workers:  # what an engine reports: see below. It holds more than prompts, so ends no session's chain
                    continue
                if blocks > longest:
                    longest = blocks
                held = blocks * block
                cached[holder] = held if held < most else most
            if known:
                matches = self._merge(matches, known, block, most, cached)
            if self.events or self._elsewhere or self._load_only:
                self._use_events(candidates, request, matches, block, most, cached, restore, known is not None)
            session = self.sessions.find(request.session, hashes, longest, now, _root_blocks(request))
            if request.session_id is not None and session is not None:
                record = request.shared
                told = self.workers.get(record.worker) if record is not None else None
                self.sessions.share(session, request.session_id, record, told if told is not None and told.up else None)
        home = session.home if session is not None else None
        limit = request.max_output_tokens
        output = limit if limit is not None and limit < DEFAULT_OUTPUT_TOKENS else DEFAULT_OUTPUT_TOKENS
        placement = Placement(total, cached, session, self.sessions, output, DECODE_WEIGHT[request.tier], self.congestion, now, restore)
        sent_alike: set[Worker] = set()
        if request.ticket and session is not None and home is None:
            sent_alike = self._assume(request, placement, cached, session, candidates)
        ranked = self.policy.rank(placement, candidates)
        worker: Worker = ranked[0][4]
        held = cached.get(worker.id, 0.0)
        if home is not None:
            reason = "home" if worker is home else "moved"
        else:
            reason = "prefix" if held else "cold"
        if pinned:
            reason = "pinned"
        shared = placement.shared(worker, held)
        wait = worker.wait_s(now, total - shared)
        prefill = worker.prefill_s(total - held, total)
        self.congestion.add(prefill, now, at_home=worker is home)
        # what others with this beginning are still computing may or may not be there when this one starts
        certain = worker not in sent_alike and (not hashes or all(other.root != hashes[0] for other in worker.prefilling))
        root = hashes[0] if hashes else None
        reservation = Reservation(worker, prefill, total, request.streamed, now, root, total - held, session, shared)
        if session is not None:
            self.sessions.placed(session, worker, hashes, total, held)
            # the chain counts as held from now on, so that siblings in a burst go together
            self.memory.record(worker.id, session.key, hashes, now, known.get(worker.id, 0) if known else 0)
            worker.computed += total - held
            if request.ticket:
                self.tickets.place(request.ticket, hashes[0], reservation, held, now)
                request.ticket = 0  # used up, should the request have to be placed once more
        by_events: float | None = None
        events = self._events_of(worker, known is not None) if request.tokens else None
        if events is not None:
            depth, _ = _depth(events, worker, request, matches)
            by_events = _hit_tokens(depth, block, most, worker)
            events.expect(hashes, depth, now + min(2.0 * (wait + prefill) + EVENTS_LAG_S, LONGEST_EXPECTATION_S))
        by_memory = min(matches.get(worker.id, 0) * block, most)
        return Decision(
            request, worker, session, reservation, reason, self.policy.name, total, held, wait, prefill, now, ranked, by_events, by_memory,
            certain, self.gateway_id,
        )  # fmt: skip

    def _assume(
        self, request: RouteRequest, placement: Placement, cached: dict[str, float], session: Session, candidates: Sequence[Worker]
    ) -> set[Worker]:
        """Other gateways are placing sessions that drew their tickets before this one, unheard: they do what this one would do.
        Returns the workers that sessions which begin like this one have just been sent to."""
        now, total, root, tickets = placement.now, placement.prompt_tokens, request.hashes[0], self.tickets
        unheard = tickets.unheard(request.ticket, now)
        # what new sessions like this one begin with: the longest that two workers hold, since the longest of all may be a turn of this one
        common = sorted([0.0, *cached.values()])[-2 if len(cached) > 1 else -1]
        sent_to = tickets.begin_alike(root, common, cached, candidates, total, now)
        if common:
            for worker in sent_to:
                cached[worker.id] = max(common, cached.get(worker.id, 0.0))
        placement.crowded = bool(unheard) or tickets.crowded
        placement.waits = tickets.waits(root, total, now)
        for ticket in unheard:
            worker = self.policy.rank(placement, candidates)[0][4]
            held = cached.get(worker.id, 0.0)
            share = Share(worker.prefill_s(total - held, total), 1, 0, total, 1, total - held, 0.0, total - held)
            tickets.assume(ticket, root, worker, share, held, now)
            sent_to.add(worker)
            if common > held:
                cached[worker.id] = common
            placement.waits = tickets.waits(root, total, now)
        if placement.waits is not None:
            placement.own_alike = tickets.own(root)
        return sent_to

    def failed(self, decision: Decision) -> None:
        """The request was not answered as asked (refused, broken, left by its client): what it was to compute is not there."""
        if decision.by_events is not None and (events := self._events_of(decision.worker, True)) is not None:
            events.withdraw(decision.request.hashes)

    def _merge(
        self, matches: Mapping[str, int], known: Mapping[str, int], block: float, most: float, cached: dict[str, float]
    ) -> Mapping[str, int]:
        """The local match and the shared one, each holder with the greater depth; puts the workers' into `cached`."""
        merged = dict(matches)
        for holder, blocks in known.items():
            if holder in self.workers:
                if blocks > merged.get(holder, 0):
                    merged[holder] = blocks
                    held = blocks * block
                    cached[holder] = held if held < most else most
                continue
            if blocks > merged.get(holder, 0):
                merged[holder] = blocks
            worker = self.workers.get(holder[3:].removesuffix("@cpu").removesuffix("@disk")) if holder.startswith("kv:") else None
            if worker is not None and worker.id not in self.events:
                if worker.id not in self._elsewhere:
                    self._elsewhere[worker.id] = EventsElsewhere(worker.id)
                if not worker.trust.has_events:
                    worker.trust.events_attached()
        return merged

    def _events_of(self, worker: Worker, shared: bool) -> CacheEvents | None:
        """What the worker's engine reports, to this gateway or, where the shared index can be asked, to another one."""
        events = self.events.get(worker.id)
        if events is None and shared and self._elsewhere:
            return self._elsewhere.get(worker.id)
        return events

    def _use_events(
        self,
        candidates: Sequence[Worker],
        request: RouteRequest,
        matches: Mapping[str, int],
        block: float,
        most: float,
        cached: dict[str, float],
        restore: dict[str, float],
        shared: bool,
    ) -> None:
        """Put what the engines report in the place of routing memory, for the workers of which that is believed."""
        for worker in candidates:
            level = worker.trust.level
            if level == "exact" and request.tokens and (events := self._events_of(worker, shared)) is not None:
                depth, restore_s = _depth(events, worker, request, matches)
                if depth:
                    cached[worker.id] = _hit_tokens(depth, block, most, worker)
                    if restore_s:
                        restore[worker.id] = restore_s
                else:
                    cached.pop(worker.id, None)
            elif level == "load":
                cached.pop(worker.id, None)

    # --- what came of them ---

    def learn(
        self,
        decision: Decision,
        *,
        prompt_tokens: int | None,
        cached_tokens: int | None,
        ttft_s: float | None,
    ) -> None:
        """Correct the estimates by what the engine reported (tokens) and what was seen (time to first token of a stream)."""
        request, worker = decision.request, decision.worker
        if prompt_tokens and not request.tokens and self.tokens.observe(request.model, request.length, prompt_tokens):
            for other in self.serving(request.model):
                self._size_memory(other)
        total = float(prompt_tokens or decision.prompt_tokens)
        cached = decision.cached_tokens if cached_tokens is None else float(cached_tokens)
        if ttft_s is not None:
            own = worker.prefill_s(max(total - cached, 1.0), total)
            # a new session of which more was cached than could be known has waited for another gateway's, which computed that
            waited = decision.reason != "home" and cached > decision.cached_tokens + 2 * self._block_tokens(request)
            # a long wait says more of those ahead than of this request's own prefill
            if decision.wait_s <= own and decision.certain and not waited:
                worker.observe_prefill(ttft_s, decision.wait_s + own)
        if decision.cached_tokens > cached:
            worker.computed += decision.cached_tokens - cached
        if cached_tokens is None:
            worker.trust.not_told()
        elif request.hashes:
            self._judge(decision, int(total), cached_tokens)
        if cached_tokens is not None and decision.reason == "home":
            missing = decision.cached_tokens - cached_tokens
            # the engine's blocks and ours do not end at the same tokens: one block of each is no error
            if missing > 2 * self._block_tokens(request) + worker.profile.block_size:
                self._trim(decision, cached_tokens)

    def _judge(self, decision: Decision, prompt_tokens: int, cached_tokens: int) -> None:
        """Hold the reported cached tokens against what each source had predicted."""
        worker, request = decision.worker, decision.request
        block = max(self._block_tokens(request), worker.profile.block_size)
        trust = worker.trust
        if decision.certain:
            trust.observe(
                exact_error=None if decision.by_events is None else abs(decision.by_events - cached_tokens),
                memory_error=abs(decision.by_memory - cached_tokens),
                exact_tolerance=block,
                # routing memory is a guess: what matters is that it tells a warm worker from a cold one
                memory_tolerance=max(2.0 * block, 0.25 * prompt_tokens),
            )
        # whether an engine has fallen silent only the gateway that follows its events can tell
        if prompt_tokens - cached_tokens > block and worker.id in self.events:
            trust.computed(since=decision.placed_at)
        if self.workers.get(worker.id) is not worker:
            return  # it has left
        if trust.level == "load":
            self._load_only.add(worker.id)
        else:
            self._load_only.discard(worker.id)

    def _block_tokens(self, request: RouteRequest) -> float:
        return request.block_tokens or self.block_units / self.tokens.of(request.model)

    def _trim(self, decision: Decision, cached_tokens: int) -> None:
        if decision.session is not None:
            blocks = int(cached_tokens / self._block_tokens(decision.request))
            self.memory.trim(decision.worker.id, decision.session.key, blocks)

    def load(self) -> Mapping[str, dict[str, float]]:
        """Each worker's state in plain numbers, for `/admin/workers` and metrics."""
        return {
            worker.id: {
                "up": float(worker.up), "prefilling": float(len(worker.prefilling)), "decoding": float(worker.decoding),
                "pending_prefill_s": worker.pending_s, "active_tokens": worker.active_tokens,
                "live_sessions": float(worker.live_sessions), "working_set_tokens": worker.working_set,
                "prefill_scale": worker.prefill_scale, "decode_scale": worker.decode_scale,
                "others_in_flight": float(worker.others_in_flight),
                "memory_blocks": float(self.memory.used_blocks(worker.id)),
            }
            for worker in self.workers.values()
        }  # fmt: skip
