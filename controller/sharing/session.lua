-- Sessions: each is one controller's at a time.
--
-- KEYS: the calm mark; the sessions, each a hash that lasts as long as the ownership.
-- ARGV: the controller; ms that an ownership lasts; for each session 1 where it goes on with it
-- (it was granted it before), else 0.
-- Returns for each: nothing, where another has it, or in a calm may have it; else 1, and the ages in
-- ms of what went on elsewhere within the last second.
--
-- Whoever has it keeps it by asking again; it is another's only once it has lapsed or was left.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local id, lasts = ARGV[1], ARGV[2]
local calm = redis.call('EXISTS', KEYS[1]) == 1
local answer = {}
for i = 2, #KEYS do
  local owner, spent = unpack(redis.call('HMGET', KEYS[i], 'owner', 'spent'))
  local mine = {}
  if redis.call('PTTL', KEYS[i]) > lasts + 1000 then  -- the clock was put back; a calm goes on
    owner, spent = false, false
  end
  -- What was left was left by its owner: that is known, calm or not.
  if owner == id or (not owner and (spent or not calm or ARGV[i + 1] == '1')) then
    mine[1] = 1
    for at in string.gmatch(spent or '', '%d+') do
      if now - at < 1000 then mine[#mine + 1] = math.max(now - at, 0) end
    end
    redis.call('DEL', KEYS[i])
    redis.call('HSET', KEYS[i], 'owner', id)
    redis.call('PEXPIRE', KEYS[i], lasts)
  end
  answer[i - 1] = mine
end
return answer
