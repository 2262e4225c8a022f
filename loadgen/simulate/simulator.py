"""A fleet in virtual time: the gateway's router, its sessions and index as they are, over simulated engines.

Everything that happens is an event in one queue: a turn is due, an engine's step ends, a prompt's KV arrives at its decode worker.
Nothing draws from a clock or a shared random state, so equal inputs and seeds give equal results.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from kvindex.memory import MemoryIndex
from kvindex.routing_memory import RoutingMemory
from loadgen.bound import InfiniteCache
from loadgen.chains import SessionChains
from loadgen.conversation import Conversation
from loadgen.results import Figures, Run, Scalar
from loadgen.simulate.fleet import FleetError, FleetSpec
from loadgen.simulate.knowledge import ExactIndex, ExactKnowledge
from loadgen.simulate.load import Load
from loadgen.simulate.measure import Measure, TurnRecord
from loadgen.trace import Request, Session
from routing.fleet import Worker
from routing.policies import Policy, Terms, new_policy
from routing.router import Decision, Router, RouteRequest
from routing.sessions import SessionTable
from workers.profile import WorkerProfile
from workers.simengine import SimEngine, SimRequest

_FAR = 1 << 30  # decode steps that are taken together unless something comes in between
_TEXT_BLOCK = 16  # tokens: how finely prompts that the trace holds as text are compared
_PROGRESS_EVENTS = 2048


@dataclass(slots=True)
class WorkerFigures:
    """What one worker did in the window."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    busy: float = 0.0  # share of the time in steps
    batch: float = 0.0  # mean sequences decoding
    kv_use: float = 0.0  # mean share of KV blocks held by requests
    preemptions: int = 0


@dataclass(slots=True)
class Simulation:
    """What a simulation came to."""

    figures: Figures
    tiers: dict[str, Figures]
    workers: dict[str, WorkerFigures]
    fleet: FleetSpec
    seed: int
    virtual_s: float  # simulated time
    wall_s: float  # time it took here
    error_kinds: dict[str, int] = field(default_factory=dict)
    turns: list[TurnRecord] = field(default_factory=list, repr=False)  # measured requests, as sent

    def run(self, arm: dict[str, Scalar], trace: str = "") -> Run:
        """As a line of a results file."""
        fleet = self.fleet
        return Run(
            arm, self.seed, self.figures, fleet.gpus, fleet.price_per_hour, fleet.kv_capacity_tokens, trace=trace, tiers=self.tiers,
            wall_s=self.wall_s,
        )  # fmt: skip


class _Node:
    """One engine and where its time is."""

    __slots__ = ("batch_s", "busy_s", "engine", "id", "kv_s", "role", "seen", "started", "turns", "version", "worker")

    def __init__(self, node_id: str, role: str, engine: SimEngine, worker: Worker | None) -> None:
        self.id = node_id
        self.role = role
        self.engine = engine
        self.worker = worker
        self.turns: dict[str, _Turn] = {}
        self.seen: set[int] = set()  # blocks that were here at any time
        self.started = 0.0
        self.version = 0  # of the step under way: an event of an older one is void
        self.busy_s = self.batch_s = self.kv_s = 0.0


@dataclass(slots=True, eq=False)
class _Play:
    """One session (or sub-agent) as it is being played."""

    session: Session
    scope: str
    name: str
    lap: int
    tier: str
    chains: _Chains
    index: int
    lane: bool  # a lane's: when it ends the lane plays the next session
    parent: _Play | None = None
    children: int = 0  # sub-agents under way
    ready_at: float = 0.0  # when the next turn is due, once they have ended


@dataclass(slots=True, eq=False)
class _Turn:
    """One request under way."""

    play: _Play
    request: Request
    record: TurnRecord
    hashes: list[int]
    decision: Decision
    prefiller: _Node


