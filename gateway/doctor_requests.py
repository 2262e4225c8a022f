"""What `warmroute doctor` compares: a request of every shape that prompts come in, and those of a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from gateway.dialects import CHAT, COMPLETIONS, DIALECTS, MESSAGES, RESPONSES, Dialect

_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "default": None}, "mode": {"enum": ["r", 1, True]}},
    "required": ["path"],
}
_FUNCTIONS: list[dict[str, Any]] = [{"name": "read", "description": "Reads a <file> & \"more\" é", "parameters": _SCHEMA}, {"name": "now"}]
_TOOLS = [{"type": "function", "function": function} for function in _FUNCTIONS]
_ARGUMENTS = '{"path": "é <b>", "n": 1.0, "deep": {"x": [null, true]}}'
_CALL = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": _ARGUMENTS}}
_CODE = "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n"
_TEXTS = {
    "plain": "Hello, world!", "unicode": "naïve e\u0301 日本語 \u00a0\u2028 ﬁ", "emoji": "🎉 👩‍👩‍👧 ✨", "code": _CODE,
    "white space": " \n\n\t  x  \r\n",
    "special tokens": "<|im_end|><|im_start|>system\n<s></s><|eot_id|><think>x</think>", "digits": "1234567890 3.14e-7", "empty": "",
}  # fmt: skip


def battery() -> Iterator[tuple[str, Dialect, dict[str, Any]]]:
    """(name, dialect, fields) of requests with every shape that prompts come in."""
    for name, text in _TEXTS.items():
        if text:
            yield f"prompt: {name}", COMPLETIONS, {"prompt": text, "max_tokens": 1}
        yield f"chat: {name}", CHAT, {"messages": [_user(text)]}
    said = {"role": "assistant", "content": "I think so."}
    called = [_user("Read it."), {"role": "assistant", "content": None, "tool_calls": [_CALL]}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": _CODE}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chats: dict[str, dict[str, Any]] = {
        "system and turns": {"messages": [{"role": "system", "content": "Be brief."}, _user("a"), said, _user("b")]},
        "tools": {"messages": [_user("hi")], "tools": _TOOLS},
        "tool call and result": {"messages": [*called, result], "tools": _TOOLS},
        "result in parts": {"messages": [*called, {**result, "content": parts}], "tools": _TOOLS},
        "several parts": {"messages": [_user(parts)]},
        "empty answer": {"messages": [_user("a"), {"role": "assistant", "content": ""}, _user("b")]},
        "thinking": {"messages": [_user("a"), {**said, "reasoning": "hm"}, _user("b")]},
        "thinking off": {"messages": [_user("a")], "chat_template_kwargs": {"enable_thinking": False}},
        "developer": {"messages": [{"role": "developer", "content": "Be brief."}, _user("a")]},
        "prefilled answer": {"messages": [_user("a"), said], "add_generation_prompt": False, "continue_final_message": True},
    }
    for name, fields in chats.items():
        yield f"chat: {name}", CHAT, fields
    flat = [{"type": "function", "strict": False, "parameters": {"type": "object"}, **function} for function in _FUNCTIONS]
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Read it."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": _CODE},
    ]
    yield "responses: text", RESPONSES, {"input": "Hello", "instructions": "Be brief."}
    yield "responses: items and tools", RESPONSES, {"input": items, "tools": flat, "instructions": "Be brief."}
    schemas = [{"name": "read", "description": "Reads é", "input_schema": _SCHEMA}]
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    outcome = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": _CODE}]}
    blocks = [
        _user([{"type": "text", "text": "Read it.", "cache_control": {"type": "ephemeral"}}]),
        {"role": "assistant", "content": [thought, {"type": "tool_use", "id": "t", "name": "read", "input": {"path": "é"}}]},
        _user([outcome, {"type": "text", "text": "Well?"}]),
    ]
    system = [{"type": "text", "text": "Be brief."}]
    yield "messages: text", MESSAGES, {"max_tokens": 16, "system": "Be brief.", "messages": [_user("Hello")]}
    yield "messages: blocks and tools", MESSAGES, {"max_tokens": 16, "system": system, "messages": blocks, "tools": schemas}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def read_trace(path: Path) -> Iterator[tuple[str, Dialect, dict[str, Any]]]:
    """Requests from a file: one JSON body a line, or an object with its path and body. Raises click.UsageError."""
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise click.UsageError(f"{path}:{number}: not valid JSON: {error}") from None
        if not isinstance(entry, dict):
            raise click.UsageError(f"{path}:{number}: must be a JSON object")
        body = entry.get("body", entry)
        guessed = RESPONSES.path if "input" in body else COMPLETIONS.path if "prompt" in body else CHAT.path
        dialect = DIALECTS.get(entry.get("path", guessed))
        if dialect is None:
            raise click.UsageError(f"{path}:{number}: path must be one of {', '.join(DIALECTS)}")
        yield f"{path.name}:{number}", dialect, body
