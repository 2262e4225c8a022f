"""A request body as the simulated engine's token stream: rendered by a ChatML-like template, cut into hashed KV blocks.

An engine of its own: it shares no code with the index, so that a mistake in either shows as a difference between predicted and
reported hits. A token is a fixed number of bytes (4 by default), which is about what tokenizers reach on code.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import orjson
import xxhash

BYTES_PER_TOKEN = 4

_START = "<|im_start|>"
_END = "<|im_end|>\n"
# Fields that steer caching on other engines; they are not part of the prompt.
_MARKERS = frozenset({"cache_control", "prompt_cache_breakpoint"})


class PromptError(ValueError):
    """The body has no prompt that could be rendered; the message says what is wrong with it."""


class _Template:
    """Collects turns: `<|im_start|>role\\n` text `<|im_end|>\\n`."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.role = ""

    def turn(self, role: str, text: str) -> None:
        self.close()
        self.pieces += (_START, role, "\n", text)
        self.role = role

    def go_on(self, role: str, text: str) -> None:
        """Append to the turn before if it has the same role."""
        if self.role == role:
            self.pieces.append(text)
        else:
            self.turn(role, text)

    def close(self) -> None:
        if self.role:
            self.pieces.append(_END)
            self.role = ""

    def tools(self, tools: Any) -> None:
        if tools:
            self.turn("system", "# Tools\n" + "\n".join(_dumps(_unmarked(tool)) for tool in _objects(tools, "tools")))

    def render(self) -> bytes:
        """The whole prompt, ending where the assistant's answer begins."""
        self.close()
        self.pieces += (_START, "assistant\n")
        return "".join(self.pieces).encode()


def render_chat(body: dict[str, Any]) -> bytes:
    """The prompt of a /v1/chat/completions body."""
    template = _Template()
    template.tools(body.get("tools"))
    for message in _objects(body.get("messages"), "messages"):
        role = message.get("role")
        text = content_text(message.get("content"))
        if role == "assistant":
            text = _thought(message.get("reasoning") or message.get("reasoning_content")) + text
            for call in message.get("tool_calls") or ():
                function = call.get("function") or {}
                text += tool_call_text(str(function.get("name", "")), function.get("arguments", ""))
        template.turn("system" if role == "developer" else str(role), text)
    return template.render()


def render_responses(body: dict[str, Any]) -> bytes:
    """The prompt of a /v1/responses body. Items of one assistant turn (reasoning, text, calls) become one turn, as in chat."""
    template = _Template()
    template.tools(body.get("tools"))
    if body.get("instructions"):
        template.turn("system", str(body["instructions"]))
    given = body.get("input")
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else _objects(given, "input"):
        kind = item.get("type", "message")
        if kind == "message":
            role = str(item.get("role"))
            text = content_text(item.get("content"))
            if role == "assistant":
                template.go_on("assistant", text)
            else:
                template.turn("system" if role == "developer" else role, text)
        elif kind == "function_call":
            template.go_on("assistant", tool_call_text(str(item.get("name", "")), item.get("arguments", "")))
        elif kind == "function_call_output":
            template.turn("tool", content_text(item.get("output")))
        elif kind == "reasoning":
            template.go_on("assistant", _thought(content_text(item.get("content") or item.get("summary"))))
        else:
            template.turn("user", _dumps(_unmarked(item)))
    return template.render()


def render_messages(body: dict[str, Any]) -> bytes:
    """The prompt of a /v1/messages body."""
    template = _Template()
    template.tools(body.get("tools"))
    if body.get("system"):
        template.turn("system", content_text(body["system"]))
    for message in _objects(body.get("messages"), "messages"):
        role, content = str(message.get("role")), message.get("content")
        if isinstance(content, str):
            template.turn(role, content)
            continue
        template.close()
        for block in _objects(content, "content"):
            kind = block.get("type")
            if kind == "tool_result":
                template.turn("tool", content_text(block.get("content")))
            elif kind == "tool_use":
                template.go_on(role, tool_call_text(str(block.get("name", "")), block.get("input", {})))
            elif kind == "thinking":
                template.go_on(role, _thought(block.get("thinking")))
            else:
                template.go_on(role, content_text([block]))
    return template.render()


def render_completion(body: dict[str, Any]) -> bytes:
    """The prompt of a /v1/completions body: text, or token ids at four bytes each."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    return _text_or_tokens(prompt, "prompt")


def render_embedding(body: dict[str, Any]) -> bytes:
    """The inputs of a /v1/embeddings body, one after the other."""
    return b"".join(_text_or_tokens(text, "input") for text in embedding_inputs(body))


def embedding_inputs(body: dict[str, Any]) -> list[Any]:
    """The inputs of a /v1/embeddings body, each of which gets a vector."""
    given = body.get("input")
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        return given
    return [given]


RENDERERS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "/v1/chat/completions": render_chat,
    "/v1/responses": render_responses,
    "/v1/messages": render_messages,
    "/v1/completions": render_completion,
    "/v1/embeddings": render_embedding,
}


def content_text(content: Any) -> str:
    """A message's content as text: a string and a list of text parts with the same text are equal; other parts count by their JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in _objects(content, "content"):
        text = part.get("text")
        texts.append(text if isinstance(text, str) else _dumps(_unmarked(part)))
    return "".join(texts)


def tool_call_text(name: str, arguments: Any) -> str:
    """A tool call as the model writes it; `arguments` is JSON text or the object itself."""
    text = arguments if isinstance(arguments, str) else _dumps(arguments)
    return f'<tool_call>\n{{"name": {_dumps(name)}, "arguments": {text}}}\n</tool_call>'


def block_hashes(stream: bytes, block_bytes: int, parent: int = 0) -> list[int]:
    """Cumulative hashes of the stream's full blocks: xxh3-64 of the block's bytes, seeded with its parent's hash."""
    digest = xxhash.xxh3_64_intdigest
    full = len(stream) // block_bytes * block_bytes
    # Cut into blocks by struct: half the time of slicing, and a prompt can have tens of thousands.
    return [parent := digest(block, parent) for (block,) in struct.iter_unpack(f"{block_bytes}s", memoryview(stream)[:full])]


def _text_or_tokens(prompt: Any, field: str) -> bytes:
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and 0 <= token < 1 << 32 for token in prompt):
        return struct.pack(f"<{len(prompt)}I", *prompt)
    raise PromptError(f"{field} must be text or a list of token ids")


def _thought(text: Any) -> str:
    return f"<think>\n{text}\n</think>\n\n" if text else ""


def _objects(value: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise PromptError(f"{field} must be a list with at least one element")
    for element in value:
        if not isinstance(element, dict):
            raise PromptError(f"{field} must hold objects")
    return value


def _unmarked(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items() if key not in _MARKERS}


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
