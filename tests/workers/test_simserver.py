"""The simulated engine over HTTP, with the clients that people use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import orjson
import pytest
from anthropic import AsyncAnthropic
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI

from workers import simhttp
from workers.profile import WorkerProfile
from workers.simfaults import Faults
from workers.simprompt import RENDERERS
from workers.simserver import RequestError, SimServer

PROFILE = WorkerProfile(engine="sim", kv_capacity_tokens=64_000)
LONG = "def f(x):\n    return x\n" * 200
TOOL_SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}, "mode": {"enum": ["r", "w"]}, "other": {"type": "string"}},
    "required": ["path", "lines", "mode"],
}
ARGUMENTS = {"path": "value", "lines": 1, "mode": "r"}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "read", "parameters": TOOL_SCHEMA}}


@pytest.fixture
async def sim() -> AsyncIterator[SimServer]:
    async with SimServer(PROFILE, speed=100) as server:
        yield server


@pytest.fixture
async def http(sim: SimServer) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=sim.url, timeout=20) as client:
        yield client


@pytest.fixture
async def client(sim: SimServer) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=sim.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(sim: SimServer) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=sim.url, api_key="none", max_retries=0) as client:
        yield client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


async def test_chat_whole_reports_cached_tokens_and_hits_its_own_answer(client: AsyncOpenAI) -> None:
    first = await client.chat.completions.create(model="sim", messages=user(LONG), max_tokens=64)
    assert first.usage is not None and first.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert first.usage.completion_tokens == 64
    assert first.usage.total_tokens == first.usage.prompt_tokens + 64
    answer = first.choices[0].message.content
    assert answer is not None and len(answer) == 4 * 64
    assert first.choices[0].finish_reason == "length"

    history = [*user(LONG), {"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
    second = await client.chat.completions.create(model="sim", messages=history, max_tokens=1)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (first.usage.prompt_tokens + 63) // 16 * 16


async def test_chat_stream_equals_the_whole_answer(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="sim", messages=user("hi"), max_tokens=30)
    stream = await client.chat.completions.create(
        model="sim", messages=user("hi"), max_tokens=30, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 30
    assert chunks[-1].usage.prompt_tokens_details is not None


async def test_chat_stream_has_no_usage_unless_asked(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="sim", messages=user("hi"), max_tokens=3, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


async def test_chat_tool_call(client: AsyncOpenAI) -> None:
    question = user("please call a tool")
    whole = await client.chat.completions.create(model="sim", messages=question, tools=[CHAT_TOOL])
    (call,) = whole.choices[0].message.tool_calls or []
    assert whole.choices[0].finish_reason == "tool_calls"
    assert call.type == "function" and call.function.name == "read"
    assert orjson.loads(call.function.arguments) == ARGUMENTS

    stream = await client.chat.completions.create(model="sim", messages=question, tools=[CHAT_TOOL], stream=True)
    deltas = [d async for chunk in stream for d in chunk.choices[0].delta.tool_calls or []]
    assert (deltas[0].id, deltas[0].function and deltas[0].function.name) == (call.id, "read")
    assert len(deltas) > 2
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == call.function.arguments

    turn = [whole.choices[0].message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    last = await client.chat.completions.create(model="sim", messages=question + turn, tools=[CHAT_TOOL])
    assert last.choices[0].message.content and not last.choices[0].message.tool_calls
    assert last.choices[0].finish_reason == "stop"


async def test_tool_choice_forces_and_forbids(client: AsyncOpenAI) -> None:
    other: Any = {"type": "function", "function": {"name": "write", "parameters": {"type": "object"}}}
    forced = await client.chat.completions.create(
        model="sim", messages=user("x"), tools=[CHAT_TOOL, other], tool_choice={"type": "function", "function": {"name": "write"}}
    )
    (call,) = forced.choices[0].message.tool_calls or []
    assert call.type == "function" and (call.function.name, call.function.arguments) == ("write", "{}")
    none = await client.chat.completions.create(model="sim", messages=user("call it"), tools=[CHAT_TOOL], tool_choice="none")
    assert not none.choices[0].message.tool_calls


async def test_completions(client: AsyncOpenAI) -> None:
    whole = await client.completions.create(model="sim", prompt=LONG, max_tokens=20)
    stream = await client.completions.create(model="sim", prompt=LONG, max_tokens=20, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16


async def test_embeddings(client: AsyncOpenAI) -> None:
    result = await client.embeddings.create(model="sim", input=["one", "two"])
    assert [len(item.embedding) for item in result.data] == [8, 8]
    plain = await client.embeddings.create(model="sim", input=["one", "two"], encoding_format="float")
    assert plain.data[1].embedding == pytest.approx(result.data[1].embedding)


async def test_responses(client: AsyncOpenAI) -> None:
    whole = await client.responses.create(model="sim", input=LONG, instructions="be brief", max_output_tokens=24)
    assert whole.usage is not None and whole.usage.output_tokens == 24
    async with client.responses.stream(model="sim", input=LONG, instructions="be brief", max_output_tokens=24) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens == (final.usage.input_tokens - 1) // 16 * 16
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


async def test_responses_tool_call(client: AsyncOpenAI) -> None:
    tool: Any = {"type": "function", "name": "read", "parameters": TOOL_SCHEMA, "strict": False}
    async with client.responses.stream(model="sim", input="call read", tools=[tool]) as stream:
        final = await stream.get_final_response()
    (item,) = final.output
    assert item.type == "function_call" and orjson.loads(item.arguments) == ARGUMENTS
    whole = await client.responses.create(model="sim", input="call read", tools=[tool])
    assert whole.output[0].type == "function_call" and whole.output[0].arguments == item.arguments


async def test_messages(claude: AsyncAnthropic) -> None:
    whole = await claude.messages.create(model="sim", messages=user(LONG), system="be brief", max_tokens=24)
    async with claude.messages.stream(model="sim", messages=user(LONG), system="be brief", max_tokens=24) as stream:
        final = await stream.get_final_message()
    (block,), (first,) = final.content, whole.content
    assert block.type == first.type == "text" and block.text == first.text
    assert final.stop_reason == "max_tokens"
    assert whole.usage.cache_read_input_tokens == 0
    assert final.usage.cache_read_input_tokens == (whole.usage.input_tokens - 1) // 16 * 16
    assert final.usage.input_tokens == whole.usage.input_tokens - final.usage.cache_read_input_tokens
    counted = await claude.messages.count_tokens(model="sim", messages=user(LONG), system="be brief")
    assert counted.input_tokens == whole.usage.input_tokens


async def test_messages_tool_call(claude: AsyncAnthropic) -> None:
    tools: Any = [{"name": "read", "input_schema": TOOL_SCHEMA}]
    async with claude.messages.stream(model="sim", messages=user("call read"), tools=tools, max_tokens=500) as stream:
        final = await stream.get_final_message()
    (block,) = final.content
    assert block.type == "tool_use" and block.input == ARGUMENTS
    assert final.stop_reason == "tool_use"
    turn = [
        {"role": "assistant", "content": final.model_dump()["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "done"}]},
    ]
    last = await claude.messages.create(model="sim", messages=user("call read") + turn, tools=tools, max_tokens=50)
    assert last.content[0].type == "text"


async def test_information_routes(sim: SimServer, http: httpx.AsyncClient) -> None:
    models = (await http.get("/v1/models")).json()["data"]
    assert [(m["id"], m["max_model_len"]) for m in models] == [("sim", 64_000)]
    for path in ("/health", "/ping", "/version"):
        assert (await http.get(path)).status_code == 200
    assert (await http.get("/nowhere")).status_code == 404


async def test_metrics_have_vllms_names(http: httpx.AsyncClient) -> None:
    for _ in range(2):
        await http.post("/v1/chat/completions", json={"model": "sim", "messages": user(LONG), "max_tokens": 5})
    page = (await http.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    labels = '{engine="0",model_name="sim"}'
    assert float(values["vllm:num_requests_running" + labels]) == float(values["vllm:kv_cache_usage_perc" + labels]) == 0
    assert float(values["vllm:generation_tokens_total" + labels]) == 10
    assert 0.45 < float(values["vllm:prefix_cache_hits_total" + labels]) / float(values["vllm:prefix_cache_queries_total" + labels]) < 0.5
    assert float(values['vllm:request_success_total{engine="0",model_name="sim",finished_reason="length"}']) == 2
    assert any(key.startswith("vllm:cache_config_info{") and 'block_size="16",num_gpu_blocks="4000"' in key for key in values)


async def test_refusals_are_in_the_dialects_shape(http: httpx.AsyncClient, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="other", messages=user("x"))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="sim", messages=user("x" * 300_000))
    assert caught.value.code == "context_length_exceeded"
    too_long = await http.post("/v1/messages", json={"model": "sim", "messages": user("x" * 300_000), "max_tokens": 5})
    assert too_long.status_code == 400 and too_long.json()["type"] == "error"
    assert "prompt is too long" in too_long.json()["error"]["message"]
    for content in (b"{", b"[]", b'{"messages": 5}', b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}'):
        refused = await http.post("/v1/chat/completions", content=content)
        assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_frees_the_engine(sim: SimServer, stream: bool) -> None:
    sim.set_faults(Faults(slow_factor=1e6))
    async with httpx.AsyncClient(base_url=sim.url) as leaver:
        body = {"model": "sim", "messages": user(LONG), "stream": stream}
        task = asyncio.create_task(leaver.post("/v1/chat/completions", json=body))
        await until(lambda: sim.engine.running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await until(lambda: sim.engine.running == 0)
    assert sim.engine.cache.used == 0
    assert sim.state()["aborted_total"] == 1


async def test_a_client_that_leaves_in_mid_stream_frees_the_engine(sim: SimServer) -> None:
    sim.set_faults(Faults(slow_factor=100))
    async with httpx.AsyncClient(base_url=sim.url) as leaver:
        body = {"model": "sim", "messages": user("x"), "stream": True, "max_tokens": 10_000}
        async with leaver.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                break
    await until(lambda: sim.engine.running == 0 and sim.state()["connections"] == 0)
    assert sim.state()["aborted_total"] == 1


async def test_keep_alive_serves_many_requests_on_one_connection(sim: SimServer) -> None:
    reader, writer = await asyncio.open_connection(sim.host, sim.port)
    for pipelined in (1, 3):
        writer.write(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * pipelined)
        for _ in range(pipelined):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert orjson.loads(await reader.readexactly(length))["version"]
    assert sim.state()["connections"] == 1
    writer.close()


async def test_an_idle_connection_is_closed(sim: SimServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simhttp, "KEEP_ALIVE_S", 0.05)
    reader, writer = await asyncio.open_connection(sim.host, sim.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()


async def test_a_slow_reader_does_not_stop_the_engine(sim: SimServer) -> None:
    reader, writer = await asyncio.open_connection(sim.host, sim.port, limit=1024)
    body = orjson.dumps({"model": "sim", "messages": user("x"), "stream": True, "max_tokens": 31_000})
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    sim.engine.speed = 1e5
    await until(lambda: sim.engine.counters.finished == 1)
    data = await reader.read()
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    writer.close()


async def test_freeze_answers_nothing_until_it_is_cleared(sim: SimServer, http: httpx.AsyncClient) -> None:
    assert (await http.post("/sim/faults", json={"freeze": True})).json()["freeze"] is True
    health = asyncio.create_task(http.get("/health"))
    chat = asyncio.create_task(http.post("/v1/chat/completions", json={"model": "sim", "messages": user("x")}))
    await until(lambda: sim.state()["frozen_requests"] == 2)
    assert (await http.get("/sim/state")).json()["faults"]["freeze"] is True
    assert not health.done() and not chat.done()
    await http.delete("/sim/faults")
    assert (await health).status_code == (await chat).status_code == 200


async def test_freeze_stops_a_running_stream(sim: SimServer, http: httpx.AsyncClient) -> None:
    body = {"model": "sim", "messages": user("x"), "stream": True, "max_tokens": 2000}
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        events = response.aiter_bytes()
        await anext(events)
        sim.set_faults(Faults(freeze=True))
        emitted = sim.engine.counters.generation_tokens
        assert (await http.get("/sim/state")).json()["running"] == 1
        assert sim.engine.counters.generation_tokens == emitted < 2000
        sim.set_faults(Faults())
        rest = b"".join([chunk async for chunk in events])
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_error_rate(sim: SimServer, http: httpx.AsyncClient) -> None:
    sim.set_faults(Faults(error_rate=0.5, error_status=503))
    request = {"model": "sim", "messages": user("x"), "max_tokens": 1}
    statuses = [(await http.post("/v1/chat/completions", json=request)).status_code for _ in range(60)]
    assert set(statuses) == {200, 503}
    assert 15 < statuses.count(503) < 45
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("events", [0, 5])
async def test_die_after_chunks_resets_the_connection(sim: SimServer, http: httpx.AsyncClient, events: int) -> None:
    sim.set_faults(Faults(die_after_chunks=events))
    seen = b""
    with pytest.raises(httpx.TransportError):
        async with http.stream("POST", "/v1/chat/completions", json={"model": "sim", "messages": user("x"), "stream": True}) as response:
            async for chunk in response.aiter_bytes():
                seen += chunk
    assert seen.count(b"\n\n") == events
    assert sim.engine.running == 0


async def test_first_token_delay_holds_requests_back(sim: SimServer, http: httpx.AsyncClient) -> None:
    sim.set_faults(Faults(before_first_token_delay_s=0.1))
    started = asyncio.get_running_loop().time()
    await http.post("/v1/chat/completions", json={"model": "sim", "messages": user("x"), "max_tokens": 1})
    assert asyncio.get_running_loop().time() - started >= 0.1


async def test_unknown_fault_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/sim/faults", json={"frozen": True})
    assert answer.status_code == 400 and "frozen" in answer.text


async def test_engine_time_does_not_drift_when_the_loop_is_late(sim: SimServer, http: httpx.AsyncClient) -> None:
    """Steps of 0.2 ms are far below what timers resolve; the answer still takes the engine's time, no less."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    await http.post("/v1/chat/completions", json={"model": "sim", "messages": user("x"), "max_tokens": 1000})
    latency = PROFILE.latency_model()
    assert loop.time() - started >= 999 * latency.step_s(1, 0) / 100
    assert sim.paced.steps == 1000


_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["user", "tool", "text", "call", "function"])
_FIELDS = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "parameters", "required", "properties", "output"]
)
_JSON = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_FIELDS, inner, max_size=4), max_leaves=12)
_BODY = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("messages", "input", "prompt", "tools", "tool_choice", "system", "max_tokens", "stream_options", "priority", "cache_salt"), _JSON
    ),
)


@given(st.sampled_from(sorted(RENDERERS)), _BODY)
@settings(max_examples=300, deadline=None)
def test_any_body_is_planned_or_refused(path: str, body: dict[str, Any]) -> None:
    server = SimServer(PROFILE)
    try:
        _, planned = server._plan(path, body)
    except RequestError as error:
        assert error.status == 400
    else:
        assert planned.prompt_tokens + planned.max_tokens <= server.max_model_len
