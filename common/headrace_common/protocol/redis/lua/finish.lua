#!lua flags=allow-oom
-- FINISH: ends a request and stores its outcome, if the engine still owns it. Works when Redis is
-- full: it is what frees memory. Redis 6.2 has no flags but allows all writes after a first one,
-- so XACK comes first.
-- KEYS  1 record, 2 payload, 3 journal, 4 stats, 5 dead letters, 6 queue hi, 7 queue n, 8 queue lo,
--       9 ledger, then those of tenants.lua
-- ARGV  1 request id, 2 engine id, 3 attempt, 4 state (done|failed|cancelled), 5 failure code or "",
--       6 outcome, 7 ms to keep the record, 8 reason for a dead letter or "",
--       9 output tokens, 10 what the attempt used, as in ledger.lua
-- Result  1 (also when repeated), or 0 where the engine does not own the request
local record, attempt = KEYS[1], ARGV[3]
local v = redis.call('HMGET', record, 'st', 'o', 'a', 'mid', 'q', 'f', 'kp', 'wg', unpack(ENTERED))
if not v[1] or v[2] ~= ARGV[2] or v[3] ~= attempt then return 0 end
if ended(v[1]) then return v[1] == ARGV[4] and 1 or 0 end
local tenant, made = v[14] or 'default', tonumber(v[17] or 0)

drop(KEYS[5 + tonumber(v[5])], v[4])
local now, output = now_ms(), tonumber(ARGV[9])
local entered = write_entry(KEYS[9], record, ARGV[1], tonumber(attempt), now, how(ARGV[4], ARGV[5]), output, true,
  v, 8, ARGV[10])
redis.call('HSET', record, 'st', ARGV[4], 'why', ARGV[5], 'out', ARGV[6], 'pn', ARGV[9], 'u' .. attempt, ARGV[10],
  'ue', entered or '')
keep_record(record, KEYS[2], KEYS[3], ARGV[7], v[7])
if ARGV[5] == 'state_lost' then redis.call('HSET', record, 'lt', now) end
count_ending(KEYS[4], now)
charge(tenant, v[8], made, output)
if ARGV[8] ~= '' then dead_letter(KEYS[5], ARGV[1], ARGV[8], v[6], v[3]) end
return 1
