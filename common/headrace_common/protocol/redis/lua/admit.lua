#!lua
-- ADMIT: puts a request in its queue, or attaches this gateway to one that is known.
-- Repeating it changes nothing. Refused by Redis when that is out of memory.
-- KEYS  1 record, 2 payload, 3 journal, 4 stats, 5 queue hi, 6 queue n, 7 queue lo, 8 wake-ups,
--       9 that of placed.lua, then those of tenants.lua
-- ARGV  1 request id, 2 gateway id, 3 fingerprint, 4 ms until its deadline, 5 tokens, 6 prompt tokens,
--       7 priority (1-3), 8 protocol version, 9 most waiting requests, 10 most waiting tokens,
--       11 newest attempt seen (-1: first admission), 12 ms to keep after the deadline,
--       13 payload ("" asks only: a repetition without the cost of sending it),
--       14 ms to keep the record once it has ended, 15 whether to leave it to another gateway that
--       has it (0/1), or 2: its outcome is of another history than the client's, 16 tenant, 17 most waiting requests of a tenant (0: as many as of all),
--       18 the tenant's weight, 19 its API key, 20 its adapter, 21 the bounds of the ledger (as in ledger.lua; "": it is not entered),
--       22 adapter, with its version, that its engine must have loaded, or "", 23 its side ("" or canary);
--       then nothing, or where to place it: 24 the most load of an engine, of what is its share,
--       25 ms that it waits for its engine, 26 sequences that all engines run at once, and of each
--       engine, the best one first, its id and the sequences that it runs at once
-- Result  {admitted} | {attached, owner, attempt, former gateway or ""} | {ended, state, why, outcome, attempt}
--         | {following, owner, attempt, gateway}
--         | {full, waiting requests, waiting tokens} | {tenant, its waiting requests} | {conflict} | {unknown}: send the payload
local record, payload, journal, stats = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local rid, gateway, fingerprint = ARGV[1], ARGV[2], ARGV[3]
local priority, tenant = tonumber(ARGV[7]), ARGV[16]
local queue = KEYS[4 + priority]
local seen = tonumber(ARGV[11])
local deadline = now_ms() + tonumber(ARGV[4])
local ANEW = 5 -- how often a request that has ended is queued again
local RESERVED = 60000 -- ms in which that is left to its gateway, which asks within a third of them

local function queued()
  return enqueue(stats, queue, priority, rid, tenant, ARGV[5], ARGV[8])
end

-- The numbers of requests of each engine and of all engines.
local function running()
  local by_engine, total = {}, 0
  for i = 5, 7 do
    local pending = in_group(KEYS[i], 'XPENDING', KEYS[i], GROUP)
    for _, item in ipairs(pending[4] or {}) do
      by_engine[item[1]] = (by_engine[item[1]] or 0) + tonumber(item[2])
    end
    total = total + pending[1]
  end
  return by_engine, total
end

-- The first of the engines whose load is not more than a little above its share; '' where there is
-- none (consistent hashing with bounded loads: Mirrokni et al., 2018).
local function place()
  if #ARGV < 27 then return '' end
  local by_engine, total = running()
  local capacity = tonumber(ARGV[26])
  total = total + counts.w + 1
  for i = 27, #ARGV, 2 do
    local engine, own = ARGV[i], tonumber(ARGV[i + 1])
    local bound = math.ceil(tonumber(ARGV[24]) * total * own / capacity)
    if total <= capacity then bound = math.min(bound, own) end
    local load = by_engine[engine] or 0
    for class = 1, 3 do
      if counts[WAITING[class]] > 0 then load = load + redis.call('LLEN', placed_with(class, engine)) end
    end
    if load < bound then return engine end
  end
  return ''
end

-- Notes where a request is placed. A request placed after another one of its engine must wake the engine itself.
local function note_place(engine, mid, now)
  local list = placed_with(priority, engine)
  redis.call('RPUSH', list, rid)
  redis.call('PEXPIRE', list, FORGET)
  redis.call('HSET', record, 'pe', engine, 'pu', now + tonumber(ARGV[25]))
  if mid == BLOCKED then redis.call('XADD', KEYS[8], 'MAXLEN', '~', 16, '*', 'r', rid) end
end

-- Leaves a request to its gateway; the gateway that asked may follow it and read its replies.
local function following(owner, v)
  redis.call('HSET', record, 'gi', 1)
  return { 'following', owner, v[6], v[3] }
end

-- Whether a request that has ended goes on: its state was lost, a gateway that has it finds it
-- abandoned, or the outcome is of another history than its own gateway's client's (and of no later
-- attempt than was looked at, and nobody else was given it).
local function goes_on(v, now)
  local disputed = ARGV[15] == '2' and v[1] == 'done' and v[3] == gateway
    and tonumber(v[6]) <= seen and not redis.call('HGET', record, 'gi')
  local lost = undecided(v[9]) and (v[9] == 'state_lost' or seen >= 0)
  if not disputed and not lost or deadline <= now then return false end
  return tonumber(redis.call('HGET', record, 'an') or 0) < ANEW
