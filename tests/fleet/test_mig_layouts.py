"""Cutting a card, on paper: layouts, placements, plans, and what fits where."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.gpus.mig import (
    Card,
    Create,
    Demand,
    Destroy,
    DestroyCompute,
    Enable,
    Fill,
    Instance,
    MigError,
    Place,
    Placement,
    Plan,
    Profile,
    arrange,
    assign,
    parse_layout,
    plain_name,
    plan_of,
    told,
)


def profile(
    number: int, name: str, compute: int, mb: int, most: int, size: int, *starts: int
) -> Profile:
    return Profile(number, name, compute, mb, most, tuple(Placement(at, size) for at in starts))


H100 = (
    profile(19, "1g.10gb", 1, 9984, 7, 1, *range(7)),
    profile(20, "1g.10gb+me", 1, 9984, 1, 1, *range(7)),
    profile(15, "1g.20gb", 1, 20096, 4, 2, 0, 2, 4, 6),
    profile(14, "2g.20gb", 2, 20096, 3, 2, 0, 2, 4),
    profile(9, "3g.40gb", 3, 40448, 2, 4, 0, 4),
    profile(5, "4g.40gb", 4, 40448, 1, 4, 0),
    profile(0, "7g.80gb", 7, 81152, 1, 8, 0),
)
NAMES = [one.name for one in H100]
BY_NAME = {one.name: one for one in H100}
layouts = st.lists(st.sampled_from(NAMES), min_size=1, max_size=8)


def card(*instances: Instance, mig: bool = True) -> Card:
    return Card("GPU-1", "H100", 0, mig, mig, (), H100, instances)


def legal(found: tuple[Place, ...]) -> bool:
    """They are the card's placements and share no memory slice."""
    taken = [
        at
        for place in found
        for at in range(place.placement.start, place.placement.start + place.placement.size)
    ]
    return len(taken) == len(set(taken)) and all(
        place.placement in place.profile.placements for place in found
    )


def every_way(wanted: list[Profile]) -> list[tuple[Place, ...]]:
    """By trying all combinations."""
    offers = [[Place(one, placement) for placement in one.placements] for one in wanted]
    return [found for found in itertools.product(*offers) if legal(found)]


# Layouts


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("7g.80gb", ["7g.80gb"]),
        ("3g.40gb+3x1g.10gb", ["3g.40gb", "1g.10gb", "1g.10gb", "1g.10gb"]),
        (" 2x3g.40gb ", ["3g.40gb", "3g.40gb"]),
        ("1g.10gb+me+2x1g.20gb", ["1g.10gb+me", "1g.20gb", "1g.20gb"]),
        ("2x1g.24gb+gfx+me+1g.24gb-me", ["1g.24gb+gfx+me"] * 2 + ["1g.24gb-me"]),
        ("1g.24gb+me.all", ["1g.24gb+me.all"]),
    ],
)
def test_a_layout_is_names_and_how_many_of_each(text: str, names: list[str]) -> None:
    assert parse_layout(text) == tuple(names)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no slice"),
        ("me+1g.10gb", "'me' is no slice"),
        ("3g.40gb++1g.10gb", "'' is no slice"),
        ("3g", "'3g' is no slice: write NAME or COUNTxNAME"),
        ("0x1g.10gb", "leave it out"),
        ("-1x1g.10gb", "'-1x1g.10gb' is no slice"),
        ("1c.3g.40gb", "part of an instance"),
        ("999999999x1g.10gb", "is no slice"),
    ],
)
def test_what_is_no_layout_is_refused_by_its_part(text: str, why: str) -> None:
    with pytest.raises(MigError, match=why):
        parse_layout(text)


@given(layouts)
@settings(deadline=None)
def test_a_layout_told_is_read_again(names: list[str]) -> None:
    assert Counter(parse_layout(told(names))) == Counter(names)


@given(st.text(max_size=30))
@settings(deadline=None)
def test_any_text_is_a_layout_or_refused(text: str) -> None:
    try:
        names = parse_layout(text)
    except MigError:
        return
    assert names
    assert all("g." in name for name in names)


def test_drivers_may_write_mig_before_a_name() -> None:
    assert plain_name("MIG 1g.10gb+me") == plain_name("1g.10gb+me") == "1g.10gb+me"


