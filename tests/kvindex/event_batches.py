"""Hand-made KV event batches, and the chain that a gateway would compute for the same tokens."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from kvindex.chain import ChainState, token_seed
from kvindex.events import EngineHash


def own_chain(tokens: Sequence[int], block_tokens: int, lora: str = "", salt: str = "") -> list[int]:
    data = struct.pack(f"<{len(tokens)}I", *tokens)
    return ChainState.start(token_seed(lora, salt), 4 * block_tokens).extend(data).chain().hashes


def stored(
    hashes: Sequence[EngineHash], tokens: Sequence[int], parent: EngineHash | None = None, block_size: int | None = None, **more: Any
) -> dict[str, Any]:
    """As vLLM 0.32 writes it: fields without a value are left out, but for those it always has."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": list(tokens),
        "block_size": block_size or len(tokens) // max(1, len(hashes)), "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    } | more  # fmt: skip


def removed(*hashes: EngineHash, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0} | more


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def batch(*events: Any, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1764500000.5, events, rank])
