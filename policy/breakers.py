"""Circuit breakers: what keeps failing is left alone for a while, then tried by a few.

                 a trigger                     its time is over
    closed ------------------> open -----------------------------> half-open
       ^                         ^                                     |
       |                         +---- a probe failed: twice as long --+
       +----- enough probes succeeded, or nobody came for a window ----+

A breaker belongs to one rule of the policy file and one key: the model, its version, the business
line, the error kind, or any of them together; or a replica. An outcome is a success, a failure, or
neutral; an error of a kind that the rule does not list is neutral to it, and so are a cancelled
request, a caller's own error, and backpressure. Neutral outcomes change no state, but free a
probe's slot.
While a breaker is not closed only its probes count: other answers were asked for before it opened.
A closed one begins with an empty window, and opening it is a new incident with the first wait.

A replica's breaker does not block callers: whoever asks ``doubt`` of a replica keeps requests from
it. It counts answers, and opens where they are so much worse than its peers' that chance does not
explain it: what is unsure on all of them is the model. Only the peers can say so, so without them,
or where no more of a pool may be out, it stays closed. Of two answers that a second run finds to
differ the less certain one is bad once more, and so is, where that is not known, the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.decisions import BreakerMoved, BreakerState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.decisions import Decision
    from policy.parameters.breakers import Breakers as Section
    from policy.parameters.breakers import Rule

NS_PER_MS = 1_000_000
SLIDING_PARTS = 30  # of a window that slides; its oldest part leaves as a whole

APART_SQUARED = 12
"""How far a replica's share of bad answers must lie from its peers', in squared standard errors of
the difference: by chance that comes once in 4,000 looks. 9 bad answers
of 11, against 1 of 11, are about this far apart; its callers pay for every look more."""
APART_PERMILLE = 200
"""How far apart they must lie: replicas that get other requests differ by less, and with many
answers even that is no chance."""

Key = tuple[int, str, str, str, int]
"""Index of the rule; model, version and line, empty where the rule is not by them; the replica, or
-1."""
NO_DOUBT, MAY_TRY, DOUBTED = range(3)
"""What a replica's breaker lets in: anything, one request that tries it, nothing."""


class Breaker(msgspec.Struct, array_like=True, gc=False):
    """One breaker and what it has counted. Times are instants; in a state, from its ``now_ns``."""

    key: Key
    part_end_ns: int
    """When the part of the window that counts at present ends."""
    open_ns: int
    """How long it is open, or will be next time."""
    bad: int = 0
    total: int = 0
    past: list[tuple[int, int]] = []
    """(bad, total) of the parts before, oldest first."""
    run: int = 0
    """Failures since the last success."""
    run_began_ns: int = 0
    phase: BreakerState = "closed"
    due_ns: int = 0
    """Open: when it becomes half-open. Half-open: when its oldest probe has failed or, without
    one, when it is closed for want of requests."""
    succeeded: int = 0
    """Probes, since it became half-open."""
    probes: list[tuple[int, int]] = []
    """(request, until when its outcome is waited for), oldest first."""

    def shifted(self, by_ns: int) -> Breaker:
        """The same with a clock that shows ``by_ns`` more."""
        return Breaker(
            self.key,
            self.part_end_ns + by_ns,
            self.open_ns,
            self.bad,
            self.total,
            list(self.past),
            self.run,
            self.run_began_ns + by_ns if self.run else 0,
            self.phase,
            self.due_ns + by_ns if self.phase != "closed" else 0,
            self.succeeded,
            [(request, until_ns + by_ns) for request, until_ns in self.probes],
        )


class BreakersState(msgspec.Struct, array_like=True):
    """All breakers in canonical form: in the order of their keys."""

    breakers: list[Breaker]


