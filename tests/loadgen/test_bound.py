from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadgen.bound import InfiniteCache, LruCache
from loadgen.inspect import inspect
from loadgen.trace import Request, Session


def chain(path: str) -> list[int]:
    """Prefix-chained keys: one per leading part of `path`."""
    return [hash(path[: end + 1]) for end in range(len(path))]


def add(cache: InfiniteCache | LruCache, path: str, tokens: int | None = None) -> int:
    return cache.add(chain(path), len(path), 10, len(path) * 10 if tokens is None else tokens)


def test_a_hit_is_the_leading_part_seen_before() -> None:
    cache = InfiniteCache()
    assert add(cache, "abc") == 0
    assert add(cache, "abcde") == 30
    assert add(cache, "abxe") == 20
    assert add(cache, "bc") == 0  # the same blocks behind another prefix are other blocks


def test_the_last_token_is_always_computed() -> None:
    cache = InfiniteCache()
    add(cache, "abc")
    assert add(cache, "abc") == 20
    assert add(cache, "abc", tokens=33) == 30  # a partial block follows the three whole ones


def test_lru_forgets_the_least_recently_used() -> None:
    cache = LruCache(40)
    add(cache, "ab")
    add(cache, "cd")
    assert add(cache, "ab", 25) == 20
    add(cache, "ef")
    assert add(cache, "ab", 25) == 20
    assert add(cache, "cd", 25) == 0


def test_lru_evicts_the_end_of_a_prompt_before_its_beginning() -> None:
    cache = LruCache(50)
    add(cache, "abcd")
    add(cache, "xyz")
    assert add(cache, "abcd", 45) == 20


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=30))
def test_a_large_lru_equals_the_infinite_cache_and_a_smaller_never_hits_more(paths: list[str]) -> None:
    infinite, large, small = InfiniteCache(), LruCache(10**9), LruCache(50)
    seen: set[str] = set()
    for path in paths:
        expected = 0
        while expected < len(path) and path[: expected + 1] in seen:
            expected += 1
        seen.update(path[: end + 1] for end in range(len(path)))
        hit = add(infinite, path)
        assert hit == min(expected, len(path) - 1) * 10
        assert add(large, path) == hit
        assert add(small, path) <= hit


def test_bound_of_a_growing_session() -> None:
    requests = [Request(16 * n, 1, ((1, n),)) for n in (4, 8, 12)]
    shape = inspect([Session("s", requests, 16)])
    assert shape.hit_bound == (4 + 8) / (4 + 8 + 12)
