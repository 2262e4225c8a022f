"""The index's Lua scripts, and what they keep in Redis.

All keys of a pool (or of one shard of it) begin with the same prefix, which holds its hash tag. Behind it comes:

    m            hash     epoch, bits that number a bucket, version of the slot table, next slot never used
    b<e><n>      hash     bucket of epoch e (4 bytes), n the first bits of its hashes and zeros (2 bytes, 3 where 16 bits are too few):
                          block hash (8 bytes) -> slots that hold the block (2 bytes each, sorted); a run of a chain (see
                          `kvindex.chain.block_hashes`) is in one
    s            hash     the slot table: slot -> version it was taken at, owner and holder, spaces between
    c            list     its last changes, newest first: version, a space, slot, and owner and holder where it was taken
    n:<owner>    hash     the owner's holders -> slots
    g            set      owners
    o:<owner>    string   the owner's lease
    o            string   somebody has just looked for owners whose lease has ended
    f, d         lists    slots that are free; slots given up, waiting for a sweep
    w            hash     the running sweep: its slots, the next bucket and how far that one has been read
    w:lock       string   who sweeps
    r            list     buckets of earlier epochs, to be deleted: epoch (4 bytes), bits (1), how many are left (4)

A slot belongs to an owner's holder from its first block until it is cleared. Giving it up is O(1): it leaves the table, and the table's
version changes, so that every reader learns of it with its next match. Its bytes in the buckets are swept later, and only then is it free.
"""

from __future__ import annotations

from kvindex.redis_line import Script

# All that the index asks of Redis, for an ACL; the keys are {wr:*.
COMMANDS = (
    "eval", "evalsha", "ping", "time", "del", "unlink", "exists", "get", "set",
    "hget", "hmget", "hgetall", "hvals", "hscan", "hset", "hdel", "hincrby",
    "sadd", "srem", "sismember", "smembers", "lpush", "rpush", "lpop", "lindex", "lrange", "lset", "ltrim",
)  # fmt: skip

_HEAD = """
local call, sub, byte, char = redis.call, string.sub, string.byte, string.char
local pack, read = struct.pack, struct.unpack
local meta = KEYS[1]
local prefix = sub(meta, 1, -2)
"""

_BUCKETS = """
local state = call('HMGET', meta, 'epoch', 'bits', 'version')
local bits = tonumber(state[2])
local bucket_prefix = prefix .. 'b' .. (state[1] or '')

local wide = bits and bits > 16 -- buckets are numbered by three bytes of a hash, or by two
local step = bits and 2 ^ ((wide and 24 or 16) - bits)

-- The key of the bucket that the hash from `at` on belongs to.
local function bucket_of(hashes, at)
  local a, b, c = byte(hashes, at, at + 2)
  return bucket_prefix .. (wide and char(a, b, c - c % step) or char(a, b - b % step))
end
"""

_NUMBERED = """
-- A bucket's name in its epoch, by its number.
local function numbered(number, bits)
  if bits <= 16 then return pack('>I2', number * 2 ^ (16 - bits)) end
  return pack('>I3', number * 2 ^ (24 - bits))
end
"""

_SLOTS = """
-- Takes away all slots of an owner. So many changes are not listed: readers fetch the table.
local function give_up_all(owner)
  local names = prefix .. 'n:' .. owner
  local slots = call('HVALS', names)
  if #slots == 0 then return end
  for _, slot in ipairs(slots) do
    call('HDEL', prefix .. 's', slot)
    call('RPUSH', prefix .. 'd', slot)
  end
  call('DEL', names, prefix .. 'c')
  call('HINCRBY', meta, 'version', 1)
end
"""

