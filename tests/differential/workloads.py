"""Seeded random workloads for the differential test: data only, no engine and no vLLM.

A workload is a handful of requests with the settings of one replica. Times are whole
nanoseconds; a step costs `step_ns + token_ns * tokens + kv_ns * KV tokens read by its decodes`, an
empty step nothing, so both sides of the comparison keep the same clock and an arrival or an abort
lies at the same place of both schedules. Steps are often a few nanoseconds long on purpose:
arrivals then fall exactly on a boundary between two steps.

Each family aims at one part of the scheduler; `FAMILIES` names them. `generate(family, seed)`
gives the same workload on every machine.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONTENT_STRIDE = 4096
"""Tokens of content id c are numbered from c * CONTENT_STRIDE."""
UNIQUE_BASE = 1 << 40
UNIQUE_STRIDE = 1 << 20
NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Request:
    """One request: what the scheduler is told, and what only the world knows."""

    id: int
    at_ns: int
    prompt_tokens: int
    output_tokens: int
    """True output length. Below `max_tokens` the request ends by its EOS token."""
    max_tokens: int
    priority: int = 0
    prefix: tuple[int, ...] = ()
    """Content ids from the start of the prompt, each `prefix_block_tokens` long; the prompt may end
    inside the last."""
    abort_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of their submission, and the replica they go to."""

    family: str
    seed: int
    async_scheduling: bool
    priority_policy: bool
    prefix_caching: bool
    pooling: bool
    kv_blocks: int
    block_tokens: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    prefix_block_tokens: int
    step_ns: int
    token_ns: int
    kv_ns: int
    requests: tuple[Request, ...]

    @property
    def name(self) -> str:
        """A label that finds this workload again."""
        mode = "async" if self.async_scheduling else "sync"
        return f"{self.family}/{self.seed}/{mode}"

    def step_cost_ns(self, tokens: int, kv_tokens: int) -> int:
        """Time of a step with so many tokens, whose decodes read so many KV tokens."""
        if not tokens:
            return 0
        return self.step_ns + self.token_ns * tokens + self.kv_ns * kv_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain data for a record line, requests as rows."""
        plain = asdict(self)
        plain["requests"] = [list(asdict(request).values()) for request in self.requests]
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Workload:
        """The workload of a record line."""
        rows = [
            Request(*row[:6], prefix=tuple(row[6]), abort_ns=row[7]) for row in plain["requests"]
        ]
        return cls(**{**plain, "requests": tuple(rows)})


def prompt_token_ids(workload: Workload, request: Request) -> list[int]:
    """Real tokens that share exactly what the content ids share: the tail is the request's own."""
    tokens = [
        content * CONTENT_STRIDE + offset
        for content in request.prefix
        for offset in range(workload.prefix_block_tokens)
    ][: request.prompt_tokens]
    own = range(len(tokens), request.prompt_tokens)
    return tokens + [own_token(request, position) for position in own]


def own_token(request: Request, position: int) -> int:
    """A token that no other request has, at this position of prompt and output together."""
    return UNIQUE_BASE + request.id * UNIQUE_STRIDE + position


def produced_tokens(request: Request, max_model_len: int) -> int:
    """How many tokens the request really produces when nothing aborts it."""
    return min(request.output_tokens, request.max_tokens, max_model_len - request.prompt_tokens)


