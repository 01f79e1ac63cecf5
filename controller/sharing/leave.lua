-- A controller leaves sessions that are its own: whoever comes next may have them at once.
--
-- KEYS: the sessions. ARGV: the controller; for each the ages in ms, between spaces, of what went on
-- within the last second: these are kept until they do not count any more. Of another's session
-- nothing changes.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 1, #KEYS do
  if redis.call('HGET', KEYS[i], 'owner') == ARGV[1] then
    local spent = {}
    for age in string.gmatch(ARGV[i + 1], '%d+') do
      spent[#spent + 1] = string.format('%d', now - age)
    end
    redis.call('DEL', KEYS[i])
    redis.call('HSET', KEYS[i], 'spent', table.concat(spent, ' '))
    redis.call('PEXPIRE', KEYS[i], 1000)
  end
end
return 1
