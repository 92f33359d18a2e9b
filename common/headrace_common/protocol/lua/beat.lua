#!lua flags=allow-oom
-- BEAT: renews an engine's lease on one request and writes its new tokens to the journal, if the
-- engine still owns it. The check is in here since claiming an own entry that was claimed by
-- another meanwhile would take it back.
-- KEYS  1 record, 2 journal, 3 queue hi, 4 queue n, 5 queue lo, then those of fairness.lua
-- ARGV  1 engine id, 2 attempt, 3 executing (0/1), 4 ms to keep behind the deadline, then for each
--       choice: index of the first token, packed tokens, how it ended ("" while it runs), packed
--       log probabilities ("" none)
-- Result  {missing} | {cancelled} | {stolen} | {owned or expired, gateway, tokens journaled of each
--         choice ...}; no counts where this engine may not write the journal yet (RESUME comes first)
local record, journal = KEYS[1], KEYS[2]
local engine, attempt = ARGV[1], ARGV[2]
local v = redis.call('HMGET', record, 'st', 'o', 'a', 'mid', 'q', 'g', 'd', 'je', 'pn', 'tn')
if not v[1] then return { 'missing' } end
if v[2] ~= engine or v[3] ~= attempt then return { 'stolen' } end
if v[1] == 'cancelled' then return { 'cancelled' } end
if ended(v[1]) then return { 'stolen' } end

local queue = KEYS[2 + tonumber(v[5])]
in_group(queue, 'XCLAIM', queue, GROUP, engine, 0, v[4], 'JUSTID')
local result = { tonumber(v[7]) <= now_ms() and 'expired' or 'owned', v[6] }
if ARGV[3] == '1' then redis.call('HSET', record, 'ph', 'x') end
if v[8] ~= engine .. '/' .. attempt then return result end

local made, wrote = 0, false
for i = 5, #ARGV, 4 do
  local choice = tostring((i - 5) / 4)
  local index, tokens, ending = tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2]
  local known = tonumber(redis.call('HGET', journal, choice) or 0)
  -- Behind a gap (Redis lost its last second) nothing is written: the result says from where.
  if index <= known then
    local length = index + #tokens / 4
    if #tokens > 0 then
      redis.call('HSET', journal, choice .. ':' .. ARGV[i], tokens)
      if ARGV[i + 3] ~= '' then
        redis.call('HSET', journal, choice .. 'l:' .. ARGV[i], ARGV[i + 3])
      end
    end
    if length > known then
      redis.call('HSET', journal, choice, length)
      known = length
    end
    if ending ~= '' then redis.call('HSET', journal, choice .. 'f', ending) end
    wrote = wrote or #tokens > 0 or ending ~= ''
  end
  made = made + known
  result[#result + 1] = known
end
if wrote then redis.call('PEXPIREAT', journal, tonumber(v[7]) + tonumber(ARGV[4])) end
if made > tonumber(v[9]) then
  redis.call('HSET', record, 'pn', made)
  charge(v[10] or 'default', OUTPUT * (made - tonumber(v[9])))
end
return result
