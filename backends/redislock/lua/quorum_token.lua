
-- Sets the token of a grant to the one that a majority has. ARGV: owner, token.
-- Returns 1, or 0 if the owner does not hold the key here.
if holder ~= ARGV[1] then return 0 end
token = tonumber(ARGV[2])
if token > last then last = token end
write()
return 1
