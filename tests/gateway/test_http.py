"""HTTP towards clients: limits, odd but legal requests, errors in each dialect's shape; and what is forwarded to workers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import time
from typing import Any

import orjson
import pytest

from gateway.config import ModelConfig
from tests.gateway.spoken import CHAT, MESSAGES, RESPONSES, Spoken, every_dialect
from tests.stack import ScriptedWorker, WorkerRequest, config, gateway_with, running, soon


async def echo(request: WorkerRequest) -> None:
    """Answers with the body that the worker got."""
    request.respond(request.body)


@every_dialect
async def test_the_clients_own_bytes_are_forwarded(spoken: Spoken) -> None:
    body = orjson.dumps(spoken.body("Grüße \u2028", stream=False, prompt_cache_key="mine", metadata={"a": [1, 2.50]}))
    body = body.replace(b'"stream":false', b'"stream" :  false')
    async with gateway_with(echo) as (stack, _):
        assert (await stack.post(spoken.path, body)).content == body


@every_dialect
@pytest.mark.parametrize("way", ["chunked", "expect", "drip", "two-writes"])
async def test_bodies_sent_in_any_way_arrive_whole(spoken: Spoken, way: str) -> None:
    body = orjson.dumps(spoken.body("x" * 3000, stream=False))
    async with gateway_with(echo) as (stack, _):
        client = await stack.connect()
        write = client.writer.write
        head = f"POST {spoken.path} HTTP/1.1\r\nhost: x\r\n".encode()
        if way == "chunked":
            pieces = [body[at : at + 700] for at in range(0, len(body), 700)]
            write(head + b"transfer-encoding: chunked\r\n\r\n")
            for piece in pieces:
                write(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece))
                await client.writer.drain()
            write(b"0\r\n\r\n")
        elif way == "expect":
            write(head + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
            assert (await client.head())[0] == 100
            write(body)
        elif way == "drip":
            whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
            for at in range(300):
                write(whole[at : at + 1])
                await asyncio.sleep(0)
            write(whole[300:])
        else:
            write(head + b"content-length: %d\r\n\r\n" % len(body))
            await client.writer.drain()
            await stack.state()
            write(body)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, body)
        await client.close()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_pipelined_requests_are_answered_in_order(stream: bool) -> None:
    async def script(request: WorkerRequest) -> None:
        text = request.json["messages"][0]["content"]
        if text == "0":
            await soon(hold.wait())
        if stream:
            request.stream(CHAT.preamble, CHAT.content(text), CHAT.last)
        else:
            request.respond(orjson.dumps({"text": text}))

    hold = asyncio.Event()
    async with gateway_with(script) as (stack, [worker]):
        client = await stack.connect()
        for number in range(3):
            client.send(CHAT.path, CHAT.body(str(number), stream=stream))
        client.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await worker.until_requests(1)
        hold.set()
        for number in range(3):
            answer = await client.answer()
            assert answer.status == 200
            assert (CHAT.content(str(number)) if stream else orjson.dumps({"text": str(number)})) in answer.body
        assert (await client.answer()).body == b'{"status":"ok"}'
        await client.close()
        await stack.until_idle()


async def test_one_connection_serves_many_requests_of_all_kinds() -> None:
    async def script(request: WorkerRequest) -> None:
        if request.json.get("stream"):
            request.stream(*CHAT.whole("a"))
        else:
            request.respond(b"{}")

    async with gateway_with(script) as (stack, _):
        client = await stack.connect()
        for _ in range(3):
            client.send(CHAT.path, CHAT.body())
            assert (await client.answer()).body == b"".join(CHAT.whole("a"))
            client.send(CHAT.path, CHAT.body(stream=False))
            assert (await client.answer()).body == b"{}"
            client.send(CHAT.path, CHAT.body(model="nope"))
            assert (await client.answer()).status == 404
            client.writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.answer()).status == 200
        await client.close()


@every_dialect
@pytest.mark.parametrize("way", ["length", "chunked"])
async def test_a_body_over_the_limit_is_413_in_the_dialects_shape_and_readable_by_the_client(spoken: Spoken, way: str) -> None:
    async with gateway_with(echo, listen={"max_body_mb": 1.0}) as (stack, [worker]):
        fits = spoken.body("x" * 1_000_000, stream=False)
        assert (await stack.post(spoken.path, fits)).status_code == 200
        client = await stack.connect()
        body = orjson.dumps(spoken.body("x" * 6_000_000))
        head = f"POST {spoken.path} HTTP/1.1\r\nhost: x\r\n".encode()
        if way == "length":
            client.writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        else:
            client.writer.write(head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        answer = await client.answer()
        assert answer.status == 413
        assert "max_body_mb" in spoken.error_of(answer.body)["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert len(worker.requests) == 1
        client.abort()


async def test_the_default_body_limit_admits_long_agent_sessions() -> None:
    # gateway and worker are one process here: 33 MiB keep it from answering its own probes for a while
    async with gateway_with(echo, upstream={"probe_timeout_s": 10.0, "probe_interval_s": 10.0}) as (stack, _):
        body = orjson.dumps(CHAT.body("x" * (33 << 20), stream=False))
        response = await stack.post(CHAT.path, body)
        assert response.status_code == 200 and response.content == body


async def test_a_head_over_the_limit_is_431() -> None:
    async with gateway_with(echo, listen={"max_header_kb": 8.0}) as (stack, _):
        client = await stack.connect()
        client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        for number in range(100):
            client.writer.write(b"x-h%d: %b\r\n" % (number, b"v" * 200))
        assert (await client.head())[0] == 431
        client.abort()
        client = await stack.connect()
        client.send(CHAT.path, CHAT.body(stream=False), f"x-fits: {'v' * 5000}\r\n")
        assert (await client.answer()).status == 200
        await client.close()


@pytest.mark.parametrize("part", ["head", "body"])
async def test_a_client_that_drips_its_request_is_cut_in_total_time(part: str) -> None:
    """An inactivity limit would let one byte a second hold a connection for ever."""
    async with gateway_with(echo, listen={"header_timeout_s": 0.3, "body_timeout_s": 0.3}) as (stack, _):
        client = await stack.connect()
        if part == "body":
            client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")

        async def drip() -> None:
            for _ in range(10_000):
                client.writer.write(b"x")
                await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        with contextlib.suppress(ConnectionError):
            await soon(client.reader.read(), "the end of the connection")
        dripping.cancel()
        client.abort()


@every_dialect
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b'{"model": NaN}', b"\xff\xfe", b'{"model":"m","x":1e999999}', b'{"a":' * 100_000],
    ids=["empty", "cut", "array", "string", "null", "nan", "not-utf8", "huge-number", "deep-nesting"],
)
async def test_what_is_not_a_request_is_a_400_that_says_why(spoken: Spoken, body: bytes) -> None:
    async with gateway_with(echo) as (stack, [worker]):
        started = time.perf_counter()
        response = await stack.post(spoken.path, body)
        assert response.status_code == 400, response.content
        assert spoken.error_of(response.content)["type"] == "invalid_request_error"
        assert not worker.requests and time.perf_counter() - started < 5
        assert (await stack.post(spoken.path, spoken.body(stream=False))).status_code == 200


@every_dialect
@pytest.mark.parametrize("padding", [0, 3000, 30_000])
@pytest.mark.parametrize("depth", [50, 150, 400])
async def test_deeply_nested_content_is_served_or_refused_but_no_error_of_the_gateway(spoken: Spoken, depth: int, padding: int) -> None:
    content = b'[{"type":"tool_result","content":' * depth + b'"x"' + b"}]" * depth
    text = b'"' + b"y" * padding + b'"'
    items = b'[{"role":"user","content":%b},{"role":"user","content":%b},{"role":"user","content":"z"}]' % (text, content)
    key = b"input" if spoken is RESPONSES else b"messages"
    async with gateway_with(echo) as (stack, _):
        for _ in range(2):
            response = await stack.post(spoken.path, b'{"model":"m","%b":%b}' % (key, items))
            assert response.status_code in (200, 400), response.content


async def test_many_keys_and_duplicate_keys_are_no_trouble() -> None:
    async with gateway_with(echo) as (stack, _):
        many = b'{"model":"m","messages":[],' + b",".join(b'"k%d":1' % n for n in range(200_000)) + b"}"
        assert (await stack.post(CHAT.path, many)).status_code == 200
        double = b'{"model":"nope","model":"m","messages":[{"role":"user","content":"a"}],"messages":[]}'
        assert (await stack.post(CHAT.path, double)).content == double


@every_dialect
@pytest.mark.parametrize("size", [0, 20_000], ids=["short", "long"])
async def test_a_lone_surrogate_does_not_poison_a_session(spoken: Spoken, size: int) -> None:
    body = orjson.dumps(spoken.body("LONE " + "x" * size, stream=False)).replace(b"LONE", b"\\ud83d")
    async with gateway_with(echo, models=[ModelConfig(name="m", aliases=["alias"])]) as (stack, _):
        answers = [await stack.post(spoken.path, body) for _ in range(2)]
        assert [a.status_code for a in answers] == [200, 200]
        assert answers[0].content == answers[1].content == body
        rewritten = await stack.post(spoken.path, body.replace(b'"model":"m"', b'"model":"alias"'))
        assert rewritten.status_code == 200 and b"ud83d" in rewritten.content
        assert (await stack.client.get("/metrics")).status_code == 200


@every_dialect
async def test_an_alias_is_rewritten_and_nothing_else(spoken: Spoken) -> None:
    async with gateway_with(echo, models=[ModelConfig(name="m", aliases=["gpt-x"])]) as (stack, _):
        body = spoken.body(model="gpt-x", stream=False, prompt_cache_key="k", metadata={"a": {"b": [None, 1.5, "é"]}})
        assert (await stack.post(spoken.path, body)).json() == {**body, "model": "m"}


VOLATILE = "x-anthropic-billing-header: cc_version=2.1.332; cch=%s;\\nYou are a coding agent."


async def test_a_line_that_changes_with_every_request_is_cut_from_what_is_forwarded() -> None:
    def body(mark: str) -> bytes:
        system = b'[{"type":"text","text":"%b"}]' % (VOLATILE % mark).encode()
        return b'{"model":"m","max_tokens":5,"system":%b,"messages":[{"role":"user","content":"x-anthropic-billing-header: q"}]}' % system

    async with gateway_with(echo, echo) as (stack, _):
        first, second = await stack.post(MESSAGES.path, body("aaa")), await stack.post(MESSAGES.path, body("bbb"))
        assert first.content == second.content
        assert first.json()["system"][0]["text"] == "You are a coding agent."
        assert first.json()["messages"][0]["content"] == "x-anthropic-billing-header: q"  # the user's own words stay
        chat = b'{"model":"m","messages":[{"role":"system","content":"%b"}]}' % (VOLATILE % "c").encode()
        assert (await stack.post(CHAT.path, chat)).json()["messages"][0]["content"] == "You are a coding agent."
    async with gateway_with(echo, strip_volatile_prefix=False) as (stack, _):
        assert (await stack.post(MESSAGES.path, body("aaa"))).content == body("aaa")


@every_dialect
@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        {"role": "system", "content": "s" * 9500},
        {"role": "user", "content": []},
    ],
    ids=["calls-without-content", "empty", "null", "absent", "system-inside", "no-parts"],
)
async def test_messages_that_other_gateways_refuse_are_the_workers_to_judge(spoken: Spoken, item: dict[str, Any]) -> None:
    key = "input" if spoken is RESPONSES else "messages"
    body = spoken.body(stream=False)
    body[key] = [body[key][0], item, {"role": "user", "content": "go on " * 400}]
    async with gateway_with(echo) as (stack, _):
        response = await stack.post(spoken.path, body)
        assert response.status_code == 200 and response.json() == body


async def test_compressed_answers_arrive_as_they_are() -> None:
    payload = orjson.dumps({"choices": [], "text": "x" * 5000})

    async def script(request: WorkerRequest) -> None:
        packed = gzip.compress(payload)
        request.respond(packed, headers=b"content-type: application/json\r\ncontent-encoding: gzip\r\n")

    async with gateway_with(script) as (stack, _):
        for _ in range(2):
            response = await stack.post(CHAT.path, CHAT.body(stream=False))  # httpx checks the length and unpacks
            assert response.content == payload
        assert int(response.headers["content-length"]) == len(gzip.compress(payload))


@pytest.mark.parametrize("size", [0, 100, 3 << 20], ids=["empty", "small", "large"])
@pytest.mark.parametrize("framing", ["length", "chunked", "until-close"])
async def test_whole_answers_of_any_size_and_framing(size: int, framing: str) -> None:
    payload = bytes(range(32, 127)) * (size // 95) if size else b""

    async def script(request: WorkerRequest) -> None:
        if framing == "length":
            request.respond(payload)
        elif framing == "chunked":
            request.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
            for at in range(0, len(payload), 50_000):
                request.chunk(payload[at : at + 50_000])
            request.end()
        else:
            request.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + payload)
            request.close()

    async with gateway_with(script) as (stack, _):
        for _ in range(2):
            response = await stack.post(CHAT.path, CHAT.body(stream=False))
            assert response.status_code == 200 and response.content == payload
        await stack.until_idle()


async def test_compressed_requests_are_refused_plainly() -> None:
    async with gateway_with(echo) as (stack, [worker]):
        bomb = gzip.compress(b"0" * 10_000_000)
        for encoding in ("gzip", "zstd"):
            response = await stack.post(CHAT.path, bomb, {"content-encoding": encoding})
            assert response.status_code == 415 and encoding in CHAT.error_of(response.content)["message"]
        assert not worker.requests


async def test_only_known_headers_reach_the_worker() -> None:
    async with gateway_with(echo) as (stack, [worker]):
        headers = {
            "authorization": "Bearer secret", "cookie": "a=b", "x-forwarded-for": "1.2.3.4", "x-warmroute-session": "s", "proxy-x": "y",
            "anthropic-version": "2023-06-01", "anthropic-beta": "b", "traceparent": "00-1-2-03", "x-request-id": "req-7",
        }  # fmt: skip
        response = await stack.post(MESSAGES.path + "?beta=true", MESSAGES.body(stream=False), headers)
        request = worker.requests[0]
        assert request.path == "/v1/messages?beta=true"
        assert request.headers["anthropic-version"] == "2023-06-01" and request.headers["anthropic-beta"] == "b"
        assert request.headers["traceparent"] == "00-1-2-03" and request.headers["x-request-id"] == "req-7"
        assert not {"authorization", "cookie", "x-forwarded-for", "x-warmroute-session", "proxy-x"} & request.headers.keys()
        assert response.headers["x-request-id"] == "req-7"
        assert response.headers["x-warmroute-worker"] == worker.id


@pytest.mark.parametrize("given", ["a b", "x" * 200, "é", "a\tb"])
async def test_request_ids_that_could_do_harm_are_replaced(given: str) -> None:
    async with gateway_with(echo) as (stack, [worker]):
        client = await stack.connect()
        client.send(CHAT.path, CHAT.body(stream=False), f"x-request-id: {given}\r\n")
        answer = await client.answer()
        assert answer.status == 200 and answer.headers["x-request-id"].startswith("req_")
        assert worker.requests[0].headers["x-request-id"] == answer.headers["x-request-id"]
        await client.close()


async def test_a_tier_is_recognised_counted_and_checked() -> None:
    async with gateway_with(echo) as (stack, _):
        await stack.post(CHAT.path, CHAT.body(stream=False, service_tier="priority"))
        await stack.post(CHAT.path, CHAT.body(stream=False, service_tier="flex"))
        await stack.post(CHAT.path, CHAT.body(stream=False, service_tier=["odd"]))
        await stack.post(CHAT.path, CHAT.body(stream=False, service_tier="flex"), {"x-warmroute-tier": "latency"})
        assert sorted(tier for _, tier, _ in stack.gateway.metrics.series) == ["latency", "standard", "throughput"]
        wrong = await stack.post(CHAT.path, CHAT.body(), {"x-warmroute-tier": "gold"})
        assert wrong.status_code == 400 and "latency" in wrong.json()["error"]["message"]


async def test_what_is_asked_for_in_vain_is_said_in_the_clients_dialect() -> None:
    worker = ScriptedWorker(echo, models=("m",))
    async with gateway_with(worker) as (stack, _):
        client = stack.client
        unknown = await client.post("/v1/chat/completion", json={})
        assert unknown.status_code == 404 and unknown.headers["content-type"] == "application/json"
        assert "/v1/chat/completions" in unknown.json()["error"]["message"]
        assert unknown.json()["error"]["type"] == "invalid_request_error"
        for path in ("/v1/messages/batches", "/v1/models/none"):
            said = (await client.get(path, headers={"anthropic-version": "2023-06-01"})).json()
            assert said["type"] == "error" and said["error"]["type"] == "not_found_error"
        wrong = await client.get("/v1/chat/completions")
        assert wrong.status_code == 405 and wrong.json()["error"]["message"] == "/v1/chat/completions takes POST, not GET"
        assert (await client.delete("/ready")).headers["allow"] == "GET"
        policy = await client.put("/admin/policy", json={"policy": "best"})
        assert policy.status_code == 422 and policy.json()["error"]["message"].startswith("policy: ") and "'warm'" in policy.text
        assert "the body" in (await client.put("/admin/policy")).json()["error"]["message"]


async def test_models_health_ready_and_metrics() -> None:
    worker = ScriptedWorker(echo, models=("m", "lora"))
    async with gateway_with(worker, models=[ModelConfig(name="m", aliases=["gpt-x"])]) as (stack, _):
        get = stack.client.get
        listed = (await get("/v1/models")).json()
        assert [entry["id"] for entry in listed["data"]] == ["m", "lora", "gpt-x"]
        assert listed["data"][0]["object"] == "model" and listed["data"][2]["max_model_len"] == 100_000
        anthropic = (await get("/v1/models?limit=1000", headers={"anthropic-version": "2023-06-01"})).json()
        assert anthropic["data"][0]["type"] == "model" and anthropic["has_more"] is False
        assert (await get("/v1/models/gpt-x")).json()["id"] == "gpt-x"
        assert (await get("/v1/models/none")).json()["error"]["code"] == "model_not_found"
        assert (await get("/ready")).json() == {"ready": True, "workers": {worker.id: True}}
        await stack.post(CHAT.path, CHAT.body(stream=False))
        text = (await get("/metrics")).text
        assert f'warmroute_requests_total{{model="m",status="200",tier="standard",worker="{worker.id}"}} 1.0' in text
        assert f'warmroute_worker_up{{worker="{worker.id}"}} 1.0' in text


async def test_admin_routes_need_the_token_whatever_the_host_header_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ADMIN_TOKEN", "secret")
    async with gateway_with(echo, admin={"token_env": "TEST_ADMIN_TOKEN"}) as (stack, _):
        paths = [path for path in stack.gateway.api.openapi()["paths"] if path.startswith("/admin")]
        assert len(paths) >= 3
        for path in paths:
            for authorization in ("", "Bearer wrong", "Bearer ' OR 1=1--", "Bearer " + "x" * 10_000):
                assert (await stack.client.get(path, headers={"authorization": authorization})).status_code == 401
            for host in ("x/health?", "localhost/health#", "a@b"):
                client = await stack.connect()
                client.writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
                assert (await client.head())[0] in (400, 401)
                client.abort()
            client = await stack.connect()
            client.writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer \xe9\r\n\r\n".encode("latin-1"))
            assert (await client.head())[0] == 401
            client.abort()
            assert (await stack.client.get(path, headers={"authorization": "Bearer secret"})).status_code == 200
    monkeypatch.delenv("TEST_ADMIN_TOKEN")
    async with gateway_with(echo, admin={"token_env": "TEST_ADMIN_TOKEN"}) as (stack, _):
        assert (await stack.client.get("/admin/state", headers={"authorization": "Bearer"})).status_code == 401


async def test_the_policy_can_be_switched_while_running() -> None:
    async with gateway_with(echo, echo) as (stack, workers):
        assert (await stack.client.put("/admin/policy", json={"policy": "round-robin"})).json() == {"policy": "round-robin"}
        for _ in range(4):
            await stack.post(CHAT.path, CHAT.body(stream=False))
        assert [len(w.requests) for w in workers] == [2, 2]
        assert (await stack.client.put("/admin/policy", json={"policy": "best"})).status_code == 422


async def test_smuggling_attempts_are_refused() -> None:
    async with gateway_with(echo) as (stack, [worker]):
        for head in (
            b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
            b"content-length: 5\r\ncontent-length: 6\r\n",
            b"content-length : 5\r\n",
            b"content-length: +5\r\n",
        ):
            client = await stack.connect()
            client.writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n0\r\n\r\nX")
            assert (await client.head())[0] == 400
            client.abort()
        assert not worker.requests


async def test_an_api_key_of_the_worker_is_sent_and_the_clients_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from gateway.config import WorkerConfig

    monkeypatch.setenv("TEST_WORKER_KEY", "wk")
    async with ScriptedWorker(echo) as worker:
        async with running(config(workers=[WorkerConfig(url=worker.url, api_key_env="TEST_WORKER_KEY")])) as stack:
            await stack.post(CHAT.path, CHAT.body(stream=False), {"authorization": "Bearer clients"})
        assert worker.requests[0].headers["authorization"] == "Bearer wk"
