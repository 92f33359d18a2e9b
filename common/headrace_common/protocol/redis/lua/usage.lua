-- Helpers for the usage of an API key, inserted before the scripts that change it. The usage of a rate limit
-- decays evenly: the full limit within a minute.

local MINUTE, DAY = 60000, 86400000 -- ms
local SLACK = 1e-6 -- the rounding error of sums of fractions
local LAST_WEIGHT = 0.2 -- share of the last request in the moving average of durations

local function decayed(used, limit, ms)
  if limit <= 0 then return 0 end
  return math.max(0, used - limit * ms / MINUTE)
end

-- Requests and tokens used, and the usual duration of a request in ms.
local function read_usage(usage, requests, tokens, now)
  local v = redis.call('HMGET', usage, 'r', 't', 'at', 'd')
  local ms = math.max(0, now - tonumber(v[3] or now))
  return decayed(tonumber(v[1] or 0), requests, ms), decayed(tonumber(v[2] or 0), tokens, ms),
    tonumber(v[4] or 0)
end

-- The ms in which this amount of a limit decays.
local function time_of(amount, limit)
  return limit > 0 and math.max(0, amount) * MINUTE / limit or 0
end

local function left(limit, used)
  return limit > 0 and math.max(0, math.floor(limit - used + SLACK)) or 0
end

-- The number of the present day (UTC), and the prompt and output tokens that are used of it.
local function read_day(usage, now)
  local day, v = math.floor(now / DAY), redis.call('HMGET', usage, 'dy', 'dp', 'do')
  if tonumber(v[1] or -1) ~= day then return day, 0, 0 end
  return day, tonumber(v[2]), tonumber(v[3])
end

local function write_day(usage, day, prompt, output)
  redis.call('HSET', usage, 'dy', day, 'dp', string.format('%.0f', prompt), 'do', string.format('%.0f', output))
end

local function left_of_day(now)
  return DAY - now % DAY
end

-- Keeps what is used of the day until its end, if `daily` limits it.
local function write_usage(usage, requests, tokens, now, u, v, duration, idle, daily)
  redis.call('HSET', usage, 'r', string.format('%.6f', u), 't', string.format('%.6f', v),
    'at', string.format('%.0f', now), 'd', string.format('%.3f', duration))
  local full = math.max(time_of(u, requests), time_of(v, tokens), daily and left_of_day(now) or 0)
  redis.call('PEXPIRE', usage, string.format('%.0f', full + tonumber(idle)))
end
