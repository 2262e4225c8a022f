from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvindex.chain import ChainState, identity_seed

SEED = identity_seed("a-model")


def chain_of(data: bytes, block_bytes: int = 16) -> list[int]:
    return ChainState.start(SEED, block_bytes).extend(data).chain().hashes


@given(st.lists(st.binary(max_size=70), max_size=12), st.integers(1, 40))
def test_splits_of_a_stream_do_not_matter(pieces: list[bytes], block_bytes: int) -> None:
    state = ChainState.start(SEED, block_bytes)
    for piece in pieces:
        state = state.extend(piece)
    stream = b"".join(pieces)
    assert state.chain() == ChainState.start(SEED, block_bytes).extend(stream).chain()
    assert state.chain().length == len(stream)
    assert len(state.chain().hashes) == len(stream) // block_bytes


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_changed_byte_changes_every_hash_from_its_block_on(stream: bytes, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(stream) - 1))
    changed = bytearray(stream)
    changed[position] ^= data.draw(st.integers(1, 255))
    before, after = chain_of(stream), chain_of(bytes(changed))
    block = position // 16
    assert before[:block] == after[:block]
    assert all(old != new for old, new in zip(before[block:], after[block:], strict=True))


@given(st.binary(max_size=100), st.binary(max_size=100), st.binary(max_size=100))
def test_a_fork_leaves_its_checkpoint_valid(trunk: bytes, left: bytes, right: bytes) -> None:
    checkpoint = ChainState.start(SEED, 16).extend(trunk)
    assert checkpoint.extend(left).chain().hashes == chain_of(trunk + left)
    assert checkpoint.extend(right).chain().hashes == chain_of(trunk + right)
    assert checkpoint.chain().hashes == chain_of(trunk)


def test_hash_is_xxh3_seeded_by_the_parent_whose_lowest_bits_it_mostly_takes_over() -> None:
    blocks = random.Random(1).randbytes(8_000)
    chain = ChainState.start(SEED, 8).extend(blocks + b"c").chain()
    assert chain.length == 8_001
    parent, begins = SEED, 0
    for at, found in enumerate(chain.hashes):
        digest = xxh3_64_intdigest(blocks[8 * at : 8 * at + 8], parent)
        assert found >> 24 == digest >> 24
        begins += found == digest
        assert found == digest or found % 2**24 == parent % 2**24
        parent = found
    assert chain.hashes[0] == xxh3_64_intdigest(blocks[:8], SEED)
    assert 75 < begins < 175


def test_prompts_of_an_identity_are_in_runs_of_their_own_from_the_first_block_on() -> None:
    assert len({chain_of(bytes([first]) * 16)[0] % 2**24 for first in range(256)}) > 250


def test_identity_separates_models_salts_and_their_borders() -> None:
    seeds = [
        identity_seed("model"), identity_seed("model", ""), identity_seed("model", "a", "bc"), identity_seed("model", "ab", "c"),
        identity_seed("mode", "l"), identity_seed("other"), identity_seed(""),
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert identity_seed("model", "salt") == identity_seed("model", "salt")
    assert identity_seed("lone surrogate \ud800") != identity_seed("lone surrogate ")


def test_block_bytes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_bytes"):
        ChainState.start(SEED, 0)
