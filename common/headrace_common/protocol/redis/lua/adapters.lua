-- Helpers of the scripts that hand requests to an engine, inserted before them.
--
-- A request for an adapter that was loaded while engines served names the adapter and its version in the field
-- `lo`. Only an engine that has loaded it gets the request.
local WITH_ADAPTER = 2 -- the protocol version of such requests
local loaded = {} -- the adapters that the engine has loaded

-- Reads the adapters that the engine has loaded: the script's arguments from this one on.
local function read_adapters(first)
  for i = first, #ARGV do loaded[ARGV[i]] = true end
end

local function has_adapter(name)
  return not name or name == '' or loaded[name] == true
end

-- Whether a request of this version is for an adapter that the engine has not loaded.
local function lacks_adapter(record, version)
  return tonumber(version) >= WITH_ADAPTER and not has_adapter(redis.call('HGET', record, 'lo'))
end
