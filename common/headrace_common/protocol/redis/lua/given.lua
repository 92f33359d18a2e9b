#!lua flags=allow-oom
-- GIVEN: notes how many output tokens a request's client was given, where that is not what its engine
-- made: a stop string was found, or the request failed on the way. Corrects the ledger if it has ended.
-- KEYS  1 record, 2 ledger
-- ARGV  1 request id, 2 output tokens
-- Result  1, or 0 where the request is unknown
local record = KEYS[1]
local v = redis.call('HMGET', record, 'st', 'why', 'a')
if not v[1] then return 0 end
redis.call('HSET', record, 'og', ARGV[2])
if ended(v[1]) then
  enter_usage(KEYS[2], record, ARGV[1], tonumber(v[3]), now_ms(), how(v[1], v[2]), tonumber(ARGV[2]), false)
end
return 1
