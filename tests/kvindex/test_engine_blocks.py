from __future__ import annotations

import logging
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex.chain import block_hashes, identity_seed
from kvindex.engine_blocks import EXPIRE_BLOCKS, EngineBlocks
from kvindex.memory import MemoryIndex
from tests.kvindex.event_batches import CLEARED, batch, own_chain, removed, stored

B = 4  # tokens of an index block
TOKENS = list(range(1000, 1040))  # ten index blocks
CHAIN = own_chain(TOKENS, B)
ENGINE = list(range(1, 11))  # the engine's hashes of those


class Feed(EngineBlocks):
    """An EngineBlocks with an index of its own."""

    def __init__(self, holder: str = "w", block_tokens: int = B, index: MemoryIndex | None = None) -> None:
        self.memory = MemoryIndex() if index is None else index
        super().__init__(self.memory, holder, block_tokens)

    def tell(self, *events: Any) -> None:
        self.apply(batch(*events))

    def depth(self, chain: list[int] = CHAIN, holder: str | None = None) -> int:
        return self.memory.match(chain).get(holder or self.holder, 0)


def prefix(count: int, **more: Any) -> dict[str, Any]:
    """The first blocks of the chain, stored."""
    return stored(ENGINE[:count], TOKENS[: count * B], **more)


def test_a_stored_prompt_matches_the_chain_that_the_gateway_computes() -> None:
    feed = Feed()
    feed.tell(prefix(4))
    assert feed.depth() == 4
    feed.tell(stored(ENGINE[4:6], TOKENS[4 * B : 6 * B], ENGINE[3]), stored([ENGINE[6]], TOKENS[6 * B : 7 * B], ENGINE[5]))
    assert feed.depth() == 7
    assert (feed.stored, feed.blocks, feed.tiers, feed.mismatch) == (7, 7, ("w",), None)


def test_the_own_chain_is_over_little_endian_token_ids_seeded_by_lora_and_salt() -> None:
    seed = identity_seed("tokens", "adapter", "tenant")
    first, second = block_hashes(b"".join(token.to_bytes(4, "little") for token in TOKENS[: 2 * B]), 4 * B, seed)
    assert own_chain(TOKENS[: 2 * B], B, "adapter", "tenant") == [first, second]
    feed = Feed()
    feed.tell(prefix(2, lora_name="adapter", extra_keys=[["adapter", "tenant"], ["adapter"]]))
    assert feed.depth([first, second]) == 2


def test_the_array_form_and_every_kind_of_hash() -> None:
    for hashes in ([1, 2], [2**64 - 1, 2**63], [-1, -(2**63)], [b"\x00" * 32, b"\xff" * 32]):
        feed = Feed()
        feed.apply(msgspec.msgpack.encode([1.0, [["BlockStored", hashes, None, TOKENS[:8], B, None, "GPU"]]]))
        feed.apply(msgspec.msgpack.encode([1.0, [["BlockStored", [77], hashes[1], TOKENS[8:12], B, None]]]))
        assert feed.depth() == 3
        feed.apply(msgspec.msgpack.encode([1.0, [["BlockRemoved", [77]], ["BlockRemoved", [hashes[1]], "GPU"]]]))
        assert feed.depth() == 1


def test_removal_in_any_order_leaves_nothing() -> None:
    feed = Feed()
    feed.tell(prefix(10))
    for block in random.Random(3).sample(ENGINE, 10):
        feed.tell(removed(block))
    assert (feed.removed, feed.blocks, len(feed.memory), feed._engine_hash) == (10, 0, 0, {})


def test_a_block_stored_twice_is_held_until_both_copies_are_gone() -> None:
    feed = Feed()
    feed.tell(prefix(3))
    for _ in range(2):
        feed.tell(stored([ENGINE[2]], TOKENS[2 * B : 3 * B], ENGINE[1]))
    assert (feed.stored, feed.blocks) == (5, 3)
    feed.tell(removed(ENGINE[2]))
    feed.tell(removed(ENGINE[2]))
    assert feed.depth() == 3
    feed.tell(removed(ENGINE[2]))
    assert feed.depth() == 2
    assert not feed._tiers[0].copies  # type: ignore[union-attr]


def test_a_removal_and_a_store_of_the_same_block_in_one_batch_count_in_their_order() -> None:
    feed = Feed()
    feed.tell(prefix(2))
    feed.tell(removed(ENGINE[1]), stored([ENGINE[1]], TOKENS[B : 2 * B], ENGINE[0]))
    assert feed.depth() == 2
    feed.tell(stored([ENGINE[2]], TOKENS[2 * B : 3 * B], ENGINE[1]), removed(ENGINE[2]))
    assert feed.depth() == 2


