"""One input sample, one agent function, its samples (session-http.md, Driver; agents.md, The caller's side)."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from miles_ref.agents.api import AgentFunctionError, InfraAbort, strict_json
from miles_ref.agents.call import call_agent_function
from miles_ref.agents.settings import Mode
from miles_ref.driver.request_kwargs import request_kwargs
from miles_ref.driver.settings import AgentFunction, DriverSettings, Version
from miles_ref.driver.tracer import CollectTimeoutError, OpenAIEndpointTracer
from miles_ref.errors import DecodeError, UsageError
from miles_ref.sample import Status
from miles_ref.wire import SamplesReply

logger = logging.getLogger("miles_ref.driver")


async def generate(
    args: Any,
    sample: Any,
    sampling_params: Mapping[str, Any],
    *,
    on_report: Callable[[Any], None] | None = None,
    tracer_type: type[OpenAIEndpointTracer] = OpenAIEndpointTracer,
) -> list[Any]:
    """Run the agent function on `sample` and return the samples that its session gave, at least one.

    `args`: see DriverSettings. `sample` is any object with the attributes of Sample, and is never changed. `on_report`
    gets what the agent reports, in order. The agent function is called with `base_url`, `prompt`, `request_kwargs` and
    `metadata`; what it returns, a JSON object or None, becomes metadata of the samples.

    Whether the agent returns or fails, its session is collected. One copy of `sample` with status aborted comes back
    when the session is empty, when everything was truncated away, when the collect times out, and after an InfraAbort
    (then with remove_sample, and `metadata.infra_abort`). Raised are: UsageError for settings, before a session is
    opened, and for a worker's refusal; TypeError and ValueError for an input that is not JSON, unless the mode is
    inline; what `collect_samples` raises, but its timeout; CancelledError.
    """
    settings = DriverSettings.of(args)
    function = settings.checked_agent_function()
    tracer = await tracer_type.create(settings)
    try:
        agent_metadata = await _run_agent(function, tracer, settings, sample, sampling_params, on_report)
    except InfraAbort as failure:
        await tracer.delete()
        return [_infra_aborted(sample, failure)]
    except BaseException:
        await tracer.delete()
        raise
    try:
        reply = await tracer.collect_samples(sample, max_seq_len=settings.max_seq_len, agent_metadata=agent_metadata)
    except CollectTimeoutError as error:
        logger.warning("the sample is given up: %s", error)
        return [_aborted(sample)]
    return finish_samples(reply, sample, agent_metadata, settings.version)


async def _run_agent(
    function: str | AgentFunction,
    tracer: OpenAIEndpointTracer,
    settings: DriverSettings,
    sample: Any,
    sampling_params: Mapping[str, Any],
    on_report: Callable[[Any], None] | None,
) -> dict[str, Any] | None:
    """What the agent returned; None also after an error of its own, which is logged."""
    kwargs = {
        "base_url": tracer.base_url,
        "prompt": copy.deepcopy(sample.prompt),
        "request_kwargs": copy.deepcopy(request_kwargs(sampling_params)),
        "metadata": agent_input_metadata(tracer, settings, sample),
    }
    # Inline, whatever is raised is the agent's, who runs here; elsewhere its errors come as AgentFunctionError, and all
    # others say that no call can work. An inline agent that exits must not end the driver.
    own = (Exception, SystemExit) if settings.agent_mode == Mode.INLINE else AgentFunctionError
    try:
        returned = await call_agent_function(
            function,
            mode=settings.agent_mode,
            kwargs=kwargs,
            scope=settings.scope,
            settings=settings.agent,
            on_report=on_report,
        )
    except InfraAbort:
        raise
    except own:
        _log_failure(tracer)
        return None
    try:
        return _checked(returned, settings.version)
    except (TypeError, ValueError):
        _log_failure(tracer)
        return None


def _log_failure(tracer: OpenAIEndpointTracer) -> None:
    logger.warning("the agent failed in session %s; what it did is collected", tracer.base_url, exc_info=True)


def agent_input_metadata(tracer: OpenAIEndpointTracer, settings: DriverSettings, sample: Any) -> dict[str, Any]:
    """The metadata that the agent gets: the input's, and three keys that do not go into samples."""
    return {
        **copy.deepcopy(sample.metadata or {}),
        "max_seq_len": settings.max_seq_len,
        "session_server_id": tracer.session_server_id,
        "session_server_instance_id": settings.session_server_instance_id,
    }


def _checked(returned: object, version: Version) -> dict[str, Any] | None:
    if returned is None:
        return None
    if not isinstance(returned, dict):
        raise TypeError(f"an agent function returns a dict or None, not {type(returned).__name__}")
    strict_json({"metadata": returned} if version == "v2" else returned)  # v2 sends it in an object
    json.dumps(returned, ensure_ascii=False).encode()  # refuses lone surrogates, as every server does
    return returned


def finish_samples(
    reply: SamplesReply, sample: Any, agent_metadata: Mapping[str, Any] | None, version: Version
) -> list[Any]:
    """The samples of a decoded reply with what only the driver knows (wire.md, Metadata authority).

    v1: the agent's metadata, then the session's, are laid over the one sample's; v2: the server did that. Samples that
    came out of one input share a rollout_id. Raises DecodeError for a v1 reply with more than one sample, UsageError
    where samples must share an id and the input has none.
    """
    if version == "v1" and len(reply.samples) > 1:
        raise DecodeError(f"a v1 session gives one sample, the reply holds {len(reply.samples)}")
    samples = reply.samples or [_aborted(sample)]
    if version == "v1":
        own = copy.deepcopy(dict(agent_metadata or {}))
        samples[0].metadata = {**(samples[0].metadata or {}), **own, **reply.session_metadata}
    if len(samples) > 1:
        _share_rollout_id(samples, sample)
    seconds = _tool_time(agent_metadata)
    if seconds is not None and (reply.samples or version == "v1"):
        for finished in samples:
            finished.non_generation_time = seconds
    return samples


def _share_rollout_id(samples: list[Any], sample: Any) -> None:
    rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
    if rollout_id is None:
        raise UsageError(
            f"the session gave {len(samples)} samples, which must share a rollout_id, but the input sample has neither "
            "rollout_id nor index: set one of them"
        )
    for finished in samples:
        finished.rollout_id = rollout_id


def _tool_time(agent_metadata: Mapping[str, Any] | None) -> float | None:
    metrics = (agent_metadata or {}).get("agent_metrics")
    seconds = metrics.get("total_tool_time") if isinstance(metrics, Mapping) else None
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not abs(seconds) <= sys.float_info.max:
        logger.warning("agent_metrics.total_tool_time is %.80r, not a number of seconds: it is ignored", seconds)
        return None
    return float(seconds)


def _aborted(sample: Any) -> Any:
    """A copy of the input with status aborted, in the spelling of the input's own status."""
    aborted = copy.deepcopy(sample)
    kind = type(sample.status)
    aborted.status = kind("aborted") if issubclass(kind, Enum) else Status.ABORTED
    return aborted


def _infra_aborted(sample: Any, failure: InfraAbort) -> Any:
    aborted = _aborted(sample)
    aborted.remove_sample = True
    said = {"reason": failure.reason, "exit_status": failure.exit_status}
    aborted.metadata = {**(aborted.metadata or {}), "infra_abort": said}
    logger.warning("the sample is aborted by the infrastructure: %s", failure)
    return aborted
