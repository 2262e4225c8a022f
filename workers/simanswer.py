"""What the simulated engine answers: code-like text seeded from the prompt, or a call of one of the tools offered."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson

from workers.simprompt import BYTES_PER_TOKEN, content_text, tool_call_text

# Four characters each, so that a token of text is one of them.
_WORDS = (
    "def  len( self .run (x): \n    if x in y:\n for  i in  row: \n  + retu rn x == 0 None True data [key ] =  path .get () \n imp ort  "
    "from cls. args , ** kw)\n with open (fn) as f read line try: exce pt E rais e V( str( int( list dict { }; \n\n# todo fix: test asse "
    "rt a != b and  or c not  lamb da:  yiel d n\n asyn c d= awai t x) "
)
_POOL_TOKENS = 16384
# A limit this high is a ceiling that clients set by habit (Claude Code: 128,000), not a wish.
_CEILING = 32_000
DEFAULT_OUTPUT_TOKENS = 128


@cache
def _pool() -> str:
    words = [_WORDS[i : i + BYTES_PER_TOKEN] for i in range(0, len(_WORDS) - BYTES_PER_TOKEN + 1, BYTES_PER_TOKEN)]
    return "".join(random.Random(0).choices(words, k=_POOL_TOKENS))


@dataclass(slots=True, frozen=True)
class ToolCall:
    """`arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Answer:
    """An answer of exactly `tokens` tokens; `reason` it ends for is stop, length or tool_calls."""

    __slots__ = ("_seed", "call", "reason", "tokens")

    def __init__(self, seed: int, tokens: int, reason: str, call: ToolCall | None = None) -> None:
        self._seed = seed
        self.call = call
        self.tokens = tokens
        self.reason = reason

    def text(self, start: int, stop: int) -> str:
        """The text of tokens `start` to `stop`."""
        pool = _pool()
        begin = (self._seed + start) % _POOL_TOKENS * BYTES_PER_TOKEN
        length = (stop - start) * BYTES_PER_TOKEN
        text = pool[begin : begin + length]
        while len(text) < length:
            text += pool[: length - len(text)]
        return text

    def rendered(self) -> bytes:
        """The answer as it will stand in the next turn's prompt."""
        if self.call is not None:
            return tool_call_text(self.call.name, self.call.arguments).encode()
        return self.text(0, self.tokens).encode()


def answer_to(path: str, body: dict[str, Any], seed: int, room: int) -> Answer:
    """The answer to a request; `seed` stands for its prompt, `room` is how many tokens still fit the context."""
    call = _tool_call(path, body, seed)
    if call is not None:
        tokens = -(-len(tool_call_text(call.name, call.arguments).encode()) // BYTES_PER_TOKEN)
        return Answer(seed, tokens, "tool_calls", call)
    limit = next((body[key] for key in ("max_completion_tokens", "max_output_tokens", "max_tokens") if body.get(key) is not None), None)
    if limit is None or limit >= _CEILING:
        return Answer(seed, min(DEFAULT_OUTPUT_TOKENS, room), "stop")
    return Answer(seed, min(limit, room), "length")


def _tool_call(path: str, body: dict[str, Any], seed: int) -> ToolCall | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if not tools or kind == "none" or path not in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        return None
    last = (body.get("input") if path == "/v1/responses" else body.get("messages")) or [{}]
    newest = {"role": "user", "content": last} if isinstance(last, str) else last[-1]
    if newest.get("role") == "assistant" or newest.get("type") in ("function_call", "reasoning"):
        return None
    functions = {}
    for tool in tools:
        function = tool.get("function", tool)
        if "name" in function:
            functions[function["name"]] = function
    if not functions:
        return None
    # Only the newest message counts: with the user's text in mind an agent would call tools for ever.
    if kind in (None, "auto") and not re.search(r"\bcall\b", _newest_text(newest)):
        return None
    name = next(iter(functions))
    if isinstance(choice, dict):
        name = choice.get("function", choice).get("name", name)
    function = functions.get(name, {})
    schema = function.get("parameters") or function.get("input_schema") or {}
    return ToolCall(f"call_{seed:016x}", name, orjson.dumps(_example(schema)).decode())


def _newest_text(message: dict[str, Any]) -> str:
    content = message.get("content", message.get("output"))
    if isinstance(content, list):
        # Results of Anthropic's tool_result blocks are one level down.
        return " ".join(content_text(part.get("content") if part.get("type") == "tool_result" else [part]) for part in content)
    return content_text(content)


def _example(schema: dict[str, Any]) -> Any:
    """A simple value that a JSON schema accepts."""
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: _example(properties.get(name, {})) for name in schema.get("required") or ()}
    return {"integer": 1, "number": 1.5, "boolean": True, "array": [], "null": None}.get(kind, "value")
