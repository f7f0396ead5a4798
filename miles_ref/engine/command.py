"""The command `miles-ref engine`. Imports torch only when it runs."""

from __future__ import annotations

import asyncio
import logging
import sys

import click

from miles_ref.engine.settings import DTYPES, POLICIES, EngineSettings
from miles_ref.errors import UsageError


@click.command("engine")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free port.")
@click.option("--seed", default=0, show_default=True, help="Decides the built-in model's weights and the words.")
@click.option("--policy", default="calculator", show_default=True, type=click.Choice(POLICIES))
@click.option("--model", help="Folder of a local Hugging Face causal language model, in place of the built-in one.")
@click.option("--tokenizer", help="A shipped tokenizer's name or a folder.  [default: the model's, or tiny-chatml]")
@click.option("--dtype", default="float64", show_default=True, type=click.Choice(DTYPES))
@click.option("--context-length", type=click.IntRange(min=2), help="In tokens.  [default: the model's]")
@click.option(
    "--cache-tokens",
    default=EngineSettings.__dataclass_fields__["cache_tokens"].default,
    show_default=True,
    type=click.IntRange(min=0),
    help="Budget of the prefix cache, in tokens.",
)
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1), help="Threads of torch.")
@click.option("--weight-version", default="default", show_default=True, help="What replies give as weight_version.")
def engine_command(
    host: str,
    port: int,
    seed: int,
    policy: str,
    model: str | None,
    tokenizer: str | None,
    dtype: str,
    context_length: int | None,
    cache_tokens: int,
    threads: int,
    weight_version: str,
) -> None:
    """Serve a small real language model that speaks SGLang's chat API.

    When it can serve, one JSON line with url and pid is printed on standard output; everything else goes to standard
    error.
    """
    settings = EngineSettings(
        model=model,
        tokenizer=tokenizer,
        seed=seed,
        dtype=dtype,
        policy=policy,
        context_length=context_length,
        cache_tokens=cache_tokens,
        threads=threads,
        weight_version=weight_version,
    )
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        from miles_ref.engine.service import Engine, serve
    except ImportError as error:
        hint = "the engine needs torch and transformers: pip install 'miles-ref[engine]'"
        raise click.ClickException(f"{hint} ({error})") from error
    try:
        asyncio.run(serve(Engine.load(settings), host, port))
    except (UsageError, OSError) as error:
        raise click.ClickException(str(error)) from error