def test_an_unknown_parent_indexes_nothing_and_neither_do_its_descendants() -> None:
    feed = Feed()
    feed.tell(stored([50, 51], TOKENS[:8], parent=49), stored([52], TOKENS[8:12], parent=51))
    assert (feed.orphaned, feed.stored, len(feed.memory)) == (3, 0, 0)
    feed.tell(removed(52), removed(50))
    assert (feed.removed, feed.ignored) == (0, 2)


def test_token_ids_that_are_no_tokens_are_orphans() -> None:
    feed = Feed()
    feed.tell(stored([1], [1, 2, 3, 2**32]), stored([2], [1, 2, -3, 4]), stored([3], [1, 2, 3, 4], 1))
    assert (feed.orphaned, feed.stored, feed.malformed) == (3, 0, 0)


def test_a_cleared_cache_is_empty_and_can_be_filled_again() -> None:
    feed = Feed()
    feed.tell(prefix(5))
    feed.tell(CLEARED, stored([99], TOKENS[:B]))
    assert (feed.depth(), feed.blocks) == (1, 1)
    feed.tell(stored([100], TOKENS[B : 2 * B], ENGINE[0]))
    assert feed.orphaned == 1


def test_a_reset_forgets_everything_but_the_counters() -> None:
    feed = Feed()
    feed.tell(prefix(5), prefix(2, medium="CPU"))
    feed.reset()
    assert (feed.depth(), feed.depth(holder="w@cpu"), feed.blocks, feed.tiers, feed.stored) == (0, 0, 0, ("w",), 7)
    feed.tell(prefix(3))
    assert feed.depth() == 3


def test_a_batch_that_cannot_be_read_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed()
    with caplog.at_level(logging.WARNING):
        feed.apply(b"nonsense")
        feed.apply(b"")
    assert (feed.malformed, len(caplog.records)) == (2, 1)


def test_ranks_are_holders_of_their_own() -> None:
    index = MemoryIndex()
    ranks = [Feed(f"w:{rank}", index=index) for rank in range(2)]
    ranks[0].tell(prefix(5))
    ranks[1].tell(prefix(2))
    assert index.match(CHAIN) == {"w:0": 5, "w:1": 2}
    ranks[0].tell(CLEARED)
    assert index.match(CHAIN) == {"w:1": 2}


# ---- what else a block's identity is made of


@pytest.mark.parametrize(
    ("fields", "lora", "salt"),
    [
        ({}, "", ""),
        ({"extra_keys": [["tenant"], None]}, "", "tenant"),
        ({"extra_keys": [[["cache_salt", "tenant"]], None]}, "", "tenant"),
        ({"cache_salt": "tenant"}, "", "tenant"),
        ({"lora_id": 1, "lora_name": "a", "extra_keys": [["a"], ["a"]]}, "a", ""),
        ({"lora_id": 1, "lora_name": "a", "extra_keys": [["a", "tenant"], ["a"]]}, "a", "tenant"),
        ({"lora_id": 1, "lora_name": "a", "extra_keys": [["a", "a"], ["a"]]}, "a", "a"),
        ({"lora_name": "a", "extra_keys": [[["lora", "a", "/adapters/a"], ["cache_salt", "t"]], [["lora", "a", "/adapters/a"]]]}, "a", "t"),
        ({"lora_id": 1, "lora_name": "a"}, "a", ""),
    ],
)
def test_salt_and_lora_are_the_seed(fields: dict[str, Any], lora: str, salt: str) -> None:
    feed = Feed()
    feed.tell(prefix(2, **fields))
    child = {name: value for name, value in fields.items() if name != "extra_keys"}
    keys = {"extra_keys": fields["extra_keys"][1:]} if "extra_keys" in fields else {}
    feed.tell(stored([ENGINE[2]], TOKENS[2 * B : 3 * B], ENGINE[1], **child, **keys))
    for asked in [(lora, salt), ("", ""), ("a", ""), ("", "tenant"), ("", "a"), ("b", "t")]:
        expected = 3 if asked == (lora, salt) else 0
        assert feed.depth(own_chain(TOKENS, B, *asked)) == expected, asked


def test_an_adapter_known_by_its_number_only_matches_no_request() -> None:
    feed = Feed()
    feed.tell(prefix(3, lora_id=2))
    assert (feed.depth(), feed.stored) == (0, 3)


