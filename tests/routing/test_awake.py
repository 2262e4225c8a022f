"""Which sessions count in the working set of their home, and what is learned of those that do no longer."""

from __future__ import annotations

import pytest

from routing.fleet import Worker
from routing.sessions import SessionRecord, SessionTable


def turn(table: SessionTable, name: str, worker: Worker, now: float, root: int = 1) -> None:
    """A turn of 1,000 tokens whose answer is there at once."""
    hashes = [root, hash(name)]
    session = table.find(name, hashes, 0, now)
    assert session is not None
    table.placed(session, worker, hashes, 1000.0)
    session.begun()
    session.ended(now)


def with_gaps(table: SessionTable, worker: Worker, count: int, gap_s: float) -> float:
    """A session that has had so many gaps of that length; the time then."""
    for number in range(count + 1):
        turn(table, "busy", worker, number * gap_s)
    return count * gap_s


def test_a_session_idle_for_longer_than_nearly_all_gaps_takes_no_room() -> None:
    table, home = SessionTable(), Worker("w")
    turn(table, "left", home, 0.0)
    now = with_gaps(table, home, 64, 5.0)
    turn(table, "busy", home, now + 5.0)
    assert home.live_sessions == 1 and home.working_set == 1000.0
    turn(table, "left", home, now + 6.0)
    assert home.live_sessions == 2 and home.working_set == 2000.0


def test_a_few_short_gaps_put_nobody_to_sleep() -> None:
    table, home = SessionTable(), Worker("w")
    turn(table, "thinks", home, 0.0)
    with_gaps(table, home, 5, 0.1)
    turn(table, "busy", home, 60.0)
    assert home.live_sessions == 2 and home.working_set == 2000.0


def test_turns_are_learned_when_a_session_falls_asleep_and_corrected_when_it_goes_on() -> None:
    table, home = SessionTable(), Worker("w")
    now = with_gaps(table, home, 64, 5.0)
    before = table.mean_turns
    turn(table, "short", home, now)
    for after in (2.0, 4.0, 6.0, 8.0, 10.0):  # somebody else is awake; so many looks, as a few are taken at a time
        turn(table, "busy", home, now + after)
    learned = table.mean_turns
    assert learned == pytest.approx(before + 0.02 * (1 - before))
    turn(table, "short", home, now + 11.0)
    for after in (13.0, 15.0, 17.0, 19.0, 21.0):
        turn(table, "busy", home, now + after)
    assert table.mean_turns == pytest.approx(learned + 0.02 * 1)


def test_nothing_is_learned_here_of_a_session_that_another_gateway_counts() -> None:
    table, home = SessionTable(), Worker("w")
    table.gateway = "a"
    now = with_gaps(table, home, 64, 5.0)
    hashes = [1, hash("moved")]
    session = table.find("moved", hashes, 0, now)
    assert session is not None
    table.share(session, b"id", None, None)
    table.placed(session, home, hashes, 1000.0)
    table.claimed(b"id", 9, "b")
    before = table.mean_turns
    for after in (2.0, 4.0, 6.0, 8.0, 10.0):
        turn(table, "busy", home, now + after)
    assert not session.awake and table.mean_turns == before


def test_what_a_session_shares_with_others_goes_with_it_to_another_gateway() -> None:
    record = SessionRecord("w", "a", turns=3, context=9000.0, regret=0.0, shared=8000.0)
    assert SessionRecord.decode(record.encode()) == record
    table, home = SessionTable(), Worker("w")
    table.gateway = "b"
    session = table.find("s", [1, 2], 0, 0.0)
    assert session is not None
    table.share(session, b"id", record, home)
    assert session.footprint == home.working_set == 1000.0
