"""Chat messages and tools as an engine hands them to the chat template: the same keys, in the same order, with the same defaults."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any, Literal

import orjson
from xxhash import xxh3_128_intdigest

from gateway.rendering.memory import RUN, RecentlyUsed

ContentFormat = Literal["string", "openai"]

# Claude Code's first system line, which engines drop because it changes with every request.
BILLING_HEADER = "x-anthropic-billing-header"


class NotReproducible(Exception):
    """The prompt that an engine makes of a request cannot be told here; the reason is short and holds nothing of the request."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class JsonObject(dict[str, Any]):
    """An object that templates print as JSON, turn after turn: it remembers its text."""

    __slots__ = ("printed",)

    printed: tuple[Any, str]

    def dump(self, **options: Any) -> str:
        """The text, with these options of `json.dumps`."""
        try:
            known, text = self.printed
            if known == options:
                return text
        except AttributeError:
            pass
        text = json.dumps(self, **options)
        self.printed = options, text
        return text


class Conversation(list[dict[str, Any]]):
    """Messages as the template gets them. `keys` stand for what each was made of, None where that cannot be told.

    The keys are not in the messages: minijinja walks over plain dictionaries three times faster than over those of a subclass.
    """

    __slots__ = ("keys",)

    keys: list[int | None]

    def __init__(self, messages: Iterable[dict[str, Any]] = (), keys: Iterable[int | None] = ()):
        super().__init__(messages)
        self.keys = [*keys]


class Tools(list[JsonObject]):
    """Tools as the template gets them. `key` stands for what they were made of, None where that cannot be told."""

    __slots__ = ("key",)

    key: int | None


def template_tools(tools: list[Any], memory: RecentlyUsed) -> Tools:
    """Chat tools as the template gets them. Raises NotReproducible."""
    key, size = _key(tools, _SEED - 1)
    known: Tools | None = memory.get(key)
    if known is None:
        known = Tools(map(_tool, tools))
        known.key = key
        if key is not None:
            memory.put(key, known, 6 * size + 1000)  # the objects and their text
    return known


_SEED = 1 + secrets.randbits(62)  # nobody can choose messages whose keys are equal


def _key(value: Any, seed: int) -> tuple[int | None, int]:
    """A digest of a JSON value, the order of its keys included, and its length in bytes."""
    try:
        data = orjson.dumps(value)
    except (orjson.JSONEncodeError, RecursionError):  # lone surrogates, integers beyond 64 bits
        return None, 0
    return xxh3_128_intdigest(data, seed), len(data)


def _arguments(value: Any) -> JsonObject:
    """The arguments of a tool call, sent as a JSON text or as an object; {} for what is no object, as engines have it."""
    if isinstance(value, str):
        return JsonObject(_object(value)) if value else JsonObject()
    return JsonObject(value) if isinstance(value, dict) else JsonObject()


def _object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)  # not orjson: it turns integers beyond 64 bits into floats and refuses NaN
    except json.JSONDecodeError:
        return {}
    except RecursionError:
        raise NotReproducible("tool call arguments are nested too deep") from None
    return parsed if isinstance(parsed, dict) else {}


