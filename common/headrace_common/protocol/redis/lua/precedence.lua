-- Helpers of TAKE, inserted before it and after leaving.lua and placed.lua. They decide what an engine does if the
-- next request in the queue is placed with another engine.
--
-- The engine takes a request that is placed with itself, if one may pass the next request. Otherwise it
-- leaves the next request to the other engine for the hold time, and then takes it. Three bounds limit how
-- far this may change the order between tenants and the order of arrival (Cao et al., "Locality-aware Fair
-- Scheduling in LLM Serving", 2025).
local PASSES = 16 -- the most requests that may pass one request
local SLACK = 8192 -- the most tokens by which the passing request's tenant may have used more
local WINDOW = 10 -- a passing request may have arrived at most this many hold times after the other
local CHOICE = 4 -- the number of the engine's own requests that are considered
local TENANTS_SEEN = 16 -- the number of tenants whose oldest waiting request is considered

local used_by = {} -- counters of tenants, as they are now; TAKE writes them

-- Tokens that a tenant has used, by the fairness counters.
local function used(tenant)
  if not used_by[tenant] then
    used_by[tenant] = tonumber(redis.call('HGET', COUNTERS, tenant) or 0)
  end
  return used_by[tenant]
end

-- Whether a waiting request may go before the next one: r and v are HMGETs of st, mid, v, pk, tn, t.
local function may_pass(r, next_one, room, version)
  return tonumber(r[3]) <= version
    and (room < 0 or tonumber(r[4]) <= room)
    and tonumber(r[6]) <= next_one.at + WINDOW * next_one.hold
    and (r[5] == next_one.tenant or used(r[5]) <= used(next_one.tenant) + SLACK)
end

-- This engine's own request that may pass the next one, and its HMGET; nil if there is none.
local function first_own(engine, next_one, room, version)
  if next_one.passes >= PASSES then return end
  local list = placed_with(next_one.priority, engine)
  for _, rid in ipairs(redis.call('LRANGE', list, 0, CHOICE - 1)) do
    local r = redis.call('HMGET', RECORDS .. rid, 'st', 'mid', 'v', 'pk', 'tn', 't')
    if r[1] ~= 'queued' then
      redis.call('LREM', list, 1, rid) -- taken by an engine of a version that knows no placement
    elseif r[2] == BLOCKED and may_pass(r, next_one, room, version) then
      return rid, r
    end
  end
end

-- Writes the engine's own request to the stream, followed by the next one, whose entry was removed.
local function pass(queue, next_one, rid, r)
  unblock(next_one.priority, r[5], rid)
  enter(queue, rid, r[3], r[6])
  enter(queue, next_one.rid, next_one.version, next_one.at)
  redis.call('HINCRBY', RECORDS .. next_one.rid, 'ps', 1)
end

-- The time (ms) from which any engine may take the next request: when it has waited for its hold time, or
-- a request after it has.
local function free_at(next_one)
  local at = next_one.at + next_one.hold
  local tenants = redis.call('ZRANGE', waiting_tenants(next_one.priority), 0, TENANTS_SEEN - 1)
  for _, tenant in ipairs(tenants) do
    local rid = redis.call('LINDEX', list_of(next_one.priority, tenant), 0)
    local came = rid and redis.call('HGET', RECORDS .. rid, 't')
    if came then at = math.min(at, tonumber(came) + next_one.hold) end
  end
  return at
end
