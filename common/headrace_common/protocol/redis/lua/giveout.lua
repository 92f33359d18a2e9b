#!lua flags=allow-oom
-- GIVEOUT: returns an ended request's outcome, and notes that a client was given it: from then on the
-- outcome is final, even if the gateway's client has other tokens.
-- KEYS  1 record
-- ARGV  none
-- Result  {state, why, outcome, when its state was lost}, or {} where it is unknown
local v = redis.call('HMGET', KEYS[1], 'st', 'why', 'out', 'lt', 'gi')
if not v[1] then return {} end
if v[1] == 'done' and not v[5] then redis.call('HSET', KEYS[1], 'gi', 1) end
return { v[1], v[2], v[3], v[4] }
