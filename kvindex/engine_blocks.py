"""What one worker's cache holds, as its engine's KV events report it, in the project's own chain of block hashes.

The engine's hashes are opaque keys: each maps to the hash that the gateway computes for the same prefix (ChainState over token ids
as uint32 little-endian, `block_tokens` a block, seeded by `token_seed`). What else separates an engine's blocks (images, prompt
embeddings) is mixed into the chain, so that the same token ids without it never match.
"""

from __future__ import annotations

import logging
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from kvindex.chain import block_hashes, token_seed
from kvindex.engine_groups import FULL_KINDS, CacheGroup, Rule, rule_for
from kvindex.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash, Event, decode
from kvindex.index import KVIndex

logger = logging.getLogger("warmroute.kv_events")

EXPIRE_BLOCKS = 4096  # blocks after which one `expire` call stops
TOKEN_BYTES = 4
# Storage tiers, fastest first: the holder's suffix, and the media that engines name. Every other medium is the last tier.
SUFFIXES = ("", "@cpu", "@disk")
_GPU, _CPU, _DISK = range(3)
_MEDIA = {"GPU": _GPU, "CPU": _CPU, "CPU_PINNED": _CPU}
_NO_GROUP = -1  # the main group is not known yet; engines number theirs from 0

_encoder = msgspec.msgpack.Encoder(order="deterministic")


class _Partial:
    """An index block that is not full yet: the hash it is chained to and its first tokens (bytes)."""

    __slots__ = ("parent", "tokens")

    def __init__(self, parent: int, tokens: bytes | bytearray = b"") -> None:
        self.parent = parent
        self.tokens = bytearray(tokens)


# Where an engine block ends: the own hash where an index block ends with it, else inside an index block, so many bytes in.
_End = int | tuple[_Partial, int]


class _Tier:
    """The main group's blocks in one storage tier, and the index's holder of this tier and all faster ones."""

    __slots__ = ("copies", "ends", "holder", "leaving")

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.ends: dict[EngineHash, _End] = {}
        self.copies: dict[EngineHash, int] = {}  # of blocks stored more than once: how often beyond the first
        self.leaving: list[int] = []  # own hashes to take out of the index before anything is stored

    def own_hashes(self) -> Iterator[int]:
        return (end for end in self.ends.values() if type(end) is int)


