-- Helpers of the scripts that queue requests, inserted before them and after tenants.lua.
local DEBT = 65536 -- the most tokens that a tenant's earlier use counts when it begins to wait

-- A tenant that begins to wait starts level with those that wait: neither idle time nor earlier use counts.
local function begin_waiting(priority, tenant)
  local key = waiting_tenants(priority)
  local lowest = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  local v = redis.call('HMGET', COUNTERS, '', tenant)
  local floor, used = tonumber(lowest or v[1] or 0), tonumber(v[2] or 0)
  local value = string.format('%.0f', math.min(math.max(used, floor), floor + DEBT))
  redis.call('HSET', COUNTERS, tenant, value)
  set_score(tenant, value)
  redis.call('ZADD', key, value, tenant)
end

-- Queues a request; returns the id of its entry in the stream, or BLOCKED.
local function enqueue(stats, queue, priority, rid, tenant, tokens, version)
  local class, listed = WAITING[priority], LISTED[priority]
  local waiting, w, wt = counts[class] + 1, counts.w + 1, counts.wt + tonumber(tokens)
  redis.call('ZINCRBY', TENANTS, 1, tenant)
  if waiting <= 1 then
    redis.call('HSET', stats, 'w', w, 'wt', wt, class, waiting)
    return redis.call('XADD', queue, '*', 'r', rid, 'v', version)
  end
  if redis.call('RPUSH', list_of(priority, tenant), rid) == 1 then begin_waiting(priority, tenant) end
  redis.call('HSET', stats, 'w', w, 'wt', wt, class, waiting, listed, counts[listed] + 1)
  return BLOCKED
end

-- Whether a request that should wait or run can still be found by engines.
local function is_queued(queue, priority, rid, mid, tenant)
  if mid == BLOCKED then return redis.call('LPOS', list_of(priority, tenant), rid) and true or false end
  return #redis.call('XRANGE', queue, mid, mid) > 0
end