class _Rule:
    """A rule as it is applied, times in ns. One by kind is as many rules as it has kinds."""

    __slots__ = (
        "by_line", "by_model", "by_replica", "by_version", "consecutive", "consecutive_ns",
        "doubtful_below", "failures", "index", "kind", "kinds", "name", "open_most_ns", "open_ns",
        "part_ns", "parts_kept", "probe_wait_ns", "probes_most", "share_permille", "slides",
        "successes_least", "volume", "window_ns",
    )  # fmt: skip

    def __init__(self, index: int, rule: Rule, kind: str) -> None:
        self.index = index
        self.name = rule.name
        self.kind = kind
        self.kinds = frozenset((kind,) if kind else rule.kinds)
        self.by_model = "model" in rule.by
        self.by_version = "version" in rule.by
        self.by_line = "line" in rule.by
        self.by_replica = "replica" in rule.by
        self.doubtful_below = rule.low_confidence_below_permille
        self.slides = rule.windows_least == 1
        self.window_ns = rule.window_ms * NS_PER_MS
        self.part_ns = self.window_ns // SLIDING_PARTS if self.slides else self.window_ns
        self.parts_kept = SLIDING_PARTS - 1 if self.slides else rule.windows_least
        self.share_permille = rule.share_permille
        self.volume = rule.volume_least
        self.failures = rule.failures_least
        self.consecutive = rule.consecutive_least
        self.consecutive_ns = rule.consecutive_ms * NS_PER_MS
        self.probes_most = 1 if self.by_replica else rule.probes_most
        self.successes_least = rule.successes_least
        self.probe_wait_ns = rule.probe_wait_ms * NS_PER_MS
        self.open_ns = rule.open_ms * NS_PER_MS
        self.open_most_ns = rule.open_most_ms * NS_PER_MS

    def key(self, model: str, version: str, line: str) -> Key:
        return (
            self.index,
            model if self.by_model else "",
            version if self.by_version else "",
            line if self.by_line else "",
            -1,
        )

    def label(self, key: Key) -> str:
        """The key, as decisions name it."""
        text = self.name
        if self.by_model:
            text += f" model={key[1]}"
        if self.by_version:
            text += f" version={key[2]}"
        if self.by_line:
            text += f" line={key[3]}"
        if self.by_replica:
            text += f" replica={key[4]}"
        return f"{text} kind={self.kind}" if self.kind else text

    def reached(self, bad: int, total: int) -> bool:
        """Is the share of failures so large, among enough, that it counts?"""
        return (
            total >= self.volume
            and bad >= self.failures
            and bad * 1000 >= total * self.share_permille > 0
        )


Concerned = tuple[tuple[Breaker, ...], tuple[Breaker, ...]]
"""The breakers of one model, version and line: of rules without, and with, a confidence."""