class EngineBlocks:
    """What one worker (one data-parallel rank) holds, as its engine reports it. Owns the holder's entries in the index.

    `holder` has what is on the GPU; `holder@cpu` and `holder@disk` have that and what is in the slower tiers, and exist from the
    first event of such a medium on: see `tiers`. Nothing is kept of a block that the engine has dropped.

    A model of sliding-window layers only is matched from its first block, so hits are missed once the engine drops the beginning.
    """

    def __init__(self, index: KVIndex, holder: str, block_tokens: int) -> None:
        """`block_tokens` is the index block, a multiple of the engine's block."""
        self.holder = holder
        self.block_tokens = block_tokens
        self.mismatch: str | None = None  # why nothing is indexed, where the engine's blocks do not fit the index's
        # Engine blocks stored and removed (each copy), of unknown parent, not understood, and batches that could not be read.
        self.stored = self.removed = self.orphaned = self.ignored = self.malformed = 0
        self._index = index
        self._block_bytes = TOKEN_BYTES * block_tokens
        self._engine_hash: dict[int, EngineHash] = {}  # own hash -> engine's, of blocks held in any tier
        self._expected: dict[int, float] = {}  # own hash -> until when it counts as held without being reported
        self._expiries: list[tuple[float, int, list[int]]] = []  # heap: until, a number of its own, own hashes
        self._expectations = 0
        self._warned_malformed = False
        self._start_over()

    def _start_over(self) -> None:
        self._tiers: list[_Tier | None] = [_Tier(self.holder), None, None]
        self._several_tiers = False
        self._main: int | None = _NO_GROUP
        self._groups: dict[int | None, CacheGroup] = {}  # beside the main one; a window group may be both
        self._unknown_groups: set[int | None] = set()

    @property
    def tiers(self) -> tuple[str, ...]:
        """The holders in the index, each including those before it."""
        return tuple(tier.holder for tier in self._tiers if tier)

    @property
    def blocks(self) -> int:
        """Engine blocks held (those of the main group), each counted once per tier."""
        return sum(len(tier.ends) for tier in self._tiers if tier)

    # ---- events

    def apply(self, payload: bytes) -> None:
        """One batch. One that cannot be read is counted, and logged the first time."""
        try:
            batch = decode(payload)
        except ValueError as error:
            self.malformed += 1
            if not self._warned_malformed:
                self._warned_malformed = True
                logger.warning("%s: %s", self.holder, error)
            return
        if self._main == _NO_GROUP:
            self._choose_main(batch)
        for event in _joined(batch.events):
            if type(event) is BlockStored:
                self._store(event)
            elif type(event) is BlockRemoved:
                self._remove(event)
            elif type(event) is AllBlocksCleared:
                self._clear()
        self._flush()

    def reset(self) -> None:
        """Nothing is known any more (the engine restarted, events were lost): forget what it held and how its cache is made."""
        self._clear()
        self._start_over()
        self.mismatch = None

    def _clear(self) -> None:
        for tier in self._tiers:
            if tier:
                self._index.clear(tier.holder)
                tier.ends.clear()
                tier.copies.clear()
                tier.leaving.clear()
        for group in self._groups.values():
            group.clear()
        self._engine_hash.clear()
        self._expected.clear()
        self._expiries.clear()

    # ---- groups

    def _choose_main(self, batch: Batch) -> None:
        """The chain comes from the full attention group; from a window group only where the model has no other.

        All groups of a step are in one batch, so the first batch tells. Engines without groups send neither kind nor index.
        """
        stored = [event for event in batch.events if type(event) is BlockStored and event.token_ids]
        for event in stored:
            if event.kv_cache_spec_kind is None or event.kv_cache_spec_kind in FULL_KINDS:
                self._main = event.group_idx
                return
        for event in stored:
            if rule_for(event.kv_cache_spec_kind or "", event.kv_cache_spec_sliding_window) == "window":
                self._main = event.group_idx
                self._add_group(event, "window")
                return

    def _add_group(self, event: BlockStored, rule: Rule) -> CacheGroup:
        window = event.kv_cache_spec_sliding_window
        group = CacheGroup(rule, event.block_size or self.block_tokens, self.block_tokens, window, len(SUFFIXES))
        self._groups[event.group_idx] = group
        return group

    def _group_of(self, event: BlockStored) -> CacheGroup | None:
        """The group beside the main one that the event belongs to; learned from its kind when it is new."""
        group = self._groups.get(event.group_idx)
        kind = event.kv_cache_spec_kind
        if group or event.group_idx == self._main or kind is None or event.group_idx in self._unknown_groups:
            return group
        rule = rule_for(kind, event.kv_cache_spec_sliding_window)
        if kind in FULL_KINDS and self._main == _NO_GROUP:
            return None  # the main group itself, though only in an event without tokens so far
        if rule:
            return self._add_group(event, rule)
        self._unknown_groups.add(event.group_idx)
        logger.warning("%s: KV cache groups of kind %r are not known: no prefix hit can be credited to this worker", self.holder, kind)
        return None

    # ---- stored

    def _store(self, event: BlockStored) -> None:
        hashes = event.block_hashes
        rank = _rank(event.medium, event.locality)
        group = self._group_of(event)
        if group:
            group.store(rank, hashes)
        if event.group_idx != self._main:
            if not group:
                self.ignored += len(hashes)
            elif event.kv_cache_spec_kind in FULL_KINDS and self._groups.get(self._main):
                self._promote(event)  # a full attention group after all: the chain is its, not the window group's
            return
        ends: Sequence[_End] | None = self._known_ends(hashes) if rank else None
        if ends is None:
            ends = self._ends(event)
        if ends:
            self.stored += len(ends)
            self._hold(rank, hashes, ends)

    def _promote(self, event: BlockStored) -> None:
        self.reset()
        self._main = event.group_idx
        self._store(event)

    def _known_ends(self, hashes: list[EngineHash]) -> list[_End] | None:
        """Where these blocks end, if all are held already in some tier.

        Offloading repeats blocks that the GPU has, and not always with all that went into their hashes: what is known is better.
        """
        ends = [end for block in hashes if (end := self._end_of(block)) is not None]
        return ends if len(ends) == len(hashes) else None

    def _end_of(self, block: EngineHash) -> _End | None:
        for tier in self._tiers:
            if tier and (end := tier.ends.get(block)) is not None:
                return end
        return None

    def _ends(self, event: BlockStored) -> Sequence[_End] | None:
        """Where the event's blocks end in the own chain; None (and counted) where that cannot be said."""
        hashes, tokens, size = event.block_hashes, event.token_ids, event.block_size
        count = len(hashes)
        if not count:
            return None
        if size < 1 or len(tokens) != count * size:
            ends = self._known_ends(hashes)
            if ends is None:
                self.orphaned += count
            return ends
        if self.block_tokens % size:
            self.ignored += count
            if self.mismatch is None:
                self.mismatch = (
                    f"the index block of {self.block_tokens} tokens is not a multiple of the engine's block of {size}; "
                    "set block_tokens of its model"
                )
                logger.warning("%s: KV events are ignored: %s", self.holder, self.mismatch)
            return None
        keys = _other_keys(event) if event.extra_keys or event.cache_salt else _NO_KEYS
        if event.parent_block_hash is None:
            parent: _End | None = token_seed(_lora(event), keys.salt)
        else:
            parent = self._end_of(event.parent_block_hash)
        try:
            data = struct.pack(f"<{len(tokens)}I", *tokens)
        except struct.error:
            parent = None  # ids that are no tokens: placeholders of some engine
        if parent is None:
            self.orphaned += count
            return None
        if size == self.block_tokens and not keys.by_block and type(parent) is int:
            return block_hashes(data, self._block_bytes, parent)
        return self._ends_by_block(count, data, TOKEN_BYTES * size, parent, keys.by_block)

    def _ends_by_block(self, count: int, data: bytes, size: int, end: _End, keys: dict[int, bytes]) -> list[_End]:
        """The general case: engine blocks smaller than the index's (`size` bytes of tokens each), or with keys of their own."""
        ends: list[_End] = []
        for number in range(count):
            partial, filled = end if isinstance(end, tuple) else (_Partial(end), 0)
            if filled < len(partial.tokens) or number in keys:
                partial = _Partial(partial.parent, partial.tokens[:filled])  # another sequence went on from here
            if number in keys:
                partial.parent = xxh3_64_intdigest(keys[number], partial.parent)
            filled += size
            if filled > self._block_bytes:  # blocks of several sizes that do not line up
                self.orphaned += count - number
                break
            partial.tokens += data[number * size : (number + 1) * size]
            if filled == self._block_bytes:
                (end,) = block_hashes(bytes(partial.tokens), self._block_bytes, partial.parent)
            else:
                end = partial, filled
            ends.append(end)
        return ends

    def _hold(self, rank: int, hashes: list[EngineHash], ends: Sequence[_End]) -> None:
        tier = self._tiers[rank] or self._open_tier(rank)
        if tier.ends.keys().isdisjoint(hashes):
            tier.ends.update(zip(hashes, ends, strict=False))
        else:
            for block, end in zip(hashes, ends, strict=False):
                if block in tier.ends:
                    tier.copies[block] = tier.copies.get(block, 0) + 1
                else:
                    tier.ends[block] = end
        blocks = [end for end in ends if type(end) is int]
        if not blocks:
            return
        if len(blocks) < len(ends):
            hashes = [block for block, end in zip(hashes, ends, strict=False) if type(end) is int]
        self._engine_hash.update(zip(blocks, hashes, strict=True))
        if self._expected and rank == _GPU:
            for own in blocks:
                self._expected.pop(own, None)
        self._flush()
        for slower in self._tiers[rank:]:
            if slower:
                self._index.store(slower.holder, blocks)

    def _open_tier(self, rank: int) -> _Tier:
        """The first event of this tier's media: its holder begins with what the faster tiers have."""
        self._several_tiers = True
        tier = self._tiers[rank] = _Tier(self.holder + SUFFIXES[rank])
        for faster in self._tiers[:rank]:
            if faster:
                self._index.store(tier.holder, faster.own_hashes())
        self._index.store(tier.holder, self._expected)
        return tier

    # ---- removed

    def _remove(self, event: BlockRemoved) -> None:
        hashes = event.block_hashes
        rank = _rank(event.medium, event.locality)
        if self._groups and (group := self._groups.get(event.group_idx)):
            group.remove(rank, hashes)
            if event.group_idx != self._main:
                return
        tier = self._tiers[rank]
        if event.group_idx != self._main or not tier:
            self.ignored += len(hashes)
            return
        ends, copies, engine_hash = tier.ends, tier.copies, self._engine_hash
        for block in hashes:
            if copies and (count := copies.get(block)):
                if count > 1:
                    copies[block] = count - 1
                else:
                    del copies[block]
            elif (end := ends.pop(block, None)) is None:
                self.ignored += 1  # orphaned when it was stored, or stored before this began to listen
                continue
            elif type(end) is int and engine_hash.get(end) == block:  # else a later engine hash stands for the same prefix
                if self._several_tiers:
                    self._leave(rank, block, end)
                else:
                    del engine_hash[end]
                    tier.leaving.append(end)
            self.removed += 1

    def _leave(self, rank: int, block: EngineHash, own: int) -> None:
        """The block is gone from one tier; holders that have it from no other tier either lose it."""
        held = any(tier and block in tier.ends for tier in self._tiers[:rank])
        for tier in self._tiers[rank:]:
            if tier is None:
                continue
            held = held or block in tier.ends
            if held:
                return
            if own not in self._expected:
                tier.leaving.append(own)
        del self._engine_hash[own]

    def _flush(self) -> None:
        """Removals come one by one; the index takes them together."""
        for tier in self._tiers:
            if tier and tier.leaving:
                self._index.remove(tier.holder, tier.leaving)
                tier.leaving.clear()

    # ---- predictions

    def expect(self, hashes: Sequence[int], held: int, until: float) -> None:
        """A request with this chain was sent: what follows its first `held` blocks counts as held on the GPU until then.

        An event that stores a block takes its place. `until` is in seconds.
        """
        gpu = self._tiers[_GPU]
        assert gpu is not None
        engine_hash, on_gpu = self._engine_hash, gpu.ends
        new = [own for own in hashes[held:] if own not in engine_hash or engine_hash[own] not in on_gpu]
        if not new:
            return
        for tier in self._tiers:
            if tier:
                self._index.store(tier.holder, new)
        self._expected.update(dict.fromkeys(new, until))
        self._expectations += 1
        heappush(self._expiries, (until, self._expectations, new))

    def withdraw(self, hashes: Sequence[int]) -> None:
        """What was expected of a request with this chain will not come (it was refused, its client left)."""
        if self._expected:
            self._unexpect([own for own in hashes if own in self._expected])

    def _unexpect(self, blocks: list[int]) -> None:
        for own in blocks:
            del self._expected[own]
        for rank, tier in enumerate(self._tiers):
            if tier:
                self._index.remove(tier.holder, [own for own in blocks if not self._holds(own, rank)])

    def expire(self, now: float) -> None:
        """Take back what was expected until now or earlier and was not reported; stops after EXPIRE_BLOCKS blocks."""
        budget = EXPIRE_BLOCKS
        while budget > 0 and self._expiries and self._expiries[0][0] <= now:
            blocks = self._expiries[0][2]
            due = blocks[-budget:]  # a chain's end first
            del blocks[-budget:]
            budget -= len(due)
            if not blocks:
                heappop(self._expiries)
            self._unexpect([own for own in due if self._expected.get(own, math.inf) <= now])

    def _holds(self, own: int, rank: int) -> bool:
        block = self._engine_hash.get(own)
        return block is not None and any(tier and block in tier.ends for tier in self._tiers[: rank + 1])

    # ---- hybrid models

    def usable(self, hashes: Sequence[int], depth: int, tier: int = 0) -> int:
        """The largest hit of at most `depth` index blocks that all of the model's cache groups allow.

        `depth` is what the index says of the holder `tiers[tier]`. Where there is only full attention it is returned as it is. A group
        of an unknown kind makes it 0: what such a group needs cannot be checked.
        """
        if self._unknown_groups:
            return 0
        if not self._groups:
            return depth
        rank = [rank for rank, present in enumerate(self._tiers) if present][tier]
        while depth:
            allowed = depth
            for group in self._groups.values():
                allowed = group.longest(allowed, self._held_by(group, hashes, rank))
            if allowed == depth:
                break
            depth = allowed  # a shorter hit: all groups must agree to that one
        return depth

    def _held_by(self, group: CacheGroup, hashes: Sequence[int], rank: int) -> Callable[[int], bool]:
        def held(depth: int) -> bool:
            own = hashes[depth - 1]
            if own in self._expected:
                return group.rule != "checkpoint"  # where the engine will leave its checkpoints is not known
            block = self._engine_hash.get(own)
            return block is not None and group.holds(block, rank)

        return held


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """The events, removals in a row as one: engines send one for each block."""
    last: Event | None = None
    for event in events:
        if (
            type(event) is BlockRemoved
            and type(last) is BlockRemoved
            and (event.group_idx, event.medium, event.locality) == (last.group_idx, last.medium, last.locality)
        ):
            last.block_hashes += event.block_hashes
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def _rank(medium: str | None, locality: str | None) -> int:
    """The tier of an event's medium. What another node holds has to be fetched, as from a disk."""
    if locality == "REMOTE":
        return _DISK
    if medium is None or medium == "GPU":
        return _GPU
    return _MEDIA.get(medium.upper(), _DISK)


