#!lua flags=allow-oom
-- BEAT: renews an engine's leases on some requests and writes their new tokens to their journals, if
-- the engine still owns them. The check is in here since claiming an own entry that was claimed by
-- another meanwhile would take it back.
-- KEYS  1 queue hi, 2 queue n, 3 queue lo, then of each request its record and journal, then those of
--       tenants.lua
-- ARGV  1 engine id, 2 ms to keep after the deadline, then for each request: attempt, executing
--       (0/1), what the attempt used (as in ledger.lua), number of choices, and for each of those:
--       index of the first token, number of tokens, these (packed, and maybe sealed), how it ended
--       ("" while it runs), their log probabilities ("" none)
-- Result  of each request {missing} | {cancelled} | {stolen} | {owned or expired, gateway, tokens
--         journaled of each choice ...}; no counts where this engine may not write the journal yet
--         (RESUME comes first)
local engine, grace = ARGV[1], tonumber(ARGV[2])
local results, mine, claims = {}, {}, { {}, {}, {} }

-- Why the engine has no lease on a request; nothing where it has.
local function lost(v, attempt)
  if not v[1] then return 'missing' end
  if v[2] ~= engine or v[3] ~= attempt then return 'stolen' end
  if v[1] == 'cancelled' then return 'cancelled' end
  if ended(v[1]) then return 'stolen' end
end

-- The numbers of tokens of each choice in a journal.
local function journaled(journal, choices)
  if choices == 1 then return redis.call('HMGET', journal, '0') end
  local names = {}
  for choice = 1, choices do names[choice] = choice - 1 end
  return choices > 0 and redis.call('HMGET', journal, unpack(names)) or {}
end

-- Writes what is new to a journal, with `at` before the first choice in ARGV; returns the tokens of all
-- choices. `expires`: Unix ms.
local function write_journal(journal, at, expires, result)
  local news, made, fresh = {}, 0, true
  for number, count in ipairs(journaled(journal, tonumber(ARGV[at]))) do
    local choice, i = tostring(number - 1), at + 5 * number - 4
    local index, more = tonumber(ARGV[i]), tonumber(ARGV[i + 1])
    local tokens, ending, logprobs = ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
    local known = tonumber(count or 0)
    fresh = fresh and not count
    -- After a gap (Redis lost its last second) nothing is written: the result says where the gap begins.
    if index <= known then
      local length = index + more
      if more > 0 then
        news[#news + 1], news[#news + 2] = choice .. ':' .. ARGV[i], tokens
        if logprobs ~= '' then
          news[#news + 1], news[#news + 2] = choice .. 'l:' .. ARGV[i], logprobs
        end
      end
      if length > known then
        news[#news + 1], news[#news + 2] = choice, length
        known = length
      end
      if ending ~= '' then news[#news + 1], news[#news + 2] = choice .. 'f', ending end
    end
    made = made + known
    result[#result + 1] = known
  end
  if #news > 0 then
    redis.call('HSET', journal, unpack(news))
    if fresh then redis.call('PEXPIREAT', journal, expires) end
  end
  return made
end

-- Brings the record and the journal of an own request up to date.
local function renew(record, journal, at, v, result)
  local made, starts = 0, ARGV[at + 1] == '1' and v[11] ~= 'x'
  local attempt, used = 'u' .. v[3], ARGV[at + 2]
  if v[8] == engine .. '/' .. v[3] then
    made = write_journal(journal, at + 3, tonumber(v[7]) + grace, result)
  end
  if made > tonumber(v[9]) then
    redis.call('HSET', record, 'pn', made, 'ph', starts and 'x' or v[11], attempt, used)
    charge(v[10] or 'default', v[12], tonumber(v[9]), made)
  elseif starts then
    redis.call('HSET', record, 'ph', 'x', attempt, used)
  end
end

local now, at = now_ms(), 3
for i = 4, #KEYS - 8, 2 do
  local v = redis.call('HMGET', KEYS[i], 'st', 'o', 'a', 'mid', 'q', 'g', 'd', 'je', 'pn', 'tn', 'ph',
    'wg')
  local why = lost(v, ARGV[at])
  local result = { why }
  if not why then
    local ids = claims[tonumber(v[5])]
    ids[#ids + 1] = v[4]
    result[1], result[2] = tonumber(v[7]) <= now and 'expired' or 'owned', v[6]
    mine[#mine + 1] = { i, at, v, result }
  end
  results[#results + 1] = result
  at = at + 4 + 5 * tonumber(ARGV[at + 3])
end
for priority, ids in ipairs(claims) do
  if #ids > 0 then
    ids[#ids + 1] = 'JUSTID'
    in_group(KEYS[priority], 'XCLAIM', KEYS[priority], GROUP, engine, 0, unpack(ids))
  end
end
for _, item in ipairs(mine) do renew(KEYS[item[1]], KEYS[item[1] + 1], unpack(item, 2)) end
return results
