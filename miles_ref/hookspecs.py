"""The six hooks: where an implementation decides what is trained (pipeline.md; agents.md, Abort).

    records --compute--> turns --truncate--> turns --fold--> leaf sample
            --pick--> survivors --merge--> samples --encode--> bytes

A plugin implements any of them with `@hookimpl`, and may take fewer arguments than the specification names. fold is not
a hook. compute, truncate, pick, merge and encode run in the server, synchronously, and the first result is the result:
None is refused, because pluggy would silently ask the next plugin. abort may be async; all implementations run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pluggy

from miles_ref.records import AssemblySettings, Chain
from miles_ref.sample import Sample

PROJECT = "miles_ref"
"""Name of the pluggy project and of the entry point group."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """Specification of the hooks; each docstring gives the rule, the types, the errors and an example."""

    @hookspec(firstresult=True)
    def compute(self, chain: Chain, settings: AssemblySettings) -> Sequence[Sample] | None:
        """Turn the records of one chain into turns: one Sample a record, in order (pipeline.md, compute).

        Tokens of turn i are `chain.tokens(i)` less the trim; loss mask and log probs cover the kept output.
        Raises AssemblyError (422) naming turn, field and value.

        >>> @hookimpl
        ... def compute(chain, settings):
        ...     return [
        ...         Sample(
        ...             tokens=chain.tokens(i).tolist(),
        ...             response=settings.decode(record.output_ids),
        ...             response_length=len(record.output_ids),
        ...             loss_mask=[1] * len(record.output_ids),
        ...             rollout_log_probs=record.log_probs.tolist(),
        ...         )
        ...         for i, record in enumerate(chain.records)
        ...     ]
        """

    @hookspec(firstresult=True)
    def truncate(
        self, turns: Sequence[Sample], max_seq_len: int | None, settings: AssemblySettings
    ) -> Sequence[Sample] | None:
        """Keep the turns that fit the budget of `max_seq_len` tokens; None keeps all (pipeline.md, truncate).

        Per-token fields of a cut turn are cut alike. An empty list means that the chain gives no sample.

        >>> @hookimpl
        ... def truncate(turns, max_seq_len):
        ...     return [turn for turn in turns if max_seq_len is None or len(turn.tokens) <= max_seq_len]
        """

    @hookspec(firstresult=True)
    def pick(self, leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample] | None:
        """Choose which leaf samples survive, and in which order (pipeline.md, v2: pick).

        Pure selection: the result holds objects of `leaf_samples`, none twice, none changed. Per-token fields are plain
        lists, replay rows numpy arrays. `sample.metadata["leaf"]` says where it ends in `session_metadata["tree"]`.
        An empty choice is []. Anything else than a selection is refused with 422, naming the plugin and the hook.

        >>> @hookimpl
        ... def pick(leaf_samples):
        ...     return sorted(leaf_samples, key=lambda sample: -len(sample.tokens))[:1]
        """

    @hookspec(firstresult=True)
    def merge(self, leaf_samples: list[Sample], session_metadata: dict[str, Any]) -> list[Sample] | None:
        """Finish the survivors: loss masks, rewards, metadata (pipeline.md, v2: merge).

        May change the samples that it is given, or return others; what it returns must be encodable (wire.md).
        `session_metadata["agent"]` is what the driver sent, if anything.

        >>> @hookimpl
        ... def merge(leaf_samples, session_metadata):
        ...     for sample in leaf_samples:
        ...         sample.metadata["leaves"] = len(session_metadata["tree"]["leaves"])
        ...     return leaf_samples
        """

    @hookspec(firstresult=True)
    def encode(self, samples: list[Sample], session_metadata: dict[str, Any], empty_reason: str | None) -> bytes | None:
        """Write the samples payload (wire.md). Raises EncodeError naming sample, field and value.

        >>> @hookimpl
        ... def encode(samples, session_metadata, empty_reason):
        ...     from miles_ref.wire import SAMPLES_VALUE_SPEC, encode_samples
        ...     return encode_samples(samples, session_metadata, empty_reason, fields=SAMPLES_VALUE_SPEC)
        """

    @hookspec
    def abort(self, scope: Callable[[], str | None] | str | None, every_scope: bool) -> Awaitable[None] | None:
        """End the calls of one scope, or of all (agents.md, Abort). May be async. All implementations run, ours first.

        `scope` may be lazy: call it only when something is in flight. Exceptions are gathered and raised together.

        >>> @hookimpl
        ... async def abort(scope, every_scope):
        ...     await my_sandboxes.close(None if every_scope else scope)
        """
