"""Show an episode: the samples' text, the turns, the tree, the bytes, and what the proof found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from miles_ref.demo.episode import Episode
from miles_ref.engine.settings import DEFAULT_TOKENIZER
from miles_ref.plugins.tree_command import draw, read_stories
from miles_ref.records import int_array
from miles_ref.sample import Sample
from miles_ref.tokens.tokenizer import Tokenizer, load_tokenizer

TREE_WIDTH = 1000  # a line a node, whatever the terminal
PROMPT, OBSERVED, TRAINED = "dim", "cyan", "bold green"
_MARKS = {PROMPT: ("", ""), OBSERVED: ("", ""), TRAINED: ("«", "»")}  # for a terminal without colours


def show(episode: Episode, console: Console) -> None:
    """Print all of it on `console`; without colours the trained text stands between « and »."""
    tokenizer = load_tokenizer(DEFAULT_TOKENIZER)
    for number, sample in enumerate(episode.samples):
        console.rule(_title(number, sample, len(episode.samples)))
        console.print(_colour_text(sample, tokenizer, marks=not console.is_terminal), soft_wrap=True)
    tree = episode.dump["metadata"].get("tree")
    console.rule("turns" if tree is None else "turns of the last path")
    console.print(_turns(episode.dump["records"]))
    if tree is not None:
        console.rule("tree")
        wide = Console(file=console.file, width=TREE_WIDTH, highlight=False)
        for root in draw(read_stories(episode.payload_file.read_bytes())):
            wide.print(root)
    console.rule("result")
    console.print(_result(episode))


def _title(number: int, sample: Sample, count: int) -> str:
    which = "the sample" if count == 1 else f"sample {number + 1} of {count}"
    reward = "" if sample.reward is None else f", reward {sample.reward:g}"
    return f"{which}: {len(sample.tokens)} tokens, {sum(sample.loss_mask)} trained, {sample.status.value}{reward}"


def _runs(sample: Sample) -> Iterator[tuple[str, list[int]]]:
    """The tokens in runs of one kind: prompt, observed (response, mask 0), trained."""
    start = len(sample.tokens) - sample.response_length
    yield PROMPT, sample.tokens[:start]
    at = start
    for trained, group in groupby(sample.loss_mask):
        count = len(list(group))
        yield TRAINED if trained else OBSERVED, sample.tokens[at : at + count]
        at += count


def _colour_text(sample: Sample, tokenizer: Tokenizer, *, marks: bool) -> Text:
    text = Text()
    for style, ids in _runs(sample):
        opening, closing = _MARKS[style] if marks else ("", "")
        text.append(f"{opening}{tokenizer.decode(int_array(ids))}{closing}", style)
    return text


def _turns(records: list[dict[str, Any]]) -> Table:
    table = Table("turn", "prompt", "cached", "output", "finish", "seconds", "mean log prob", box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for number, record in enumerate(records, 1):
        choice = record["response"]["choices"][0]
        meta = choice["meta_info"]
        log_probs = [float(entry[0]) for entry in meta["output_token_logprobs"]]
        table.add_row(
            str(number),
            str(len(record["request"]["input_ids"])),
            str(meta.get("cached_tokens", "")),
            str(len(log_probs)),
            choice["finish_reason"],
            f"{meta['e2e_latency']:.2f}" if "e2e_latency" in meta else "",
            f"{sum(log_probs) / len(log_probs):.2f}" if log_probs else "",
        )
    return table


def _result(episode: Episode) -> Table:
    figures = episode.figures()
    table = Table(show_header=False, box=None, pad_edge=False)
    whole = len(episode.dump["records"]) == figures["turns"]  # else a tree, of which the dump has one path only
    share = f", {figures['samples_bytes'] / figures['records_bytes']:.0%} of the records" if whole else ""
    table.add_row("records", f"{figures['records_bytes']:,} bytes", str(episode.records_file))
    table.add_row("samples", f"{figures['samples_bytes']:,} bytes{share}", str(episode.payload_file))
    table.add_row(
        "log probs", f"largest error {float(figures['max_logprob_error']):.2e} of {figures['trained_tokens']} trained"
    )
    for name, found in episode.proof["controls"].items():
        error = float(found)  # an infinite one is a text in JSON
        verdict = "fails, as it must" if error > episode.proof["tolerance"] else "PASSES, which it must not"
        table.add_row(f"control {name.replace('_', ' ')}", f"error {error:.2e}: {verdict}")
    table.add_row("seconds", f"{figures['seconds']:.1f}")
    table.add_row("proven", Text("yes", "bold green") if episode.proven else Text("NO", "bold red"))
    return table
