"""The API dialects: how each spells a prompt, a session, an error, usage and a keepalive.

A dialect turns a parsed body into the canonical bytes that identify its prompt. Canonical means: a string is one text part,
`cache_control` and other markers do not count, key order of tools is as sent, and a volatile first line is cut out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson

# Claude Code's first system line changes with every request (a hash of the request); engines that do not strip it never hit.
VOLATILE_PREFIX = "x-anthropic-billing-header:"

TIERS = ("latency", "standard", "throughput")
# `service_tier` of OpenAI and Anthropic -> ours; anything else is standard.
SERVICE_TIERS = {"priority": "latency", "fast": "latency", "flex": "throughput", "scale": "standard", "batch": "throughput"}


class BadRequest(Exception):
    """The client's request cannot be served as sent. Carries what an error body of any dialect needs."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


def without_volatile(text: str) -> str:
    """The text without a leading volatile line."""
    if text.startswith(VOLATILE_PREFIX):
        return text.partition("\n")[2]
    return text


def _text(value: str) -> bytes:
    # surrogatepass: a lone surrogate in JSON must not turn into an error here; the same bytes come out on every turn
    return value.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except (orjson.JSONEncodeError, TypeError, RecursionError):
        return repr(value).encode("utf-8", "surrogatepass")


def _content(content: Any) -> Iterable[bytes]:
    """Canonical bytes of message content: a string, or a list of parts."""
    if content is None:
        return
    if isinstance(content, str):
        yield _text(content)
        return
    if not isinstance(content, list):
        yield _json(content)
        return
    for part in content:
        if isinstance(part, str):
            yield _text(part)
            continue
        if not isinstance(part, dict):
            yield _json(part)
            continue
        text = part.get("text")
        if isinstance(text, str):
            yield _text(text)
        elif isinstance(thinking := part.get("thinking"), str):
            yield b"\x1dthinking\x1f" + _text(thinking)
        elif part.get("type") == "tool_result":
            yield b"\x1dresult\x1f" + _text(str(part.get("tool_use_id", ""))) + b"\x1f"
            yield from _content(part.get("content"))
        else:  # images, audio, files, tool calls: all of it is identity, but for markers
            yield b"\x1dpart\x1f" + _json({k: v for k, v in part.items() if k != "cache_control"})


def item_bytes(item: Any) -> bytes:
    """Canonical bytes of one message (chat, messages) or input item (responses)."""
    if not isinstance(item, dict):
        return b"\x1e" + (_text(item) if isinstance(item, str) else _json(item))
    role = item.get("role")
    if role is None:  # Responses: function_call, function_call_output, reasoning ...
        kept = {k: v for k, v in item.items() if k not in ("id", "status", "cache_control")}
        return b"\x1e" + _json(kept)
    pieces = [b"\x1e", _text(str(role)), b"\x1f"]
    content = item.get("content")
    if role == "system":
        content = _steady(content)
    if type(content) is str:
        pieces.append(content.encode("utf-8", "surrogatepass"))
    else:
        pieces += _content(content)
    if calls := item.get("tool_calls"):
        pieces.append(b"\x1dcalls\x1f" + _json(calls))
    if call_id := item.get("tool_call_id"):
        pieces.append(b"\x1dcall\x1f" + _text(str(call_id)))
    for name in ("name", "reasoning_content", "reasoning"):
        if value := item.get(name):
            pieces.append(b"\x1d" + name.encode() + b"\x1f" + (_text(value) if isinstance(value, str) else _json(value)))
    return b"".join(pieces)


def _steady(content: Any) -> Any:
    """System content without a volatile line at its start (or at the start of one of its parts)."""
    if isinstance(content, str):
        return without_volatile(content)
    if isinstance(content, list):
        return [
            {**part, "text": without_volatile(part["text"])} if isinstance(part, dict) and isinstance(part.get("text"), str) else part
            for part in content
        ]
    return content


