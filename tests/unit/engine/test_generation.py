from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from miles_ref.engine.prefix_cache import PrefixCache
from miles_ref.engine.settings import CHUNK, Limits, Sampling
from tests.deferred import Deferred

if TYPE_CHECKING:
    from miles_ref.engine.model import LanguageModel, Segment

torch = Deferred("torch")
generation = Deferred("miles_ref.engine.generation")
pytestmark = pytest.mark.xdist_group("torch")  # one worker loads torch for all of them
STOP = 7
MANY = Limits(max_tokens=10_000, stop_ids=frozenset({STOP}))


def letters(ids) -> str:
    return "".join(chr(ord("a") + token % 26) for token in ids)


def drain(steps) -> generation.Output:
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value


def ids(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(8, 2000, count)]


def recomputed(model: LanguageModel, prompt: list[int], output: generation.Output) -> list[float]:
    tokens = prompt + output.ids
    positions = list(range(len(prompt) - 1, len(tokens) - 1))
    log_probs, _ = model.read_once(tokens, positions)
    return [float(log_probs[row, token]) for row, token in enumerate(output.ids)]


@pytest.mark.parametrize("prompt_length", [1, 2, CHUNK, CHUNK + 1, CHUNK + 2])
@pytest.mark.parametrize("script_length", [0, 1, CHUNK, 2 * CHUNK + 1])
def test_a_script_gets_the_models_own_log_probs(
    tiny_moe: LanguageModel, prompt_length: int, script_length: int
) -> None:
    prompt, script = ids(prompt_length), [*ids(script_length, 1), STOP]
    output = drain(
        generation.generate(generation.Work(prompt, MANY, Sampling(), script), tiny_moe, PrefixCache(0), letters)
    )
    assert (output.ids, output.finish, output.matched) == (script, "stop", STOP)
    assert output.cached_tokens == 0
    assert np.abs(np.subtract(output.log_probs, recomputed(tiny_moe, prompt, output))).max() < 1e-9
    _, routes = tiny_moe.read_once(prompt + script, [0])
    assert routes is not None
    assert np.array_equal(output.routes, routes[:-1])
    assert routes.shape[1:] == (4, 2)
    assert len(np.unique(routes)) == 8 or len(routes) < CHUNK


def test_a_script_ends_at_its_limits(tiny_moe: LanguageModel) -> None:
    def run(limits: Limits, script: list[int]) -> tuple[list[int], str, object]:
        output = drain(
            generation.generate(generation.Work([1, 2], limits, Sampling(), script), tiny_moe, PrefixCache(0), letters)
        )
        assert len(output.log_probs) == len(output.ids)
        assert output.routes is not None
        assert len(output.routes) == 2 + len(output.ids) - 1
        return output.ids, output.finish, output.matched

    assert run(Limits(2), [10, 11, 12]) == ([10, 11], "length", None)
    assert run(Limits(3), [10, 11, 12]) == ([10, 11, 12], "length", None)
    assert run(Limits(0), [10]) == ([], "length", None)
    assert run(Limits(9), [10, 11]) == ([10, 11], "stop", None)
    assert run(Limits(9, stop_ids=frozenset({11})), [10, 11, 12]) == ([10, 11], "stop", 11)
    assert run(Limits(9, stop_texts=("x", "lm")), [10, 11, 12]) == ([10, 11, 12], "stop", "lm")


def test_a_stop_text_may_span_ids_and_characters() -> None:
    def decode(ids) -> str:
        return bytes(ids).decode(errors="replace")

    ending = generation.Ending(Limits(100, stop_texts=("é!",)), decode)
    text = list(("ü" * 30 + "é!").encode())
    assert [ending.after(text[:end]) for end in range(1, len(text))] == [None] * (len(text) - 1)
    assert ending.after(text) == ("stop", "é!")


def test_what_was_read_once_is_not_read_again(tiny_moe: LanguageModel) -> None:
    cache: PrefixCache[Segment] = PrefixCache(10_000)
    first = generation.Work(ids(300), MANY, Sampling(), [*ids(20, 1), STOP])
    one = drain(generation.generate(first, tiny_moe, cache, letters))
    longer = [*first.prompt, *one.ids, *ids(40, 2)]
    follow = generation.Work(longer, MANY, Sampling(), [*ids(5, 3), STOP])
    two = drain(generation.generate(follow, tiny_moe, cache, letters))
    assert two.cached_tokens == len(first.prompt) + len(one.ids) - 1  # the last id was said, not read
    assert np.abs(np.subtract(two.log_probs, recomputed(tiny_moe, longer, two))).max() < 1e-9
    _, routes = tiny_moe.read_once(longer + two.ids, [0])
    assert np.array_equal(two.routes, routes[:-1])
    assert drain(generation.generate(follow, tiny_moe, cache, letters)).cached_tokens == len(longer) - 1

    branch = [*longer[:150], *ids(10, 4)]
    three = drain(generation.generate(generation.Work(branch, MANY, Sampling(), [STOP]), tiny_moe, cache, letters))
    assert three.cached_tokens == 150
    assert np.abs(np.subtract(three.log_probs, recomputed(tiny_moe, branch, three))).max() < 1e-9
    assert cache.tokens == len(longer) + 5 + 10


