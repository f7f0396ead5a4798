"""From a rollout's sampling parameters to the keys of a chat completion request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""SGLang's names of the generate API, and what the chat API calls the same."""

KNOWN = frozenset(
    {
        # OpenAI's
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "n",
        "parallel_tool_calls",
        "presence_penalty",
        "reasoning_effort",
        "response_format",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "temperature",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
        # SGLang's
        "chat_template_kwargs",
        "continue_final_message",
        "custom_logit_processor",
        "custom_params",
        "ebnf",
        "ignore_eos",
        "lora_path",
        "min_p",
        "min_tokens",
        "no_stop_trim",
        "priority",
        "regex",
        "repetition_penalty",
        "rid",
        "separate_reasoning",
        "session_params",
        "skip_special_tokens",
        "stop_regex",
        "stop_token_ids",
        "stream_reasoning",
        "top_k",
    }
)
"""The keys of a chat completion request that a rollout may set; `model` and `messages` are the agent's."""


def request_kwargs(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The chat completion request's keys for `sampling_params` (session-http.md, Driver).

    Names of the generate API are translated; where both spellings stand there, the chat API's wins. Values that are
    None and keys that a chat completion request does not have are left out.
    """
    given = {key: value for key, value in sampling_params.items() if value is not None}
    renamed = {RENAMED[key]: value for key, value in given.items() if key in RENAMED}
    return {key: value for key, value in (renamed | given).items() if key in KNOWN}
