"""Why one configuration falls off where its neighbour does not: read from the figures of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loadgen.frontier.points import Point, is_number
from loadgen.frontier.wording import number

Kind = Literal["eviction", "placement", "sharing", "preemption", "queueing", "imbalance", "interference", "batch", "unknown"]

TITLES: dict[Kind, str] = {
    "eviction": "hit rate fell: KV working set exceeds capacity",
    "placement": "hit rate fell: prompts sent past their cache",
    "sharing": "prompts share less",
    "preemption": "preemption",
    "queueing": "queueing",
    "imbalance": "one worker carries the load",
    "interference": "prefill between decode steps",
    "batch": "larger decode batch",
    "unknown": "no figure tells why",
}

_HIT_FELL = 0.03  # of all prompt tokens
_MORE_WORK = 1.3  # times the tokens to prefill
_PAST_CACHES = 0.5  # of the fall is eviction, or that of one LRU cache of the fleet's size
_PREEMPTED = 0.01  # preemptions a request
_SLOWER = 1.3  # times TTFT p90
_QUEUED = 0.5  # of what TTFT p90 rose by
_FULL = 0.9  # of batch slots
_HELD = 0.85  # of KV blocks: the next long prompt does not fit
_BUSY = 0.95
_IMBALANCED = 1.3


@dataclass(frozen=True, slots=True)
class Cause:
    kind: Kind
    text: str


def name_cause(before: Point, after: Point) -> Cause:
    """The cause of a fall from `before` (the good side) to `after`: the first of these rules that holds.

    1. The hit rate fell by 3 points or more and 1.3 times as many tokens have to be computed. If the bound of an infinite cache fell as
       much (80 % of it), the requests themselves share less (**sharing**). If tokens that were evicted explain less than half of the fall,
       memory sufficed and prompts went past their cache (**placement**; **queueing** where they queue for batch slots, which sends them
       elsewhere); live engines do not report evicted tokens, so there one LRU
       cache as large as the fleet's KV memory must have lost less than half as much. Else the live sessions' prompts no longer fit
       (**eviction**).
    2. One request in a hundred, or more, is preempted, at least twice as often as before (**preemption**).
    3. TTFT p90 rose 1.3 times or more and the engine's queue accounts for half of that or more (**queueing**), with what is full: batch
       slots (mean batch at 90 % of max_num_seqs), KV blocks (85 % held), or the engine's time (busy 95 %). Where no queue was measured
       (live engines): TTFT p50 or p90 at least doubled while ITL p50 did not grow by half.
    4. The busiest worker prefills 1.3 times as much over the mean as before (**imbalance**).
    5. The ITL p99 grew 1.3 times as much as the ITL p50: steps with a prefill chunk grew, the others did not (**interference**).
    6. ITL p50 grew, and the decoding batch with it (**batch**).
    7. What would tell was not measured or did not change (**unknown**).
    """
    for rule in (_hits, _preemption, _queueing, _imbalance, _interference, _batch):
        cause = rule(before, after)
        if cause is not None:
            return cause
    return Cause("unknown", "none of hit rate, preemptions, queue, batch and balance tells")


def _hits(before: Point, after: Point) -> Cause | None:
    was, now = before.value("hit_rate"), after.value("hit_rate")
    if was is None or now is None or was - now < _HIT_FELL or (1 - now) < _MORE_WORK * (1 - was):
        return None
    fell = f"hit rate fell {was:.2f} -> {now:.2f}"
    bound_was, bound_now = before.value("hit_bound"), after.value("hit_bound")
    if bound_was is not None and bound_now is not None and bound_was - bound_now > 0.8 * (was - now):
        return Cause("sharing", f"{fell}, and so did the bound of an infinite cache ({bound_was:.2f} -> {bound_now:.2f})")
    kept = _memory_kept(before, after, was - now)
    if kept is not None:
        queue = _queueing(before, after)
        if queue is not None and _slots_full(after):  # who finds no slot at home goes elsewhere: an effect, not the cause
            return Cause(queue.kind, f"{queue.text}; {fell} as sessions went elsewhere")
        return Cause("placement", f"{fell} though {kept}: prompts were sent past their cache")
    also = _preemption(before, after)
    return Cause("eviction", f"{fell} (KV working set exceeds capacity)" + (f"; {also.text}" if also else ""))


def _memory_kept(before: Point, after: Point, fall: float) -> str | None:
    """What shows that less than half of a fall of the hit rate is eviction; None where it is eviction, or not known."""
    if all(run.source == "simulated" for run in (*before.runs, *after.runs)):  # live engines do not tell
        was, now = _evicted(before), _evicted(after)
        if now - was < _PAST_CACHES * fall:
            return f"tokens lost to eviction only went {was:.2f} -> {now:.2f}"
        return None
    lru_was, lru_now = before.value("hit_bound_lru"), after.value("hit_bound_lru")
    if lru_was is not None and lru_now is not None and lru_was - lru_now < _PAST_CACHES * fall:
        return f"one LRU cache of the fleet's size only went {lru_was:.2f} -> {lru_now:.2f}"
    return None


def _evicted(point: Point) -> float:
    """Share of prompt tokens that their worker had had and no longer has."""
    return (point.value("evicted_tokens") or 0.0) / (point.value("prompt_tokens") or 1.0)


def _preemption(before: Point, after: Point) -> Cause | None:
    was, now = _per_request(before), _per_request(after)
    if now < _PREEMPTED or now < 2 * was:
        return None
    text = f"preemptions a request {number(was)} -> {number(now)}"
    use = after.value("kv_use")
    return Cause("preemption", text + (f", {use:.0%} of KV blocks held" if use is not None else ""))


def _per_request(point: Point) -> float:
    requests = point.value("requests")
    return (point.value("preemptions") or 0) / requests if requests else 0.0


def _queueing(before: Point, after: Point) -> Cause | None:
    queue, ttft = after.value("queue_p90_s"), after.value("ttft_p90_s")
    if queue is None or ttft is None:
        return _queueing_unmeasured(before, after)
    queue_was, ttft_was = before.value("queue_p90_s") or 0.0, before.value("ttft_p90_s") or 0.0
    if ttft < _SLOWER * ttft_was or queue - queue_was < _QUEUED * (ttft - ttft_was):
        return None
    return Cause("queueing", f"queue p90 {number(queue_was)} -> {number(queue)} s of TTFT p90 {number(ttft)} s ({_what_is_full(after)})")


def _queueing_unmeasured(before: Point, after: Point) -> Cause | None:
    for key, name in (("ttft_p50_s", "p50"), ("ttft_p90_s", "p90")):
        was, now = before.value(key), after.value(key)
        if was and now and now >= 2 * was and _growth(before, after, "itl_p50_s") < 1.5:
            return Cause("queueing", f"TTFT {name} {number(was)} -> {number(now)} s, not ITL ({_what_is_full(after)}; queue not measured)")
    return None


def _what_is_full(point: Point) -> str:
    use, busy = point.value("kv_use"), point.value("busy")
    if (full := _slots_full(point)) is not None:
        return full
    if use is not None and use >= _HELD:
        return f"KV blocks full: {use:.0%} held by running requests"
    if busy is not None and busy >= _BUSY:
        return f"engines busy {busy:.0%} of the time"
    return "requests arrive in bursts or behind long prefills" if busy is not None else "what is full was not measured"


def _slots_full(point: Point) -> str | None:
    batch = point.value("batch")
    slots = next((v for axis, v in point.arm.items() if axis.rpartition(".")[2] == "max_num_seqs" and is_number(v)), None)
    if batch is not None and slots is not None and batch >= _FULL * float(slots):
        return f"batch slots full: {number(batch)} of {slots}"
    return None


def _imbalance(before: Point, after: Point) -> Cause | None:
    was, now = before.value("imbalance"), after.value("imbalance")
    if was is None or now is None or now < _IMBALANCED * was:
        return None
    return Cause("imbalance", f"the busiest worker's prefill over the mean {number(was)} -> {number(now)}")


def _interference(before: Point, after: Point) -> Cause | None:
    slow, usual = _growth(before, after, "itl_p99_s"), _growth(before, after, "itl_p50_s")
    if slow < 1.3 * usual:
        return None
    was, now = before.value("itl_p99_s"), after.value("itl_p99_s")
    return Cause("interference", f"chunked prefill between decode steps: ITL p99 {number(was)} -> {number(now)} s, p50 {usual:.2f}x")


def _batch(before: Point, after: Point) -> Cause | None:
    was, now = before.value("batch"), after.value("batch")
    if was is None or now is None or now < 1.2 * was or _growth(before, after, "itl_p50_s") < 1.2:
        return None
    return Cause("batch", f"sequences decoding together {number(was)} -> {number(now)}, ITL p50 {_growth(before, after, 'itl_p50_s'):.2f}x")


def _growth(before: Point, after: Point, key: str) -> float:
    """How many times larger a figure became; 1 where it was not measured."""
    was, now = before.value(key), after.value(key)
    return now / was if was and now else 1.0
