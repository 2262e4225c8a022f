"""The index in Redis: one namespace per owner, one script call a match. `kvindex.redis_scripts` tells how it is stored."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar
from zlib import crc32

from kvindex.redis_line import Line, RedisRefused, RedisUnavailable
from kvindex.redis_scripts import DROP, JOIN, MATCH, RELEASE, RENEW, SWEEP, WRITE

Operation = tuple[Literal["store", "remove", "clear"], str, Sequence[int]]
"""What happened, the holder, the block hashes (none for "clear")."""

BUCKET_BLOCKS = 24  # most a bucket has at capacity, in the mean: short ones are written faster, and one of over 128 would be no listpack
BUCKET_BITS = (8, 24)  # fewest and most bits that number a bucket
CALL_BLOCKS = 512  # blocks written by one script call, which keeps Redis busy for about 1 ms
CALLS_AT_ONCE = 4  # on their way: enough to keep Redis busy, few enough that others do not wait long behind them
WRITE_DEADLINE_S = 1.0
SWEEP_BUCKETS = 64  # buckets visited by one script call: about 1 ms
SWEEP_LEASE_S = 2.0
CHANGES = 64  # of the slot table, fetched at once by those who missed them

_CODES = {"store": "+", "remove": "-", "clear": "0"}
_T = TypeVar("_T")


class IndexGone(Exception):
    """Redis does not know this owner: it lost its data, its lease ended, or the index was built anew. Join and upload again."""


class RedisIndex:
    """One owner's view of the index in one Redis.

    Every owner (a gateway's run) stores and removes under its own name only; a match merges all owners by maximum. `join` comes
    first. Every method may raise RedisUnavailable and RedisRefused.
    """

    def __init__(
        self, line: Line, pool: str, owner: str, *, capacity_blocks: int, shard: int | None = None, bulk: Line | None = None
    ) -> None:
        """`capacity_blocks`: what all workers' caches hold together, in index blocks. `owner` must not contain a space.

        `shard` numbers this index among those the pool is spread over; its keys have a hash tag of their own then. `bulk` is a line to
        the same server that takes all but matches, so that these do not wait behind writes.
        """
        self.refused_blocks = 0  # not stored because Redis is full, or all slots are taken
        self._line = line
        self._bulk = bulk or line
        self._owner = owner
        self._keys = [key_prefix(pool, shard) + "m"]
        self.resize(capacity_blocks)
        self._version = b""  # of the slot table; the following are of that version
        self._table: dict[int, tuple[int, str, str]] = {}  # slot -> version it was taken at, owner, holder
        self._holders: dict[int, str] = {}
        self._foreign: dict[int, str] = {}  # without the owner's own slots
        self._joins = 0
        self._fetch: asyncio.Task[None] | None = None

    def resize(self, capacity_blocks: int) -> None:
        """Set the capacity, from the next `join` on. An index that turns out four times too small is built anew then, by all owners."""
        fewest, most = BUCKET_BITS
        self._bits = min(most, max(fewest, (max(0, capacity_blocks - 1) // BUCKET_BLOCKS).bit_length()))

    @property
    def whole(self) -> bool:
        return True

    @property
    def reachable(self) -> bool:
        """Whether the line for writing is up."""
        return self._bulk.up

    async def join(self, lease_s: float) -> None:
        """Begin with an empty namespace, which `renew` keeps."""
        self._version = b""  # it may be another server, with another table
        self._joins += 1
        await self._bulk.run(JOIN, self._keys, [self._owner, self._bits, _ms(lease_s)])

    async def renew(self, lease_s: float) -> None:
        """Keep the namespace for so long. Raises IndexGone."""
        if not await self._bulk.run(RENEW, self._keys, [self._owner, _ms(lease_s)]):
            raise IndexGone

    async def leave(self) -> bool:
        """Give up the namespace; returns whether nobody is left, so that what is given up is still to be swept."""
        await self._bulk.run(DROP, self._keys, [self._owner])
        return not await self._bulk.call("EXISTS", self._key("g"))

    async def drop_dead_owners(self) -> int:
        """Drop the namespaces whose lease has ended; returns how many."""
        return int(await self._bulk.run(DROP, self._keys, []))

    async def match(self, hashes: Sequence[int], *, include_own: bool = True) -> dict[str, int]:
        """Holder -> number of leading blocks it holds according to any owner, exact as `KVIndex.match` is. Raises IndexGone.

        One round trip; one more after slots were taken or given up.
        """
        if not hashes:
            return {}
        reply = await self._line.run(MATCH, self._keys, [packed(hashes)])
        if reply is None:
            raise IndexGone
        version, found = reply
        if version == self._version:
            holders = self._holders if include_own else self._foreign
        else:
            holders = await self._holders_at(version, include_own)
        depths: dict[str, int] = {}
        at = 0
        while at < len(found):
            depth, count = struct.unpack_from(">IH", found, at)
            for slot in struct.unpack_from(f">{count}H", found, at + 6):
                holder = holders.get(slot)
                if holder is not None and depths.get(holder, 0) < depth:
                    depths[holder] = depth
            at += 6 + 2 * count
        return depths

    async def write(self, operations: Iterable[Operation]) -> None:
        """Apply the operations in order. Raises IndexGone.

        When it raises, some may have been applied. Where Redis is full, stores are left out and counted, and the rest is done.
        """
        calls = _calls(operations)
        sent: deque[tuple[list[str | bytes], asyncio.Future[list[Any]]]] = deque()
        while True:
            while len(sent) < CALLS_AT_ONCE and (arguments := next(calls, None)):
                command = WRITE.command(self._keys, [self._owner, *arguments])
                sent.append((arguments, self._bulk.pipeline([command], WRITE_DEADLINE_S)))
            if not sent:
                return
            arguments, future = sent.popleft()
            [reply] = await future
            if isinstance(reply, RedisRefused) and reply.code == "OOM":
                reply = await self._without_stores(arguments)
            if isinstance(reply, Exception):
                raise reply
            if not reply:
                raise IndexGone
            self.refused_blocks += reply - 1

    async def sweep(self, buckets: int = SWEEP_BUCKETS) -> int:
        """Do a part of the sweep that makes given-up slots free; returns the number of buckets left.

        One owner sweeps at a time; 0 for the others.
        """
        return max(0, await self._bulk.run(SWEEP, self._keys, [self._owner, _ms(SWEEP_LEASE_S), buckets]))

    async def _without_stores(self, arguments: list[str | bytes]) -> Any:
        kept: list[str | bytes] = []
        for at in range(0, len(arguments), 3):
            if arguments[at] == "+":
                self.refused_blocks += len(arguments[at + 2]) // 8
            else:
                kept += arguments[at : at + 3]
        return await self._bulk.run(RELEASE, self._keys, [self._owner, *kept], WRITE_DEADLINE_S)

    async def _holders_at(self, version: bytes, include_own: bool) -> dict[int, str]:
        """The slot table as far as it is good for a reply of this version: a slot that was taken later had another holder, or none."""
        for _ in range(2):  # a fetch that was under way may have been too early
            if int(version) <= int(self._version or 0):
                break
            if self._fetch is None:  # all who miss it wait for one fetch
                self._fetch = asyncio.create_task(self._fetch_table())
                self._fetch.add_done_callback(self._fetched)
            await asyncio.shield(self._fetch)
        if int(version) > int(self._version or 0):
            return {}  # another server answers now, and does not know as much
        if version == self._version:
            return self._holders if include_own else self._foreign
        return {
            slot: holder
            for slot, (since, owner, holder) in self._table.items()
            if since <= int(version) and (include_own or owner != self._owner)
        }

    async def _fetch_table(self) -> None:
        """Bring the table up to date: by its last changes where they reach back far enough."""
        joins = self._joins
        if self._version:
            changes = await self._line.call("LRANGE", self._key("c"), 0, CHANGES - 1)
            if joins == self._joins and self._follow(changes):
                return
        joins = self._joins
        # The version first: then the table can only be newer, and what is newer in it is recognised.
        version, table = await self._line.pipeline([("HGET", self._keys[0], "version"), ("HGETALL", self._key("s"))])
        if joins != self._joins:
            return  # it may be the former server's; whoever misses the table fetches it once more
        for reply in (version, table):
            if isinstance(reply, Exception):
                raise reply
        if version is None:
            raise IndexGone
        self._table, self._holders, self._foreign = {}, {}, {}
        for slot, entry in zip(table[::2], table[1::2], strict=True):
            since, _, by = entry.partition(b" ")
            self._take(slot, int(since), by)
        self._version = version

    def _follow(self, changes: list[bytes]) -> bool:
        """Apply those that are new, newest first in the list; False where some before them are missing."""
        known = int(self._version)
        new = []
        for change in changes:
            version, _, rest = change.partition(b" ")
            if int(version) <= known:
                break
            new.append((int(version), rest[:2], rest[2:]))
        if not new or new[-1][0] != known + 1 or new[0][0] != known + len(new):
            return False
        for since, slot, by in reversed(new):
            self._take(slot, since, by)
        self._version = b"%d" % new[0][0]
        return True

    def _take(self, slot: bytes, since: int, by: bytes) -> None:
        number = int.from_bytes(slot, "big")
        for table in (self._table, self._holders, self._foreign):
            table.pop(number, None)
        if by:
            owner, _, holder = by.decode().partition(" ")
            self._table[number] = since, owner, holder
            self._holders[number] = holder
            if owner != self._owner:
                self._foreign[number] = holder

    def _key(self, name: str) -> str:
        return self._keys[0][:-1] + name

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetch = None
        if not task.cancelled():
            task.exception()  # those who wait get it; perhaps nobody does any more


class ShardedIndex:
    """Several RedisIndex as one: each holder's blocks are in one of them. A match asks all at once.

    A shard that is away takes no other with it: it is left out until the next `join`, for which `renew` asks once the shard can be
    reached. Methods raise RedisUnavailable when no shard is left.
    """

    def __init__(self, shards: Sequence[RedisIndex]) -> None:
        self._shards = shards
        self._out: set[RedisIndex] = set()

    @property
    def whole(self) -> bool:
        """Whether no shard is left out."""
        return not self._out

    def resize(self, capacity_blocks: int) -> None:
        """As RedisIndex; the capacity is that of all shards together."""
        for shard in self._shards:
            shard.resize(-(-capacity_blocks // len(self._shards)))

    @property
    def refused_blocks(self) -> int:
        return sum(shard.refused_blocks for shard in self._shards)

    async def join(self, lease_s: float) -> None:
        self._out.clear()
        await self._each({shard: shard.join(lease_s) for shard in self._shards})

    async def renew(self, lease_s: float) -> None:
        if any(shard.reachable for shard in self._out):
            raise IndexGone
        await self._each({shard: shard.renew(lease_s) for shard in self._shards if shard not in self._out})

    async def leave(self) -> bool:
        return any(await _all(shard.leave() for shard in self._shards))

    async def drop_dead_owners(self) -> int:
        return sum(await self._each({shard: shard.drop_dead_owners() for shard in self._shards if shard not in self._out}))

    async def match(self, hashes: Sequence[int], *, include_own: bool = True) -> dict[str, int]:
        """As RedisIndex; a shard that is away or lost its data is left out, unless all are."""
        found = await asyncio.gather(*(shard.match(hashes, include_own=include_own) for shard in self._shards), return_exceptions=True)
        depths: dict[str, int] = {}
        for part in found:
            if isinstance(part, dict):
                depths.update(part)
            elif not isinstance(part, (RedisUnavailable, RedisRefused, IndexGone)) or not any(isinstance(other, dict) for other in found):
                raise part
        return depths

    async def write(self, operations: Iterable[Operation]) -> None:
        parts: list[list[Operation]] = [[] for _ in self._shards]
        for operation in operations:
            parts[crc32(operation[1].encode()) % len(parts)].append(operation)
        shards = zip(self._shards, parts, strict=True)
        await self._each({shard: shard.write(part) for shard, part in shards if part and shard not in self._out})

    async def sweep(self) -> int:
        return max(await self._each({shard: shard.sweep() for shard in self._shards if shard not in self._out}), default=0)

    async def _each(self, calls: Mapping[RedisIndex, Awaitable[_T]]) -> list[_T]:
        """The results of the shards that are there."""
        results = await asyncio.gather(*calls.values(), return_exceptions=True)
        found: list[_T] = []
        for shard, result in zip(calls, results, strict=True):
            if isinstance(result, RedisUnavailable):
                self._out.add(shard)
                if len(self._out) == len(self._shards):
                    raise result
            elif isinstance(result, BaseException):
                raise result
            else:
                found.append(result)
        return found


def key_prefix(pool: str, shard: int | None = None) -> str:
    """What all keys of a pool begin with: its hash tag and the schema's version."""
    return f"{{wr:{pool}}}:1:" if shard is None else f"{{wr:{pool}:{shard}}}:1:"


async def _all(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Their results, once all have ended; raises what the first one that failed raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


def packed(hashes: Sequence[int]) -> bytes:
    """8 bytes a hash, as the scripts take them."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _calls(operations: Iterable[Operation]) -> Iterator[list[str | bytes]]:
    """The arguments of script calls of at most CALL_BLOCKS blocks (and operations) each."""
    arguments: list[str | bytes] = []
    room = CALL_BLOCKS
    for kind, holder, hashes in operations:
        at = 0
        while at < len(hashes) or kind == "clear":
            piece = hashes[at : at + room]
            arguments += (_CODES[kind], holder, packed(piece))
            at += len(piece)
            room -= max(1, len(piece))
            if room <= 0:
                yield arguments
                arguments, room = [], CALL_BLOCKS
            if kind == "clear":
                break
    if arguments:
        yield arguments
