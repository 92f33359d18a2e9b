#!lua flags=no-writes
-- DEMAND: what waits for the engines of a shard: requests that were not read yet, and started ones
-- that were given back or whose engine is silent.
-- KEYS  1 prefix of records, 2 queue hi, 3 queue n, 4 queue lo
-- ARGV  1 lease (ms)
-- Result  {{number of the queue from 0, when the request was admitted, its deadline}} (ms) of the
--         oldest request of each kind
local found = {}

local function add(number, entry)
  local rid = field(entry, 'r')
  local deadline = rid and redis.call('HGET', KEYS[1] .. rid, 'd')
  local admitted = field(entry, 't') or string.match(entry[1], '^%d+')
  found[#found + 1] = { number, admitted, deadline or '0' }
end

for number = 0, 2 do
  local queue = KEYS[2 + number]
  local last = '0-0'
  local groups = redis.pcall('XINFO', 'GROUPS', queue)
  if not groups.err then
    for _, group in ipairs(groups) do
      local v = {}
      for i = 1, #group, 2 do v[group[i]] = group[i + 1] end
      if v.name == GROUP then
        last = v['last-delivered-id']
        local pending = redis.call('XPENDING', queue, GROUP, 'IDLE', ARGV[1], '-', '+', 1)
        local entry = pending[1] and redis.call('XRANGE', queue, pending[1][1], pending[1][1])[1]
        if entry then add(number, entry) end
      end
    end
  end
  local unread = redis.call('XRANGE', queue, '(' .. last, '+', 'COUNT', 1)[1]
  if unread then add(number, unread) end
end
return found
