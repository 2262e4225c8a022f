"""What KV events cost: blocks ingested a second on one core, and what a long churn of blocks leaves behind.

Ingestion is what a gateway does for one worker: decode the batch, hash its tokens into the own chain, update the index. The batches are
vLLM's map form as its publisher encodes it: a chunk of 2,048 prompt tokens a step, and one event for each removed block. Churn stores
and removes blocks with a bounded working set, as an engine whose cache is full does; the index and the process must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvindex.engine_blocks import EngineBlocks
from kvindex.memory import MemoryIndex

STEP_TOKENS = 2_048
PROMPT_STEPS = 8
GOAL = 200_000

_encoder = msgspec.msgpack.Encoder()


def stored(hashes: list[int], parent: int | None, tokens: list[int], block_size: int) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": block_size,
        "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
    }  # fmt: skip


def removed(block: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}


def batch(*events: dict[str, Any]) -> bytes:
    return _encoder.encode([time.time(), events, 0])


def prompts(rng: random.Random, block_size: int, blocks: int) -> Iterator[tuple[list[int], int | None, list[int]]]:
    """Steps of prompts of 16k tokens: hashes, parent, tokens."""
    parent: int | None = None
    for step in range(blocks * block_size // STEP_TOKENS):
        if step % PROMPT_STEPS == 0:
            parent = None
        hashes = [rng.getrandbits(64) for _ in range(STEP_TOKENS // block_size)]
        yield hashes, parent, rng.choices(range(150_000), k=STEP_TOKENS)
        parent = hashes[-1]


def rate(payloads: list[bytes], feed: EngineBlocks, blocks: int) -> float:
    begin = time.process_time()
    for payload in payloads:
        feed.apply(payload)
    return blocks / (time.process_time() - begin)


def ingestion(rng: random.Random, block_size: int, blocks: int) -> dict[str, Any]:
    """Blocks stored a second into an empty index, and replaced a second in a full one: each stored and an old one removed by its event."""
    steps = list(prompts(rng, block_size, blocks))
    blocks = sum(len(hashes) for hashes, _, _ in steps)
    feed = EngineBlocks(MemoryIndex(), "worker", block_size)
    stores = rate([batch(stored(*step, block_size)) for step in steps], feed, blocks)
    assert feed.blocks == blocks
    old = [hashes for hashes, _, _ in steps]
    fresh = list(prompts(rng, block_size, blocks))
    mixed = [batch(*map(removed, reversed(gone)), stored(*step, block_size)) for gone, step in zip(old, fresh, strict=True)]
    both = rate(mixed, feed, blocks)
    assert feed.blocks == blocks and feed.orphaned == 0
    return {"block_size": block_size, "blocks": blocks, "stored_per_s": round(stores), "replaced_per_s": round(both)}


def resident_mb() -> float:
    """Memory of this process in MB; 0 where /proc is not there."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def churn(rng: random.Random, blocks: int, working_set: int, block_size: int = 16) -> dict[str, Any]:
    """Store `blocks` blocks, each step removing as many as it stores once `working_set` are held; sizes at a tenth and at the end."""
    index = MemoryIndex()
    feed = EngineBlocks(index, "worker", block_size)
    per_step = STEP_TOKENS // block_size
    steps, held = blocks // per_step, deque[list[int]]()
    tokens = [rng.choices(range(150_000), k=STEP_TOKENS) for _ in range(PROMPT_STEPS)]
    early: dict[str, float] = {}
    begin, parent = time.process_time(), None
    for step in range(steps):
        chunk = tokens[step % PROMPT_STEPS]
        if step % PROMPT_STEPS == 0:
            chunk[:4] = step.to_bytes(4, "little")  # every prompt is new
            parent = None
        hashes = [rng.getrandbits(64) for _ in range(per_step)]
        gone = held.popleft() if len(held) * per_step >= working_set else ()
        feed.apply(batch(*map(removed, gone), stored(hashes, parent, chunk, block_size)))
        held.append(hashes)
        parent = hashes[-1]
        if step == steps // 10:
            early = {"entries": len(index), "rss_mb": resident_mb()}
    seconds = time.process_time() - begin
    return {
        "blocks": steps * per_step, "working_set": working_set, "held": feed.blocks, "entries_at_10_percent": early["entries"],
        "entries_at_end": len(index), "rss_mb_at_10_percent": round(early["rss_mb"], 1), "rss_mb_at_end": round(resident_mb(), 1),
        "cpu_s": round(seconds, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200_000, help="blocks of the ingestion rates (default %(default)s)")
    parser.add_argument("--churn-blocks", type=int, default=1_000_000, metavar="N", help="default %(default)s; full: 50000000")
    parser.add_argument("--working-set", type=int, default=50_000, metavar="BLOCKS", help="held during the churn (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args()

    rng = random.Random(options.seed)
    turned = churn(rng, options.churn_blocks, options.working_set)  # first, while the process is small
    ingested = [ingestion(rng, block_size, options.blocks) for block_size in (16, 32)]
    print(f"ingestion on one core, {STEP_TOKENS} tokens a batch; goal {GOAL:,} blocks/s")
    print(" block   stored/s   replaced/s")
    for row in ingested:
        print(f"{row['block_size']:>6} {row['stored_per_s']:>10,} {row['replaced_per_s']:>12,}")
    print(f"churn of {turned['blocks']:,} blocks, {turned['held']:,} held; encoding included {turned['cpu_s']} s of CPU")
    print(f"  index entries {turned['entries_at_10_percent']:>10,} at a tenth {turned['entries_at_end']:>10,} at the end")
    print(f"  RSS, MB       {turned['rss_mb_at_10_percent']:>10,} at a tenth {turned['rss_mb_at_end']:>10,} at the end")
    if options.json:
        options.json.write_text(json.dumps({"ingestion": ingested, "churn": turned}, indent=2) + "\n")


if __name__ == "__main__":
    main()
