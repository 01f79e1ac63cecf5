"""One try of a request on one server: send it, pass on what comes, and say what became of it.

A try ends with exactly one event, ``Finished`` or ``Failed``; one that is cancelled (the policy
gave ``Abort``) says nothing any more, and closes its connection: vLLM then drops the request.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp

from controller.call import AS_ASKED, AS_IT_CAME
from controller.gateway import editing
from controller.gateway.answers import ANSWER_BYTES_MOST, gathers
from controller.gateway.asking import prompt_text, sendable
from controller.gateway.streams import CallerGone
from controller.upstream import judge, outgoing, sse
from controller.upstream.sse import BROKEN, DONE, ERROR, FINISH, NOTHING, TEXT, USAGE
from policy.events import Failed, Finished, FirstToken
from policy.signals import Certainty, Said, contradicts

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.call import Call, Logprobs
    from controller.config import Features
    from controller.driver import Driver
    from controller.upstream.replica import Replica
    from policy.decisions import Dispatch
    from policy.events import ErrorKind, ReplicaUp

LOGGER = logging.getLogger("twinkeel")
REFUSALS = (400, 422)
SHORT_TEXTS = 1000
"""Characters of a prompt and its answer that are looked at in place."""


class TryFailed(Exception):
    """The try is over without an answer."""

    def __init__(self, kind: ErrorKind) -> None:
        super().__init__(kind)
        self.kind: ErrorKind = kind


class Second(NamedTuple):
    """What came of a second run."""

    said: Said
    tokens: int
    certainty: Certainty
    contradiction: bool


class Client:
    """Makes tries.

    Args:
        driver: is told what becomes of them.
        features: what is added to requests.
        traceparent: the trace context that goes with a try; empty: none.
        pass_authorization: the caller's ``Authorization`` is the server's, not ours.
    """

    def __init__(
        self,
        driver: Driver,
        features: Features,
        traceparent: Callable[[Call], str],
        pass_authorization: bool,
    ) -> None:
        self._driver = driver
        self._features = features
        self._traceparent = traceparent
        self._pass_authorization = pass_authorization
        self._unscored: dict[int, ReplicaUp | None] = {}
        """Replicas that refuse the logprobs of a score, as they were when they did."""

    async def attempt(self, call: Call, replica: Replica, decision: Dispatch) -> None:
        """Try it, and feed how it ended."""
        driver = self._driver
        request = call.request
        failed: ErrorKind
        try:
            began_ns = driver.now_ns()
            asked = call.asked
            call.wanted = outgoing.logprobs(asked, self._features, decision)
            if self._unscored.get(replica.id) is replica.spec is not None and call.wanted.added:
                call.wanted = AS_ASKED
            body = outgoing.body(asked, self._features, decision, call.wanted)
            headers = self._headers(call)
            call.sent_ns = driver.now_ns()
            call.gateway_ns += call.sent_ns - began_ns
            finished = None
            async with replica.post(asked.path, body, headers) as answer:
                if not (call.wanted.added and answer.status in REFUSALS):
                    finished = await self._taken(call, replica, answer)
                else:
                    self._refused(replica, await answer.read())
            if finished is None:  # perhaps it is only our wish for logprobs that it refuses
                call.wanted = AS_ASKED
                body = outgoing.body(asked, self._features, decision)
                async with replica.post(asked.path, body, headers) as answer:
                    finished = await self._taken(call, replica, answer)
        except TryFailed as error:
            failed = error.kind
        except CallerGone:
            driver.cancel(call)
            return
        except aiohttp.ConnectionTimeoutError:
            failed = "replica_lost"
            await driver.broke(replica)
        except TimeoutError:
            failed = "timeout"
        except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError, OSError) as error:
            cut = call.first_ns >= 0 or isinstance(error, aiohttp.ClientPayloadError)
            failed = "stream_cut" if cut else "replica_lost"
            await driver.broke(replica)
        except aiohttp.ClientError:  # its HTTP cannot be read
            failed = "malformed"
        except Exception:  # whatever a server makes of us, the request must have its outcome
            LOGGER.exception("the answer of %s could not be taken", replica.name)
            failed = "malformed"
        else:
            driver.feed(finished)
            return
        driver.feed(Failed(request, replica.id, failed))

    async def _taken(
        self, call: Call, replica: Replica, answer: aiohttp.ClientResponse
    ) -> Finished:
        streams = answer.status == 200 and answer.content_type == "text/event-stream"
        if streams and call.asked.stream:
            return await _Stream(self._driver, call, replica, call.wanted).run(answer)
        return await self._whole(call, replica, answer)

    def _refused(self, replica: Replica, body: bytes) -> None:
        """Where it says that it is the logprobs, it is not asked for them again."""
        if b"logprobs" in body:
            self._unscored[replica.id] = replica.spec
            said = body[:200].decode(errors="replace")
            LOGGER.warning("%s has no scores, it refuses logprobs: %s", replica.name, said)

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "X-Request-Id": call.name,
        }
        traceparent = self._traceparent(call)
        if traceparent:
            headers["traceparent"] = traceparent
            tracestate = sendable(call.web.headers.get("tracestate"))
            if tracestate:
                headers["tracestate"] = tracestate
        if self._pass_authorization:
            authorization = sendable(call.web.headers.get("Authorization"))
            if authorization:
                headers["Authorization"] = authorization
        return headers

    async def _whole(
        self, call: Call, replica: Replica, answer: aiohttp.ClientResponse
    ) -> Finished:
        """Read an answer that comes in one piece."""
        driver = self._driver
        body = await answer.read()
        call.last_ns = driver.now_ns()
        kind = judge.of_status(answer.status, body)
        if kind is not None:
            if kind == "rejected":
                _rejected(call, answer.status, body)
            raise TryFailed(kind)
        wrong, read = judge.whole(body, call.asked.endpoint)
        if wrong is not None or read is None:
            raise TryFailed(wrong or "malformed")
        usage = read.usage or sse.Usage()
        tokens = sse.bounded(usage.completion_tokens)
        replica.tokens += max(1, tokens)
        certainties = judge.Certainties(call.wanted.candidates)
        if call.wanted.scored:
            certainties, call.said = await judge.measured(read, call.wanted.candidates)
            call.contradiction = await _contradicts(call, judge.text_of(read))
            if call.wanted.shown != AS_IT_CAME:
                body = await editing.whole_with_logprobs(body, call.wanted.shown)
        call.body = body
        call.finish_reason = read.choices[0].finish_reason or "" if read.choices else ""
        call.engine = judge.engine_times(read.metrics)
        call.network_ns = max(replica.network_ns, replica.handling_ns)
        return _finished(call, replica, usage, tokens, certainties)

    async def second(self, call: Call, replica: Replica) -> Second:
        """Run an answered request again, for the same logprobs.

        Raises:
            TryFailed: it came to nothing.
        """
        headers = self._headers(call)
        headers["X-Request-Id"] = f"{call.name}-second"
        body = outgoing.plain_body(call.asked, call.wanted)
        try:
            async with replica.post(call.asked.path, body, headers) as answer:
                data = await answer.read()
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError):
            raise TryFailed("replica_lost") from None
        kind: ErrorKind | None = judge.of_status(status, data)
        wrong, read = (kind, None) if kind else judge.whole(data, call.asked.endpoint)
        if wrong is not None or read is None:
            raise TryFailed(wrong or "malformed")
        tokens = sse.bounded(read.usage.completion_tokens) if read.usage else 0
        replica.tokens += max(1, tokens)
        certainties, said = await judge.measured(read, call.wanted.candidates)
        contradiction = await _contradicts(call, judge.text_of(read))
        return Second(said, tokens, certainties.features(tokens), contradiction)


class _Stream:
    """Passes one stream on, and watches it."""

    __slots__ = (
        "_begun", "_call", "_certainties", "_driver", "_finish", "_held", "_kept", "_raw_left",
        "_replica", "_said", "_simple", "_text", "_usage", "_wanted",
    )  # fmt: skip

    def __init__(self, driver: Driver, call: Call, replica: Replica, wanted: Logprobs) -> None:
        self._driver = driver
        self._call = call
        self._replica = replica
        self._wanted = wanted
        self._held: list[bytes] = []
        """Events before the first token: nothing has been passed on yet."""
        whole = bool(call.asked.chain) or call.sampled
        self._kept: list[bytes] | None = [] if whole else None
        """All events, where the answer becomes a chain's state, or is a sample."""
        self._simple = self._has_one_choice() and not wanted.scored and not whole
        """Nothing of an event in the middle has to be known."""
        call.raw = []
        gathered = gathers(call.asked, driver.parameters, driver.open)
        self._raw_left = ANSWER_BYTES_MOST if gathered else 0
        """Bytes of the stream that may still be gathered."""
        self._said = False
        self._finish = ""
        self._begun: set[int] = set()
        """Choices that have no end yet."""
        self._usage: sse.Usage | None = None
        self._certainties = judge.Certainties(wanted.candidates)
        self._text = judge.Text()

    def _has_one_choice(self) -> bool:
        document = self._call.asked.document
        return document.get("n", 1) == 1 and isinstance(document.get("prompt", ""), str)

    async def run(self, answer: aiohttp.ClientResponse) -> Finished:
        driver, call, replica = self._driver, self._call, self._replica
        splitter = sse.Splitter()
        content = answer.content
        call.tail = []
        # vLLM sends the headers when it has read the request, before its engine sees it.
        call.network_ns = driver.now_ns() - call.sent_ns
        replica.handled(call.network_ns)
        while True:
            data = await content.readany()
            if not data:
                break
            began_ns = driver.now_ns()
            if self._simple and not splitter.rest and self._is_text(data):
                replica.tokens += 1
                call.output_tokens += 1
                call.events_sent += 1
                if self._raw_left > 0:
                    self._gather(data)
                await driver.streams.send(call, data, replica)
                call.last_ns = began_ns
                call.gateway_ns += driver.now_ns() - began_ns
                continue
            out: list[bytes] = []
            done = False
            try:
                for event in splitter.feed(data):
                    done = self._take(event, out)
                    if done:
                        break
            except TryFailed:
                if out and call.first_ns >= 0:  # else nothing was passed on, and nothing will be
                    await driver.streams.send(call, b"".join(out), replica)
                raise
            if self._said and call.first_ns < 0:
                self._first(began_ns)
            if out:
                passed = out[0] if len(out) == 1 else b"".join(out)
                if self._raw_left > 0:
                    self._gather(passed)
                await driver.streams.send(call, passed, replica)
            call.last_ns = began_ns
            call.gateway_ns += driver.now_ns() - began_ns
            if done:
                return await self._end(answer)
        raise TryFailed("stream_cut")

    def _is_text(self, data: bytes) -> bool:
        """Whether it is one whole event with more of the answer, as most reads are: it is passed on
        without being decoded."""
        return (
            self._call.first_ns >= 0
            and not self._call.tail
            and data.startswith(b"data: {")
            and data.endswith(b"}\n\n")
            and b'"finish_reason":null' in data
            and b'"error"' not in data
            and data.count(b"\n\n") == 1
        )

    def _take(self, event: bytes, out: list[bytes]) -> bool:
        """Look at an event and put what is to be passed on into ``out``; was it the end?"""
        call = self._call
        kind, chunk = sse.read(event)
        if self._kept is not None:
            self._kept.append(event)
        if kind == TEXT:
            if call.tail:  # another choice goes on
                self._pass(call.tail, out)
                call.tail = []
            self._replica.tokens += 1
            call.output_tokens += 1
            self._say(out)
            self._begun.update([choice.index for choice in chunk.choices] if chunk else ())
            self._pass([self._looked_at(event, chunk)], out)
            return False
        if kind == NOTHING:
            passed = self._looked_at(event, chunk)  # a token of half a sign has no text
            (call.tail or (out if self._said else self._held)).append(passed)
            return False
        if kind == DONE:
            if not self._finish or self._begun:
                raise TryFailed("stream_cut")
            call.tail.append(event)
            return True
        if kind == BROKEN:
            raise TryFailed("malformed")
        assert chunk is not None
        if kind == ERROR:
            self._error(event, chunk)
        if kind == FINISH:
            self._finished(event, chunk, out)
        if chunk.usage is not None:
            self._usage = chunk.usage
        if chunk.metrics is not None:
            call.engine = judge.engine_times(chunk.metrics)
        if kind == USAGE and not self._hides_usage():
            call.tail.append(event)
        elif kind == USAGE and self._raw_left > 0:
            self._gather(event)
        return False

    def _hides_usage(self) -> bool:
        return self._driver.features.usage and not self._call.asked.wants_usage

    def _finished(self, event: bytes, chunk: sse.Event, out: list[bytes]) -> None:
        """The last event of a choice: held back until the outcome is known."""
        call = self._call
        for choice in chunk.choices:
            if choice.finish_reason:
                self._finish = choice.finish_reason
                self._begun.discard(choice.index)
        if self._finish == "abort":
            raise TryFailed("stream_cut")
        if sse.says_something(chunk):
            call.output_tokens += 1
        elif not self._said and self._finish != "length":
            raise TryFailed("empty")
        self._say(out)
        call.tail.append(self._looked_at(event, chunk))

    def _say(self, out: list[bytes]) -> None:
        """The answer has begun: what was held back goes out from now on."""
        if not self._said:
            self._said = True
            out += self._held
            self._held = []

    def _first(self, now_ns: int) -> None:
        """The first token is there, and all that came with it can be read."""
        call = self._call
        call.first_ns = now_ns
        self._driver.feed(FirstToken(call.request, self._replica.id))
        self._driver.first_token(call)

    def _pass(self, events: list[bytes], out: list[bytes]) -> None:
        self._call.events_sent += len(events)
        out += events

    def _looked_at(self, event: bytes, chunk: sse.Event | None) -> bytes:
        """Its logprobs are gathered, and cut down to what the caller asked for."""
        wanted = self._wanted
        if not wanted.scored or chunk is None:
            return event
        for choice in chunk.choices:
            if not self._certainties.add(choice.logprobs) and sse.has_text(choice):
                self._certainties.missed()
            self._text.add(choice)
        if wanted.shown == AS_IT_CAME:
            return event
        return editing.event_with_logprobs(event, wanted.shown)

    def _error(self, event: bytes, chunk: sse.Event) -> None:
        kind = judge.of_error(chunk.error)
        if kind == "rejected":
            code = chunk.error.get("code", 400)
            _rejected(self._call, code, sse.payload(event))
        raise TryFailed(kind)

    def _gather(self, data: bytes) -> None:
        """What the caller gets of the answer; what is held back comes to it at the end."""
        self._raw_left -= len(data)
        if self._raw_left > 0:
            self._call.raw.append(data)
        else:
            self._call.raw = []

    def _keep(self) -> None:
        if self._kept is not None:
            chat = self._call.asked.endpoint == "chat"
            self._call.kept = editing.as_whole([sse.payload(each) for each in self._kept], chat)

    async def _end(self, answer: aiohttp.ClientResponse) -> Finished:
        """Read what may follow ``[DONE]``, so that the connection can be used again."""
        if not answer.content.at_eof():
            try:
                async with asyncio.timeout(1.0):
                    await answer.content.read()
            except (TimeoutError, aiohttp.ClientError, OSError):
                answer.close()  # it said everything
        usage = self._usage or sse.Usage(0, self._call.output_tokens)
        tokens = sse.bounded(usage.completion_tokens)
        self._keep()
        self._call.finish_reason = self._finish
        if self._wanted.scored:
            self._call.contradiction = await _contradicts(self._call, self._text.so_far())
        return _finished(self._call, self._replica, usage, tokens, self._certainties)


def _finished(
    call: Call,
    replica: Replica,
    usage: sse.Usage,
    tokens: int,
    certainties: judge.Certainties,
) -> Finished:
    """The event, and what the call keeps of it."""
    prompt_tokens = sse.bounded(usage.prompt_tokens)
    call.prompt_tokens = prompt_tokens
    call.cached_tokens = usage.cached_tokens
    call.output_tokens = tokens
    mean, worst, close = certainties.features(tokens)
    return Finished(
        call.request, replica.id, prompt_tokens, usage.cached_tokens, tokens, mean, worst, close,
        call.contradiction,
    )  # fmt: skip


async def _contradicts(call: Call, answer: str) -> bool:
    """Long texts take some 10 ms, which nobody else is to wait for."""
    prompt = prompt_text(call.asked)
    if len(prompt) + len(answer) <= SHORT_TEXTS:
        return contradicts(prompt, answer)
    return await asyncio.to_thread(contradicts, prompt, answer)


def _rejected(call: Call, status: Any, body: bytes) -> None:
    call.served_status = status if isinstance(status, int) and 400 <= status < 500 else 400
    call.body = body
