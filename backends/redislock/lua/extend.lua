-- Renews grants. Each has two KEYS, its record and its holders, or the record only.
-- ARGV: how long the records are kept in ms, then for each grant: owner, token,
-- TTL in us, and how long the record is kept after that, in ms.
-- Returns for each: 1, or if it is not there 0, or 2 if somebody else holds the
-- key, or what the server refused: one that cannot be renewed is no harm to the others.
local call, pack, unpack = redis.call, cmsgpack.pack, cmsgpack.unpack
local time = call('TIME')
local now = time[1] * 1000000 + time[2]

-- A replica refuses the command, and so does not tell of losses: it may know
-- less than its primary.
local function absent(main, answer)
  call('HDEL', main, '')
  return answer
end

local count = (#ARGV - 1) / 4
local function renew(i)
  local main = KEYS[(i - 1) * #KEYS / count + 1]
  local holders = main .. ':h'
  local owner, wanted, life, kept = ARGV[4 * i - 2], tonumber(ARGV[4 * i - 1]), ARGV[4 * i], ARGV[4 * i + 1]
  local record = call('HGET', main, 'h')
  local last, expires, stays, more, token, ttl, since, channel, holder = 0, 0, 0, true
  if record then
    last, expires, stays, more, token, ttl, since, channel, holder = unpack(record)
    if type(stays) ~= 'number' or expires ~= 0 and type(holder) ~= 'string' then
      error('WRONGTYPE not the record of a lock', 0)
    end
  end
  if expires > now then
    if holder ~= owner or token ~= wanted then return absent(main, 2) end
    -- A clock that was set back must not make it longer than it can be.
    if expires - now > tonumber(ttl) then expires = now + ttl end
    if now + life >= expires then
      expires, ttl = now + life, life
    else
      kept = math.ceil(ARGV[1] + (expires - now) / 1000)
    end
    local least = kept * 1000
    local short = stays < now + least or stays > now + 2 * least
    if short then
      stays = now + math.floor(kept * 1.125) * 1000 -- so that it is seldom
      call('PEXPIRE', main, (stays - now) / 1000)
    end
    local renewed = pack(last, expires, stays, more, token, ttl, since, channel, holder)
    if type(redis.pcall('HSET', main, 'h', renewed)) == 'table' then
      -- Memory is short. After a write that needs none, all are allowed.
      absent(main)
      call('HSET', main, 'h', renewed)
    end
    return 1
  end
  if not more or not call('HGET', main, 'm') then return absent(main, 0) end
  local longest = call('ZRANGE', holders, -1, -1, 'WITHSCORES')[2]
  local ends = tonumber(call('ZSCORE', holders, owner) or 0)
  local o = call('HGET', main, 'o' .. owner)
  local number, before, from, ch
  if o then number, before, from, ch = unpack(o) end
  if ends > now and number == wanted then
    if ends - now > tonumber(before) then ends = now + before end
    if now + life > ends then
      ends, before = now + life, life
    end
    if tonumber(longest) < ends then longest = ends end
    kept = math.ceil(ARGV[1] + (longest - now) / 1000)
    call('PEXPIRE', holders, kept)
    if stays < now + kept * 1000 or stays > now + kept * 2000 then
      kept = math.floor(kept * 1.125)
      call('PEXPIRE', main, kept)
      call('HSET', main, 'h', pack(last, 0, now + kept * 1000, more))
    end
    call('ZADD', holders, string.format('%.0f', ends), owner)
    call('HSET', main, 'o' .. owner, pack(number, before, from, ch))
    return 1
  end
  if longest and tonumber(longest) > now then return absent(main, 2) end
  return absent(main, 0)
end

local answers = {}
for i = 1, count do
  local ok, answer = pcall(renew, i)
  if not ok then
    if type(answer) == 'table' then answer = answer.err end
    -- The client must see this, to leave a replica for its primary.
    if string.find(answer, 'READONLY', 1, true) then return {err = answer} end
    -- As a text: clients do not all read on behind an error in a list, and would
    -- take the rest for the replies to other calls.
  end
  answers[i] = answer
end
return answers
