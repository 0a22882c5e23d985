"""`oxrl generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.console import Out, say
from oxrl.data.rows import read_rows
from oxrl.errors import DataError, is_named_pipe, why_no_file
from oxrl.models.lazy_transformers import import_model_classes
from oxrl.runs.files import encode_line
from oxrl.tables.engines import SamplingEngineName

ShownImages = Annotated[
    list[str] | None,
    typer.Option(help="A file that every question shows; may be given several times."),
]
Engine = Annotated[
    SamplingEngineName, typer.Option(help="What samples; vllm: in a process of its own.")
]
Env = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE.py:CLASS|CONFIG|RUN",
        help="Play episodes with this environment, or that of a config or run.",
    ),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="Of environment.options; repeatable."),
]
MaxTurns = Annotated[
    int | None, typer.Option(min=1, help="Of an episode; default: the environment's.")
]


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            help="Run (its newest checkpoint), checkpoint, or model by folder or name.",
        ),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A question; may be given several times.")
    ] = None,
    prompts_file: Annotated[
        Path | None, typer.Option(help='A prompt per line; .jsonl: its "prompt".')
    ] = None,
    image: ShownImages = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Responses per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus mass; 1: off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Most likely tokens; 0: off.")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest response (256), or turn (the config's).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same responses.")] = 0,
    engine: Engine = "local",
    out: Out = None,
    env: Env = None,
    env_option: EnvOption = None,
    max_turns: MaxTurns = None,
) -> None:
    """Sample from a model or checkpoint; with --env, play episodes and print them."""
    _check_together(top_p, image, engine, env)
    import_model_classes()
    from oxrl.commands.evaluate import GENERATION, run_generate  # torch

    given = replace(GENERATION, temperature=temperature, top_p=top_p, top_k=top_k)
    if env is not None:
        from oxrl.commands.play import option_overrides, run_play, transcript  # environments

        limits = {"rollout.max_tokens": max_tokens, "environment.max_turns": max_turns}
        overrides = option_overrides(env_option or [], limits)
        asked = _to_play(prompt or [], prompts_file)
        played = run_play(model, env, asked, overrides, samples=n, sampling=given, seed=seed)
        _show([transcript(episode) for episode in played], played, out)
        return
    for name, value in (("--env-option", env_option), ("--max-turns", max_turns)):
        if value:
            raise typer.BadParameter("is for episodes: add --env", param_hint=name)
    prompts = [*(prompt or []), *(read_prompts(prompts_file) if prompts_file else [])]
    if not prompts:
        raise DataError("no prompt: give --prompt TEXT (repeatable) or --prompts-file FILE")
    sampling = replace(given, max_tokens=max_tokens or given.max_tokens)
    records = run_generate(
        model, prompts, samples=n, sampling=sampling, seed=seed, images=image or [], engine=engine
    )
    _show([_told(record) for record in records], records, out)


def _check_together(
    top_p: float, image: list[str] | None, engine: SamplingEngineName, env: str | None
) -> None:
    """Options of `generate` that do not go together, or have no meaning."""
    if top_p == 0:
        raise typer.BadParameter(
            "must be above 0; --top-k 1 takes the most likely token", param_hint="--top-p"
        )
    if engine != "local" and (env is not None or image):
        raise typer.BadParameter(
            "is for questions of text alone: leave out --env and --image", param_hint="--engine"
        )
    if env is not None and image:
        raise typer.BadParameter("environments show their own images", param_hint="--image")


def _told(record: Mapping[str, object]) -> str:
    """A response under its prompt."""
    end = f"[{record['finish_reason']}, {record['tokens']} tokens]"
    return f"> {record['prompt']}\n{record['response']}\n{end}"


def _show(texts: Sequence[str], records: Sequence[Mapping[str, object]], out: Path | None) -> None:
    """Print what was sampled, and write its records."""
    for text in texts:
        say(f"{text}\n")
    if out is not None:
        out.write_bytes(b"".join(encode_line(record) for record in records))


def _to_play(prompts: Sequence[str], file: Path | None) -> Sequence[str] | Path:
    """The prompts of episodes: texts, or a file of rows with answers and other columns."""
    if file is None or file.suffix not in (".jsonl", ".parquet"):
        return [*prompts, *(read_prompts(file) if file is not None else [])]
    if prompts:
        raise typer.BadParameter(
            "with --env, not beside a --prompts-file of rows", param_hint="--prompt"
        )
    return file


def read_prompts(path: Path) -> list[str]:
    """One prompt per line that is not blank, or the field "prompt" of each row of a .jsonl file."""
    if is_named_pipe(path):
        raise DataError(f"--prompts-file {path}: {why_no_file(path)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"--prompts-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"--prompts-file {path}: not UTF-8") from None
    if path.suffix != ".jsonl":
        # Not splitlines: other line separators may stand in a prompt.
        return [line for line in text.split("\n") if line.strip()]
    rows = list(read_rows(path))
    for row in rows:
        if not isinstance(row.fields.get("prompt"), str):
            row.fail('no text under "prompt"', '{"prompt": "a question"}')
    return [row.fields["prompt"] for row in rows]
