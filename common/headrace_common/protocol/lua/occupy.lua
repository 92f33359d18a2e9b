#!lua
-- OCCUPY: counts the bytes of a request's answer among those that an account keeps, unless there
-- would be too many. Counting it again replaces what was counted before.
-- KEYS  1 the account's requests by when they lapse, 2 their bytes
-- ARGV  1 request id, 2 bytes, 3 Unix ms when the answer lapses, 4 most bytes of the account
-- Result  -1 where it is counted, else the bytes of the others
local MOST_AT_ONCE = 1000 -- that are forgotten in one run
local size = tonumber(ARGV[2])

local gone = redis.call('ZRANGE', KEYS[1], '-inf', now_ms(), 'BYSCORE', 'LIMIT', 0, MOST_AT_ONCE)
for _, id in ipairs(gone) do leave(id) end

local others = size_of(ALL) - size_of(ARGV[1])
if others + size > tonumber(ARGV[4]) then return others end
redis.call('ZADD', KEYS[2], size, ARGV[1], others + size, ALL)
redis.call('ZADD', KEYS[1], ARGV[3], ARGV[1])
local latest = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
for i = 1, 2 do redis.call('PEXPIREAT', KEYS[i], string.format('%.0f', latest)) end
return -1
