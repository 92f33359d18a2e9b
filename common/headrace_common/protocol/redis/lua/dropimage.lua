#!lua flags=allow-oom
-- DROPIMAGE: notes that a request does not need an image any more. Works when Redis is full.
-- KEYS  as of KEEPIMAGE
-- ARGV  1 request id, 2 ms to keep an image that no request needs, 3 digest
-- Result  the number of requests that need it
local now = now_ms()
local dropped = redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
if dropped == 1 and redis.call('EXISTS', KEYS[1]) == 1 then
  note_life(last and tonumber(last) or now + tonumber(ARGV[2]), ARGV[3])
end
return redis.call('ZCARD', KEYS[2])
