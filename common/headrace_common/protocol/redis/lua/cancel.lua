#!lua flags=allow-oom
-- CANCEL: ends a request whose answer no client wants. A waiting one is never run; the engine of a
-- running one must be told, and hears it with its next BEAT at the latest. One of which
-- nothing was decided is not queued again.
-- KEYS  1 record, 2 payload, 3 journal, 4 stats, 5 queue hi, 6 queue n, 7 queue lo, 8 ledger, 9 that of
--       placed.lua, then those of tenants.lua
-- ARGV  1 ms to keep the record, 2 request id, 3 output tokens that the client was given ("" as many as the
--       journal has)
-- Result  {state it is in now ("" where unknown), owner to tell or ""}
local record = KEYS[1]
local v = redis.call('HMGET', record, 'st', 'o', 'mid', 'q', 'tk', 'tn', 'pe', 'kp', 'why', 'd', 'a')
if not v[1] then return { '', '' } end
local now, given = now_ms(), ARGV[3]

local function enter_end(ending, always)
  if given ~= '' then redis.call('HSET', record, 'og', given) end
  enter_usage(KEYS[8], record, ARGV[2], tonumber(v[11]), now, ending, tonumber(given) or 0, always)
end

if ended(v[1]) then
  redis.call('DEL', KEYS[3]) -- Redis 6.2 allows writes after a first one that frees memory
  -- The answer of a stored request can still be read, whoever has left it.
  if given ~= '' and not (v[1] == 'done' and v[8]) then enter_end(how(v[1], v[9]), false) end
  if not undecided(v[9]) then return { v[1], v[1] == 'cancelled' and v[2] or '' } end
  redis.call('HSET', record, 'st', 'cancelled', 'why', 'cancelled', 'out', '')
  return { 'cancelled', '' }
end

local queue = KEYS[4 + tonumber(v[4])]
if v[1] == 'queued' then
  read_counts(KEYS[4])
  unqueue(queue, tonumber(v[4]), ARGV[2], v[3], v[6] or 'default', v[5])
  write_counts(KEYS[4])
  unplace(v[4], v[7], ARGV[2])
else
  drop(queue, v[3])
end
redis.call('HSET', record, 'st', 'cancelled', 'why', 'cancelled')
keep_record(record, KEYS[2], KEYS[3], ARGV[1], v[8])
count_ending(KEYS[4], now)
enter_end(tonumber(v[10]) <= now and 'expired' or 'cancelled', true)
return { 'cancelled', v[2] }
