-- Helper of the scripts about images, inserted before them.

-- Notes until when (Unix ms) an image with this digest lives. The tenant's images are counted until then.
local function note_life(till, digest)
  local score = string.format('%.0f', till)
  local item = digest .. ':' .. redis.call('STRLEN', KEYS[1])
  redis.call('PEXPIREAT', KEYS[1], score)
  redis.call('PEXPIREAT', KEYS[2], score)
  redis.call('ZADD', KEYS[3], score, item)
  local latest = redis.call('ZRANGE', KEYS[3], -1, -1, 'WITHSCORES')[2]
  redis.call('PEXPIREAT', KEYS[3], string.format('%.0f', latest))
end
