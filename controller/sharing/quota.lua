-- A controller's share of a limit that several spend: a rate, and how many may be in flight.
--
-- KEYS: the calm mark; for each limit its shares, a hash by controller.
-- ARGV: the controller; how many controllers there are; then for each limit: the whole rate and
-- number (0: no limit); how many it has in flight; what it goes on with until it hears of this, of
-- each (0: nothing); ms that the share lasts (0: it is given back).
-- Returns for each the new shares of rate and number; -1: no limit.
--
-- A share is {until; of the rate: n, an earlier larger n, until when that may be in use; the same of
-- the number in flight; how many were in flight}. What it takes of a limit, at most:
-- * of a rate: n until a second, the window, after it has run out; so for the earlier one;
-- * of a number: n, and what is in flight above it, until it has run out; so for the earlier one.
-- Nobody is granted more than the limit less what all others take. So their sum never exceeds it.
-- Whoever asks again has heard the answer before: it goes on with no more than it says.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local WINDOW, RATE, NUMBER, USED, TURN, LONGEST = 1000, 2, 5, 8, 3000, 2500
local id, controllers = ARGV[1], tonumber(ARGV[2])
local calm = redis.call('EXISTS', KEYS[1]) == 1

local function earlier(share, at)
  local tail = at == RATE and WINDOW or 0
  return now < share[at + 2] + tail and share[at + 1] or 0
end

local function taken(share, at)
  local most = earlier(share, at)
  if now < share[1] + (at == RATE and WINDOW or 0) then most = math.max(most, share[at]) end
  if at == NUMBER and now < share[1] then most = math.max(most, share[USED]) end
  return most
end

-- The share that this controller has, those of others that count, and who of them asked of late.
local function read(key)
  local mine, others = {0, 0, 0, 0, 0, 0, 0, 0}, {}
  local askers, place = 1, 0
  local found = redis.call('HGETALL', key)
  for i = 1, #found, 2 do
    local share = {}
    for number in string.gmatch(found[i + 1], '%d+') do share[#share + 1] = tonumber(number) end
    if share[1] - now > LONGEST then  -- the clock was put back; a calm goes on
      redis.call('HDEL', key, found[i])
    elseif found[i] == id then
      mine = share
    elseif now < share[1] then
      others[#others + 1] = share
      askers = askers + 1
      if found[i] < id then place = place + 1 end
    elseif taken(share, RATE) + taken(share, NUMBER) > 0 then
      others[#others + 1] = share
    else
      redis.call('HDEL', key, found[i])
    end
  end
  return mine, others, askers, place
end

local function share(key, rate, number, used, held_rate, held_number, lasts)
  local mine, others, askers, place = read(key)
  local known = now < mine[1]

  local function grant(at, limit, held)
    local free = limit
    for _, share in ipairs(others) do free = free - taken(share, at) end
    -- Equal parts; what is left over goes to the first, and of a limit with too little for all
    -- everyone gets some in turn. The first time, others are about to ask, too.
    local new = held == 0 and (calm or not known)
    local among = new and math.max(askers, controllers) or askers
    local fair = math.floor(limit / among)
    if new then
      fair = math.max(fair, 1)
    else
      local turn = fair == 0 and math.floor(now / TURN) or 0
      if (place + turn) % among < limit % among then fair = fair + 1 end
    end
    local n = math.max(math.min(fair, free), 0)
    if lasts == 0 or (calm and held > 0) then n = math.min(n, held) end
    -- What it may have used until now, or uses until it hears of this, still counts for a while.
    if not known then
      mine[at + 1], mine[at + 2] = taken(mine, at), math.max(mine[1], mine[at + 2])
    elseif held <= mine[at] then
      mine[at + 2] = math.min(mine[at + 2], now)
    end
    if n < held then
      mine[at + 1], mine[at + 2] = math.max(held, earlier(mine, at)), now + lasts
    end
    mine[at] = n
    return n
  end

  local granted = {-1, -1}
  if rate > 0 then granted[1] = grant(RATE, rate, held_rate) end
  if number > 0 then granted[2] = grant(NUMBER, number, held_number) end
  mine[1], mine[USED] = now + lasts, used
  redis.call('HSET', key, id, table.concat(mine, ' '))
  redis.call('PEXPIRE', key, lasts + 2 * WINDOW)
  return granted
end

local answer = {}
for i = 2, #KEYS do
  local given = {}
  for j = 1, 6 do given[j] = tonumber(ARGV[6 * (i - 2) + 2 + j]) end
  answer[i - 1] = share(KEYS[i], unpack(given))
end
return answer
