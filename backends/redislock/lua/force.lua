-- Removes the grant with a token, or all if it is "0", and hands the key on.
-- ARGV: token, how long the record is kept in ms.
-- Returns for each that was removed: owner, token, kind, TTL in us, for how long
-- it was held, and for how long it would have gone on.
local call, pack, unpack = redis.call, cmsgpack.pack, cmsgpack.unpack
local main, wanted, kept = KEYS[1], tonumber(ARGV[1]), ARGV[2]
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local record = call('HGET', main, 'h')
local last, expires, stays, more, token, ttl, since, channel, holder = 0, 0, 0
if record then
  last, expires, stays, more, token, ttl, since, channel, holder = unpack(record)
  if type(stays) ~= 'number' or expires ~= 0 and type(holder) ~= 'string' then
    error('WRONGTYPE not the record of a lock', 0)
  end
else
  local left = call('PTTL', main)
  if left == -1 then error('WRONGTYPE not the record of a lock', 0) end -- ours expire
  more = left ~= -2
end
