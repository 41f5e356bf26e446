-- Gives up a grant, and hands the key to the head of its queue.
-- ARGV: owner, token ("0": withdraws grant and ticket), how long the record is
-- kept in ms.
-- Returns 1, or if the grant is not there 0, or 2 if somebody else holds the
-- key.
local call, pack, unpack = redis.call, cmsgpack.pack, cmsgpack.unpack
local main, owner, kept, wanted = KEYS[1], ARGV[1], ARGV[3], tonumber(ARGV[2])
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

-- Almost always: it is held, and nobody waits for it.
if holder == owner and token == wanted and expires > now and not record[2] then
  local free = pack(last, 0)
  if type(redis.pcall('HSET', main, 'h', free)) == 'table' then
    -- Memory is short. After a write that needs none, all are allowed.
    call('PEXPIRE', main, kept)
    call('HSET', main, 'h', free)
  end
  return 1
end
