#!lua flags=allow-oom
-- VACATE: an account keeps a request's answer no longer.
-- KEYS  1 the account's requests by when they lapse, 2 their bytes
-- ARGV  1 request id
-- Result  1, or 0 where it was not counted
if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return 0 end
leave(ARGV[1])
return 1
