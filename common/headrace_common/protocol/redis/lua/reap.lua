#!lua flags=allow-oom
-- REAP: hands an engine requests whose owner stopped beating, gave them back or was given up.
-- An attempt that ran without making a token counts as a failure: from SUSPECT on the request must
-- run alone, at POISON it is a dead letter. A drain or a lost reply counts nothing.
-- KEYS  1 stats, 2 dead letters, 3 queue hi, 4 queue n, 5 queue lo, 6 prefix of records,
--       7 of payloads, 8 of journals (see TAKE for the prefixes), 9 ledger
-- ARGV  1 engine id, 2 most requests, 3 lease (ms), 4 protocol version, 5 may have a suspect (0/1),
--       6 forget idle consumers (0/1), 7 ms to keep the record of one that ends here,
--       8 ms for which it leaves a request whose KV was handed over to other engines,
--       9-11 those of variants.lua, 12 whether a canary is wanted (0/1),
--       then the adapters that the engine has loaded
-- Result  {leases, endings} as TAKE, but a lease may also be ABANDONED
local stats, letters = KEYS[1], KEYS[2]
local engine, count, lease_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local version, suspects, ttl = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[7]
local hold = tonumber(ARGV[8])
local SUSPECT, POISON = 2, 4
local PAGE, PAGES = 32, 8
local QUARANTINE = 86400000 -- ms that a poisonous request's payload is kept, to be run again
local FORGET = 10 -- leases, after which a consumer without pending entries is forgotten
local now = now_ms()
local leases, endings = {}, {}
read_variant(9)
read_adapters(13)

local function fail(queue, id, rid, v, why)
  local record, payload, journal = KEYS[6] .. rid, KEYS[7] .. rid, KEYS[8] .. rid
  drop(queue, id)
  redis.call('HSET', record, 'st', 'failed', 'why', why, 'lt', now)
  if why == 'request_failed' then
    redis.call('PEXPIRE', payload, QUARANTINE)
    payload = journal
  end
  keep_record(record, payload, journal, ttl, redis.call('HGET', record, 'kp'))
  count_ending(stats, now)
  enter_usage(KEYS[9], record, rid, tonumber(v[4]), now, how('failed', why), 0, true)
  endings[#endings + 1] = { rid, v[4], v[5], why }
end

local function failures(v)
  local counted = tonumber(v[7])
  if v[8] ~= 'x' then return counted end
  return tonumber(v[9]) > tonumber(v[10]) and 0 or counted + 1
end

-- Whether the request waits for its own side. One whose client has tokens of other weights does so as long as that
-- side is wanted.
local function is_left(v)
  if not crosses(v[12]) then return false end
  return not alone or v[14] == '1' and ARGV[12] == '1' and with_other_weights(v[12], v[13])
end

local function whose_tokens(v)
  if not with_other_weights(v[12], v[13]) then return OWN end
  return v[14] == '1' and ABANDONED or FOREIGN
end

local function claim(queue, id, rid, v, failed)
  local payload = redis.call('GET', KEYS[7] .. rid)
  if not payload then
    dead_letter(letters, rid, 'no_payload', failed)
    return fail(queue, id, rid, v, 'state_lost')
  end
  local suspect = failed >= SUSPECT and 1 or 0
  if suspect > suspects then return end
  suspects = suspects - suspect
  redis.call('XCLAIM', queue, GROUP, engine, 0, id, 'JUSTID')
  local attempt = tonumber(v[4]) + 1
  redis.call('HSET', KEYS[6] .. rid, 'st', 'running', 'o', engine, 'a', attempt, 'ph', 'w',
    'f', failed, 'pt', v[9])
  leases[#leases + 1] = { rid, attempt, v[5], 1, suspect, payload, 0, now - tonumber(v[11] or now),
    tonumber(v[3]) - now, whose_tokens(v) }
end

local function deal(queue, id)
  local entry = redis.call('XRANGE', queue, id, id)[1]
  local rid = entry and field(entry, 'r')
  local v = rid and redis.call('HMGET', KEYS[6] .. rid, 'st', 'mid', 'd', 'a', 'g', 'v', 'f', 'ph',
    'pn', 'pt', 't', 'va', 'wf', 'ls', 'ho')
  if not v or not v[1] then
    drop(queue, id)
    dead_letter(letters, rid or '', 'no_record', 0)
  elseif v[2] ~= id or ended(v[1]) then
    drop(queue, id)
  elseif tonumber(v[3]) <= now then
    fail(queue, id, rid, v, 'deadline_exceeded')
  elseif now - tonumber(v[15] or 0) < hold then
    return
  elseif tonumber(v[6]) <= version and not is_left(v) and not lacks_adapter(KEYS[6] .. rid, v[6]) then
    local failed = failures(v)
    if failed >= POISON then
      dead_letter(letters, rid, 'poisoned', failed, v[4])
      fail(queue, id, rid, v, 'request_failed')
    else
      claim(queue, id, rid, v, failed)
    end
  end
end

local function reap(queue)
  local from = '-'
  for _ = 1, PAGES do
    local pending = in_group(queue, 'XPENDING', queue, GROUP, 'IDLE', lease_ms, from, '+', PAGE)
    for _, item in ipairs(pending) do
      if #leases >= count then return end
      deal(queue, item[1])
      from = '(' .. item[1]
    end
    if #pending < PAGE then return end
  end
end

-- Only without pending entries: forgetting a consumer would forget those too.
local function forget_consumers(queue)
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', queue, GROUP)) do
    local v = {}
    for i = 1, #consumer, 2 do v[consumer[i]] = consumer[i + 1] end
    if v.pending == 0 and v.idle > FORGET * lease_ms and v.name ~= engine then
      redis.call('XGROUP', 'DELCONSUMER', queue, GROUP, v.name)
    end
  end
end

for i = 3, 5 do
  reap(KEYS[i])
  if ARGV[6] == '1' then forget_consumers(KEYS[i]) end
end
return { leases, endings }
