"""Many sessions that share one system prompt spread over the fleet, and then stay where they are.

(Routers that follow the longest prefix send all of them to the worker that saw the system prompt first.)
"""

from __future__ import annotations

import pytest

from tests.routing.virtual import VirtualFleet, agents, blocks, busiest_over_mean, new_router, stayed

SYSTEM_BLOCKS = 16 * 1024 // 512
OWN_BLOCKS = SYSTEM_BLOCKS // 4  # the system prompt is 80 % of the first prompt


@pytest.mark.parametrize("gap_s", [5.0, 0.1, 0.0], ids=["sequential", "staggered", "at-once"])
@pytest.mark.parametrize("named", [True, False], ids=["session-header", "prefix-only"])
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_sessions_with_one_system_prompt_spread_and_stay(seed: int, named: bool, gap_s: float) -> None:
    router = new_router(4)
    fleet = VirtualFleet(router)
    clients = agents(32, 10, seed, shared=blocks(SYSTEM_BLOCKS), own=OWN_BLOCKS, named=named)
    for number, client in enumerate(clients):
        fleet.start(client, number * gap_s)
    fleet.run()

    assert busiest_over_mean(fleet.requests, 4) <= 1.25, fleet.requests
    assert stayed(clients) >= 0.98


def test_sessions_that_start_on_an_idle_fleet_spread() -> None:
    """Each session's first turn comes when nothing else runs: there is no load to spread by, only where sessions live."""
    router = new_router(4)
    system = blocks(SYSTEM_BLOCKS)
    homes = []
    for number in range(32):
        fleet = VirtualFleet(router)
        [client] = agents(1, 1, number, shared=system, own=OWN_BLOCKS)
        client.name = f"session {number}"
        fleet.start(client, number * 10.0)
        fleet.run()
        homes.append(client.placed[0])
    counts = [homes.count(f"w{n}") for n in range(4)]
    assert max(counts) <= 1.25 * 8, counts