# Sums


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3g.40gb+3x3g.40gb", "needs 12 of 7 compute slices and 16 of 8 memory slices"),
        ("2x3g.40gb+1g.10gb", "needs 7 of 7 compute slices and 9 of 8 memory slices"),
        ("2x4g.40gb", "needs 8 of 7 compute slices and 8 of 8 memory slices"),
        ("2x1g.10gb+me", "has 2 of 1g.10gb[+]me: H100 offers 1 at once"),
        ("1g.5gb", "offers no '1g.5gb': did you mean"),
        ("1g.10gb+gfx", "offers no '1g.10gb[+]gfx': did you mean .*1g.10gb"),
    ],
)
def test_more_than_a_card_has_is_refused_with_the_sum(text: str, why: str) -> None:
    with pytest.raises(MigError, match=why):
        plan_of(card(), parse_layout(text))


def test_a_sum_that_is_small_enough_can_still_have_no_placement() -> None:
    wide = (profile(1, "2g.8gb", 2, 8000, 2, 2, 1), profile(2, "4g.16gb", 4, 16000, 1, 4, 0))
    odd = Card("GPU-1", "Odd", 0, True, True, (), (*wide, profile(3, "8g", 8, 1, 1, 8, 0)))
    with pytest.raises(MigError, match=r"no placement on Odd.*2g.8gb at 1; 4g.16gb at 0"):
        plan_of(odd, ("2g.8gb", "4g.16gb"))


def test_a_card_that_cannot_be_cut_says_so() -> None:
    with pytest.raises(MigError, match="offers no MIG profile"):
        plan_of(Card("GPU-1", "L4", 0, False), ("1g.10gb",))


# Placements


@pytest.mark.parametrize(
    "text",
    [
        "7g.80gb", "4g.40gb+3g.40gb", "4g.40gb+2g.20gb+1g.10gb", "4g.40gb+3x1g.10gb",
        "2x3g.40gb", "3g.40gb+2g.20gb+1g.20gb", "3g.40gb+4x1g.10gb", "3x2g.20gb+1g.10gb",
        "4x1g.20gb", "7x1g.10gb", "1g.10gb+me+6x1g.10gb", "1g.20gb+6x1g.10gb",
    ],
)  # fmt: skip
def test_what_nvidia_lists_for_the_card_is_found(text: str) -> None:
    wanted = [BY_NAME[name] for name in parse_layout(text)]
    found = arrange(wanted)
    assert found is not None
    assert legal(found)
    assert Counter(place.profile for place in found) == Counter(wanted)