# ARGV: the chain, 8 bytes a block. Reply: nothing where there is no index; else the slot table's version, and for each depth that
# somebody reaches, packed: depth (4 bytes), number of slots (2), the slots (2 each), all big-endian.
#
# Holders are nearly prefix-closed, so the set of those who hold a block changes at few places along a chain, and where the sets of two
# blocks are equal nothing changes between them. So the places are found by bisection that only compares whole sets; who reaches
# how far is worked out once, from the few sets that are left.
MATCH = Script(
    "#!lua flags=no-writes"
    + _HEAD
    + _BUCKETS
    + """
if not bits then return false end
local chain = ARGV[1]
local count = #chain / 8

-- The slots that hold the block at `place`, which counts from 0.
local function held_at(place)
  local at = place * 8 + 1
  return call('HGET', bucket_of(chain, at), sub(chain, at, at + 7)) or ''
end

local first = count > 0 and held_at(0) or ''
if first == '' then return {state[3], ''} end

local floor = math.floor
local ends, sets, found = {}, {}, 0 -- where a set of holders ends (blocks from the begin), and the set, in the chain's order
local last = held_at(count - 1)

-- Block `low` is held by `at_low` and block `high` by `at_high`, which differ: find all places between them where the set changes.
local function search(low, at_low, high, at_high)
  while high - low > 1 do
    local middle = floor((low + high) / 2)
    local held = held_at(middle)
    if held == at_low then
      low = middle
    elseif held == at_high then
      high = middle
    else
      search(low, at_low, middle, held)
      low, at_low = middle, held
    end
  end
  found = found + 1
  ends[found], sets[found] = low + 1, at_low
end

if last ~= first then search(0, first, count - 1, last) end
if last ~= '' then
  found = found + 1
  ends[found], sets[found] = count, last
end

-- A slot's depth is where the last of the sets that hold it ends, counted from the first set without a gap.
local searched, reply, in_set = {}, {}, {}
for at = 1, #first, 2 do searched[#searched + 1] = sub(first, at, at + 1) end
for number = 1, found do
  local following = number < found and sets[number + 1] or ''
  for at = 1, #following, 2 do in_set[sub(following, at, at + 1)] = number end
  local kept, gone = {}, {}
  for _, slot in ipairs(searched) do
    if in_set[slot] == number then kept[#kept + 1] = slot else gone[#gone + 1] = slot end
  end
  if #gone > 0 then reply[#reply + 1] = pack('>I4I2', ends[number], #gone) .. table.concat(gone) end
  if #kept == 0 then break end
  searched = kept
end
return {state[3], table.concat(reply)}
"""
)

# ARGV: the owner, then operations of three arguments each: "+" (store), "-" (remove) or "0" (clear), the holder, the block hashes.
# Reply: 0 where the owner is not known (any more) and nothing was written; else 1 and the blocks not stored for want of a slot.
_WRITE = (
    _HEAD
    + _BUCKETS
    + """
local owner = ARGV[1]
if not bits or call('SISMEMBER', prefix .. 'g', owner) == 0 then return 0 end
local names = prefix .. 'n:' .. owner

local function changed(slot, by)
  local version = string.format('%.0f', call('HINCRBY', meta, 'version', 1))
  call('LPUSH', prefix .. 'c', version .. ' ' .. slot .. by)
  call('LTRIM', prefix .. 'c', 0, 255)
  return version
end

local function take_slot(holder)
  local slot = call('LPOP', prefix .. 'f')
  if not slot then
    local new = call('HINCRBY', meta, 'next', 1) - 1
    if new > 65535 then return nil end
    slot = pack('>I2', new)
  end
  local by = owner .. ' ' .. holder
  call('HSET', prefix .. 's', slot, changed(slot, by) .. ' ' .. by)
  call('HSET', names, holder, slot)
  return slot
end

-- Where the slot is in a sorted set (true), or where it belongs (false).
local function find(slots, slot)
  local high_byte, low_byte = byte(slot, 1, 2)
  local number = high_byte * 256 + low_byte
  local from, to = 0, #slots / 2
  while from < to do
    local middle = math.floor((from + to) / 2)
    local one, other = byte(slots, middle * 2 + 1, middle * 2 + 2)
    local there = one * 256 + other
    if there == number then return middle * 2, true end
    if there < number then from = middle + 1 else to = middle end
  end
  return from * 2, false
end

-- The set with the slot, or without it.
local function with(held, slot)
  local position, there = find(held, slot)
  return there and held or sub(held, 1, position) .. slot .. sub(held, position + 1)
end

local function without(held, slot)
  local position, there = find(held, slot)
  return there and sub(held, 1, position) .. sub(held, position + 3) or held
end

-- Stores or removes run by run, as all blocks of a run are in one bucket.
local function write(slot, hashes, change, of_unknown)
  local before, after -- neighbours in a chain mostly have the same holders
  local at = 1
  while at < #hashes do
    local bucket, run = bucket_of(hashes, at), sub(hashes, at, at + 2)
    local blocks, count = {}, 0
    repeat
      count = count + 1
      blocks[count] = sub(hashes, at, at + 7)
      at = at + 8
    until sub(hashes, at, at + 2) ~= run
    local known = call('HMGET', bucket, unpack(blocks))
    local changed, size, gone = {}, 0, {}
    for number = 1, count do
      local held, now = known[number], of_unknown
      if held then
        if held ~= before then before, after = held, change(held, slot) end
        now = after
      end
      if now == '' then
        gone[#gone + 1] = blocks[number]
      elseif now ~= held then
        changed[size + 1], changed[size + 2] = blocks[number], now
        size = size + 2
      end
    end
    if size > 0 then call('HSET', bucket, unpack(changed)) end
    if #gone > 0 then call('HDEL', bucket, unpack(gone)) end
  end
end

local refused = 0
for at = 2, #ARGV, 3 do
  local operation, holder = ARGV[at], ARGV[at + 1]
  local slot = call('HGET', names, holder)
  if operation == '+' then
    slot = slot or take_slot(holder)
    if slot then write(slot, ARGV[at + 2], with, slot) else refused = refused + #ARGV[at + 2] / 8 end
  elseif slot and operation == '-' then
    write(slot, ARGV[at + 2], without, false)
  elseif slot then
    call('HDEL', names, holder)
    call('HDEL', prefix .. 's', slot)
    call('RPUSH', prefix .. 'd', slot)
    changed(slot, '')
  end
end
return 1 + refused
"""
)
WRITE = Script("#!lua" + _WRITE)
RELEASE = Script("#!lua flags=allow-oom" + _WRITE)  # the same for removals and clears, which a full server must not refuse

