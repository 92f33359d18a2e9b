#!lua
-- PROBE: does with a scratch key what the other scripts do, so that a missing permission or command
-- shows at start-up. Leaves nothing behind.
-- KEYS  1 scratch stream, 2 scratch key
-- ARGV  none
-- Result  server time (ms)
local stream, key = KEYS[1], KEYS[2]
redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
local id = redis.call('XADD', stream, '*', 'r', 'probe')
redis.call('XREADGROUP', 'GROUP', GROUP, 'probe', 'COUNT', 1, 'STREAMS', stream, '>')
redis.call('XCLAIM', stream, GROUP, 'probe', 0, id, 'IDLE', CLAIMABLE, 'JUSTID')
redis.call('XPENDING', stream, GROUP, 'IDLE', 1000, '-', '+', 1)
redis.call('XINFO', 'CONSUMERS', stream, GROUP)
redis.call('XGROUP', 'SETID', stream, GROUP, id)
redis.call('XRANGE', stream, id, id)
drop(stream, id)
redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, 'probe')
redis.call('HSET', key, 'f', 1)
redis.call('HINCRBY', key, 'f', 1)
redis.call('HMGET', key, 'f')
redis.call('PEXPIRE', key, 1000)
redis.call('DEL', key, stream)
redis.call('SET', key, '', 'PXAT', now_ms() + 1000)
redis.call('GET', key)
redis.call('PEXPIREAT', key, now_ms() + 1000)
redis.call('DEL', key)
return now_ms()
