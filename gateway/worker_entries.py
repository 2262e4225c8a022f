"""What a worker's agent writes about it into Redis, and how gateways know that it is genuine.

Redis keeps, with the pool's prefix before the names:

    W         set      ids of the registered workers
    W:<id>    string   the worker's entry, gone when its lease ends: the agent's run (16 bytes), an HMAC-SHA256 (32 bytes) and what
                       it signs, which is a line of JSON that seldom changes (`Entry`) and one that does every second (`Beat`)

The signature also covers the pool and the agent's run, so that an entry is good in its own pool only. It covers when it was made:
one that was copied and is written again later is refused once it is `MOST_AGE_S` old.
"""

from __future__ import annotations

import hmac
import re
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from gateway.config import LEAST_SECRET
from kvindex.redis_line import Script
from workers.profile import WorkerProfile

LEASE_S = 5.0  # an agent not heard of for longer is gone, and its worker with it
BEAT_S = 1.0  # how often an agent renews its entry, and a gateway looks
MOST_WORKERS = 4096
MOST_BYTES = 8192  # of one entry
MOST_AGE_S = 30.0  # of an entry's making; clocks may be as far apart

RUN_BYTES = 16
_MAC_BYTES = 32

EventsState = Literal["none", "live", "incomplete", "lost"]
"""Of the engine's KV events: nobody follows them; the agent does, and the shared index has all the worker holds; not all, since what
was before could not be replayed; what it has may be wrong, since the publisher went away."""

