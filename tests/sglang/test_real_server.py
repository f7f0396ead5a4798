"""What the session server needs of a backend, asked of a real SGLang server: MILES_REF_SGLANG_URL."""

from __future__ import annotations

import json
import os
import urllib.request
from typing import Any

import pytest

URL = os.environ.get("MILES_REF_SGLANG_URL")
pytestmark = [pytest.mark.sglang, pytest.mark.skipif(URL is None, reason="MILES_REF_SGLANG_URL is not set")]


def chat(**fields: Any) -> dict[str, Any]:
    asked = {"input_ids": list(range(40, 60)), "logprobs": True, "return_meta_info": True, "no_stop_trim": False}
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, **asked, **fields}
    head = {"content-type": "application/json"}
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode(), head)
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.loads(reply.read())["choices"][0]


def test_it_reads_the_ids_that_it_is_given_and_tells_its_own() -> None:
    choice = chat()
    info = choice["meta_info"]
    assert info["prompt_tokens"] == 20
    assert len(info["output_token_logprobs"]) == info["completion_tokens"] > 0
    assert all(isinstance(entry[0], float) and isinstance(entry[1], int) for entry in info["output_token_logprobs"])
    assert isinstance(choice["message"]["content"], str)
    assert choice["finish_reason"] in ("stop", "length", "tool_calls")


def test_routed_experts_begin_where_asked() -> None:
    """Needs a mixture-of-experts served with --enable-return-routed-experts."""
    whole = chat(return_routed_experts=True, temperature=0)["meta_info"]
    if whole.get("routed_experts") is None:
        pytest.skip("the server returns no routed experts")
    rows = 20 + whole["completion_tokens"] - 1
    later = chat(return_routed_experts=True, routed_experts_start_len=19, temperature=0)["meta_info"]
    row = len(whole["routed_experts"]) / rows
    assert abs(len(later["routed_experts"]) - row * later["completion_tokens"]) < 8  # base64 pads
