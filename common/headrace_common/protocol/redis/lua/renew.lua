#!lua
-- RENEW: extends the leases of an API key's running requests.
-- KEYS  1 leases
-- ARGV  1 ms of a lease, 2.. request ids
-- Result  1
local lapses = now_ms() + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], lapses, ARGV[i]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return 1
