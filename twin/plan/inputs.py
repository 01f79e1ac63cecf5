"""What a plan is asked for: the file of service levels, and the file of prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from policy.files import FileError, decode, load_gpus, nearest, read_document
from policy.tiers import NAMES as TIER_NAMES
from traces.schema import SLA_CLASSES
from twin.summary import Slo

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from policy.cost import Gpu

Positive = Annotated[float, Meta(gt=0, le=1e6)]
Percent = Annotated[float, Meta(gt=0, le=100)]
Kind = Literal["class", "tier", "line"]
ALL = ""
"""The class of requests that name none; in the file it is called ``other``."""
MISSED = {"ttft_s_p95": 0.05, "ttft_s_p99": 0.01}
"""Share of requests that may be slower than a promised quantile."""


class PlanError(ValueError):
    """A plan that cannot be made: what is wrong, with the value, and what to do."""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one group of requests is promised."""

    ttft_s_p95: Positive | None = None
    """Of all requests offered, this many seconds to the first token for 95 %; one that is turned
    away counts as without end."""
    ttft_s_p99: Positive | None = None
    """The same for 99 %."""
    attainment_percent: Percent | None = None
    """Least share of requests offered that get a good answer."""
    good_ttft_s: Positive | None = None
    """Of a class: the longest wait for the first token of a good answer, where a request has no
    deadline of its own."""


class SloFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Service levels, ``schema: 1``."""

    schema: Literal[1]
    confidence_percent: Annotated[float, Meta(ge=50, le=99)] = 90.0
    """How sure the plan has to be that another day like this one holds them."""
    tpot_s: Positive = 0.1
    """Seconds per token after the first, of a good answer."""
    classes: dict[str, Target] = {}
    tiers: dict[str, Target] = {}
    lines: dict[str, Target] = {}

    def __post_init__(self) -> None:
        for name, known in ((n, (*SLA_CLASSES, "other")) for n in self.classes):
            if name not in known:
                raise ValueError(f"classes: {name!r} is unknown: use {', '.join(known)}")
        for name in self.tiers:
            if name.lower() not in TIER_NAMES:
                raise ValueError(f"tiers: {name!r} is unknown: use {', '.join(TIER_NAMES)}")
        for section in (self.tiers, self.lines):
            for name, target in section.items():
                if target.good_ttft_s is not None:
                    raise ValueError(f"{name}: good_ttft_s is for classes: what is good is judged "
                                     "by a request's class")  # fmt: skip
        if not list(_needs(self)):
            raise ValueError("nothing is promised: give a class ttft_s_p95 or attainment_percent")


@dataclass(frozen=True, slots=True)
class Need:
    """One promise: of a group's p95 in seconds, or of its least attainment as a share."""

    kind: Kind
    group: str
    what: Literal["ttft_s_p95", "ttft_s_p99", "attainment"]
    limit: float

    @property
    def missed_most(self) -> float:
        """Share of the group's requests that may miss it."""
        return MISSED.get(self.what, 1 - self.limit)

    def text(self) -> str:
        name = self.group.capitalize() if self.kind == "tier" else self.group or "other"
        if self.what == "attainment":
            return f"{name} attainment {self.limit:.1%}"
        return f"{name} {self.what.rpartition('_')[2]} {self.limit:g} s"


@dataclass(frozen=True, slots=True)
class Promise:
    """Service levels as the twin takes them."""

    needs: tuple[Need, ...]
    slo: Slo
    confidence: float

    def text(self) -> str:
        return ", ".join(need.text() for need in self.needs)


def promise_of(file: SloFile) -> Promise:
    """The file's promises; a good answer is judged as in ``twinkeel replay``."""
    ttft_s = dict(Slo().ttft_s)
    for name, target in file.classes.items():
        limit = target.good_ttft_s or target.ttft_s_p95 or target.ttft_s_p99
        if limit is not None:
            ttft_s[_group(name)] = limit
    return Promise(tuple(_needs(file)), Slo(ttft_s, file.tpot_s), file.confidence_percent / 100)


def load_slo(path: Path) -> Promise:
    """Read a file of service levels.

    Raises:
        FileError: it cannot be read, or says something that cannot be.
    """
    raw = read_document(path)
    for section in ("classes", "tiers", "lines"):
        for name, target in _mapping(raw.get(section)):  # one by one: errors name key and value
            decode(target, Target, f"{path}: {section}.{name}", schema=None)
    return promise_of(decode(raw, SloFile, str(path)))


def _mapping(section: object) -> list[tuple[str, dict[str, object]]]:
    """What of it can be looked at by itself; the rest is refused with the whole."""
    if not isinstance(section, dict):
        return []
    return [(str(name), part) for name, part in section.items() if isinstance(part, dict)]


def _needs(file: SloFile) -> Iterator[Need]:
    sections: tuple[tuple[Kind, dict[str, Target]], ...] = (
        ("class", file.classes), ("tier", file.tiers), ("line", file.lines),
    )  # fmt: skip
    for kind, section in sections:
        for name, target in section.items():
            group = _group(name) if kind == "class" else name.lower() if kind == "tier" else name
            if target.ttft_s_p95 is not None:
                yield Need(kind, group, "ttft_s_p95", target.ttft_s_p95)
            if target.ttft_s_p99 is not None:
                yield Need(kind, group, "ttft_s_p99", target.ttft_s_p99)
            if target.attainment_percent is not None:
                yield Need(kind, group, "attainment", target.attainment_percent / 100)


def _group(name: str) -> str:
    return ALL if name == "other" else name


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an hour of a card costs, and who says so."""

    usd_per_hour: Annotated[float, Meta(ge=0, le=1000)]
    source: Annotated[str, Meta(min_length=1)]


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices, ``schema: 1``; a card that is not named keeps the shipped table's price."""

    schema: Literal[1] = 1
    gpus: dict[str, Price] = {}
    hours_per_month: Annotated[float, Meta(gt=0, le=744)] = 730.0
    overflow_usd_per_million_tokens: Annotated[float, Meta(ge=0, le=1e4)] | None = None
    """What someone else takes for a million output tokens, where a burst may go there."""

    def usd_per_hour(self, gpu: Gpu) -> float:
        price = self.gpus.get(gpu.name)
        return gpu.usd_per_hour if price is None else price.usd_per_hour

    def source(self, gpu: Gpu) -> str:
        price = self.gpus.get(gpu.name)
        return gpu.usd_source if price is None else price.source


def load_prices(path: Path | None) -> Prices:
    """Prices from a file, or those that are shipped.

    Raises:
        FileError: the file cannot be read, or names a card that there is not.
    """
    if path is None:
        return Prices()
    raw = read_document(path)
    for name, price in _mapping(raw.get("gpus")):  # one by one: errors name the card and the value
        decode(price, Price, f"{path}: gpus.{name}", schema=None)
    prices = decode(raw, Prices, str(path))
    for name in prices.gpus:
        if name not in load_gpus():
            raise FileError(
                str(path), "unknown card", key=f"gpus.{name}", hint=nearest(name, load_gpus())
            )
    return prices
