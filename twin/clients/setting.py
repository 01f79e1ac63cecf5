"""What all clients of a run share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from traces.generate.lengths import Law, NonNegative  # noqa: TC001 - msgspec reads them
from twin.clients.sender import Retries
from twin.dice import Dice

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from twin.arrivals import Asked
    from twin.world import Result, World

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=40)]


class Client(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every kind of client says about itself."""

    name: Name
    """In the figures, and in the ids of its users, sessions and chains."""
    model: str = ""
    line: str = ""
    sla: Literal["", "P0", "P1", "P2"] = ""
    deadline_s: NonNegative = 0.0
    """To first token; 0: the class default."""
    max_output_tokens: Annotated[int, Meta(ge=0)] = 0
    """What it asks for at most; 0: nothing said."""
    stream: bool = True
    retries: Retries = msgspec.field(default_factory=Retries)
    patience_s: Law | None = None
    """After this long without the whole answer it goes away."""

    def fields(self) -> dict[str, Any]:
        """Of each of its requests, as ``Asked`` names them."""
        return {
            "model": self.model,
            "line": self.line,
            "sla": self.sla,
            "deadline_ns": round(self.deadline_s * 1e9),
            "max_tokens": self.max_output_tokens,
            "stream": self.stream,
        }


@dataclass(frozen=True, slots=True)
class Setting:
    """Where clients live."""

    world: World
    seed: int
    end_ns: int
    """Nothing new is begun from here on; what is under way comes to its end."""
    gather: Callable[[Asked, Result], None]
    """Told of every settled request."""

    def dice(self, *names: str) -> Dice:
        return Dice(self.seed, *names)