def _lora(event: BlockStored) -> str:
    """The adapter's name; an engine that only tells a number gets one that no request names."""
    if event.lora_name:
        return event.lora_name
    return f"#{event.lora_id}" if event.lora_id else ""


class _Keys:
    """What went into the hashes of an event's blocks beside tokens and LoRA: the salt, and per block number the rest as bytes."""

    __slots__ = ("by_block", "salt")

    def __init__(self, salt: str = "") -> None:
        self.salt = salt
        self.by_block: dict[int, bytes] = {}


_NO_KEYS = _Keys()


def _other_keys(event: BlockStored) -> _Keys:
    """Read `extra_keys`: LoRA name, (image, offset) pairs, cache salt (first block of a sequence), digests of prompt embeddings.

    vLLM publishes the bare values; as it hashes them each is tagged, ("lora", name, ...) or ("cache_salt", salt). Both are read.
    """
    found = _Keys(event.cache_salt or "")
    for number, block_keys in enumerate(event.extra_keys or ()):
        if not block_keys:
            continue
        rest = list(_without_lora(block_keys, event.lora_name))
        if number == 0 and event.parent_block_hash is None:
            salts = [salt for key in rest if (salt := _salt(key)) is not None]
            if len(salts) == 1:
                found.salt = salts[0]
                rest = [key for key in rest if _salt(key) is None]
        if rest:
            found.by_block[number] = _encoder.encode(rest)
    return found


def _without_lora(keys: Iterable[Any], name: str | None) -> Iterator[Any]:
    for key in keys:
        if isinstance(key, list) and len(key) > 1 and key[0] == "lora" and isinstance(key[1], str):
            continue
        if name and key == name:
            name = None  # once: the salt may be spelled the same
            continue
        yield key


def _salt(key: Any) -> str | None:
    if isinstance(key, str):
        return key
    if isinstance(key, list) and len(key) == 2 and key[0] == "cache_salt" and isinstance(key[1], str):
        return key[1]
    return None
