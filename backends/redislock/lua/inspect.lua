-- Describes a key and changes nothing.
-- Returns the holders, each as owner, token, kind, TTL in us, for how long it has
-- held the key and for how long it goes on, and the waiters that have not lapsed,
-- head first, each as owner, kind, and for how long it has waited.
local call, unpack = redis.call, cmsgpack.unpack
local main, queue, holders = KEYS[1], KEYS[2], KEYS[3]
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local record = call('HMGET', main, 'h', 'q', 'm')
local held, waiting, kinds = {}, {}, record[3]
if record[1] then
  local _, expires, _, _, token, ttl, since, channel, holder = unpack(record[1])
  if expires > now then
    held[1] = {holder, token, 'x1', ttl, now - since, math.min(expires - now, ttl)}
  end
end
if kinds then
  local list = call('ZRANGE', holders, 0, -1, 'WITHSCORES')
  for i = 1, #list, 2 do
    local o = call('HGET', main, 'o' .. list[i])
    if o and tonumber(list[i + 1]) > now then
      local number, life, from = unpack(o)
      held[#held + 1] = {list[i], number, kinds, life, now - from, math.min(list[i + 1] - now, life)}
    end
  end
end
if record[2] then
  for _, id in ipairs(call('ZRANGE', queue, 0, -1)) do
    local s = call('HGET', main, 's' .. id)
    if s then
      local _, lapses, life, kind, ttl, since = unpack(s)
      if lapses > now then
        waiting[#waiting + 1] = {id, kind, now - since}
      end
    end
  end
end
return {held, waiting}
