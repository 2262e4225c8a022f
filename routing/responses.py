"""Which worker answered which response, for requests that continue one by `previous_response_id`."""

from __future__ import annotations

from collections import OrderedDict


class Responses:
    """Response id -> worker id; the last `most`, each for `ttl_s` seconds. The clock is handed in."""

    def __init__(self, ttl_s: float = 3600.0, most: int = 100_000):
        self.ttl_s = ttl_s
        self.most = most
        self._placed: OrderedDict[str, tuple[str, float]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._placed)

    def placed(self, response_id: str, worker: str, now: float) -> None:
        """This worker has the response."""
        placed = self._placed
        placed.pop(response_id, None)
        placed[response_id] = worker, now
        while len(placed) > self.most or next(iter(placed.values()))[1] <= now - self.ttl_s:
            placed.popitem(last=False)

    def worker_of(self, response_id: str, now: float) -> str | None:
        """The worker that has the response, as far as this gateway knows."""
        worker, since = self._placed.get(response_id, (None, 0.0))
        return worker if now - since < self.ttl_s else None
