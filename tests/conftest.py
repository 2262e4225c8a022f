"""Fixtures shared by all suites."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.cli import stale_modules
from loadgen.local import LocalFleet


def pytest_configure() -> None:
    if stale := stale_modules():
        pytest.exit(f"compiled before a change of {', '.join(stale)}: run make compile again (or make pure)", returncode=3)


@pytest.fixture(scope="session")
def local_fleet() -> Iterator[LocalFleet]:
    """A gateway process in front of two simulated workers, shared by tests that leave it as they found it."""
    with LocalFleet(2, ["--speed", "50", "--kv-capacity", "200000"]) as fleet:
        yield fleet
