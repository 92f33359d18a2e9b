-- Helper of the scripts that count an engine's output, inserted before them. The last seven KEYS are those
-- of tenants.lua.
local OUTPUT = 2 -- the cost of an output token in prompt tokens

-- Counts tokens that a tenant has used.
local function charge(tenant, tokens)
  if tokens <= 0 then return end
  local first = #KEYS - 6
  local value = redis.call('HINCRBY', KEYS[first], tenant, string.format('%.0f', tokens))
  if redis.call('EXISTS', KEYS[first + 2], KEYS[first + 3], KEYS[first + 4]) == 0 then return end
  for i = first + 2, first + 4 do redis.call('ZADD', KEYS[i], 'XX', value, tenant) end
end
