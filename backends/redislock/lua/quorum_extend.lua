-- Renews grants on this node. KEYS: their records.
-- ARGV: how long the records are kept in ms, whether to make anew what is missing
-- ("refill"), then for each grant: owner, token, TTL in us, and 1 if that is the
-- token that was handed out to the owner for certain.
-- Returns for each: 1, or if it is not there 0, or 2 if somebody else holds the
-- key.
local call, pack, unpack = redis.call, cmsgpack.pack, cmsgpack.unpack
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local answers = {}
for i = 1, #KEYS do
  local main = KEYS[i]
  local owner, wanted, life = ARGV[4 * i - 1], tonumber(ARGV[4 * i]), ARGV[4 * i + 1]
  local h = call('HGET', main, 'h')
  local last, expires, token, ttl, since, channel, holder, attempt = 0, 0
  if h then
    last, expires, token, ttl, since, channel, holder, attempt = unpack(h)
  end
  local answer = 0
  if expires > now then
    answer = 2
    if holder == owner and (token == wanted or token < wanted and ARGV[4 * i + 2] == '1') then
      answer = 1
      if token < wanted then
        -- The node was not told which token the majority has.
        token, attempt = wanted, 2 ^ 52
        if wanted > last then last = wanted end
      end
      if expires - now > tonumber(ttl) then expires = now + ttl end
      if now + life > expires then
        expires, ttl = now + life, life
      end
    end
  elseif ARGV[2] == 'refill' then
    -- What was granted here since cannot have been by a majority. No attempt that
    -- has failed may take it back.
    answer = 1
    if wanted > last then last = wanted end
    expires, token, ttl, since, channel, holder, attempt = now + life, wanted, life, now, '', owner, 2 ^ 52
  end
  if answer == 1 then
    local kept = string.format('%.0f', ARGV[1] + math.ceil((expires - now) / 1000))
    -- This comes first, as it is allowed when memory is short.
    call('PEXPIRE', main, kept)
    call('HSET', main, 'h', pack(last, expires, token, ttl, since, channel, holder, attempt))
    if not h then call('PEXPIRE', main, kept) end
  end
  answers[i] = answer
end
return answers
