-- A controller is alive, or leaves. Says how many are, and what each runs that tells it.
--
-- KEYS: when each was heard last, a sorted set; the calm mark; what each runs, a hash.
-- ARGV: the controller; 0: it leaves; ms after which one that is not heard is gone; ms of silence of
-- all after which whoever comes first begins a calm; ms that a calm lasts; what it runs, or nothing.
--
-- Where nobody was heard for a while, the store was away, or lost what it knew, and controllers go
-- on with shares and sessions that it does not know of. In a calm these are claimed, and nothing
-- else grows: so whoever is back first does not take what another still uses.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local id, here, gone, silence, calm = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local last = redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
if here == '0' then
  redis.call('ZREM', KEYS[1], id)
else
  local silent = last and now - last
  if not silent or math.abs(silent) > tonumber(silence) then
    redis.call('SET', KEYS[2], '1', 'PX', calm)
  end
  if silent and silent < 0 then  -- the clock was put back: nobody was heard later than now
    for _, other in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')) do
      redis.call('ZADD', KEYS[1], now, other)
    end
  end
  redis.call('ZADD', KEYS[1], now, id)
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - gone)
redis.call('PEXPIRE', KEYS[1], 10 * gone)
if here ~= '0' and ARGV[6] ~= '' then
  redis.call('HSET', KEYS[3], id, ARGV[6])
end
local answer, runs = {redis.call('ZCARD', KEYS[1])}, redis.call('HGETALL', KEYS[3])
for i = 1, #runs, 2 do
  if redis.call('ZSCORE', KEYS[1], runs[i]) then
    answer[#answer + 1] = runs[i + 1]
  else
    redis.call('HDEL', KEYS[3], runs[i])
  end
end
redis.call('PEXPIRE', KEYS[3], 10 * gone)
return answer