@pytest.mark.parametrize(
    "key",
    [["image-hash", 2], ["mm", "image-hash", 2], b"\x01" * 32, ["prompt_embeds", b"\x01" * 32]],
    ids=["image", "tagged image", "embeds", "tagged embeds"],
)
def test_blocks_with_an_image_or_embeddings_match_no_text_of_the_same_tokens(key: Any) -> None:
    feed = Feed()
    feed.tell(prefix(4, extra_keys=[None, [key], None, None]))
    assert feed.depth() == 1
    other = Feed(index=feed.memory, holder="other")
    other.tell(prefix(4))
    assert feed.memory.match(CHAIN) == {"w": 1, "other": 4}
    feed.tell(stored([20], TOKENS[4 * B : 5 * B], ENGINE[3]))  # nor do descendants
    assert feed.depth() == 1
    feed.tell(*(removed(block) for block in (20, 4, 3, 2, 1)))
    assert (feed.depth(), feed.memory.match(CHAIN)) == (0, {"other": 4})


def test_an_image_beside_a_salt_in_the_first_block() -> None:
    feed = Feed()
    feed.tell(prefix(2, extra_keys=[[["image", 0], "tenant"], None]))
    assert feed.depth(own_chain(TOKENS, B, salt="tenant")) == 0
    feed.tell(stored([40], TOKENS[:B], extra_keys=[["tenant"]]))
    assert feed.depth(own_chain(TOKENS, B, salt="tenant")) == 1


def test_a_bare_string_is_a_salt_only_where_a_sequence_begins_and_alone() -> None:
    feed = Feed()
    feed.tell(prefix(1), stored([2], TOKENS[B : 2 * B], 1, extra_keys=[["image"]]))
    assert feed.depth() == 1
    feed.tell(stored([50], TOKENS[:B], extra_keys=[["image", "tenant"]]))
    for salt in ("image", "tenant"):
        assert feed.depth(own_chain(TOKENS, B, salt=salt)) == 0


# ---- engine blocks smaller than the index's


def engine_tokens(count: int, size: int, start: int = 0) -> list[int]:
    return TOKENS[start * size : (start + count) * size]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("together", [1, 3, 7, 40])
def test_an_index_block_is_held_when_its_last_engine_block_is(size: int, together: int) -> None:
    feed = Feed()
    count = len(TOKENS) // size
    hashes = list(range(100, 100 + count))
    for start in range(0, count, together):
        some = hashes[start : start + together]
        feed.tell(stored(some, engine_tokens(len(some), size, start), hashes[start - 1] if start else None, size))
        assert feed.depth() == min(start + together, count) * size // B
    assert feed.blocks == count
    for number in reversed(range(count)):
        feed.tell(removed(hashes[number]))
        assert feed.depth() == number * size // B
    assert (feed.blocks, feed._engine_hash, len(feed.memory)) == (0, {}, 0)


def test_a_fork_inside_an_index_block() -> None:
    feed = Feed()
    other = [*TOKENS[:5], 7, 7, 7, *TOKENS[8:12]]
    feed.tell(stored([1, 2, 3, 4, 5, 6, 7, 8], TOKENS[:8], block_size=1))
    feed.tell(stored([16, 17], [7, 7], 5, 1), stored([18, 19, 20, 21, 22], [7, *TOKENS[8:12]], 17, 1))
    assert (feed.depth(), feed.depth(own_chain(other, B))) == (2, 3)
    feed.tell(stored([9, 10, 11, 12], TOKENS[8:12], 8, 1))
    assert feed.depth() == 3


def test_a_fork_inside_an_index_block_that_is_full_already_or_parted_by_an_image() -> None:
    feed = Feed()
    feed.tell(stored([1, 2], TOKENS[:4], block_size=2))
    feed.tell(stored([3], [8, 9], 1, 2), stored([4], TOKENS[2:4], 1, 2, extra_keys=[[["image", 0]]]))
    assert (feed.depth(), feed.depth(own_chain([*TOKENS[:2], 8, 9], B))) == (1, 1)
    assert feed.stored == 4
    feed.tell(removed(2))
    assert feed.depth() == 0  # the one with the image is still there, and not this


def test_an_image_does_not_reach_the_text_that_parts_from_it_inside_an_index_block() -> None:
    feed = Feed()
    feed.tell(stored([1], TOKENS[:2], block_size=2), stored([2], TOKENS[2:4], 1, 2, extra_keys=[[["image", 0]]]))
    feed.tell(stored([3], TOKENS[2:4], 1, 2))
    assert feed.depth() == 1


def test_copies_of_small_blocks_are_counted() -> None:
    feed = Feed()
    feed.tell(stored([1, 2], TOKENS[:4], block_size=2))
    feed.tell(stored([2], TOKENS[2:4], 1, 2))
    feed.tell(removed(2))
    assert feed.depth() == 1
    feed.tell(removed(2))
    assert feed.depth() == 0


