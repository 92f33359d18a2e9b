#!lua flags=allow-oom
-- LOAD: a gateway begins to load a model's files, unless too many began and have not ended.
-- KEYS  1 loads of these files
-- ARGV  1 gateway, 2 how many may have begun, 3 ms after which one is forgotten
-- Result  -1, or ms since the last of those many began
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[3]))
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then
  local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')
  return now - tonumber(last[2])
end
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return -1
