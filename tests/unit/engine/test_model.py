from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from miles_ref.data import tokenizer_path
from miles_ref.engine.settings import EngineSettings
from miles_ref.errors import UsageError
from tests.deferred import Deferred

if TYPE_CHECKING:
    from miles_ref.engine.model import LanguageModel

torch = Deferred("torch")
transformers = Deferred("transformers")
models = Deferred("miles_ref.engine.model")
pytestmark = pytest.mark.xdist_group("torch")  # one worker loads torch for all of them
SIZES: dict[str, Any] = {
    "vocab_size": 2052,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LOCAL = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "olmoe": lambda: transformers.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=3),
    "sparse": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=1, mlp_only_layers=[0]
    ),
    "sliding": lambda: transformers.MistralConfig(**SIZES, sliding_window=16),
}


def save(folder: Path, kind: str) -> None:
    """A local model with a tokenizer of its own, as a user would have it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # With weights of chance an expert may get no token at all.
        model = transformers.AutoModelForCausalLM.from_config(LOCAL[kind]())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(str(tokenizer_path("tiny-glm"))).save_pretrained(folder)


@pytest.mark.parametrize(
    ("kind", "topk", "reusable"),
    [("llama", None, True), ("mixtral", 2, True), ("olmoe", 3, True), ("sparse", 1, True), ("sliding", None, False)],
)
def test_local_models_are_served_as_they_are(tmp_path: Path, kind: str, topk: int | None, reusable: bool) -> None:
    save(tmp_path, kind)
    model, tokenizer = models.LanguageModel.load(EngineSettings(model=str(tmp_path)))
    assert (model.layers, model.vocabulary, model.context_length) == (3, 2052, 512)
    assert (model.routed, model.reusable) == (topk is not None, reusable)
    assert tokenizer.encode("<|user|>") == [4]
    assert 0 in model.stop_ids  # the end-of-sequence token of the folder's tokenizer

    ids = [int(token) for token in np.random.default_rng(0).integers(0, 2052, 60)]
    whole, routes = model.read_once(ids, [9, 29, 59])
    context = model.context()
    parts = [model.read(context, ids[start : start + 10], keep=1).log_softmax(-1) for start in range(0, 60, 10)]
    assert context.length == 60
    for row, part in enumerate((parts[0], parts[2], parts[5])):
        assert (whole[row] - part[0]).abs().max() < 1e-5
    if topk is None:
        assert routes is context.routes is None
    else:
        assert routes is not None
        assert routes.shape == (60, 3, topk)
        assert np.array_equal(routes, context.routes)
        assert set(np.unique(routes[:, 1:])) == {0, 1, 2, 3}
        assert (routes[:, 0] == 0).all() == (kind == "sparse")


def test_contexts_can_be_taken_apart_and_continued(tiny_moe: LanguageModel) -> None:
    ids = [int(token) for token in np.random.default_rng(1).integers(0, tiny_moe.vocabulary, 40)]
    first = tiny_moe.context()
    tiny_moe.read(first, ids[:30], keep=1)
    other = tiny_moe.context([first.segment(0, 12), first.segment(12, 30).cut(0, 8)])
    assert other.length == 20
    logits = tiny_moe.read(other, ids[20:], keep=20)
    whole, routes = tiny_moe.read_once(ids, range(20, 40))
    assert (whole - logits.log_softmax(-1)).abs().max() < 1e-9
    assert np.array_equal(routes, other.routes)
    assert first.length == 30


def test_a_seed_is_one_model_and_every_token_matters() -> None:
    from miles_ref.engine.model import _built_in

    def weights(seed: int) -> Any:
        return _built_in(300, seed, torch.float64).lm_head.weight

    assert weights(1).equal(weights(1))
    assert not weights(1).equal(weights(2))


def test_loading_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    models.LanguageModel.load(EngineSettings(seed=9))
    assert torch.rand(1).equal(expected)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (EngineSettings(model="/no/such/folder", tokenizer="tiny-glm"), "config.json"),
        (EngineSettings(tokenizer="tiny-nothing"), "tiny-chatml"),
        (EngineSettings(tokenizer="bytes"), "no chat template"),
    ],
)
def test_what_cannot_be_loaded_is_named(settings: EngineSettings, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        models.LanguageModel.load(settings)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot load the model"):
        models.LanguageModel.load(EngineSettings(model=str(tmp_path), tokenizer="tiny-glm"))