def test_engine_blocks_that_do_not_fit_are_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed(block_tokens=48)
    with caplog.at_level(logging.WARNING):
        feed.tell(stored([1], list(range(32))), stored([2], list(range(32)), 1))
    assert (feed.ignored, feed.stored, len(caplog.records)) == (2, 0, 1)
    assert feed.mismatch is not None and "48" in feed.mismatch and "32" in feed.mismatch
    feed.reset()
    assert feed.mismatch is None


def test_blocks_of_several_sizes_that_do_not_line_up_are_orphans() -> None:
    feed = Feed()
    feed.tell(stored([1], TOKENS[:2]), stored([2, 3], TOKENS[2:10], 1, 4))
    assert (feed.stored, feed.orphaned, feed.blocks) == (1, 2, 1)


# ---- tiers


def test_tiers_are_cumulative_and_appear_with_their_first_event() -> None:
    feed = Feed()
    feed.tell(prefix(3))
    assert feed.tiers == ("w",)
    feed.tell(stored(ENGINE[3:5], TOKENS[3 * B : 5 * B], ENGINE[2], medium="CPU"))
    assert feed.tiers == ("w", "w@cpu")
    assert feed.memory.match(CHAIN) == {"w": 3, "w@cpu": 5}
    feed.tell(stored([ENGINE[5]], TOKENS[5 * B : 6 * B], ENGINE[4], medium="STORAGE"))
    assert feed.tiers == ("w", "w@cpu", "w@disk")
    assert feed.memory.match(CHAIN) == {"w": 3, "w@cpu": 5, "w@disk": 6}
    feed.tell(stored(ENGINE[3:4], TOKENS[3 * B : 4 * B], ENGINE[2]))
    assert feed.memory.match(CHAIN) == {"w": 4, "w@cpu": 5, "w@disk": 6}


def test_a_block_leaves_a_tier_when_no_faster_one_has_it_either() -> None:
    feed = Feed()
    feed.tell(prefix(3), prefix(3, medium="CPU_PINNED"), prefix(1, medium="DISK"))
    feed.tell(removed(3), removed(2))
    assert feed.memory.match(CHAIN) == {"w": 1, "w@cpu": 3, "w@disk": 3}
    feed.tell(removed(3, medium="CPU_PINNED"), removed(1, medium="CPU_PINNED"))
    assert feed.memory.match(CHAIN) == {"w": 1, "w@cpu": 2, "w@disk": 2}
    feed.tell(removed(1), removed(2, medium="CPU_PINNED"))
    assert feed.memory.match(CHAIN) == {"w@disk": 1}
    feed.tell(removed(1, medium="DISK"))
    assert (feed.memory.match(CHAIN), feed.blocks, feed._engine_hash) == ({}, 0, {})


@pytest.mark.parametrize(
    ("fields", "tier"),
    [
        ({"medium": None}, "w"), ({"medium": "GPU"}, "w"), ({"medium": "cpu"}, "w@cpu"), ({"medium": "EXTERNAL"}, "w@disk"),
        ({"medium": "NEW"}, "w@disk"), ({"medium": "CPU", "locality": "REMOTE"}, "w@disk"),
        ({"medium": "CPU", "locality": "LOCAL"}, "w@cpu"),
    ],
)  # fmt: skip
def test_media(fields: dict[str, Any], tier: str) -> None:
    feed = Feed()
    feed.tell(prefix(2, **fields))
    assert set(feed.memory.match(CHAIN)) == {tier}
    feed.tell(removed(1, 2, **fields))
    assert feed.memory.match(CHAIN) == {}


def test_a_slower_tier_begins_with_what_the_faster_ones_have_and_a_clear_empties_all() -> None:
    feed = Feed()
    feed.tell(prefix(4))
    feed.expect(CHAIN[:6], 4, until=5.0)
    feed.tell(prefix(1, medium="CPU"))
    assert feed.memory.match(CHAIN) == {"w": 6, "w@cpu": 6}
    feed.expire(5.0)
    assert feed.memory.match(CHAIN) == {"w": 4, "w@cpu": 4}
    feed.tell(CLEARED)
    assert (feed.memory.match(CHAIN), feed.tiers) == ({}, ("w", "w@cpu"))


