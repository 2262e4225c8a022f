"""Which session a request belongs to."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.session_key import SESSION_HEADERS, session_key
from tests.gateway.spoken import CHAT
from tests.stack import WorkerRequest, gateway_with

CLAUDE_CODE = {"metadata": {"user_id": orjson.dumps({"device_id": "d", "account_uuid": "", "session_id": "cc"}).decode()}}


@pytest.mark.parametrize(
    ("headers", "fields", "named"),
    [
        ({b"x-warmroute-session": b"w", b"x-claude-code-session-id": b"c"}, {"prompt_cache_key": "p"}, b"w"),
        ({b"x-claude-code-session-id": b"c"}, {"prompt_cache_key": "p"}, b"c"),
        ({b"thread-id": b"t", b"session-id": b"s"}, {}, b"t"),
        ({b"x-session-affinity": b"o"}, {"user": "u"}, b"o"),
        ({b"x-warmroute-session": b"", b"x-session-id": b"s"}, {}, b"s"),
        ({b"x-session-id": b""}, {"prompt_cache_key": "p"}, "p"),
        ({}, {"prompt_cache_key": "p", **CLAUDE_CODE}, "p"),
        ({}, CLAUDE_CODE, "cc"),
        ({b"baggage": b"user.id=1, session.id=b ; x=1"}, {}, b"b"),
        ({b"baggage": b"session.id=b"}, {"prompt_cache_key": "p"}, "p"),
    ],
)
def test_precedence(headers: dict[bytes, bytes], fields: dict[str, Any], named: bytes | str) -> None:
    key = session_key(headers, fields)
    assert isinstance(key, tuple) and key[1] == named


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"user": "u"}, {"prompt_cache_key": ""}, {"prompt_cache_key": 5}, {"metadata": None}, {"metadata": {"user_id": "plain"}},
        {"metadata": {"user_id": "{not json"}}, {"metadata": {"user_id": "{}"}}, {"metadata": {"user_id": '{"session_id": 5}'}},
    ],
)  # fmt: skip
def test_what_names_no_session(fields: dict[str, Any]) -> None:
    assert session_key({}, fields) is None


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_a_session_never_crosses_credentials(header: bytes) -> None:
    keys = {
        session_key({header: b"s", **credentials}, {})
        for credentials in ({}, {b"authorization": b"Bearer a"}, {b"authorization": b"Bearer b"}, {b"x-api-key": b"a"})
    }
    assert len(keys) == 4


def test_sub_agents_are_sessions_of_their_own_and_keys_are_bounded() -> None:
    main = {b"x-claude-code-session-id": b"s"}
    assert session_key(main, {}) != session_key({**main, b"x-claude-code-agent-id": b"a1"}, {})
    assert len(session_key({b"x-session-id": b"s" * 100_000}, {})[1]) <= 256  # type: ignore[index]
    assert session_key({}, {"prompt_cache_key": "\ud83d"}) is not None


async def test_somebody_elses_session_id_does_not_reach_that_session() -> None:
    async def answers(request: WorkerRequest) -> None:
        request.respond(b"{}")

    async with gateway_with(answers, answers) as (stack, _):
        text = "the same prompt " * 200
        for tenant in ("a", "b", "a"):
            headers = {"x-claude-code-session-id": "stolen", "authorization": f"Bearer {tenant}"}
            assert (await stack.post(CHAT.path, CHAT.body(text, stream=False), headers)).status_code == 200
        assert len(stack.router.sessions) == 2
