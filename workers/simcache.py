"""The simulated engine's prefix cache: which KV blocks are kept, and which go first when room is needed.

Engines keep a table of blocks by hash and a queue of idle blocks, least recently used first, in which a finished request's blocks
stand tail first. This module keeps the same order at a fraction of the cost: blocks that are used and released together form a
run, runs form a tree, and the queue holds runs. Hashes are cumulative (a hash stands for its whole prefix), so two runs are
compared by bisection and a lookup costs the runs on its path, not the blocks.

One difference to vLLM: a block that two requests compute at the same time is kept once, where vLLM keeps both copies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


class Run:
    """Consecutive blocks with the same holders and the same last use; `refs` counts the requests that hold them."""

    __slots__ = ("children", "hashes", "parent", "refs")

    def __init__(self, hashes: list[int], parent: Run | None) -> None:
        self.hashes = hashes
        self.parent = parent
        self.children: dict[int, Run] = {}
        self.refs = 0


@dataclass(slots=True)
class Match:
    """The cached prefix of a prompt: `blocks` in all, of which `idle` are held by no request; it ends `offset` blocks into `run`."""

    run: Run
    offset: int
    blocks: int
    idle: int


class PrefixCache:
    """A pool of `capacity` KV blocks: private ones (in use, without a known hash) and cached ones, held or idle.

    Whoever holds blocks has a `Run` as its tail: it stands for all blocks from the root to it. `lookup` finds, `hold` takes,
    `extend` turns private blocks into cached ones, `release` lets go. Nothing here raises for lack of room: ask `available` first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.root = Run([], None)
        self.private = 0
        self.held = 0
        self.cached = 0
        self.evicted = 0  # blocks, since the start
        self._idle: OrderedDict[Run, None] = OrderedDict()

    @property
    def used(self) -> int:
        """Blocks that running requests occupy; idle cached blocks do not count."""
        return self.private + self.held

    @property
    def available(self) -> int:
        """Blocks that can be allocated, by evicting idle ones where needed."""
        return self.capacity - self.private - self.held

    def lookup(self, hashes: Sequence[int], limit: int) -> Match:
        """The longest cached prefix of `hashes`, at most `limit` blocks. Takes nothing."""
        run, depth, idle, limit = self.root, 0, 0, min(limit, len(hashes))
        offset = 0
        while depth < limit:
            child = run.children.get(hashes[depth])
            if child is None:
                break
            run, offset = child, _common(child.hashes, hashes, depth, limit)
            depth += offset
            if child.refs == 0:
                idle += offset
            if offset < len(child.hashes):
                break
        return Match(run, offset, depth, idle)

    def hold(self, match: Match) -> Run:
        """Take the matched blocks; returns the holder's tail. The match must be fresh: nothing changed since its lookup."""
        tail = self._split(match.run, match.offset)
        run: Run | None = tail
        while run is not None and run is not self.root:
            self._take(run)
            run = run.parent
        return tail

    def allocate(self, blocks: int) -> None:
        """Take `blocks` private blocks, evicting idle ones as needed; at most `available`."""
        self.private += blocks
        self._evict(self.private + self.cached - self.capacity)

    def free(self, blocks: int) -> None:
        """Give `blocks` private blocks back."""
        self.private -= blocks

    def extend(self, tail: Run, hashes: Sequence[int], start: int, stop: int) -> Run:
        """Cache private blocks `start` to `stop` of a request behind its tail; returns its new tail.

        Blocks that another request cached in the meantime are shared, and the private copies given back.
        """
        while start < stop:
            child = tail.children.get(hashes[start])
            if child is not None:
                shared = _common(child.hashes, hashes, start, stop)
                tail = self._split(child, shared)
                self._take(tail)
                self.private -= shared
                start += shared
                continue
            fresh = list(hashes[start:stop])
            self.private -= len(fresh)
            self.held += len(fresh)
            self.cached += len(fresh)
            if tail is not self.root and tail.refs == 1 and not tail.children:
                tail.hashes += fresh
            else:
                child = Run(fresh, tail)
                child.refs = 1
                tail.children[fresh[0]] = child
                tail = child
            break
        return tail

    def insert(self, hashes: Sequence[int]) -> None:
        """Cache blocks that come from elsewhere, held by nobody; as many of the leading ones as there is room for."""
        match = self.lookup(hashes, len(hashes))
        blocks = min(len(hashes), match.blocks + self.available - match.idle)
        if blocks > match.blocks:
            tail = self.hold(match)
            self.allocate(blocks - match.blocks)
            self.release(self.extend(tail, hashes, match.blocks, blocks))

    def release(self, tail: Run) -> None:
        """Let go of all blocks up to `tail`; those nobody else holds become idle, the tail's first in line for eviction."""
        run = tail
        while run.parent is not None:
            run.refs -= 1
            if run.refs == 0:
                self.held -= len(run.hashes)
                self._idle[run] = None
            run = run.parent

    def _take(self, run: Run) -> None:
        if run.refs == 0:
            self.held += len(run.hashes)
            self._idle.pop(run, None)
        run.refs += 1

    def _split(self, run: Run, offset: int) -> Run:
        """The run that ends `offset` blocks into `run`. `run` itself keeps the blocks behind: its holders' tails stay valid.

        The new run is in no queue; every caller takes it at once.
        """
        if offset == len(run.hashes):
            return run
        parent = run.parent
        assert parent is not None
        front = Run(run.hashes[:offset], parent)
        front.refs = run.refs
        front.children[run.hashes[offset]] = run
        parent.children[front.hashes[0]] = front
        run.hashes = run.hashes[offset:]
        run.parent = front
        return front

    def _evict(self, blocks: int) -> None:
        # The first run in the queue is always a leaf: whoever released a child released its parent after it.
        self.evicted += max(0, blocks)
        while blocks > 0:
            run = next(iter(self._idle))
            count = len(run.hashes)
            if count > blocks:
                del run.hashes[-blocks:]
                self.cached -= blocks
                return
            del self._idle[run]
            assert run.parent is not None and not run.children
            del run.parent.children[run.hashes[0]]
            self.cached -= count
            blocks -= count


def _common(run: list[int], hashes: Sequence[int], start: int, stop: int) -> int:
    """How many leading hashes of `run` equal `hashes[start:stop]`, given that the first does."""
    high = min(len(run), stop - start)
    if run[high - 1] == hashes[start + high - 1]:
        return high
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        if run[middle - 1] == hashes[start + middle - 1]:
            low = middle
        else:
            high = middle
    return low
