"""Which session a request belongs to, with no change to the client: the headers and fields that agents already send.

Precedence: the gateway's own header, the client's native one, `prompt_cache_key`, `metadata.user_id`, W3C baggage. All of it
is client-supplied and forgeable, so the key always carries the caller's credentials: a session never crosses them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

# In order. Claude Code, OpenCode, Codex, generic, LiteLLM's and Bifrost's.
SESSION_HEADERS = (
    b"x-warmroute-session", b"x-claude-code-session-id", b"x-opencode-session-id", b"thread-id", b"session-id",
    b"x-session-affinity", b"x-session-id", b"x-litellm-session-id", b"x-bf-session-id",
)  # fmt: skip
AGENT_HEADER = b"x-claude-code-agent-id"
_BAGGAGE = re.compile(rb"(?:^|,)\s*session\.id=([^,;\s]+)")
_MAX_KEY = 256


def session_key(headers: Mapping[bytes, bytes], fields: Mapping[str, Any]) -> Hashable | None:
    """A key for the client's session, or None where it names none."""
    named: bytes | str | None = None
    for header in SESSION_HEADERS:
        if named := headers.get(header):
            break
    if not named:
        if isinstance(cache_key := fields.get("prompt_cache_key"), str) and cache_key:
            named = cache_key
        elif isinstance(metadata := fields.get("metadata"), dict):
            named = _from_user_id(metadata.get("user_id"))
    if not named and b"baggage" in headers and (found := _BAGGAGE.search(headers[b"baggage"])):
        named = found.group(1)
    if not named:
        return None
    credentials = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
    return xxh3_64_intdigest(credentials), named[:_MAX_KEY], headers.get(AGENT_HEADER, b"")[:_MAX_KEY]


def _from_user_id(user_id: Any) -> str | None:
    """Claude Code puts a JSON string into `metadata.user_id`; other clients put a plain user id there, which is no session."""
    if not isinstance(user_id, str) or not user_id.startswith("{"):
        return None
    try:
        session = orjson.loads(user_id).get("session_id")
    except (orjson.JSONDecodeError, AttributeError):
        return None
    return session if isinstance(session, str) else None