end

-- Queues the request again, with an attempt above all earlier ones. Its failures still count.
local function go_on(attempt)
  read_counts(stats)
  redis.call('DEL', journal)
  redis.call('HSET', record, 'st', 'queued', 'q', ARGV[7], 'mid', queued(),
    'a', math.max(seen, attempt), 'o', '', 'g', gateway, 'gs', '', 'je', '', 'pn', 0, 'pt', 0,
    'ph', 'w', 'pe', '', 'ps', 0, 'why', '', 'out', '', 'og', '', 't', now_ms(),
    'an', tonumber(redis.call('HGET', record, 'an') or 0) + 1)
  local expires = deadline + tonumber(ARGV[12])
  redis.call('PEXPIREAT', record, expires)
  redis.call('SET', payload, ARGV[13], 'PXAT', expires)
  return { 'admitted' }
end

-- The reply for a request that has ended.
local function after_end(v)
  local now = now_ms()
  if not goes_on(v, now) then
    if seen < 0 and v[1] == 'done' then redis.call('HSET', record, 'gi', 1) end
    return { 'ended', v[1], v[9] or '', v[10] or '', v[6] }
  end
  local lost_at = tonumber(redis.call('HGET', record, 'lt') or 0)
  if ARGV[15] == '1' and v[3] ~= gateway and now - lost_at < RESERVED then
    return following('', v)
  end
  if ARGV[13] == '' then return { 'unknown' } end
  return go_on(tonumber(v[6]))
end

local v = redis.call('HMGET', record, 'st', 'fp', 'g', 'gs', 'o', 'a', 'mid', 'q', 'why', 'out')
local state = v[1]
if state then
  if v[2] ~= fingerprint then return { 'conflict' } end
  if ended(state) then return after_end(v) end
  if ARGV[15] == '1' and v[3] ~= gateway then return following(v[5], v) end
  local former = ''
  if v[3] ~= gateway then
    former = v[3]
    redis.call('HSET', record, 'g', gateway, 'gs', v[4] == '' and former or v[4] .. ' ' .. former)
  end
  if not is_queued(KEYS[4 + tonumber(v[8])], v[8], rid, v[7], tenant) then
    -- Its entry is lost: queue it again, for any engine. An engine that still runs it is fenced.
    read_counts(stats)
    redis.call('HSET', record, 'st', 'queued', 'o', '', 'q', ARGV[7], 'mid', queued(), 'pe', '')
    return { 'attached', '', v[6], former }
  end
  return { 'attached', v[5], v[6], former }
end

if ARGV[13] == '' then return { 'unknown' } end
read_counts(stats)
local requests, tokens = counts.w, counts.wt
local no_room = requests >= tonumber(ARGV[9])
  or (requests > 0 and tokens + tonumber(ARGV[5]) > tonumber(ARGV[10]))
if seen < 0 and no_room then return { 'full', requests, tokens } end
local most = tonumber(ARGV[17])
if seen < 0 and most > 0 then
  local of_tenant = tonumber(redis.call('ZSCORE', TENANTS, tenant) or 0)
  if of_tenant >= most then return { 'tenant', of_tenant } end
end

local expires = deadline + tonumber(ARGV[12])
local engine, now = place(), now_ms()
local mid = queued()
redis.call('HSET', record, 'st', 'queued', 'q', ARGV[7], 'mid', mid, 'a', math.max(seen, 0),
  'o', '', 'g', gateway, 'gs', '', 'je', '', 'f', 0, 'pn', 0, 'pt', 0, 'ph', 'w',
  'fp', fingerprint, 'd', deadline, 'tk', ARGV[5], 'pk', ARGV[6], 'v', ARGV[8], 'tn', tenant,
  't', now, 'ki', ARGV[19], 'ad', ARGV[20], 'ul', ARGV[21])
if engine ~= '' then note_place(engine, mid, now) end
if ARGV[14] ~= '0' then redis.call('HSET', record, 'kp', ARGV[14]) end
if ARGV[18] ~= '1' then redis.call('HSET', record, 'wg', ARGV[18]) end
if ARGV[22] ~= '' then redis.call('HSET', record, 'lo', ARGV[22]) end
if ARGV[23] ~= '' then redis.call('HSET', record, 'va', ARGV[23]) end
redis.call('PEXPIREAT', record, expires)
redis.call('DEL', journal)
redis.call('SET', payload, ARGV[13], 'PXAT', expires)
return { 'admitted' }