def test_offloaded_blocks_keep_the_identity_that_the_gpu_reported() -> None:
    feed = Feed()
    feed.tell(prefix(2, extra_keys=[["tenant"], None]))
    feed.tell(prefix(2, medium="CPU"), stored([ENGINE[0]], [], medium="DISK", block_size=0, kv_cache_spec_kind=None))
    assert feed.memory.match(CHAIN) == {}  # the offloading connector leaves the keys out: still the tenant's
    assert feed.memory.match(own_chain(TOKENS, B, salt="tenant")) == {"w": 2, "w@cpu": 2, "w@disk": 2}
    feed.tell(stored([77], [], medium="CPU"))
    assert feed.orphaned == 1


# ---- predictions


def test_what_is_expected_counts_until_its_time() -> None:
    feed = Feed()
    feed.tell(prefix(2))
    feed.expect(CHAIN[:6], 2, until=10.0)
    assert feed.depth() == 6
    feed.expire(9.9)
    assert feed.depth() == 6
    feed.expire(10.0)
    assert (feed.depth(), len(feed.memory), feed._expected, len(feed._expiries)) == (2, 2, {}, 0)


def test_an_event_confirms_what_was_expected() -> None:
    feed = Feed()
    feed.expect(CHAIN[:6], 0, until=10.0)
    feed.tell(prefix(4))
    feed.expire(10.0)
    assert feed.depth() == 4
    feed.expect(CHAIN[:6], 4, until=20.0)
    feed.tell(stored(ENGINE[4:6], TOKENS[4 * B : 6 * B], ENGINE[3]))
    feed.tell(removed(6))
    assert feed.depth() == 5
    feed.expire(20.0)
    assert feed.depth() == 5


def test_expecting_what_is_held_does_not_make_it_expire() -> None:
    feed = Feed()
    feed.tell(prefix(4))
    feed.expect(CHAIN[:5], 1, until=10.0)
    feed.expire(10.0)
    assert feed.depth() == 4


def test_a_later_request_prolongs_what_is_expected() -> None:
    feed = Feed()
    feed.expect(CHAIN[:4], 0, until=10.0)
    feed.expect(CHAIN[:6], 0, until=12.0)
    feed.expire(11.0)
    assert feed.depth() == 6
    feed.expire(12.0)
    assert (feed.depth(), feed._expected) == (0, {})


@pytest.mark.parametrize("forget", ["clear", "reset"])
def test_what_was_expected_of_a_cache_that_was_cleared_is_forgotten(forget: str) -> None:
    feed = Feed()
    feed.tell(prefix(1))
    feed.expect(CHAIN, 1, until=10.0)
    if forget == "clear":
        feed.tell(CLEARED)
    else:
        feed.reset()
    assert (feed.depth(), feed._expected, len(feed._expiries)) == (0, {}, 0)
    feed.tell(prefix(2))
    feed.expire(10.0)
    assert feed.depth() == 2


def test_expiry_is_bounded_and_takes_a_chain_from_its_end() -> None:
    feed = Feed()
    rng = random.Random(1)
    chain = [rng.getrandbits(64) for _ in range(EXPIRE_BLOCKS + 500)]
    feed.expect(chain, 0, until=1.0)
    feed.expire(2.0)
    assert feed.depth(chain) == 500
    feed.expire(2.0)
    assert feed.depth(chain) == 0


def test_expected_on_the_gpu_while_the_host_has_it() -> None:
    feed = Feed()
    feed.tell(prefix(3, medium="CPU"))
    feed.expect(CHAIN[:4], 0, until=1.0)
    assert feed.memory.match(CHAIN) == {"w": 4, "w@cpu": 4}
    feed.tell(removed(3, medium="CPU"))
    assert [feed.memory.match([own]) for own in CHAIN[2:4]] == [{"w": 1, "w@cpu": 1}] * 2
    feed.tell(stored([3], TOKENS[2 * B : 3 * B], 2, medium="CPU"))
    feed.expire(1.0)
    assert feed.memory.match(CHAIN) == {"w@cpu": 3}


def test_an_offloaded_block_does_not_confirm_what_is_expected_on_the_gpu() -> None:
    feed = Feed()
    feed.expect(CHAIN[:2], 0, until=1.0)
    feed.tell(prefix(2, medium="CPU"))
    assert feed.memory.match(CHAIN) == {"w": 2, "w@cpu": 2}
    feed.expire(1.0)
    assert feed.memory.match(CHAIN) == {"w@cpu": 2}


# ---- hybrid models


