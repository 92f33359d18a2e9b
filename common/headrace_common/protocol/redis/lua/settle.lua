#!lua flags=allow-oom
-- SETTLE: ends a request of an API key: gives back unused reserved tokens, or takes the missing ones.
-- Redis 6.2 has no flags but allows all writes after a first one, so ZREM comes first.
-- KEYS  1 usage, 2 leases
-- ARGV  1 request id, 2 requests a minute, 3 tokens a minute (0: no limit), 4 tokens used less those
--       reserved, 5 requests to give back, 6 ms that it ran, 7 ms to remember an idle key, 8 whether
--       this is a repetition (0/1), which changes nothing if the first one was carried out
-- Result  1, or 0 where there was nothing to do
local usage, leases = KEYS[1], KEYS[2]
if redis.call('ZREM', leases, ARGV[1]) == 0 and ARGV[8] == '1' then return 0 end
local requests, tokens, now = tonumber(ARGV[2]), tonumber(ARGV[3]), now_ms()
local u, v, duration = read_usage(usage, requests, tokens, now)
local back = tonumber(ARGV[5])
if back == 0 then
  local ran = tonumber(ARGV[6])
  duration = duration == 0 and ran or duration + LAST_WEIGHT * (ran - duration)
end
u, v = math.max(0, u - back), math.max(0, v + tonumber(ARGV[4]))
write_usage(usage, requests, tokens, now, u, v, duration, ARGV[7])
return 1
