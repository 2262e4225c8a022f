"""Who lives where: agent sessions, the worker each one is at home on, and what their contexts take of its cache.

A session is known by a key the gateway gives (client headers, within the tenant), else by its longest prefix: a request that
continues the blocks of an earlier request belongs to the same session. Together with the first block, because one client
session runs several conversations (sub-agents, title requests), each with a cache of its own.

Of several gateways the one that served a session's last turn counts it. It says so by a claim (session id, turns) when a session
begins or comes over from another gateway; the greatest claim, by turns and then by gateway, holds, whatever the order in which
claims arrive. The others keep what they know of the session, and do not count it.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from routing.fleet import Worker

# A session idle for longer than this quantile of the gaps between an answer and the next turn is asleep: an engine evicts what was used
# least recently, so that it takes no room from those that are awake.
GAP_QUANTILE = 0.95
LEAST_AWAKE_S = 2.0
_GAPS = 512
_REFRESH_GAPS = 64  # a few short gaps at the beginning say nothing of the long ones
_MOST_LOOKED_AT = 8
_RECURRENCE_REQUESTS = 512  # that `recurrence` is about: those before count for less and less
_MOST_CLAIMS = 10_000
_RECORD = struct.Struct("<BIfffBB")  # version, turns, context, shared, regret, lengths of the two names that follow


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What gateways tell each other of a session: as it was after its last turn."""

    worker: str
    gateway: str
    turns: int
    context: float  # largest prompt so far, tokens
    regret: float  # seconds, see `policies`
    shared: float = 0.0  # of the context, tokens that were at its home before it came

    def encode(self) -> bytes:
        """Raises ValueError for names of more than 255 bytes."""
        worker, gateway = self.worker.encode(), self.gateway.encode()
        if max(len(worker), len(gateway)) > 255:
            raise ValueError("names of workers and gateways are at most 255 bytes long")
        turns = min(self.turns, 2**32 - 1)
        return _RECORD.pack(2, turns, self.context, self.shared, self.regret, len(worker), len(gateway)) + worker + gateway

    @classmethod
    def decode(cls, data: bytes) -> SessionRecord | None:
        """None for what is no record."""
        if len(data) < _RECORD.size:
            return None
        version, turns, context, shared, regret, worker, gateway = _RECORD.unpack_from(data)
        if version != 2 or len(data) != _RECORD.size + worker + gateway or not all(0.0 <= n < 1e12 for n in (context, shared, regret)):
            return None
        try:
            names = data[_RECORD.size :]
            return cls(names[:worker].decode(), names[worker:].decode(), turns, context, regret, shared)
        except UnicodeDecodeError:
            return None


class Session:
    """One conversation: a growing prompt whose prefix stays."""

    __slots__ = (
        "awake", "claim", "context", "elsewhere", "home", "id", "idle_since", "in_flight",
        "key", "last_seen", "leaf", "learned_turns", "regret", "root", "shared", "turns",
    )  # fmt: skip

    def __init__(self, key: Hashable, root: int, now: float):
        self.key = key
        self.root = root  # hash of the first block: sessions that share a system prompt share it
        self.leaf = 0
        self.home: Worker | None = None
        self.context = 0.0  # largest prompt so far, tokens
        self.shared = 0.0  # of them were at its home before it came: others' beginning, which is there once for all
        self.turns = 0
        self.learned_turns = 0  # when it last seemed to be over
        self.regret = 0.0  # seconds that staying at home has cost of late, see `policies`
        self.last_seen = now
        self.in_flight = 0  # requests under way
        self.idle_since = now  # the last of them ended then
        self.id: bytes | None = None  # what other gateways know it by
        self.claim = 0  # turns at this gateway's last claim to count it
        self.elsewhere = False  # another gateway counts it
        self.awake = True  # it has a request under way, or has had one lately

    @property
    def footprint(self) -> float:
        """Tokens it takes of its home's cache: what it counts in the working set there while it is awake."""
        return self.context - self.shared if self.context > self.shared else 0.0

    def begun(self) -> None:
        """A request of it is under way."""
        self.in_flight += 1

    def ended(self, now: float) -> None:
        """One is over."""
        self.in_flight -= 1
        self.idle_since = now

    def begins_as_others(self, tokens: float) -> None:
        """So many tokens of it turn out to be others' beginning, which its home holds once for all."""
        before = self.footprint
        self.shared = tokens
        if self.home is not None and self.awake and not self.elsewhere:
            self.home.working_set += self.footprint - before
            self.home.touched.add(self.home)


def root_of(hashes: Sequence[int], root_blocks: int) -> int:
    """What conversations of one client are told apart by: the last block of so many, of a shorter prompt the first."""
    return hashes[root_blocks - 1] if len(hashes) >= root_blocks else hashes[0]


