-- Helpers of the scripts that count a tenant's stored data: KEYS 1 and 2 are its items by when they lapse,
-- and by their bytes. An item is "<kind>:<name>"; beside them KEYS 2 has "<kind>", the bytes of all
-- of a kind, and "<kind>#", how many they are.
local MOST_AT_ONCE = 1000 -- that are forgotten in one run

local function score(name)
  return tonumber(redis.call('ZSCORE', KEYS[2], name) or 0)
end

local function kind_of(item)
  return string.match(item, '^[^:]*')
end

local function add(item, bytes, items)
  redis.call('ZINCRBY', KEYS[2], bytes, kind_of(item))
  redis.call('ZINCRBY', KEYS[2], items, kind_of(item) .. '#')
end

-- Removes before it writes: Redis 6.2 takes that as what frees memory.
local function leave(item)
  local bytes = redis.call('ZSCORE', KEYS[2], item)
  if not bytes then return 0 end
  redis.call('ZREM', KEYS[2], item)
  redis.call('ZREM', KEYS[1], item)
  add(item, -tonumber(bytes), -1)
  return 1
end

local function forget_lapsed()
  local gone = redis.call('ZRANGE', KEYS[1], '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, MOST_AT_ONCE)
  for _, item in ipairs(gone) do leave(item) end
end
