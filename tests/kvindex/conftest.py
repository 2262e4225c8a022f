"""What several test modules of the index need."""

from collections.abc import AsyncIterator

import pytest

from tests.redis_server import RedisServer, redis_server


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with redis_server() as running:
        yield running
