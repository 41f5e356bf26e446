
-- Sets the token of a grant to the one that a majority has. ARGV: owner, token,
-- attempt.
-- Returns 1, or 0 if the owner does not hold the key here, or since a later
-- attempt, whose token is another.
if holder ~= ARGV[1] or attempt > tonumber(ARGV[3]) then return 0 end
token = tonumber(ARGV[2])
if token > last then last = token end
write()
return 1
