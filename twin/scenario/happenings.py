"""What the policy is told from outside, besides requests: made events, with their times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policy.events import (
    CanaryEnded,
    CanaryStarted,
    Forecasted,
    PolicySwitched,
    RolloutRequested,
)
from policy.files import FileError
from policy.parameters import canonical
from twin.forecasts import read_forecasts
from twin.scenario.files import policy_of
from twin.scenario.spec import Canary, CanaryEnd, Forecast, Forecasts, Rollout, Switch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from policy.events import Event
    from policy.parameters import Parameters
    from twin.scenario.spec import Happening
    from twin.world import World

NS = 1_000_000_000


def schedule(world: World, dated: Sequence[tuple[int, Event]]) -> None:
    """Have each event fed at its time, in ns since the start."""
    for at_ns, event in dated:
        world.after(at_ns, lambda _, event=event: world.runner.feed(event))  # type: ignore[misc]


def dated_events(
    happenings: Sequence[Happening], parameters: Parameters, folder: Path, where: str
) -> list[tuple[int, Event]]:
    """(when, what), in order of time.

    Raises:
        FileError: a file of forecasts, or a policy, that cannot be used.
    """
    dated: list[tuple[int, Event]] = []
    policies = _Policies(canonical(parameters), folder, f"{where}: events")
    for happening in sorted(happenings, key=_at_s):
        at_ns = round(_at_s(happening) * NS)
        if isinstance(happening, Rollout):
            dated.append((at_ns, RolloutRequested(happening.model, happening.version)))
        elif isinstance(happening, Forecast):
            dated.append((at_ns, _forecasted(happening)))
        elif isinstance(happening, Forecasts):
            dated += _recorded(folder / happening.file)
        else:
            dated.append((at_ns, policies.event(happening)))
    return sorted(dated, key=lambda entry: entry[0])


class _Policies:
    """Which policy rules, and which is tried beside it, as the happenings go by."""

    def __init__(self, rules: str, folder: Path, where: str) -> None:
        self._rules = rules
        self._candidate = ""
        self._folder = folder
        self._where = where

    def event(self, happening: Switch | Canary | CanaryEnd) -> Event:
        """What the policy is told.

        Raises:
            FileError: the policy cannot be used, or something else is under way.
        """
        rules, candidate = self._rules, self._candidate
        if isinstance(happening, CanaryEnd):
            if not candidate:
                raise FileError(self._where, f"no canary goes on at {happening.at_s} s")
            self._candidate = ""
            self._rules = candidate if happening.keep == "new" else rules
            return CanaryEnded(happening.keep)
        new = canonical(policy_of(happening.policy, self._folder, self._where))
        if candidate and (isinstance(happening, Switch) or new != candidate):
            raise FileError(
                self._where, f"at {happening.at_s} s another canary goes on: end it first"
            )
        if isinstance(happening, Switch):
            self._rules = new
            return PolicySwitched(rules, new)
        self._candidate = new
        return CanaryStarted(rules, new, happening.share_permille, happening.salt)


def _at_s(happening: Happening) -> float:
    return 0.0 if isinstance(happening, Forecasts) else happening.at_s


def _recorded(path: Path) -> list[tuple[int, Event]]:
    try:
        return [(dated.at_ns, dated.forecast) for dated in read_forecasts(path)]
    except OSError as error:
        raise FileError(str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise FileError(str(path), f"holds no recorded forecasts: {error}") from error


def _forecasted(forecast: Forecast) -> Forecasted:
    def whole(values: Sequence[float], factor: int) -> tuple[int, ...]:
        return tuple(round(value * factor) for value in values)

    return Forecasted(
        whole(forecast.horizons_s, NS),
        whole(forecast.requests_p50, 1000),
        whole(forecast.requests_p90, 1000),
        whole(forecast.tokens_p50, 1),
        whole(forecast.tokens_p90, 1),
    )
