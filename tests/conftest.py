"""Fixtures shared by all suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadgen.local import LocalFleet


@pytest.fixture(scope="session")
def local_fleet() -> Iterator[LocalFleet]:
    """A gateway process in front of two simulated workers, shared by tests that leave it as they found it."""
    with LocalFleet(2, ["--speed", "50", "--kv-capacity", "200000"]) as fleet:
        yield fleet
