"""One generation after another token, and the thread that advances all of them."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, TypeAlias

import numpy as np
import torch

from miles_ref.engine.model import Context, LanguageModel, Routes, Segment
from miles_ref.engine.prefix_cache import PrefixCache
from miles_ref.engine.settings import CHUNK, Limits, Sampling
from miles_ref.errors import MilesRefError

FinishReason: TypeAlias = Literal["stop", "length", "abort"]
_GREEDY = 1e-6  # temperatures below it take the most likely id: dividing by them would overflow
Decode: TypeAlias = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be generated: after `prompt` (at least one id), either the ids of `script` or sampled ones."""

    prompt: Sequence[int]
    limits: Limits
    sampling: Sampling
    script: Sequence[int] | None = None


@dataclass(slots=True)
class Output:
    """What was generated.

    `log_probs` are natural logarithms, the model's own at temperature 1 whatever the sampling. `matched` is the stop id
    or stop text that ended it. `routes` are the experts of all tokens but the last, int32, shape (tokens - 1, layers,
    topk); None for a model without a router, and after an abort.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: FinishReason = "abort"
    matched: int | str | None = None
    cached_tokens: int = 0
    routes: Routes | None = None


class Ending:
    """Decides, one output id after another, where a generation ends."""

    def __init__(self, limits: Limits, decode: Decode) -> None:
        self._limits = limits
        self._decode = decode
        # Every id is at least one byte of text, so a stop text lies within this many ids of its end; the four more
        # keep a character that is cut at the window's start out of it.
        self._window = max((len(text.encode()) for text in limits.stop_texts), default=0) + 4

    def after(self, ids: Sequence[int]) -> tuple[FinishReason, int | str | None] | None:
        """Whether the last of `ids` ends the generation, and what it matched."""
        if ids and ids[-1] in self._limits.stop_ids and len(ids) > self._limits.min_tokens:
            return "stop", ids[-1]
        if ids and self._limits.stop_texts:
            text = self._decode(ids[-self._window :])
            for stop in self._limits.stop_texts:
                if stop in text:
                    return "stop", stop
        return ("length", None) if len(ids) >= self._limits.max_tokens else None


def generate(
    work: Work,
    model: LanguageModel,
    cache: PrefixCache[Segment],
    decode: Decode,
    aborted: Callable[[], bool] = lambda: False,
) -> Generator[None, None, Output]:
    """Run `work`; yields between two passes of the model, so that others can have theirs.

    `aborted` is asked after each pass; what there is by then is the output. The script's ids are read by the model like
    any others: the script says what is said, the log probs are the model's. Where a script runs out without a stop id,
    the generation ends with "stop".
    """
    output = Output()
    output.cached_tokens, segments = cache.match(np.asarray(work.prompt[:-1], dtype=np.int64))
    context = model.context(segments)
    ending = Ending(work.limits, decode)
    speak = _sample if work.script is None else _recite
    for _ in chain(_prefill(work, context, model), speak(work, context, model, ending, output)):
        yield
        if aborted():
            output.finish, output.matched = "abort", None
            break
    else:
        output.routes = context.routes
    if model.reusable and context.length:
        read = [*work.prompt, *output.ids][: context.length]
        cache.insert(np.asarray(read, dtype=np.int64), context.segment)
    return output


def _prefill(work: Work, context: Context, model: LanguageModel) -> Iterator[None]:
    """Read the prompt but for its last id, which is read for what follows it."""
    end = len(work.prompt) - 1
    for start in range(context.length, end, CHUNK):
        model.read(context, work.prompt[start : min(start + CHUNK, end)], keep=1)
        yield


def _recite(work: Work, context: Context, model: LanguageModel, ending: Ending, output: Output) -> Iterator[None]:
    spoken: list[int] = []
    finish = ending.after(spoken)
    script = iter(work.script or ())
    while finish is None and (token := next(script, None)) is not None:
        spoken.append(token)
        finish = ending.after(spoken)
    for start in range(0, len(spoken), CHUNK):
        part = spoken[start : start + CHUNK]
        before = work.prompt[-1] if start == 0 else spoken[start - 1]
        log_probs = torch.log_softmax(model.read(context, [before, *part[:-1]], keep=len(part)), dim=-1)
        output.log_probs += log_probs[torch.arange(len(part)), torch.tensor(part)].tolist()
        output.ids += part
        yield
    output.finish, output.matched = finish or ("stop", None)


def _sample(work: Work, context: Context, model: LanguageModel, ending: Ending, output: Output) -> Iterator[None]:
    generator = torch.Generator().manual_seed(work.sampling.seed & (2**63 - 1))
    forbidden = [token for token in work.limits.stop_ids if 0 <= token < model.vocabulary]
    last = work.prompt[-1]
    finish = ending.after(output.ids)
    while finish is None:
        log_probs = torch.log_softmax(model.read(context, [last], keep=1)[-1], dim=-1)
        allowed = log_probs.clone()
        if len(output.ids) < work.limits.min_tokens:
            allowed[forbidden] = -torch.inf
        last = choose(allowed, work.sampling, generator)
        output.ids.append(last)
        output.log_probs.append(float(log_probs[last]))
        finish = ending.after(output.ids)
        yield
    output.finish, output.matched = finish


def choose(log_probs: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """An id drawn from `log_probs`, shape (vocabulary,), after temperature, top_k and top_p."""
    if sampling.temperature < _GREEDY:
        return int(log_probs.argmax())
    order = (log_probs.double() / sampling.temperature).softmax(dim=-1).sort(descending=True, stable=True)
    weights = order.values
    if sampling.top_k > 0:
        weights = weights[: sampling.top_k]
    # The nucleus: an id stays while those before it do not reach top_p yet.
    weights = weights[(weights.cumsum(dim=-1) - weights) < sampling.top_p]
    drawn = torch.multinomial(weights, 1, generator=generator)
    return int(order.indices[drawn])


class EngineClosedError(MilesRefError):
    """The engine is shutting down (503)."""

    status_code = 503


@dataclass(slots=True, eq=False)
class Job:
    """A generation on its way. `prepare` gives the work; it runs in the worker's thread, and may raise."""

    rid: str
    prepare: Callable[[], Work]
    result: Future[tuple[Work, Output]] = field(default_factory=Future)
    aborted: bool = False

    def is_aborted(self) -> bool:
        """Whether it is to end now; set from any thread, read by the worker between passes."""
        return self.aborted


