"""The driver's end of one session: open it, collect its samples, end it (session-http.md, Driver)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from miles_ref.driver.settings import DriverSettings
from miles_ref.errors import MilesRefError
from miles_ref.http_once import client_session
from miles_ref.tasks import kept
from miles_ref.wire import SAMPLES_VALUE_SPEC, SAMPLES_VALUE_SPEC_V2, SamplesReply
from miles_ref.wire import decode_samples_and_merge_input_sample as decode_and_merge

logger = logging.getLogger("miles_ref.driver")
_turns = itertools.count()
_QUOTED = 2000  # characters of a reply that an error quotes


class SessionServerError(MilesRefError):
    """The session server answered with a status that is not 2xx; `status_code` is that status, `text` its body."""

    def __init__(self, method: str, url: str, status_code: int, text: str) -> None:
        super().__init__(f"{method} {url} was answered {status_code}: {text[:_QUOTED]}")
        self.status_code = status_code
        self.text = text


class CollectTimeoutError(MilesRefError, TimeoutError):
    """The samples did not arrive within the collect timeout. Only this costs the sample and not the rollout group."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One completed model call as GET /sessions/{id} shows it (pipeline.md, Record). Times are epoch seconds."""

    timestamp: float
    method: str
    path: str
    status_code: int
    request: dict[str, Any]
    response: dict[str, Any]
    request_timestamp: float | None = None

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SessionRecord:
        """The record of a GET; keys that a newer server adds are left out. Raises KeyError for one that is missing."""
        return cls(
            timestamp=record["timestamp"],
            method=record["method"],
            path=record["path"],
            status_code=record["status_code"],
            request=record["request"],
            response=record["response"],
            request_timestamp=record.get("request_timestamp"),
        )


class OpenAIEndpointTracer:
    """One session. An agent speaks the OpenAI protocol under `base_url`: `{base_url}/v1/chat/completions`.

    `session_server_id` is the owning instance's `ip:port`: every call goes there. No call is ever repeated.
    """

    def __init__(self, settings: DriverSettings, session_server_id: str, session_id: str) -> None:
        self.settings = settings
        self.session_server_id = session_server_id
        self.session_id = session_id

    @property
    def base_url(self) -> str:
        """`http://ip:port/sessions/{id}`, without `/v1`."""
        return f"http://{self.session_server_id}/sessions/{self.session_id}"

    @classmethod
    async def create(cls, args: Any) -> Self:
        """Pick an instance, in turn, and open a session there. `args`: see DriverSettings.

        Raises SessionServerError, TimeoutError or aiohttp.ClientError where there is no new session. A session that
        the server opens all the same, for a caller that was cancelled or gave up, is ended.
        """
        settings = DriverSettings.of(args)
        address = settings.session_servers[next(_turns) % len(settings.session_servers)]
        opening = kept(cls._open(settings, address))
        try:
            await asyncio.wait({opening}, timeout=settings.create_timeout)
            if not opening.done():
                raise TimeoutError(
                    f"POST http://{address}/sessions had no complete answer after {settings.create_timeout:g} s; "
                    "session_create_timeout sets this limit"
                )
            return opening.result()
        except BaseException:
            kept(_ended_unused(opening, settings.delete_timeout))
            raise

    @classmethod
    async def _open(cls, settings: DriverSettings, address: str) -> Self:
        url = f"http://{address}/sessions"
        async with _client() as client, client.post(url, allow_redirects=False) as response:
            body = await _body_of_2xx(response)
        try:
            session_id = json.loads(body)["session_id"]
        except (ValueError, KeyError, TypeError):
            session_id = None
        if not isinstance(session_id, str) or not session_id:
            raise SessionServerError("POST", url, response.status, f"no session_id in {_text(body)}")
        return cls(settings, address, session_id)

    async def collect_samples(
        self, input_sample: Any, *, max_seq_len: int | None, agent_metadata: Mapping[str, Any] | None = None
    ) -> SamplesReply:
        """Have the server assemble the samples, end the session, and lay the samples over copies of `input_sample`.

        One POST, never repeated. `agent_metadata` travels under v2 only. Raises CollectTimeoutError, SessionServerError
        (not 2xx), aiohttp.ClientError (transport), DecodeError (malformed payload). The session is deleted in any case.
        """
        payload = await self.fetch_payload(max_seq_len=max_seq_len, agent_metadata=agent_metadata)
        fields = SAMPLES_VALUE_SPEC_V2 if self.settings.version == "v2" else SAMPLES_VALUE_SPEC
        return decode_and_merge(payload, input_sample, fields=fields)

    async def fetch_payload(self, *, max_seq_len: int | None, agent_metadata: Mapping[str, Any] | None = None) -> bytes:
        """The samples payload (wire.md) as it came; the session is deleted in any case. Raises as collect_samples."""
        try:
            request: dict[str, Any] = {"max_seq_len": max_seq_len}
            if self.settings.version == "v2":
                request["metadata"] = agent_metadata
            return await self._post_samples(json.dumps(request, allow_nan=False).encode())
        finally:
            await self.delete()

    async def _post_samples(self, body: bytes) -> bytes:
        url = f"{self.base_url}/samples"
        headers = {"content-type": "application/json"}
        seconds = self.settings.collect_timeout
        async with _client() as client:
            try:
                async with asyncio.timeout(seconds) as deadline:
                    # A redirect would be a second POST.
                    async with client.post(url, data=body, headers=headers, allow_redirects=False) as response:
                        return await _body_of_2xx(response)
            except TimeoutError as error:
                if not deadline.expired():
                    raise
                raise CollectTimeoutError(
                    f"POST {url} had no complete answer after {seconds:g} s; session_collect_timeout sets this limit"
                ) from error

    async def records(self) -> list[SessionRecord]:
        """The session's records so far. Raises SessionServerError, TimeoutError or aiohttp.ClientError."""
        dump = json.loads(await self.dump())
        return [SessionRecord.from_json(record) for record in dump["records"]]

    async def dump(self) -> bytes:
        """The body of GET /sessions/{id}: JSON text. Raises as `records`."""
        async with (
            _client() as client,
            asyncio.timeout(self.settings.collect_timeout),
            client.get(self.base_url, allow_redirects=False) as response,
        ):
            return await _body_of_2xx(response)

    async def delete(self) -> None:
        """End the session. A failure is logged, not raised: the server drops what nobody uses (--session-ttl).

        If the caller is cancelled, the request goes on without it.
        """
        await asyncio.shield(kept(self._delete()))

    async def _delete(self) -> None:
        try:
            async with (
                _client() as client,
                asyncio.timeout(self.settings.delete_timeout),
                client.delete(self.base_url, allow_redirects=False) as response,
            ):
                await _body_of_2xx(response)
        except Exception as error:
            logger.warning("session %s stays open: DELETE failed: %s", self.base_url, str(error) or repr(error))


async def _ended_unused(opening: asyncio.Task[OpenAIEndpointTracer], seconds: float) -> None:
    """End the session that `opening` may still give within `seconds`: nobody waits for it any more."""
    try:
        tracer = await asyncio.wait_for(opening, seconds)
    except Exception:  # there is none
        return
    await tracer.delete()


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=None)
    async with client_session(timeout=timeout, cookie_jar=aiohttp.DummyCookieJar()) as client:
        yield client


async def _body_of_2xx(response: aiohttp.ClientResponse) -> bytes:
    body = await response.read()
    if not 200 <= response.status < 300:
        raise SessionServerError(response.method, str(response.url), response.status, _text(body))
    return body


def _text(body: bytes) -> str:
    return body[: 4 * _QUOTED].decode(errors="replace")
