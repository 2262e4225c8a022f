"""Canonical prompt bytes -> chain of cumulative block hashes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

BLOCK_BYTES = 512  # about 128 tokens of English or code
RUN_BLOCKS = 8  # mean length of a run, see `block_hashes`
RUN_BITS = (1 << 24) - 1  # what the hashes of a run have in common

_LAST_OF_RUN = 2**64 // RUN_BLOCKS  # hashes below it
_OWN_BITS = 2**64 - 1 - RUN_BITS


@dataclass(slots=True)
class BlockChain:
    """A prompt's identity: one hash per full block, each standing for the whole prefix up to the block's end.

    `hashes` are unsigned 64-bit; the list is shared with the state it came from and is never mutated. `length` is the canonical
    stream's length in bytes, the incomplete last block included.
    """

    hashes: list[int]
    length: int


@dataclass(slots=True)
class ChainState:
    """A checkpoint in a canonical byte stream: everything needed to go on hashing from here.

    Immutable: `extend` returns a new state and leaves the old one valid, so conversations may fork from any checkpoint.
    """

    block_bytes: int
    parent: int = field(repr=False)  # the hash that the next block is chained to: the last block's, or the seed
    hashes: list[int] = field(repr=False)
    pending: bytes = field(repr=False)  # bytes after the last full block, fewer than block_bytes
    length: int  # bytes of the whole stream

    @classmethod
    def start(cls, seed: int, block_bytes: int = BLOCK_BYTES) -> ChainState:
        """The empty stream; `seed` (unsigned 64-bit) carries the identity's other parts, see `identity_seed`."""
        if block_bytes < 1:
            raise ValueError(f"block_bytes must be at least 1, not {block_bytes}")
        return cls(block_bytes, seed, [], b"", 0)

    def extend(self, data: bytes) -> ChainState:
        """The state after `data`; costs the new bytes plus one copy of the list of hashes."""
        stream = self.pending + data if self.pending else data
        size = self.block_bytes
        full = len(stream) - len(stream) % size
        length = self.length + len(data)
        if not full:
            return ChainState(size, self.parent, self.hashes, stream, length)
        new = block_hashes(memoryview(stream)[:full], size, self.parent)
        return ChainState(size, new[-1], self.hashes + new if self.hashes else new, stream[full:], length)

    def chain(self) -> BlockChain:
        """The chain of all full blocks so far."""
        return BlockChain(self.hashes, self.length)


def block_hashes(data: bytes | memoryview, size: int, parent: int) -> list[int]:
    """The hashes of the blocks of `size` bytes that `data` is, which follow the one whose hash is `parent`, or a seed: each is
    xxh3-64 of its block, seeded by the one before.

    The lowest bits are taken over from the one before, but for one in eight, so that a chain falls into runs of neighbours which an
    index can keep, and write, together. Whoever leaves a common prefix is mostly in the run that its last block is in.
    """
    # iter_unpack cuts the blocks in C; slicing in the loop takes a third longer.
    blocks = _block_cutter(size).iter_unpack(data)
    digest = xxh3_64_intdigest
    return [
        parent := digest(block, parent) if parent < _LAST_OF_RUN else digest(block, parent) & _OWN_BITS | parent & RUN_BITS
        for (block,) in blocks
    ]


@lru_cache
def _block_cutter(size: int) -> struct.Struct:
    return struct.Struct(f"{size}s")


_pool_key = 0  # where every chain of this process starts


def use_pool_secret(secret: str) -> None:
    """Key the hashes of all chains made from now on in this process, so that they tell nothing to who does not know the secret.

    An empty one stands for none.
    """
    global _pool_key
    digest = blake2b(secret.encode(), digest_size=8, person=b"warmroute-chain").digest()
    _pool_key = int.from_bytes(digest, "little") if secret else 0
    identity_seed.cache_clear()


@lru_cache(maxsize=4096)
def identity_seed(model: str, *parts: str) -> int:
    """Seed for the chains of one identity: model and, in a fixed order, whatever else separates caches (LoRA, tenant salt).

    Each part is prefixed by its length, so that ("a", "bc") and ("ab", "c") differ.
    """
    seed = _pool_key
    for part in (model, *parts):
        text = part.encode("utf-8", "surrogatepass")
        seed = xxh3_64_intdigest(len(text).to_bytes(8, "little") + text, seed)
    return seed % _LAST_OF_RUN  # else most first blocks of an identity would be in one run


def short(text: str) -> str:
    """The text, or a digest where it is long: seeds are cached with what they are made of, and clients send that."""
    return text if len(text) <= 256 else f"{xxh3_64_intdigest(text.encode('utf-8', 'surrogatepass')):x}"


def token_seed(lora: str = "", salt: str = "") -> int:
    """Seed for chains over token ids (token mode, engines' KV events): what separates caches within one base model."""
    return identity_seed("tokens", lora, short(salt))
