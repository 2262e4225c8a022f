"""Fixtures shared by all suites."""

from __future__ import annotations

import logging
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


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a command silences in its own process stays silent for no other test."""
    loggers = [logging.getLogger(name) for name in (None, "routing", "httpx")]
    levels, disabled = [logger.level for logger in loggers], logging.root.manager.disable
    yield
    logging.disable(disabled)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
