#!lua flags=allow-oom
-- RESUME: sets the journal to exactly what the client has, before the engine makes a new token.
-- From here on the journal is this engine's: what others wrote is of another history.
-- KEYS  1 record, 2 journal
-- ARGV  1 engine id, 2 attempt, 3 ms to keep behind the deadline, then for each choice: packed
--       tokens, how it ended ("" while it runs), packed log probabilities ("" none)
-- Result  1, or 0 where the engine does not own the request
local record, journal = KEYS[1], KEYS[2]
local v = redis.call('HMGET', record, 'st', 'o', 'a', 'd')
if v[1] ~= 'running' or v[2] ~= ARGV[1] or v[3] ~= ARGV[2] then return 0 end

redis.call('DEL', journal)
local made = 0
for i = 4, #ARGV, 3 do
  local choice = tostring((i - 4) / 3)
  local length = #ARGV[i] / 4
  if length > 0 then
    redis.call('HSET', journal, choice, length, choice .. ':0', ARGV[i])
    if ARGV[i + 2] ~= '' then redis.call('HSET', journal, choice .. 'l:0', ARGV[i + 2]) end
  end
  if ARGV[i + 1] ~= '' then redis.call('HSET', journal, choice .. 'f', ARGV[i + 1]) end
  made = made + length
end
redis.call('PEXPIREAT', journal, tonumber(v[4]) + tonumber(ARGV[3]))
redis.call('HSET', record, 'je', ARGV[1] .. '/' .. ARGV[2], 'pn', made, 'pt', made, 'ph', 'x')
return 1
