#!lua flags=allow-oom
-- TAKE: hands waiting requests to an engine, by priority, by what their tenants have used, and by
-- age. Never waits.
-- hi before n before lo, but n and lo each get one of SHARE that a class before them got.
-- KEYS  1 stats, 2 dead letters, 3 wake-ups, 4 queue hi, 5 queue n, 6 queue lo,
--       7 prefix of records, 8 of payloads, 9 of journals, 10 ledger, 11 that of placed.lua, then
--       those of charging.lua. Which requests come is known only when they are read, so their keys
--       are made here from the prefixes: same hash tag, same slot.
-- ARGV  1 engine id, 2 most requests, 3 most prompt tokens (-1: any), 4 protocol version,
--       5 ms to keep the record of one that ends here, 6 fewest and 7 most tokens of a prompt (-1: any)
--       that it takes, 8 ms for which it leaves others to other engines, 9 most requests of low priority
--       (-1: any), 10-12 those of variants.lua, then the adapters that the engine has loaded
-- Result  {leases, endings, left}. lease {request id, attempt, gateway, recovered, suspect, payload,
--         placed: 0 with no engine, 1 with this one, 2 with another, ms since it was admitted,
--         ms until its deadline, OWN or FOREIGN};
--         ending {request id, attempt, gateway, why}; left: {priority, id, ms} of the entry that did
--         not fit the prompt tokens (ms -1), or is another engine's for so many ms more, or is none that
--         this engine takes, and so many ms later it looks again; or {}
local stats, letters, wakeups = KEYS[1], KEYS[2], KEYS[3]
local engine, version, ttl = ARGV[1], tonumber(ARGV[4]), ARGV[5]
local room, low_room = tonumber(ARGV[3]), tonumber(ARGV[9])
local SHARE = 16
local LOW = 3
local now = now_ms()
local leases, endings, left = {}, {}, {}
local charged, served = {}, nil -- tokens of the tenants that were served, and which of them last
local stopped = {} -- for each priority, `left` if its first request is none that the engine takes
read_bounds(6, now)
read_variant(10)
read_adapters(13)

