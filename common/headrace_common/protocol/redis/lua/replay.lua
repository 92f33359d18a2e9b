#!lua
-- REPLAY: queues a request of a dead letter again, as it was admitted. Its attempts go on counting,
-- so that an engine that ran it before is fenced, but its failures are counted from 0.
-- KEYS  1 record, 2 payload, 3 journal, 4 stats, 5 dead letters, 6 queue hi, 7 queue n, 8 queue lo,
--       then those of tenants.lua
-- ARGV  1 request id, 2 id of its dead letter, 3 gateway id, 4 fingerprint, 5 ms until its deadline,
--       6 tokens, 7 prompt tokens, 8 priority (1-3), 9 protocol version,
--       10 ms to keep after the deadline, 11 payload, 12 ms to keep the record once it has ended,
--       13 tenant, 14 its weight, 15 API key, 16 adapter, 17 the bounds of the ledger, if the record is gone
-- Result  1, or 0 where the letter is gone or the request is alive
local record, payload, journal, stats, letters = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local v = redis.call('HMGET', record, 'st', 'a', 'ul', 'ue')
local letter = redis.call('XRANGE', letters, ARGV[2], ARGV[2])[1]
if not letter or field(letter, 'r') ~= ARGV[1] or (v[1] and not ended(v[1])) then return 0 end

local attempt = math.max(tonumber(v[2] or 0), tonumber(field(letter, 'a') or 0))
local now = now_ms()
local deadline = now + tonumber(ARGV[5])
local expires = deadline + tonumber(ARGV[10])
redis.call('XDEL', letters, ARGV[2])
local queue = KEYS[5 + tonumber(ARGV[8])]
read_counts(stats)
local mid = enqueue(stats, queue, tonumber(ARGV[8]), ARGV[1], ARGV[13], ARGV[6], ARGV[9])
redis.call('DEL', record, journal)
-- The journal has no owner and is empty: the engine that takes the request reads that the client has no tokens.
redis.call('HSET', record, 'st', 'queued', 'q', ARGV[8], 'mid', mid, 'a', attempt, 'o', '',
  'g', ARGV[3], 'gs', '', 'je', ARGV[3] .. '/' .. attempt, 'f', 0, 'pn', 0, 'pt', 0, 'ph', 'w',
  'fp', ARGV[4], 'd', deadline, 'tk', ARGV[6], 'pk', ARGV[7], 'v', ARGV[9], 'kp', ARGV[12],
  'tn', ARGV[13], 't', now, 'wg', ARGV[14], 'ki', ARGV[15], 'ad', ARGV[16], 'ul', v[3] or ARGV[17],
  -- It was entered when it became a dead letter, when its client was given nothing.
  'ue', v[4] or cmsgpack.pack({ 1, 0, 0, 0, 0, 0 }))
redis.call('PEXPIREAT', record, expires)
redis.call('SET', payload, ARGV[11], 'PXAT', expires)
return 1
