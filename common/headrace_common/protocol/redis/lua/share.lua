#!lua flags=allow-oom
-- SHARE: adds what tenants have used in other shards to their counters in this one. Repeating it changes nothing.
-- KEYS  those of charging.lua
-- ARGV  of each other shard: its number, and of its TALLY the epoch, the number of tenants, and of each its name
--       and its tokens
-- Result  1, or 0 where nothing is new
local counters, FORGET, new = KEYS[#KEYS - 6], 3600000, 0

-- Adds what is new in a TALLY. What was used before the first one of its epoch is not known to be missing here.
local function add(shard, epoch, at, tenants)
  local name = '<' .. shard
  local stored = redis.call('HGET', counters, name)
  local known = stored and cjson.decode(stored)
  local same, changed = known and known.epoch == epoch, false
  local used = same and known.used or {}
  for i = at, at + 2 * tenants - 2, 2 do
    local tenant, tokens = ARGV[i], tonumber(ARGV[i + 1])
    local before = used[tenant] or 0
    if tokens > before then
      if same then raise(tenant, string.format('%.0f', tokens - before)) end
      used[tenant], changed = tokens, true
    end
  end
  if changed then
    redis.call('HSET', counters, name, cjson.encode({ epoch = epoch, used = used }))
    new = 1
  end
end

local at = 1
while at < #ARGV do
  local tenants = tonumber(ARGV[at + 2])
  add(ARGV[at], ARGV[at + 1], at + 3, tenants)
  at = at + 3 + 2 * tenants
end
if new == 1 then redis.call('PEXPIRE', counters, FORGET) end
return new
