#!lua flags=allow-oom
-- UNREGISTER: forgets a model and its files, if its entry is still the one that was read.
-- KEYS  1 models, 2 this model's files
-- ARGV  1 name, 2 entry
-- Result  1, or 0 if the entry has changed
if redis.call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return 1
