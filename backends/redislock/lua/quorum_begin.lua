-- Has a node without data vote at once, because it is known to be new. KEYS[1]:
-- since when the node has its data, and its run id. ARGV[1]: the run id of the node that was
-- looked at.
if string.find(redis.call('INFO', 'server'), 'run_id:' .. ARGV[1], 1, true) then
  redis.call('SET', KEYS[1], '0 ' .. ARGV[1], 'NX')
end
return 1
