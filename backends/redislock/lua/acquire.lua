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

-- Almost always: nobody holds the key and nobody waits for it.
if expires <= now and not more and kind == 'x1' then
  if last >= now then
    token = last + 1
  else
    token = now
  end
  local kept = ARGV[4] * 1000
  local short = stays < now + kept or stays > now + 2 * kept
  if short then stays = now + math.floor(ARGV[4] * 1.125) * 1000 end -- so that it is seldom
  call('HSET', main, 'h', pack(token, now + ARGV[2], stays, false, token, ARGV[2], now, ARGV[3], owner))
  if short then call('PEXPIRE', main, (stays - now) / 1000) end
  return token
end

-- After a write that needs no memory the server lets all others pass. So ask
-- first, with one that changes nothing.
local full = redis.pcall('ZADD', KEYS[2], 'XX', 0, '')
full = type(full) == 'table' and full.err

local kept = ARGV[4] - math.ceil(ARGV[2] / 1000)
local exact = 3 -- the last place before which only live tickets are counted
