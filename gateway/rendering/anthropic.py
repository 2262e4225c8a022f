"""Anthropic Messages requests as the chat messages and tools that the engine makes of them."""

from __future__ import annotations

from typing import Any

from gateway.rendering.conversation import BILLING_HEADER, NotReproducible


def anthropic_messages(fields: dict[str, Any], merge_inline_system: bool) -> list[dict[str, Any]]:
    """System blocks and messages as chat messages. Raises NotReproducible.

    `merge_inline_system`: the chat template takes a system message only as the first, so those further on are put there too.
    """
    sent = fields.get("messages")
    if not isinstance(sent, list) or not all(isinstance(message, dict) for message in sent):
        raise NotReproducible("messages is not a list of objects")
    messages: list[dict[str, Any]] = []
    system = fields.get("system") or ""
    texts = [system] if isinstance(system, str) else _system_texts(system)
    if merge_inline_system:
        texts += [_inline_system(message) for message in sent if message.get("role") == "system"]
    if any(texts):
        messages.append({"role": "system", "content": "".join(texts)})
    for message in sent:
        role = message.get("role")
        content = message.get("content")
        if role == "system":
            if not merge_inline_system and (text := _inline_system(message)):
                messages.append({"role": "system", "content": text})
        elif role not in ("user", "assistant"):
            raise NotReproducible("a message is of neither user, assistant nor system")
        elif isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            _add(role, content, messages)
    return messages


def _system_texts(blocks: Any) -> list[str]:
    texts = [block["text"] for block in _blocks(blocks) if block.get("type") == "text" and block.get("text")]
    return [text for text in texts if not text.startswith(BILLING_HEADER)]


def _inline_system(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return "" if content.startswith(BILLING_HEADER) else content
    return "".join(_system_texts(content))


def _blocks(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise NotReproducible("content is neither text nor a list of blocks")
    for block in content:
        if block.get("type") in ("tool_addition", "tool_removal"):
            raise NotReproducible("tools are changed inside the conversation")
        if not isinstance(block.get("text"), str | None):
            raise NotReproducible("a block's text is not a string")
    return content


def _add(role: str, content: Any, messages: list[dict[str, Any]]) -> None:
    """Add one message; the results of tools in it become messages of their own before it."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in _blocks(content):
        kind = block.get("type")
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "thinking":
            if isinstance(block.get("thinking"), str):
                reasoning.append(block["thinking"])
        elif kind == "tool_use":
            function = {"arguments": block.get("input") or {}, "name": block.get("name") or ""}
            if not block.get("id"):
                raise NotReproducible("a tool call has no id")
            calls.append({"id": block["id"], "function": function, "type": "function"})
        elif kind == "tool_result":
            if role == "user":
                _add_result(block, messages)
            else:
                parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise NotReproducible("content is not only text (images, documents)")
    made: dict[str, Any] = {"role": role}
    if reasoning:
        made["reasoning"] = "".join(reasoning)
    if calls:
        made["tool_calls"] = calls
    if parts:
        made["content"] = parts[0]["text"] if len(parts) == 1 else parts
    elif role == "user":
        return
    messages.append(made)


def _add_result(block: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    content = block.get("content")
    texts: list[str] = []
    references: list[dict[str, Any]] = []
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        for item in content:
            kind = item.get("type") if isinstance(item, dict) else None
            if kind == "text":
                if not isinstance(text := item.get("text", ""), str):
                    raise NotReproducible("a block's text is not a string")
                texts.append(text)
            elif kind == "tool_reference":
                if name := item.get("tool_name") or item.get("name"):
                    references.append({"type": "tool_reference", "name": name})
            elif kind == "image":
                raise NotReproducible("content is not only text (images, documents)")
    call_id = block.get("tool_use_id") or ""
    messages.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})
    if references:
        messages.append({"role": "tool", "tool_call_id": call_id, "content": references})


def anthropic_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools with an input_schema as chat tools. Raises NotReproducible for those that Anthropic's servers run."""
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise NotReproducible("tools is not a list")
    made = []
    for tool in tools:
        schema = tool.get("input_schema") if isinstance(tool, dict) else None
        if not isinstance(schema, dict):
            raise NotReproducible("a tool has no input_schema")
        function = {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": schema if "type" in schema else {**schema, "type": "object"},
            "strict": tool.get("strict"),
            "defer_loading": tool.get("defer_loading"),
        }
        made.append({"type": "function", "function": function})
    return made


def reasoning_effort(fields: dict[str, Any], disabled_effort: str) -> str | None:
    """What the engine hands the template as reasoning effort; `disabled_effort` stands for thinking that is turned off."""
    config = fields.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    thinking = fields.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":
        effort = disabled_effort
    return effort
