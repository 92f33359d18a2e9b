#!lua
-- ADAPT: replaces the set of adapters that a model's engines load, if it is still the one that was read.
-- KEYS  1 versions of all sets, 2 this model's set
-- ARGV  1 model, 2 version that was read ("": there was none), 3 new version, 4 new set
-- Result  1, or 0 if the set has changed
local known = redis.call('HGET', KEYS[2], 'v') or ''
if known == ARGV[3] then return 1 end -- a repetition
if known ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[2], 'v', ARGV[3], 's', ARGV[4])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
