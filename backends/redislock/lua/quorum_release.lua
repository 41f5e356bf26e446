
-- Gives up a grant, and wakes the first waiter.
-- ARGV: owner, token ("0": withdraws grant and ticket), how long the record is
-- kept in ms, and "lost" if the holder is to be told.
-- Returns 1, or if the grant is not there 0, or 2 if somebody else holds the key.
local owner, wanted = ARGV[1], tonumber(ARGV[2])
local mine = holder == owner and (wanted == 0 or token == wanted)
if not mine and wanted ~= 0 then
  if holder and holder ~= owner then return 2 end
  wake() -- those who wait on this node may be heard from no other
  return 0
end
if mine then
  if ARGV[4] and channel ~= '' then
    redis.pcall('PUBLISH', channel, table.concat({'l', 0, ARGV[2], ttl, 'x1', #owner, owner .. main}, ' '))
  end
  holder = nil
  local free = pack(last, 0)
  if type(redis.pcall('HSET', main, 'h', free)) == 'table' then
    -- Memory is short. After a write that needs none, all are allowed.
    call('PEXPIRE', main, ARGV[3])
    call('HSET', main, 'h', free)
  end
end
if wanted == 0 and waiting then drop(owner) end
wake()
return 1
