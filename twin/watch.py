"""Looking on: samples for the report, and the metrics that the policy is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from policy.events import Scraped

if TYPE_CHECKING:
    import simpy

    from twin.world import World


class Sample(NamedTuple):
    """The fleet at an instant."""

    at_ns: int
    queued: int
    """Requests in the policy's queue."""
    running: int
    waiting: int
    """Requests in the engines' own queues."""
    kv_used_permille: tuple[int, ...]
    """By replica."""
    arrived: int = 0
    """Requests so far."""


def _busyness(sample: Sample) -> int:
    return sample.queued + sample.waiting


class Watch:
    """Samples and scrapes at their intervals, while the world is alive."""

    __slots__ = ("_every_ns", "_world", "samples")

    def __init__(self, world: World) -> None:
        self._world = world
        self._every_ns = world.settings.sample_every_ns
        self.samples: list[Sample] = []

    def begin(self) -> None:
        if self._every_ns:
            self._sample(None)
        if self._world.settings.scrape_every_ns:
            self._world.after(self._world.settings.scrape_every_ns, self._scrape)

    def _sample(self, event: simpy.Event | None) -> None:
        world = self._world
        now_ns = world.now_ns
        running = waiting = 0
        used = []
        for replica in world.replicas:
            load = replica.engine.observe(now_ns)
            running += load.running
            waiting += load.waiting
            used.append(1000 * load.kv_blocks_used // (replica.spec.settings.kv_blocks - 1))
        samples = self.samples
        samples.append(Sample(now_ns, world.queued, running, waiting, tuple(used), world.arrived))
        if len(samples) >= world.settings.samples_max:
            pairs = (samples[at : at + 2] for at in range(0, len(samples), 2))
            samples[:] = [max(pair, key=_busyness) for pair in pairs]
            self._every_ns *= 2
        if world.alive:
            world.after(self._every_ns, self._sample)

    def _scrape(self, event: simpy.Event) -> None:
        world = self._world
        now_ns = world.now_ns
        age_ns = world.settings.scrape_age_ns
        for replica in world.replicas:
            if replica.state != "up" or replica.loses_metrics():
                continue
            load = replica.engine.observe(now_ns)
            used = 1000 * load.kv_blocks_used // (replica.spec.settings.kv_blocks - 1)
            scraped = Scraped(
                replica.id, load.running, load.waiting, used, replica.engine.preemptions, age_ns
            )
            world.after(age_ns, lambda event, scraped=scraped: world.runner.feed(scraped))  # type: ignore[misc]
        if world.alive:
            world.after(world.settings.scrape_every_ns, self._scrape)