def is_possible(workload: Workload, request: Request) -> bool:
    """Whether the request fits the pool alone; one that does not would hang the real engine."""
    limit = workload.max_model_len
    if workload.pooling:
        needed = request.prompt_tokens
        fits = request.prompt_tokens <= limit
    else:
        needed = request.prompt_tokens + produced_tokens(request, limit) - 1
        fits = request.prompt_tokens < limit
    return fits and -(-needed // workload.block_tokens) <= workload.kv_blocks - 1


@dataclass(slots=True)
class Recipe:
    """The dice of one family; a range is inclusive and a tuple is a choice."""

    policies: tuple[bool, ...] = (False, True)
    caching: tuple[bool, ...] = (True,)
    blocks: tuple[int, ...] = (20, 30, 48, 100, 300)
    block_tokens: tuple[int, ...] = (16,)
    budgets: tuple[int, ...] = (32, 64, 128, 256)
    seats: tuple[int, ...] = (4, 8, 16)
    count: tuple[int, int] = (5, 30)
    prompt: tuple[int, int] = (1, 300)
    brief_prompts: float = 0.0
    """Chance of a prompt of at most 20 tokens, whatever the range."""
    output: tuple[int, int] = (1, 60)
    priorities: int = 4
    worst_first: float = 0.0
    """Chance that earlier arrivals have the worse priorities."""
    gap_chance: float = 0.3
    gap_steps: tuple[int, int] = (0, 30)
    shared: float = 0.5
    """Chance that a request starts with shared content."""
    roots: int = 3
    depth: tuple[int, int] = (1, 6)
    prefix_ratio: tuple[tuple[int, int], ...] = ((1, 1),)
    """Length of a content block as a fraction of a KV block."""
    cut_content: float = 0.2
    """Chance that the prompt may end inside its last content block."""
    reuse_ids: float = 0.3
    """Chance that content ids come from one small alphabet, whatever stands before them."""
    whole_prompt_shared: float = 0.0
    eos: float = 0.3
    eos_slack: tuple[int, int] = (1, 200)
    abort: float = 0.0
    chase: float = 0.0
    """Chance that the next arrival comes about when this request is aborted."""
    model_len_fraction: tuple[float, ...] = ()
    """Choices for max_model_len as a fraction of the pool; empty: 4096 tokens."""
    lockstep: float = 0.0
    """Chance that requests arrive one a step and fill their blocks all in the same step."""
    starved: float = 0.0
    """Chance that a long prompt finds its blocks taken by decodes while it is part-way."""
    aligned: float = 0.0
    """Chance that all prompts have the same length within a block."""
    pooling: bool = False
    token_ns: tuple[int, ...] = (0, 0, 1)
    kv_cost: float = 0.3
    """Chance that a step's time grows with the KV tokens it reads."""


def _recipes() -> dict[str, Recipe]:
    tiny_pools = (5, 6, 8, 10, 14)
    # fmt: off
    return {
        "mixed": Recipe(caching=(True, True, False), abort=0.05),
        "tight": Recipe(blocks=(8, 12, 16, 20), prompt=(1, 120), output=(5, 60), count=(8, 30)),
        "budget": Recipe(budgets=(16, 24, 33, 64), prompt=(40, 400), count=(5, 16), abort=0.1),
        "prefix": Recipe(
            shared=0.9, prefix_ratio=((1, 1), (2, 1), (3, 1), (1, 2), (3, 2), (5, 4)), roots=4
        ),
        "prefix-churn": Recipe(
            blocks=(12, 16, 24), shared=0.9, depth=(2, 9), roots=4, output=(1, 30),
            prefix_ratio=((1, 1), (4, 1), (3, 2)), gap_chance=0.6, gap_steps=(5, 60),
        ),
        "twins": Recipe(
            blocks=(8, 10, 14, 20), shared=1.0, roots=2, depth=(1, 5), whole_prompt_shared=0.8,
            output=(1, 40), prefix_ratio=((1, 1), (2, 1), (1, 2)), budgets=(64, 256),
        ),
        "rush": Recipe(
            policies=(True,), blocks=(8, 12, 16), prompt=(1, 90), output=(10, 80), priorities=8,
            count=(8, 24), gap_steps=(0, 6), aligned=0.5, caching=(True, False),
        ),
        "rush-chunks": Recipe(
            policies=(True,), blocks=(16, 20, 24, 30), prompt=(90, 250), brief_prompts=0.75,
            output=(30, 60), budgets=(32, 48, 64), seats=(12, 16), count=(10, 24),
            gap_steps=(0, 16), gap_chance=0.3, worst_first=0.8, priorities=9, shared=0.1,
            aligned=0.8, caching=(True, True, False), starved=0.5, token_ns=(0,), kv_cost=0.0,
        ),
        "aligned": Recipe(
            policies=(True, True, False), blocks=tiny_pools, prompt=(1, 33), output=(8, 50),
            aligned=1.0, count=(6, 20), gap_steps=(0, 3), seats=(4, 6, 8, 12), shared=0.2,
        ),
        "standstill": Recipe(
            policies=(True,), blocks=(4, 5, 6, 7, 8), prompt=(1, 40), output=(12, 40), aligned=0.5,
            count=(6, 14), gap_steps=(0, 2), gap_chance=0.4, seats=(4, 6, 8), shared=0.0, eos=0.1,
            worst_first=0.8, priorities=14, caching=(True, False), lockstep=0.7, token_ns=(0,),
            kv_cost=0.0,
        ),
        "standstill-few": Recipe(
            policies=(True,), blocks=(4, 6, 8, 10, 12), prompt=(1, 40), output=(12, 40), eos=0.3,
            count=(4, 8), gap_chance=0.0, seats=(8,), shared=0.0, worst_first=0.8, priorities=14,
            lockstep=1.0, token_ns=(0,), kv_cost=0.0,
        ),
        "in-flight": Recipe(
            blocks=tiny_pools, prompt=(8, 48), output=(1, 20), count=(12, 40), shared=0.2,
            gap_steps=(0, 4), aligned=0.4, eos=0.2, abort=0.1,
        ),
        "resume": Recipe(
            blocks=(9, 12, 18), prompt=(20, 100), output=(30, 90), count=(4, 10), shared=0.3,
            seats=(2, 3, 4), aligned=0.2, eos=0.2,
        ),
        "abort": Recipe(blocks=(10, 16, 24, 60), abort=0.6, count=(10, 40), budgets=(32, 64, 128)),
        "abort-tight": Recipe(
            blocks=tiny_pools, prompt=(1, 60), output=(5, 60), abort=0.4, count=(8, 30),
            gap_steps=(0, 6),
        ),
        "abort-order": Recipe(
            blocks=(10, 14, 20), prompt=(16, 90), output=(1, 8), abort=0.5, count=(20, 40),
            shared=1.0, roots=4, depth=(2, 5), gap_steps=(0, 5), token_ns=(1, 2), seats=(8, 16),
        ),
        "abort-chase": Recipe(
            blocks=(8, 20), prompt=(1, 90), output=(2, 40), abort=0.8, chase=0.7, count=(8, 24),
            gap_chance=0.0, seats=(1, 2, 4), token_ns=(0, 2, 5),
        ),
        "eos": Recipe(eos=0.9, blocks=(10, 16, 30), prompt=(1, 100), eos_slack=(1, 4)),
        "eos-edge": Recipe(
            eos=0.9, blocks=tiny_pools, prompt=(1, 40), output=(5, 60), eos_slack=(1, 2000),
            aligned=0.3,
        ),
        "model-len": Recipe(
            model_len_fraction=(0.3, 0.6, 1.0), output=(20, 5000), blocks=(8, 12, 20, 30),
            prompt=(1, 100), count=(5, 16), abort=0.1,
        ),
        "pooling": Recipe(
            pooling=True, caching=(True, True, False), blocks=(12, 30, 60), prompt=(1, 170),
            budgets=(16, 32, 64, 128), shared=0.7, count=(10, 40), gap_steps=(0, 10), abort=0.1,
            prefix_ratio=((1, 1), (3, 2)), model_len_fraction=(1.0, 1.0, 0.5),
        ),
        "block-sizes": Recipe(
            block_tokens=(8, 32, 128), blocks=(6, 10, 20, 60), abort=0.1,
            prefix_ratio=((1, 1), (2, 1), (1, 2), (3, 4)), prompt=(1, 500), output=(1, 80),
        ),
        "sparse": Recipe(
            gap_chance=1.0, gap_steps=(0, 120), count=(5, 20), output=(1, 40), prompt=(1, 90),
            abort=0.2, blocks=(8, 20, 60),
        ),
        "seats": Recipe(seats=(1, 2, 3), count=(10, 30), output=(1, 25), prompt=(1, 120)),
        "large": Recipe(
            blocks=(300, 600, 1200), budgets=(512, 2048, 8192), seats=(32, 256), count=(20, 40),
            prompt=(50, 2500), output=(1, 120), shared=0.6, depth=(1, 20), gap_steps=(0, 12),
            prefix_ratio=((1, 1), (32, 1), (5, 2)), abort=0.1,
        ),
        "no-caching": Recipe(
            caching=(False,), blocks=(8, 12, 20), prompt=(1, 100), abort=0.1, aligned=0.3
        ),
    }
    # fmt: on


RECIPES = _recipes()
FAMILIES = tuple(RECIPES)


def generate(family: str, seed: int, *, async_scheduling: bool) -> Workload:
    """The workload of this family and seed; the mode does not change the dice."""
    recipe = RECIPES[family]
    dice = random.Random(f"{family}/{seed}")  # noqa: S311 (test data)
    bare = _settings(recipe, dice, family, seed, async_scheduling)
    prefixes = _prefix_source(recipe, dice)
    residue = dice.randrange(bare.block_tokens) if dice.random() < recipe.aligned else None
    requests: list[Request] = []
    now_ns = dice.randint(0, 50)
    count = dice.randint(*recipe.count)
    ids = dice.sample(range(count), count) if dice.random() < 0.5 else list(range(count))
    worst_first = dice.random() < recipe.worst_first
    for place, identity in enumerate(ids):
        if dice.random() < recipe.gap_chance:
            now_ns += _gap_ns(recipe, dice, bare)
        request = _request(recipe, dice, bare, prefixes, residue)
        request = replace(request, id=identity, at_ns=now_ns)
        if worst_first:
            request = replace(request, priority=recipe.priorities * (count - place) // count)
        requests.append(_with_abort(recipe, dice, bare, request))
        if dice.random() < recipe.chase:
            aborted_ns = requests[-1].abort_ns or now_ns
            now_ns = max(now_ns, aborted_ns + dice.randint(-1, 3) * bare.step_ns)
    if dice.random() < recipe.lockstep:
        requests = _in_lockstep(requests, dice, bare)
    if dice.random() < recipe.starved:
        bare, requests = _starved(requests, dice, bare)
    return replace(bare, requests=tuple(r for r in requests if is_possible(bare, r)))


def workloads(count: int, first_seed: int = 0) -> Iterator[Workload]:
    """`count` workloads: every family in turn, each seed first sync, then async."""
    for index in range(count):
        family = FAMILIES[index // 2 % len(FAMILIES)]
        seed = first_seed + index // (2 * len(FAMILIES))
        yield generate(family, seed, async_scheduling=bool(index % 2))


def dump(workload: Workload) -> str:
    """One line that `load` understands, for a bug report."""
    return json.dumps(workload.to_json(), separators=(",", ":"))


def load(line: str) -> Workload:
    """The workload that `dump` wrote."""
    return Workload.from_json(json.loads(line))


def _settings(
    recipe: Recipe, dice: random.Random, family: str, seed: int, async_scheduling: bool
) -> Workload:
    block_tokens = dice.choice(recipe.block_tokens)
    kv_blocks = dice.choice(recipe.blocks)
    seats = dice.choice(recipe.seats)
    numerator, denominator = dice.choice(recipe.prefix_ratio)
    pool_tokens = (kv_blocks - 1) * block_tokens
    other_dice = random.Random(f"{family}/{seed}/cost")  # noqa: S311 (test data)
    max_model_len = 4096
    if recipe.model_len_fraction:
        max_model_len = max(24, int(pool_tokens * dice.choice(recipe.model_len_fraction)))
        max_model_len += dice.randint(-3, 1)
    return Workload(
        family=family,
        seed=seed,
        async_scheduling=async_scheduling,
        priority_policy=dice.choice(recipe.policies),
        prefix_caching=dice.choice(recipe.caching),
        pooling=recipe.pooling,
        kv_blocks=kv_blocks,
        block_tokens=block_tokens,
        max_num_batched_tokens=max(dice.choice(recipe.budgets), seats),
        max_num_seqs=seats,
        max_model_len=max_model_len,
        prefix_block_tokens=max(1, block_tokens * numerator // denominator),
        step_ns=dice.choice((3, 5, 10)),
        token_ns=dice.choice(recipe.token_ns),
        kv_ns=int(other_dice.random() < recipe.kv_cost),
        requests=(),
    )


def _gap_ns(recipe: Recipe, dice: random.Random, workload: Workload) -> int:
    """A gap to the next arrival; often a whole number of steps, so it falls on a boundary."""
    steps = dice.randint(*recipe.gap_steps)
    if dice.random() < 0.5:
        return steps * workload.step_ns
    return steps * workload.step_ns + dice.randrange(workload.step_ns)


def _prefix_source(recipe: Recipe, dice: random.Random) -> Callable[[], tuple[int, ...]]:
    """A source of content paths that share their beginnings, as branches of a few trees do."""
    trunks = [dice.randint(*recipe.depth) for _ in range(recipe.roots)]
    small_alphabet = dice.random() < recipe.reuse_ids

    def path() -> tuple[int, ...]:
        root = dice.randrange(recipe.roots)
        length = trunks[root] if dice.random() < 0.5 else dice.randint(1, trunks[root] + 2)
        branch = dice.randint(0, length) if dice.random() < 0.3 else length
        if small_alphabet:
            return tuple(1 + (root + step * (1 + (step >= branch))) % 7 for step in range(length))
        base = 1000 * (root + 1)
        fork = 100 * dice.randint(1, 2)
        return tuple(base + step + (fork if step >= branch else 0) for step in range(length))

    return path


def _request(
    recipe: Recipe,
    dice: random.Random,
    workload: Workload,
    prefixes: Callable[[], tuple[int, ...]],
    residue: int | None,
) -> Request:
    block = workload.block_tokens
    pool_tokens = (workload.kv_blocks - 1) * block
    limit = workload.max_model_len - (not workload.pooling)
    longest = min(recipe.prompt[1], pool_tokens - 2, limit)
    prompt = dice.randint(min(recipe.prompt[0], longest), longest)
    if recipe.brief_prompts and dice.random() < recipe.brief_prompts:
        prompt = dice.randint(1, 20)
    if residue is not None:
        prompt = max(1, prompt // block * block + residue)
    prefix: tuple[int, ...] = ()
    if dice.random() < recipe.shared:
        prefix = prefixes()
        content = workload.prefix_block_tokens
        if dice.random() < recipe.whole_prompt_shared:
            prompt = min(len(prefix) * content, longest // content * content) or prompt
        elif dice.random() < 0.6:
            prompt = min(longest, len(prefix) * content + dice.randint(0, 2 * block))
        whole = -(-prompt // content) if dice.random() < recipe.cut_content else prompt // content
        prefix = prefix[:whole]
    output = dice.randint(*recipe.output)
    feasible = pool_tokens - prompt + 1
    if not recipe.model_len_fraction or workload.max_model_len > pool_tokens:
        output = max(1, min(output, feasible))
    max_tokens = output
    if not workload.pooling and dice.random() < recipe.eos:
        max_tokens += dice.randint(*recipe.eos_slack)
        if recipe.eos_slack[1] < 1000:
            max_tokens = max(output, min(max_tokens, feasible))
    if workload.pooling:
        output = max_tokens = 1
    return Request(
        id=0,
        at_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=max_tokens,
        priority=dice.randrange(recipe.priorities) if workload.priority_policy else 0,
        prefix=prefix,
    )


def _in_lockstep(requests: list[Request], dice: random.Random, workload: Workload) -> list[Request]:
    """The first requests come one a step, each with one more prompt token than the one before.

    They fill their last blocks, and the pool, in one step, so the next one finds no block for
    anybody; some are aborted at that very boundary. (An idle engine with async scheduling takes
    two decisions at once, so the third sees the second arrival.)
    """
    block = workload.block_tokens
    start_ns = requests[0].at_ns
    shortest = dice.randint(1, block // 3)
    together = dice.randint(2, min(7, workload.kv_blocks - 1, len(requests)))
    full_blocks = [0] * together
    for _ in range(workload.kv_blocks - 1 - together):
        full_blocks[dice.randrange(together)] += 1
    full_ns = start_ns + (block - shortest + (not workload.async_scheduling)) * workload.step_ns
    brief = dice.random() < 0.5
    victim = dice.randrange(2 * together)
    moved = []
    for place, request in enumerate(requests):
        at_ns = max(request.at_ns, start_ns + place * workload.step_ns)
        request = replace(request, at_ns=at_ns, abort_ns=None)
        if place < together:
            last = shortest + place + (workload.async_scheduling and place > 0)
            behind = place > 0 and dice.random() < 0.2  # fills its block a step later, as its last
            last -= behind
            if place and (brief or behind):
                output = block - last + (1 if behind else dice.randint(1, 10))
                request = replace(request, output_tokens=output, max_tokens=output + place % 3)
            prompt = full_blocks[place] * block + last
            request = replace(request, prompt_tokens=prompt, prefix=())
        if place == victim or dice.random() < 0.1:
            late_ns = dice.choice((0, 0, 0, 1, 2)) * workload.step_ns
            abort_ns = full_ns + late_ns + dice.randint(1, workload.step_ns)
            request = replace(request, abort_ns=max(at_ns, abort_ns))
        moved.append(request)
    return moved


def _starved(
    requests: list[Request], dice: random.Random, workload: Workload
) -> tuple[Workload, list[Request]]:
    """Some decodes and, a step later, a long prompt that runs before them; it just fits.

    Before its last chunks the decodes all take one block more, so a chunk lacks several.
    """
    block = workload.block_tokens
    decodes = dice.randint(2, min(6, len(requests) - 1))
    chunk = dice.randint(2, 4) * block
    chunks = dice.randint(2, 5)
    long_prompt = chunks * chunk - dice.randrange(block)
    left = dice.randint(1, chunks)
    start_ns = requests[0].at_ns
    moved = []
    for place, request in enumerate(requests):
        if place < decodes:
            request = replace(
                request, at_ns=start_ns, prompt_tokens=block - left, prefix=(),
                priority=request.priority + 10,
            )  # fmt: skip
        elif place == decodes:
            request = replace(
                request, at_ns=start_ns + workload.step_ns, prompt_tokens=long_prompt, prefix=(),
                output_tokens=3, max_tokens=3, priority=0,
            )  # fmt: skip
        else:
            request = replace(request, at_ns=request.at_ns + 2 * workload.step_ns)
        moved.append(request)
    settings = replace(
        workload,
        kv_blocks=1 + decodes + -(-long_prompt // block) + dice.randint(0, 1),
        max_num_batched_tokens=max(chunk + decodes, decodes * block),
        max_num_seqs=min(workload.max_num_seqs, chunk),
    )
    return settings, moved


def _with_abort(
    recipe: Recipe, dice: random.Random, workload: Workload, request: Request
) -> Request:
    if dice.random() >= recipe.abort:
        return request
    steps = dice.choice((0, 3, 20, 60, 3 * min(60, request.output_tokens) + 5, 200))
    delay = dice.randint(0, steps * (workload.step_ns + 8 * workload.token_ns) + 1)
    return replace(request, abort_ns=request.at_ns + delay)
