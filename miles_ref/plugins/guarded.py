"""A plugin's hooks with the guard around each, in the form that pluggy registers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from miles_ref.hookspecs import hookimpl
from miles_ref.plugins.apart import late, run_apart
from miles_ref.plugins.guard import Implementation
from miles_ref.plugins.plain import changed_field, plain, plain_sample, same
from miles_ref.records import AssemblySettings, Chain
from miles_ref.sample import Sample

Scope = Callable[[], str | None] | str | None
"""A router's `ip:port`, matched whole; may be lazy. None names no scope."""


@dataclass(frozen=True, slots=True)
class Guard:
    """Calls implementations. `clock` gives seconds; a call of a third party of `slow_after` or more is logged."""

    clock: Callable[[], float]
    slow_after: float

    def plugin(self, hooks: Mapping[str, Implementation]) -> Any:
        """An object to register, with a guarded function for each of the hooks."""
        return SimpleNamespace(**{hook: getattr(_Guarded(one, self), hook) for hook, one in hooks.items()})

    def call(self, one: Implementation, **arguments: Any) -> Any:
        """The implementation's unchecked result."""
        return one.call(arguments, self.clock, self.slow_after)


@dataclass(frozen=True, slots=True)
class AbortRun:
    """One implementation of abort, ready to run."""

    implementation: Implementation
    guard: Guard
    scope: Scope
    every_scope: bool

    async def within(self, seconds: float) -> None:
        """Run it for at most `seconds`. Raises TimeoutError, PluginError for whatever leaves a third party's."""
        if not self.implementation.trusted:
            await run_apart(str(self.implementation), self._run(), seconds)
            return
        limit = asyncio.timeout(seconds)
        try:
            async with limit:  # in this task: it takes the calls that there are when the abort begins
                await self._run()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise late(str(self.implementation), seconds) from error

    async def _run(self) -> None:
        one = self.implementation
        result = self.guard.call(one, scope=self.scope, every_scope=self.every_scope)
        if inspect.isawaitable(result):
            try:
                await result
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:
                if one.trusted and isinstance(error, Exception):
                    raise
                raise one.failure(error) from error


@dataclass(frozen=True, slots=True)
class _Guarded:
    one: Implementation
    guard: Guard

    @hookimpl
    def compute(self, chain: Chain, settings: AssemblySettings) -> Sequence[Sample]:
        result = self.guard.call(self.one, chain=chain, settings=settings)
        if self.one.trusted:
            return cast("list[Sample]", result)
        turns = _samples(self.one, result)
        if len(turns) != len(chain):
            raise self.one.refusal(f"returned {len(turns)} turns for {len(chain)} records; return one for each")
        return turns

    @hookimpl
    def truncate(
        self, turns: Sequence[Sample], max_seq_len: int | None, settings: AssemblySettings
    ) -> Sequence[Sample]:
        result = self.guard.call(self.one, turns=turns, max_seq_len=max_seq_len, settings=settings)
        return cast("list[Sample]", result) if self.one.trusted else _samples(self.one, result)

    @hookimpl
    def pick(self, leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
        if self.one.trusted:
            return cast(
                "list[Sample]",
                self.guard.call(self.one, leaf_samples=leaf_samples, session_metadata=session_metadata),
            )
        given = [plain_sample(sample) for sample in leaf_samples]
        metadata = plain(session_metadata)
        result = self.guard.call(self.one, leaf_samples=list(given), session_metadata=metadata)
        chosen = _selection(self.one, given, result)
        for copy, sample in zip(given, leaf_samples, strict=True):
            if name := changed_field(copy, sample):
                raise self.one.refusal(
                    f"changed {name} of leaf {sample.metadata['leaf']['response_id']}; pick only selects"
                )
        _check_unchanged(self.one, metadata, session_metadata)
        return [leaf_samples[at] for at in chosen]

    @hookimpl
    def merge(self, leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
        if self.one.trusted:
            return cast(
                "list[Sample]",
                self.guard.call(self.one, leaf_samples=leaf_samples, session_metadata=session_metadata),
            )
        given = [plain_sample(sample) for sample in leaf_samples]
        metadata = plain(session_metadata)
        result = self.guard.call(self.one, leaf_samples=given, session_metadata=metadata)
        merged = _samples(self.one, result)
        _check_unchanged(self.one, metadata, session_metadata)
        return merged

    @hookimpl
    def encode(self, samples: list[Sample], session_metadata: dict[str, Any], empty_reason: str | None) -> bytes:
        if self.one.trusted:
            payload: bytes = self.guard.call(
                self.one, samples=samples, session_metadata=session_metadata, empty_reason=empty_reason
            )
            return payload
        result = self.guard.call(
            self.one,
            samples=[plain_sample(sample) for sample in samples],
            session_metadata=plain(session_metadata),
            empty_reason=empty_reason,
        )
        if not isinstance(result, bytes | bytearray | memoryview):
            if inspect.iscoroutine(result):
                result.close()
            raise self.one.refusal(f"returned {type(result).__name__}; return the payload's bytes")
        return bytes(result)

    @hookimpl
    def abort(self, scope: Scope, every_scope: bool) -> AbortRun:
        return AbortRun(self.one, self.guard, scope, every_scope)


def _samples(one: Implementation, result: Any) -> list[Sample]:
    """A result of samples, no object twice. Raises PluginError."""
    samples = one.members(result)
    for at, sample in enumerate(samples):
        if not isinstance(sample, Sample):
            raise one.refusal(f"returned {type(sample).__name__} at index {at}; return samples")
    if len({id(sample) for sample in samples}) < len(samples):
        raise one.refusal("returned the same sample twice; return a copy where two are meant")
    return samples


def _selection(one: Implementation, given: Sequence[Sample], result: Any) -> list[int]:
    """Which of the given samples a result selects, in its order. Raises PluginError for anything but a selection."""
    places = {id(sample): at for at, sample in enumerate(given)}
    chosen: list[int] = []
    for at, sample in enumerate(one.members(result)):
        place = places.get(id(sample))
        if place is None:
            raise one.refusal(
                f"returned a stranger at index {at} ({type(sample).__name__}); return objects of leaf_samples"
            )
        if place in chosen:
            raise one.refusal(f"returned the leaf sample {place} twice, again at index {at}")
        chosen.append(place)
    return chosen


def _check_unchanged(one: Implementation, given: Any, original: dict[str, Any]) -> None:
    if not same(given, plain(original)):
        raise one.refusal("changed session_metadata, which goes to the driver as the server has it")
