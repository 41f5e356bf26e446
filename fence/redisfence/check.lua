-- The check, which precedes every script. The last key is the record of the
-- highest token, the last argument the token; the script does not see them. A
-- token is below 2^53, so that a number of Lua holds it.
do
	local record, token = table.remove(KEYS), tonumber(table.remove(ARGV))
	local text = redis.call('GET', record)
	local highest = 0
	if text then
		highest = tonumber(text)
		-- Anything else was not written here.
		if not string.match(text, '^[1-9]%d*$') or highest >= 9007199254740992 then
			return redis.error_reply('DLMFENCE the record of the highest token is damaged: ' .. record)
		end
	end
	if token < highest then
		return redis.error_reply('DLMSTALE ' .. text)
	end
	if token > highest then
		redis.call('SET', record, string.format('%.0f', token))
	end
end
