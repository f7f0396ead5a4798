"""The language model: a forward pass over token ids, its key and value states, and its router's choices."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are local folders; transformers reads this when imported

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.cache_utils import DynamicLayer

from miles_ref.data import tokenizer_names, tokenizer_path
from miles_ref.engine.settings import DEFAULT_TOKENIZER, EngineSettings
from miles_ref.errors import UsageError
from miles_ref.tokens.tokenizer import Tokenizer, load_tokenizer

Routes = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Segment:
    """What the model keeps for a run of n tokens: keys and values by layer, each of shape (1, heads, n, head size).

    `routes` are the experts that the router chose, int32, shape (n, layers, topk); None for a model without a router.
    """

    states: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    routes: Routes | None

    def cut(self, start: int, stop: int) -> Segment:
        """The part for the tokens `start` up to `stop` of the run, as a copy."""
        states = tuple((k[:, :, start:stop].clone(), v[:, :, start:stop].clone()) for k, v in self.states)
        return Segment(states, None if self.routes is None else self.routes[start:stop].copy())


class Context:
    """The tokens that the model has read so far in one sequence. Grows with each `LanguageModel.read`."""

    def __init__(self, config: Any, segments: Sequence[Segment] = ()) -> None:
        self.cache = transformers.DynamicCache(config=config)
        self.length = 0
        self._routes: list[Routes] = []
        for layer in range(len(segments[0].states) if segments else 0):
            keys = torch.cat([segment.states[layer][0] for segment in segments], dim=2)
            values = torch.cat([segment.states[layer][1] for segment in segments], dim=2)
            self.cache.update(keys, values, layer)
            self.length = keys.shape[2]
        for segment in segments:
            self.extend_routes(segment.routes)

    def extend_routes(self, routes: Routes | None) -> None:
        """Note the experts of the tokens that were read last."""
        if routes is not None:
            self._routes.append(routes)

    @property
    def routes(self) -> Routes | None:
        """Experts of all tokens read, int32, shape (length, layers, topk); None without a router."""
        return np.concatenate(self._routes) if self._routes else None

    def segment(self, start: int, stop: int) -> Segment:
        """A copy of what is kept for the tokens `start` up to `stop`."""
        states = tuple((layer.keys, layer.values) for layer in self.cache.layers)
        return Segment(states, self.routes).cut(start, stop)


class LanguageModel:
    """A causal language model on the CPU, for one sequence at a time. Not thread-safe.

    `context_length` is in tokens, `layers` counts all hidden layers, `stop_ids` are those of its tokenizer and of its
    generation configuration. `routed` tells whether it has routers whose choice can be read, `reusable` whether
    contexts can be taken apart and continued elsewhere.
    """

    def __init__(self, model: Any, name: str, end_ids: frozenset[int] = frozenset()) -> None:
        self.name = name
        self._model = model.eval()
        config = model.config.get_text_config(decoder=True)
        self._config = config
        self.vocabulary = int(config.vocab_size)
        self.context_length = int(getattr(config, "max_position_embeddings", 0) or 1 << 20)
        self.layers = int(config.num_hidden_layers)
        generation = getattr(model, "generation_config", None)
        self.stop_ids = end_ids | _end_ids(getattr(generation, "eos_token_id", None))
        # transformers renamed the argument in release 5.
        self._cache_argument = "cache" if _takes(model, "cache") else "past_key_values"
        self._recorder = _RouterRecorder(model, self.layers)
        trial = self.context()
        self.read(trial, [0], keep=1)
        self.routed = trial.routes is not None
        self.reusable = all(type(layer) is DynamicLayer for layer in trial.cache.layers)

    @classmethod
    def load(cls, settings: EngineSettings) -> tuple[LanguageModel, Tokenizer]:
        """The model and its tokenizer. Raises UsageError for a folder or tokenizer that cannot be read."""
        settings.check_model()
        torch.set_num_threads(settings.threads)
        name = settings.tokenizer or settings.model or DEFAULT_TOKENIZER
        tokenizer = load_tokenizer(name)
        facts = transformers.AutoTokenizer.from_pretrained(str(_folder(name)), local_files_only=True)
        dtype = getattr(torch, settings.dtype)
        if settings.model is None:
            # As many rows as the tokenizer has ids, so that all that it writes can be read.
            model = _built_in(max(facts.get_vocab().values()) + 1, settings.seed, dtype)
        else:
            model = _local(Path(settings.model), dtype)
        title = "miles-ref-tiny-moe" if settings.model is None else Path(settings.model).name
        return cls(model, title, _end_ids(facts.eos_token_id)), tokenizer

    def context(self, segments: Sequence[Segment] = ()) -> Context:
        """A context that has read the tokens of `segments`."""
        return Context(self._config, segments)

    def read(self, context: Context, ids: Sequence[int], keep: int) -> torch.Tensor:
        """Read on in `context`. Logits of the last `keep` (at least 1) of `ids`, shape (keep, vocabulary)."""
        logits, routes = self._forward(ids, keep, {self._cache_argument: context.cache, "use_cache": True})
        context.length += len(ids)
        context.extend_routes(routes)
        return logits

    def read_once(self, ids: Sequence[int], positions: Sequence[int]) -> tuple[torch.Tensor, Routes | None]:
        """One pass over all of `ids` without any cache: log probs after each of `positions`, and all experts.

        Shapes: (len(positions), vocabulary), in the model's dtype; (len(ids), layers, topk).
        """
        logits, routes = self._forward(ids, torch.tensor(positions, dtype=torch.int64), {"use_cache": False})
        return torch.log_softmax(logits, dim=-1), routes

    def _forward(
        self, ids: Sequence[int], keep: int | torch.Tensor, arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, Routes | None]:
        tokens = torch.tensor(ids, dtype=torch.int64)[None]
        self._recorder.start()
        with torch.inference_mode():
            output = self._model(input_ids=tokens, logits_to_keep=keep, **arguments)
        return output.logits[0], self._recorder.take(len(ids))


class _RouterRecorder:
    """Listens to every router of the model: modules that return (logits, weights, chosen experts)."""

    def __init__(self, model: Any, layers: int) -> None:
        self._layers = layers
        self._seen: dict[int, torch.Tensor] = {}
        for name, module in model.named_modules():
            number = re.search(r"\.(\d+)\.", name)
            if number and "router" in type(module).__name__.lower():
                module.register_forward_hook(self._hook(int(number[1])))

    def _hook(self, layer: int) -> Any:
        def note(_module: Any, _inputs: Any, output: Any) -> None:
            chosen = output[-1] if isinstance(output, tuple) else output
            if not chosen.dtype.is_floating_point:
                self._seen[layer] = chosen

        return note

    def start(self) -> None:
        """Forget the pass before."""
        self._seen.clear()

    def take(self, count: int) -> Routes | None:
        """The experts chosen for `count` tokens in every layer; a layer without experts has zeros."""
        if not self._seen:
            return None
        topk = next(iter(self._seen.values())).shape[-1]
        routes = np.zeros((count, self._layers, topk), dtype=np.int32)
        for layer, chosen in self._seen.items():
            routes[:, layer] = chosen.reshape(count, topk).to(torch.int32).numpy()
        return routes


def _built_in(vocabulary: int, seed: int, dtype: torch.dtype) -> Any:
    """A tiny mixture-of-experts. Its weights are large enough that every token matters to those after it."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=32768,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Initialised in double precision whatever the dtype, so that a seed is one model.
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    return _plain_experts(model.to(dtype))


def _local(folder: Path, dtype: torch.dtype) -> Any:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise UsageError(f"transformers cannot load the model in {folder}: {error}") from error
    return _plain_experts(model)


def _plain_experts(model: Any) -> Any:
    """Let experts be computed one by one: the fused ways know no double precision."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def _folder(tokenizer: str) -> Path:
    if tokenizer == "bytes":
        raise UsageError('the tokenizer "bytes" has no chat template; give the engine one that has')
    return tokenizer_path(tokenizer) if tokenizer in tokenizer_names() else Path(tokenizer)


def _end_ids(configured: Any) -> frozenset[int]:
    """Ids that end a generation, as configurations give them: one, several or none."""
    ids: Iterable[int] = [configured] if isinstance(configured, int) else configured or []
    return frozenset(ids)


def _takes(model: Any, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
