
-- Gives back what this node has granted to an owner that was not granted the key
-- by a majority, unless a later attempt has been granted it again.
-- ARGV: owner, attempt, place in the queue (0: none, -1: as it is), life of a
-- ticket in us, channel, how long the record is kept in ms.
-- Returns 1 if the node would grant the key to the owner now, or else 0.
local owner, at = ARGV[1], tonumber(ARGV[3])
if holder == owner and attempt <= tonumber(ARGV[2]) then
  holder = nil
  call('PEXPIRE', main, ARGV[6])
  write()
end
if holder == owner then return 0 end
if at > 0 then
  enqueue(owner, tonumber(ARGV[4]), ARGV[5], at, ARGV[6])
elseif at == 0 and waiting then
  drop(owner)
end
if holder then return 0 end
local first = head()
if first == owner or not first then return 1 end
wake()
return 0
