-- Grants the key, or refuses and, if asked to, gives or refreshes a ticket.
-- ARGV: owner, TTL in us, channel of the owner's manager, how long the record
-- is kept in ms, kind (x or s, then the limit), life of a ticket in us (0: no
-- ticket), and "wake" if a hand-over must not carry the grant.
-- Returns the token, or {0, holder, its token, remaining us, position, ticket},
-- or {1, limit in force}, or {2} if the owner holds the key as another kind.
local call, pack, unpack = redis.call, cmsgpack.pack, cmsgpack.unpack
local main, owner, kind = KEYS[1], ARGV[1], ARGV[5]
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

-- Almost always: nobody holds the key and nobody waits for it.
if expires <= now and not record[2] and not record[3] and kind == 'x1' then
  if last >= now then
    token = last + 1
  else
    token = now
  end
  call('HSET', main, 'h', pack(token, now + ARGV[2], token, ARGV[2], now, ARGV[3], owner))
  call('PEXPIRE', main, ARGV[4])
  return token
end

-- After a write that needs no memory the server lets all others pass. So ask
-- first, with one that changes nothing.
local full = redis.pcall('ZADD', KEYS[2], 'XX', 0, '')
full = type(full) == 'table' and full.err
