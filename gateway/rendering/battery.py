"""Conversations on which two template engines must agree before the faster one is trusted with a chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.rendering.conversation import ContentFormat, JsonObject

_TEXTS = (
    "Hello",
    "",
    " \n\t padded \u00a0\u2028\n\n",
    "naïve İß ǆ 日本語 👩‍👩‍👧 e\u0301 \u200b",
    "<think>\nplan\n</think>\n\nanswer <b>&amp;</b> \"quoted\" 'single' \\ {{ x }} {% if y %}",
    "half a </think> thought\n<think>\nand another\n</think>",
    "<tool_call>\n{}\n</tool_call><|im_end|>\n<tool_response>x</tool_response>",
    "a\rb\r\nc\x00\x7f\n",
)
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"path": "a <b> & 'c' \"d\" \\ é 日本 👍\n\t", "empty": "", "yes": True, "no": False, "nothing": None},
    {"n": 7, "negative": -1, "big": 2**63, "huge": 10**30, "x": 1.0, "tiny": 1e-7, "large": 1e20, "pi": 3.14159},
    {"list": [1, "two", None, [True, {}]], "nested": {"b": {"a": 1.5}, "a": []}, "": "no name"},
)
_TOOLS: tuple[dict[str, Any], ...] = (
    {"name": "read", "description": "Reads é <file> & \"more\"\nlines", "parameters": {"type": "object", "properties": {
        "path": {"type": "string", "description": "where"}, "limit": {"type": ["integer", "null"], "default": None, "minimum": 0.5},
        "mode": {"enum": ["r", 1, True, None], "items": {"type": "string"}}}, "required": ["path"], "additionalProperties": False}},
    {"name": "now", "description": None, "parameters": None},
    {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}, "strict": True},
)  # fmt: skip


def conversations(form: ContentFormat, variables: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Contexts to render: each kind of message, text, argument and variable at least once, alone and together."""
    tools: list[JsonObject] = [_tool(tool) for tool in _TOOLS]
    turns = [*_turns(form)]
    whole = [message for turn in turns for message in turn]
    for messages in turns:
        yield _context(messages, None, True)
        yield _context(messages, tools, False)
    for messages in (whole[1:], whole[:-1]):
        yield _context(messages, tools[:1], True)
        yield _context(messages, None, False)
    yield _context(whole, [], True)
    yield _context([], None, True)
    yield {**_context(whole, tools, True), "documents": [{"title": "T é", "text": "<x>"}, {"title": "", "text": ""}]}
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    own = sorted(variables - {"messages", "tools", "documents", "add_generation_prompt", *named})
    for variable in (*own, None):
        for value in (True, False, "high", "none", 3, ["a"], {"k": "v"}) if variable else (None,):
            extra = {**named, variable: value} if variable else named
            for messages in (turns[4], turns[0]):  # with tool calls and without
                yield _context(messages, tools, True) | extra


def _context(messages: list[dict[str, Any]], tools: Any, prompt: bool) -> dict[str, Any]:
    return {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}


def _tool(function: dict[str, Any]) -> JsonObject:
    parameters = function["parameters"]
    made = JsonObject(function | {"parameters": JsonObject(parameters) if parameters is not None else None})
    return JsonObject(type="function", function=made)


def _turns(form: ContentFormat) -> Iterator[list[dict[str, Any]]]:
    def content(*texts: str) -> Any:
        return [{"type": "text", "text": text} for text in texts] if form == "openai" else "\n".join(texts)

    def user(text: str) -> dict[str, Any]:
        return {"role": "user", "content": content(text)}

    def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": f"call_{number}é", "function": {"arguments": JsonObject(arguments), "name": "read"}, "type": "function"}

    for text in _TEXTS:
        yield [{"role": "system", "content": content(text)}, user(text)]
        thought = {"reasoning": text, "reasoning_content": text}
        said = {"role": "assistant", "content": content(text)}
        yield [user(text), said, user(text)]
        yield [user("q"), {**said, **thought}, user("again"), said]
        results: list[dict[str, Any]] = [{"role": "tool", "content": text, "tool_call_id": "call_0é"}, {"role": "tool", "content": "2nd"}]
        calls = [call(0, {"a": text}), call(1, {})]
        yield [user("q"), {**said, "tool_calls": calls, **thought}, *results]
        yield [user("q"), {"role": "assistant", "content": content(), "tool_calls": calls[:1]}, *results[:1], user(text)]
        yield [{"role": "developer", "content": content(text), "tools": None}, {**user(text), "name": "bob"}]
    for arguments in _ARGUMENTS:
        called = {"role": "assistant", "content": content(), "tool_calls": [call(0, arguments), call(1, arguments)]}
        result = {"role": "tool", "content": "r", "tool_call_id": "call_0é", "name": "read"}
        yield [user("q"), called, result, {"role": "assistant", "content": content("done")}]
    yield [user("q"), {"role": "assistant", "content": content()}, user("two"), user("in a row")]
    yield [{"role": "assistant", "content": content("first")}, user("then")]
    yield [{"role": "user", "content": content("two", "parts")}, {"role": "system", "content": content("late")}, user("x")]
    yield [{"role": "tool", "content": "a result without a call", "tool_call_id": "1"}]
    yield [{"role": "critic", "content": content("a role of its own"), "task": "t"}]
