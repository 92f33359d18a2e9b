-- Keys and counts of the scripts that queue requests, hand them out or count their tokens.
--
-- Tenants of a priority share by tokens: who has used least is next (Sheng et al., "Fairness in
-- Serving Large Language Models", 2024). The stream holds the next request alone; those behind it
-- wait in a list for each tenant, from which TAKE fills the stream. Nothing wakes engines but the
-- stream, so it has an entry whenever anything of its priority waits.
-- The last seven KEYS: 1 counters, 2 waiting by tenant, 3-5 tenants that wait by priority,
-- 6 prefix of the tenants' lists, 7 prefix of records. Lists and records are made from the prefixes.
local FAIR = #KEYS - 7
local COUNTERS, TENANTS, LISTS, RECORDS = KEYS[FAIR + 1], KEYS[FAIR + 2], KEYS[FAIR + 6], KEYS[FAIR + 7]
local BLOCKED = 'p' -- in place of the stream's entry
local FORGET = 3600000 -- ms until counters are forgotten where nothing is taken
local WAITING, LISTED = { 'w1', 'w2', 'w3' }, { 'p1', 'p2', 'p3' }
-- Of waiting requests: all, their tokens, and for each priority all and those in lists; then what
-- TAKE keeps of shares. Read once in a script, before the other helpers are used.
local counts

local function read_counts(stats)
  local v = redis.call('HMGET', stats, 'w', 'wt', 'w1', 'w2', 'w3', 'p1', 'p2', 'p3', 'cn', 'cl')
  counts = {
    w = tonumber(v[1] or 0), wt = tonumber(v[2] or 0),
    w1 = tonumber(v[3] or 0), w2 = tonumber(v[4] or 0), w3 = tonumber(v[5] or 0),
    p1 = tonumber(v[6] or 0), p2 = tonumber(v[7] or 0), p3 = tonumber(v[8] or 0),
    cn = tonumber(v[9] or 0), cl = tonumber(v[10] or 0),
  }
end

local function waiting_tenants(priority)
  return KEYS[FAIR + 2 + priority]
end

local function list_of(priority, tenant)
  return LISTS .. priority .. ':' .. tenant
end

-- Writes a tenant's use where its position among the waiting tenants depends on it.
local function set_score(tenant, value)
  for priority = 1, 3 do
    if counts[LISTED[priority]] > 0 then
      redis.call('ZADD', waiting_tenants(priority), 'XX', value, tenant)
    end
  end
end
