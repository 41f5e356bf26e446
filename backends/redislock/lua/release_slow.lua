
local held
if holder == owner then
  held = token
elseif kinds then
  local o = call('HGET', main, 'o' .. owner)
  if o then held = unpack(o) end
end
if wanted ~= 0 and held ~= wanted then
  if holder or kinds then return 2 end
  return 0
end
if not held and not waiting then return 1 end
keep() -- comes first, as it is allowed when memory is short
if wanted == 0 and waiting then drop(owner) end
local before = last
if held and holder == owner then
  holder = nil
elseif held then
  forget(owner)
  if call('ZCARD', holders) == 0 then
    call('HDEL', main, 'm')
    kinds = nil
  end
end
serve()
if held and last == before then
  write()
  if not record[1] then keep() end
end
return 1
