"""The wire table of wire.md and the whole sample's defaults of cases.md, as plain data."""

from __future__ import annotations

from typing import Any

META = "_samples_meta"
TENSORS = {  # field -> (safetensors dtype, rank, strict)
    "tokens": ("I64", 1, False),
    "loss_mask": ("U8", 1, False),
    "rollout_log_probs": ("F64", 1, False),
    "rollout_routed_experts": ("I32", 3, True),
    "rollout_indexer_topk": ("I32", 3, True),
}
JSON_FIELDS_V1 = ["response", "response_length", "status", "weight_versions", "prefix_cache_info", "metadata"]
JSON_FIELDS_V2 = [*JSON_FIELDS_V1, "reward"]
STATUSES = ["pending", "completed", "truncated", "aborted", "failed"]
EMPTY_REASONS = [None, "no_records", "all_truncated"]
CODES = {"I64": "q", "F64": "d", "I32": "i", "U8": "B"}  # little-endian struct codes
RANGES = {"I64": (-(2**63), 2**63 - 1), "U8": (0, 255)}

ZERO_CACHE = {"cached_tokens": 0, "total_prompt_tokens": 0}
ZERO_SPEC = {"spec_accept_token_num": 0, "spec_draft_token_num": 0, "spec_verify_ct": 0, "completion_token_num": 0}
DEFAULTS: dict[str, Any] = {
    "group_index": None,
    "index": None,
    "rollout_id": None,
    "prompt": "",
    "tokens": [],
    "multimodal_inputs": None,
    "multimodal_train_inputs": None,
    "response": "",
    "response_length": 0,
    "label": None,
    "reward": None,
    "loss_mask": None,
    "weight_versions": [],
    "rollout_log_probs": None,
    "rollout_routed_experts": None,
    "rollout_indexer_topk": None,
    "remove_sample": False,
    "teacher_log_probs": None,
    "opd_reverse_kl": None,
    "status": "pending",
    "metadata": {},
    "generate_function_path": None,
    "train_metadata": None,
    "adapter": None,
    "reward_spec": None,
    "routing_key": None,
    "non_generation_time": 0.0,
    "spec_info": ZERO_SPEC,
    "prefix_cache_info": ZERO_CACHE,
}


def json_fields(version: str) -> list[str]:
    """The table's JSON fields, in its order."""
    return JSON_FIELDS_V2 if version == "v2" else JSON_FIELDS_V1
