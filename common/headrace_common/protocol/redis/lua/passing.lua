-- Helpers of TAKE, inserted before it and after adapters.lua and variants.lua: what it does if the next request is
-- none that the engine takes: it lacks the adapter, the request is for the other side, or the prompt's length is out
-- of its bounds. The engine takes the next request that it can run, and leaves the first to other engines. Such an
-- engine finds it first in the queue, so nothing waits longer because of this.
local LOOK_AGAIN = 100 -- ms after which the engine looks again, if it found no request that it can run
local TENANTS_LISTED = 16 -- the number of tenants whose lists are searched, those first that have used the least
local LISTED_OF_TENANT = 64 -- the number of requests that are searched in each list
local ENTRIES = 16 -- the number of entries that are searched in the stream

local fewest, most, patient -- prompt tokens, and the time (ms) before which a request leaves all bounds

-- Reads the bounds on prompts: three of the script's arguments from this one on.
local function read_bounds(first, now)
  fewest, most = tonumber(ARGV[first]), tonumber(ARGV[first + 1])
  patient = now - tonumber(ARGV[first + 2])
end

-- Whether a prompt of so many tokens, admitted at this time, is left to other engines.
local function is_out_of_bounds(tokens, at)
  local length = tonumber(tokens or 0)
  return (length < fewest or most >= 0 and length > most) and tonumber(at or 0) > patient
end

-- Whether a request of this side and length, admitted at this time, is left to other engines.
local function is_for_others(va, tokens, at, now)
  return of_other_side(va, at, now) or is_out_of_bounds(tokens, at)
end

-- The next blocked request that this engine takes, and its HMGET; nil if there is none.
local function next_able(priority, now)
  for _, tenant in ipairs(redis.call('ZRANGE', waiting_tenants(priority), 0, TENANTS_LISTED - 1)) do
    for _, rid in ipairs(redis.call('LRANGE', list_of(priority, tenant), 0, LISTED_OF_TENANT - 1)) do
      local r = redis.call('HMGET', RECORDS .. rid, 'st', 'mid', 'v', 'tn', 't', 'lo', 'va', 'pk')
      local able = has_adapter(r[6]) and not is_for_others(r[7], r[8], r[5], now)
      if r[1] == 'queued' and r[2] == BLOCKED and able then return rid, r end
    end
  end
end

-- Whether the stream has a request that this engine takes after the entry `id`.
local function able_follows(queue, id, now)
  for _, entry in ipairs(redis.call('XRANGE', queue, '(' .. id, '+', 'COUNT', ENTRIES)) do
    local r = redis.call('HMGET', RECORDS .. field(entry, 'r'), 'st', 'lo', 'va', 'pk', 't')
    if r[1] == 'queued' and has_adapter(r[2]) and not is_for_others(r[3], r[4], r[5], now) then return true end
  end
  return false
end

-- Writes a request whose entry `id` was read to the stream again, after one that this engine takes; false if
-- there is none.
local function pass_over(queue, priority, id, rid, v, now)
  local able, r = next_able(priority, now)
  if not able and not able_follows(queue, id, now) then return false end
  drop(queue, id)
  if able then
    unblock(priority, r[4], able)
    enter(queue, able, r[3], r[5])
  end
  enter(queue, rid, v[6], v[12])
  return true
end
