"""Sample: what a training driver trains on, field for field as cases.md lists it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

STUDENT_LOG_PROBS = "opd_student_top_logprobs"
"""Key of sample metadata with one entry for each token of the response."""


class Status(StrEnum):
    """How a sample ended. `pending` has not been generated yet; `failed` is set by drivers only."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True)
class PrefixCacheInfo:
    """How much of the prompts came from the backend's prefix cache, in tokens, summed over turns."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def __add__(self, other: PrefixCacheInfo) -> PrefixCacheInfo:
        return PrefixCacheInfo(
            self.cached_tokens + other.cached_tokens, self.total_prompt_tokens + other.total_prompt_tokens
        )


@dataclass(slots=True)
class SpecInfo:
    """Counters of speculative decoding, in tokens (verify_ct: in verify steps), summed over turns."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def __add__(self, other: SpecInfo) -> SpecInfo:
        return SpecInfo(
            self.spec_accept_token_num + other.spec_accept_token_num,
            self.spec_draft_token_num + other.spec_draft_token_num,
            self.spec_verify_ct + other.spec_verify_ct,
            self.completion_token_num + other.completion_token_num,
        )


@dataclass(slots=True)
class Sample:
    """One training sample.

    Per-token fields: `tokens` is the prompt and the response, int64, length L. `loss_mask` (0 or 1),
    `rollout_log_probs` (float64, natural log), `teacher_log_probs` and `opd_reverse_kl` cover the response: the last
    `response_length` tokens. `rollout_routed_experts` and `rollout_indexer_topk` are int32 of shape (L - 1, layers,
    topk). On the driver the first three are lists; within assembly they may be read-only numpy arrays, which are never
    changed in place.

    Source: cases.md (fields and defaults), pipeline.md (meaning).
    """

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: Any = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: Any = None
    rollout_log_probs: Any = None
    rollout_routed_experts: Any = None
    rollout_indexer_topk: Any = None
    multimodal_inputs: Any = None
    multimodal_train_inputs: Any = None
    teacher_log_probs: Any = None
    opd_reverse_kl: Any = None
    generate_function_path: str | None = None
    train_metadata: Any = None
    adapter: Any = None
    reward_spec: Any = None
    routing_key: str | None = None
    status: Status = Status.PENDING
    weight_versions: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    remove_sample: bool = False
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
