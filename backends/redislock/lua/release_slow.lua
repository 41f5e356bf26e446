
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
if wanted == 0 and waiting then drop(owner) end
if held and holder == owner then
  holder, changed = nil, true
elseif held then
  forget(owner)
  if call('ZCARD', holders) == 0 then
    call('HDEL', main, 'm')
    kinds, changed = nil, true
  end
end
serve()
keep()
save()
return 1
