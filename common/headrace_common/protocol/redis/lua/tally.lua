#!lua flags=allow-oom
-- TALLY: reads what each tenant has used in this shard, for the counters of the other shards (SHARE).
-- KEYS  1 counters
-- ARGV  1 ms in which only one engine reads them (0: any number)
-- Result  {epoch, then of each tenant its name and all tokens that were counted since that epoch}, {} where
--         nothing was used, or nothing where another engine has just read them
local counters, apart, now = KEYS[1], tonumber(ARGV[1]), now_ms()
local v = redis.call('HMGET', counters, '@', '=')
if v[2] and math.abs(now - tonumber(v[2])) < apart then return false end
local epoch = v[1] or string.format('%.0f', now)
local found, all = { epoch }, redis.call('HGETALL', counters)
for i = 1, #all, 2 do
  if string.sub(all[i], 1, 1) == '+' then
    found[#found + 1], found[#found + 2] = string.sub(all[i], 2), all[i + 1]
  end
end
if #found == 1 then return {} end
redis.call('HSET', counters, '@', epoch, '=', now)
return found
