-- Helpers of the scripts that queue requests, hand them out or count their tokens, put before them.
--
-- Tenants of a priority share by tokens: who has used least is next (Sheng et al., "Fairness in
-- Serving Large Language Models", 2024). The stream holds the next request alone; those behind it
-- wait in a list for each tenant, from which TAKE fills the stream. Nothing wakes engines but the
-- stream, so it has an entry whenever anything of its priority waits.
-- The last seven KEYS: 1 counters, 2 waiting by tenant, 3-5 tenants that wait by priority,
-- 6 prefix of the tenants' lists, 7 prefix of records. Lists and records are made from the prefixes.
local FAIR = #KEYS - 7
local COUNTERS, TENANTS, LISTS, RECORDS = KEYS[FAIR + 1], KEYS[FAIR + 2], KEYS[FAIR + 6], KEYS[FAIR + 7]
local PARKED = 'p' -- in place of the stream's entry
local OUTPUT = 2 -- an output token costs as much as so many prompt tokens
local DEBT = 65536 -- the most that what was used before a tenant had to wait counts against it
local FORGET = 3600000 -- ms until counters are forgotten where nothing is taken

local function waiting_tenants(priority)
  return KEYS[FAIR + 2 + priority]
end

local function list_of(priority, tenant)
  return LISTS .. priority .. ':' .. tenant
end

local function set_score(tenant, value)
  for priority = 1, 3 do redis.call('ZADD', waiting_tenants(priority), 'XX', value, tenant) end
end

-- Counts tokens that a tenant has used.
local function charge(tenant, tokens)
  if tokens <= 0 then return end
  local value = redis.call('HINCRBY', COUNTERS, tenant, string.format('%.0f', tokens))
  if redis.call('EXISTS', KEYS[FAIR + 3], KEYS[FAIR + 4], KEYS[FAIR + 5]) > 0 then
    set_score(tenant, value)
  end
  return value
end

-- Whoever begins to wait starts with those that wait: neither idle time nor use before is kept.
local function begin_waiting(priority, tenant)
  local key = waiting_tenants(priority)
  if redis.call('ZSCORE', key, tenant) then return end
  local lowest = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  local floor = tonumber(lowest or redis.call('HGET', COUNTERS, '') or 0)
  local used = tonumber(redis.call('HGET', COUNTERS, tenant) or 0)
  local value = string.format('%.0f', math.min(math.max(used, floor), floor + DEBT))
  redis.call('HSET', COUNTERS, tenant, value)
  set_score(tenant, value)
  redis.call('ZADD', key, value, tenant)
end

-- Queues a request; returns the id of its entry in the stream, or PARKED.
local function enqueue(stats, queue, priority, rid, tenant, tokens, version)
  redis.call('HINCRBY', stats, 'w', 1)
  redis.call('HINCRBY', stats, 'wt', tokens)
  redis.call('ZINCRBY', TENANTS, 1, tenant)
  if redis.call('HINCRBY', stats, 'w' .. priority, 1) <= 1 then
    return redis.call('XADD', queue, '*', 'r', rid, 'v', version)
  end
  begin_waiting(priority, tenant)
  redis.call('RPUSH', list_of(priority, tenant), rid)
  redis.call('HINCRBY', stats, 'p' .. priority, 1)
  return PARKED
end

-- Writes a waiting request to the stream, behind what is there.
local function enter(queue, rid, version, at)
  local mid = redis.call('XADD', queue, '*', 'r', rid, 'v', version, 't', at or '')
  redis.call('HSET', RECORDS .. rid, 'mid', mid)
end

-- Takes a parked request out of its tenant's list; false where it is not there.
local function unpark(stats, priority, tenant, rid)
  local list = list_of(priority, tenant)
  local removed = redis.call('LREM', list, 0, rid)
  redis.call('HINCRBY', stats, 'p' .. priority, -removed)
  if redis.call('EXISTS', list) == 0 then redis.call('ZREM', waiting_tenants(priority), tenant) end
  return removed > 0
end

-- Moves the next parked request into the stream; false where there is none.
local function refill(stats, queue, priority)
  local key = waiting_tenants(priority)
  while true do
    local tenant = redis.call('ZRANGE', key, 0, 0)[1]
    if not tenant then return false end
    local list = list_of(priority, tenant)
    local rid = redis.call('LPOP', list)
    if redis.call('EXISTS', list) == 0 then redis.call('ZREM', key, tenant) end
    if rid then
      redis.call('HINCRBY', stats, 'p' .. priority, -1)
      local v = redis.call('HMGET', RECORDS .. rid, 'st', 'mid', 'v', 't')
      if v[1] == 'queued' and v[2] == PARKED then
        enter(queue, rid, v[3], v[4])
        return true
      end
    end
  end
end

-- Sees to it that what wakes engines is there while something waits.
local function keep_head(stats, queue, priority)
  local v = redis.call('HMGET', stats, 'w' .. priority, 'p' .. priority)
  local waiting, parked = tonumber(v[1] or 0), tonumber(v[2] or 0)
  if parked > 0 and waiting <= parked then refill(stats, queue, priority) end
end

local function no_longer_waiting(stats, priority, tenant, tokens)
  redis.call('HINCRBY', stats, 'w', -1)
  redis.call('HINCRBY', stats, 'w' .. priority, -1)
  redis.call('HINCRBY', stats, 'wt', -tonumber(tokens or 0))
  if tonumber(redis.call('ZINCRBY', TENANTS, -1, tenant)) <= 0 then
    redis.call('ZREM', TENANTS, tenant)
  end
end

-- Takes a waiting request out of the queue.
local function unqueue(stats, queue, priority, rid, mid, tenant, tokens)
  if mid == PARKED then
    unpark(stats, priority, tenant, rid)
  else
    drop(queue, mid)
  end
  no_longer_waiting(stats, priority, tenant, tokens)
  keep_head(stats, queue, priority)
end

-- Whether a request that should wait or run can still be found by engines.
local function is_queued(queue, priority, rid, mid, tenant)
  if mid == PARKED then return redis.call('LPOS', list_of(priority, tenant), rid) and true or false end
  return #redis.call('XRANGE', queue, mid, mid) > 0
end
