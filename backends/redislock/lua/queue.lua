-- What the scripts share. Before it stand: call, pack, unpack, main, now, kept,
-- record, and its parts. Each ends with save.
--
-- The record of a key is the hash KEYS[1]:
--   h          last number given out (as token or ticket), expiry of the grant if
--              one owner holds the key exclusively, until when the record is
--              kept at least, and what else there is: false for nothing, 1 for a
--              q, true for an m and perhaps a q; then, of the one owner: token,
--              TTL, time of the grant, channel, owner
--   m          if there are other holders: their kind
--   o<owner>   of each of them: token, TTL, time of the grant, channel
--   q          if somebody waits: 1
--   s<owner>   of each waiter: ticket, time of lapsing, life, kind, TTL, time of
--              arrival, channel, wake
-- KEYS[2] is the queue, owners by ticket, and KEYS[3] the holders counted in m,
-- by expiry. All times are in us by the server's clock, which may be set: what
-- then seems to last longer than it can is cut to what it can last. A TTL is
-- therefore that of the renewal by which the expiry came about. A script sees the
-- keys as of when it began, but PEXPIRE goes by the clock: queue and holders vanish
-- within it if that is set back meanwhile by more than they are kept for.
--
-- The first command changes nothing. A replica refuses it, so that nothing is
-- answered which only a replica says.
call('HDEL', main, '')
local queue, holders = KEYS[2], KEYS[3]
local waiting, kinds
if more == 1 then
  waiting = more
elseif more then
  local rest = call('HMGET', main, 'q', 'm')
  waiting, kinds = rest[1], rest[2]
end
local changed, expire = false, nil -- what stands in h, and when the record expires
if expires <= now then
  holder = nil
elseif expires - now > tonumber(ttl) then
  expires, changed = now + ttl, true
end

-- Forgets one of the holders counted in m.
local function forget(id)
  call('ZREM', holders, id)
  call('HDEL', main, 'o' .. id)
end

if kinds then
  for _, id in ipairs(call('ZRANGEBYSCORE', holders, '-inf', string.format('%.0f', now))) do
    forget(id)
  end
  local first = call('ZRANGE', holders, 0, 0, 'WITHSCORES')
  if first[1] then
    local o = call('HGET', main, 'o' .. first[1])
    local _, life = 0, 0
    if o then _, life = unpack(o) end
    if first[2] - now > tonumber(life) then
      for _, id in ipairs(call('ZRANGE', holders, 0, -1)) do
        o = call('HGET', main, 'o' .. id)
        if o then
          _, life = unpack(o)
          if call('ZSCORE', holders, id) - now > tonumber(life) then
            call('ZADD', holders, string.format('%.0f', now + life), id)
          end
        else
          call('ZREM', holders, id)
        end
      end
      first = call('ZRANGE', holders, 0, 0)
    end
  end
  if not first[1] then
    call('HDEL', main, 'm')
    kinds, changed = nil, true
  end
end

local function limit(k)
  return tonumber(string.sub(k, 2))
end

local function number()
  changed = true
  if last >= now then
    last = last + 1
  else
    last = now
  end
  return last
end

-- Writes what was changed.
local function save()
  if not changed then return end
  more = kinds and true or waiting and 1 or false
  if holder then
    call('HSET', main, 'h', pack(last, expires, stays, more, token, ttl, since, channel, holder))
  else
    call('HSET', main, 'h', pack(last, 0, stays, more))
  end
  if expire then call('PEXPIRE', main, expire) end
  changed, expire = false, nil
end

-- Keeps the record for as long as it may be needed.
local function keep()
  local most = now
  if holder then most = expires end
  if kinds then
    local longest = call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
    if longest and tonumber(longest) > most then most = tonumber(longest) end
    call('PEXPIRE', holders, string.format('%.0f', kept + math.ceil((most - now) / 1000)))
  end
  local least = math.ceil(kept + (most - now) / 1000)
  if stays < now + least * 1000 or stays > now + least * 2000 then
    expire = math.floor(least * 1.125) -- so that it is seldom
    stays, changed = now + expire * 1000, true
  end
end

-- Removes what a record that has gone left at a key. It would expire: what does
-- not is somebody else's.
local function clear(key)
  if call('ZCARD', key) > 0 then
    if redis.pcall('PTTL', key) == -1 then error('WRONGTYPE not a part of a lock', 0) end
    call('ZREMRANGEBYRANK', key, 0, -1)
  end
end

local function drop(id)
  call('ZREM', queue, id)
  call('HDEL', main, 's' .. id)
end

-- Finds the first ticket from a place on that has not lapsed. One that has
-- keeps its place for as long again. Returns its owner, the ticket, its place, and
-- whether it is the only one.
local function head(place)
  while true do
    local ids = call('ZRANGE', queue, place, place + 1)
    local id = ids[1]
    if not id then return end
    local s = call('HGET', main, 's' .. id)
    if not s then
      call('ZREM', queue, id)
    else
      local t = {unpack(s)}
      if t[2] - now > tonumber(t[3]) then
        t[2] = now + t[3]
        call('HSET', main, 's' .. id, pack(t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8]))
      end
      if t[2] > now then
        return id, t, place, place == 0 and not ids[2]
      elseif t[2] + t[3] <= now then
        drop(id)
      else
        place = place + 1
      end
    end
  end
end

local function admits(k)
  if holder then return false end
  if not kinds then return true end
  if string.sub(k, 1, 1) == 's' then return string.sub(kinds, 1, 1) == 's' end
  return string.sub(kinds, 1, 1) == 'x' and call('ZCARD', holders) < limit(k)
end

local function grant(id, k, life, ch, ends)
  number()
  if k == 'x1' then
    expires, token, ttl, since, channel, holder = ends, last, life, now, ch, id
  else
    if not kinds then
      clear(holders)
      kinds = k
      call('HSET', main, 'm', k)
    end
    call('ZADD', holders, string.format('%.0f', ends), id)
    call('HSET', main, 'o' .. id, pack(last, life, now, ch))
  end
  keep()
  save()
  return last
end

-- Notes that nobody waits any more.
local function empty()
  call('HDEL', main, 'q')
  waiting, changed = nil, true
end

-- Grants the key to the head of the queue for as long as it can. The caller, if
-- any, gets its whole TTL; a grant to another lapses with its ticket unless the
-- owner confirms it. Returns the caller's token, and whether somebody waits.
local function serve(caller)
  local got, place, blocked = nil, 0, false
  while waiting do
    local id, t, at, only = head(place)
    if not id then
      if call('ZCARD', queue) == 0 then empty() end
      break
    end
    place = at
    if not admits(t[4]) then
      blocked = true
      break
    end
    drop(id)
    if only then empty() end
    if id == caller then
      got = grant(id, t[4], t[5], t[7], now + t[5])
    else
      local ends = now + t[5]
      if t[2] < ends then ends = t[2] end
      local n = grant(id, t[4], t[5], t[7], ends)
      tell(t[7], t[8] and 'w' or 'g', t[1], n, t[5], t[4], id)
    end
    if holder then break end
  end
  return got, blocked
end
