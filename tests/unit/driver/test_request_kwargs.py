"""session-http.md, Driver: request_kwargs from the sampling parameters."""

import pytest

from miles_ref.driver.request_kwargs import request_kwargs


@pytest.mark.parametrize(
    ("name", "target"), [("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens"), ("sampling_seed", "seed")]
)
def test_names_of_the_generate_api_are_translated(name: str, target: str) -> None:
    assert request_kwargs({name: 7}) == {target: 7}


@pytest.mark.parametrize(
    ("name", "target"), [("max_new_tokens", "max_tokens"), ("min_new_tokens", "min_tokens"), ("sampling_seed", "seed")]
)
@pytest.mark.parametrize("target_first", [True, False])
def test_an_explicit_target_wins_in_any_order(name: str, target: str, target_first: bool) -> None:
    pairs = [(target, 3), (name, 7)]
    assert request_kwargs(dict(pairs if target_first else reversed(pairs))) == {target: 3}


def test_a_target_of_none_is_not_explicit() -> None:
    assert request_kwargs({"max_tokens": None, "max_new_tokens": 7}) == {"max_tokens": 7}


def test_none_unknown_keys_model_and_messages_are_dropped() -> None:
    given = {"temperature": None, "surprise": 1, "model": "m", "messages": [], "top_p": 0.5, "max_new_tokens": None}
    assert request_kwargs(given) == {"top_p": 0.5}


def test_falsy_values_stay() -> None:
    falsy = {"temperature": 0.0, "top_k": 0, "stop": [], "skip_special_tokens": False}
    assert request_kwargs(falsy | {"sampling_seed": 0}) == falsy | {"seed": 0}


def test_the_parameters_are_not_changed() -> None:
    given = {"max_new_tokens": 7, "junk": 1, "top_p": None}
    request_kwargs(given)
    assert given == {"max_new_tokens": 7, "junk": 1, "top_p": None}
