"""Parameters of ``policy.limits``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from policy.parameters.section import Section

Rate = Annotated[int, Meta(ge=0, le=100_000)]
Count = Annotated[int, Meta(ge=0, le=1_000_000)]


class Limits(Section, frozen=True, forbid_unknown_fields=True):
    """How many requests of a user, a session and a model go on at once and per second."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    user_per_s: Annotated[
        Rate,
        Meta(
            description="Requests of a user that go on in any second; a person does not ask more"
            " often, a script that does waits its turn. 0: no limit."
        ),
    ] = 5
    session_per_s: Annotated[
        Rate,
        Meta(description="Requests of a session that go on in any second; 0: no limit."),
    ] = 20
    model_per_s: Annotated[
        Rate,
        Meta(
            description="Requests for a model that go on in any second, such as 100; the tiered"
            " queue paces models by their replicas' room, so by default 0: no limit."
        ),
    ] = 0
    user_in_flight_most: Annotated[
        Count, Meta(description="Requests of a user in flight at once; 0: no limit.")
    ] = 0
    session_in_flight_most: Annotated[
        Count,
        Meta(
            description="Requests of a session in flight at once, in order of arrival; with 1 a"
            " turn always knows the answer before it. 0: no limit."
        ),
    ] = 1
    model_in_flight_most: Annotated[
        Count, Meta(description="Requests for a model in flight at once; 0: no limit.")
    ] = 0
    global_in_flight_most: Annotated[
        Count,
        Meta(
            description="Requests in flight at once, whoever they are from; with order arrival and"
            " everything else 0 this is the plain concurrency limit. 0: no limit."
        ),
    ] = 0
    order: Annotated[
        Literal["least_served", "arrival"],
        Meta(
            description="Who goes first where users wait for the same room. least_served: whose"
            " requests and tokens of late, fading, were fewest; arrival: first come, first served."
        ),
    ] = "least_served"
    half_life_s: Annotated[
        int,
        Meta(ge=1, le=86_400, description="s in which what a user was given counts half as much."),
    ] = 60
    request_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Tokens of service that a request counts as it goes on, beside what it then"
            " uses: a burst counts before its first answer is there.",
        ),
    ] = 500
    parked_max: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Requests waiting for a limit at most."),
    ] = 10_000
    open_max: Annotated[
        int,
        Meta(ge=1, le=10_000_000, description="Requests waiting or in flight at most."),
    ] = 100_000
    keys_max: Annotated[
        int,
        Meta(
            ge=2,
            le=20_000_000,
            description="Users, sessions and models remembered, each; above it one with nothing"
            " open is forgotten, so it must exceed open_max.",
        ),
    ] = 200_000

    def __post_init__(self) -> None:
        if self.keys_max <= self.open_max:
            raise ValueError(
                f"keys_max is {self.keys_max}, not above open_max, {self.open_max}: every open"
                " request may have a user, session and model of its own"
            )
