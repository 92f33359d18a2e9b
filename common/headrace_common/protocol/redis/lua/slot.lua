#!lua flags=allow-oom
-- SLOT: an engine that shares an accelerator tells the others what waits for it, and takes (or
-- keeps) or leaves the slot. A holder that is silent for a lease has it until another one takes it.
-- KEYS  1 slot
-- ARGV  1 engine, 2 lease (ms), 3 its facts, 4 watch, take or leave
-- Result  {now, holder or "", since when, who had it before or "",
--          {engine, facts, when its last turn ended} of each member}
local slot, engine, lease, action = KEYS[1], ARGV[1], tonumber(ARGV[2]), ARGV[4]
local now = now_ms()
local v = redis.call('HMGET', slot, 'o', 's', 'u', 'l')
local holder, since, lapses, last = v[1] or '', v[2] or '0', tonumber(v[3] or 0), v[4] or ''

if holder ~= '' and holder ~= engine and lapses < now then
  last, holder = holder, ''
end
if action == 'take' and holder == '' then
  holder, since = engine, string.format('%.0f', now)
end
if action == 'leave' and holder == engine then
  redis.call('HSET', slot, 't:' .. engine, now)
  last, holder = engine, ''
end
if action == 'take' and holder == engine then
  lapses = now + lease
end
redis.call('HSET', slot, 'o', holder, 's', since, 'u', lapses, 'l', last, 'f:' .. engine, ARGV[3],
  'b:' .. engine, now)
redis.call('PEXPIRE', slot, 10 * lease)

local found, facts, ended = redis.call('HGETALL', slot), {}, {}
local members = {}
for i = 1, #found, 2 do
  local kind, name = string.sub(found[i], 1, 2), string.sub(found[i], 3)
  if kind == 'f:' then facts[name] = found[i + 1] end
  if kind == 't:' then ended[name] = found[i + 1] end
end
for i = 1, #found, 2 do
  local name = string.sub(found[i], 3)
  if string.sub(found[i], 1, 2) == 'b:' then
    if tonumber(found[i + 1]) < now - lease then
      redis.call('HDEL', slot, 'f:' .. name, 'b:' .. name, 't:' .. name)
    else
      members[#members + 1] = { name, facts[name], ended[name] or '0' }
    end
  end
end
return { now, holder, since, last, members }
