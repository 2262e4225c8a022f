"""What the index costs: match latency by chain length and holders, store rate, bytes a block; and what feeds it.

Every match is timed next to a plain dictionary walk of the same chain, in the same loop, so that noise hits both. "cold" is the
first match of a chain after other work on a full index, as a gateway sees it; "match" repeats it at once, caches warm.

With `--backend redis` the memory index, the Redis index and one that costs a command a block stand beside each other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvindex.chain import ChainState, identity_seed
from kvindex.memory import MemoryIndex
from kvindex.routing_memory import RoutingMemory

LENGTHS = (100, 1_000, 6_250, 15_000)
SYSTEM_BLOCKS = 32
TURN_BLOCKS = 8
CHAINS = 8
BACKGROUND_CHAIN = 6_250


class Timings:
    """Durations of one operation, reported in microseconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def time(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        result = operation(*arguments)
        self.seconds.append(time.perf_counter() - begin)
        return result

    def median_us(self) -> float:
        return round(statistics.median(self.seconds) * 1e6, 2)

    def p99_us(self) -> float:
        return round(sorted(self.seconds)[int(len(self.seconds) * 0.99)] * 1e6, 2)


def random_chain(rng: random.Random, length: int) -> list[int]:
    """Block hashes of a prompt that has nothing in common with any other."""
    return ChainState.start(identity_seed("benchmark"), 8).extend(rng.randbytes(8 * length)).hashes


def walk(table: dict[int, int], hashes: Sequence[int]) -> dict[int, int]:
    """The plain way: block by block, every worker falls out where its holdings end. Returns worker bit -> depth."""
    depths: dict[int, int] = {}
    alive = table.get(hashes[0], 0)
    for depth, block in enumerate(hashes):
        held = table.get(block, 0) & alive
        lost = alive ^ held
        while lost:
            bit = lost & -lost
            depths[bit] = depth
            lost ^= bit
        alive = held
        if not alive:
            break
    while alive:
        bit = alive & -alive
        depths[bit] = len(hashes)
        alive ^= bit
    return depths


def match_rows(rng: random.Random, background_blocks: int, rounds: int) -> list[dict[str, Any]]:
    """Two patterns of holders. "random": one holds the chain whole, the others random parts: as many depths as holders, the worst
    case. "agent": one holds all but the last turn, the others only the shared system prompt, as with sessions that stay put."""
    index, table = MemoryIndex(), {}
    background = [random_chain(rng, BACKGROUND_CHAIN) for _ in range(max(1, background_blocks // BACKGROUND_CHAIN))]
    for number, chain in enumerate(background):
        index.store(f"worker-{number % 8}", chain)
        table.update(dict.fromkeys(chain, 1 << number % 8))
    rows = []
    for length in LENGTHS:
        for pattern, holders in [("random", 1), ("random", 8), ("random", 64), ("agent", 8), ("agent", 64)]:
            chains = [random_chain(rng, length) for _ in range(CHAINS)]
            for chain in chains:
                for holder in range(holders):
                    if pattern == "random":
                        part = chain if holder == 0 else chain[: rng.randint(1, length)]
                    else:
                        part = chain[:-TURN_BLOCKS] if holder == 0 else chain[:SYSTEM_BLOCKS]
                    index.store(f"worker-{holder}", part)
                    for block in part:
                        table[block] = table.get(block, 0) | 1 << holder
            cold, warm, plain = Timings(), Timings(), Timings()
            for number in range(rounds):
                walk(table, background[number % len(background)])
                index.match(background[number % len(background)])
                hashes = chains[number % CHAINS].copy()  # as a chain that was just extended: its own list is in the cache
                found = cold.time(index.match, hashes)
                for _ in range(3):
                    warm.time(index.match, hashes)
                walked = plain.time(walk, table, hashes)
                assert sorted(found.values()) == sorted(walked.values())
            rows.append({
                "blocks": length, "holders": holders, "pattern": pattern, "match_p50_us": warm.median_us(), "match_p99_us": warm.p99_us(),
                "cold_p50_us": cold.median_us(), "cold_p99_us": cold.p99_us(), "walk_p50_us": plain.median_us(),
            })  # fmt: skip
    return rows


def store_rate(rng: random.Random, blocks: int, call: int = 64) -> float:
    """Blocks per second into a growing index, `call` new blocks a call, 8 workers in turn."""
    pieces = [random_chain(rng, call) for _ in range(blocks // call)]
    index = MemoryIndex()
    begin = time.perf_counter()
    for number, piece in enumerate(pieces):
        index.store(f"worker-{number % 8}", piece)
    return len(index) / (time.perf_counter() - begin)


def bytes_per_block(rng: random.Random, blocks: int) -> float:
    """Memory of an index of that many blocks, its hashes included; every fourth block has a second holder."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = MemoryIndex()
        for number in range(blocks // 1_000):
            chain = random_chain(rng, 1_000)
            index.store(f"worker-{number % 64}", chain)
            index.store(f"worker-{(number + 1) % 64}", chain[:250])
        del chain
        return (tracemalloc.get_traced_memory()[0] - before) / len(index)
    finally:
        tracemalloc.stop()


def feeding(rng: random.Random, rounds: int) -> dict[str, float]:
    """Median microseconds of what happens around the index: hashing a prompt, and recording where it went."""
    whole, turn, record = Timings(), Timings(), Timings()
    prompt, new = rng.randbytes(130_000), rng.randbytes(1_024)
    history = ChainState.start(1).extend(rng.randbytes(512 * 6_000))
    for _ in range(rounds):
        whole.time(ChainState.start(1).extend, prompt)
        turn.time(history.extend, new)
    memory = RoutingMemory(MemoryIndex())
    memory.set_capacity("worker", 100_000)
    chain = random_chain(rng, 6_000)
    for number in range(rounds):
        memory.record("worker", "session", chain, float(number))
        chain = chain + random_chain(rng, 8)
        record.time(memory.record, "worker", "session", chain, float(number))
    return {
        "hash_130_kb_us": whole.median_us(), "hash_1_kb_after_6000_blocks_us": turn.median_us(),
        "record_8_blocks_after_6000_us": record.median_us(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["memory", "redis"], default="memory", help="default %(default)s")
    parser.add_argument(
        "--background", type=int, default=500_000, metavar="BLOCKS", help="other blocks in the memory index (default %(default)s)"
    )
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks for the store rate and the memory (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=200, help="rounds of each measurement (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    options = parser.parse_args()

    if options.backend == "redis":
        from index_redis import compare, table  # it needs redis-server and the extra "redis"

        result = compare(options.blocks, options.rounds, options.seed)
        print(table(result))
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
        return

    rng = random.Random(options.seed)
    rows = match_rows(rng, options.background, options.rounds)
    result = {
        "backend": "memory", "background_blocks": options.background, "match": rows, "stores_per_s": round(store_rate(rng, options.blocks)),
        "bytes_per_block": round(bytes_per_block(rng, options.blocks), 1), **feeding(rng, options.rounds),
    }  # fmt: skip
    print(f"memory index, {options.background:,} other blocks; microseconds")
    print(" blocks  holders  pattern  match p50      p99  cold p50      p99  walk p50  walk/match")
    for row in rows:
        match, match_p99 = row["match_p50_us"], row["match_p99_us"]
        cold, cold_p99, plain = row["cold_p50_us"], row["cold_p99_us"], row["walk_p50_us"]
        print(
            f"{row['blocks']:>7,} {row['holders']:>8} {row['pattern']:>8} {match:>10.1f} {match_p99:>8.1f} {cold:>9.1f} {cold_p99:>8.1f} "
            f"{plain:>9.1f} {plain / match:>11.0f}"
        )
    print(f"stores {result['stores_per_s'] / 1e6:.2f} M blocks/s, {result['bytes_per_block']} bytes a block ({options.blocks:,} blocks)")
    print(f"hash a 130 KB prompt {result['hash_130_kb_us']} us; 1 KB more after 6,000 blocks {result['hash_1_kb_after_6000_blocks_us']} us")
    print(f"record 8 new blocks of a session of 6,000: {result['record_8_blocks_after_6000_us']} us")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
