-- Helpers of the scripts that end the waiting of requests, inserted before them and after tenants.lua. They
-- change the counts in memory; write_counts, at the script's end, writes them to Redis.
local left_by = {} -- how many requests of each tenant no longer wait

-- Writes all counts in one command; writing an unchanged one costs little.
local function write_counts(stats)
  redis.call('HSET', stats, 'w', counts.w, 'wt', counts.wt, 'w1', counts.w1, 'w2', counts.w2,
    'w3', counts.w3, 'p1', counts.p1, 'p2', counts.p2, 'p3', counts.p3, 'cn', counts.cn, 'cl', counts.cl)
  for tenant, number in pairs(left_by) do
    if tonumber(redis.call('ZINCRBY', TENANTS, -number, tenant)) <= 0 then
      redis.call('ZREM', TENANTS, tenant)
    end
  end
end

-- Appends a waiting request to the stream; returns the id of its entry.
local function append(queue, rid, version, at)
  return redis.call('XADD', queue, '*', 'r', rid, 'v', version, 't', at or '')
end

local function enter(queue, rid, version, at)
  redis.call('HSET', RECORDS .. rid, 'mid', append(queue, rid, version, at))
end

-- Takes a blocked request out of its tenant's list; false where it is not there.
local function unblock(priority, tenant, rid)
  local list, listed = list_of(priority, tenant), LISTED[priority]
  local removed = redis.call('LREM', list, 0, rid)
  counts[listed] = counts[listed] - removed
  if redis.call('EXISTS', list) == 0 then redis.call('ZREM', waiting_tenants(priority), tenant) end
  return removed > 0
end

-- The fields of a waiting request that TAKE needs.
local function look_up(rid)
  return redis.call('HMGET', RECORDS .. rid, 'st', 'mid', 'd', 'a', 'g', 'v', 'tk', 'pk', 'tn', 'pe', 'pu',
    't', 'ps', 'wg', 'va')
end

-- Takes the next blocked request out of its list; returns its id and its fields, or nil.
local function unblock_next(priority)
  local key, listed = waiting_tenants(priority), LISTED[priority]
  while true do
    local tenant = redis.call('ZRANGE', key, 0, 0)[1]
    if not tenant then return end
    local list = list_of(priority, tenant)
    local rid = redis.call('LPOP', list)
    if redis.call('EXISTS', list) == 0 then redis.call('ZREM', key, tenant) end
    if rid then
      counts[listed] = counts[listed] - 1
      local v = look_up(rid)
      if v[1] == 'queued' and v[2] == BLOCKED then return rid, v end
    end
  end
end

-- Whether requests of a priority wait, and all of them in lists.
local function all_listed(priority)
  local blocked = counts[LISTED[priority]]
  return blocked > 0 and counts[WAITING[priority]] <= blocked
end

-- Keeps an entry in the stream, which wakes engines, while requests of the priority wait.
local function keep_head(queue, priority)
  if not all_listed(priority) then return end
  local rid, v = unblock_next(priority)
  if rid then enter(queue, rid, v[6], v[12]) end
end

local function no_longer_waiting(priority, tenant, tokens)
  local class = WAITING[priority]
  counts.w, counts.wt = counts.w - 1, counts.wt - tonumber(tokens or 0)
  counts[class] = counts[class] - 1
  left_by[tenant] = (left_by[tenant] or 0) + 1
end

-- Takes a waiting request out of the queue.
local function unqueue(queue, priority, rid, mid, tenant, tokens)
  if mid == BLOCKED then
    unblock(priority, tenant, rid)
  else
    drop(queue, mid)
  end
  no_longer_waiting(priority, tenant, tokens)
  keep_head(queue, priority)
end
