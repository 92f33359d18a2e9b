#!lua
-- RESERVE: counts a request against its API key's limits, or says which one it would pass.
-- Repeating it changes nothing while the request runs.
-- KEYS  1 usage, 2 leases
-- ARGV  1 request id, 2 requests a minute, 3 tokens a minute, 4 requests at once (each 0: no
--       limit), 5 tokens, 6 ms of a lease, 7 ms to remember an idle key
-- Result  {"" or the limit with the longest wait, ms to wait, used of it,
--          requests left, ms until all, tokens left, ms until all}
local usage, leases, rid = KEYS[1], KEYS[2], ARGV[1]
local requests, tokens, concurrency = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local cost, now = tonumber(ARGV[5]), now_ms()
local u, v, duration = read_usage(usage, requests, tokens, now)
local why, wait, used = '', 0, 0

local function refuse(limit, ms, amount)
  if ms > wait then why, wait, used = limit, ms, amount end
end

redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
if not redis.call('ZSCORE', leases, rid) then
  local running = redis.call('ZCARD', leases)
  if concurrency > 0 and running >= concurrency then
    refuse('concurrency', math.max(1000, duration / concurrency), running)
  end
  if requests > 0 and u + 1 > requests + SLACK then
    refuse('requests', time_of(u + 1 - requests, requests), u)
  end
  if tokens > 0 and v + cost > tokens + SLACK then
    refuse('tokens', time_of(v + cost - tokens, tokens), v)
  end
  if why == '' then u, v = u + 1, v + cost end
end
if why == '' then
  redis.call('ZADD', leases, now + tonumber(ARGV[6]), rid)
  redis.call('PEXPIRE', leases, ARGV[6])
  write_usage(usage, requests, tokens, now, u, v, duration, ARGV[7])
end
return { why, math.ceil(wait), math.ceil(used - SLACK),
  left(requests, u), math.ceil(time_of(u, requests)), left(tokens, v), math.ceil(time_of(v, tokens)) }