class Breakers:
    """All breakers of a policy."""

    __slots__ = (
        "_concerned", "_doubt", "_due_ns", "_keys_max", "_kinds", "_not_closed", "_open_max",
        "_probing", "_rules", "_tables", "_trying", "doubted", "peers_of",
    )  # fmt: skip

    def __init__(self, section: Section) -> None:
        rules: list[_Rule] = []
        for rule in section.rules:
            for kind in rule.kinds if "kind" in rule.by else ("",):
                rules.append(_Rule(len(rules), rule, kind))
        self._rules = rules
        self._doubt = next((rule for rule in rules if rule.by_replica), None)
        self.peers_of: Callable[[int], Sequence[int] | None] = lambda replica: None
        """The other replicas of its pool; None: it may not be taken out."""
        self.doubted: dict[int, Breaker] = {}
        """Replicas whose breaker is not closed."""
        self._trying: dict[int, Breaker] = {}
        """The breaker of the replica that a request tries."""
        self._kinds = frozenset([kind for rule in rules for kind in rule.kinds])
        self._keys_max = section.keys_max
        self._open_max = section.keys_max // 2
        self._tables: list[dict[Key, Breaker]] = [{} for _ in rules]
        self._not_closed: dict[Key, Breaker] = {}
        self._probing: dict[int, list[Breaker]] = {}
        """The breakers that a request tries."""
        self._concerned: dict[tuple[str, str, str], Concerned] = {}
        """Found before; forgotten as a whole when any of the breakers is."""
        self._due_ns: int | None = None

    # Requests

    def gate(self, now_ns: int, request: int, model: str, version: str, line: str) -> str | None:
        """None: the request goes on, perhaps as a probe, and must be observed in the end. Else the
        key of the breaker that blocks it."""
        if not self._not_closed or request in self._probing:
            return None
        plain, doubting = self._concerned_by(now_ns, model, version, line)
        tried = [breaker for breaker in plain + doubting if breaker.phase != "closed"]
        for breaker in tried:
            rule = self._rules[breaker.key[0]]
            if breaker.phase == "open" or len(breaker.probes) >= rule.probes_most:
                return rule.label(breaker.key)
        for breaker in tried:  # all let it through: only now does it take their slots
            breaker.probes.append((request, now_ns + self._rules[breaker.key[0]].probe_wait_ns))
            self._wait(now_ns, breaker)
        if tried:
            self._probing[request] = tried
        return None

    def observe(
        self,
        now_ns: int,
        request: int,
        model: str,
        version: str,
        line: str,
        kind: str,
        confidence_permille: int,
    ) -> Sequence[Decision]:
        """A request is over. ``kind`` is empty for an answer, an error's kind, "mismatch" for an
        answer that a second run did not confirm; anything else, such as "neutral", is neutral."""
        if kind and kind not in self._kinds:  # neutral to all: it leaves no key behind
            return self._probe_over(now_ns, request, kind, -1) if self._probing else ()
        found = self._concerned.get((model, version, line))
        if found is None:
            found = self._concerned_by(now_ns, model, version, line)
        moved: tuple[Decision, ...] = ()
        if not kind:
            for breaker in found[0]:
                if now_ns >= breaker.part_end_ns:
                    moved += self._next_part(now_ns, breaker)
                breaker.total += 1
                breaker.run = 0
        else:
            for breaker in found[0]:
                if kind in self._rules[breaker.key[0]].kinds:
                    moved += self._counted(now_ns, breaker, True)
        if kind or confidence_permille >= 0:
            for breaker in found[1]:
                bad = self._verdict(breaker, kind, confidence_permille)
                if bad is not None:
                    moved += self._counted(now_ns, breaker, bad)
        if self._probing:
            moved += self._probe_over(now_ns, request, kind, confidence_permille)
        return moved

    # Replicas

    def doubt(self, replica: int) -> int:
        """NO_DOUBT, MAY_TRY or DOUBTED."""
        breaker = self.doubted.get(replica)
        if breaker is None:
            return NO_DOUBT
        return DOUBTED if breaker.phase == "open" or breaker.probes else MAY_TRY

    def tried(self, request: int) -> int:
        """The replica of which its answer says whether it can be trusted again; -1: none."""
        breaker = self._trying.get(request)
        return -1 if breaker is None else breaker.key[4]

    def sent(self, now_ns: int, request: int, replica: int) -> None:
        """It goes to a replica that ``MAY_TRY``: ``answered`` must be called in the end."""
        breaker = self.doubted[replica]
        breaker.probes.append((request, now_ns + self._rules[breaker.key[0]].probe_wait_ns))
        self._trying[request] = breaker
        self._wait(now_ns, breaker)

    def answered(
        self, now_ns: int, request: int, replica: int, bad: bool | None
    ) -> Sequence[Decision]:
        """An answer of the replica was good, bad, or (None) says nothing."""
        rule = self._doubt
        if rule is None:
            return ()
        breaker = self._trying.get(request)
        if breaker is not None and breaker.key[4] == replica:
            del self._trying[request]
            breaker.probes.clear()
            return self._judged(now_ns, breaker, bad)
        if bad is None or replica in self.doubted:
            return ()
        return self._counted(
            now_ns, self._known(now_ns, rule, (rule.index, "", "", "", replica)), bad
        )

    def low(self, score: int) -> bool | None:
        """Is an answer with this score bad by itself? None: scores play no part."""
        rule = self._doubt
        if rule is None or not rule.doubtful_below:
            return None
        return score < rule.doubtful_below

    def renewed(self, now_ns: int, replica: int) -> Sequence[Decision]:
        """It came up anew: nothing that was counted is about what it has loaded now."""
        rule = self._doubt
        breaker = None
        if rule is not None:
            breaker = self._tables[rule.index].pop((rule.index, "", "", "", replica), None)
        if breaker is None or breaker.phase == "closed":
            return ()
        return (self._close(now_ns, breaker, "renewed"),)

    def _stands_out(self, now_ns: int, breaker: Breaker) -> bool:
        """Is the replica's share of bad answers above its peers', and that not by chance?"""
        rule = self._rules[breaker.key[0]]
        table = self._tables[rule.index]
        bad, total = _summed(breaker)
        others = others_bad = 0
        for replica in self.peers_of(breaker.key[4]) or ():
            peer = table.get((rule.index, "", "", "", replica))
            if peer is None or peer.phase != "closed":
                continue
            if rule.slides and now_ns >= peer.part_end_ns:
                self._next_part(now_ns, peer)
            peer_bad, peer_total = _summed(peer)
            others_bad += peer_bad
            others += peer_total
        apart = bad * others - others_bad * total
        all_bad, count = bad + others_bad, total + others
        if not others or apart * 1000 < APART_PERMILLE * total * others or all_bad == count:
            return False
        return apart * apart * count >= APART_SQUARED * total * others * all_bad * (count - all_bad)

    def disown(self, now_ns: int) -> None:
        """Probes under way are another policy's to judge."""
        for breaker in self._not_closed.values():
            if breaker.probes:
                self._release_probes(breaker)
                self._wait(now_ns, breaker)

    def open_keys(self) -> Sequence[str]:
        """The keys of the breakers that are not closed, by rule and key."""
        return [self._rules[key[0]].label(key) for key in sorted(self._not_closed)]

    def replica_of(self, label: str) -> int:
        """The replica that the breaker of this label is about; -1: it is about callers."""
        rule = self._doubt
        if rule is None or not label.startswith(f"{rule.name} replica="):
            return -1
        return int(label.rpartition("=")[2])

    def about(self, label: str) -> tuple[str, str]:
        """The model and the version that the breaker of this label, which is not closed, is about;
        empty where it is not by them."""
        for key in self._not_closed:
            if self._rules[key[0]].label(key) == label:
                return key[1], key[2]
        return "", ""

    def _verdict(self, breaker: Breaker, kind: str, confidence_permille: int) -> bool | None:
        """Was it a failure, to this breaker? None: neutral."""
        rule = self._rules[breaker.key[0]]
        if kind:
            return True if kind in rule.kinds else None
        if not rule.doubtful_below:
            return False
        return confidence_permille < rule.doubtful_below if confidence_permille >= 0 else None

    def forgive(self, now_ns: int, model: str) -> Sequence[Decision]:
        """Another version of the model serves from now on: what is counted of the model, and not
        by version, says nothing about it."""
        moved: tuple[Decision, ...] = ()
        for table in self._tables:
            for key in sorted(table):
                if key[1] != model or key[2] or key[4] >= 0:
                    continue
                breaker = table[key]
                if breaker.phase != "closed":
                    moved += (self._close(now_ns, breaker, "rollback"),)
                breaker.bad = breaker.total = breaker.run = 0
                breaker.past.clear()
        return moved

    # Closed: counting

    def _counted(self, now_ns: int, breaker: Breaker, bad: bool) -> tuple[Decision, ...]:
        moved: tuple[Decision, ...] = ()
        if now_ns >= breaker.part_end_ns:
            moved = self._next_part(now_ns, breaker)
        if breaker.phase != "closed":
            return moved
        breaker.total += 1
        if not bad:
            breaker.run = 0
            return moved
        breaker.bad += 1
        if not breaker.run:
            breaker.run_began_ns = now_ns
        breaker.run += 1
        rule = self._rules[breaker.key[0]]
        if (
            rule.consecutive
            and breaker.run >= rule.consecutive
            and now_ns - breaker.run_began_ns >= rule.consecutive_ns
        ):
            return self._open(now_ns, breaker, "consecutive", breaker.run, breaker.run)
        if rule.slides:
            window_bad, total = _summed(breaker)
            if rule.reached(window_bad, total):
                return self._open(now_ns, breaker, "share", window_bad, total)
        return moved

    def _next_part(self, now_ns: int, breaker: Breaker) -> tuple[Decision, ...]:
        """The part of the window that counted is over: the next one begins, with the clock at
        ``now_ns``. With whole windows in a row to judge by, this is when they are judged."""
        rule = self._rules[breaker.key[0]]
        skipped = (now_ns - breaker.part_end_ns) // rule.part_ns
        past = breaker.past
        past.append((breaker.bad, breaker.total))
        past += [(0, 0)] * min(skipped, rule.parts_kept)
        del past[: -rule.parts_kept]
        breaker.part_end_ns += (skipped + 1) * rule.part_ns
        breaker.bad = breaker.total = 0
        if rule.slides or breaker.phase != "closed" or len(past) < rule.parts_kept:
            return ()
        if all(rule.reached(bad, total) for bad, total in past):
            return self._open(now_ns, breaker, "share", *_summed(breaker))
        return ()

    # Moves

    def _open(
        self, now_ns: int, breaker: Breaker, why: str, bad: int, total: int
    ) -> tuple[Decision, ...]:
        key = breaker.key
        rule = self._rules[key[0]]
        if breaker.phase == "closed":
            if len(self._not_closed) >= self._open_max:
                return ()
            if rule.by_replica:
                if not self._stands_out(now_ns, breaker):
                    return ()
                self.doubted[key[4]] = breaker
            self._not_closed[key] = breaker
        open_ns = breaker.open_ns
        breaker.open_ns = min(2 * open_ns, rule.open_most_ns)
        breaker.phase = "open"
        breaker.due_ns = now_ns + open_ns
        self._release_probes(breaker)
        self._arm()
        return (BreakerMoved(rule.label(key), "open", why, bad, total, open_ns),)

    def _half_open(self, now_ns: int, breaker: Breaker) -> BreakerMoved:
        breaker.phase = "half_open"
        breaker.succeeded = 0
        self._wait(now_ns, breaker)
        return BreakerMoved(self._rules[breaker.key[0]].label(breaker.key), "half_open", "time")

    def _close(self, now_ns: int, breaker: Breaker, why: str) -> BreakerMoved:
        rule = self._rules[breaker.key[0]]
        total = breaker.succeeded
        self._release_probes(breaker)
        del self._not_closed[breaker.key]
        breaker.phase = "closed"
        if not rule.by_replica or why != "quiet":
            breaker.open_ns = rule.open_ns  # else nobody has tried it: its wait still doubles
        self.doubted.pop(breaker.key[4], None)
        breaker.part_end_ns = now_ns + rule.part_ns
        breaker.bad = breaker.total = breaker.run = breaker.succeeded = 0
        breaker.past.clear()
        self._arm()
        return BreakerMoved(rule.label(breaker.key), "closed", why, 0, total)

    # Half-open: probes

    def _probe_over(
        self, now_ns: int, request: int, kind: str, confidence_permille: int
    ) -> tuple[Decision, ...]:
        moved: tuple[Decision, ...] = ()
        for breaker in self._probing.pop(request, ()):
            breaker.probes = [probe for probe in breaker.probes if probe[0] != request]
            bad = self._verdict(breaker, kind, confidence_permille)
            moved += self._judged(now_ns, breaker, bad)
        return moved

    def _judged(self, now_ns: int, breaker: Breaker, bad: bool | None) -> tuple[Decision, ...]:
        """A probe was a failure or not; None: neutral."""
        if bad:
            return self._open(now_ns, breaker, "probe", 1, breaker.succeeded + 1)
        if bad is not None:
            breaker.succeeded += 1
            if breaker.succeeded >= self._rules[breaker.key[0]].successes_least:
                return (self._close(now_ns, breaker, "probe"),)
        self._wait(now_ns, breaker)
        return ()

    def _release_probes(self, breaker: Breaker) -> None:
        for request, _ in breaker.probes:
            if breaker.key[4] >= 0:
                del self._trying[request]
                continue
            others = [other for other in self._probing[request] if other is not breaker]
            if others:
                self._probing[request] = others
            else:
                del self._probing[request]
        breaker.probes = []

    def _wait(self, now_ns: int, breaker: Breaker) -> None:
        """For the oldest probe's outcome or, without one, for a request."""
        if breaker.probes:
            breaker.due_ns = breaker.probes[0][1]
        else:  # after a quiet window nothing is left to hold against it
            breaker.due_ns = now_ns + self._rules[breaker.key[0]].window_ns
        self._arm()

    # Time

    def deadline_ns(self) -> int | None:
        return self._due_ns

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        if self._due_ns is None or now_ns < self._due_ns:
            return ()
        moved: tuple[Decision, ...] = ()
        for key in sorted(self._not_closed):
            breaker = self._not_closed[key]
            if now_ns < breaker.due_ns:
                continue
            if breaker.phase == "open":
                moved += (self._half_open(now_ns, breaker),)
            elif breaker.probes:
                moved += self._open(now_ns, breaker, "probe", 1, breaker.succeeded + 1)
            else:
                moved += (self._close(now_ns, breaker, "quiet"),)
        return moved

    def _arm(self) -> None:
        dues = [breaker.due_ns for breaker in self._not_closed.values()]
        self._due_ns = min(dues) if dues else None

    # Keys

    def _concerned_by(self, now_ns: int, model: str, version: str, line: str) -> Concerned:
        """The breakers of this key of each rule, made where they are not known."""
        found = self._concerned.get((model, version, line))
        if found is None:
            plain: list[Breaker] = []
            doubting: list[Breaker] = []
            for rule in self._rules:
                if rule.by_replica:
                    continue
                known = self._known(now_ns, rule, rule.key(model, version, line))
                (doubting if rule.doubtful_below else plain).append(known)
            if len(self._concerned) >= self._keys_max:
                self._concerned.clear()
            found = self._concerned[model, version, line] = (tuple(plain), tuple(doubting))
        return found

    def _known(self, now_ns: int, rule: _Rule, key: Key) -> Breaker:
        table = self._tables[rule.index]
        breaker = table.get(key)
        if breaker is None:
            if len(table) >= self._keys_max:
                self._make_room(now_ns, table)
            breaker = table[key] = Breaker(key, now_ns + rule.part_ns, rule.open_ns)
        return breaker

    def _make_room(self, now_ns: int, table: dict[Key, Breaker]) -> None:
        """Forget half of the closed breakers: the quiet ones first, then the least used, so that
        invented keys do not drive out those in use."""
        closed = [
            (breaker.part_end_ns > now_ns, _summed(breaker)[1], key)
            for key, breaker in table.items()
            if breaker.phase == "closed"
        ]
        closed.sort()
        for _, _, key in closed[: (len(closed) + 1) // 2]:
            del table[key]
        self._concerned.clear()

    # Memory

    def state(self, now_ns: int) -> BreakersState:
        return BreakersState(
            [table[key].shifted(-now_ns) for table in self._tables for key in sorted(table)]
        )

    def load(self, state: BreakersState, now_ns: int) -> None:
        self._tables = [{} for _ in self._rules]
        self._not_closed = {}
        self._probing = {}
        self._concerned = {}
        self.doubted = {}
        self._trying = {}
        for kept in state.breakers:
            breaker = kept.shifted(now_ns)
            self._tables[breaker.key[0]][breaker.key] = breaker
            replica = breaker.key[4]
            if breaker.phase != "closed":
                self._not_closed[breaker.key] = breaker
                if replica >= 0:
                    self.doubted[replica] = breaker
            if replica >= 0:
                self._trying.update((request, breaker) for request, _ in breaker.probes)
                continue
            for request, _ in breaker.probes:
                self._probing.setdefault(request, []).append(breaker)
        self._arm()

    def size(self) -> int:
        """Breakers and probes under way."""
        return sum([len(table) for table in self._tables]) + sum(
            [len(breaker.probes) for breaker in self._not_closed.values()]
        )

    def size_most(self) -> int:
        probes_most = max([rule.probes_most for rule in self._rules], default=0)
        return len(self._rules) * self._keys_max + self._open_max * probes_most


def _summed(breaker: Breaker) -> tuple[int, int]:
    """(bad, total) of the window."""
    bad = breaker.bad + sum([part[0] for part in breaker.past])
    return bad, breaker.total + sum([part[1] for part in breaker.past])
