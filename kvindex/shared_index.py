"""A gateway's own index, and its copy in Redis for the other gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from kvindex.memory import MemoryIndex
from kvindex.redis_index import IndexGone, Operation, RedisIndex, ShardedIndex
from kvindex.redis_line import Command, Line, RedisRefused, RedisUnavailable

logger = logging.getLogger("warmroute.shared_index")

FLUSH_S = 0.005  # how long changes wait for others to go with them
UPLOAD_BLOCKS = 2048  # of the local index, read and written at once: 1 to 2 ms of the event loop
JOURNAL_BLOCKS = 1_000_000  # more unwritten changes than that, and all is uploaded anew instead
JOURNAL_COMMANDS = 10_000
RETRY_S = 0.5
MOST_REASONS = 16  # that are logged
REFILL_S = 10.0  # how long Redis, once it was full, must have taken all before it gets what was left out
SWEEP_PAUSE_S = 0.01  # between parts of a sweep, each about 1 ms of Redis
LAST_SWEEP_S = 5.0  # how long the last gateway of a pool may take to leave nothing behind

_FAILURES = (IndexGone, RedisUnavailable, RedisRefused)


class SharedIndex:
    """KVIndex: acts on the local index at once, and on Redis a few milliseconds behind. `lookup` tells what other gateways know.

    The local index is the truth of this gateway's namespace in Redis. While Redis is away nothing is kept for it; when it is back, the
    namespace begins anew and everything local is uploaded. Whoever makes the line calls `resync` whenever it is up (again).
    """

    def __init__(self, local: MemoryIndex, remote: RedisIndex | ShardedIndex, line: Line, *, lease_s: float = 3.0) -> None:
        """`line` is the index's for writing; it takes the commands given to `behind`.

        Others drop the namespace `lease_s` after this gateway was last heard of.
        """
        self.resyncs = 0
        self.written_blocks = 0  # sent to Redis, and nothing against it heard
        self.failed_writes = 0  # changes that may be missing in Redis; after each everything is uploaded again
        self._local = local
        self._remote = remote
        self._line = line
        self._lease_s = lease_s
        self._journal = _Journal()
        self._uploaded = False
        self._recording = False  # changes are journaled: from the beginning of an upload until something fails
        self._commands: list[Command] = []
        self._due = asyncio.Event()  # something is to be flushed, or all to be uploaded
        self._urgent = asyncio.Event()  # now, not in a few milliseconds
        self._refusals: set[str] = set()  # reasons that were logged
        self._refused = 0  # blocks, as far as `_refused_at` goes
        self._refused_at: float | None = None  # when Redis was last full; None: it has all
        self._waiting: list[asyncio.Future[None]] = []  # for what is journaled by now to be written
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def synced(self) -> bool:
        """Whether Redis has all that is local, but for the last milliseconds."""
        return self._uploaded and self._line.up and self._remote.whole

    @property
    def refused_blocks(self) -> int:
        """Blocks that others do not learn of because Redis is full."""
        return self._remote.refused_blocks

    async def start(self) -> None:
        """Upload what is local as soon as Redis is there, and keep it up to date until `close`."""
        if not self._tasks:
            self.resync()
            self._tasks = [
                asyncio.create_task(self._write_behind(), name="index to redis"),
                asyncio.create_task(self._keep(), name="index lease and sweep"),
            ]

    async def close(self) -> None:
        """Stop, and give up the namespace if Redis is there. The last one to leave tidies up."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
            self._tasks = []
            self._forget()
            for future in self._waiting:
                future.cancel()
            try:
                if await self._remote.leave():
                    await self._sweep(LAST_SWEEP_S, pause_s=0.0)
            except _FAILURES:
                pass  # its lease ends soon

    def resync(self) -> None:
        """Upload everything again: for when the line to Redis is up (again). What it had from here may be lost, or another server's."""
        self._forget()
        self._urgent.set()
        self._due.set()

    async def lookup(self, hashes: Sequence[int]) -> dict[str, int] | None:
        """Holder -> leading blocks it holds, as other gateways know; None when Redis is away.

        To be merged by maximum with `match`: what this gateway itself wrote is left out, because `match` knows it and is never behind.
        """
        try:
            return await self._remote.match(hashes, include_own=False)
        except IndexGone:
            if self._recording:
                self.resync()
        except RedisUnavailable:
            pass
        except Exception as error:  # whatever lies in Redis, requests go on without it
            self._log_refusal(error)
        return None

    async def flush(self) -> None:
        """Wait until Redis has what is local now. Raises RedisUnavailable where writing it fails."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._urgent.set()
        self._due.set()
        await future

    def behind(self, *command: bytes | str | int | float) -> None:
        """Send a command with the next changes. Its reply is dropped, and so is the command while Redis is away."""
        if self._line.up and len(self._commands) < JOURNAL_COMMANDS:
            self._commands.append(command)
            self._due.set()

    # ---- KVIndex

    def match(self, hashes: Sequence[int]) -> dict[str, int]:
        return self._local.match(hashes)

    def store(self, worker: str, hashes: Iterable[int]) -> None:
        if self._recording:
            hashes = hashes if isinstance(hashes, list) else list(hashes)
            self._record("store", worker, hashes)
        self._local.store(worker, hashes)

    def remove(self, worker: str, hashes: Iterable[int]) -> None:
        if self._recording:
            hashes = hashes if isinstance(hashes, list) else list(hashes)
            self._record("remove", worker, hashes)
        self._local.remove(worker, hashes)

    def clear(self, worker: str) -> None:
        self._local.clear(worker)
        if self._recording:
            self._journal.clear(worker)
            self._urgent.set()
            self._due.set()

    def __len__(self) -> int:
        return len(self._local)

    # ---- to Redis

    def _record(self, kind: str, worker: str, hashes: list[int]) -> None:
        if self._journal.blocks > JOURNAL_BLOCKS:
            self.resync()  # Redis is far behind
            return
        self._journal.add(kind, worker, hashes)
        self._due.set()

    def _forget(self) -> None:
        self._uploaded = self._recording = False
        self._journal = _Journal()
        self._commands = []

    async def _write_behind(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._due.wait()
            soon = loop.call_later(FLUSH_S, self._urgent.set)
            await self._urgent.wait()
            soon.cancel()
            self._due.clear()
            self._urgent.clear()
            waiting, self._waiting = self._waiting, []
            try:
                while not self._recording:
                    await self._upload()
                await self._flush()
            except _FAILURES as error:
                self._failed(error, waiting)
                await self._pause()
            except Exception as error:  # a fault of this program, but others must not be told what is no longer true
                logger.exception("the shared index could not be written")
                self._failed(error, waiting)
                await self._pause()
            else:
                if not self._recording:
                    self._waiting = waiting + self._waiting  # the line came up once more
                    continue
                for future in waiting:
                    if not future.done():
                        future.set_result(None)

    def _failed(self, error: Exception, waiting: list[asyncio.Future[None]]) -> None:
        if isinstance(error, RedisRefused):
            self._log_refusal(error)  # the line tells of all else
        self.failed_writes += self._recording
        self._forget()
        self._due.set()
        for future in waiting:
            if not future.done():
                future.set_exception(RedisUnavailable(str(error)))

    def _log_refusal(self, error: Exception) -> None:
        """Each reason once."""
        reason = str(error) or type(error).__name__
        if reason not in self._refusals and len(self._refusals) < MOST_REASONS:
            self._refusals.add(reason)
            logger.warning("the shared index cannot be used: %s", reason)

    async def _pause(self) -> None:
        """Before the next attempt; shorter when the line comes up meanwhile."""
        try:
            await asyncio.wait_for(self._urgent.wait(), RETRY_S)
        except TimeoutError:
            pass

    async def _upload(self) -> None:
        await self._remote.join(self._lease_s)
        self._recording = True  # what changes from here on follows in the journal, behind what was read before
        blocks = self._local.hashes()
        for at in range(0, len(blocks), UPLOAD_BLOCKS):
            for worker, held in self._local.held(blocks[at : at + UPLOAD_BLOCKS]).items():
                self._journal.add("store", worker, held)
            await self._flush()
            if not self._recording:
                return  # the line came up once more, and all begins anew
        self._uploaded = True
        self.resyncs += 1

    async def _flush(self) -> None:
        operations, self._journal = self._journal.operations(), _Journal()
        if self._commands:
            commands, self._commands = self._commands, []
            self._line.pipeline(commands)
        if operations:
            await self._remote.write(operations)
            self.written_blocks += sum(len(hashes) for _, _, hashes in operations)
            self._refill(any(kind == "store" for kind, _, _ in operations))

    def _refill(self, stored: bool) -> None:
        """Upload everything again when Redis has room for what it refused: without its beginning a chain is found by nobody."""
        now = asyncio.get_running_loop().time()
        if self._refused != self._remote.refused_blocks:
            self._refused, self._refused_at = self._remote.refused_blocks, now
        elif stored and self._refused_at is not None and now - self._refused_at > REFILL_S:
            self._refused_at = None
            self.resync()

    async def _keep(self) -> None:
        """Renew the lease, and tidy up what gateways that are gone and cleared workers left."""
        while True:
            await asyncio.sleep(self._lease_s / 4)
            if not self._recording:
                continue
            try:
                await self._remote.renew(self._lease_s)
                await self._remote.drop_dead_owners()
            except IndexGone:
                if self._recording:
                    self.resync()
            except (RedisUnavailable, RedisRefused):
                continue
            await self._sweep(self._lease_s / 4)  # then the lease is to be renewed

    async def _sweep(self, most_s: float, pause_s: float = SWEEP_PAUSE_S) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + most_s
        left = 1
        while left and loop.time() < end:
            try:
                left = await self._remote.sweep()
            except _FAILURES:
                return
            await asyncio.sleep(pause_s)


class _Journal:
    """Changes that are not written yet. Only those of the same worker have an order."""

    def __init__(self) -> None:
        self.blocks = 0
        self._operations: dict[str, list[tuple[str, list[int]]]] = {}

    def add(self, kind: str, worker: str, hashes: list[int]) -> None:
        self.blocks += len(hashes)
        operations = self._operations.setdefault(worker, [])
        if operations and operations[-1][0] == kind:
            operations[-1][1].extend(hashes)
        else:
            operations.append((kind, list(hashes)))

    def clear(self, worker: str) -> None:
        """What came before is void."""
        self.blocks -= sum(len(hashes) for _, hashes in self._operations.get(worker, ()))
        self._operations[worker] = [("clear", [])]

    def operations(self) -> list[Operation]:
        return [(kind, worker, hashes) for worker, operations in self._operations.items() for kind, hashes in operations]  # type: ignore[misc]
