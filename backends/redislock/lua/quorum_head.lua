-- What the scripts of the quorum share. Each node keeps for a key the hash
-- KEYS[1]:
--   h          last token, and, if somebody holds it: expiry, token, TTL, time of
--              the grant, channel, owner, the owner's attempt
--   q          if somebody waits: 1
--   s<owner>   of each waiter: time of lapsing, life, channel, time of arrival
-- KEYS[2] is the queue, owners by place. All times are in us by the node's clock,
-- which may be set: what then seems to last longer than it can is cut to what
-- it can last. A TTL is therefore that of the renewal by which the expiry came
-- about.
local call, pack, unpack = redis.call, cmsgpack.pack, cmsgpack.unpack
local main, queue = KEYS[1], KEYS[2]
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local record = call('HMGET', main, 'h', 'q')
local waiting = record[2]
local last, expires, token, ttl, since, channel, holder, attempt = 0, 0
if record[1] then
  last, expires, token, ttl, since, channel, holder, attempt = unpack(record[1])
  if expires <= now then
    holder = nil
  elseif expires - now > tonumber(ttl) then
    expires = now + ttl
    call('HSET', main, 'h', pack(last, expires, token, ttl, since, channel, holder, attempt))
  end
end

local function write()
  if holder then
    call('HSET', main, 'h', pack(last, expires, token, ttl, since, channel, holder, attempt))
  else
    call('HSET', main, 'h', pack(last, 0))
  end
end

-- Keeps the record for so many ms, and for as long as the key is held besides:
-- who waits for a moment must not end the record of a long lock.
local function keep(kept)
  if holder then kept = string.format('%.0f', kept + math.ceil((expires - now) / 1000)) end
  call('PEXPIRE', main, kept)
end

local function drop(id)
  call('ZREM', queue, id)
  call('HDEL', main, 's' .. id)
  if call('ZCARD', queue) == 0 then
    call('HDEL', main, 'q')
    waiting = nil
  end
end

-- Finds the first waiter that has not lapsed. One that has keeps its place for
-- as long again.
local function head()
  local place = 0
  while waiting do
    local id = call('ZRANGE', queue, place, place)[1]
    if not id then return end
    local s = call('HGET', main, 's' .. id)
    if not s then
      drop(id)
    else
      local lapses, life, ch, from = unpack(s)
      if lapses - now > life then
        lapses = now + life
        call('HSET', main, 's' .. id, pack(lapses, life, ch, from))
      end
      if lapses > now then
        return id, ch
      elseif lapses + life <= now then
        drop(id)
      else
        place = place + 1
      end
    end
  end
end

local function enqueue(id, life, ch, at, kept)
  local from = now
  if not waiting then
    call('ZREMRANGEBYRANK', queue, 0, -1)
    waiting = 1
  end
  call('ZADD', queue, string.format('%.0f', at), id)
  call('PEXPIRE', queue, kept)
  call('HSET', main, 'q', 1, 's' .. id, pack(now + life, life, ch, from))
  keep(kept)
end

-- Tells the first waiter that it is worth asking again.
local function wake()
  if holder or not waiting then return end
  local id, ch = head()
  if id and ch ~= '' then
    redis.pcall('PUBLISH', ch, table.concat({'w', 0, 0, 0, 'x1', #id, id .. main}, ' '))
  end
end
