"""The Redis user that docs/redis.md describes can do all that gateways and agents do, and nothing that they do not."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

import gateway.agent  # noqa: F401  # the scripts of all modules are looked through
from gateway.config import RedisConfig
from gateway.registry import registry_line
from gateway.sharing import redis_target
from gateway.worker_entries import LEAVE, LIST, MOST_BYTES, MOST_WORKERS, REGISTER, entry_key, set_key
from kvindex import redis_line
from kvindex.chain import use_pool_secret
from kvindex.redis_index import key_prefix
from routing.policies import POLICIES
from tests.gateway.test_sharing import SECRET, ask, chat, quick, sharing, together, written
from tests.redis_server import RedisServer
from tests.stack import ScriptedWorker, config, running, until

PAGE = Path(__file__).parents[2] / "docs" / "redis.md"
# what is sent as it is; all else is called by scripts
SENT = {"ping", "evalsha", "eval", "get", "set", "hget", "hgetall", "lrange", "publish", "subscribe"}
USER, PASSWORD = "warmroute", "a-password"


def rules(name: str) -> list[str]:
    """The rules of the page's ACL user of that name, as the server takes them."""
    [line] = re.findall(rf"^user {name} (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [rule.replace("<password>", PASSWORD) for rule in line.split()]


def commands(name: str) -> list[str]:
    return [rule[1:] for rule in rules(name) if rule.startswith("+")]


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WARMROUTE_POOL_SECRET", SECRET)
    monkeypatch.setenv("WARMROUTE_REDIS_PASSWORD", PASSWORD)
    yield
    use_pool_secret("")


def limited(redis: RedisServer, user: str = USER, **settings: Any) -> dict[str, Any]:
    """The configuration's section of a gateway that comes as this user."""
    url = redis.url.replace("redis://", f"redis://{user}@")
    return {"url": url, "password_env": "WARMROUTE_REDIS_PASSWORD", "deadline_ms": 5000, **settings}


def test_the_page_names_the_commands_that_are_sent_and_no_others() -> None:
    called = {name.lower() for text in redis_line._texts.values() for name in re.findall(r"call\('([A-Z]+)'", text)}
    assert sorted(commands(USER)) == sorted(called | SENT)
    assert set(commands("warmroute-agent")) < set(commands(USER))


@pytest.mark.parametrize("shards", [1, 3])
async def test_gateways_share_everything_as_that_user(redis: RedisServer, shards: int) -> None:
    redis.admin("ACL", "SETUSER", USER, *rules(USER))
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(ScriptedWorker(quick)) for _ in range(2)]
        settings = config(*(w.url for w in workers), index={"backend": "redis", "redis": limited(redis, shards=shards)})
        first, second, third = [await stack.enter_async_context(running(settings)) for _ in range(3)]
        await together(first, second, third)
        home = await ask(first, chat("a task", "an answer " * 400, "more"), "s")
        await written(first)
        said = chat("a task", "an answer " * 400, "more", "yes", "and now")
        assert await ask(second, said, "s") == home  # by the session
        await ask(third, said)
        assert [(sharing(g).lookups > 0, sharing(g).lookups_failed) for g in (first, second, third)] == [(True, 0)] * 3
        sharing(first).answered("resp_1", home)
        await written(first)
        assert await sharing(second).worker_of("resp_1") == home
        followers = [await sharing(g).follow({"w1", "w2", "w3"}) for g in (first, second, third)]
        assert set().union(*followers) == {"w1", "w2", "w3"} and sum(map(len, followers)) == 3
        other = next(name for name in POLICIES if name != first.router.policy.name)
        first.router.use_policy(other)
        sharing(first).share_policy(other)
        await until(lambda: second.router.policy.name == other, "the pool's policy")
        # removals, workers that are cleared and swept, an index that is made anew, larger
        chain = [number + 1 << 40 for number in range(64)]
        index, remote = sharing(first).index, sharing(first).remote
        for holder in ("x", "y"):
            index.store(holder, chain)
        index.remove("x", chain[32:])
        index.clear("y")
        await written(first)
        assert (await sharing(second).remote.match(chain)).get("x") == 32
        while await remote.sweep():
            pass
        remote.resize(1_000_000)
        await remote.join(3.0)
        while await remote.sweep():
            pass
    assert redis.admin("ACL", "LOG") == []


async def test_an_agent_registers_as_its_user_and_can_do_nothing_else(redis: RedisServer) -> None:
    redis.admin("ACL", "SETUSER", USER, *rules(USER))
    redis.admin("ACL", "SETUSER", "warmroute-agent", *rules("warmroute-agent"))
    prefix = key_prefix("default")
    keys = [set_key(prefix), entry_key(prefix, "a")]
    async with AsyncExitStack() as stack:
        lines = {}
        for user in ("warmroute-agent", USER):
            lines[user] = registry_line(redis_target(RedisConfig(**limited(redis, user))), prefix, lambda: None)
            await lines[user].start()
            stack.push_async_callback(lines[user].close)
        await until(lambda: all(line.up for line in lines.values()), "the lines")
        agent, gateway_line = lines["warmroute-agent"], lines[USER]
        assert await agent.run(REGISTER, keys, ["a", b"r" * 48, 5000, MOST_WORKERS]) == 1
        redis.admin("SADD", set_key(prefix), "gone")
        assert await gateway_line.run(LIST, keys[:1], [MOST_WORKERS, MOST_BYTES]) == [b"a", b"r" * 48]
        redis.admin("SADD", set_key(prefix), "gone")
        assert await agent.run(REGISTER, [set_key(prefix), entry_key(prefix, "b")], ["b", b"s" * 48, 5000, 1]) == -1
        assert await agent.run(LEAVE, keys, ["a", b"r" * 16]) == 1
        assert redis.admin("ACL", "LOG") == []
        for forbidden in (("GET", prefix + "P"), ("KEYS", "*"), ("FLUSHALL",)):
            with pytest.raises(redis_line.RedisRefused, match="NOPERM"):
                await agent.call(*forbidden)
