"""Multi-turn sessions of code text in every dialect, and the record of what was predicted and reported of each request."""

from __future__ import annotations

import asyncio
import random
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from routing.router import Decision, Router
from tests.stack import Stack

CHARS_PER_TOKEN = 3.2  # of the tiny tokenizer on Python source, roughly


@cache
def _source() -> str:
    """About 3 MB of real Python."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text("utf-8", errors="replace")
        parts.append(text)
        size += len(text)
        if size > 3_000_000:
            break
    return "".join(parts)


def code(rng: random.Random, tokens: int) -> str:
    """A stretch of Python source of about this many tokens."""
    length = int(tokens * CHARS_PER_TOKEN)
    at = rng.randrange(len(_source()) - length)
    return _source()[at : at + length]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Read a file of the repository",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]


@dataclass
class Conversation:
    """One session. `path` chooses the dialect; each turn adds about `turn_tokens` of code."""

    path: str
    seed: int
    first_tokens: int = 1500
    turn_tokens: int = 1500
    output_tokens: int = 12
    tools: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.path} {self.seed}")
        self.turns = 0
        self.calls = 0

    def next_body(self, stream: bool = False) -> dict[str, Any]:
        """The request of the next turn."""
        new = code(self.rng, self.turn_tokens if self.turns else self.first_tokens)
        self.turns += 1
        body: dict[str, Any] = {"model": "tiny", "stream": stream, "temperature": 0}
        if self.path == "/v1/completions":
            self.text += new
            return body | {"prompt": self.text, "max_tokens": self.output_tokens}
        if self.path == "/v1/responses":
            self.history.append({"role": "user", "content": new})
            body |= {"instructions": "You are a coding agent.", "max_output_tokens": self.output_tokens, "store": False}
            return body | {"input": self.history}
        if self.path == "/v1/messages":
            self.history.append({"role": "user", "content": [{"type": "text", "text": new}]})
            return body | {"messages": self.history, "system": "You are a coding agent.", "max_tokens": self.output_tokens}
        if not self.history:
            self.history.append({"role": "system", "content": "You are a coding agent. ☃"})
        if self.tools and self.turns % 2 == 0:
            self.calls += 1
            call = {"id": f"call_{self.calls}", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "a.py"}'}}
            self.history[-1] = {"role": "assistant", "content": None, "tool_calls": [call]}
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": new})
        else:
            self.history.append({"role": "user", "content": new})
        return body | {"messages": self.history, "max_tokens": self.output_tokens} | ({"tools": TOOLS} if self.tools else {})

    def take(self, answer: dict[str, Any]) -> None:
        """Add the engine's answer to the history."""
        if self.path == "/v1/completions":
            self.text += answer["choices"][0]["text"]
        elif self.path == "/v1/responses":
            texts = [part["text"] for item in answer["output"] for part in item.get("content") or [] if part.get("type") == "output_text"]
            self.history.append({"role": "assistant", "content": "".join(texts)})
        elif self.path == "/v1/messages":
            text = "".join(part.get("text", "") for part in answer["content"])
            self.history.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        else:
            self.history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


@dataclass
class Seen:
    """One request: cached and prompt tokens as predicted and as reported."""

    where: str
    worker: str
    level: str
    predicted: int
    reported: int
    predicted_prompt: int
    reported_prompt: int

    @property
    def exact(self) -> bool:
        return self.predicted == self.reported and self.predicted_prompt == self.reported_prompt


class Recorder:
    """Notes every answer that reports its cached tokens."""

    def __init__(self, router: Router, where: str):
        self.where = where
        self.seen: list[Seen] = []
        self._learn = router.learn
        router.learn = self._note  # type: ignore[method-assign]

    def _note(self, decision: Decision, *, prompt_tokens: int | None, cached_tokens: int | None, ttft_s: float | None) -> None:
        assert cached_tokens is not None and prompt_tokens is not None
        self.seen.append(
            Seen(
                self.where, decision.worker.id, decision.worker.trust.level, round(decision.cached_tokens), cached_tokens,
                round(decision.prompt_tokens), prompt_tokens,
            )
        )  # fmt: skip
        self._learn(decision, prompt_tokens=prompt_tokens, cached_tokens=cached_tokens, ttft_s=ttft_s)


def check(seen: list[Seen], block: int, least: int) -> None:
    """The promise: exact in 99 % of requests, and off by less than a block on average. Prints what was seen."""
    wrong = [s for s in seen if not s.exact]
    error = sum(abs(s.predicted - s.reported) for s in seen) / len(seen)
    hits = sum(s.reported for s in seen) / sum(s.reported_prompt for s in seen)
    print(f"\n{seen[0].where}: {len(seen)} requests, {len(seen) - len(wrong)} exact, mean error {error:.2f} tokens, hit rate {hits:.1%}")
    for one in wrong:
        print("  ", one)
    assert len(seen) >= least
    assert len(wrong) <= 0.01 * len(seen), f"{len(wrong)} of {len(seen)} predictions were not exact"
    assert error < block


async def take_turns(stack: Stack, conversations: list[Conversation], turns: int, *, at_once: int, gap_s: float = 0.15) -> None:
    """Each conversation takes `turns` turns, `at_once` of them at a time; between turns its agent works for `gap_s`."""
    limit = asyncio.Semaphore(at_once)

    async def turn(conversation: Conversation) -> None:
        async with limit:
            # a session of its own, as agents send it
            headers = {"x-session-id": f"{conversation.path}-{conversation.seed}"}
            response = await stack.client.post(
                conversation.path, content=orjson.dumps(conversation.next_body()), timeout=300,
                headers={"content-type": "application/json", **headers},
            )  # fmt: skip
            assert response.status_code == 200, response.text
            conversation.take(response.json())
            await asyncio.sleep(gap_s)

    for _ in range(turns):
        await asyncio.gather(*(turn(conversation) for conversation in conversations))
