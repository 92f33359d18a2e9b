-- Helpers of the scripts that end requests, inserted before them: they enter what a request used in its
-- shard's ledger.
--
-- A record has the fields `ul`, "<most entries> <ms that they stay>", if its request is entered; `ki` and
-- `ad`, its API key and adapter; `og`, the output tokens that its gateway says the client was given; and
-- `u<attempt>`, "<engine ms> <KV byte-seconds> <cached tokens>" of each attempt. After the first entry `ue`
-- has their number and sums, msgpack. Entries say what is new since the one before, so that their
-- sum is right also for a request that is queued again after its end.
local TRIM_BY_AGE = 16 -- one of so many entries removes those that are too old, the others those that are too many
local MOST_ATTEMPTS = 64 -- whose engine seconds are summed, the last ones
-- What `write_entry` must know of the record, in this order.
local ENTERED = { 'ul', 'ue', 'og', 'pk', 'ki', 'tn', 'ad', 't', 'pn' }

-- How a request ended, for its entry.
local function how(state, why)
  if state == 'done' then return 'finished' end
  if why == 'deadline_exceeded' then return 'expired' end
  if why == 'request_failed' then return 'dead_lettered' end
  return (state == 'cancelled' or why == 'abandoned') and 'cancelled' or 'failed'
end

-- Engine ms, KV byte-seconds and cached tokens of all attempts; `last` is what the last one used, if the
-- record does not have it yet.
local function used_by_attempts(record, attempts, last)
  local names, found = {}, {}
  local before = last and attempts - 1 or attempts
  for attempt = math.max(1, attempts - MOST_ATTEMPTS + 1), before do names[#names + 1] = 'u' .. attempt end
  if #names > 0 then found = redis.call('HMGET', record, unpack(names)) end
  found[#found + 1] = last
  local engine_ms, byte_seconds, cached = 0, 0, 0
  for _, text in ipairs(found) do
    local ms, bytes, tokens = string.match(text or '', '^(%d+) (%d+) (%d+)$')
    engine_ms, byte_seconds = engine_ms + (ms or 0), byte_seconds + (bytes or 0)
    cached = math.max(cached, tonumber(tokens or 0))
  end
  return engine_ms, byte_seconds, cached
end

-- Writes the entry of a request that has ended; returns the new `ue`, or nothing where it is not entered. `v`
-- has the record's fields ENTERED, after `at` others. `output`: the output tokens that its engine or
-- its client's gateway knows of. `always` false: only if the tokens have changed.
local function write_entry(ledger, record, rid, attempts, now, ending, output, always, v, at, last)
  local bounds = v[at + 1]
  if not bounds or bounds == '' then return end
  local known, given, prompt = { 0, 0, 0, 0, 0, 0 }, v[at + 3], 0
  if v[at + 2] and v[at + 2] ~= '' then known = cmsgpack.unpack(v[at + 2]) end
  local answered = ending == 'finished'
  if given and given ~= '' then
    output, answered = tonumber(given), false
  elseif ending ~= 'finished' then -- who ended it may know of fewer tokens than the client was given
    output = math.max(output, tonumber(v[at + 9] or 0), known[4])
  end
  if output > 0 or answered then prompt = tonumber(v[at + 4]) end
  if not always and prompt == known[2] and output == known[4] then return end
  local engine_ms, byte_seconds, cached = used_by_attempts(record, attempts, last)
  cached = math.min(cached, prompt)
  local most, kept = string.match(bounds, '^(%d+) (%d+)$')
  local by, bound = 'MAXLEN', most
  if now % TRIM_BY_AGE == 0 then by, bound = 'MINID', string.format('%.0f', now - kept) end
  redis.call('XADD', ledger, by, '~', bound, '*', 'e', cmsgpack.pack({ rid, known[1], v[at + 5] or '',
    v[at + 6] or 'default', v[at + 7] or '', ending, prompt - known[2], cached - known[3], output - known[4],
    engine_ms - known[5], byte_seconds - known[6], attempts, tonumber(v[at + 8] or now) }))
  if by == 'MINID' then redis.call('PEXPIRE', ledger, kept) end
  return cmsgpack.pack({ known[1] + 1, prompt, cached, output, engine_ms, byte_seconds })
end

-- Enters a request whose record was not read for it.
local function enter_usage(ledger, record, rid, attempts, now, ending, output, always)
  local v = redis.call('HMGET', record, unpack(ENTERED))
  local entered = write_entry(ledger, record, rid, attempts, now, ending, output, always, v, 0)
  if entered then redis.call('HSET', record, 'ue', entered) end
end
