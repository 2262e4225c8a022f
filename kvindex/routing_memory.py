"""What each worker's cache probably holds, guessed from what was routed to it.

For workers that do not report what they cache. Every worker has a prefix tree of strands: a strand is a run of consecutive blocks
of one chain, and a chain is the path of strands from a root to its end. Growing a session lengthens its last strand; where two
chains part (sessions that share a system prompt, a compacted conversation) the strand is split, so no block is counted twice.

Recording a chain makes its strands the newest, the beginning newest of all. So the least recently used strand never has
descendants, and evicting it tail first, as engines do, keeps what is left prefix-closed.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence

from kvindex.index import KVIndex

# One late discovery that a worker held less than assumed lowers its capacity by at most this share.
TRIM_SHARE = 0.02
# Blocks after which one `expire` call stops.
EXPIRE_BLOCKS = 4096


class RoutingMemory:
    """Feeds `index` with what was routed where, within each worker's KV capacity.

    Nothing else may store or remove the same workers' blocks in `index`. Block counts are index blocks. Not thread-safe.
    """

    def __init__(self, index: KVIndex, ttl_s: float = 3600.0) -> None:
        self._index = index
        self._ttl_s = ttl_s
        self._workers: dict[str, _WorkerMemory] = {}

    def set_capacity(self, worker: str, blocks: int) -> None:
        """Blocks the worker's cache holds; what is over is evicted. Replaces an estimate that `trim` has lowered."""
        if blocks < 0:
            raise ValueError(f"capacity of {worker!r} must not be negative, got {blocks}")
        memory = self._workers.setdefault(worker, _WorkerMemory())
        memory.configured = memory.capacity = blocks
        self._remove(worker, memory.evict_over_capacity())

    def capacity_blocks(self, worker: str) -> int:
        """The current estimate; raises KeyError for a worker whose capacity was never set."""
        return self._workers[worker].capacity

    def used_blocks(self, worker: str) -> int:
        memory = self._workers.get(worker)
        return memory.used if memory else 0

    def holds(self, worker: str, session: Hashable) -> bool:
        """Whether the session's last chain is held there, all of it or its beginning."""
        memory = self._workers.get(worker)
        return memory is not None and session in memory.sessions

    def record(self, worker: str, session: Hashable, hashes: Sequence[int], now: float, computed_elsewhere: int = 0) -> None:
        """The request with this chain went to this worker at `now` (seconds, never decreasing).

        Costs what is new in the chain. Of a chain longer than the capacity only the beginning is kept. So many leading blocks were
        there before as others know: those are no longer counted among what others had computed. Raises KeyError for a worker whose
        capacity was never set.
        """
        memory = self._workers[worker]
        end = min(len(hashes), memory.capacity)
        if not end:
            return
        held = memory.record(session, hashes, end, now)
        if held < computed_elsewhere and memory.foreign:
            memory.take_over(computed_elsewhere - held)
        if held < end:
            # The chain itself is the newest and fits: none of its blocks is evicted here.
            self._remove(worker, memory.evict_over_capacity())
            self._index.store(worker, hashes[held:end])

    def others_computed(self, worker: str, blocks: int, now: float) -> None:
        """Requests that others sent to this worker have filled so many blocks of its cache, which push out what is older."""
        memory = self._workers.get(worker)
        if memory is not None and blocks > 0:
            memory.foreign.append((now, blocks))
            memory.foreign_blocks += blocks
            self._remove(worker, memory.evict_over_capacity())

    def trim(self, worker: str, session: Hashable, blocks: int) -> None:
        """The worker reported that it held only `blocks` leading blocks of the session's last chain before it ran that request.

        It evicts earlier than assumed, so its capacity estimate is lowered a little, but never below that chain, which it holds now.
        An unknown worker or session is ignored: its chain has been evicted since.
        """
        memory = self._workers.get(worker)
        strand = memory.sessions.get(session) if memory else None
        if memory is None or strand is None:
            return
        missing = strand.end - blocks
        if missing <= 0:
            return
        step = min(missing, math.ceil(memory.capacity * TRIM_SHARE))
        memory.capacity = max(memory.capacity - step, strand.end)
        self._remove(worker, memory.evict_over_capacity())

    def forget(self, worker: str) -> None:
        """The worker restarted: it holds nothing, and its capacity is the configured one again."""
        memory = self._workers.get(worker)
        if memory is not None:
            self._workers[worker] = _WorkerMemory(memory.configured)
        self._index.clear(worker)

    def remove(self, worker: str) -> None:
        """The worker left: nothing is kept of it, and its capacity has to be set anew should it come back."""
        self._workers.pop(worker, None)
        self._index.clear(worker)

    def expire(self, now: float) -> int:
        """Drop strands unused for the TTL; returns the number of blocks dropped.

        Stops soon after EXPIRE_BLOCKS, so that a call stays short: call it regularly, and again while it returns that many.
        """
        dropped = 0
        for worker, memory in self._workers.items():
            while dropped < EXPIRE_BLOCKS and (strand := memory.oldest()) and strand.used_at <= now - self._ttl_s:
                blocks = memory.evict_tail(strand, min(len(strand.blocks), EXPIRE_BLOCKS - dropped))
                dropped += len(blocks)
                self._remove(worker, blocks)
        return dropped

    def _remove(self, worker: str, blocks: list[int]) -> None:
        if blocks:
            self._index.remove(worker, blocks)


