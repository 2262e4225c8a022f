"""The engines that the tests of this folder share. `make test-engine` names the interpreter and the model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.engine.engines import Engine


def _given(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        message = f"{variable} is not set; run `make test-engine`"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return Path(value)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return _given("WARMROUTE_VLLM_PYTHON")


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    return _given("WARMROUTE_TINY_MODEL")


@asynccontextmanager
async def running_engines(*engines: Engine) -> AsyncIterator[tuple[Engine, ...]]:
    async with AsyncExitStack() as stack:
        for engine in engines:
            engine.start()
            stack.callback(engine.stop)
        for engine in engines:
            await engine.ready()
        yield engines
