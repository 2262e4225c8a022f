"""What clients and workers say on each route, for tests that run on all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
import pytest


def event(payload: Any, name: str | None = None) -> bytes:
    data = b"data: " + orjson.dumps(payload) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


@dataclass(frozen=True)
class Spoken:
    """One dialect: a request, and the events of a streamed answer to it."""

    path: str
    preamble: bytes  # what precedes content
    last: bytes  # what follows it
    done: bytes  # what says that the stream is complete
    error_mark: bytes  # what an in-band error looks like
    keepalive_mark: bytes

    def body(self, text: str = "hello", **fields: Any) -> dict[str, Any]:
        conversation = [{"role": "user", "content": text}]
        key = "input" if self.path == "/v1/responses" else "messages"
        extra = {"max_tokens": 50} if self.path == "/v1/messages" else {}
        return {"model": "m", key: conversation, "stream": True, **extra, **fields}

    def content(self, text: str) -> bytes:
        if self.path == "/v1/chat/completions":
            return event({"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})
        if self.path == "/v1/responses":
            return event({"type": "response.output_text.delta", "delta": text}, "response.output_text.delta")
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        return event(delta, "content_block_delta")

    def whole(self, *texts: str) -> list[bytes]:
        return [self.preamble, *map(self.content, texts), self.last]

    def error_of(self, body: bytes) -> dict[str, Any]:
        """The error object of an error response; fails when it does not have the dialect's shape."""
        payload = orjson.loads(body)
        if self.path == "/v1/messages":
            assert payload["type"] == "error" and set(payload["error"]) == {"type", "message"}
        else:
            assert set(payload["error"]) == {"message", "type", "param", "code"}
        return payload["error"]  # type: ignore[no-any-return]


USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107, "prompt_tokens_details": {"cached_tokens": 64}}
CHAT = Spoken(
    "/v1/chat/completions",
    event({"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}),
    event({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}) + b"data: [DONE]\n\n",
    b"data: [DONE]\n\n",
    b'data: {"error":',
    b": keepalive\n\n",
)
RESPONSES = Spoken(
    "/v1/responses",
    event({"type": "response.created", "response": {"id": "r"}}, "response.created"),
    event(
        {
            "type": "response.completed",
            "response": {"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64}, "output_tokens": 7}},
        },
        "response.completed",
    ),
    b"event: response.completed",
    b"event: response.failed",
    b": keepalive\n\n",
)  # fmt: skip
MESSAGES = Spoken(
    "/v1/messages",
    event(
        {"type": "message_start", "message": {"usage": {"input_tokens": 36, "cache_read_input_tokens": 64, "output_tokens": 1}}},
        "message_start",
    ),
    event({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 7}}, "message_delta")
    + event({"type": "message_stop"}, "message_stop"),
    b"event: message_stop",
    b"event: error",
    b"event: ping",
)
ALL = [CHAT, RESPONSES, MESSAGES]
every_dialect = pytest.mark.parametrize("spoken", ALL, ids=["chat", "responses", "messages"])
