"""The commands `miles-ref engine` and `miles-ref prove`. They import torch only when they run."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from miles_ref.engine.settings import DEFAULT_CACHE_TOKENS, DTYPES, POLICIES, SEEDS, EngineSettings
from miles_ref.errors import DecodeError, UsageError

_MISSING = "the engine needs torch and transformers: pip install 'miles-ref[engine]'"
_MODEL_OPTIONS = (
    click.option(
        "--seed",
        default=0,
        show_default=True,
        type=click.IntRange(*SEEDS),
        help="Decides the built-in model's weights and the words.",
    ),
    click.option("--model", help="Folder of a local Hugging Face causal language model, in place of the built-in one."),
    click.option("--tokenizer", help="A shipped tokenizer or a folder.  [default: the model's, or tiny-chatml]"),
    click.option("--dtype", default="float64", show_default=True, type=click.Choice(DTYPES)),
    click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of torch."),
)


def _model_options(function: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_MODEL_OPTIONS):
        function = option(function)
    return function


def _settings(options: dict[str, Any]) -> EngineSettings:
    settings = EngineSettings(**options)
    try:
        settings.check_model()  # a typing mistake is told at once, not after torch is imported
    except UsageError as error:
        raise click.ClickException(str(error)) from error
    return settings


@click.command("engine")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free port.")
@_model_options
@click.option("--policy", default="calculator", show_default=True, type=click.Choice(POLICIES))
@click.option("--context-length", type=click.IntRange(min=2), help="In tokens.  [default: the model's]")
@click.option(
    "--cache-tokens",
    default=DEFAULT_CACHE_TOKENS,
    show_default=True,
    type=click.IntRange(min=0),
    help="Budget of the prefix cache, in tokens.",
)
@click.option("--weight-version", default="default", show_default=True, help="What replies give as weight_version.")
@click.option("--until-eof", is_flag=True, help="End when standard input closes, so as not to outlive the parent.")
def engine_command(host: str, port: int, until_eof: bool, **settings: Any) -> None:
    """Serve a small real language model that speaks SGLang's chat API.

    When it can serve, one JSON line with url and pid is printed on standard output; everything else goes to standard
    error. With the calculator policy the replies are scripted and the log probs are the model's own; with the sample
    policy the model speaks.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    chosen = _settings(settings)
    try:
        from miles_ref.engine.service import Engine, serve
    except ImportError as error:
        raise click.ClickException(f"{_MISSING} ({error})") from error
    try:
        asyncio.run(serve(Engine.load(chosen), host, port, until_eof=until_eof))
    except (UsageError, OSError) as error:
        raise click.ClickException(str(error)) from error
    # All is closed by now. Python would need seconds more to take torch's modules apart.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@click.command("prove")
@click.argument("payload", type=click.Path(exists=True, dir_okay=False))
@_model_options
def prove_command(payload: str, **settings: Any) -> None:
    """Prove the samples in the file PAYLOAD: recompute every trained token's log prob, without any cache.

    Prints a JSON report. The exit status is 0 only when all log probs agree and every control fails.
    """
    chosen = _settings(settings)
    try:
        from miles_ref.engine.proof import prove_payload
    except ImportError as error:
        raise click.ClickException(f"{_MISSING} ({error})") from error
    try:
        report = prove_payload(payload, chosen)
    except (UsageError, DecodeError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(report.to_json(), allow_nan=False))
    sys.exit(0 if report.proven else 1)
