"""What the gateways of one fleet tell each other: the work that each has assigned, and the sessions that each counts.

Every message has absolute numbers, so one that is lost or comes twice does no harm; a gateway that has not been heard of for a
lease's time is gone with all its load. How messages travel is the caller's affair.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from routing.fleet import MOST_AMOUNT, MOST_COUNT, Share
from routing.router import Router

logger = logging.getLogger("warmroute.others")

_NO_RATES = (0.0, 0.0, 0.0, 0.0)
_MOST_INT = 2**64 - 1  # tickets are counted up for ever, roots are block hashes


@dataclass(slots=True)
class _Gateway:
    """Another gateway: when it was heard, and what it said last."""

    heard_at: float
    seq: int = -1
    rates: tuple[float, float, float, float] = _NO_RATES
    sessions: int = 0
    workers: set[str] = field(default_factory=set)  # of which it has a share


class Others:
    """The other gateways of a router's fleet, and what this one has to tell them. Times are seconds of the clock handed in."""

    def __init__(self, router: Router, gateway_id: str, lease_s: float = 3.0):
        self.router = router
        self.gateway_id = gateway_id
        self.lease_s = lease_s
        self.malformed = 0
        self._gateways: dict[str, _Gateway] = {}
        self._seq = 0
        self._told: deque[tuple[float, bytes, int]] = deque()  # claims of the last lease's time, with when they were made
        router.gateway_id = router.sessions.gateway = gateway_id

    def __len__(self) -> int:
        return len(self._gateways)

    @property
    def names(self) -> Collection[str]:
        """The other gateways that live."""
        return self._gateways.keys()

    # --- what this gateway says ---

    def message(self, now: float, full: bool) -> dict[str, Any] | None:
        """This gateway's own numbers, ready for JSON; None when nothing has changed since the last message.

        `workers` has those that changed: [wait_s, prefilling, decoding, active_tokens, live_sessions, working_set_tokens,
        computed_tokens, kv_tokens]. In a full message a worker that is left out has none of all. `rates` are arrivals and seconds of
        prefill work per second, then the same of later turns. `taken` claims sessions: [id in hex, turns]. `placed` are new sessions
        since the last message: [ticket, worker, root, tokens of it that count as held there]; `seen` what workers have shown of their
        speed, as of prefill and decode: see `calibration`.
        """
        router, sessions = self.router, self.router.sessions
        touched, claims = router.touched, sessions.new_claims
        if not (full or touched or claims):
            return None
        taken = list(claims)
        claims.clear()
        new = len(taken)
        if full:  # once more what still holds: a claim that was lost would be missed until the session's next turn
            while self._told and self._told[0][0] < now - self.lease_s:
                self._told.popleft()
            taken += [(session_id, turns) for _, session_id, turns in self._told if sessions.claims(session_id, turns)]
        self._told += [(now, session_id, turns) for session_id, turns in taken[:new]]
        if full:
            workers = {worker.id: share for worker in router.workers.values() if any(share := worker.share(now))}
        else:
            workers = {worker.id: worker.share(now) for worker in touched}
        seen = {worker.id: told for worker in touched if any(told := worker.tell_observed())}
        touched.clear()
        placed = list(router.tickets.placed)
        router.tickets.placed.clear()
        self._seq += 1
        return {
            "gateway": self.gateway_id, "seq": self._seq, "full": full, "workers": workers,
            "rates": [round(rate, 4) for rate in router.congestion.own(now)], "sessions": sessions.counted,
            "taken": [[session_id.hex(), turns] for session_id, turns in taken], "placed": placed, "seen": seen,
        }  # fmt: skip

    def gone(self) -> dict[str, Any]:
        """The message of a gateway that stops."""
        return {"gateway": self.gateway_id, "bye": True}

    # --- what the others say ---

    def heard(self, message: Any, now: float) -> None:
        """Take over another gateway's message. What is malformed, old or its own is ignored."""
        try:
            self._apply(message, now)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.malformed += 1
            if self.malformed == 1:
                logger.warning("a message of another gateway cannot be read and is ignored, as all such: %s", error)

    def expire(self, now: float) -> None:
        """Forget gateways that have been silent for a lease's time: to be called about twice a second."""
        self.router.tickets.expire(now)
        for name in [name for name, gateway in self._gateways.items() if gateway.heard_at < now - self.lease_s]:
            logger.warning("gateway %s has not been heard of for %g s: its load counts no more", name, self.lease_s)
            self._forget(name, now)

    def _apply(self, message: Any, now: float) -> None:
        name = message["gateway"]
        if type(name) is not str or not name:
            raise ValueError("'gateway' is not a name")
        if name == self.gateway_id:
            return
        if message.get("bye") is True:
            self._forget(name, now)
            return
        # all of it is read before any of it counts
        seq, full, sessions = message["seq"], message["full"], message["sessions"]
        if type(seq) is not int or type(full) is not bool or type(sessions) is not int or not 0 <= sessions <= MOST_COUNT:
            raise ValueError("'seq', 'full' or 'sessions' is of another kind")
        rates = _rates(message["rates"])
        shares = {worker: Share.read(numbers) for worker, numbers in message["workers"].items()}
        taken = [(bytes.fromhex(session_id), _count(turns)) for session_id, turns in message["taken"]]
        seen = {worker: (_logs(prefill), _logs(decode)) for worker, (prefill, decode) in message["seen"].items()}
        placed = [
            (_count(ticket, _MOST_INT), str(worker), _count(root, _MOST_INT), _count(held))
            for ticket, worker, root, held in message["placed"]
        ]

        gateway = self._gateways.get(name)
        if gateway is None:
            gateway = self._gateways[name] = _Gateway(now)
        elif seq <= gateway.seq:
            return
        gateway.heard_at, gateway.seq = now, seq
        known = self.router.workers
        if full:
            for worker_id in gateway.workers - shares.keys():
                if worker_id in known:
                    known[worker_id].hear(name, None, now)
            gateway.workers.clear()
        for worker_id, share in shares.items():
            if (worker := known.get(worker_id)) is not None:
                before = worker.others.get(name)
                worker.hear(name, share, now)
                if before is not None and share.computed > before.computed:
                    self.router.others_computed(worker, share.computed - before.computed, now)
                gateway.workers.add(worker_id)
        for worker_id, (prefill, decode) in seen.items():
            if (worker := known.get(worker_id)) is not None:
                worker.learn(prefill, decode)
        for ticket, worker_id, root, held in placed:
            if (worker := known.get(worker_id)) is not None:
                self.router.tickets.told(ticket, root, worker, held, now)
        self.router.tickets.settle(now)
        gateway.rates, gateway.sessions = rates, sessions
        for session_id, turns in taken:
            self.router.sessions.claimed(session_id, turns, name)
        self._add_up()

    def _forget(self, name: str, now: float) -> None:
        gateway = self._gateways.pop(name, None)
        if gateway is None:
            return
        for worker_id in gateway.workers:
            if (worker := self.router.workers.get(worker_id)) is not None:
                worker.hear(name, None, now)
        self._add_up()

    def _add_up(self) -> None:
        gateways = self._gateways.values()
        self.router.sessions.others_live = sum([gateway.sessions for gateway in gateways])
        arrivals, work, later_arrivals, later_work = map(sum, zip(_NO_RATES, *[gateway.rates for gateway in gateways], strict=True))
        self.router.congestion.hear((arrivals, work, later_arrivals, later_work))


def _rates(numbers: Any) -> tuple[float, float, float, float]:
    if not isinstance(numbers, list) or not all(type(n) in (int, float) and 0 <= n <= MOST_AMOUNT for n in numbers):
        raise ValueError("'rates' are not numbers, or too great")
    arrivals, work, later_arrivals, later_work = numbers
    return arrivals, work, later_arrivals, later_work


def _logs(numbers: Any) -> list[float]:
    if not isinstance(numbers, list) or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
        raise ValueError("'seen' are not numbers")
    return numbers


def _count(number: Any, most: int = MOST_COUNT) -> int:
    if type(number) is not int or not 0 <= number <= most:
        raise ValueError("turns, a ticket or a root is not a number, or too great")
    return number