def test_sampling_follows_the_model(tiny_moe: LanguageModel) -> None:
    work = generation.Work(ids(30), Limits(40), Sampling(seed=5))
    output = drain(generation.generate(work, tiny_moe, PrefixCache(1000), letters))
    assert (len(output.ids), output.finish) == (40, "length")
    assert np.abs(np.subtract(output.log_probs, recomputed(tiny_moe, list(work.prompt), output))).max() < 1e-9
    assert drain(generation.generate(work, tiny_moe, PrefixCache(0), letters)).ids == output.ids
    other = generation.Work(work.prompt, work.limits, Sampling(seed=6))
    assert drain(generation.generate(other, tiny_moe, PrefixCache(0), letters)).ids != output.ids


def test_sampling_ends_at_a_stop_id_but_not_too_early(tiny_moe: LanguageModel) -> None:
    free = drain(
        generation.generate(generation.Work([5], Limits(9), Sampling(temperature=0)), tiny_moe, PrefixCache(0), letters)
    )
    stop = free.ids[0]
    at_once = generation.Work([5], Limits(9, stop_ids=frozenset({stop})), Sampling(temperature=0))
    output = drain(generation.generate(at_once, tiny_moe, PrefixCache(0), letters))
    assert (output.ids, output.finish, output.matched) == ([stop], "stop", stop)
    later = generation.Work(
        [5], Limits(9, min_tokens=4, stop_ids=frozenset({stop, -1, 10**9})), Sampling(temperature=0)
    )
    output = drain(generation.generate(later, tiny_moe, PrefixCache(0), letters))
    assert len(output.ids) > 4
    assert stop not in output.ids[:4]


def test_choose() -> None:
    log_probs = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=torch.float64).log()

    def drawn(**sampling: float) -> dict[int, float]:
        generator = torch.Generator().manual_seed(0)
        counts = np.bincount(
            [generation.choose(log_probs, Sampling(**sampling), generator) for _ in range(4000)], minlength=4
        )
        return {token: count / 4000 for token, count in enumerate(counts) if count}

    assert drawn() == pytest.approx({0: 0.1, 1: 0.5, 2: 0.15, 3: 0.25}, abs=0.03)
    assert drawn(temperature=0) == {1: 1.0}
    assert drawn(temperature=1e-3) == drawn(temperature=1e-320) == {1: 1.0}
    assert set(drawn(top_k=2)) == {1, 3}
    assert set(drawn(top_p=0.5)) == {1}
    assert set(drawn(top_p=0.51)) == {1, 3}
    assert set(drawn(top_p=1e-9)) == {1}


def test_an_abort_keeps_what_there_is(tiny_moe: LanguageModel) -> None:
    asked = iter([False, False, True])
    cache: PrefixCache[Segment] = PrefixCache(10_000)
    steps = generation.generate(
        generation.Work(ids(3), MANY, Sampling(seed=1)), tiny_moe, cache, letters, lambda: next(asked)
    )
    output = drain(steps)
    assert (output.finish, output.matched, output.routes) == ("abort", None, None)
    assert len(output.ids) == len(output.log_probs) == 2
    assert cache.match(np.array([*ids(3), *output.ids]))[0] == 4

    output = drain(
        generation.generate(generation.Work(ids(3 * CHUNK), MANY, Sampling()), tiny_moe, cache, letters, lambda: True)
    )
    assert (output.finish, output.ids) == ("abort", [])


@pytest.fixture
def worker(tiny_moe: LanguageModel):
    worker = generation.Worker(tiny_moe, PrefixCache(10_000), letters)
    worker.start()
    yield worker
    worker.close()


def job(rid: str, limits: Limits = MANY, script: list[int] | None = None) -> generation.Job:
    return generation.Job(rid, lambda: generation.Work([1, 2, 3], limits, Sampling(), script))


def test_a_long_job_does_not_hold_up_a_short_one(worker: generation.Worker) -> None:
    endless = worker.submit(job("long", Limits(10**9)))
    work, output = worker.submit(job("short", script=[10, STOP])).result(60)
    assert (output.ids, list(work.prompt)) == ([10, STOP], [1, 2, 3])
    assert not endless.done()
    assert worker.abort("other") == 0
    assert worker.abort("long") == 1
    assert endless.result(60)[1].finish == "abort"


def test_abort_all_and_close(tiny_moe: LanguageModel) -> None:
    worker = generation.Worker(tiny_moe, PrefixCache(0), letters)
    worker.start()
    results = [worker.submit(job(str(number), Limits(10**9))) for number in range(3)]
    assert worker.abort() == 3
    assert {result.result(60)[1].finish for result in results} == {"abort"}
    running = worker.submit(job("last", Limits(10**9)))
    worker.close()
    assert running.result(0)[1].finish == "abort"
    with pytest.raises(generation.EngineClosedError):
        worker.submit(job("late"))


def test_one_jobs_failure_is_its_own(worker: generation.Worker) -> None:
    def fails() -> generation.Work:
        raise KeyError("prepare")

    with pytest.raises(KeyError):
        worker.submit(generation.Job("a", fails)).result(60)
    with pytest.raises(IndexError):
        worker.submit(generation.Job("b", lambda: generation.Work([10**6], MANY, Sampling(), [STOP]))).result(60)
    assert worker.submit(job("c", script=[STOP])).result(60)[1].ids == [STOP]
