-- Helpers of the scripts that hand requests to an engine, inserted before them.
--
-- A request has a side: the canary's, or that of the stable engines ('va' of its record: 'canary', or nothing). Its
-- side is where it was admitted, and then where it runs. Engines of the other side take it only if its own side has
-- no engines. A waiting request of the canary's side also becomes free after a while, so that a slow canary holds
-- nothing up.
local PATIENCE = 10000 -- ms
local OWN, FOREIGN, ABANDONED = 0, 1, 2 -- whose tokens a request may have; ABANDONED: they were given up, too
local variant, weights, alone -- of the engine; whether the other side has no engines

-- Reads them: the script's arguments from this one on.
local function read_variant(first)
  variant, weights, alone = ARGV[first], ARGV[first + 1], ARGV[first + 2] == '1'
end

local function crosses(va)
  return (va or '') ~= variant
end

-- Whether a request that waits since `at` is for the other side.
local function of_other_side(va, at, now)
  if alone or not crosses(va) then return false end
  return variant ~= '' or now - tonumber(at or now) < PATIENCE
end

-- Whether an engine of this side that continues a request would do so with other weights.
local function with_other_weights(va, wf)
  return crosses(va) and (weights == '' or (wf or '') ~= weights)
end
