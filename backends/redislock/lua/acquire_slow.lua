local life = tonumber(ARGV[6])

-- A grant that is repeated counts as renewed.
if holder == owner then
  if kind ~= 'x1' then return {2} end
  if now + ARGV[2] > expires then
    expires, ttl, changed = now + ARGV[2], ARGV[2], true
  end
  keep()
  save()
  return token
end
if kinds then
  local o = call('HGET', main, 'o' .. owner)
  local ends = o and tonumber(call('ZSCORE', holders, owner))
  if ends then
    if kind ~= kinds then
      save()
      return {2}
    end
    local number, life, from = unpack(o)
    if now + ARGV[2] > ends then
      ends, life = now + ARGV[2], ARGV[2]
    end
    keep()
    call('ZADD', holders, string.format('%.0f', ends), owner)
    call('HSET', main, 'o' .. owner, pack(number, life, from, ARGV[3]))
    keep()
    serve()
    save()
    return number
  end
end

-- All who use the key at the same time must agree on its limit.
local have
if holder then
  have = 1
elseif kinds then
  have = limit(kinds)
elseif waiting then
  local id, t, place = head(0)
  if id == owner then id, t = head(place + 1) end
  if id then have = limit(t[4]) end
end
if have and have ~= limit(kind) then
  save()
  return {1, have}
end

local mine = waiting and call('HGET', main, 's' .. owner)
mine = mine and {unpack(mine)}
if mine and (mine[2] + mine[3] <= now or not call('ZSCORE', queue, owner)) then
  drop(owner)
  mine = nil
end
if mine and life > 0 then
  call('PEXPIRE', queue, kept)
  call('HSET', main, 's' .. owner,
    pack(mine[1], now + life, life, kind, ARGV[2], mine[6], ARGV[3], ARGV[7] or false))
end
local got, blocked = serve(owner)
if got then return got end
if not mine and not blocked and admits(kind) then
  if full then error(full, 0) end
  return grant(owner, kind, ARGV[2], ARGV[3], now + ARGV[2])
end

local ticket, position = 0, 0
if mine then
  ticket = mine[1]
elseif life > 0 then
  if full then error(full, 0) end
  if not waiting then
    clear(queue)
    waiting = 1
  end
  ticket = number()
  call('ZADD', queue, string.format('%.0f', ticket), owner)
  call('PEXPIRE', queue, kept)
  call('HSET', main, 'q', 1, 's' .. owner,
    pack(ticket, now + life, life, kind, ARGV[2], now, ARGV[3], ARGV[7] or false))
  keep()
end
save()
if ticket > 0 then
  local before = {} -- who stands before it
  for i, id in ipairs(call('ZRANGE', queue, 0, exact)) do
    if id == owner then
      position = 1
      break
    end
    before[i] = 's' .. id
  end
  if position == 0 then
    position = (call('ZRANK', queue, owner) or 0) + 1 -- or it has vanished, see queue.lua
  elseif before[1] then
    for _, s in ipairs(call('HMGET', main, _G.unpack(before))) do
      if s and select(3, cmsgpack.unpack_limit(s, 2, 0)) > now then position = position + 1 end
    end
  end
end
if holder then
  return {0, holder, token, expires - now, position, ticket}
end
if kinds then
  local first = call('ZRANGE', holders, 0, 0, 'WITHSCORES')
  if first[1] then -- or they have vanished
    local o = call('HGET', main, 'o' .. first[1])
    local number = 0
    if o then number = unpack(o) end
    return {0, first[1], number, first[2] - now, position, ticket}
  end
end
return {0, '', 0, 0, position, ticket}
