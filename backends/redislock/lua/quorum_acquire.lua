
-- Grants the key on this node, or refuses and, if asked to, gives or refreshes a
-- place in the queue.
-- KEYS[3]: since when the node has its data, the run id of the server that had it
-- last, and by what that is known again. ARGV: owner, TTL in us, channel, how long the record is kept in ms,
-- life of a ticket in us (0: no ticket), wanted place and token (0: none), number
-- of the attempt, for how long a node without data does not vote in us.
-- Returns {1, now, token, 1 if the owner held it already}, or {0, now, holder,
-- token, remaining us, position, place}, or, from a node that must not vote yet,
-- {2, now, remaining us}.
local owner, life, wanted, try = ARGV[1], tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
-- A wanted number far from the clock is a mistake. One from the past, by a client
-- whose clock stood still, could repeat a token that is not remembered any more.
if wanted > now + 1000000 or wanted < now - 1000000 then wanted = 0 end

if holder == owner then
  if now + ARGV[2] > expires then
    expires, ttl = now + ARGV[2], ARGV[2]
  end
  if try > attempt then attempt = try end
  keep(ARGV[4]) -- comes first, as it is allowed when memory is short
  write()
  return {1, now, token, 1}
end

local function info(section, what)
  local text = redis.pcall('INFO', section)
  return type(text) == 'string' and string.match(text, what) or nil
end

-- What INFO says takes longer than all the rest. As long as neither the time of
-- the last save, which begins with the start of the server, nor a place in its
-- memory has changed, it is the same run of the same server.
local saved = redis.pcall('LASTSAVE')
local sign = tostring(saved) .. '/' .. tostring(redis):gsub('%s', '')

local function mark(from, run)
  call('SET', KEYS[3], string.format('%.0f', from) .. ' ' .. (run or '') .. ' ' .. sign)
end

local from, run, signed = string.match(call('GET', KEYS[3]) or '', '^(%d+) (%w*) ?(%S*)$')
from = tonumber(from)
local same = type(saved) == 'number' and signed == sign and now > (saved + 2) * 1000000
if not from or from > now then
  -- The node has lost its data, or its clock was set back. It may have granted
  -- what it does not know of.
  from = now
  mark(from, info('server', 'run_id:(%w+)'))
end
if from ~= 0 and now - from < tonumber(ARGV[8]) then
  return {2, now, from + ARGV[8] - now}
end

local first = head()
if not holder and (not first or first == owner) then
  local id = not same and info('server', 'run_id:(%w+)')
  if id and id ~= run then
    -- The node was restarted, or another has taken its place. From a snapshot it
    -- has only what was granted until then, and as a replica what had reached it;
    -- an append-only file has all, or all but the last second.
    if not info('persistence', 'aof_enabled:(1)') or not info('replication', 'second_repl_offset:(%-1)') then
      mark(now, id)
      return {2, now, tonumber(ARGV[8])}
    end
    mark(from, id)
  elseif id and signed ~= sign then
    mark(from, id)
  end
  if waiting and first == owner then drop(owner) end
  token = now
  if last >= token then token = last + 1 end
  if wanted > last then token = wanted end
  last, expires, ttl, since, channel, holder, attempt = token, now + ARGV[2], ARGV[2], now, ARGV[3], owner, try
  write()
  call('PEXPIRE', main, ARGV[4])
  return {1, now, token, 0}
end

local position, at = 0, tonumber(waiting and call('ZSCORE', queue, owner) or 0)
if life > 0 then
  if at == 0 then
    at = wanted
    if at == 0 then at = now end
    -- Behind all who came before, whatever the callers take the time to be.
    local back = waiting and call('ZREVRANGE', queue, 0, 0, 'WITHSCORES')[2]
    if back and at <= tonumber(back) then at = back + 1 end
  end
  enqueue(owner, life, ARGV[3], at, ARGV[4])
  -- The queue vanishes if the clock is set back meanwhile by more than it is kept for:
  -- PEXPIRE goes by the clock, and what a script sees by the time when it began.
  position = (call('ZRANK', queue, owner) or 0) + 1
end
if holder then
  return {0, now, holder, token, expires - now, position, at}
end
return {0, now, '', 0, 0, position, at}