class SessionTable:
    """Live sessions, least recently seen first. Bounded by `ttl_s` and `max_sessions`; every operation is O(1) amortised."""

    def __init__(self, ttl_s: float = 900.0, max_sessions: int = 100_000):
        self.ttl_s = ttl_s
        self.max_sessions = max_sessions
        self._sessions: OrderedDict[Hashable, Session] = OrderedDict()
        self._by_leaf: dict[int, Session] = {}
        self._at_home: dict[Worker, set[Session]] = {}  # workers that are somebody's home
        self._sharing: Counter[int] = Counter()
        self._awake: OrderedDict[Session, None] = OrderedDict()  # those that were looked at least recently first
        self._gaps: deque[float] = deque(maxlen=_GAPS)  # seconds from an answer to the next turn
        self._until_refresh = _REFRESH_GAPS
        self.awake_s = ttl_s  # idle for longer is asleep; learned
        self._next_expiry = 0.0
        self._by_id: dict[bytes, Session] = {}
        self._known, self._fresh = 40.0, 2.0  # requests that begin as others before them, and that do not; decaying counts
        self._elsewhere = 0  # sessions that another gateway counts
        self.gateway = ""  # this gateway's id
        self.others_live = 0  # sessions that the other gateways count
        self.new_claims: deque[tuple[bytes, int]] = deque(maxlen=_MOST_CLAIMS)  # session ids and turns, to be told
        self.mean_turns = 20.0  # agent traces: mean 69 calls, median 45; learned from sessions that seem to be over

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def counted(self) -> int:
        """Live sessions that this gateway counts."""
        return len(self._sessions) - self._elsewhere

    @property
    def live(self) -> int:
        """Live sessions of all gateways."""
        return len(self._sessions) - self._elsewhere + self.others_live

    @property
    def recurrence(self) -> float:
        """From 0 to 1 how far requests begin as earlier ones do: 1 where half of them or more do."""
        return min(self._known / self._fresh, 1.0)

    def find(self, key: Hashable | None, hashes: Sequence[int], matched: int, now: float, root_blocks: int = 1) -> Session | None:
        """The session this request belongs to; a new one where none fits; None for a prompt shorter than a block.

        `matched` is the longest prefix in blocks that any worker holds: where a session without a key left off. `root_blocks`
        are what conversations of one client are told apart by.
        """
        if now >= self._next_expiry:
            self.expire(now)
        if not hashes:
            return None
        root = root_of(hashes, root_blocks)
        self._known -= self._known / _RECURRENCE_REQUESTS
        self._fresh -= self._fresh / _RECURRENCE_REQUESTS
        if root in self._sharing:
            self._known += 1.0
        else:
            self._fresh += 1.0
        session: Session | None
        if key is not None:
            key = (key, root)
            session = self._sessions.get(key)
        else:
            session = self._by_leaf.get(hashes[matched - 1]) if matched else None
            key = (root, hashes[-1])
        if session is None:
            session = self._sessions.get(key)
        if session is None:
            session = Session(key, root, now)
            self._sessions[key] = session
            self._sharing[root] += 1
            if len(self._sessions) > self.max_sessions:
                self._end(next(iter(self._sessions.values())))
        else:
            self._sessions.move_to_end(session.key)
            if session.turns and not session.in_flight:
                self._note_gap(now - session.idle_since)
        session.last_seen = now
        self._let_sleep(now)
        return session

    def known(self, key: Hashable, root: int) -> Session | None:
        """The session with this key and root block, if it lives."""
        return self._sessions.get((key, root))

    def sharing(self, session: Session) -> float:
        """How many other live sessions start with the same block; of those that only other gateways know, as many as of the own."""
        unknown = max(self.live / len(self._sessions), 1.0)
        return self._sharing[session.root] * unknown - 1.0

    def placed(self, session: Session, worker: Worker, hashes: Sequence[int], prompt_tokens: float, held: float = 0.0) -> None:
        """The session's next turn goes to `worker`, which holds so many tokens of it: its home from now on."""
        leaf = hashes[-1]
        if leaf != session.leaf:
            self._by_leaf.pop(session.leaf, None)
            session.leaf = leaf
            self._by_leaf[leaf] = session
        session.turns += 1
        self._wake(session)
        if session.elsewhere:
            self._count_here(session)
        if session.id is not None and not session.claim:
            self._claim(session)
        if session.home is not worker:
            self._leave_home(session)
            session.context = max(session.context, prompt_tokens)
            session.shared = held
            self._settle(session, worker)
            self._enter_home(session)
        elif prompt_tokens > session.context:
            before = session.footprint
            session.context = prompt_tokens
            worker.working_set += session.footprint - before
        worker.touched.add(worker)

    # --- sessions of several gateways ---

    def share(self, session: Session, session_id: bytes, record: SessionRecord | None, home: Worker | None) -> None:
        """The session is known to all gateways by this id, and they have told `record` of it; `home` is its worker where that is
        known and up. A record of another gateway that knows of more turns becomes what is known here. To be called before `placed`.
        """
        if session.id is None:
            session.id = session_id
            self._by_id[session_id] = session
        if record is None or record.gateway == self.gateway:
            return
        session.claim = 0  # that gateway counts it, or thinks so
        if record.turns < session.turns:
            return
        if session.elsewhere:
            self._count_here(session)
        if home is not session.home:
            self._leave_home(session)
        session.turns = record.turns
        session.regret = record.regret
        session.context = max(session.context, record.context)
        if home is not None and session.home is None:
            session.shared = record.shared
            self._settle(session, home)
            self._enter_home(session)

    def claimed(self, session_id: bytes, turns: int, gateway: str) -> None:
        """Another gateway claims to count a session."""
        session = self._by_id.get(session_id)
        if session is None:
            return
        if not session.elsewhere:
            if (turns, gateway) < (session.claim, self.gateway):
                self._claim(session)  # it may not have heard
                return
            self._leave_counts(session)
            session.elsewhere = True
            self._elsewhere += 1
        session.turns = max(session.turns, turns)  # so that a later claim of this gateway is greater

    def claims(self, session_id: bytes, turns: int) -> bool:
        """This gateway still counts the session by that claim."""
        session = self._by_id.get(session_id)
        return session is not None and not session.elsewhere and session.claim == turns

    def _claim(self, session: Session) -> None:
        session.claim = session.claim or session.turns
        assert session.id is not None
        self.new_claims.append((session.id, session.claim))

    def _count_here(self, session: Session) -> None:
        session.elsewhere = False
        session.claim = 0
        self._elsewhere -= 1
        if session.home is not None:
            self._enter_home(session)

    def _enter_home(self, session: Session) -> None:
        home = session.home
        assert home is not None
        if session.awake:
            home.live_sessions += 1
            home.working_set += session.footprint
            home.touched.add(home)

    def _leave_counts(self, session: Session) -> None:
        home = session.home
        if home is not None and session.awake and not session.elsewhere:
            home.live_sessions -= 1
            # an empty worker resets the sum, so that rounding never accumulates
            home.working_set = home.working_set - session.footprint if home.live_sessions else 0.0
            home.touched.add(home)

    # --- who is awake ---

    def _note_gap(self, seconds: float) -> None:
        self._gaps.append(seconds)
        self._until_refresh -= 1
        if not self._until_refresh:
            self._until_refresh = _REFRESH_GAPS
            gaps = sorted(self._gaps)
            self.awake_s = min(self.ttl_s, max(LEAST_AWAKE_S, gaps[int(GAP_QUANTILE * (len(gaps) - 1))]))

    def _let_sleep(self, now: float) -> None:
        """Sessions that were not heard of for long no longer count in their homes' working sets. Looks at a few at a time."""
        idle_until = now - self.awake_s
        for _ in range(min(len(self._awake), _MOST_LOOKED_AT)):
            session = next(iter(self._awake))
            if session.last_seen >= idle_until:
                return
            if session.in_flight or session.idle_since >= idle_until:
                self._awake.move_to_end(session)
                continue
            del self._awake[session]
            self._leave_counts(session)
            session.awake = False
            if not session.elsewhere:  # else the gateway that counts it learns
                self._learn_turns(session)

    def _wake(self, session: Session) -> None:
        self._awake[session] = None
        self._awake.move_to_end(session)
        if not session.awake:
            session.awake = True
            if session.home is not None and not session.elsewhere:
                self._enter_home(session)

    # --- where they live ---

    def _settle(self, session: Session, home: Worker) -> None:
        session.home = home
        self._at_home.setdefault(home, set()).add(session)

    def _leave_home(self, session: Session) -> None:
        home = session.home
        if home is not None:
            self._leave_counts(session)
            others = self._at_home[home]
            others.remove(session)
            if not others:
                del self._at_home[home]
            session.home = None
            session.regret = 0.0

    def _end(self, session: Session) -> None:
        self._leave_home(session)
        self._awake.pop(session, None)
        del self._sessions[session.key]
        if self._by_leaf.get(session.leaf) is session:
            del self._by_leaf[session.leaf]
        self._sharing[session.root] -= 1
        if not self._sharing[session.root]:
            del self._sharing[session.root]
        if session.id is not None and self._by_id.get(session.id) is session:
            del self._by_id[session.id]
        if session.elsewhere:
            self._elsewhere -= 1
            return  # the gateway that counts it learns from its end
        self._learn_turns(session)

    def _learn_turns(self, session: Session) -> None:
        """A session seems to be over. One that went on after all has had so many turns more."""
        self.mean_turns += 0.02 * (session.turns - (session.learned_turns or self.mean_turns))
        session.learned_turns = session.turns

    def expire(self, now: float) -> None:
        """End sessions idle for longer than `ttl_s`."""
        self._next_expiry = now + self.ttl_s / 100
        oldest = now - self.ttl_s
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.last_seen >= oldest:
                return
            self._end(session)

    def forget_home(self, worker: Worker) -> None:
        """The worker lost its cache: its sessions have no home, and their next turn is placed like a first."""
        for session in list(self._at_home.get(worker, ())):
            self._leave_home(session)

    def clear(self) -> None:
        """End every session."""
        for session in list(self._sessions.values()):
            self._end(session)
