-- Helpers of the scripts that count the tokens that tenants use, inserted before them. The last seven KEYS are
-- those of tenants.lua. Beside each tenant's counter, the counters have as "+<tenant>" all that was counted in
-- this shard, which TALLY reads.
local OUTPUT = 2 -- the cost of an output token in prompt tokens

-- What tokens cost a tenant of this weight. Rounded from a request's first token on, so that its parts add up.
local function cost(tokens, weight)
  return math.floor(tokens / tonumber(weight or 1) + 0.5)
end

-- Raises a tenant's counter.
local function raise(tenant, tokens)
  local first = #KEYS - 6
  local value = redis.call('HINCRBY', KEYS[first], tenant, tokens)
  if redis.call('EXISTS', KEYS[first + 2], KEYS[first + 3], KEYS[first + 4]) == 0 then return end
  for i = first + 2, first + 4 do redis.call('ZADD', KEYS[i], 'XX', value, tenant) end
end

-- Counts the output tokens of a tenant's request, of which `before` were counted already.
local function charge(tenant, weight, before, after)
  local more = cost(OUTPUT * after, weight) - cost(OUTPUT * before, weight)
  if more <= 0 then return end
  local tokens = string.format('%.0f', more)
  raise(tenant, tokens)
  redis.call('HINCRBY', KEYS[#KEYS - 6], '+' .. tenant, tokens)
end
