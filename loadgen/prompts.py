"""Prompt text from block ids: the same id always gives the same text, different ids give different text.

A block of n tokens becomes 4 n bytes of ASCII that looks like code (the simulated worker counts 4 bytes a token): a stamp that
only this block has, then a slice of a fixed pool. Rendering a block takes about a microsecond, so nothing is cached.
"""

from __future__ import annotations

import random
from functools import cache

import xxhash

BYTES_PER_TOKEN = 4
_POOL_BYTES = 1 << 18
_NAMES = (
    "request", "worker", "block", "prefix", "session", "token", "cache", "index", "chunk", "stream", "batch", "queue", "slot", "kernel",
    "tensor", "layer", "weight", "logits", "sampler", "router", "config", "path", "value", "result", "entry", "buffer", "offset", "length",
    "count", "state", "event", "handler", "client", "server", "response", "header", "payload", "timeout", "retry",
)  # fmt: skip
_LINES = (
    "def {a}_{b}({c}, {d}):\n    return {a}.{b}({c}) if {d} else None\n",
    "for {a} in {b}.{c}s[{n}:]:\n    {d}.append({a}.{b})\n",
    "    if {a}.{b} > {n} and not {c}:\n        raise ValueError('{b} of {d} is above {n}')\n",
    "class {a}{b}:\n    {c}: int = {n}\n    {d}: str = '{a}-{n}'\n",
    "{a}_{n} = [{b}({c}={n}), {d}.{a}]\n",
    "    # the {a} keeps its {b} until the {c} has {n} {d}s\n",
    "assert {a}.{b}_{c} == {n}, {d}\n",
    "src/{a}/{b}_{c}.py:{n}: {d}.{a} is used here\n",
)


@cache
def _pool() -> str:
    """Code-like text without quotes or backslashes that JSON would have to escape, the same on every run."""
    rng = random.Random(20260101)
    lines: list[str] = []
    size = 0
    while size < _POOL_BYTES:
        a, b, c, d = rng.choices(_NAMES, k=4)
        line = rng.choice(_LINES).format(a=a, b=b, c=c, d=d, n=rng.randrange(10_000))
        lines.append(line)
        size += len(line)
    return "".join(lines)


def block_text(block: int, tokens: int, seed: int) -> str:
    """The text of block id `block`: exactly 4 x `tokens` ASCII characters, different for every (block, seed); at most 50,000 tokens."""
    digest = xxhash.xxh3_64_intdigest(block.to_bytes(8, "little", signed=True), seed)
    size = tokens * BYTES_PER_TOKEN
    pool = _pool()
    start = digest % (len(pool) - size)
    return f"# {digest:016x}\n{pool[start : start + size]}"[:size]


def seed_of(*parts: object) -> int:
    """A 64-bit seed from anything printable."""
    return xxhash.xxh3_64_intdigest("\0".join(map(str, parts)).encode())
