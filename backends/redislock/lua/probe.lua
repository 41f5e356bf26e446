-- Tries every command that the scripts use, on keys of its own, and leaves
-- nothing behind. ARGV: channel.
-- Returns what the server said against each command that it refused.
local main, queue, holders = KEYS[1], KEYS[2], KEYS[3]
local refused = {}
local function try(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then
    refused[#refused + 1] = (...) .. ': ' .. answer.err
  end
end
try('TIME')
try('HMGET', main, 'h')
try('HGET', main, 'h')
try('PEXPIRE', main, 1000)
try('PTTL', main)
try('HSET', main, 'h', '')
try('HDEL', main, 'h')
for _, key in ipairs({queue, holders}) do
  try('ZREMRANGEBYRANK', key, 0, -1)
  try('ZADD', key, 1, 'a')
  try('ZRANGE', key, 0, 0)
  try('ZRANGEBYSCORE', key, '-inf', 0)
  try('ZSCORE', key, 'a')
  try('ZRANK', key, 'a')
  try('ZCARD', key)
  try('ZREM', key, 'a')
end
if KEYS[4] then -- what a quorum uses besides
  try('GET', KEYS[4])
  try('SET', KEYS[4], '', 'PX', 1)
end
try('PUBLISH', ARGV[1], '')
return refused
