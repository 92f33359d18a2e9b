-- Helpers, put before every script of this folder. Server time only: no client's clock decides.

local GROUP = 'e'
local CLAIMABLE = 86400000 -- idle time, ms, of an entry that anyone may claim at once
local RATE_WINDOW = 30 -- s, over which the rate of endings is averaged
local DEAD_LETTERS = 10000

local function now_ms()
  local time = redis.call('TIME')
  return tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
end

-- A command on a consumer group; makes the group where a wiped Redis has lost it. From 0: what was
-- written before the group was there must be delivered.
local function in_group(key, ...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    if string.find(reply.err, 'NOGROUP', 1, true) then
      redis.call('XGROUP', 'CREATE', key, GROUP, '0', 'MKSTREAM')
    end
    return redis.call(...)
  end
  return reply
end

local function ended(state)
  return state == 'done' or state == 'failed' or state == 'cancelled'
end

-- Whether nothing was decided by how a request ended: a gateway that has it and what its client was
-- told may have it go on from there (ADMIT).
local function undecided(why)
  return why == 'state_lost' or why == 'abandoned'
end

-- Acked and deleted together, else it stays in the stream or in the pending list for ever.
local function drop(queue, id)
  redis.call('XACK', queue, GROUP, id)
  redis.call('XDEL', queue, id)
end

local function dead_letter(key, rid, why, failures, attempt)
  redis.call('XADD', key, 'MAXLEN', '~', DEAD_LETTERS, '*', 'r', rid, 'why', why, 'n', failures,
    'a', attempt or 0)
end

local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end

-- One more request has ended: a rate whose weights fade over RATE_WINDOW.
local function count_ending(stats, now)
  local v = redis.call('HMGET', stats, 'er', 'et', 'e0')
  local rate, last = tonumber(v[1] or 0), tonumber(v[2] or now)
  rate = rate * math.exp(-math.max(0, now - last) / 1000 / RATE_WINDOW) + 1 / RATE_WINDOW
  redis.call('HSET', stats, 'er', string.format('%.9g', rate), 'et', now, 'e0', v[3] or now)
end

-- The record of an ended request stays for `ttl` ms, or as long as its gateway has asked for (`kp`).
-- Its payload and journal go.
local function keep_record(record, payload, journal, ttl, asked)
  redis.call('DEL', payload, journal)
  local kept = math.max(tonumber(ttl), tonumber(asked or 0))
  redis.call('PEXPIRE', record, string.format('%.0f', kept))
end