class _Strand:
    """A run of blocks of one chain: `blocks[0]` is the chain's block number `start`."""

    __slots__ = ("blocks", "children", "parent", "session", "start", "used_at")

    def __init__(self, start: int, blocks: list[int], parent: _Strand | None) -> None:
        self.start = start
        self.blocks = blocks
        self.parent = parent  # the strand that ends where this one starts
        self.children = 0  # strands that start where this one ends
        self.session: Hashable | None = None  # the last session whose chain ends here
        self.used_at = 0.0

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)


class _WorkerMemory:
    """One worker's prefix tree. Owns its strands and their lists; knows nothing of the index."""

    def __init__(self, capacity: int = 0) -> None:
        self.configured = capacity
        self.capacity = capacity
        self.used = 0  # blocks in all strands
        self.foreign: deque[tuple[float, int]] = deque()  # blocks that others had computed, and when; oldest first
        self.foreign_blocks = 0
        self.sessions: dict[Hashable, _Strand] = {}  # where the session's last chain ends, as long as that is held
        self._by_first: dict[int, _Strand] = {}  # a strand's first block -> the strand
        self._lru: OrderedDict[_Strand, None] = OrderedDict()  # oldest first; a strand is newer than its descendants

    def record(self, session: Hashable, hashes: Sequence[int], end: int, now: float) -> int:
        """Hold the chain's first `end` blocks; returns how many of them were held before."""
        strand = self._deepest(session, hashes, end)
        held = strand.end if strand else 0
        if held < end:
            new = list(hashes[held:end])
            if strand and not strand.children:
                strand.blocks += new
            else:
                strand = self._add(held, new, strand)
            self.used += len(new)
        assert strand is not None
        self._name(strand, session)
        self._touch(strand, now)
        return held

    def oldest(self) -> _Strand | None:
        return next(iter(self._lru), None)

    def evict_over_capacity(self) -> list[int]:
        """Evict least recently used strands, only as many blocks as needed; returns the blocks."""
        evicted: list[int] = []
        while (over := self.used + self.foreign_blocks - self.capacity) > 0:
            strand = next(iter(self._lru), None)
            if self.foreign and (strand is None or self.foreign[0][0] <= strand.used_at):
                when, blocks = self.foreign.popleft()
                if blocks > over:
                    self.foreign.appendleft((when, blocks - over))
                self.foreign_blocks -= min(blocks, over)
            else:
                assert strand is not None
                evicted += self.evict_tail(strand, min(over, len(strand.blocks)))
        return evicted

    def take_over(self, blocks: int) -> None:
        """So many of the blocks that others had computed are known now; the newest, since sessions come back soon."""
        while blocks > 0 and self.foreign:
            when, newest = self.foreign.pop()
            if newest > blocks:
                self.foreign.append((when, newest - blocks))
            self.foreign_blocks -= min(newest, blocks)
            blocks -= newest

    def evict_tail(self, strand: _Strand, count: int) -> list[int]:
        """Drop the last `count` blocks of a strand without descendants; returns them."""
        self.used -= count
        if count < len(strand.blocks):
            blocks = strand.blocks[-count:]
            del strand.blocks[-count:]
            return blocks
        self._drop(strand)
        if strand.parent:
            strand.parent.children -= 1
        return strand.blocks

    def _deepest(self, session: Hashable, hashes: Sequence[int], end: int) -> _Strand | None:
        """The strand that ends with the last held block of the chain's first `end`; splits one where the chain leaves it."""
        strand = self.sessions.get(session)
        if strand and (strand.end > end or hashes[strand.end - 1] != strand.blocks[-1]):
            strand = None  # the session did not simply grow: come from the root
        while True:
            depth = strand.end if strand else 0
            child = self._by_first.get(hashes[depth]) if depth < end else None
            if child is None:
                return strand
            common = _common_blocks(child.blocks, hashes, depth, end)
            if common < len(child.blocks):
                return self._split(child, common)
            if strand and strand.children == 1:
                self._merge(strand, child)
            strand = child

    def _add(self, start: int, blocks: list[int], parent: _Strand | None) -> _Strand:
        strand = _Strand(start, blocks, parent)
        if parent:
            parent.children += 1
        self._by_first[blocks[0]] = strand
        self._lru[strand] = None
        return strand

    def _split(self, strand: _Strand, count: int) -> _Strand:
        """Cut off the strand's first `count` blocks; returns them as a new strand. The rest keeps its age, session and children."""
        head = _Strand(strand.start, strand.blocks[:count], strand.parent)
        head.children = 1
        strand.start += count
        del strand.blocks[:count]
        strand.parent = head
        self._by_first[head.blocks[0]] = head
        self._by_first[strand.blocks[0]] = strand
        self._lru[head] = None
        return head

    def _merge(self, strand: _Strand, child: _Strand) -> None:
        """Make a strand and its only child one again, so that paths do not get longer with every fork that has come and gone."""
        self._drop(strand)
        del self._by_first[child.blocks[0]]
        child.start = strand.start
        child.blocks = strand.blocks + child.blocks
        child.parent = strand.parent
        self._by_first[child.blocks[0]] = child

    def _drop(self, strand: _Strand) -> None:
        del self._lru[strand]
        del self._by_first[strand.blocks[0]]
        self._name(strand, None)

    def _name(self, strand: _Strand, session: Hashable | None) -> None:
        """The session's last chain ends with this strand. One strand, one session: the map cannot outgrow the tree."""
        if strand.session == session:
            return
        if strand.session is not None:
            del self.sessions[strand.session]
        strand.session = session
        if session is not None:
            if before := self.sessions.get(session):
                before.session = None
            self.sessions[session] = strand

    def _touch(self, strand: _Strand | None, now: float) -> None:
        """Make the path to the strand the newest, its beginning last."""
        while strand:
            strand.used_at = now
            self._lru.move_to_end(strand)
            strand = strand.parent


def _common_blocks(blocks: list[int], hashes: Sequence[int], start: int, end: int) -> int:
    """How many of `blocks` are equal to hashes[start:end]. At least the first is; equal hashes mean equal prefixes, so bisect."""
    low, high = 1, min(len(blocks), end - start)
    while low < high:
        middle = (low + high + 1) >> 1
        if blocks[middle - 1] == hashes[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
