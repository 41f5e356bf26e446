-- Often: the first of those who wait wants it alone, and nothing has lapsed.
if holder == owner and token == wanted and expires > now and more == 1 then
  local ids = call('ZRANGE', KEYS[2], 0, 1)
  local id, ticket, lapses, life, kind, lasts, to, wake = ids[1]
  local s = id and call('HGET', main, 's' .. id)
  if s then
    local _
    ticket, lapses, life, kind, lasts, _, to, wake = unpack(s)
  end
  if kind == 'x1' and lapses > now and lapses - now <= tonumber(life) then
    local ends = math.min(now + lasts, lapses)
    local least = kept * 1000 + ends - now
    if stays >= now + least and stays <= now + 2 * least then
      -- The first command needs no memory, so that all the others are allowed.
      call('ZREM', KEYS[2], id)
      if ids[2] then
        call('HDEL', main, 's' .. id)
      else
        call('HDEL', main, 's' .. id, 'q')
        more = false
      end
      last = last >= now and last + 1 or now
      call('HSET', main, 'h', pack(last, ends, stays, more, last, lasts, now, to, id))
      tell(to, wake and 'w' or 'g', ticket, last, lasts, kind, id)
      return 1
    end
  end
end

