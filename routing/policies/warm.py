"""`warm`, the product's policy: least cost in seconds, own work priced by what a second of it costs the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from routing.fleet import Worker
from routing.policies.placement import Placement, only
from routing.sessions import Session

# Share of the fleet's time that the later turns of live sessions are expected to take at least. What is measured while sessions
# start says little of what they will do, and without it the first worker to hold a shared prompt would get them all.
LEAST_LATER_USE = 0.1
# A wait below this is no reason to leave a warm cache: nobody notices it, and a hiccup of this process or the network looks the same.
LEAST_MOVE_S = 0.1
TIE_S = 0.01  # a difference in waits below this is noise of clocks and networks
UNSURE_REQUESTS = 4.0  # of a crowd that other gateways place, that may go elsewhere than one thinks
# Of a running answer that is a second later, against a wait of a second, which delays the first token too (0.2 to 0.5 were as good).
STALL_WEIGHT = 0.3
# A worker whose KV memory or batch is full is taken to be in use for this share of the time: what is put on it delays those that come
# until the queue has drained, which takes 1 / (1 - use) times as long as the wait. With less, fast workers are queued for; with more,
# slow ones get too much.
FULL_USE = 0.9
TURN_TOKENS = 1400.0  # new tokens of a later turn, until some were seen (agent traces: mean 1,440)


class Warm:
    """Least cost in seconds, own work priced by what a second of it costs the others.

    cost = network + wait + restore + own x (1 + c) + decode + evict + crowd

    restore  seconds to bring what is cached in host memory or on disk back to the accelerator.

    own    prefill of what the worker does not hold. For a session's first turn, the part that another worker holds is a
           shared prefix: where there is room for it, it serves the sessions to come, so it is divided among them.
    c      arrivals/s per worker x (wait + own) / (1 - utilisation): the delay that one second of work adds to those who arrive
           before the queue has drained; and a part of each request that decodes there, since a prefill stalls them. Near zero when
           idle, so idle workers are used freely; near saturation sessions hold still. Where KV memory or the batch is full, the
           request's share of it, for as long as it runs, delays those who arrive in the same way. Of the memory it takes what it
           does not begin with as others do: that is there once for all.
    evict  seconds to recompute what no longer fits beside the contexts of the sessions that are awake there, at each of the turns
           that a session has: whoever is evicted comes back, and evicts another. That work delays others as this request's own does.
           It costs nothing where requests begin as none before them, for then nobody comes back.
           Of a shared prefix that is copied only this session's part counts.
    decode expected output x step time of the batch that it joins.
    crowd  the expected waits that this session and the others at home there will cause each other.

    A session whose home has nothing to prefill stays there without further ado: no other worker can be cheaper by more than
    a difference in decode speed, which does not pay for a second copy of its cache.
    """

    name = "warm"

    def sharing(self, placement: Placement) -> float:
        """How many sessions are expected to come that begin as this one."""
        return placement.sessions.sharing(placement.session) if placement.session is not None else 0.0

    def rank(self, placement: Placement, candidates: Sequence[Worker]) -> list[tuple[Any, ...]]:
        now, total, session, sessions = placement.now, placement.prompt_tokens, placement.session, placement.sessions
        cached, restore = placement.cached, placement.restore
        home = session.home if session is not None else None
        first = home is None
        if (
            home is not None
            and not home.prefilling
            and not home.others_prefilling
            and home.decoding + home.others_decoding < home.slots
            and home.id in cached
            and home in candidates
        ):
            session.regret = 0.0  # type: ignore[union-attr]
            return only(home)
        congestion = placement.congestion
        count = len(candidates)
        arrivals = congestion.arrivals_per_s / count
        pressure = arrivals / (1.0 - min(congestion.work_per_s / count, 0.95))
        best_cached = max(cached.values()) if first and cached else 0.0
        repeated = crowding = 0.0
        if session is not None:
            if first:
                repeated = 1.0 - 1.0 / (1.0 + self.sharing(placement))
            # expected waits per pair of sessions at home together: turns to come x length of what is met x chance to meet
            usual_token_s = sum([w.prefill_calibration.value * (w.per_token + w.per_pair * total) for w in candidates]) / count or 1e-12
            later = congestion.later_work_per_s
            met = later / congestion.later_arrivals_per_s if later > 0.0 else TURN_TOKENS * usual_token_s
            crowding = 2.0 * sessions.mean_turns * met * max(later, LEAST_LATER_USE * count) / (sessions.live * usual_token_s)
        output_tokens = placement.output_tokens * placement.decode_weight
        turns, waits = sessions.mean_turns * sessions.recurrence, placement.waits
        # a session that has come over from another gateway is still counted there, too
        itself = 2 if session is not None and session.id is not None and not session.claim else 1

        ranked: list[tuple[Any, ...]] = []
        for place, worker in enumerate(candidates):
            held = cached.get(worker.id, 0.0)
            scale = worker.prefill_calibration.value
            token_s = scale * (worker.per_token + worker.per_pair * total)
            lacking = total - held
            own = scale * (worker.base + lacking * (worker.per_token + worker.per_pair * (total - 0.5 * lacking)))
            prefilling = len(worker.prefilling)
            in_flight = prefilling + worker.decoding
            neighbours = living = worker.live_sessions
            takes = total - placement.shared(worker, held)
            working_set, kv = worker.working_set, worker.kv_tokens + takes
            if worker.others:
                prefilling += worker.others_prefilling
                in_flight += worker.others_prefilling + worker.others_decoding
                neighbours = living = living + worker.others_live_sessions
                working_set += worker.others_working_set
                kv += worker.others_kv_tokens
            if worker is home:
                neighbours -= itself
                # what it holds there stays; but of a session that was evicted nothing keeps it
                over, new = working_set - worker.capacity, total if held < 0.5 * total else 0.0
            else:
                over, new = working_set + lacking - worker.capacity, lacking
                if held < best_cached:
                    new -= (best_cached - held) * repeated
            evict = 0.0
            if over > 0.0:
                evict = (over if over < new else new) * token_s * turns * (1.0 + pressure * own)
            elif held < best_cached:
                own -= (best_cached - held) * scale * (worker.per_token + 0.5 * worker.per_pair * (best_cached + held)) * repeated
            full = in_flight >= worker.slots or kv > worker.capacity
            if waits is not None and not full and worker in waits:
                wait = waits[worker]
            else:
                wait = worker.wait_s(now, takes) if prefilling or full else 0.0
            priced = own * (pressure * (wait + own) + STALL_WEIGHT * (in_flight - prefilling))
            step_s = worker.joined_step_s(total)
            decode = output_tokens * step_s
            if full:
                share = max(takes / worker.capacity, 1.0 / worker.slots)
                priced += arrivals * wait / (1.0 - FULL_USE) * share * (own + placement.output_tokens * step_s)
            crowd = crowding * neighbours * token_s
            restored = restore.get(worker.id, 0.0) if restore else 0.0
            cost = worker.network_s + wait + restored + own + priced + decode + evict + crowd
            ranked.append((cost, living, in_flight, place, worker, wait, own, priced, decode, evict, crowd, held, restored))
        ranked.sort()
        if session is not None and home is not None:
            _hold_still(session, home, ranked)
        elif count > 1:
            if placement.own_alike is not None:
                _spread_own(ranked, placement.own_alike)
            else:
                _break_ties(ranked, session is not None, placement.crowded)
        return ranked


def _spread_own(ranked: list[tuple[Any, ...]], own_alike: Mapping[Worker, int]) -> None:
    """Of new sessions that begin alike, which several gateways place at once, put first who has got the fewest from this gateway, among
    those whose costs differ by less than matters: where the others send theirs is only half known. What every gateway spreads evenly is
    even in all, and what makes a greater difference they all see."""
    limit = _as_good(ranked[0], max(LEAST_MOVE_S, UNSURE_REQUESTS * min([entry[6] for entry in ranked])))
    _put_first(ranked, min([(own_alike.get(entry[4], 0), entry[0], entry[3], entry) for entry in ranked if entry[0] < limit])[3])


def _break_ties(ranked: list[tuple[Any, ...]], comes_back: bool, crowded: bool) -> None:
    """Put first who carries the fewest sessions among those whose costs are as good as equal; for a request that belongs to no
    session, who has the fewest requests. Gateways that place sessions at the same time then go by the list, which all have in the
    same order: their costs differ by noise."""
    limit = _as_good(ranked[0], TIE_S)
    if ranked[1][0] >= limit:
        return
    first, second, third = (1, 2, 3 if crowded else 0) if comes_back else (2, 1, 3 if crowded else 0)
    _put_first(ranked, min([(entry[first], entry[second], entry[third], entry[3], entry) for entry in ranked if entry[0] < limit])[4])


def _as_good(best: tuple[Any, ...], seconds: float) -> float:
    """The cost below which a candidate is as good as the best, where waits that differ by less than so many seconds do not matter."""
    busy = best[5] + best[6]
    return best[0] + seconds * (1.0 + best[7] / busy if busy else 1.0)  # what a second of waiting counts in the cost


def _put_first(ranked: list[tuple[Any, ...]], chosen: tuple[Any, ...]) -> None:
    if chosen is not ranked[0]:
        ranked.remove(chosen)
        ranked.insert(0, chosen)


def _hold_still(session: Session, home: Worker, ranked: list[tuple[Any, ...]]) -> None:
    """Put the home first unless leaving it has become worth what the other worker would have to compute.

    The rule of online page migration: what staying has cost beyond the best other worker is added up, never below zero, and
    the session moves when the sum reaches the price of a move. A long wait moves it at once, and many short ones do in time;
    a single one of the size of the recomputation does not: it is over before the next turn, and estimates are no better.
    """
    place = next((i for i, entry in enumerate(ranked) if entry[4] is home), None)
    if place is None or len(ranked) == 1:
        return
    at_home = ranked[place]
    elsewhere = ranked[0] if place else ranked[1]
    session.regret = max(0.0, session.regret + at_home[0] - elsewhere[0])
    if place and session.regret < max(elsewhere[6] + elsewhere[7], LEAST_MOVE_S):
        del ranked[place]
        ranked.insert(0, at_home)
