"""What a worker's engine reports to another gateway, as the shared index tells of it.

One gateway follows each engine's KV events and writes what they say under the holders `kv:<worker>` and `kv:<worker>@<tier>`. Every
other gateway learns these depths with each match of the shared index, takes them for exact as well, and judges them by the cached
tokens that the engine reports, so that it falls back on its routing memory when they keep being wrong. When the shared index cannot be
asked, routing memory is used at once.

What this gateway has sent counts as held until the other one has had the time to hear of it: see `expect`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from kvindex.engine_blocks import SUFFIXES


class EventsElsewhere:
    """`CacheEvents` of a worker that another gateway follows. It has no entries in this gateway's index.

    The rules of hybrid models are not known here (they need the engine's events themselves): of such a model too much may be
    predicted, which costs it its trust. What other gateways have just sent is known only once the engine has told of it.
    """

    def __init__(self, worker_id: str) -> None:
        self.tiers = tuple(f"kv:{worker_id}{suffix}" for suffix in SUFFIXES)
        self._expected: OrderedDict[int, float] = OrderedDict()  # block -> until when it counts as held; about in order of time

    def usable(self, hashes: Sequence[int], depth: int) -> int:
        """Leading blocks held: the engine's by the shared index, and those that follow and were just sent."""
        expected = self._expected
        if not expected or depth == len(hashes) or hashes[depth] not in expected:
            return depth
        if hashes[-1] in expected:
            return len(hashes)
        return bisect_left(hashes, True, depth, key=lambda block: block not in expected)

    def expect(self, hashes: Sequence[int], held: int, until: float) -> None:
        """A request with this chain was sent: what follows its first `held` blocks counts as held until then (seconds)."""
        for block in hashes[held:]:
            self._expected[block] = until

    def withdraw(self, hashes: Sequence[int]) -> None:
        """What was expected of a request with this chain will not come."""
        for block in hashes if self._expected else ():
            self._expected.pop(block, None)

    def expire(self, now: float) -> None:
        """Take back what was expected until now."""
        expected = self._expected
        while expected and next(iter(expected.values())) <= now:
            expected.popitem(last=False)
