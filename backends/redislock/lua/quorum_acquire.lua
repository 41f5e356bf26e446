
-- Grants the key on this node, or refuses and, if asked to, gives or refreshes a
-- place in the queue.
-- KEYS[3]: since when the node has its data. ARGV: owner, TTL in us, channel, how
-- long the record is kept in ms, life of a ticket in us (0: no ticket), wanted
-- place and token (0: none), number of the attempt, for how long a node without
-- data does not vote in us.
-- Returns {1, now, token}, or {0, now, holder, token, remaining us, position,
-- place}, or, from a node that must not vote yet, {2, now, remaining us}.
local owner, life, wanted, try = ARGV[1], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
-- A wanted number far ahead of the clock is a mistake.
if wanted > now + 1000000 then wanted = 0 end

if holder == owner then
  if now + ARGV[2] > expires then expires = now + ARGV[2] end
  ttl = ARGV[2]
  if try > attempt then attempt = try end
  call('PEXPIRE', main, ARGV[4]) -- comes first, as it is allowed when memory is short
  write()
  return {1, now, token}
end

local from = tonumber(call('GET', KEYS[3]))
if not from or from > now then
  -- The node has lost its data, or its clock was set back. It may have granted
  -- what it does not know of.
  from = now
  call('SET', KEYS[3], string.format('%.0f', now))
end
if from ~= 0 and now - from < tonumber(ARGV[8]) then
  return {2, now, from + ARGV[8] - now}
end

local first = head()
if not holder and (not first or first == owner) then
  if waiting and first == owner then drop(owner) end
  token = now
  if last >= token then token = last + 1 end
  if wanted > last then token = wanted end
  last, expires, ttl, since, channel, holder, attempt = token, now + ARGV[2], ARGV[2], now, ARGV[3], owner, try
  write()
  call('PEXPIRE', main, ARGV[4])
  return {1, now, token}
end

local position, at = 0, 0
if life > 0 then
  at = tonumber(waiting and call('ZSCORE', queue, owner) or 0)
  if at == 0 then
    at = wanted
    if at == 0 or at < now - 1000000 then at = now end
  end
  enqueue(owner, life, ARGV[3], at, ARGV[4])
  position = call('ZRANK', queue, owner) + 1
end
if holder then
  return {0, now, holder, token, expires - now, position, at}
end
return {0, now, '', 0, 0, position, at}
