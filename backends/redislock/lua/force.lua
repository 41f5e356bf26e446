-- Removes the grant with a token, or all if it is "0", and hands the key on.
-- ARGV: token, how long the record is kept in ms.
-- Returns for each that was removed: owner, token, kind, TTL in us, for how long
-- it was held, and for how long it would have gone on.
local call, pack, unpack = redis.call, cmsgpack.pack, cmsgpack.unpack
local main, wanted, kept = KEYS[1], tonumber(ARGV[1]), ARGV[2]
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local record = call('HMGET', main, 'h', 'q', 'm')
local last, expires, token, ttl, since, channel, holder = 0, 0
if record[1] then
  last, expires, token, ttl, since, channel, holder = unpack(record[1])
  if expires ~= 0 and type(holder) ~= 'string' then error('WRONGTYPE not the record of a lock', 0) end
elseif redis.pcall('PTTL', main) == -1 then -- ours expire
  error('WRONGTYPE not the record of a lock', 0)
end
