"""The gateway's tokens are the engine's own, for whatever a client may send."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.dialects import CHAT, COMPLETIONS
from gateway.token_mode import TokenMode
from kvindex.chain import ChainState, token_seed
from tests.engine.conftest import running_engines
from tests.engine.engines import BLOCK, Engine
from tests.gateway.test_rendering import MESSAGES_SENT, TEXTS, TOOL

pytestmark = pytest.mark.engine


async def test_tokens_are_the_engines_own(vllm_python: Path, tiny_model: Path) -> None:
    async with running_engines(Engine(vllm_python, tiny_model, core=0)) as (engine,):
        compare(TokenMode(tiny_model, BLOCK), engine.url)


def compare(mode: TokenMode, url: str) -> None:
    compared = {"chat": 0, "completions": 0}

    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:

        def same(ids: list[int], fields: dict[str, Any], dialect: Any) -> None:
            prompt = mode.prompt(dialect, fields)
            assert prompt is not None, f"not rendered: {mode.fallbacks}"
            expected = ChainState.start(token_seed(), 4 * BLOCK).extend(struct.pack(f"<{len(ids)}I", *ids)).chain()
            assert prompt.tokens == len(ids)
            assert prompt.chain.hashes == expected.hashes
            compared[dialect.name] += 1

        @settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
        @given(MESSAGES_SENT, st.sampled_from((None, [TOOL])), st.sampled_from(({}, {"chat_template_kwargs": {"enable_thinking": False}})))
        def conversations(messages: list[dict[str, Any]], tools: Any, more: dict[str, Any]) -> None:
            # a first message of many blocks, so that what follows is compared block by block
            fields = {"model": "tiny", "messages": [{"role": "user", "content": "x = 1\n" * 90}, *messages], "tools": tools, **more}
            answer = client.post("/v1/chat/completions/render", json=fields)
            if answer.status_code == 200:  # it refuses what is no conversation
                same(answer.json()["token_ids"], fields, CHAT)

        @settings(max_examples=100, deadline=None)
        @given(st.lists(TEXTS, min_size=1, max_size=6).map("\n".join))
        def texts(text: str) -> None:
            fields = {"model": "tiny", "prompt": text}
            answer = client.post("/tokenize", json=fields)
            if answer.status_code == 200:
                same(answer.json()["tokens"], fields, COMPLETIONS)

        conversations()
        texts()
    assert compared["chat"] > 100 and compared["completions"] > 50, f"the engine refused nearly everything: {compared}"
    print(f"\ntokens compared with the engine's: {compared}")
