"""KV events as engines publish them: one msgpack batch per scheduler step.

vLLM writes [ts, [event, ...], data-parallel rank] with each event a map that has a "type"; before 0.20 or so an event was an array
[type, field, ...]. SGLang does the same with a few fields of its own. Both forms are read, and a batch that is a map. Unknown
event types and fields are skipped, so that a newer engine costs what it adds, not all it says.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec

logger = logging.getLogger("warmroute.kv_events")

# An engine's own hash of a block and its whole prefix: 64 bits, signed (SGLang) or not (vLLM), or a raw digest. Only ever compared.
EngineHash = int | bytes


class BlockStored(msgspec.Struct, tag="BlockStored", tag_field="type", gc=False):
    """Consecutive blocks of one sequence are in the cache.

    `token_ids` are those of all blocks in a row, `block_size` tokens each. Groups that keep only part of a sequence list fewer
    hashes than that; offloading may report hashes without any tokens.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None  # None: the first block is the first of its sequence
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None  # per block, what else went into its hash
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    cache_salt: str | None = None  # SGLang; vLLM has it in extra_keys


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type", gc=False):
    """One copy of each of these blocks left the cache."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", gc=False):
    """The cache is empty. vLLM says so only with the next request's batch."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float  # the engine's clock, seconds since the epoch
    events: list[Event]
    rank: int | None = None  # data-parallel rank


_decoder = msgspec.msgpack.Decoder(Batch)
_any_decoder = msgspec.msgpack.Decoder()

_TYPES: dict[str, type[Event]] = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
# The array form's fields by position; the engines only ever appended.
_ARRAY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
        "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip
_RANK_FIELDS = ("data_parallel_rank", "attn_dp_rank", "rank")
_unknown_types: set[str] = set()


def decode(payload: bytes) -> Batch:
    """One batch. Raises ValueError for anything that is not one."""
    try:
        return _decoder.decode(payload)  # the map form of today's engines, in one pass
    except msgspec.DecodeError:
        pass
    try:
        return _decode_other_forms(_any_decoder.decode(payload))
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError, LookupError) as error:
        raise ValueError(f"not a batch of KV events: {error}") from None


def _decode_other_forms(batch: Any) -> Batch:
    if isinstance(batch, dict):
        ts, events = batch["ts"], batch["events"]
        rank = next((batch[name] for name in _RANK_FIELDS if batch.get(name) is not None), None)
    else:
        ts, events = batch[0], batch[1]
        rank = batch[2] if len(batch) > 2 else None
    decoded = [event for event in map(_decode_event, events) if event is not None]
    return Batch(msgspec.convert(ts, float), decoded, msgspec.convert(rank, int | None))


def _decode_event(event: Any) -> Event | None:
    """None for an event of a type that is not known here."""
    kind = event["type"] if isinstance(event, dict) else event[0]
    if not isinstance(kind, str):
        raise TypeError(f"an event's type is a string, not {type(kind).__name__}")
    if kind not in _TYPES:
        if kind not in _unknown_types:
            _unknown_types.add(kind)
            logger.warning("KV events of type %r are not known and ignored", kind)
        return None
    fields = event if isinstance(event, dict) else dict(zip(_ARRAY_FIELDS[kind], event[1:], strict=False))
    return msgspec.convert(fields, _TYPES[kind])