def group(kind: str, index: int, count: int, start: int = 0, size: int = B, keep: list[int] | None = None, **more: Any) -> dict[str, Any]:
    """Blocks of `size` tokens of the chain in another group; the hash of a block is that of the prefix it ends."""
    ends = [(number + 1) * size // B for number in range(start, start + count)]
    hashes = [ENGINE[end - 1] for end in ends if keep is None or end in keep]
    return stored(
        hashes, TOKENS[start * size : (start + count) * size], ENGINE[start * size // B - 1] if start else None, size,
        group_idx=index, kv_cache_spec_kind=kind, **more,
    )  # fmt: skip


def test_only_full_attention_leaves_the_depth_as_it_is() -> None:
    for kind in ("full_attention", "mla_attention", "sink_full_attention", None):
        feed = Feed()
        feed.tell(prefix(5, kv_cache_spec_kind=kind))
        assert (feed.depth(), feed.usable(CHAIN, 5)) == (5, 5)


@pytest.mark.parametrize("window_first", [False, True])
@pytest.mark.parametrize("kind", ["sliding_window", "sliding_window_mla"])
def test_a_window_group_must_hold_the_last_blocks_of_the_window(kind: str, window_first: bool) -> None:
    feed = Feed()
    events = [prefix(8), group(kind, 1, 8, kv_cache_spec_sliding_window=2 * B + 1)]  # two blocks
    feed.tell(*(reversed(events) if window_first else events))
    assert (feed.depth(), feed.stored) == (8, 8)
    assert [feed.usable(CHAIN, depth) for depth in (8, 5, 1, 0)] == [8, 5, 1, 0]
    feed.tell(*(removed(block, group_idx=1) for block in (1, 2, 3)))
    assert feed.depth() == 8  # the main chain has them still
    assert [feed.usable(CHAIN, depth) for depth in (8, 5, 4, 3)] == [8, 5, 0, 0]
    feed.tell(removed(7, group_idx=1))
    assert [feed.usable(CHAIN, depth) for depth in (8, 7, 6, 5)] == [6, 6, 6, 5]


def test_a_window_of_one_token_more_needs_one_block_more() -> None:
    for window, needed in [(1, 0), (2, 1), (B + 1, 1), (B + 2, 2), (2 * B + 1, 2)]:
        feed = Feed()
        feed.tell(prefix(6), group("sliding_window", 1, 6, kv_cache_spec_sliding_window=window))
        feed.tell(*(removed(block, group_idx=1) for block in range(1, 7 - needed)))
        assert feed.usable(CHAIN, 6) == 6, window
        if needed:
            feed.tell(removed(7 - needed, group_idx=1))
            assert feed.usable(CHAIN, 6) < 6, window


def test_window_blocks_that_are_not_listed_are_not_held() -> None:
    feed = Feed()
    feed.tell(prefix(6), group("sliding_window", 1, 6, keep=[5, 6], kv_cache_spec_sliding_window=2 * B + 1))
    assert [feed.usable(CHAIN, depth) for depth in (6, 5, 4)] == [6, 0, 0]


@pytest.mark.parametrize(("size", "usable"), [(2 * B, 4), (3 * B, 3)])
def test_a_window_group_of_larger_blocks_ends_hits_at_its_own(size: int, usable: int) -> None:
    feed = Feed()
    feed.tell(prefix(5), group("sliding_window", 1, 1, size=size, kv_cache_spec_sliding_window=B))
    feed.tell(group("sliding_window", 1, 1, 1, size=size, kv_cache_spec_sliding_window=B))
    assert feed.usable(CHAIN, 5) == usable


def test_a_sequence_shorter_than_the_window_needs_all_of_it() -> None:
    feed = Feed()
    window = {"size": 2 * B, "kv_cache_spec_sliding_window": 100 * B}
    feed.tell(prefix(7), group("sliding_window", 1, 3, **window))
    assert [feed.usable(CHAIN, depth) for depth in (7, 5, 1)] == [6, 4, 0]
    feed.tell(removed(4, group_idx=1))
    assert feed.usable(CHAIN, 7) == 2


def test_a_recurrent_group_hits_at_checkpoints_only() -> None:
    feed = Feed()
    feed.tell(prefix(8), group("mamba", 1, 4, size=2 * B, keep=[4]), group("mamba", 2, 8, keep=[4, 6]))
    assert [feed.usable(CHAIN, depth) for depth in (8, 6, 4, 3)] == [4, 4, 4, 0]
    feed.tell(removed(4, group_idx=1))
    assert feed.usable(CHAIN, 8) == 0
    feed.tell(group("mamba", 1, 1, 2, size=2 * B))
    assert [feed.usable(CHAIN, depth) for depth in (8, 6, 5)] == [6, 6, 0]


def test_groups_have_to_agree_on_one_length() -> None:
    feed = Feed()
    feed.tell(
        prefix(9), group("mamba", 1, 9, keep=[3, 8]), group("sliding_window", 2, 9, keep=[2, 3, 6, 7], kv_cache_spec_sliding_window=2 * B)
    )
    assert feed.usable(CHAIN, 9) == 3  # 8 has no window, the window at 7 no checkpoint
    feed.tell(removed(2, group_idx=2))
    assert feed.usable(CHAIN, 9) == 0


def test_a_second_full_group_and_chunked_attention_need_the_whole_prefix() -> None:
    for kind, more in [("full_attention", {}), ("chunked_local_attention", {}), ("sliding_window", {"kv_cache_spec_sliding_window": None})]:
        feed = Feed()
        feed.tell(prefix(6), group(kind, 1, 6, **more))
        assert (feed.depth(), feed.usable(CHAIN, 6)) == (6, 6)
        feed.tell(removed(4, group_idx=1))
        assert (feed.depth(), feed.usable(CHAIN, 6)) == (6, 3)


@pytest.mark.parametrize("kind", ["unknown", "cross_attention", "something_new"])
def test_a_group_of_an_unknown_kind_allows_no_hit_and_warns_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            feed.tell(prefix(4), group(kind, 1, 4))
            feed.tell(removed(1, group_idx=1))
    assert (feed.depth(), feed.usable(CHAIN, 4), feed.ignored) == (4, 0, 10)
    assert [kind in record.getMessage() for record in caplog.records] == [True]
    feed.reset()
    feed.tell(prefix(4))
    assert feed.usable(CHAIN, 4) == 4


def test_a_model_of_window_layers_only() -> None:
    feed = Feed()
    feed.tell(group("sliding_window", 0, 6, kv_cache_spec_sliding_window=2 * B + 1))
    assert (feed.depth(), feed.usable(CHAIN, 6), feed.stored) == (6, 6, 6)
    feed.tell(removed(5))
    assert [feed.usable(CHAIN, depth) for depth in (6, 4)] == [4, 4]


def test_a_full_group_that_turns_up_late_becomes_the_main_one() -> None:
    feed = Feed()
    feed.tell(group("sliding_window", 0, 6, kv_cache_spec_sliding_window=2 * B))
    feed.tell(prefix(3, group_idx=1))
    assert feed.depth() == 3
    feed.tell(group("sliding_window", 0, 6, kv_cache_spec_sliding_window=2 * B))
    assert (feed.depth(), feed.usable(CHAIN, 3)) == (3, 3)


def test_groups_are_looked_at_in_the_tier_that_was_matched() -> None:
    feed = Feed()
    window = {"kv_cache_spec_sliding_window": B + 1}
    feed.tell(prefix(4), group("sliding_window", 1, 2, **window), prefix(4, medium="CPU"))
    feed.tell(group("sliding_window", 1, 2, 2, medium="CPU", **window))
    assert feed.usable(CHAIN, 4) == 2
    assert feed.usable(CHAIN, 4, tier=1) == 4


def test_expected_blocks_satisfy_windows_but_not_checkpoints() -> None:
    feed = Feed()
    feed.tell(prefix(2), group("sliding_window", 1, 2, kv_cache_spec_sliding_window=2 * B))
    feed.expect(CHAIN[:5], 2, until=1.0)
    assert feed.usable(CHAIN, 5) == 5
    feed.tell(group("mamba", 2, 2, keep=[2]))
    assert feed.usable(CHAIN, 5) == 2


def test_a_cleared_cache_is_empty_in_all_groups() -> None:
    feed = Feed()
    feed.tell(prefix(4), group("sliding_window", 1, 4, kv_cache_spec_sliding_window=B))
    feed.tell(CLEARED, prefix(4))
    assert (feed.depth(), feed.usable(CHAIN, 4)) == (4, 0)


# ---- against a naive model

KINDS = ["store"] * 5 + ["remove"] * 2 + ["expect", "expire", "clear"]
step = st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 23), st.integers(1, 4), st.sampled_from(["GPU", "CPU"]))


