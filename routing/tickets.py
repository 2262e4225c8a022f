"""Tickets: the order in which all gateways of a fleet place new sessions.

A gateway hears of another's placements a few milliseconds late, and gateways that see the same fleet fill the same gap. So a new
session draws the next number of one counter of the fleet together with its match. The numbers before it that this gateway has
neither drawn nor heard of are sessions that others are placing now: each is assumed to go where this gateway would send it. One
rule on nearly the same state then adds up to what one gateway alone would have done. What was assumed counts until the other
gateway has told of it, or until it is too old to be true: a message was lost, or the ticket's request was never placed.
"""

from __future__ import annotations

from dataclasses import dataclass

from routing.fleet import Reservation, Share, Worker

HEARD_WITHIN_S = 0.1  # what a gateway does the others hear of sooner, as long as all is well
MOST_ASSUMED = 64  # for one ticket


@dataclass(slots=True)
class _Placing:
    """A new session of the last moments and where it goes."""

    since: float  # placed, assumed or heard of, seconds
    worker: Worker
    root: int  # its prompt's first block
    load: Reservation | Share | None  # this gateway's own, or assumed; None: what another gateway has told of
    held: float = 0.0  # tokens of it that are not counted in `load`, since the worker holds them


class Tickets:
    """What one gateway knows of the tickets. Times are seconds of the clock handed in."""

    def __init__(self) -> None:
        self.placed: list[tuple[int, str, int]] = []  # this gateway's, to be told: ticket, worker, root
        self._last = 0  # what is up to here was looked at, or will never be heard of
        self._recent: dict[int, _Placing] = {}  # by ticket, in order of time

    @property
    def crowded(self) -> bool:
        """New sessions have been placed in the last moments."""
        return bool(self._recent)

    def unheard(self, ticket: int, now: float) -> list[int]:
        """Tickets before this one, which this gateway has drawn, that others must have drawn and nothing is known of yet."""
        self.expire(now)
        if self._withdraw(ticket, now):  # one that was drawn later was placed first
            return []
        first = max(self._last + 1, ticket - MOST_ASSUMED)
        self._last = ticket  # also where it is lower: the counter has begun anew
        return [number for number in range(first, ticket) if number not in self._recent]

    def place(self, ticket: int, root: int, reservation: Reservation, held: float, now: float) -> None:
        """This gateway has placed its new session."""
        self._recent[ticket] = _Placing(now, reservation.worker, root, reservation, held)
        self.placed.append((ticket, reservation.worker.id, root))

    def assume(self, ticket: int, root: int, worker: Worker, share: Share, held: float, now: float) -> None:
        """Another gateway's new session probably goes to this worker, with this share of its load."""
        self._recent[ticket] = _Placing(now, worker, root, share, held)
        worker.hear(f"ticket {ticket}", share, now)

    def told(self, ticket: int, root: int, worker: Worker, now: float) -> None:
        """Another gateway has placed a new session, and told of it as part of its own load."""
        self._withdraw(ticket, now)
        self._recent[ticket] = _Placing(now, worker, root, None)

    def begin_alike(self, root: int, common: float, prompt_tokens: float, now: float) -> set[Worker]:
        """New sessions with this root turn out to have so many tokens in common. Returns the workers to which such have just gone.

        Gateways that were each the first to send one to a worker have each counted it whole there. Only the one with the first
        ticket has to compute what they have in common, and it takes room in the cache once.
        """
        sent_to: set[Worker] = set()
        for ticket in sorted(ticket for ticket, placing in self._recent.items() if placing.root == root):
            placing = self._recent[ticket]
            worker, load = placing.worker, placing.load
            if worker in sent_to and load is not None and placing.held < common:
                lacking = prompt_tokens - placing.held
                spared = worker.prefill_s(lacking, prompt_tokens) - worker.prefill_s(prompt_tokens - common, prompt_tokens)
                if isinstance(load, Reservation):
                    load.shorten(spared)
                    if load.claimant is not None:
                        load.claimant.begins_as_others(common)
                else:
                    load.wait_s = max(load.wait_s - spared, 0.0)
                    load.working_set = max(load.working_set - (common - placing.held), 0.0)
                    worker.hear(f"ticket {ticket}", load, now)
                placing.held = common
            sent_to.add(worker)
        return sent_to

    def expire(self, now: float) -> None:
        """Forget what is older than a few messages."""
        while self._recent:
            ticket, placing = next(iter(self._recent.items()))
            if placing.since > now - HEARD_WITHIN_S:
                return
            self._withdraw(ticket, now)
            self._last = max(self._last, ticket)

    def _withdraw(self, ticket: int, now: float) -> bool:
        placing = self._recent.pop(ticket, None)
        if placing is not None and isinstance(placing.load, Share):
            placing.worker.hear(f"ticket {ticket}", None, now)
        return placing is not None
