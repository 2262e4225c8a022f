"""Tickets: the order in which all gateways of a fleet place new sessions.

A gateway hears of another's placements a few milliseconds late, and gateways that see the same fleet fill the same gap. So a new
session draws the next number of one counter of the fleet together with its match. The numbers before it that this gateway has
neither drawn nor heard of are sessions that others are placing now: each is assumed to go where this gateway would send it. One
rule on nearly the same state then adds up to what one gateway alone would have done. What was assumed counts until the other
gateway has told of it, or until it is too old to be true: a message was lost, or the ticket's request was never placed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from routing.fleet import Reservation, Share, Worker

HEARD_WITHIN_S = 0.1  # what a gateway does the others hear of sooner, as long as all is well
MOST_ASSUMED = 64  # for one ticket
LONGEST_CROWD_S = 0.25  # after that what else has come counts more than who was first


@dataclass(slots=True)
class _Placing:
    """A new session of the last moments and where it goes."""

    since: float  # placed, assumed or heard of, seconds
    worker: Worker
    root: int  # its prompt's first block
    load: Reservation | Share | None  # this gateway's own, or assumed; None: part of what another gateway tells of its load
    held: float = 0.0  # tokens of it that are not counted in that load, since the worker holds them, or will by those before


@dataclass(slots=True)
class _Alike:
    """New sessions with one root."""

    since: float  # this gateway's first
    held: dict[str, float]  # worker id -> tokens that it held then
    waits: dict[Worker, float]  # seconds then
    common: float = 0.0  # tokens that they begin with
    own: Counter[Worker] = field(default_factory=Counter)  # this gateway's, by where it sent them
    gone: Counter[Worker] = field(default_factory=Counter)  # those that are forgotten, by where they were sent

    def held_before(self, worker: Worker) -> float:
        """Tokens of what they begin with that this worker held before the first was sent."""
        return min(self.common, self.held.get(worker.id, 0.0))


class Tickets:
    """What one gateway knows of the tickets. Times are seconds of the clock handed in."""

    def __init__(self) -> None:
        self.placed: list[tuple[int, str, int, int]] = []  # this gateway's, to be told: ticket, worker, root, tokens held
        self._last = 0  # what is up to here was looked at, or will never be heard of
        self._recent: dict[int, _Placing] = {}  # by ticket, in order of time
        self._roots: Counter[int] = Counter()  # of the recent ones
        self._alike: dict[int, _Alike] = {}  # by root, while there are recent ones
        self._unsettled: set[int] = set()  # roots of which something was told

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
        """This gateway has placed its new session where so much of it is held, or will be by those that were sent before."""
        self._enter(ticket, _Placing(now, reservation.worker, root, reservation, held))
        self.placed.append((ticket, reservation.worker.id, root, round(held)))
        if (alike := self._alike.get(root)) is not None:
            alike.own[reservation.worker] += 1

    def assume(self, ticket: int, root: int, worker: Worker, share: Share, held: float, now: float) -> None:
        """Another gateway's new session probably goes to this worker, with this share of its load."""
        self._enter(ticket, _Placing(now, worker, root, share, held))
        worker.hear(f"ticket {ticket}", share, now)

    def told(self, ticket: int, root: int, worker: Worker, held: float, now: float) -> None:
        """Another gateway has placed a new session, and told of it as part of its own load; so much it does not count there."""
        self._roots[root] += 1  # before, so that what is known of its like stays
        self._withdraw(ticket, now)
        self._recent[ticket] = _Placing(now, worker, root, None, held)
        if root in self._alike:
            self._unsettled.add(root)

    def settle(self, now: float) -> None:
        """All that one message had to tell was told."""
        for root in self._unsettled & self._alike.keys():
            self._share_out(root, now)
        self._unsettled.clear()

    def begin_alike(
        self, root: int, common: float, cached: Mapping[str, float], candidates: Iterable[Worker], total: float, now: float
    ) -> set[Worker]:
        """New sessions with this root turn out to have so many tokens in common, and `cached` is what is said to be held of the next
        (worker id -> tokens). Returns the workers to which such have just gone.

        Gateways that were each the first to send one to a worker have each counted it whole there, and one that thought another
        was before it has not. Only the one with the first ticket has to compute what they have in common, and it takes room in the
        cache once.
        """
        alike = self._alike.get(root)
        if alike is None:
            alike = self._alike[root] = self._before(root, common, cached, candidates, total, now)
        elif unknown := [worker for worker in candidates if worker.id not in alike.held]:  # no candidates of the first one
            sent = self._sent(root) + alike.gone
            alike.held.update({worker.id: cached.get(worker.id, 0.0) for worker in unknown if worker not in sent})
        alike.common = common
        sent_to = self._share_out(root, now)
        # those of long ago may have lost it again, and may not have begun like this one: what the index says is newer
        return sent_to if alike.since >= now - LONGEST_CROWD_S else set(self._sent(root))

    def _before(
        self, root: int, common: float, cached: Mapping[str, float], candidates: Iterable[Worker], total: float, now: float
    ) -> _Alike:
        """How the workers were before what other gateways have told of sessions with this root."""
        waits = {worker: worker.wait_s(now) for worker in candidates}
        told = [placing for placing in self._recent.values() if placing.root == root and placing.worker in waits]
        sent_to = {placing.worker for placing in told}
        held = {worker.id: cached.get(worker.id, 0.0) for worker in candidates if worker not in sent_to}
        # one of those that were sent to may seem to hold what all begin with only because of them
        least = min([common, *held.values(), *(placing.held for placing in told)])
        for placing in told:
            worker = placing.worker
            held[worker.id] = least
            waits[worker] = max(waits[worker] - worker.prefill_s(max(total - placing.held, 0.0), total), 0.0)
        return _Alike(now, held, waits)

    def waits(self, root: int, total: float, now: float) -> dict[Worker, float] | None:
        """Seconds that each worker is busy with what was there before the new sessions of this root, and with these, which are taken
        to be of `total` tokens each. None where the first of them is too long ago: what else has come since is not in it.

        Each counts as one here, whoever has sent it. What the gateways tell of their waits disagrees for the first moments, since
        which of these sessions has to compute what all begin with is settled only when all have heard of all.
        """
        alike = self._alike[root]
        if alike.since < now - LONGEST_CROWD_S:
            return None
        sent, waits = self._sent(root) + alike.gone, {}
        for worker, wait in alike.waits.items():
            if number := sent[worker]:
                own = worker.prefill_s(total - alike.common, total)
                wait += number * own + worker.prefill_s(total - alike.held_before(worker), total) - own
            waits[worker] = max(wait - (now - alike.since), worker.own_wait_s(now))  # what else this gateway has sent there counts, too
        return waits

    def own(self, root: int) -> Mapping[Worker, int] | None:
        """How many of these this gateway has sent to each worker. None where no other gateway sends such."""
        if all(isinstance(placing.load, Reservation) for placing in self._recent.values() if placing.root == root):
            return None
        return self._alike[root].own

    def _sent(self, root: int) -> Counter[Worker]:
        """Where those of this root that are not forgotten were sent."""
        return Counter([placing.worker for placing in self._recent.values() if placing.root == root])

    def lost_cache(self, worker: Worker) -> None:
        """The worker holds nothing any more."""
        for alike in self._alike.values():
            alike.held.pop(worker.id, None)
            alike.gone.pop(worker, None)

    def _share_out(self, root: int, now: float) -> set[Worker]:
        """Count what sessions of this root have in common at the first one of each worker, as far as is known or assumed now."""
        alike = self._alike[root]
        sent_to = set(alike.gone)
        for ticket in sorted(ticket for ticket, placing in self._recent.items() if placing.root == root):
            placing = self._recent[ticket]
            load = placing.load
            if load is not None and placing.held <= alike.common:  # else that is not from its like
                held = alike.common if placing.worker in sent_to else alike.held_before(placing.worker)
                held = min(held, load.prompt_tokens if isinstance(load, Reservation) else load.active_tokens)
                if held != placing.held:
                    self._count(ticket, placing, held, now)
            sent_to.add(placing.worker)
        return sent_to

    def _count(self, ticket: int, placing: _Placing, held: float, now: float) -> None:
        """Of this session so many tokens are no work of its own."""
        worker, load, before = placing.worker, placing.load, placing.held
        placing.held = held
        if isinstance(load, Reservation):
            total = load.prompt_tokens
            load.recount(worker.prefill_s(total - held, total), total - held)
            if load.claimant is not None:
                load.claimant.begins_as_others(held)
        elif load is not None:
            total = load.active_tokens
            more = worker.prefill_s(total - held, total) - worker.prefill_s(total - before, total)
            load.wait_s = max(load.wait_s + more, 0.0)
            load.working_set = load.kv_tokens = total - held
            worker.hear(f"ticket {ticket}", load, now)

    def expire(self, now: float) -> None:
        """Forget what is older than a few messages."""
        while self._recent:
            ticket, placing = next(iter(self._recent.items()))
            if placing.since > now - HEARD_WITHIN_S:
                break
            self._withdraw(ticket, now)
            self._last = max(self._last, ticket)
            if (alike := self._alike.get(placing.root)) is None:
                continue
            if isinstance(placing.load, Share):  # it was not true
                self._unsettled.add(placing.root)
            else:
                alike.gone[placing.worker] += 1
        self.settle(now)

    def _enter(self, ticket: int, placing: _Placing) -> None:
        self._roots[placing.root] += 1  # before, so that what is known of its like stays
        self._withdraw(ticket, placing.since)
        self._recent[ticket] = placing

    def _withdraw(self, ticket: int, now: float) -> bool:
        placing = self._recent.pop(ticket, None)
        if placing is None:
            return False
        if isinstance(placing.load, Share):
            placing.worker.hear(f"ticket {ticket}", None, now)
        self._roots[placing.root] -= 1
        if not self._roots[placing.root]:
            del self._roots[placing.root]
            self._alike.pop(placing.root, None)
        return True
