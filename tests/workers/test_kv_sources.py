"""Where engines say that they publish their KV events."""

from __future__ import annotations

import orjson
import pytest

from workers.kv_sources import KVEventSource, from_sglang, from_vllm, reachable

URL = "http://gpu7:8000"


def test_vllm_tells_one_publisher_per_rank() -> None:
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "replay_endpoint": "tcp://127.0.0.1:18300", "topic": "kv"}
    payload = {"1": publisher | {"endpoint": "tcp://*:18201", "replay_endpoint": "tcp://*:18301"}, "0": publisher | {"endpoint": "tcp://*:18200"}}
    assert from_vllm(payload, URL) == [
        KVEventSource("tcp://gpu7:18200", "tcp://gpu7:18300", "kv", 0),
        KVEventSource("tcp://gpu7:18201", "tcp://gpu7:18301", "kv", 1),
    ]


def test_sglang_tells_its_arguments() -> None:
    config = orjson.dumps({"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}).decode()
    assert from_sglang({"kv_events_config": config, "dp_size": 1}, URL) == [KVEventSource("tcp://gpu7:5557", None, "kv", 0)]
    ranks = from_sglang({"kv_events_config": config, "attn_dp_size": 4, "dp_size": 8}, URL)
    assert [source.endpoint for source in ranks] == [f"tcp://gpu7:{5557 + rank}" for rank in range(4)]


@pytest.mark.parametrize(
    "payload",
    [
        None, [], {}, {"0": None}, {"0": {}}, {"0": {"enable_kv_cache_events": False, "publisher": "zmq", "endpoint": "tcp://*:1"}},
        {"0": {"enable_kv_cache_events": True, "publisher": "null", "endpoint": "tcp://*:1"}}, {"x": {"enable_kv_cache_events": True}},
        {"kv_events_config": None}, {"kv_events_config": "{"}, {"kv_events_config": "3"},
    ],
)  # fmt: skip
def test_engines_without_events_have_no_source(payload: object) -> None:
    assert from_vllm(payload, URL) == []
    assert from_sglang(payload, URL) == []


@pytest.mark.parametrize(
    ("endpoint", "url", "seen"),
    [
        ("tcp://*:5557", "http://10.0.0.1:8000", "tcp://10.0.0.1:5557"),
        ("tcp://0.0.0.0:5557", "http://gpu7:8000", "tcp://gpu7:5557"),
        ("tcp://[::]:5557", "http://[fd00::1]:8000", "tcp://[fd00::1]:5557"),
        ("tcp://localhost:5557", "http://gpu7:8000", "tcp://gpu7:5557"),
        ("tcp://other:5557", "http://gpu7:8000", "tcp://other:5557"),
        ("inproc://cache", "http://gpu7:8000", "inproc://cache"),
    ],
)
def test_an_address_that_the_engine_binds_becomes_its_host(endpoint: str, url: str, seen: str) -> None:
    assert reachable(endpoint, url) == seen