@dataclass(frozen=True, slots=True)
class Dialect:
    """One inference route."""

    name: str
    path: str
    items_key: str  # the field that holds the conversation
    style: str = "openai"  # shape of errors: openai or anthropic
    ids_items: bool = False  # list entries may be token ids (completions, embeddings)

    def items(self, fields: dict[str, Any]) -> list[Any]:
        """The conversation as a list of items. Raises BadRequest when it is absent or of the wrong type."""
        value = fields.get(self.items_key)
        if isinstance(value, list):
            return value
        if isinstance(value, str) and self.items_key != "messages":
            return [value]
        if self.name == "responses" and value is None:
            return []
        kind = "an array" if self.items_key == "messages" else "a string or an array"
        raise BadRequest(f"'{self.items_key}' must be {kind}", param=self.items_key)

    def head_bytes(self, fields: dict[str, Any]) -> bytes:
        """Canonical bytes of what chat templates put before the conversation: tools, then system."""
        head = b""
        if tools := fields.get("tools"):
            if self.style == "anthropic" and isinstance(tools, list):
                tools = [{k: v for k, v in t.items() if k != "cache_control"} if isinstance(t, dict) else t for t in tools]
            head = b"\x1etools\x1f" + _json(tools)
        if self.style == "anthropic":
            head += b"\x1esystem\x1f" + b"".join(_content(_steady(fields.get("system"))))
        elif self.name == "responses" and isinstance(instructions := fields.get("instructions"), str):
            head += b"\x1esystem\x1f" + _text(instructions)
        return head

    def is_volatile(self, fields: dict[str, Any]) -> bool:
        """Whether a system prompt starts with a line that changes with every request."""
        system = fields.get("system") if self.style == "anthropic" else None
        items = fields.get(self.items_key)
        if system is None and isinstance(items, list) and items and isinstance(items[0], dict) and items[0].get("role") == "system":
            system = items[0].get("content")
        if isinstance(system, list):
            return any(isinstance(p, dict) and str(p.get("text", "")).startswith(VOLATILE_PREFIX) for p in system)
        return isinstance(system, str) and system.startswith(VOLATILE_PREFIX)

    def items_bytes(self, items: list[Any]) -> bytes:
        """Canonical bytes of a run of items; concatenation of runs is the bytes of the whole."""
        if self.ids_items and items and all(type(item) is int for item in items):
            return b"".join(item.to_bytes(4, "little", signed=True) for item in items if -(1 << 31) <= item < 1 << 31)
        return b"".join(map(item_bytes, items))

    @property
    def usage_mark(self) -> bytes:
        """What stands in every event that reports usage and in no other (quotes inside strings are escaped)."""
        return b'"output_tokens"' if self.name in ("messages", "responses") else b'"completion_tokens"'

    # --- errors ---

    def error(self, status: int, message: str, *, code: str | None = None, param: str | None = None, request_id: str = "") -> bytes:
        """An error body in the dialect's own shape."""
        if self.style == "anthropic":
            return orjson.dumps(
                {
                    "type": "error",
                    "error": {"type": ANTHROPIC_ERRORS.get(status, "api_error"), "message": message},
                    "request_id": request_id or None,
                }
            )
        error = {"message": message, "type": OPENAI_ERRORS.get(status, "server_error"), "param": param, "code": code}
        return orjson.dumps({"error": error})

    def stream_error(self, message: str) -> bytes:
        """The in-band event that ends a stream which broke after its first byte; of a class that clients retry."""
        if self.style == "anthropic":
            payload = {"type": "error", "error": {"type": "api_error", "message": message}}
            return b"event: error\ndata: " + orjson.dumps(payload) + b"\n\n"
        if self.name == "responses":
            failed = {
                "type": "response.failed",
                "response": {"object": "response", "status": "failed", "error": {"code": "server_error", "message": message}},
            }
            return b"event: response.failed\ndata: " + orjson.dumps(failed) + b"\n\n"
        payload = {"error": {"message": message, "type": "server_error", "param": None, "code": "upstream_failed"}}
        return b"data: " + orjson.dumps(payload) + b"\n\n"

    def keepalive(self) -> bytes:
        """What may be sent while the worker is silent. Codex ignores comments, but a typed event needs the response's id."""
        if self.style == "anthropic":
            return b'event: ping\ndata: {"type": "ping"}\n\n'
        return b": keepalive\n\n"


CHAT = Dialect("chat", "/v1/chat/completions", "messages")
COMPLETIONS = Dialect("completions", "/v1/completions", "prompt", ids_items=True)
EMBEDDINGS = Dialect("embeddings", "/v1/embeddings", "input", ids_items=True)
RESPONSES = Dialect("responses", "/v1/responses", "input")
MESSAGES = Dialect("messages", "/v1/messages", "messages", style="anthropic")
DIALECTS: dict[str, Dialect] = {d.path: d for d in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES)}

OPENAI_ERRORS = {
    400: "invalid_request_error", 401: "invalid_request_error", 403: "invalid_request_error", 404: "invalid_request_error",
    413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 502: "server_error",
    503: "service_unavailable_error", 504: "server_error",
}  # fmt: skip
ANTHROPIC_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


@dataclass(slots=True)
class Usage:
    """Token counts as the engine reported them; None where it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


# Inside a JSON string every quote is escaped, so a key in quotes is never text that a model wrote.
_COUNTS = re.compile(
    rb'"(prompt_tokens|input_tokens|completion_tokens|output_tokens|cached_tokens|cache_read_input_tokens|'
    rb'cache_creation_input_tokens)"\s*:\s*(\d+)'
)


def scan_usage(data: bytes, usage: Usage) -> None:
    """Take the usage figures out of a response body or event without parsing the rest of it.

    Later figures replace earlier ones (Anthropic's message_delta is cumulative). Anthropic's `input_tokens` excludes what was
    read from or written to the cache; `Usage.prompt_tokens` is the whole prompt.
    """
    at = data.find(b'"usage"')
    if at < 0:
        return
    counts = dict(_COUNTS.findall(data, at))
    prompt = counts.get(b"prompt_tokens") or counts.get(b"input_tokens")
    if prompt is not None:
        usage.prompt_tokens = int(prompt)
        if (read := counts.get(b"cache_read_input_tokens")) is not None:
            usage.cached_tokens = int(read)
            usage.prompt_tokens += usage.cached_tokens + int(counts.get(b"cache_creation_input_tokens", 0))
        elif (cached := counts.get(b"cached_tokens")) is not None:
            usage.cached_tokens = int(cached)
    completion = counts.get(b"completion_tokens") or counts.get(b"output_tokens")
    if completion is not None:
        usage.completion_tokens = int(completion)
