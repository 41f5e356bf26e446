
local removed = {}
if not holder and not kinds and not waiting then return removed end
if holder and (wanted == 0 or token == wanted) then
  removed[1] = {holder, token, 'x1', ttl, now - since, expires - now}
  tell(channel, 'l', 0, token, ttl, 'x1', holder)
  holder, changed = nil, true
end
if kinds then
  local list = call('ZRANGE', holders, 0, -1, 'WITHSCORES')
  for i = 1, #list, 2 do
    local o = call('HGET', main, 'o' .. list[i])
    local number, life, from, ch = 0, 0, now, ''
    if o then number, life, from, ch = unpack(o) end
    if wanted == 0 or number == wanted then
      removed[#removed + 1] = {list[i], number, kinds, life, now - from, list[i + 1] - now}
      tell(ch, 'l', 0, number, life, kinds, list[i])
      forget(list[i])
    end
  end
  if call('ZCARD', holders) == 0 then
    call('HDEL', main, 'm')
    kinds, changed = nil, true
  end
end
serve()
keep()
save()
return removed