class Model:
    """What is held, by brute force: copies of each block, named by the tokens it ends. Three sequences part inside an index block."""

    sequences = [list(range(24)), [*range(9), *range(100, 115)], [*range(9), *range(100, 106), *range(200, 209)]]
    chains = [own_chain(tokens, B) for tokens in sequences]

    def __init__(self, size: int) -> None:
        self.size = size
        self.count = 24 // size
        self.seen_cpu = False
        self.expected: dict[int, float] = {}
        self.clear()

    def clear(self) -> None:
        self.copies: dict[str, Counter[int]] = {"GPU": Counter(), "CPU": Counter()}
        self.expected = {}

    def name(self, number: int, end: int) -> int:
        return hash(tuple(self.sequences[number][: end * self.size]))

    def held(self, block: int) -> bool:
        return any(tier[block] for tier in self.copies.values())

    def places(self, number: int) -> list[int]:
        """Where a stored event may follow, and one place where its parent may be unknown."""
        return [end for end in range(self.count) if end == 0 or self.held(self.name(number, end))] + [self.count // 2]

    def store(self, number: int, start: int, blocks: list[int], medium: str) -> None:
        if start and not self.held(self.name(number, start)) and not (medium == "CPU" and all(map(self.held, blocks))):
            return
        self.copies[medium].update(blocks)
        self.seen_cpu |= medium == "CPU"
        if medium == "GPU":
            for end in range(start + 1, start + len(blocks) + 1):
                if end * self.size % B == 0:
                    self.expected.pop(self.chains[number][end * self.size // B - 1], None)

    def check(self, feed: Feed) -> None:
        for number, chain in enumerate(self.chains):
            held: dict[str, list[bool]] = {"w": [], "w@cpu": []}
            for depth, own in enumerate(chain, 1):
                block = self.name(number, depth * B // self.size)
                on_gpu = bool(self.copies["GPU"][block]) or own in self.expected
                held["w"].append(on_gpu)
                held["w@cpu"].append(self.seen_cpu and (on_gpu or bool(self.copies["CPU"][block])))
                assert set(feed.memory.match([own])) == {holder for holder in held if held[holder][-1]}
            for holder, blocks in held.items():
                if blocks == sorted(blocks, reverse=True):  # without holes the index is exact
                    assert feed.depth(chain, holder) == sum(blocks)
        assert feed.blocks == sum(sum(count > 0 for count in tier.values()) for tier in self.copies.values())


@settings(max_examples=200, deadline=None)
@given(st.lists(step, max_size=40), st.sampled_from([1, 2, 4]), st.booleans())
def test_any_sequence_of_events_against_a_model(steps: list[tuple[str, int, int, int, str]], size: int, tiers: bool) -> None:
    feed, model, now = Feed(), Model(size), 0.0
    for kind, number, at, length, medium in steps:
        medium = medium if tiers else "GPU"
        if kind == "store":
            places = model.places(number)
            start = places[at % len(places)]
            end = min(start + length, model.count)
            blocks = [model.name(number, place) for place in range(start + 1, end + 1)]
            parent = model.name(number, start) if start else None
            feed.tell(stored(blocks, model.sequences[number][start * size : end * size], parent, size, medium=medium))
            model.store(number, start, blocks, medium)
        elif kind == "remove":
            held = sorted(block for block, count in model.copies[medium].items() if count) or [123]
            blocks = [held[at % len(held)]]
            feed.tell(removed(*blocks, medium=medium))
            model.copies[medium].subtract(block for block in blocks if model.copies[medium][block])
        elif kind == "clear" and at == 0:
            feed.tell(CLEARED)
            model.clear()
        elif kind == "expect":
            now += at  # `until` does not decrease
            chain = model.chains[number][: length + 1]
            feed.expect(chain, 0, now)
            for depth, own in enumerate(chain, 1):
                if not model.copies["GPU"][model.name(number, depth * B // size)]:
                    model.expected[own] = now
        elif kind == "expire":
            feed.expire(now - length)
            model.expected = {own: until for own, until in model.expected.items() if until > now - length}
        model.check(feed)
        assert feed._expected == model.expected
    for medium, tier in model.copies.items():
        feed.tell(*(removed(block, medium=medium) for block in tier.elements()))
    feed.expire(now)
    assert (feed._engine_hash, feed._expected, feed.blocks) == ({}, {}, 0)
    assert not any(feed.memory.match([own]) for chain in model.chains for own in chain)


def test_two_engine_hashes_of_one_prefix() -> None:
    """An engine that does not publish salts: what two tenants stored looks alike."""
    feed = Feed()
    feed.tell(prefix(2), stored([51, 52], TOKENS[: 2 * B]))
    feed.tell(removed(2), removed(1))
    assert feed.depth() == 2
    feed.tell(removed(52), removed(51))
    assert (feed.depth(), feed.blocks, feed._engine_hash) == (0, 0, {})


def test_a_long_churn_leaves_the_size_of_what_is_held() -> None:
    feed = Feed()
    rng = random.Random(5)
    held: list[list[int]] = []
    for _ in range(400):
        hashes = [rng.getrandbits(64) for _ in range(50)]
        feed.tell(stored(hashes, [rng.randrange(1000) for _ in range(50 * B)]))
        held.append(hashes)
        if len(held) > 10:
            feed.tell(*(removed(block) for block in reversed(held.pop(0))))
    assert (feed.blocks, len(feed.memory), len(feed._engine_hash)) == (500, 500, 500)
