-- Gives up a grant, and hands the key to the head of its queue.
-- ARGV: owner, token ("0": withdraws grant and ticket), how long the record is
-- kept in ms.
-- Returns 1, or if the grant is not there 0, or 2 if somebody else holds the
-- key.
local call, pack, unpack = redis.call, cmsgpack.pack, cmsgpack.unpack
local main, owner, kept, wanted = KEYS[1], ARGV[1], ARGV[3], tonumber(ARGV[2])
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

-- Almost always: it is held, and nobody waits for it.
if holder == owner and token == wanted and expires > now and not more then
  local free = pack(last, 0, stays, false)
  if type(redis.pcall('HSET', main, 'h', free)) == 'table' then
    -- Memory is short. After a write that needs none, all are allowed.
    call('PEXPIRE', main, kept)
    call('HSET', main, 'h', free)
  end
  return 1
end