_ID = re.compile(r"[A-Za-z0-9._:\[\]-]{1,128}")
_URL = re.compile(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?(/[A-Za-z0-9._~/-]*)?")

_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Size = Annotated[float, Field(ge=0, le=1e12)]


class Entry(BaseModel):
    """A worker, as its agent describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    url: str = Field(max_length=512, description="as gateways reach it")
    models: list[_Name] = Field(max_length=256)
    profile: WorkerProfile
    ranks: int = Field(1, ge=1, le=1024)  # data-parallel ranks, each a worker of its own
    block_tokens: int | None = Field(None, ge=1)  # of the index blocks that the agent writes; None where it writes none

    @field_validator("id")
    @classmethod
    def _is_an_id(cls, name: str) -> str:
        # "@", "#" and a leading "kv:" have a meaning in the index's names of holders
        if not _ID.fullmatch(name) or name.startswith("kv:"):
            raise ValueError("must be 1 to 128 letters, digits and . _ : [ ] -, and must not begin with kv:")
        return name

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        if not _URL.fullmatch(url):  # it stands in every request's head
            raise ValueError("must be http(s)://host:port, perhaps with a path, and nothing else: no credentials")
        return url


class Beat(BaseModel):
    """What changes all the time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float  # when it was made, seconds of the agent's wall clock
    running: _Size = 0.0  # requests, as the engine reports
    waiting: _Size = 0.0
    kv_use: _Size = 0.0  # share of its KV cache
    events: EventsState = "none"


class EntryRefused(Exception):
    """Why an entry is not used; holds nothing of it that is secret, and nothing at all of one that is not signed."""


class Seal:
    """Signs entries and proves them, for one pool. Raises ValueError for a secret that is too short."""

    def __init__(self, secret: str, pool: str) -> None:
        if len(secret) < LEAST_SECRET:
            raise ValueError(f"a secret of {LEAST_SECRET} characters or more is needed")
        self._key = secret.encode()
        self._context = b"warmroute worker entry 1\n" + pool.encode() + b"\n"

    def _mac(self, run: bytes, content: bytes) -> bytes:
        return hmac.digest(self._key, self._context + run + content, "sha256")

    def sign(self, run: bytes, entry: bytes, beat: Beat) -> bytes:
        """What is to be stored. `entry` comes from `packed`. Raises ValueError when it is too large."""
        content = entry + b"\n" + orjson.dumps(beat.model_dump())
        stored = run + self._mac(run, content) + content
        if len(stored) > MOST_BYTES:
            raise ValueError(f"the worker's entry has {len(stored)} bytes, more than {MOST_BYTES}: name fewer models")
        return stored

    def open(self, stored: bytes, now: float) -> tuple[bytes, Beat]:
        """The entry, still packed, and its beat. `now`: the wall clock. Raises EntryRefused."""
        run, mac, content = stored[:RUN_BYTES], stored[RUN_BYTES : RUN_BYTES + _MAC_BYTES], stored[RUN_BYTES + _MAC_BYTES :]
        if not hmac.compare_digest(mac, self._mac(run, content)):
            raise EntryRefused("its signature is wrong: not a worker's entry, or signed with another secret or for another pool")
        entry, _, text = content.partition(b"\n")
        try:
            beat = Beat.model_validate(orjson.loads(text))
        except (orjson.JSONDecodeError, ValidationError):
            raise EntryRefused("its entry cannot be read; is its agent of another version?") from None
        if not abs(now - beat.at) <= MOST_AGE_S:
            raise EntryRefused(f"its entry was made more than {MOST_AGE_S:g} s ago, or the clocks of agent and gateway differ by as much")
        return entry, beat


def packed(entry: Entry) -> bytes:
    """The entry's line. Fields of the profile that were neither given nor found out are left to their defaults."""
    return orjson.dumps({**entry.model_dump(mode="json"), "profile": entry.profile.model_dump(mode="json", exclude_unset=True)})


def unpacked(line: bytes, worker_id: str) -> Entry:
    """The entry of the worker that is stored under this id. Raises EntryRefused."""
    try:
        entry = Entry.model_validate(orjson.loads(line))
        entry.profile.latency_model()
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise EntryRefused(f"its entry cannot be used: {where}: {fault['msg']}") from None
    except (orjson.JSONDecodeError, KeyError):
        raise EntryRefused("its entry cannot be read; is its agent of another version?") from None
    if entry.id != worker_id:
        raise EntryRefused("its entry is that of another worker")
    return entry


# ---- in Redis

_HEAD = "#!lua flags=allow-oom\nlocal call, ids = redis.call, KEYS[1]\n"

# KEYS: the set, the worker's key. ARGV: id, value, lease in ms, most workers. Reply: 1, or 0 where another agent holds the entry, or
# -1 where there are too many workers.
REGISTER = Script(
    _HEAD
    + f"""
local run = {RUN_BYTES}
local held = call('GETRANGE', KEYS[2], 0, run - 1)
if held ~= '' and held ~= string.sub(ARGV[2], 1, run) then return 0 end
local most = tonumber(ARGV[4])
if call('SCARD', ids) >= most and call('SISMEMBER', ids, ARGV[1]) == 0 then
  for _, id in ipairs(call('SMEMBERS', ids)) do
    if call('STRLEN', ids .. ':' .. id) == 0 then call('SREM', ids, id) end
  end
  if call('SCARD', ids) >= most then return -1 end
end
call('SADD', ids, ARGV[1])
call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1
"""
)

# KEYS: as above. ARGV: id, the agent's run.
LEAVE = Script(
    _HEAD
    + f"""
if call('GETRANGE', KEYS[2], 0, {RUN_BYTES - 1}) ~= ARGV[2] then return 0 end
call('SREM', ids, ARGV[1])
return call('DEL', KEYS[2])
"""
)

# KEYS: the set. ARGV: most workers, most bytes of an entry. Reply: id, entry, id, entry ...; an entry that is too large is empty, and
# the ids whose entry is gone are taken out of the set.
LIST = Script(
    _HEAD
    + """
local found = {}
if call('SCARD', ids) > 2 * tonumber(ARGV[1]) then return redis.error_reply('ERR the registry holds too many workers') end
for _, id in ipairs(call('SMEMBERS', ids)) do
  local key = ids .. ':' .. id
  local size = call('STRLEN', key)
  if size == 0 then
    call('SREM', ids, id)
  else
    found[#found + 1] = id
    found[#found + 1] = size <= tonumber(ARGV[2]) and call('GET', key) or ''
  end
end
return found
"""
)


def set_key(prefix: str) -> str:
    """Of the ids; `prefix` is that of the pool (`kvindex.redis_index.key_prefix`)."""
    return prefix + "W"


def entry_key(prefix: str, worker_id: str) -> str:
    return f"{set_key(prefix)}:{worker_id}"
