-- Tells a manager. Nothing is relied upon: it may lack the right to, and there
-- may be nobody to hear it.
local function tell(ch, what, ticket, number, life, k, id)
  if ch ~= '' then
    redis.pcall('PUBLISH', ch, table.concat({what, string.format('%.0f', ticket), string.format('%.0f', number),
      life, k, #id, id .. main}, ' '))
  end
end