class Worker:
    """The one thread in which the model runs. It advances all jobs in turn, a pass each."""

    def __init__(self, model: LanguageModel, cache: PrefixCache[Segment], decode: Decode) -> None:
        self._model = model
        self._cache = cache
        self._decode = decode
        self._incoming: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._jobs: set[Job] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="miles-ref-engine", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> Future[tuple[Work, Output]]:
        """Run `job`; its result is ready when it ended, by an abort too. Raises EngineClosedError after `close`."""
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is shutting down and takes no more requests")
            # From here on the future cannot be cancelled: a job is ended by an abort only.
            job.result.set_running_or_notify_cancel()
            self._jobs.add(job)
            self._incoming.put(job)
        return job.result

    def abort(self, rid: str | None = None) -> int:
        """End the jobs of this request id (None: all) after their current pass. Returns how many there are."""
        with self._lock:
            found = [job for job in self._jobs if rid is None or job.rid == rid]
            for job in found:
                job.aborted = True
        return len(found)

    @property
    def running(self) -> int:
        """How many jobs have not ended."""
        return len(self._jobs)

    def close(self) -> None:
        """Take no more jobs, end all there are as aborted, then the thread. Waits for the pass that is under way."""
        with self._lock:
            self._closed = True
            self._incoming.put(None)
        self.abort()
        self._thread.join()

    def _run(self) -> None:
        running: deque[tuple[Job, Work, Generator[None, None, Output]]] = deque()
        open_ = True
        while open_ or running:
            while open_ and (not running or not self._incoming.empty()):
                job = self._incoming.get()
                if job is None:
                    open_ = False
                elif (work := self._prepare(job)) is not None:
                    steps = generate(work, self._model, self._cache, self._decode, job.is_aborted)
                    running.append((job, work, steps))
            if running and self._advance(*running[0]):
                running.rotate(-1)
            elif running:
                running.popleft()

    def _prepare(self, job: Job) -> Work | None:
        try:
            work = job.prepare()
        except Exception as error:
            self._end(job, error)
            return None
        if job.aborted:
            self._end(job, (work, Output()))
            return None
        return work

    def _advance(self, job: Job, work: Work, steps: Generator[None, None, Output]) -> bool:
        """One pass. Whether there are more."""
        try:
            next(steps)
        except StopIteration as stop:
            self._end(job, (work, stop.value))
            return False
        except Exception as error:
            self._end(job, error)
            return False
        return True

    def _end(self, job: Job, outcome: tuple[Work, Output] | Exception) -> None:
        with self._lock:
            self._jobs.discard(job)
        if isinstance(outcome, Exception):
            job.result.set_exception(outcome)
        else:
            job.result.set_result(outcome)
