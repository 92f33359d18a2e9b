#!lua flags=allow-oom
-- SETTLE: ends a request of an API key: gives back unused reserved tokens, or takes the missing ones.
-- Redis 6.2 has no flags but allows all writes after a first one, so ZREM comes first.
-- KEYS  1 usage, 2 leases
-- ARGV  1 request id, 2 requests a minute, 3 tokens a minute (0: no limit), 4 tokens used less those
--       reserved, 5 requests to give back, 6 ms that it ran, 7 ms to remember an idle key, 8 number of
--       the day on which tokens were reserved ("": no limits of a day), 9 prompt tokens used, 10 and
--       reserved, 11 output tokens used, 12 and reserved, 13 whether this is a repetition (0/1), which
--       changes nothing if the first one was carried out
-- Result  1, or 0 where there was nothing to do
local usage, leases = KEYS[1], KEYS[2]
if redis.call('ZREM', leases, ARGV[1]) == 0 and ARGV[13] == '1' then return 0 end
local requests, tokens, now = tonumber(ARGV[2]), tonumber(ARGV[3]), now_ms()
local u, v, duration = read_usage(usage, requests, tokens, now)
local back = tonumber(ARGV[5])
if back == 0 then
  local ran = tonumber(ARGV[6])
  duration = duration == 0 and ran or duration + LAST_WEIGHT * (ran - duration)
end
u, v = math.max(0, u - back), math.max(0, v + tonumber(ARGV[4]))
local daily = ARGV[8] ~= ''
if daily then
  local day, prompt, output = read_day(usage, now)
  -- What was reserved on an earlier day is forgotten with that day.
  local reserved = tonumber(ARGV[8]) == day and 1 or 0
  prompt = prompt + tonumber(ARGV[9]) - reserved * tonumber(ARGV[10])
  output = output + tonumber(ARGV[11]) - reserved * tonumber(ARGV[12])
  write_day(usage, day, math.max(0, prompt), math.max(0, output))
end
write_usage(usage, requests, tokens, now, u, v, duration, ARGV[7], daily)
return 1
