from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvindex import events
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, decode
from tests.kvindex.event_batches import CLEARED, batch, removed, stored

DIGEST = bytes(range(32))
pack = msgspec.msgpack.encode


def test_vllm_map_form() -> None:
    decoded = decode(batch(stored([1, 2], [5, 6, 7, 8], 9, session_id="s", ownership="x"), removed(1), CLEARED, rank=3))
    first, second, third = decoded.events
    assert decoded.ts == 1764500000.5
    assert decoded.rank == 3
    assert first == BlockStored(
        [1, 2], 9, [5, 6, 7, 8], 2, medium="GPU", group_idx=0, kv_cache_spec_kind="full_attention"
    )  # fmt: skip
    assert second == BlockRemoved([1], "GPU", 0)
    assert third == AllBlocksCleared()


def test_array_form_of_older_engines_with_and_without_the_later_fields() -> None:
    short = ["BlockStored", [1], None, [5, 6], 2, None]
    long = ["BlockStored", [1], 9, [5, 6], 2, 4, "CPU", "adapter", [["adapter", "salt"]], 1, "sliding_window", 128, "newer"]
    decoded = decode(pack([1, [short, long, ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]]]))
    assert decoded.rank is None
    assert decoded.events == [
        BlockStored([1], None, [5, 6], 2),
        BlockStored([1], 9, [5, 6], 2, 4, "CPU", "adapter", [["adapter", "salt"]], 1, "sliding_window", 128),
        BlockRemoved([1], "GPU"),
        AllBlocksCleared(),
    ]


@pytest.mark.parametrize("rank_field", ["data_parallel_rank", "attn_dp_rank"])
def test_a_batch_that_is_a_map(rank_field: str) -> None:
    decoded = decode(pack({"ts": 1.5, "events": [removed(1)], rank_field: 2}))
    assert (decoded.ts, decoded.rank, decoded.events) == (1.5, 2, [BlockRemoved([1], "GPU", 0)])


def test_hashes_are_taken_as_they_are() -> None:
    hashes = [2**64 - 1, -(2**63), 0, DIGEST]
    for payload in (batch(removed(*hashes)), pack([1.0, [["BlockRemoved", hashes]]])):
        assert decode(payload).events[0].block_hashes == hashes  # type: ignore[union-attr]


def test_an_unknown_event_is_skipped_with_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_unknown_types", set())
    with caplog.at_level(logging.WARNING):
        for unknown in ({"type": "BlockMoved", "to": [1]}, ["BlockMoved", [1]], {"type": "BlockMoved"}):
            assert decode(batch(unknown, removed(1))).events == [BlockRemoved([1], "GPU", 0)]
    assert [record.getMessage() for record in caplog.records] == ["KV events of type 'BlockMoved' are not known and ignored"]


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"hello", pack(7), pack([]), pack([1.0]), pack([1.0, 5]), pack(["now", []]), pack({"events": []}), pack([1.0, [7]]),
        pack([1.0, [[]]]), pack([1.0, [{}]]), pack([1.0, [{"type": 5}]]), batch(removed("a")), batch({"type": "BlockStored"}),
        pack([1.0, [["BlockStored"]]]), batch(stored([1], ["x"])), pack([1.0, [], "rank"]), batch(removed(1))[:-3],
    ],
)  # fmt: skip
def test_what_is_not_a_batch_raises_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode(payload)


anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=4) | st.binary(max_size=4) | st.sampled_from(["BlockStored", "type"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "events", "ts", "block_hashes"]), inner),
    max_leaves=12,
)


@given(anything)
def test_nothing_but_value_error_comes_out(value: Any) -> None:
    for payload in (pack(value), pack([1.0, [value]])):
        try:
            decode(payload)
        except ValueError:
            pass


@given(st.binary(max_size=40))
def test_nothing_but_value_error_comes_out_of_noise(payload: bytes) -> None:
    try:
        decode(payload)
    except ValueError:
        pass
