
-- Describes a key on this node, and changes nothing that lasts.
-- Returns the holder, as owner, token, TTL in us, for how long it has held the key
-- and for how long it goes on, or an empty list, and the waiters that have not
-- lapsed, by place, each as owner and for how long it has waited.
local held, list = {}, {}
if holder then held = {holder, token, ttl, now - since, expires - now} end
if waiting then
  for _, id in ipairs(call('ZRANGE', queue, 0, -1)) do
    local s = call('HGET', main, 's' .. id)
    if s then
      local lapses, _, _, from = unpack(s)
      if lapses > now then list[#list + 1] = {id, now - from} end
    end
  end
end
return {held, list}
