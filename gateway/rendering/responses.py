"""Responses requests as the chat messages and tools that the engine makes of them."""

from __future__ import annotations

import json
from typing import Any

from gateway.rendering.conversation import NotReproducible


def responses_messages(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Instructions and input items as chat messages. Raises NotReproducible."""
    for stored in ("previous_response_id", "prompt", "previous_input_messages"):
        if fields.get(stored) is not None:
            raise NotReproducible(f"{stored}: the conversation is not all in the request")
    messages: list[dict[str, Any]] = []
    if instructions := fields.get("instructions"):
        messages.append({"role": "system", "content": instructions})
    items = fields.get("input")
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
        return messages
    if not isinstance(items, list):
        raise NotReproducible("input is neither text nor a list of items")
    own: list[dict[str, Any]] = []
    for item in items:
        if not isinstance(item, dict):
            raise NotReproducible("an input item is not an object")
        _add(item, own)
    return messages + own


def continues_final_message(fields: dict[str, Any]) -> bool:
    """Whether the last item is an unfinished message of the model, which the engine goes on with."""
    items = fields.get("input")
    if not isinstance(items, list) or not items or not isinstance(items[-1], dict):
        return False
    return items[-1].get("type", "message") in ("message", "reasoning") and items[-1].get("status") in ("in_progress", "incomplete")


def _add(item: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add an item: what the model said in one turn (reasoning, text, calls) comes as several items and becomes one message."""
    kind = item.get("type", "message")
    previous = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if kind in ("function_call", "custom_tool_call"):
        call = _call(item)
        if previous is None:
            messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            previous["tool_calls"] = [*(previous.get("tool_calls") or ()), call]
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        _say(messages, previous, "reasoning", _reasoning(item))
    elif kind == "message" and item.get("role") == "assistant":
        content = item.get("content")
        if isinstance(content, list) and content:
            # the engine takes the first part alone
            content = content[0].get("text") if isinstance(content[0], dict) else None
            if not isinstance(content, str):
                raise NotReproducible("an assistant message's content is not text")
        if isinstance(content, str):
            _say(messages, previous, "content", content)
        else:
            messages.append(dict(item))
    elif isinstance(item.get("role"), str):
        messages.append(dict(item))
    else:
        raise NotReproducible("an input item of a kind that engines do not render")


def _say(messages: list[dict[str, Any]], previous: dict[str, Any] | None, key: str, text: str) -> None:
    if previous is not None and previous.get(key) is None:
        previous[key] = text
    else:
        messages.append({"role": "assistant", key: text})


def _call(item: dict[str, Any]) -> dict[str, Any]:
    name = item.get("name")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        arguments = item.get("arguments") or ""
        if namespace := item.get("namespace"):
            name = f"{namespace}__{name}"
    return {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}, "type": "function"}


def _reasoning(item: dict[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise NotReproducible("encrypted reasoning")
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts:
            if not isinstance(parts[0], dict) or not isinstance(parts[0].get("text"), str):
                raise NotReproducible("reasoning is not text")
            return parts[0]["text"]
    return ""


# --- tools ---


def responses_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Flat tools nested as chat tools; those that only a server could run are dropped, as engines do."""
    if not tools:
        return None
    if not isinstance(tools, list):
        raise NotReproducible("tools is not a list")
    nested: list[dict[str, Any]] = []
    for tool in tools:
        if not isinstance(tool, dict):
            raise NotReproducible("a tool is not an object")
        kind = tool.get("type")
        if kind == "function":
            nested.append(_nested(tool, tool.get("name")))
        elif kind == "custom":
            nested.append(_nested({**tool, "parameters": _FREEFORM}, tool.get("name")))
        elif kind == "namespace":
            inner = tool.get("tools")
            if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
                raise NotReproducible("a namespace of tools is not a list of objects")
            nested += [_nested(one, f"{tool.get('name')}__{one.get('name')}") for one in inner if one.get("type") == "function"]
    return nested


# What engines show a model in place of a tool that takes free text.
_FREEFORM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def _nested(tool: dict[str, Any], name: Any) -> dict[str, Any]:
    function = {key: tool.get(key) for key in ("description", "parameters", "strict", "defer_loading")}
    return {"type": "function", "function": {"name": name, **function}}
