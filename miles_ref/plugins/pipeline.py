"""The facade: one typed method for each hook, in a plugin manager of its own (docs/plugins.md; pipeline.md)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pluggy

from miles_ref.assembly.fold import fold
from miles_ref.assembly.replay import additional_rows
from miles_ref.errors import UsageError
from miles_ref.hookspecs import PROJECT, HookSpecs
from miles_ref.plugins.catalogue import SETS, Catalogue
from miles_ref.plugins.guard import Implementation
from miles_ref.plugins.guarded import AbortRun, Guard, Scope
from miles_ref.records import AssemblySettings, Chain
from miles_ref.sample import Sample
from miles_ref.wire.spec import ALL_TRUNCATED, NO_RECORDS

ABORT_SECONDS = 120.0
"""How long one implementation of abort may take."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """A reply to be encoded. `samples` is empty exactly where `empty_reason` is not None."""

    samples: list[Sample]
    session_metadata: dict[str, Any]
    empty_reason: str | None


class Pipeline:
    """One version's hooks, with a picker and a merger of choice (v2 only), each a name or a path (Catalogue).

    `plugin_set` names a plugin whose hooks all come before the version's own. `installed_aborts` adds the abort of
    every installed plugin: nobody chooses one, and what a plugin has started only it can end. `clock` gives seconds; a
    third party's hook that takes `slow_after` or more is logged. Raises PluginLoadError for a plugin that cannot be
    used, UsageError for flags that contradict each other.
    """

    def __init__(
        self,
        version: str = "v1",
        picker: str | None = None,
        merger: str | None = None,
        *,
        plugin_set: str | None = None,
        catalogue: Catalogue | None = None,
        installed_aborts: bool = False,
        clock: Callable[[], float] = time.monotonic,
        slow_after: float = 1.0,
    ) -> None:
        if version not in SETS:
            raise UsageError(f"session server version {version!r} is unknown; choose {' or '.join(SETS)}")
        if version != "v2" and (picker or merger):
            raise UsageError("a picker or a merger needs v2: --use-session-server v2")
        self.version = version
        self._guard = Guard(clock, slow_after)
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(HookSpecs)
        self.active: list[Implementation] = []
        """What is registered, in order."""
        catalogue = catalogue or Catalogue()
        self._register(catalogue.plugin_set(version).hooks)
        if plugin_set is not None:
            self._register(catalogue.plugin_set(plugin_set).hooks)
        if installed_aborts:
            for plugin in catalogue.installed():
                if "abort" in plugin.hooks and plugin.name != plugin_set:
                    self._register({"abort": plugin.hooks["abort"]})
        for choice, hook in ((picker, "pick"), (merger, "merge")):
            if choice is not None:
                self._register({hook: catalogue.implementation(choice, hook)})

    def _register(self, hooks: Mapping[str, Implementation]) -> None:
        self.active += hooks.values()
        self._manager.register(self._guard.plugin(hooks))

    def asked(self) -> list[Implementation]:
        """The implementations that are asked: of a hook the one registered last, of abort all."""
        last = {one.hook: one for one in self.active}
        return [one for one in self.active if one.hook == "abort" or last[one.hook] is one]

    # The hooks

    def compute(self, chain: Chain, settings: AssemblySettings) -> list[Sample]:
        """Turns of one chain. Raises AssemblyError."""
        turns: list[Sample] = self._manager.hook.compute(chain=chain, settings=settings)
        return turns

    def truncate(self, turns: Sequence[Sample], max_seq_len: int | None, settings: AssemblySettings) -> list[Sample]:
        """Turns within the budget. Raises AssemblyError."""
        kept: list[Sample] = self._manager.hook.truncate(turns=turns, max_seq_len=max_seq_len, settings=settings)
        return kept

    def pick(self, leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
        """The survivors. Raises AssemblyError."""
        picked: list[Sample] = self._manager.hook.pick(leaf_samples=leaf_samples, session_metadata=session_metadata)
        return picked

    def merge(self, leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample]:
        """The survivors, finished. Raises AssemblyError."""
        merged: list[Sample] = self._manager.hook.merge(leaf_samples=leaf_samples, session_metadata=session_metadata)
        return merged

    def encode(self, assembly: Assembly) -> bytes:
        """The samples payload. Raises AssemblyError (EncodeError of the built-in)."""
        payload: bytes = self._manager.hook.encode(
            samples=assembly.samples,
            session_metadata=assembly.session_metadata,
            empty_reason=assembly.empty_reason,
        )
        return payload

    async def abort(self, scope: Scope, every_scope: bool = False, *, time_limit: float = ABORT_SECONDS) -> None:
        """Run every implementation of abort, the built-in first, each for at most `time_limit` seconds.

        `scope` is passed on as it is, so that it is evaluated only by who needs it. Errors are raised together
        afterwards, as an ExceptionGroup; the caller's own CancelledError passes at once.
        """
        runs: list[AbortRun] = self._manager.hook.abort(scope=scope, every_scope=every_scope)
        runs.sort(key=lambda run: not run.implementation.trusted)
        errors: list[Exception] = []
        for run in runs:
            try:
                await run.within(time_limit)
            except Exception as error:  # one that fails does not stop the others
                errors.append(error)
        if errors:
            raise ExceptionGroup(f"{len(errors)} of {len(runs)} implementations of abort failed", errors)

    # From records to bytes

    def assemble(
        self,
        chains: Sequence[Chain],
        session_metadata: dict[str, Any],
        max_seq_len: int | None,
        settings: AssemblySettings,
    ) -> Assembly:
        """The samples of a session: one chain under v1, one for each leaf in commit order under v2.

        Raises AssemblyError (422). The chains are unchanged, so the same session can be collected again.
        """
        if not chains:
            return Assembly([], session_metadata, NO_RECORDS)
        leaf_samples = self.leaf_samples(chains, max_seq_len, settings)
        survivors = self.pick(leaf_samples, session_metadata) if leaf_samples else []
        samples = self.merge(survivors, session_metadata) if survivors else []
        return Assembly(samples, session_metadata, None if samples else ALL_TRUNCATED)

    def leaf_samples(
        self, chains: Sequence[Chain], max_seq_len: int | None, settings: AssemblySettings
    ) -> list[Sample]:
        """What pick is given: the folded sample of each chain that the budget leaves. Raises AssemblyError."""
        computed = [self.compute(chain, settings) for chain in chains]  # all, before anything is truncated
        samples = []
        for chain, turns in zip(chains, computed, strict=True):
            kept = self.truncate(turns, max_seq_len, settings)
            if kept:
                samples.append(_leaf_sample(chain, kept, settings))
        return samples

    def collect(
        self,
        chains: Sequence[Chain],
        session_metadata: dict[str, Any],
        max_seq_len: int | None,
        settings: AssemblySettings,
    ) -> bytes:
        """`assemble`, encoded. Raises AssemblyError (422)."""
        return self.encode(self.assemble(chains, session_metadata, max_seq_len, settings))


def _leaf_sample(chain: Chain, turns: Sequence[Sample], settings: AssemblySettings) -> Sample:
    sample = fold(turns, settings)
    if settings.routed_experts and settings.additional_r3:
        sample.rollout_routed_experts = additional_rows(chain, len(sample.tokens), settings)
    if chain.leaf is not None:
        sample.metadata |= _leaf_metadata(chain)
    return sample


def _leaf_metadata(chain: Chain) -> dict[str, Any]:
    """The server-owned keys of a leaf sample (pipeline.md, v2)."""
    assert chain.leaf is not None
    metadata: dict[str, Any] = {"accumulated_token_ids": chain.accumulated}
    if chain.mismatch is not None:
        metadata["tito_session_mismatch"] = chain.mismatch
    metadata["leaf"] = {
        "node_id": chain.leaf.node_id,
        "parent": chain.leaf.parent,
        "path_node_ids": list(chain.leaf.path_node_ids),
        "response_id": chain.leaf.response_id,
    }
    return metadata
