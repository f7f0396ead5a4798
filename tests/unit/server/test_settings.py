"""Flags that contradict each other are refused (session-http.md, Flags)."""

from typing import Any

import pytest

from miles_ref.errors import UsageError
from miles_ref.server.settings import ServerSettings


@pytest.mark.parametrize(
    "settings",
    [
        {"session_sample_picker_path": "longest"},
        {"session_merge_function_path": "x"},
        {"session_strict_append_only": True},
        {"use_rollout_routing_replay": True},
        {"moe_router_topk": -1},
        {"max_sessions": -1},
        {"session_ttl": float("nan")},
        {"shutdown_grace": float("nan")},
        {"shutdown_grace": -1.0},
    ],
)
def test_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="--"):
        ServerSettings(backend_url="http://x", hf_checkpoint="bytes", **settings)


@pytest.mark.parametrize(
    ("routing", "mode", "additional"),
    [(True, "in_place", True), (True, None, False), (True, "retract", False), (False, "in_place", False)],
)
def test_additional_rows_need_replay_and_a_backend_that_keeps_its_prefix(
    routing: bool, mode: str | None, additional: bool
) -> None:
    settings = ServerSettings(
        backend_url="http://x",
        hf_checkpoint="bytes",
        use_rollout_routing_replay=routing,
        num_layers=1,
        pause_generation_mode=mode,
    )
    assert settings.additional_r3 is additional
    assert settings.forward().additional_r3 is additional


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:30000", "localhost:30000", "http://", "ftp://host:1", "//host:1"])
def test_a_backend_that_is_no_address_is_refused_at_once(url: str) -> None:
    with pytest.raises(UsageError, match=r"--backend-url .*: give http://HOST:PORT"):
        ServerSettings(backend_url=url, hf_checkpoint="bytes")


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "https://router.example/prefix", "http://[::1]:8000/", ""])
def test_addresses_of_a_backend(url: str) -> None:
    assert ServerSettings(backend_url=url, hf_checkpoint="bytes").backend_url == url
