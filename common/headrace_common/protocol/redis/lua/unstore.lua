#!lua flags=allow-oom
-- UNSTORE: forgets a stored request, if it is still the generation that is meant.
-- KEYS  1 stored request
-- ARGV  1 name of the generation
-- Result  1, or 0 where there is another or none
if redis.call('HGET', KEYS[1], 'n') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
return 1
