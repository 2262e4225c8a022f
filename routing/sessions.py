"""Who lives where: agent sessions, the worker each one is at home on, and how large its context is expected to grow.

A session is known by a key the gateway gives (client headers, within the tenant), else by its longest prefix: a request that
continues the blocks of an earlier request belongs to the same session. Together with the first block, because one client
session runs several conversations (sub-agents, title requests), each with a cache of its own.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from itertools import islice

from routing.fleet import Worker

PEAK_QUANTILE = 0.8  # of the largest contexts seen: what a growing session is expected to need
_PEAK_SAMPLES = 256


class Session:
    """One conversation: a growing prompt whose prefix stays."""

    __slots__ = ("context", "home", "key", "last_seen", "leaf", "peak", "regret", "root", "turns")

    def __init__(self, key: Hashable, root: int, now: float):
        self.key = key
        self.root = root  # hash of the first block: sessions that share a system prompt share it
        self.leaf = 0
        self.home: Worker | None = None
        self.context = 0.0  # largest prompt so far, tokens
        self.peak = 0.0  # expected largest, tokens: what it counts in its home's working set
        self.turns = 0
        self.regret = 0.0  # seconds that staying at home has cost of late, see `policies`
        self.last_seen = now


class SessionTable:
    """Live sessions, least recently seen first. Bounded by `ttl_s` and `max_sessions`; every operation is O(1) amortised."""

    def __init__(self, ttl_s: float = 900.0, max_sessions: int = 100_000):
        self.ttl_s = ttl_s
        self.max_sessions = max_sessions
        self._sessions: OrderedDict[Hashable, Session] = OrderedDict()
        self._by_leaf: dict[int, Session] = {}
        self._sharing: Counter[int] = Counter()
        self._ended: list[tuple[float, int]] = []  # (largest context, turns) of the last sessions that ended
        self._typical_peak = 0.0
        self._continues = 0.5  # share of sessions that come back for a second turn
        self._until_refresh = 0
        self._next_expiry = 0.0
        self.mean_turns = 20.0  # agent traces: mean 69 calls, median 45; learned from sessions that end

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, key: Hashable | None, hashes: Sequence[int], matched: int, now: float, root_blocks: int = 1) -> Session | None:
        """The session this request belongs to; a new one where none fits; None for a prompt shorter than a block.

        `matched` is the longest prefix in blocks that any worker holds: where a session without a key left off. `root_blocks`
        are what conversations of one client are told apart by.
        """
        if now >= self._next_expiry:
            self.expire(now)
        if not hashes:
            return None
        root = hashes[root_blocks - 1] if len(hashes) >= root_blocks else hashes[0]
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
        session.last_seen = now
        return session

    def sharing(self, session: Session) -> int:
        """How many other live sessions start with the same block."""
        return self._sharing[session.root] - 1

    def placed(self, session: Session, worker: Worker, hashes: Sequence[int], prompt_tokens: float) -> None:
        """The session's next turn goes to `worker`: its home from now on."""
        leaf = hashes[-1]
        if leaf != session.leaf:
            self._by_leaf.pop(session.leaf, None)
            session.leaf = leaf
            self._by_leaf[leaf] = session
        session.turns += 1
        session.context = max(session.context, prompt_tokens)
        peak = self.expected_peak(session, prompt_tokens)
        if session.home is not worker:
            self._leave_home(session)
            session.home = worker
            worker.live_sessions += 1
            worker.working_set += peak
        else:
            worker.working_set += peak - session.peak
        session.peak = peak

    def expected_peak(self, session: Session | None, prompt_tokens: float) -> float:
        """Tokens this session is expected to hold at its largest: a high quantile of what sessions reach, weighted for a first
        turn by how often a second follows (a single question must not reserve room for an agent)."""
        self._until_refresh -= 1
        if self._until_refresh < 0:
            self._refresh_typical_peak()
        context = max(prompt_tokens, session.context) if session is not None else prompt_tokens
        growth = self._typical_peak - context
        if growth <= 0:
            return context
        return context + growth if session is not None and session.turns > 1 else context + self._continues * growth

    def _refresh_typical_peak(self) -> None:
        self._until_refresh = 64
        recent = [(s.context, s.turns) for s in islice(reversed(self._sessions.values()), _PEAK_SAMPLES)]
        sample = recent + self._ended
        continued = sorted(context for context, turns in sample if turns > 1)
        if continued:
            self._typical_peak = continued[int(PEAK_QUANTILE * (len(continued) - 1))]
        self._continues = (len(continued) + 1) / (len(sample) + 2)

    def _leave_home(self, session: Session) -> None:
        home = session.home
        if home is not None:
            home.live_sessions -= 1
            home.working_set = home.working_set - session.peak if home.live_sessions else 0.0
            session.home = None
            session.regret = 0.0

    def _end(self, session: Session) -> None:
        self._leave_home(session)
        del self._sessions[session.key]
        if self._by_leaf.get(session.leaf) is session:
            del self._by_leaf[session.leaf]
        self._sharing[session.root] -= 1
        if not self._sharing[session.root]:
            del self._sharing[session.root]
        self._ended.append((session.context, session.turns))
        del self._ended[:-_PEAK_SAMPLES]
        self.mean_turns += 0.02 * (session.turns - self.mean_turns)

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
        for session in self._sessions.values():
            if session.home is worker:
                self._leave_home(session)

    def clear(self) -> None:
        """End every session."""
        for session in list(self._sessions.values()):
            self._end(session)
