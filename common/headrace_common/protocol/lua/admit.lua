#!lua
-- ADMIT: puts a request in its queue, or attaches this gateway to one that is known.
-- Repeating it changes nothing. Refused by Redis when that is out of memory.
-- KEYS  1 record, 2 payload, 3 journal, 4 stats, 5 queue hi, 6 queue n, 7 queue lo, then those of
--       fairness.lua
-- ARGV  1 request id, 2 gateway id, 3 fingerprint, 4 deadline (ms), 5 tokens, 6 prompt tokens,
--       7 priority (1-3), 8 protocol version, 9 most waiting requests, 10 most waiting tokens,
--       11 newest attempt seen (-1: first admission), 12 ms to keep behind the deadline,
--       13 payload ("" asks only: a repetition without the cost of sending it),
--       14 ms to keep the record once it has ended, 15 whether to leave it to another gateway that
--       has it (0/1), 16 tenant, 17 most waiting requests of a tenant (0: as many as of all)
-- Result  {admitted} | {attached, owner, attempt, former gateway or ""} | {ended, state, why, outcome}
--         | {held, owner, attempt, gateway}
--         | {full, waiting requests, waiting tokens} | {tenant, its waiting requests} | {conflict} | {unknown}: send the payload
local record, payload, journal, stats = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local rid, gateway, fingerprint = ARGV[1], ARGV[2], ARGV[3]
local priority, tenant = tonumber(ARGV[7]), ARGV[16]
local queue = KEYS[4 + priority]
local seen = tonumber(ARGV[11])

local function queued()
  return enqueue(stats, queue, priority, rid, tenant, ARGV[5], ARGV[8])
end

local v = redis.call('HMGET', record, 'st', 'fp', 'g', 'gs', 'o', 'a', 'mid', 'q', 'why', 'out')
local state = v[1]
if state then
  if v[2] ~= fingerprint then return { 'conflict' } end
  if ended(state) then return { 'ended', state, v[9] or '', v[10] or '' } end
  if ARGV[15] == '1' and v[3] ~= gateway then return { 'held', v[5], v[6], v[3] } end
  local former = ''
  if v[3] ~= gateway then
    former = v[3]
    redis.call('HSET', record, 'g', gateway, 'gs', v[4] == '' and former or v[4] .. ' ' .. former)
  end
  if not is_queued(KEYS[4 + tonumber(v[8])], v[8], rid, v[7], tenant) then
    -- Its entry is lost: queue it again. Whoever still runs it is fenced.
    redis.call('HSET', record, 'st', 'queued', 'o', '', 'q', ARGV[7], 'mid', queued())
    return { 'attached', '', v[6], former }
  end
  return { 'attached', v[5], v[6], former }
end

if ARGV[13] == '' then return { 'unknown' } end
local waiting = redis.call('HMGET', stats, 'w', 'wt')
local requests, tokens = tonumber(waiting[1] or 0), tonumber(waiting[2] or 0)
local no_room = requests >= tonumber(ARGV[9])
  or (requests > 0 and tokens + tonumber(ARGV[5]) > tonumber(ARGV[10]))
if seen < 0 and no_room then return { 'full', requests, tokens } end
local of_tenant = tonumber(redis.call('ZSCORE', TENANTS, tenant) or 0)
local most = tonumber(ARGV[17])
if seen < 0 and most > 0 and of_tenant >= most then return { 'tenant', of_tenant } end

local expires = tonumber(ARGV[4]) + tonumber(ARGV[12])
redis.call('HSET', record, 'st', 'queued', 'q', ARGV[7], 'mid', queued(), 'a', math.max(seen, 0),
  'o', '', 'g', gateway, 'gs', '', 'je', '', 'f', 0, 'pn', 0, 'pt', 0, 'ph', 'w',
  'fp', fingerprint, 'd', ARGV[4], 'tk', ARGV[5], 'pk', ARGV[6], 'v', ARGV[8], 'tn', tenant,
  't', now_ms())
if ARGV[14] ~= '0' then redis.call('HSET', record, 'kp', ARGV[14]) end
redis.call('PEXPIREAT', record, expires)
redis.call('DEL', journal)
redis.call('SET', payload, ARGV[13], 'PXAT', expires)
return { 'admitted' }