def _tool(tool: Any) -> JsonObject:
    """A tool as the engine's model dumps it: known keys in its order, absent ones null, `strict` and `defer_loading` only if set."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function" or not isinstance(function.get("name"), str):
        raise NotReproducible("a tool is not a function")
    parameters = function.get("parameters")
    if isinstance(parameters, dict):
        parameters = JsonObject(parameters)
    dumped = JsonObject(name=function["name"], description=function.get("description"), parameters=parameters)
    outer = tool.get("defer_loading")
    deferred = function.get("defer_loading")
    for key, value in (("strict", function.get("strict")), ("defer_loading", outer if deferred is None else deferred)):
        if value is not None:
            dumped[key] = _flag(value)
    made = JsonObject(type="function", function=dumped)
    if outer is not None:
        made["defer_loading"] = _flag(outer)
    return made


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise NotReproducible("a tool's flag is not a boolean")
    return value


# --- messages ---

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
# Keys of a content part that the engine takes out; all others reach templates that get parts.
_PART_KEYS = frozenset((
    "audio_embeds", "audio_url", "closed", "data", "file", "image_embeds", "image_pil", "image_url", "input_audio", "name",
    "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid", "video_embeds", "video_url",
))  # fmt: skip


def conversation(messages: list[Any], content_format: ContentFormat, memory: RecentlyUsed, *, as_sent: bool = True) -> Conversation:
    """Messages as the template gets them, those of earlier turns from `memory`; not to be changed. Raises NotReproducible.

    `as_sent` is false for messages that were made from another dialect's items, whose tool calls keep the order they have.
    """
    wrap = content_format == "openai"
    seed = _SEED + 2 * wrap + as_sent
    normalised = Conversation()
    for at in range(0, len(messages), RUN):
        run = messages[at : at + RUN]
        run_key, run_size = _key(run, seed + 4) if len(run) == RUN else (None, 0)
        made: Conversation | None = memory.get(run_key)
        if made is None:
            made = Conversation()
            for message in run:
                key, size = _key(message, seed)
                one = memory.get(key)
                if one is None:
                    one = _message(message, wrap, as_sent)
                    if key is not None:
                        memory.put(key, one, _cost(size, [one]))
                made.append(one)
                made.keys.append(key)
            if run_key is not None:
                memory.put(run_key, made, _cost(run_size, made))
        normalised += made
        normalised.keys += made.keys
    return normalised


def _cost(size: int, made: list[dict[str, Any]]) -> int:
    """Bytes of memory that messages take which are so long as JSON: texts, or objects of a few words each."""
    return (2 if all(type(message.get("content")) is str for message in made) else 6) * size + 1000 * len(made)


def _message(message: Any, wrap: bool, as_sent: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise NotReproducible("a message is not an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise NotReproducible("a message has no role")
    made: dict[str, Any] = {"role": role, "content": _content(role, message.get("content"), wrap)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            made["tool_calls"] = _tool_calls(calls, as_sent)
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            made["reasoning"] = made["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        made["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            made[name] = message[name]
    return made


def _content(role: str, content: Any, wrap: bool) -> str | list[dict[str, Any]]:
    """Content as one text, or as parts for templates that walk over parts (`wrap`); a tool's parts are joined nonetheless."""
    if content is None:
        content = []
    elif isinstance(content, str):
        content = [content]
    elif not isinstance(content, list):
        raise NotReproducible("a message's content is neither text nor parts")
    parts = [made for part in content if (made := _part(role, part)) is not None]
    if wrap and (role != "tool" or any(part["type"] != "text" for part in parts)):
        return parts
    texts = [part["name"] if part["type"] == "tool_reference" else part["text"] for part in parts]
    return "\n".join(texts if wrap else filter(None, texts))  # engines drop empty texts, but not on the way back from parts


def _part(role: str, part: Any) -> dict[str, Any] | None:
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    elif not isinstance(part, dict) or part.get("uuid") is not None:
        raise NotReproducible("a content part is of an unknown kind")
    kind = part.get("type")
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": "tool_reference", "name": part["name"]}
    key = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise NotReproducible("content is not only text (images, audio, files)")
    text = part.get(key)
    if text is None:
        return None
    if not isinstance(text, str):
        raise NotReproducible("a content part's text is not a string")
    if role == "system" and kind == "text" and text.startswith(BILLING_HEADER):
        text = text.partition("\n")[2]
        if not text:
            return None
    return {"type": "text", "text": text} | {name: value for name, value in part.items() if name not in _PART_KEYS}


def _tool_calls(calls: Any, as_sent: bool) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise NotReproducible("tool_calls is not a list")
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise NotReproducible("a tool call is not a function call")
        arguments = _arguments(function.get("arguments"))
        if as_sent:  # the engine's schema puts its own keys first
            ordered = {"arguments": arguments, "name": function.get("name")}
            if len(function) > 2:
                ordered |= {key: value for key, value in function.items() if key not in ordered}
            whole = {"id": call.get("id"), "function": ordered, "type": "function"}
            if len(call) > 3:
                whole |= {key: value for key, value in call.items() if key not in whole}
            made.append(whole)
        else:
            made.append({**call, "function": {**function, "arguments": arguments}})
    return made


def without_developer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Developer messages as system ones, all system messages as one at the begin: for templates that know no developer."""
    converted = []
    for message in messages:
        if message["role"] == "developer":
            message = {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        converted.append(message)
    systems = [message for message in converted if message["role"] == "system"]
    if not systems or (len(systems) == 1 and converted[0]["role"] == "system"):
        return converted
    texts = [_system_text(message["content"]) for message in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in converted if message["role"] != "system")]


def _system_text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
