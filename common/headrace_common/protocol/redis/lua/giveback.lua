#!lua flags=allow-oom
-- GIVEBACK: makes a started request claimable at once. Its engine calls it when it drains (not a
-- failure); its gateway calls it when the engine went silent (a failure; the engine may still beat).
-- KEYS  1 record, 2 wake-ups, 3 queue hi, 4 queue n, 5 queue lo
-- ARGV  1 request id, 2 engine id, 3 attempt ("" any), 4 the engine itself gives it (0/1),
--       5 its client has tokens of the other side's weights (0/1),
--       6 its KV is in the shared tier (0/1), so that REAP leaves it to engines that go on with it
-- Result  1, or 0 where the engine does not own the request
local record, engine = KEYS[1], ARGV[2]
local v = redis.call('HMGET', record, 'st', 'o', 'a', 'mid', 'q')
if v[1] ~= 'running' or v[2] ~= engine then return 0 end
if ARGV[3] ~= '' and v[3] ~= ARGV[3] then return 0 end

local queue = KEYS[2 + tonumber(v[5])]
in_group(queue, 'XCLAIM', queue, GROUP, engine, 0, v[4], 'IDLE', CLAIMABLE, 'JUSTID')
if ARGV[4] == '1' then redis.call('HSET', record, 'o', '', 'ph', 'w') end
if ARGV[5] == '1' then redis.call('HSET', record, 'ls', 1) end
if ARGV[6] == '1' then redis.call('HSET', record, 'ho', now_ms()) end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', 16, '*', 'r', ARGV[1])
return 1
