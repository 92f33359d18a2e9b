#!lua
-- REGISTER: tells gateways of a model, entry and files together, so that neither is seen without
-- the other. Repeating it changes nothing. Refused by Redis when that is out of memory.
-- KEYS  1 models, 2 this model's files
-- ARGV  1 name, 2 entry, 3 files, 4 a random name for this data set, used if it has none
-- Result  1
redis.call('HSETNX', KEYS[1], '', ARGV[4])
redis.call('SET', KEYS[2], ARGV[3])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return 1
