#!lua
-- STORE: stores the data that any gateway needs to serve a request's answer, unless they exist.
-- KEYS  1 stored request
-- ARGV  1 name of this generation of it, 2 content, 3 Unix ms when it lapses, 4 name of the
--       generation that it replaces ("" none)
-- Result  the content that is kept now
local v = redis.call('HMGET', KEYS[1], 'n', 'b')
if v[1] and v[1] ~= ARGV[4] then return v[2] end
redis.call('HSET', KEYS[1], 'n', ARGV[1], 'b', ARGV[2])
redis.call('PEXPIREAT', KEYS[1], ARGV[3])
return ARGV[2]
