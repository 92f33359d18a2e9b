#!lua
-- KEEPIMAGE: notes that a request needs an image, and stores the image if it is not stored.
-- KEYS  1 image, 2 requests that name it by until when, 3 the tenant's images by until when
-- ARGV  1 request id, 2 ms for which it may need the image, 3 digest,
--       4 the image ("" asks only: a repetition without the cost of sending it),
--       5 most bytes of the tenant's images, 6 most images of the tenant ("" any)
-- Result  {kept} | {absent}: send the image | {bytes|items, bound}: it is refused
local now = now_ms()
local known = redis.call('EXISTS', KEYS[1]) == 1
if not known and ARGV[4] == '' then return { 'absent' } end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
if not known then
  local images, bytes = redis.call('ZRANGE', KEYS[3], 0, -1), #ARGV[4]
  for _, item in ipairs(images) do bytes = bytes + tonumber(string.match(item, ':(%d+)$')) end
  if ARGV[5] ~= '' and bytes > tonumber(ARGV[5]) then return { 'bytes', ARGV[5] } end
  if ARGV[6] ~= '' and #images + 1 > tonumber(ARGV[6]) then return { 'items', ARGV[6] } end
  redis.call('SET', KEYS[1], ARGV[4])
end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
redis.call('ZADD', KEYS[2], string.format('%.0f', now + tonumber(ARGV[2])), ARGV[1])
note_life(tonumber(redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]), ARGV[3])
return { 'kept' }
