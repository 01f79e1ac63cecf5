"""A small LSTM with quantile heads, one for all series, on the logarithm of value over last value.

Trained on the pinball loss of the rates themselves, each series in units of the error that its last
value makes: what counts in the end is a share of that, and not of the logarithm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import nn

from policy.forecast.contract import QUANTILES
from policy.forecast.features import PAST, STEP_FEATURES, look
from policy.forecast.learned import LOG_MOST, Learned
from policy.forecast.series import TARGETS, filled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.forecast.contract import Ints
    from policy.forecast.features import View
    from policy.forecast.series import Array, Series

# So small a net gains nothing from more threads, which would spin beside a gateway.
torch.set_num_threads(1)

BATCH = 256
STILL = 0.02
SPREADS = 4.0


class Net(nn.Module):
    """From what is seen at a window to quantiles of the logarithm, in units of recent moves."""

    def __init__(self, step_features: int, state_features: int, hidden: int, horizons: int) -> None:
        super().__init__()
        self.shape = (len(TARGETS), horizons, len(QUANTILES))
        self.past = nn.LSTM(step_features, hidden, batch_first=True)
        self.mix = nn.Sequential(
            nn.Linear(hidden + state_features, 2 * hidden), nn.SiLU(), nn.Dropout(0.1),
        )  # fmt: skip
        self.heads = nn.Linear(2 * hidden, int(np.prod(self.shape)))
        with torch.no_grad():
            self.heads.weight.mul_(0.1)

    def forward(self, steps: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.past(steps)
        mixed = self.mix(torch.cat((hidden[0], state), dim=1))
        raw = self.heads(mixed).view(-1, *self.shape)
        median = QUANTILES.index(0.5)
        middle = raw[..., median : median + 1]
        gaps = nn.functional.softplus(raw)  # so that quantiles do not cross
        below = middle - torch.flip(torch.cumsum(torch.flip(gaps[..., :median], [-1]), -1), [-1])
        above = middle + torch.cumsum(gaps[..., median + 1 :], -1)
        return torch.cat((below, middle, above), dim=-1)


@dataclass(frozen=True)
class _Samples:
    steps: torch.Tensor
    state: torch.Tensor
    last: torch.Tensor
    floor: torch.Tensor
    move: torch.Tensor
    truth: torch.Tensor
    """[sample, target, horizon]; NaN where nothing is known."""
    unit: torch.Tensor
    """[sample, target, horizon]: the mean error of the last value in that series."""

    def __len__(self) -> int:
        return len(self.last)

    def take(self, rows: torch.Tensor) -> _Samples:
        return _Samples(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


class Lstm(Learned):
    """See the module.

    Args:
        horizons: windows ahead.
        hidden: units of the LSTM.
        epochs: most passes over the samples; it stops before when the later part of each series is
            not forecast better any more.
        members: networks that differ by their seed; their forecasts are averaged.
        held_out: share of each series, its end, that decides when to stop.
    """

    def __init__(
        self, horizons: Sequence[int] = (1, 2), hidden: int = 32, epochs: int = 25,
        members: int = 2, held_out: float = 0.15, rate: float = 2e-3, decay: float = 1e-3,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.horizons = horizons
        self.hidden = hidden
        self.epochs = epochs
        self.members = members
        self.held_out = held_out
        self.rate = rate
        self.decay = decay
        self.seed = seed

    def fit(self, series: Sequence[Series]) -> Self:
        fitting, checking = [], []
        for each in series:
            last = len(each) - max(self.horizons)
            split = int(len(each) * (1 - self.held_out))
            origins = np.arange(min(PAST, last // 2), last)
            units = _units(each, self.horizons, split)
            fitting.append(
                _samples(each, origins[origins < split - max(self.horizons)], self.horizons, units)
            )
            checking.append(_samples(each, origins[origins >= split], self.horizons, units))
        samples, checks = _joined(fitting), _joined(checking)
        self.state_mean_ = samples.state.mean(0)
        spread = samples.state.std(0)
        # What has never differed says nothing: the first time that it does must not count.
        self.state_gain_ = torch.where(spread > STILL, 1 / spread, torch.zeros(()))
        self.nets_ = []
        self.losses_ = []
        for member in range(self.members):
            net, loss = self._train(samples, checks, self.seed + member)
            self.nets_.append(net)
            self.losses_.append(loss)
        return self

    def _train(self, samples: _Samples, checks: _Samples, seed: int) -> tuple[Net, float]:
        torch.manual_seed(seed)
        net = Net(STEP_FEATURES, samples.state.shape[1], self.hidden, len(self.horizons))
        optimiser = torch.optim.AdamW(net.parameters(), lr=self.rate, weight_decay=self.decay)
        batches = -(-len(samples) // BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, max_lr=self.rate, total_steps=self.epochs * batches, pct_start=0.2
        )
        best, kept = float("inf"), {k: v.clone() for k, v in net.state_dict().items()}
        for _ in range(self.epochs):
            net.train()
            for rows in torch.split(torch.randperm(len(samples)), BATCH):
                part = samples.take(rows)
                loss = self._loss(net, part)
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimiser.step()
                schedule.step()
            net.eval()
            with torch.no_grad():
                checked = float(self._loss(net, checks))
            if checked < best:
                best, kept = checked, {k: v.clone() for k, v in net.state_dict().items()}
        net.load_state_dict(kept)
        net.eval()
        return net, best

    def _logs(self, net: Net, part: _Samples) -> torch.Tensor:
        state = ((part.state - self.state_mean_) * self.state_gain_).clamp(-SPREADS, SPREADS)
        logs: torch.Tensor = net(part.steps, state) * part.move[:, None, None, None]
        return logs

    def _loss(self, net: Net, part: _Samples) -> torch.Tensor:
        known = ~torch.isnan(part.truth)
        logs = self._logs(net, part).clamp(-LOG_MOST, LOG_MOST)
        rates = part.last[:, :, None, None] * torch.exp(logs) - part.floor[:, None, None, None]
        error = (part.truth[..., None] - rates.clamp(min=0.0)) / part.unit[..., None]
        error = torch.where(known[..., None], error, torch.zeros(()))
        levels = torch.tensor(QUANTILES)
        pinball = torch.maximum(levels * error, (levels - 1) * error)
        scale = 1 / torch.sqrt(levels * (1 - levels))
        return (pinball * scale).sum() / known.sum()

    def restored(self, take: Callable[[str], Array]) -> Self:
        """As it was when it was saved.

        Args:
            take: gives an array by its name.

        Raises:
            ValueError: an array does not fit.
        """
        self.state_mean_ = torch.from_numpy(take("lstm/state_mean"))
        self.state_gain_ = torch.from_numpy(take("lstm/state_gain"))
        self.nets_, self.losses_ = [], []
        for number in range(self.members):
            net = Net(STEP_FEATURES, len(self.state_mean_), self.hidden, len(self.horizons))
            names = list(net.state_dict())
            arrays = {name: torch.from_numpy(take(f"lstm/net{number}/{name}")) for name in names}
            try:
                net.load_state_dict(arrays)
            except RuntimeError as error:
                raise ValueError(f"network {number} does not fit: {error}") from error
            net.eval()
            self.nets_.append(net)
        return self

    def logs(self, view: View) -> Array:
        """See ``Learned``."""
        part = _seen(view)
        with torch.no_grad():
            logs = torch.stack([self._logs(net, part) for net in self.nets_]).mean(0)
        result: Array = logs.numpy().astype(np.float64)
        return result


def _units(series: Series, horizons: Sequence[int], until: int) -> Array:
    """[target, horizon]: mean absolute error of the last value."""
    found = np.ones((len(TARGETS), len(horizons)))
    for row, target in enumerate(TARGETS):
        if target == "peak" and not len(series.peak):
            continue
        values = series.of(target)[:until]
        last = filled(values)
        for column, horizon in enumerate(horizons):
            found[row, column] = np.nanmean(np.abs(values[horizon:] - last[:-horizon])) + 1e-9
    return found


def _seen(view: View, truth: Array | None = None, unit: Array | None = None) -> _Samples:
    def tensor(values: Array | None) -> torch.Tensor:
        return torch.tensor([] if values is None else values, dtype=torch.float32)

    return _Samples(
        tensor(view.steps), tensor(view.state), tensor(view.last), tensor(view.floor),
        tensor(view.move), tensor(truth), tensor(unit),
    )  # fmt: skip


def _samples(series: Series, origins: Ints, horizons: Sequence[int], units: Array) -> _Samples:
    truth = np.full((len(origins), len(TARGETS), len(horizons)), np.nan)
    for row, target in enumerate(TARGETS):
        if target == "peak" and not len(series.peak):
            continue
        values = series.of(target)
        for column, horizon in enumerate(horizons):
            truth[:, row, column] = values[origins + horizon]
    unit = np.broadcast_to(units, truth.shape)
    return _seen(look(series, origins, horizons), truth, np.array(unit))


def _joined(parts: list[_Samples]) -> _Samples:
    names = _Samples.__dataclass_fields__
    return _Samples(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