class _Chains:
    """A session's prompts as (keys of whole blocks, prompt tokens)."""

    def __init__(self, session: Session, scope: str, lap: int) -> None:
        self._session = session
        self._text = Conversation(session, scope=scope, lap=lap, model="") if session.requests[0].text is not None else None
        self._chains = SessionChains(session, scope, "", lap)

    def of(self, index: int, block: int) -> tuple[list[int], int]:
        if self._text is not None:
            prompt = self._text.prompt(index)
            return prompt.chain[: prompt.blocks], prompt.tokens
        tokens = self._session.requests[index].input_tokens
        # only whole blocks can be found by others
        return self._chains.of(index)[: tokens // block], tokens


class _Simulator:
    def __init__(self, sessions: Sequence[Session], fleet: FleetSpec, load: Load, seed: int, policy: Policy | None) -> None:
        if not sessions:
            raise FleetError("the trace holds no sessions")
        self.fleet, self.load, self.seed = fleet, load, seed
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        self._draw = random.Random(f"{seed} load")
        self._block = _block_of(sessions)
        self._index_step = max(1, fleet.index_block_tokens // self._block)
        self._build(policy)
        self._plays = self._all_plays(sessions)
        self._total = sum(len(part.requests) for session in sessions for part in session.tree())
        self._infinite = InfiniteCache()
        self._issued = 0
        self._open = 0  # measured requests that have not ended
        self._measure = Measure()
        self._measuring_from: float | None = None
        self._closing = False  # nothing more is measured
        self._window_end: float | None = None
        self._next_expiry = 1.0
        self._refused = 0  # requests in a row that no engine took

    # --- the fleet ---

    def _build(self, policy: Policy | None) -> None:
        fleet = self.fleet
        exact = fleet.knowledge == "exact"
        index = ExactIndex(self._index_step) if exact else MemoryIndex()
        self._exact = index if isinstance(index, ExactIndex) else None
        memory = RoutingMemory(index, ttl_s=fleet.memory_ttl_s)
        self.router = Router(index, memory, sessions=SessionTable(ttl_s=fleet.session_ttl_s))
        self.router.policy = policy or new_policy(fleet.policy, self.seed)
        block_tokens = self._index_step * self._block
        self.router.token_blocks = {"": block_tokens}
        self.nodes: list[_Node] = []
        self._by_worker: dict[str, _Node] = {}
        self._decoders: list[_Node] = []
        for place, pool in enumerate(fleet.pools):
            # engines keep what they cache in blocks of their own; here the trace says how finely prompts can be compared
            try:
                latency = pool.profile.latency_model()
            except (KeyError, ValueError) as error:
                raise FleetError(f"pools.{place}: {error.args[0]}") from None
            profile = pool.profile.model_copy(update={"block_size": self._block, "model": None, "latency": latency})
            if profile.kv_capacity_tokens < self._block:
                raise FleetError(f"pools.{place}: a KV cache of {profile.kv_capacity_tokens} tokens holds no block of {self._block}")
            prefix = pool.name or ("w" if len(fleet.pools) == 1 else f"p{place}-")
            for number in range(pool.count):
                self._add_node(f"{prefix}{number}", pool.tiers, profile, pool.speed, exact)
        for tier, share in self.load.tiers.items():
            if share and not self.router.serving(_model(tier)):
                raise FleetError(f"pools: none serves the tier {tier!r}, which sessions of this load have")

    def _add_node(self, node_id: str, tiers: list[str], profile: WorkerProfile, speed: float, exact: bool) -> None:
        if node_id in self._by_worker or any(node.id == node_id for node in self._decoders):
            raise FleetError(f"two workers are called {node_id!r}; give the pools different names")
        engine = SimEngine(profile, speed, stream=False)
        worker = None
        if profile.role != "decode":
            worker = self.router.add_worker(node_id, [_model(t) for t in tiers or self.load.tiers], profile)
            worker.network_s = self.fleet.overhead_s
        node = _Node(node_id, profile.role, engine, worker)
        self.nodes.append(node)
        if worker is None:
            self._decoders.append(node)
            return
        self._by_worker[node_id] = node
        if exact:
            knowledge = ExactKnowledge(engine, node_id)
            assert self._exact is not None
            self._exact.followed[knowledge.tiers[0]] = knowledge
            self.router.events[node_id] = knowledge
            worker.trust.events_attached()

    # --- the queue of events ---

    def _at(self, when: float, what: Callable[..., None], about: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), what, about))

    def run(self, on_progress: Callable[[float], None] | None) -> None:
        self._start_load()
        events = self._events
        for number in itertools.count():
            if not events or (self._closing and not self._open):
                break
            self.now, _, what, about = heapq.heappop(events)
            what(about)
            if on_progress is not None and number % _PROGRESS_EVENTS == 0:
                on_progress(self._share())

    def _share(self) -> float:
        load = self.load
        if load.duration_s is not None:
            return min(1.0, self.now / (load.warmup_s + load.duration_s))
        return min(1.0, self._issued / ((load.requests or self._total - load.warmup) + load.warmup))

    # --- who plays what when ---

    def _all_plays(self, sessions: Sequence[Session]) -> Iterator[tuple[Session, int]]:
        ordered = sorted(sessions, key=lambda session: session.start_s)
        if self.load.shuffle:
            random.Random(f"{self.seed} order").shuffle(ordered)
        for lap in itertools.count():
            for session in ordered:
                yield session, lap
            if not self.load.endless:
                return

    def _start_load(self) -> None:
        load = self.load
        if load.mode == "closed":
            lanes = max(1, load.live_sessions)
            for lane in range(lanes):
                self._at(load.ramp_s * lane / lanes, self._next_in_lane, True)
        else:
            self._arrivals = self._arrival_times()
            self._next_arrival(None)

    def _next_in_lane(self, first: bool) -> None:
        play = next(self._plays, None)
        if play is None:
            return
        session, lap = play
        steps = len(session.requests)
        start = int(self._draw.random() * self.load.advance * steps) if first and self.load.advance else 0
        self._play(session, session.id, lap, start, lane=True)

    def _arrival_times(self) -> Iterator[tuple[float, Session, int]]:
        load = self.load
        due, offset, last_start, current = 0.0, 0.0, 0.0, 0
        first: float | None = None
        for session, lap in self._plays:
            if load.rate is not None:
                due += self._draw.expovariate(load.rate)
            else:
                first = session.start_s if first is None else first
                if lap != current:  # the next pass starts where the last session of this one did
                    if not last_start:
                        raise FleetError("the trace's sessions all start at once, so it cannot be repeated by its own times; give a rate")
                    current, offset = lap, offset + last_start
                last_start = session.start_s - first
                due = (offset + last_start) / load.speedup
            yield due, session, lap

    def _next_arrival(self, arriving: tuple[Session, int] | None) -> None:
        if (following := next(self._arrivals, None)) is not None:
            due, session, lap = following
            self._at(due, self._next_arrival, (session, lap))
        if arriving is not None:
            session, lap = arriving
            self._play(session, session.id, lap, 0, lane=False)

    def _play(self, session: Session, scope: str, lap: int, start: int, *, lane: bool, parent: _Play | None = None) -> None:
        tiers = self.load.tiers
        tier = parent.tier if parent else next(iter(tiers))
        if parent is None and len(tiers) > 1:
            tier = random.Random(f"{self.seed} {scope} {lap}").choices(list(tiers), list(tiers.values()))[0]
        name = f"{session.id}.{lap}"
        self._ask(_Play(session, scope, name, lap, tier, _Chains(session, scope, lap), start, lane, parent))

    def _ask(self, play: _Play) -> None:
        """Send the play's next request."""
        load, now = self.load, self.now
        request = play.session.requests[play.index]
        hashes, tokens = play.chains.of(play.index, self._block)
        if self._measuring_from is None and self._issued >= load.warmup and now >= load.warmup_s:
            self._begin_window()
        if self._window_end is not None and now >= self._window_end:
            self._closing = True
        measured = self._measuring_from is not None and not self._closing
        self._issued += 1
        if load.requests is not None and self._measuring_from is not None and len(self._measure.turns) + 1 >= load.requests and measured:
            self._closing = True
        bound = self._infinite.add(hashes, len(hashes), self._block, tokens)
        record = TurnRecord(play.tier, now, tokens, max(1, request.output_tokens), bound)
        if measured:
            self._measure.turns.append(record)
            self._open += 1
        record.measured = measured
        if now >= self._next_expiry:
            self.router.expire(now)
            self._next_expiry = now + 1.0
        step = self._index_step
        session = play.name if play.session.named else None
        asked = RouteRequest(
            _model(play.tier), hashes[step - 1 :: step], tokens, session, play.tier, request.output_tokens,
            tokens=tokens, block_tokens=step * self._block,
        )  # fmt: skip
        if self._exact is not None:
            self._exact.prompt = hashes
        decision = self.router.decide(asked, now)
        node = self._by_worker[decision.worker.id]
        turn = _Turn(play, request, record, hashes, decision, node)
        overhead = self.fleet.overhead_s + self.fleet.overhead_token_s * tokens + self._fetch(turn)
        if overhead:
            self._at(now + overhead, self._arrive, turn)
        else:
            self._arrive(turn)

    def _fetch(self, turn: _Turn) -> float:
        """Bring what the rule wants fetched from another worker's cache (Mooncake's); returns the seconds it takes."""
        decision = turn.decision
        chosen = Terms(*decision.candidates[0])
        if chosen.cached <= decision.cached_tokens:
            return 0.0
        turn.prefiller.engine.cache.insert(turn.hashes[: int(chosen.cached) // self._block])
        worker, total = decision.worker, decision.prompt_tokens
        decision.reservation.recount(worker.prefill_s(total - chosen.cached, total), total - chosen.cached)
        return chosen.restore

    def _begin_window(self) -> None:
        self._measuring_from = self.now
        if self.load.duration_s is not None:
            self._window_end = self.now + self.load.duration_s
        self._preempted_before = {node.id: node.engine.counters.preemptions for node in self.nodes}
        for node in self.nodes:
            node.busy_s = node.batch_s = node.kv_s = 0.0

    # --- engines ---

    def _arrive(self, turn: _Turn) -> None:
        node = turn.prefiller
        record = turn.record
        record.arrived_at = self.now
        output = 1 if node.role == "prefill" else record.output_tokens
        try:
            node.engine.add(SimRequest(str(id(turn)), turn.hashes, record.prompt_tokens, output))
        except ValueError:
            self._refused += 1
            if self.load.endless and self._refused > self._total + self.load.live_sessions:
                raise FleetError("no request of the trace fits the KV cache of a worker") from None
            self._failed(turn, "the request exceeds the worker's KV cache")
            return
        self._refused = 0
        node.turns[str(id(turn))] = turn
        self._wake(node)

    def _wake(self, node: _Node) -> None:
        """Something has come to an engine: let it start, or join at the next boundary of the steps under way."""
        engine = node.engine
        if engine.stepping:
            if engine.steps_under_way > 1:
                duration = engine.shorten_step(self.now - node.started)
                node.version += 1
                self._at(node.started + duration, self._step_ended, (node, node.version))
            return
        self._start_step(node)

    def _start_step(self, node: _Node) -> None:
        engine = node.engine
        duration = engine.start_step(_FAR)
        if duration is None:
            return
        for request_id in engine.admitted:
            record = node.turns[request_id].record
            if record.scheduled_at is None:
                record.scheduled_at = self.now
        node.started = self.now
        node.version += 1
        self._at(self.now + duration, self._step_ended, (node, node.version))

    def _step_ended(self, about: tuple[_Node, int]) -> None:
        node, version = about
        if version != node.version:
            return
        engine = node.engine
        decoding = engine.decoding
        result = engine.finish_step()
        node.busy_s += result.duration_s
        node.batch_s += decoding * result.duration_s
        node.kv_s += engine.kv_use * result.duration_s
        for output in result.outputs:
            if output.first or output.finished:
                turn = node.turns[output.request_id]
                if output.finished:
                    del node.turns[output.request_id]
                self._told(node, turn, output.first, output.finished, output.cached_tokens)
        if not engine.stepping:  # what ended may have brought the next turn at once
            self._start_step(node)

    def _told(self, node: _Node, turn: _Turn, first: bool, finished: bool, cached: int) -> None:
        record = turn.record
        if node.role == "prefill":
            turn.record.cached_tokens = cached
            delay = self.fleet.transfer_base_s + self.fleet.transfer_token_s * record.prompt_tokens
            self._at(self.now + delay, self._transferred, turn)
            turn.decision.reservation.release(self.now)  # it leaves this worker
            return
        if first and record.first_at is None:
            if node.role != "decode":
                record.cached_tokens = cached
            record.first_at = self.now
            turn.decision.reservation.first_token(self.now)
        if finished:
            self._answered(turn)

    def _transferred(self, turn: _Turn) -> None:
        """A prompt's KV has left its prefill worker: its first token is told, and the others are computed elsewhere."""
        record = turn.record
        record.first_at = self.now
        if record.output_tokens == 1:
            self._answered(turn)
            return
        node = min(self._decoders, key=lambda n: (n.engine.kv_use, n.engine.running + n.engine.waiting))
        try:
            node.engine.add(SimRequest(str(id(turn)), (), record.prompt_tokens + 1, record.output_tokens - 1, transferred=True))
        except ValueError:
            self._failed(turn, "the request exceeds the decode worker's KV cache")
            return
        node.turns[str(id(turn))] = turn
        self._wake(node)

    # --- what came of it ---

    def _failed(self, turn: _Turn, why: str) -> None:
        turn.decision.reservation.release(self.now)
        self.router.failed(turn.decision)
        self._measure.failed(turn.record, why)
        self._at(self.now, self._ended, turn)  # not here: the next one may fail at once, and so on

    def _answered(self, turn: _Turn) -> None:
        now, record, decision = self.now, turn.record, turn.decision
        record.ended_at = now
        worker = decision.worker
        assert record.first_at is not None
        if record.output_tokens > 1 and turn.prefiller.role == "both":
            worker.observe_decode((now - record.first_at) / (record.output_tokens - 1), worker.step_s())
        ttft = record.first_at - record.asked_at
        self.router.learn(decision, prompt_tokens=record.prompt_tokens, cached_tokens=record.cached_tokens, ttft_s=ttft)
        if self._exact is not None:
            worker.trust.heard(now)  # what it computed is known
        decision.reservation.release(now)
        node = turn.prefiller
        record.worker = node.id
        record.lost_tokens = self._lost(node, turn)
        self._ended(turn)

    def _lost(self, node: _Node, turn: _Turn) -> int:
        """Tokens of the prompt that were on this worker once and had to be computed again."""
        hashes, seen = turn.hashes, node.seen
        held = turn.record.cached_tokens // self._block
        lost = 0
        if held < len(hashes):
            new = hashes[held:]
            if new[0] in seen:
                lost = sum(1 for h in new if h in seen) * self._block
            seen.update(new)
        return min(lost, max(0, turn.record.bound_tokens - turn.record.cached_tokens))

    def _ended(self, turn: _Turn) -> None:
        """The turn is over: what its session does next."""
        now, play, load = self.now, turn.play, self.load
        if self._measuring_from is not None:
            self._measure.ended(turn.record)
        if turn.record.measured:
            self._open -= 1
        requests = play.session.requests
        spawns = requests[play.index].spawns
        play.index += 1
        if play.index < len(requests):
            play.ready_at = now + min(requests[play.index].gap_s, load.max_gap_s) * load.time_scale
        if spawns:
            play.children = len(spawns)
            for child in spawns:
                self._play(child, play.scope, play.lap, 0, lane=False, parent=play)
        else:
            self._go_on(play)

    def _go_on(self, play: _Play) -> None:
        if play.index < len(play.session.requests):
            self._at(max(self.now, play.ready_at), self._ask, play)
            return
        self._measure.session_ended(self.now)
        if play.parent is not None:
            play.parent.children -= 1
            if not play.parent.children:
                self._go_on(play.parent)
        elif play.lane:
            self._next_in_lane(False)

    # --- the result ---

    def result(self, wall_s: float) -> Simulation:
        if self._measuring_from is None:
            raise FleetError(
                f"nothing was measured: the trace is through after {self._issued:,} requests and {self.now:.0f} s, within the warm-up; "
                "measure a number of requests or a duration, and the trace is repeated"
            )
        begin = self._measuring_from
        end = self._window_end if self._window_end is not None else self.now
        span = max(self.now - begin, 1e-9)
        measure = self._measure
        figures = measure.figures(begin, end)
        keepers = [node for node in self.nodes if node.role != "decode"]
        workers: dict[str, WorkerFigures] = {}
        for node in self.nodes:
            before = self._preempted_before[node.id]
            workers[node.id] = WorkerFigures(
                busy=min(1.0, node.busy_s / span), batch=node.batch_s / span, kv_use=node.kv_s / span,
                preemptions=node.engine.counters.preemptions - before,
            )  # fmt: skip
        for record in measure.turns:
            if record.worker:
                told = workers[record.worker]
                told.requests += 1
                told.prompt_tokens += record.prompt_tokens
                told.cached_tokens += record.cached_tokens
        figures.preemptions = sum(w.preemptions for w in workers.values())
        decoders = [workers[node.id] for node in self.nodes if node.role != "prefill"]
        figures.batch = sum(w.batch for w in decoders) / len(decoders)
        figures.kv_use = sum(w.kv_use for w in workers.values()) / len(workers)
        figures.busy = sum(w.busy for w in workers.values()) / len(workers)
        computed = [workers[node.id].prompt_tokens - workers[node.id].cached_tokens for node in keepers]
        if sum(computed):
            figures.imbalance = max(computed) * len(computed) / sum(computed)
        tiers = {tier: measure.figures(begin, end, tier) for tier in self.load.tiers} if len(self.load.tiers) > 1 else {}
        errors = dict(Counter(measure.errors).most_common(10))
        return Simulation(figures, tiers, workers, self.fleet, self.seed, self.now, wall_s, errors, measure.turns)


def simulate(
    sessions: Sequence[Session],
    fleet: FleetSpec,
    load: Load | None = None,
    seed: int = 0,
    on_progress: Callable[[float], None] | None = None,
    policy: Policy | None = None,
) -> Simulation:
    """Play a trace against a fleet in virtual time. `policy` takes the place of the fleet's named one.

    `on_progress` is called with the share that is done. Raises FleetError when the trace cannot be played on the fleet.
    """
    started = perf_counter()
    simulator = _Simulator(sessions, fleet, load or Load(), seed, policy)
    simulator.run(on_progress)
    return simulator.result(perf_counter() - started)


def _model(tier: str) -> str:
    """The name under which the workers that serve a tier are known to the router."""
    return tier


def _block_of(sessions: Sequence[Session]) -> int:
    """Tokens of a block of the trace's prompts. Raises FleetError where sessions differ in it."""
    blocks = {_TEXT_BLOCK if part.requests[0].text is not None else part.block_size for session in sessions for part in session.tree()}
    if len(blocks) > 1:
        raise FleetError(f"the trace's sessions have blocks of {', '.join(map(str, sorted(blocks)))} tokens; one size is needed")
    return blocks.pop()
