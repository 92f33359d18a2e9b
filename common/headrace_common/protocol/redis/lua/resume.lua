#!lua flags=allow-oom
-- RESUME: sets the journal to exactly the tokens that the client has, before the engine makes a new token.
-- From here on this engine owns the journal: tokens that others wrote belong to another history.
-- KEYS  1 record, 2 journal
-- ARGV  1 engine id, 2 attempt, 3 ms to keep after the deadline, 4 the engine's variant, 5 its weights' digest,
--       then for each choice: number of
--       tokens, these (packed, and maybe sealed), how it ended ("" while it runs), their log
--       probabilities ("" none)
-- Result  1, or 0 where the engine does not own the request
local record, journal = KEYS[1], KEYS[2]
local v = redis.call('HMGET', record, 'st', 'o', 'a', 'd')
if v[1] ~= 'running' or v[2] ~= ARGV[1] or v[3] ~= ARGV[2] then return 0 end

redis.call('DEL', journal)
local made = 0
for i = 6, #ARGV, 4 do
  local choice = tostring((i - 6) / 4)
  local length, tokens, ending, logprobs = tonumber(ARGV[i]), ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  if length > 0 then
    redis.call('HSET', journal, choice, length, choice .. ':0', tokens)
    if logprobs ~= '' then redis.call('HSET', journal, choice .. 'l:0', logprobs) end
  end
  if ending ~= '' then redis.call('HSET', journal, choice .. 'f', ending) end
  made = made + length
end
redis.call('PEXPIREAT', journal, tonumber(v[4]) + tonumber(ARGV[3]))
redis.call('HSET', record, 'je', ARGV[1] .. '/' .. ARGV[2], 'pn', made, 'pt', made, 'ph', 'x',
  'va', ARGV[4], 'wf', ARGV[5], 'ls', '')
return 1
