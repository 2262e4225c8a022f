"""How the simulated engine words its answers: one class per dialect, each with its stream's events and its whole body."""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from typing import Any

import orjson

from workers.simanswer import Answer


@dataclass(slots=True)
class Usage:
    """Tokens of one request; `prompt` includes the `cached` ones."""

    prompt: int
    cached: int = 0
    completion: int = 0


def _event(data: Any, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


class Dialect:
    """One answer being worded. A stream is `begin`, then `text` or `call` fragments, then `end`; otherwise it is one `body`."""

    def __init__(self, id: str, created: int, model: str, answer: Answer) -> None:
        self.id = id
        self.created = created
        self.model = model
        self.answer = answer

    def begin(self, usage: Usage) -> bytes:
        """Events that come with the first token."""
        raise NotImplementedError

    def text(self, fragment: str) -> bytes:
        """The event of a piece of text."""
        raise NotImplementedError

    def arguments(self, fragment: str) -> bytes:
        """The event of a piece of a tool call's arguments."""
        raise NotImplementedError

    def end(self, usage: Usage) -> bytes:
        """Events that come after the last token."""
        raise NotImplementedError

    def body(self, usage: Usage) -> bytes:
        """The answer whole."""
        raise NotImplementedError

    def _whole_text(self) -> str:
        return self.answer.text(0, self.answer.tokens)


class Chat(Dialect):
    """/v1/chat/completions"""

    def __init__(self, id: str, created: int, model: str, answer: Answer, include_usage: bool) -> None:
        super().__init__(id, created, model, answer)
        self.include_usage = include_usage
        empty = self._chunk({"content": "\0"})
        self._before, self._after = empty.split(orjson.dumps("\0"))

    def begin(self, usage: Usage) -> bytes:
        start = self._chunk({"role": "assistant", "content": ""})
        call = self.answer.call
        if call is None:
            return start
        head = {"index": 0, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        return start + self._chunk({"tool_calls": [head]})

    def text(self, fragment: str) -> bytes:
        return self._before + orjson.dumps(fragment) + self._after

    def arguments(self, fragment: str) -> bytes:
        return self._chunk({"tool_calls": [{"index": 0, "function": {"arguments": fragment}}]})

    def end(self, usage: Usage) -> bytes:
        last = self._chunk({}, self.answer.reason)
        if self.include_usage:
            last += _event(self._head("chat.completion.chunk") | {"choices": [], "usage": _openai_usage(usage)})
        return last + b"data: [DONE]\n\n"

    def body(self, usage: Usage) -> bytes:
        call = self.answer.call
        message: dict[str, Any] = {"role": "assistant", "content": None if call else self._whole_text(), "refusal": None}
        message["tool_calls"] = (
            [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}] if call else []
        )
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.answer.reason}
        return orjson.dumps(self._head("chat.completion") | {"choices": [choice], "usage": _openai_usage(usage)})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _event(self._head("chat.completion.chunk") | {"choices": [choice]})


class Completion(Dialect):
    """/v1/completions"""

    def __init__(self, id: str, created: int, model: str, answer: Answer, include_usage: bool) -> None:
        super().__init__(id, created, model, answer)
        self.include_usage = include_usage
        self._before, self._after = _event(self._choice("\0", None)).split(orjson.dumps("\0"))

    def begin(self, usage: Usage) -> bytes:
        return b""

    def text(self, fragment: str) -> bytes:
        return self._before + orjson.dumps(fragment) + self._after

    def end(self, usage: Usage) -> bytes:
        last = _event(self._choice("", self.answer.reason))
        if self.include_usage:
            last += _event(self._choice("", None) | {"choices": [], "usage": _openai_usage(usage)})
        return last + b"data: [DONE]\n\n"

    def body(self, usage: Usage) -> bytes:
        return orjson.dumps(self._choice(self._whole_text(), self.answer.reason) | {"usage": _openai_usage(usage)})

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        return {
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}],
        }  # fmt: skip


class Responses(Dialect):
    """/v1/responses"""

    def __init__(self, id: str, created: int, model: str, answer: Answer) -> None:
        super().__init__(id, created, model, answer)
        self.item_id = ("fc_" if answer.call else "msg_") + id.removeprefix("resp_")
        self._sequence = 0

    def begin(self, usage: Usage) -> bytes:
        started = self._response("in_progress", [], None)
        events = self._event("response.created", response=started) + self._event("response.in_progress", response=started)
        events += self._event("response.output_item.added", output_index=0, item=self._item("in_progress", ""))
        if self.answer.call is None:
            events += self._event("response.content_part.added", **self._place, part=self._part(""))
        return events

    def text(self, fragment: str) -> bytes:
        return self._event("response.output_text.delta", **self._place, delta=fragment, logprobs=[])

    def arguments(self, fragment: str) -> bytes:
        return self._event("response.function_call_arguments.delta", item_id=self.item_id, output_index=0, delta=fragment)

    def end(self, usage: Usage) -> bytes:
        call = self.answer.call
        if call is not None:
            events = self._event(
                "response.function_call_arguments.done", item_id=self.item_id, output_index=0, name=call.name, arguments=call.arguments
            )
            item = self._item("completed", call.arguments)
        else:
            text = self._whole_text()
            events = self._event("response.output_text.done", **self._place, text=text, logprobs=[])
            events += self._event("response.content_part.done", **self._place, part=self._part(text))
            item = self._item("completed", text)
        events += self._event("response.output_item.done", output_index=0, item=item)
        return events + self._event("response.completed", response=self._response(self._status, [item], usage))

    def body(self, usage: Usage) -> bytes:
        item = self._item("completed", self.answer.call.arguments if self.answer.call else self._whole_text())
        return orjson.dumps(self._response(self._status, [item], usage))

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    @property
    def _status(self) -> str:
        return "incomplete" if self.answer.reason == "length" else "completed"

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return _event(event, kind)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: str, text: str) -> dict[str, Any]:
        call = self.answer.call
        if call is not None:
            return {"id": self.item_id, "type": "function_call", "status": status, "call_id": call.id, "name": call.name, "arguments": text}
        content = [self._part(text)] if status == "completed" else []
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        counts = None
        if usage is not None:
            counts = {
                "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt + usage.completion,
            }  # fmt: skip
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model, "output": output,
            "error": None, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0,
            "tool_choice": "auto", "tools": [], "usage": counts,
        }  # fmt: skip