# ARGV: the owner, bits wanted, the lease in ms. The owner starts with an empty namespace. The first one decides the number of
# buckets; one who wants four times as many begins a new epoch, which all owners have to join.
JOIN = Script(
    "#!lua flags=allow-oom"
    + _HEAD
    + _SLOTS
    + """
local owner, wanted, lease = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local state = call('HMGET', meta, 'epoch', 'bits')
local bits = tonumber(state[2])
if not bits or wanted >= bits + 2 then
  -- Epochs and versions go on from the time: what is left of a lost index is never taken for a part of this one.
  local now = tonumber(call('TIME')[1])
  if bits then
    now = math.max(now, read('>I4', state[1]) + 1)
    call('RPUSH', prefix .. 'r', state[1] .. pack('>I1I4', bits, 2 ^ bits))
  end
  for _, other in ipairs(call('SMEMBERS', prefix .. 'g')) do call('DEL', prefix .. 'n:' .. other) end
  call('DEL', prefix .. 's', prefix .. 'c', prefix .. 'g', prefix .. 'f', prefix .. 'd', prefix .. 'w')
  call('HSET', meta, 'epoch', pack('>I4', now), 'bits', wanted, 'version', string.format('%.0f', now * 1000000), 'next', 0)
end
give_up_all(owner)
call('SADD', prefix .. 'g', owner)
call('SET', prefix .. 'o:' .. owner, '', 'PX', lease)
return 1
"""
)

# ARGV: the owner, the lease in ms. Reply: 0 where the owner is not known (any more).
RENEW = Script(
    "#!lua flags=allow-oom"
    + _HEAD
    + """
if call('SISMEMBER', prefix .. 'g', ARGV[1]) == 0 or call('EXISTS', meta) == 0 then return 0 end
call('SET', prefix .. 'o:' .. ARGV[1], '', 'PX', ARGV[2])
return 1
"""
)

