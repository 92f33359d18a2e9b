#!lua
-- OCCUPY: counts an item among those that a tenant leaves, unless there would be too much. Counting
-- it again replaces what was counted before.
-- KEYS  1 the account's items by when they lapse, 2 by their bytes
-- ARGV  1 item, 2 bytes, 3 Unix ms when it lapses, 4 "1": only if it is counted already,
--       5 most bytes, 6 most bytes of its kind, 7 most items of its kind ("" any), 8... all kinds
-- Result  {0} where it is counted or need not be, else {number of the ARGV that bounds it, items of
--         its kind, Unix ms when the first item lapses, bytes by the kinds of ARGV 8...}, without it
local item, bytes, kind = ARGV[1], tonumber(ARGV[2]), kind_of(ARGV[1])
forget_lapsed()
local known = redis.call('ZSCORE', KEYS[2], item)
if ARGV[4] == '1' and not known then return { 0 } end

local own, used, sum = tonumber(known or 0), {}, 0
for i = 8, #ARGV do
  local of_kind = score(ARGV[i])
  if ARGV[i] == kind then of_kind = of_kind - own end
  used[#used + 1] = of_kind
  sum = sum + of_kind
end
local items = score(kind .. '#') - (known and 1 or 0)

local function over(bound, number)
  return ARGV[bound] ~= '' and number > tonumber(ARGV[bound]) and bound
end

local bound = over(5, sum + bytes) or over(6, score(kind) - own + bytes) or over(7, items + 1)
if bound then
  local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
  return { bound, items, tonumber(first[2] or 0), unpack(used) }
end
leave(item)
redis.call('ZADD', KEYS[2], bytes, item)
redis.call('ZADD', KEYS[1], ARGV[3], item)
add(item, bytes, 1)
local latest = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
for i = 1, 2 do redis.call('PEXPIREAT', KEYS[i], string.format('%.0f', latest)) end
return { 0 }
