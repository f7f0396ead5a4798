"""What a session server is configured with (session-http.md, Flags), checked before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from miles_ref.errors import UsageError
from miles_ref.records import AssemblySettings
from miles_ref.tokens.families import get_family
from miles_ref.tokens.matching import BUILT_IN, get_matcher
from miles_ref.tokens.rendering import Renderer
from miles_ref.tokens.tokenizer import load_tokenizer
from miles_ref.trajectory.linear import LinearTrajectory
from miles_ref.trajectory.tree import MAX_NODES, TreeTrajectory
from miles_ref.trajectory.turn import ForwardSettings, Matching

Trajectory = LinearTrajectory | TreeTrajectory


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The flags of `miles-ref serve`; each field is the flag of its name. Times in seconds, sizes in bytes.

    Raises UsageError for flags that contradict each other.
    """

    backend_url: str
    """Empty where the backend is set later (SessionServer.use_backend)."""
    hf_checkpoint: str
    tito_model: str = "default"
    version: Literal["v1", "v2"] = "v1"
    session_message_matcher: str = "strict"
    tito_allowed_append_roles: tuple[str, ...] | None = None
    session_sample_picker_path: str | None = None
    session_merge_function_path: str | None = None
    session_strict_append_only: bool = False
    session_max_nodes: int = MAX_NODES
    use_rollout_routing_replay: bool = False
    num_layers: int = 0
    moe_router_topk: int = 0
    use_rollout_indexer_replay: bool = False
    pause_generation_mode: str | None = None
    lora_path: str | None = None
    sglang_speculative_algorithm: str | None = None
    save_debug_trajectory_data: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] | None = None
    session_server_instance_id: str | None = None
    session_ttl: float = 0
    """Idle time after which a session is dropped; 0: never."""
    max_sessions: int = 0
    """0: no limit."""
    max_session_bytes: int = 0
    """What one session may store; 0: no limit."""
    max_body_bytes: int = 1 << 30
    shutdown_grace: float = 30

    def __post_init__(self) -> None:
        if self.version == "v1":
            for flag, value in (
                ("--session-sample-picker-path", self.session_sample_picker_path),
                ("--session-merge-function-path", self.session_merge_function_path),
                ("--session-strict-append-only", self.session_strict_append_only),
            ):
                if value:
                    raise UsageError(f"{flag} needs trajectory trees: add --use-session-server v2, or leave it out")
        backend = urlsplit(self.backend_url)
        if self.backend_url and (backend.scheme not in ("http", "https") or not backend.hostname):
            raise UsageError(f"--backend-url is {self.backend_url!r}: give http://HOST:PORT or https://HOST:PORT")
        if self.use_rollout_routing_replay and self.num_layers < 1:
            raise UsageError("--use-rollout-routing-replay needs --num-layers, the number of the model's MoE layers")
        for flag, number in (
            ("--moe-router-topk", self.moe_router_topk),
            ("--num-layers", self.num_layers),
            ("--session-ttl", self.session_ttl),
            ("--shutdown-grace", self.shutdown_grace),
            ("--max-sessions", self.max_sessions),
            ("--max-session-bytes", self.max_session_bytes),
        ):
            if not number >= 0:  # nan is not, either
                raise UsageError(f"{flag} is {number}: it must be 0 or more")

    @property
    def additional_r3(self) -> bool:
        """Whether only new replay rows are asked for: the backend keeps its prefix while weights change in place."""
        return self.use_rollout_routing_replay and self.pause_generation_mode == "in_place"

    def renderer(self) -> Renderer:
        """Loads the tokenizer. Raises UsageError for one that does not exist or does not suit the family."""
        return Renderer(
            load_tokenizer(self.hf_checkpoint),
            get_family(self.tito_model),
            self.apply_chat_template_kwargs,
            self.tito_allowed_append_roles,
        )

    def matching(self) -> Matching:
        """The matcher; a custom one is asked about every message. Raises PluginLoadError."""
        name = self.session_message_matcher
        return Matching(get_matcher(name), by_text=name in BUILT_IN)

    def forward(self) -> ForwardSettings:
        """What the server adds to every forwarded request."""
        return ForwardSettings(
            routed_experts=self.use_rollout_routing_replay,
            indexer_topk=self.use_rollout_indexer_replay,
            additional_r3=self.additional_r3,
            lora_path=self.lora_path,
        )

    def assembly(self, renderer: Renderer) -> AssemblySettings:
        """What assembly must know of this server."""
        return AssemblySettings(
            decode=renderer.tokenizer.decode,
            max_trim_tokens=renderer.family.max_trim_tokens,
            num_layers=self.num_layers,
            moe_router_topk=self.moe_router_topk,
            routed_experts=self.use_rollout_routing_replay,
            indexer_topk=self.use_rollout_indexer_replay,
            additional_r3=self.additional_r3,
            speculative=self.sglang_speculative_algorithm is not None,
            debug_messages=self.save_debug_trajectory_data,
        )

    def trajectory(self, matching: Matching) -> Trajectory:
        """An empty trajectory of this server's version."""
        if self.version == "v1":
            return LinearTrajectory(matching)
        return TreeTrajectory(matching, strict=self.session_strict_append_only, max_nodes=self.session_max_nodes)
