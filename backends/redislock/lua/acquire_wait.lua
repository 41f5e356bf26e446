-- Often: one owner holds it, others wait, and the caller joins them.
if holder and holder ~= owner and expires > now and expires - now <= tonumber(ttl)
  and more == 1 and kind == 'x1' and ARGV[6] ~= '0' and not full then
  local ids = call('ZRANGE', KEYS[2], 0, exact)
  local names = {'s' .. owner}
  for i, id in ipairs(ids) do names[i + 1] = 's' .. id end
  local tickets = call('HMGET', main, _G.unpack(names))
  local position = 1
  for i = 2, #names do
    if tickets[i] and select(3, cmsgpack.unpack_limit(tickets[i], 2, 0)) > now then
      position = position + 1
    elseif i == 2 then
      position = 0 -- it is time to clear up
      break
    end
  end
  local least = kept * 1000 + expires - now
  if not tickets[1] and ids[1] and position > 0 and stays >= now + least and stays <= now + 2 * least then
    if ids[exact + 1] then position = call('ZCARD', KEYS[2]) + 1 end
    last = last >= now and last + 1 or now
    call('ZADD', KEYS[2], string.format('%.0f', last), owner)
    call('PEXPIRE', KEYS[2], kept)
    call('HSET', main, 'h', pack(last, expires, stays, more, token, ttl, since, channel, holder),
      names[1], pack(last, now + ARGV[6], tonumber(ARGV[6]), kind, ARGV[2], now, ARGV[3], ARGV[7] or false))
    return {0, holder, token, expires - now, position, last}
  end
end