# ARGV: the owner to drop; none: all without a lease. Reply: how many were dropped.
DROP = Script(
    "#!lua flags=allow-oom"
    + _HEAD
    + _SLOTS
    + """
local dropped = 0
if call('EXISTS', meta) == 0 then return 0 end
-- One look at all owners in a while is enough, whoever takes it: it costs Redis a microsecond an owner.
if not ARGV[1] and not call('SET', prefix .. 'o', '', 'NX', 'PX', 500) then return 0 end
for _, owner in ipairs(ARGV[1] and ARGV or call('SMEMBERS', prefix .. 'g')) do
  if (ARGV[1] or call('EXISTS', prefix .. 'o:' .. owner) == 0) and call('SREM', prefix .. 'g', owner) == 1 then
    give_up_all(owner)
    call('DEL', prefix .. 'o:' .. owner)
    dropped = dropped + 1
  end
end
return dropped
"""
)

# ARGV: who sweeps, for how long nobody else may (ms), buckets to visit. Reply: buckets that are left to visit; -1 where another sweeps.
SWEEP = Script(
    "#!lua flags=allow-oom"
    + _HEAD
    + _BUCKETS
    + _NUMBERED
    + """
if not bits then return 0 end
local buckets = 2 ^ bits
local lock, limit = prefix .. 'w:lock', tonumber(ARGV[3])
local sweeper = call('GET', lock)
if sweeper and sweeper ~= ARGV[1] then return -1 end
local retired = call('LINDEX', prefix .. 'r', 0)
local slots = call('HGET', prefix .. 'w', 'slots')
if not retired and not slots and call('EXISTS', prefix .. 'd') == 0 then
  if sweeper then call('DEL', lock) end
  return 0
end
call('SET', lock, ARGV[1], 'PX', ARGV[2])

if retired then
  local head, old_bits, left = sub(retired, 1, 5), read('>I1I4', retired, 5)
  local stop = math.max(0, left - limit)
  local old_prefix = prefix .. 'b' .. sub(retired, 1, 4)
  for number = stop, left - 1 do call('UNLINK', old_prefix .. numbered(number, old_bits)) end
  if stop > 0 then
    call('LSET', prefix .. 'r', 0, head .. pack('>I4', stop))
  else
    call('LPOP', prefix .. 'r')
  end
  return stop + buckets
end

local number, cursor = 0, '0'
if slots then
  local place = call('HMGET', prefix .. 'w', 'next', 'cursor') -- none: the first part failed, on keys that were moving to another node
  number, cursor = tonumber(place[1] or 0), place[2] or '0'
else
  slots = table.concat(call('LRANGE', prefix .. 'd', 0, -1))
  call('DEL', prefix .. 'd')
  call('HSET', prefix .. 'w', 'slots', slots)
end
local dead = {}
for at = 1, #slots, 2 do dead[sub(slots, at, at + 1)] = true end
local swept = {} -- set of slots -> what is left of it; few sets differ
for _ = 1, limit do
  if number == buckets then break end
  local bucket = bucket_prefix .. numbered(number, bits)
  local scanned = call('HSCAN', bucket, cursor, 'COUNT', 128) -- all, but of a bucket where many prompts part
  local whole = cursor == '0' and scanned[1] == '0'
  local entries = scanned[2]
  cursor = scanned[1]
  local gone, changed = {}, {}
  for at = 1, #entries, 2 do
    local held = entries[at + 1]
    local left = swept[held]
    if not left then
      local kept = {}
      for place = 1, #held, 2 do
        local slot = sub(held, place, place + 1)
        if not dead[slot] then kept[#kept + 1] = slot end
      end
      left = table.concat(kept)
      swept[held] = left
    end
    if left == '' then
      gone[#gone + 1] = entries[at]
    elseif left ~= held then
      changed[#changed + 1] = entries[at]
      changed[#changed + 1] = left
    end
  end
  if whole and #gone * 2 == #entries then
    call('UNLINK', bucket)
  else
    for at = 1, #gone, 500 do call('HDEL', bucket, unpack(gone, at, math.min(#gone, at + 499))) end
    for at = 1, #changed, 500 do call('HSET', bucket, unpack(changed, at, math.min(#changed, at + 499))) end
  end
  if cursor == '0' then number = number + 1 end
end
if number < buckets then
  call('HSET', prefix .. 'w', 'next', number, 'cursor', cursor)
  return buckets - number
end
for slot in pairs(dead) do call('RPUSH', prefix .. 'f', slot) end
call('DEL', prefix .. 'w', lock)
return call('EXISTS', prefix .. 'd') * buckets
"""
)