class Messages(Dialect):
    """/v1/messages"""

    def begin(self, usage: Usage) -> bytes:
        message = self._message([], None, {"input_tokens": usage.prompt, "output_tokens": 0})
        events = _event({"type": "message_start", "message": message}, "message_start")
        call = self.answer.call
        block: dict[str, Any] = {"type": "text", "text": ""} if call is None else self._tool_use({})
        return events + _event({"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start")

    def text(self, fragment: str) -> bytes:
        return self._delta({"type": "text_delta", "text": fragment})

    def arguments(self, fragment: str) -> bytes:
        return self._delta({"type": "input_json_delta", "partial_json": fragment})

    def end(self, usage: Usage) -> bytes:
        stop = {"stop_reason": self._reason, "stop_sequence": None}
        return (
            _event({"type": "content_block_stop", "index": 0}, "content_block_stop")
            + _event({"type": "message_delta", "delta": stop, "usage": self._usage(usage)}, "message_delta")
            + _event({"type": "message_stop"}, "message_stop")
        )

    def body(self, usage: Usage) -> bytes:
        call = self.answer.call
        block = {"type": "text", "text": self._whole_text()} if call is None else self._tool_use(orjson.loads(call.arguments))
        return orjson.dumps(self._message([block], self._reason, self._usage(usage)))

    @property
    def _reason(self) -> str:
        return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[self.answer.reason]

    def _tool_use(self, arguments: dict[str, Any]) -> dict[str, Any]:
        call = self.answer.call
        assert call is not None
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")

    def _usage(self, usage: Usage) -> dict[str, int]:
        return {
            "input_tokens": usage.prompt - usage.cached, "output_tokens": usage.completion,
            "cache_read_input_tokens": usage.cached, "cache_creation_input_tokens": 0,
        }  # fmt: skip

    def _message(self, content: list[dict[str, Any]], reason: str | None, usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": None, "usage": usage,
        }  # fmt: skip


class Embeddings(Dialect):
    """/v1/embeddings, with small vectors that depend on the prompt."""

    def __init__(self, id: str, created: int, model: str, answer: Answer, vectors: int, seed: int, encoded: bool) -> None:
        super().__init__(id, created, model, answer)
        self._vectors = vectors
        self._seed = seed
        self._encoded = encoded

    def body(self, usage: Usage) -> bytes:
        data = []
        for index in range(self._vectors):
            vector = [((self._seed >> shift) + index) % 256 / 256 for shift in range(0, 64, 8)]
            encoded = base64.b64encode(struct.pack("<8f", *vector)).decode()
            data.append({"object": "embedding", "index": index, "embedding": encoded if self._encoded else vector})
        counts = _openai_usage(Usage(usage.prompt, usage.cached))
        return orjson.dumps({"id": self.id, "object": "list", "model": self.model, "data": data, "usage": counts})


def dialect_for(path: str, body: dict[str, Any], id: str, created: int, model: str, answer: Answer, vectors: int, seed: int) -> Dialect:
    """The wording of an answer on the route `path`; `id` is bare, each dialect has its own prefix."""
    include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    if path == "/v1/chat/completions":
        return Chat("chatcmpl-" + id, created, model, answer, include_usage)
    if path == "/v1/completions":
        return Completion("cmpl-" + id, created, model, answer, include_usage)
    if path == "/v1/responses":
        return Responses("resp_" + id, created, model, answer)
    if path == "/v1/messages":
        return Messages("msg_" + id, created, model, answer)
    return Embeddings("embd-" + id, created, model, answer, vectors, seed, body.get("encoding_format") == "base64")


def error_body(path: str, status: int, message: str, code: str | None = None, param: str | None = None) -> bytes:
    """An error in the shape that clients of the route expect."""
    kinds = {400: "invalid_request_error", 404: "not_found_error", 429: "rate_limit_error", 503: "overloaded_error"}
    if path.startswith("/v1/messages"):
        return orjson.dumps({"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": message}})
    kind = kinds.get(status, "server_error")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _openai_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt, "total_tokens": usage.prompt + usage.completion, "completion_tokens": usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }  # fmt: skip
