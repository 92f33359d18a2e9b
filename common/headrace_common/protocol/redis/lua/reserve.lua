#!lua
-- RESERVE: counts a request against its API key's limits, or says which one it would pass.
-- Repeating it changes nothing while the request runs.
-- KEYS  1 usage, 2 leases
-- ARGV  1 request id, 2 requests a minute, 3 tokens a minute, 4 requests at once (each 0: no
--       limit), 5 tokens, 6 ms of a lease, 7 ms to remember an idle key, 8 prompt tokens a day, 9 output
--       tokens a day (each 0: no limit), 10 prompt tokens, 11 output tokens
-- Result  {"" or the limit with the longest wait, ms to wait, used of it,
--          requests left, ms until all, tokens left, ms until all, number of the day (UTC)}
local usage, leases, rid = KEYS[1], KEYS[2], ARGV[1]
local requests, tokens, concurrency = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local cost, now = tonumber(ARGV[5]), now_ms()
local u, v, duration = read_usage(usage, requests, tokens, now)
local most_prompt, most_output = tonumber(ARGV[8]), tonumber(ARGV[9])
local daily = most_prompt + most_output > 0
local day, prompt, output = math.floor(now / DAY), 0, 0
if daily then day, prompt, output = read_day(usage, now) end
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
  if most_prompt > 0 and prompt + tonumber(ARGV[10]) > most_prompt then
    refuse('prompt_tokens_per_day', left_of_day(now), prompt)
  end
  if most_output > 0 and output + tonumber(ARGV[11]) > most_output then
    refuse('output_tokens_per_day', left_of_day(now), output)
  end
  if why == '' then
    u, v = u + 1, v + cost
    if daily then write_day(usage, day, prompt + tonumber(ARGV[10]), output + tonumber(ARGV[11])) end
  end
end
if why == '' then
  redis.call('ZADD', leases, now + tonumber(ARGV[6]), rid)
  redis.call('PEXPIRE', leases, ARGV[6])
  write_usage(usage, requests, tokens, now, u, v, duration, ARGV[7], daily)
end
return { why, math.ceil(wait), math.ceil(used - SLACK),
  left(requests, u), math.ceil(time_of(u, requests)), left(tokens, v), math.ceil(time_of(v, tokens)), day }
