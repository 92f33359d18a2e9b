#!lua flags=allow-oom
-- VACATE: a tenant leaves items no longer.
-- KEYS  1 the account's items by when they lapse, 2 by their bytes
-- ARGV  the items
-- Result  how many of them were counted
local count = 0
for _, item in ipairs(ARGV) do count = count + leave(item) end
return count