-- The id just below `id`; if the group has read it last, `id` is next again.
local function before(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  if seq ~= '0' then return string.format('%s-%.0f', ms, tonumber(seq) - 1) end
  return string.format('%.0f-18446744073709551615', tonumber(ms) - 1)
end

-- Makes an entry the next one again; its record may not know it yet.
local function unread(queue, id, rid)
  redis.call('XGROUP', 'SETID', queue, GROUP, before(id))
  redis.call('XACK', queue, GROUP, id)
  redis.call('HSET', RECORDS .. rid, 'mid', id)
end

local function fail(queue, priority, id, rid, v, why)
  drop(queue, id)
  no_longer_waiting(priority, v[9] or 'default', v[7])
  unplace(priority, v[10], rid)
  local record = KEYS[7] .. rid
  redis.call('HSET', record, 'st', 'failed', 'why', why, 'lt', now)
  keep_record(record, KEYS[8] .. rid, KEYS[9] .. rid, ttl, redis.call('HGET', record, 'kp'))
  enter_usage(KEYS[10], record, rid, tonumber(v[4]), now, how('failed', why), 0, true)
  endings[#endings + 1] = { rid, v[4], v[5], why }
end

local function placed(v)
  if not v[10] or v[10] == '' then return 0 end
  return v[10] == engine and 1 or 2
end

local function lease(priority, id, rid, v, payload)
  local record, attempt = KEYS[7] .. rid, tonumber(v[4])
  local fields = { 'st', 'running', 'o', engine, 'a', attempt + 1, 'ph', 'w', 'mid', id }
  local whose = OWN
  -- A first run writes the journal from its start; a later one only after RESUME.
  if attempt == 0 then
    for _, field in ipairs({ 'je', engine .. '/1', 'va', variant, 'wf', weights }) do fields[#fields + 1] = field end
  elseif with_other_weights(v[15], redis.call('HGET', record, 'wf')) then
    whose = FOREIGN
  end
  redis.call('HSET', record, unpack(fields))
  local tenant, tokens = v[9] or 'default', cost(tonumber(v[8]), v[14])
  no_longer_waiting(priority, tenant, v[7])
  unplace(priority, v[10], rid)
  if tokens > 0 then
    used_by[tenant] = used(tenant) + tokens
    set_score(tenant, used_by[tenant])
    charged[tenant], served = (charged[tenant] or 0) + tokens, tenant
  end
  leases[#leases + 1] = { rid, attempt + 1, v[5], attempt > 0 and 1 or 0, 0, payload, placed(v),
    now - tonumber(v[12] or now), tonumber(v[3]) - now, whose }
end

-- Whether an entry just read, which is placed with another engine, is not for this one now: it is
-- then behind one of this engine's own, or first in the queue again.
local function give_way(queue, priority, id, rid, v)
  local at = tonumber(v[12])
  local next_one = { priority = priority, rid = rid, version = v[6], at = at, tenant = v[9],
    hold = tonumber(v[11]) - at, passes = tonumber(v[13] or 0) }
  local own, r = first_own(engine, next_one, room, version)
  if own then
    drop(queue, id)
    pass(queue, next_one, own, r)
    return true
  end
  local free = free_at(next_one)
  if free <= now then return false end
  unread(queue, id, rid)
  left = { priority, id, free - now }
  return true
end

-- Leaves an entry just read, and those after it in its class, in the queue for now.
local function leave(queue, priority, id, rid)
  unread(queue, id, rid)
  stopped[priority] = { priority, id, LOOK_AGAIN }
end

-- Leaves an entry just read, which this engine does not take, to other engines.
local function leave_to_others(queue, priority, id, rid, v)
  if not pass_over(queue, priority, id, rid, v, now) then leave(queue, priority, id, rid) end
end

-- Handles one entry just read. v: the fields of its request, if they were looked up.
local function deal(queue, priority, id, rid, v)
  v = v or rid and look_up(rid)
  if not v or not v[1] then
    drop(queue, id)
    dead_letter(letters, rid or '', 'no_record', 0)
  elseif v[2] ~= id or v[1] ~= 'queued' then
    drop(queue, id)
  elseif tonumber(v[3]) <= now then
    fail(queue, priority, id, rid, v, 'deadline_exceeded')
  elseif tonumber(v[6]) > version then
    redis.call('XCLAIM', queue, GROUP, engine, 0, id, 'IDLE', CLAIMABLE, 'JUSTID')
    redis.call('HSET', KEYS[7] .. rid, 'st', 'running', 'mid', id)
    no_longer_waiting(priority, v[9] or 'default', v[7])
    unplace(priority, v[10], rid)
    redis.call('XADD', wakeups, 'MAXLEN', '~', 16, '*', 'r', rid)
  elseif priority == LOW and low_room == 0 then
    leave(queue, priority, id, rid)
  elseif is_for_others(v[15], v[8], v[12], now) or lacks_adapter(RECORDS .. rid, v[6]) then
    leave_to_others(queue, priority, id, rid, v)
  elseif placed(v) == 2 and give_way(queue, priority, id, rid, v) then
    return
  elseif room >= 0 and tonumber(v[8]) > room then
    unread(queue, id, rid)
    left = { priority, id, -1 }
  else
    local payload = redis.call('GET', KEYS[8] .. rid)
    if not payload then
      dead_letter(letters, rid, 'no_payload', 0)
      fail(queue, priority, id, rid, v, 'state_lost')
    else
      if room >= 0 then room = room - tonumber(v[8]) end
      if priority == LOW then low_room = low_room - 1 end
      lease(priority, id, rid, v, payload)
    end
  end
end

local function read(queue)
  local reply = in_group(queue, 'XREADGROUP', 'GROUP', GROUP, engine, 'COUNT', 1, 'STREAMS', queue, '>')
  return reply and reply[1][2][1]
end

-- Moves the next blocked request into the stream; returns its entry's id, its own, and its record
-- with that entry, which only deal() writes.
local function refill(queue, priority)
  local rid, v = unblock_next(priority)
  if not rid then return end
  v[2] = append(queue, rid, v[6], v[12])
  return v[2], rid, v
end

-- Reads the next entry of a class; returns its id, its request and perhaps the request's fields, or nil.
local function next_entry(queue, priority)
  local moved, rid, v
  if all_listed(priority) then moved, rid, v = refill(queue, priority) end
  local entry = read(queue)
  if not entry and not moved then
    moved, rid, v = refill(queue, priority)
    entry = moved and read(queue)
  end
  if not entry then return end
  if entry[1] == moved then return moved, rid, v end
  -- The counts were wrong: something was in the stream.
  if moved then redis.call('HSET', RECORDS .. rid, 'mid', moved) end
  return entry[1], field(entry, 'r')
end

-- Takes at most `most` from one class; returns how many, and whether that left it empty.
local function take(priority, most)
  local queue, start = KEYS[3 + priority], #leases
  while #leases - start < most and #left == 0 and not stopped[priority] do
    local id, rid, v = next_entry(queue, priority)
    if not id then
      counts[WAITING[priority]], counts[LISTED[priority]] = 0, 0
      return #leases - start, true
    end
    deal(queue, priority, id, rid, v)
  end
  return #leases - start, false
end

read_counts(stats)
local most = tonumber(ARGV[2])
local due = { 0, counts.cn, counts.cl }
for priority = 2, 3 do
  local share = math.min(math.floor(due[priority] / SHARE), most - #leases)
  if share > 0 then
    take(priority, share)
    due[priority] = due[priority] - share * SHARE
  end
end
local emptied = 0
for priority = 1, 3 do
  local taken, empty = take(priority, most - #leases)
  for lower = priority + 1, 3 do due[lower] = due[lower] + taken end
  if empty then
    due[priority] = 0
    emptied = emptied + 1
  end
end
for priority = 1, 3 do keep_head(KEYS[3 + priority], priority) end
if #leases > 0 then counts.cn, counts.cl = due[2], due[3] end
-- No request waits: corrects the counts, even if another program changed the streams.
if emptied == 3 then
  counts.w, counts.wt, left_by = 0, 0, {}
  redis.call('DEL', TENANTS, placed_with(1, engine), placed_with(2, engine), placed_with(3, engine))
end
if #left == 0 then left = stopped[1] or stopped[2] or stopped[3] or left end
write_counts(stats)
for tenant, tokens in pairs(charged) do
  local last = tenant == served and '' or tenant
  redis.call('HSET', COUNTERS, tenant, used_by[tenant], last, used_by[tenant])
  redis.call('HINCRBY', COUNTERS, '+' .. tenant, string.format('%.0f', tokens))
end
if #leases > 0 then redis.call('PEXPIRE', COUNTERS, FORGET) end
return { leases, endings, left }