@st.composite
def tables(draw: st.DrawFn) -> list[Profile]:
    """Profiles of some card of eight memory slices, not only of those that are sold."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, 4))
        starts = draw(st.sets(st.integers(0, 8 - size), min_size=1, max_size=4))
        found.append(profile(number, f"{number}g.1gb", 1, 1000, 9, size, *sorted(starts)))
    return found


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_placements_are_found_exactly_where_there_are_some(data: st.DataObject) -> None:
    table = data.draw(tables())
    wanted = data.draw(st.lists(st.sampled_from(table), min_size=1, max_size=4))
    there = {
        place
        for place in data.draw(st.sampled_from([(), *every_way(wanted[:2])]))
        if data.draw(st.booleans())
    }
    found, ways = arrange(wanted, there), every_way(wanted)
    if found is None:
        assert not ways
        return
    assert legal(found)
    assert Counter(place.profile for place in found) == Counter(wanted)
    most = max(sum(place in there for place in way) for way in ways)
    assert sum(place in there for place in found) == most


# Plans


@dataclass
class Simulated:
    """A card that does what a plan says, and nothing that a real one would refuse."""

    mig: bool
    there: dict[int, tuple[Place, list[int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, drawn: Card) -> Simulated:
        there = {
            one.id: (Place(one.profile, one.placement), list(one.compute.values()))
            for one in drawn.instances
        }
        return cls(drawn.mig, there)

    def take(self, plan: Plan) -> None:
        for step in plan.steps:
            match step:
                case Enable():
                    self.mig = True
                case DestroyCompute(instance, _):
                    self.there[instance][1].pop()
                case Destroy(instance, place):
                    assert self.there.pop(instance) == (place, [])
                case Create(place):
                    assert self.mig
                    number = max(self.there, default=0) + 1
                    self.there[number] = (place, [place.profile.compute])
                    assert legal(tuple(one for one, _ in self.there.values()))
                case Fill(instance, wanted):
                    assert self.there[instance][1] == []
                    self.there[instance][1].append(wanted.compute)

    def card(self) -> Card:
        return card(
            *(
                Instance(number, place.profile, place.placement, dict(enumerate(compute)))
                for number, (place, compute) in self.there.items()
            ),
            mig=self.mig,
        )


@st.composite
def cut_cards(draw: st.DrawFn) -> Card:
    """A card that someone has cut somehow: whole slices, empty ones, and ones cut further."""
    ways = every_way([BY_NAME[name] for name in draw(layouts)[:3]])
    there = draw(st.sampled_from(ways)) if ways else ()
    made = []
    for number, place in enumerate(there, start=1):
        compute = place.profile.compute
        parts = draw(st.sampled_from([[compute], [], [1] * compute]))
        made.append(Instance(number, place.profile, place.placement, dict(enumerate(parts))))
    return card(*made, mig=True) if made else card(mig=draw(st.booleans()))


@given(cut_cards(), layouts)
@settings(max_examples=300, deadline=None)
def test_a_plan_leads_from_any_card_to_its_layout_and_then_to_nothing(
    drawn: Card, names: list[str]
) -> None:
    try:
        plan = plan_of(drawn, names)
    except MigError:
        compute = sum(BY_NAME[name].compute for name in names)
        memory = sum(BY_NAME[name].memory for name in names)
        twice = any(names.count(one.name) > one.most for one in H100)
        assert compute > 7 or memory > 8 or twice or not every_way([BY_NAME[n] for n in names])
        return
    after = Simulated.of(drawn)
    after.take(plan)
    assert after.mig
    assert Counter(place.profile.name for place, _ in after.there.values()) == Counter(names)
    assert all(found == [place.profile.compute] for place, found in after.there.values())
    assert plan_of(after.card(), names).steps == ()


def test_what_stays_is_not_touched() -> None:
    large, small = BY_NAME["3g.40gb"], BY_NAME["1g.10gb"]
    there = card(
        Instance(2, large, Placement(4, 4), {0: 3}),
        Instance(7, small, Placement(1, 1), {0: 1}),
        Instance(8, BY_NAME["2g.20gb"], Placement(2, 2), {0: 1, 1: 1}),
    )
    plan = plan_of(there, parse_layout("3g.40gb+3x1g.10gb"))
    assert [one.id for one in plan.kept] == [2, 7]
    assert [str(step) for step in plan.steps] == [
        "destroy compute instance 0 of GPU instance 8",
        "destroy compute instance 1 of GPU instance 8",
        "destroy GPU instance 8: 2g.20gb at memory slices 2 to 3",
        "create 1g.10gb at memory slice 0: 9984 MB",
        "create 1g.10gb at memory slice 2: 9984 MB",
    ]


# Models


def test_a_model_that_fits_no_slice_is_refused_with_its_sum() -> None:
    why = "weights 38000 MB + KV cache 2000 MB + overhead 3800 MB = 43800 MB"
    with pytest.raises(MigError, match=r"43800 MB: the largest slice for it, 3g.40gb, has 40448"):
        assign([Demand("qwen", 43800, why)], [BY_NAME["3g.40gb"], BY_NAME["1g.10gb"]])


def test_two_models_do_not_share_a_slice() -> None:
    slices = [BY_NAME["3g.40gb"], BY_NAME["1g.10gb"]]
    with pytest.raises(MigError, match=r"second needs 20000 MB: the largest slice left for it, 1g"):
        assign([Demand("first", 30000), Demand("second", 20000)], slices)
    with pytest.raises(MigError, match=r"3 models \(a, b, c\) and 2 slices"):
        assign([Demand(name, 1) for name in "abc"], slices)


@given(st.lists(st.integers(1, 100), max_size=5), st.lists(st.integers(1, 100), max_size=5))
@settings(deadline=None)
def test_models_get_slices_exactly_where_all_can_have_one(
    needs: list[int], sizes: list[int]
) -> None:
    slices = [profile(number, f"s{number}", 1, mb, 1, 1, 0) for number, mb in enumerate(sizes)]
    demands = [Demand(f"m{number}", mb) for number, mb in enumerate(needs)]
    possible = any(
        all(need <= one.memory_mb for need, one in zip(needs, order, strict=False))
        for order in itertools.permutations(slices, min(len(needs), len(slices)))
    ) and len(needs) <= len(slices)
    try:
        found = assign(demands, slices)
    except MigError:
        assert not possible
        return
    assert possible
    assert Counter(demand for demand, _ in found) == Counter(demands)
    assert len({one.id for _, one in found}) == len(demands)
    assert all(demand.needed_mb <= one.memory_mb for demand, one in found)
