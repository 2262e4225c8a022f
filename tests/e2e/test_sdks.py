"""The SDKs that people use, through a real gateway process to two simulated workers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from loadgen.local import LocalFleet
from tests.programs import program

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "read_file", "description": "Read a file", "parameters": SCHEMA}}
# the simulated engine calls a tool when the newest message has the word "call"
ASK: Any = [{"role": "user", "content": "Please call the tool that reads pyproject.toml"}]
HELLO: Any = [{"role": "system", "content": "You are a coding agent. " * 400}, {"role": "user", "content": "Hello"}]
NO_LIST: Any = "Hello"


@pytest.fixture
def client(local_fleet: LocalFleet) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{local_fleet.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(local_fleet: LocalFleet) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=local_fleet.url, api_key="none", max_retries=0)


def test_openai_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["sim"]
    assert client.models.retrieve("sim").id == "sim"


def test_openai_chat_whole_hits_on_the_second_turn(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="sim", messages=HELLO, max_tokens=32)
    answer = first.choices[0].message.content
    assert answer and first.usage is not None and first.usage.completion_tokens == 32
    turns = [*HELLO, {"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    second = client.chat.completions.create(model="sim", messages=turns, max_tokens=8)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens == pytest.approx(first.usage.prompt_tokens, rel=0.05)


def test_openai_chat_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="sim", messages=HELLO, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text) == 24 * 4  # the simulated engine's tokens are four bytes long
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"


def test_openai_usage_is_not_added_for_a_client_that_did_not_ask(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="sim", messages=HELLO, max_tokens=4, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_openai_tool_call_whole(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(model="sim", messages=ASK, tools=[CHAT_TOOL])
    assert completion.choices[0].finish_reason == "tool_calls"
    call: Any = (completion.choices[0].message.tool_calls or [])[0]
    assert call.function.name == "read_file"
    assert isinstance(json.loads(call.function.arguments)["path"], str)
    message: Any = completion.choices[0].message.model_dump(exclude_none=True)
    turns = [*ASK, message, {"role": "tool", "tool_call_id": call.id, "content": "[project]"}]
    after = client.chat.completions.create(model="sim", messages=turns, tools=[CHAT_TOOL], max_tokens=16)
    assert after.choices[0].message.content


def test_openai_tool_call_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="sim", messages=ASK, tools=[CHAT_TOOL]) as stream:
        final: Any = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert call.id and call.function.name == "read_file"
    assert "path" in json.loads(call.function.arguments)


def test_openai_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="sim", input="Hello", max_output_tokens=16)
    assert whole.status in ("completed", "incomplete") and whole.output_text
    kinds = [event.type for event in client.responses.create(model="sim", input="Hello", max_output_tokens=16, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds


def test_openai_completions_and_embeddings(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="sim", prompt="def f(", max_tokens=8)
    assert len(completion.choices[0].text) == 8 * 4
    streamed = client.completions.create(model="sim", prompt="def f(", max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices)
    embeddings = client.embeddings.create(model="sim", input=["one", "two"])
    assert len(embeddings.data) == 2 and embeddings.data[0].embedding != embeddings.data[1].embedding


async def test_openai_async_streams_side_by_side(local_fleet: LocalFleet) -> None:
    async with openai.AsyncOpenAI(base_url=f"{local_fleet.url}/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> int:
            messages: Any = [{"role": "user", "content": f"question {number}"}]
            stream = await client.chat.completions.create(model="sim", messages=messages, max_tokens=20, stream=True)
            return sum([len(chunk.choices[0].delta.content or "") async for chunk in stream])

        assert await asyncio.gather(*(one(number) for number in range(8))) == [80] * 8


def test_openai_errors_are_the_sdk_s_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="unknown", messages=HELLO)
    assert missing.value.code == "model_not_found" and "unknown" in missing.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("unknown")
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="sim", messages=NO_LIST)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "x" * 2_000_000}])


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="sim", max_tokens=16, system="Be brief.", messages=[{"role": "user", "content": "Hello"}])
    block: Any = message.content[0]
    assert block.type == "text" and len(block.text) == 16 * 4
    assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 16
    with claude.messages.stream(model="sim", max_tokens=16, messages=[{"role": "user", "content": "Hello"}]) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert len(text) == 16 * 4 and final.usage.output_tokens == 16


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "read_file", "description": "Read a file", "input_schema": SCHEMA}
    whole = claude.messages.create(model="sim", max_tokens=256, messages=ASK, tools=[tool])
    use: Any = whole.content[0]
    assert whole.stop_reason == "tool_use" and use.type == "tool_use" and "path" in use.input
    with claude.messages.stream(model="sim", max_tokens=256, messages=ASK, tools=[tool]) as stream:
        streamed: Any = stream.get_final_message().content[0]
    assert streamed.name == "read_file" and streamed.input == use.input


def test_anthropic_models_and_errors(claude: anthropic.Anthropic) -> None:
    assert [model.id for model in claude.models.list()] == ["sim"]
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="unknown", max_tokens=16, messages=[{"role": "user", "content": "Hello"}])
    body: Any = missing.value.body
    assert body["type"] == "error" and body["error"]["type"] == "not_found_error"


NODE_SCRIPT = Path(__file__).with_name("openai_client.mjs")
NODE_PACKAGE = Path(__file__).with_name("node")


@pytest.mark.e2e
def test_openai_npm_package(local_fleet: LocalFleet, pytestconfig: pytest.Config) -> None:
    node, npm = program("node", "nodejs"), program("npm")
    folder = _installed(npm, pytestconfig)
    script = folder / NODE_SCRIPT.name
    shutil.copy(NODE_SCRIPT, script)
    run = subprocess.run([node, script, f"{local_fleet.url}/v1"], cwd=folder, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["models"] == ["sim"]
    assert len(result["whole"]) == 16 * 4
    assert len(result["streamed"]) == 24 * 4 and result["completion_tokens"] == 24
    assert result["tool"]["name"] == "read_file" and "path" in json.loads(result["tool"]["arguments"])
    assert result["streamed_tool"] == result["tool"]
    assert result["error"] == {"class": "NotFoundError", "code": "model_not_found"}


def _installed(npm: str, config: pytest.Config) -> Path:
    """A folder with the locked npm packages, kept between runs as long as the lock file stays the same."""
    assert config.cache is not None
    folder = config.cache.mkdir("npm-openai")
    lock = (NODE_PACKAGE / "package-lock.json").read_text()
    stamp = folder / "installed.json"
    if not stamp.exists() or stamp.read_text() != lock:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(NODE_PACKAGE / name, folder / name)
        environment = {**os.environ, "npm_config_update_notifier": "false"}
        subprocess.run([npm, "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, check=True, env=environment, timeout=300)
        stamp.write_text(lock)
    return folder
