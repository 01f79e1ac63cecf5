"""What a controller is started with. Nothing here changes while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

Port = Annotated[int, Meta(ge=0, le=65_535)]
Seconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]


class Upstream(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One vLLM server (or anything that speaks its API), and what it does not say of itself."""

    url: str
    """Such as ``http://10.0.0.7:8000``; no path."""
    profile: str = ""
    """Name or path of its step-time profile; empty: found by the model that it serves."""
    domain: str = ""
    """What fails together, such as ``host0/card3``; empty: the server alone."""
    labels: tuple[str, ...] = ()
    version: str = ""
    """Of its model; empty: as the server says."""
    max_num_seqs: int = 0
    """0: the profile's; so for the next."""
    max_num_batched_tokens: int = 0
    steps: str = ""
    """File of the step records that its plug-in writes, or their folder, which no other server may
    share, as this machine sees it; empty: as the server says, if that is a path here."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its cards or MIG slice, if they are this machine's: then they are watched."""


class Features(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What edits a request or an answer. With all of them off, bytes pass exactly as they are."""

    usage: bool = True
    """Ask streams for ``usage`` (token counts and the engine's times) and take the event out again
    if the caller did not ask for it."""
    extras: bool = True
    """Put a ``twinkeel`` object into answers, into the last event of a stream."""
    confidence: bool = False
    """Ask for the logprobs that the policy wants for its score, and take them out again."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on what callers may send, and on how slowly."""

    body_bytes_most: int = 8 * 1024 * 1024
    header_bytes_most: int = 16 * 1024
    """Of one header line."""
    header_s_most: Seconds = 10.0
    """Until a new connection's first request has to have its headers there."""
    body_s_most: Seconds = 30.0
    """Until the whole body has to be there."""
    idle_s_most: Seconds = 75.0
    """A kept connection without a request."""
    unread_s_most: Seconds = 60.0
    """A caller that takes nothing of a stream for that long is let go."""
    open_most: int = 50_000
    """Requests open at once; more get 503."""
    comment_s: Seconds = 15.0
    """Silence in a stream after which a comment keeps the connection open."""
    call_s_most: Seconds = 600.0
    """When a call to a replica is given up."""
    whole_s_least: Seconds = 10.0
    """An answer in one piece whose length is bounded is given up sooner: after this, and the next
    for each token; a single one may be lost on a replica that is well. Not with ``observe``."""
    whole_token_s: Seconds = 0.5
    """For each token of ``max_tokens``, and for each kilobyte of the prompt."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A controller."""

    upstreams: tuple[Upstream, ...] = ()
    policy: str = "stable"
    """Name of a preset, or path of a policy file."""
    observe: bool = False
    """Pass everything on, and only decide in shadow."""
    host: str = "127.0.0.1"
    port: Port = 8080
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8081
    admin_token: str = ""
    """Empty: one is made and kept in the data folder, readable by its owner only."""
    data: str = "build/controller"
    """Folder of the decision log, the trace and the database."""
    features: Features = Features()
    limits: Limits = Limits()
    keys: str = ""
    """File of hashed API keys; empty: callers need none."""
    otlp: str = ""
    """OTLP/HTTP endpoint for spans, such as ``http://collector:4318``; empty: no spans."""
    span_share: Share = 0.01
    """Of requests whose caller did not decide it by a ``traceparent``."""
    webhook: str = ""
    """Where alerts are posted; empty: they are only logged and counted."""
    forecast: str = ""
    """Folder of a trained forecaster, whose forecasts the policy is told; empty: it is told
    none."""
    record: bool = True
    """Write a trace of what passes (lengths, times, hashed ids)."""
    scrape_s: Seconds = 5.0
    """How often a server's metrics are read."""
    probe_s: Seconds = 1.0
    """How often a server is asked whether it is there."""
    drain_s: Seconds = 600.0
    """How long open requests may take to finish after SIGTERM."""
    unready_s: Annotated[float, Meta(ge=0.0, le=3600.0)] = 2.0
    """Between ``/ready`` saying no and the end of accepting, after SIGTERM."""
    fleet: str = ""
    """Fleet file: the servers are processes that this controller runs, or pods; then there are no
    ``upstreams``. Empty: there are."""
    redis: str = ""
    """Redis that several controllers share, for limits, sessions and the checkpoints of chains,
    such as ``redis://10.0.0.9:6379/0``; empty: this controller is alone."""
    embeddings: str = ""
    """OpenAI-compatible server of embeddings, by which kept answers to similar questions are found;
    empty: only those to the same question are."""
    embeddings_model: str = ""
    """What it calls its model; empty: the first that it names."""
    answers_s_most: Seconds = 3600.0
    """How long an answer is kept for callers who have to be content with it."""
    answers_mb_most: Annotated[int, Meta(ge=1, le=100_000)] = 64
    sample_share: Share = 0.0
    """Of requests whose texts are kept, redacted; 0: no text ever is."""
    redact: str = ""
    """File with more patterns of what is redacted; empty: the usual ones only."""

    @property
    def data_path(self) -> Path:
        return Path(self.data)
