-- Helpers of the scripts that handle placement, inserted before them and after tenants.lua.
--
-- A request keeps its place in the queue wherever it is placed: that only says which engine likely
-- has the beginning of its prompt in its cache. For each engine and priority a list has the waiting
-- requests that are placed with it.
-- The key before those of tenants.lua is the prefix of these lists.
local PLACED = KEYS[FAIR]

local function placed_with(priority, engine)
  return PLACED .. priority .. ':' .. engine
end

-- A request no longer waits; `engine` is the one that it was placed with, if any.
local function unplace(priority, engine, rid)
  if engine and engine ~= '' then redis.call('LREM', placed_with(priority, engine), 1, rid) end
end
