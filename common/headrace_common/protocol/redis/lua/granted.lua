#!lua flags=no-writes
-- GRANTED: reads a field of what a model's engines have registered, if it is not too large: they may
-- write anything there.
-- KEYS  1 granted model
-- ARGV  1 field, 2 most bytes
-- Result  the field, its size where that is too large, or nil where there is none
local size = redis.call('HSTRLEN', KEYS[1], ARGV[1])
if size == 0 then return false end
if size > tonumber(ARGV[2]) then return size end
return redis.call('HGET', KEYS[1], ARGV[1])
