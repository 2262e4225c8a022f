"""What the gateway processes of one machine say to each other: a question and an answer in JSON, over Unix sockets in a private directory.

The directory also holds small files that outlive the process that wrote them, for the one that is started in its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger("warmroute.siblings")

DEADLINE_S = 0.5  # a sibling that takes longer to answer is done without
_LONGEST = 64 << 20  # bytes of an answer

Question = dict[str, Any]
Answer = dict[str, Any]


class Siblings:
    """Process `number` of `count`, and the way to the others. `start` before asking."""

    def __init__(self, directory: Path, number: int, count: int):
        self.number = number
        self.count = count
        self._directory = directory
        self._server: asyncio.Server | None = None

    async def start(self, answer: Callable[[Question], Answer]) -> None:
        """Answer the others' questions by this function."""

        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError), contextlib.closing(writer):
                writer.write(orjson.dumps(answer(orjson.loads(await reader.readline()))) + b"\n")
                await writer.drain()

        path = self._socket(self.number)
        path.unlink(missing_ok=True)  # of the process before this one
        self._server = await asyncio.start_unix_server(converse, path)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._socket(self.number).unlink(missing_ok=True)

    async def ask(self, question: Question) -> dict[int, Answer | None]:
        """The answers of the others, by number, within `DEADLINE_S`. None: it is there and did not answer. One that is not there
        (it ended, and is about to be started again) is left out."""
        others = [number for number in range(self.count) if number != self.number]
        answers = await asyncio.gather(*(self._ask_one(number, orjson.dumps(question) + b"\n") for number in others))
        return {number: answer for number, answer in zip(others, answers, strict=True) if answer is not MISSING}

    async def _ask_one(self, number: int, question: bytes) -> Answer | None:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(DEADLINE_S):
                reader, writer = await asyncio.open_unix_connection(self._socket(number), limit=_LONGEST)
                writer.write(question)
                return orjson.loads(await reader.readline())
        except (FileNotFoundError, ConnectionRefusedError):
            return MISSING
        except (OSError, ValueError) as error:  # TimeoutError is an OSError, half an answer a ValueError
            logger.warning("process %d did not answer within %g s: %s", number, DEADLINE_S, error or type(error).__name__)
            return None
        finally:
            if writer is not None:
                writer.close()

    def _socket(self, number: int) -> Path:
        return self._directory / f"{number}.sock"

    # --- what outlives a process ---

    def keep(self, name: str, data: bytes) -> None:
        """Write a file that every process may `recall`; whole or not at all."""
        draft = self._directory / f"{name}.{os.getpid()}"
        draft.write_bytes(data)
        draft.replace(self._directory / name)

    def recall(self, name: str) -> bytes | None:
        """What was last kept under this name."""
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None


MISSING: Answer = {}
