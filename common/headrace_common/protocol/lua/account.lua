-- Helpers of the scripts about the answers that an account keeps: KEYS 1 and 2 are its requests by
-- when they lapse, and their bytes.

local ALL = '' -- the member whose score is the sum

local function size_of(id)
  return tonumber(redis.call('ZSCORE', KEYS[2], id) or 0)
end

local function leave(id)
  redis.call('ZADD', KEYS[2], size_of(ALL) - size_of(id), ALL)
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[1], id)
end
