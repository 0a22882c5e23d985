"""The `oxrl` command.

Every command imports what it runs when it runs: help and config errors need no torch.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from oxrl import __version__
from oxrl.config import Config, config_diff, config_schema, dump_config, load_config
from oxrl.errors import ConfigError, DataError, OxrlError, known, why_no_file
from oxrl.plan.plan import plan_text
from oxrl.redact import shown
from oxrl.runs.files import encode_line
from oxrl.runs.os_errors import explained
from oxrl.tables.engines import SamplingEngineName
from oxrl.tables.policy import ROWS, Row

app = typer.Typer(
    name="oxrl",
    help="Post-training of language models. "
    "Exit codes: 0 done, 2 bad input, 75 stopped and resumable, 1 other.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show, describe or compare configurations."
)
app.add_typer(config_app, name="config")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="section.field=value sets, ~section.field takes back."
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the newest checkpoint; start if there is none.")
]
Accept = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-changes",
        metavar="FIELD",
        help="Resume although this field, or a file that it names, changed; repeatable.",
    ),
]
FromSamples = Annotated[
    str | None,
    typer.Option(
        "--from-samples",
        metavar="RUN",
        help="Train on the samples of this run, recorded with run.record=tokens; sample none.",
    ),
]
RolloutOnly = Annotated[
    bool, typer.Option("--rollout-only", help="Sample, score and record; train nothing.")
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Run one step, the model shrunk and random, in a temporary folder."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oxrl {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """What stands before the name of a command."""


def _writable(out: Path | None) -> Path | None:
    """Refuse before the work is done what could not be written after it."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise typer.BadParameter(f"{out}: {why_no_file(out)}")
    return out


Out = Annotated[
    Path | None,
    typer.Option(
        "--out", callback=_writable, help="Write every response there, one JSON object per line."
    ),
]


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    accept: Accept = None,
    dry_run: DryRun = False,
    from_samples: FromSamples = None,
    rollout_only: RolloutOnly = False,
) -> None:
    """Train with any algorithm, chosen by train.alg_name."""
    asked = [*(overrides or [])]
    if from_samples is not None:
        asked.append(f"rollout.from_samples={json.dumps(from_samples)}")
    if rollout_only:
        asked.append("run.only=rollouts")
    _train(_load(config, asked), resume=resume, accept=accept or [], dry_run=dry_run)


def _train(cfg: Config, *, resume: bool, accept: Sequence[str], dry_run: bool) -> None:
    from oxrl.recipes import check_accepted, run

    check_accepted(accept, resume=resume)
    if not dry_run:
        run(cfg, resume=resume, accept=accept)
        return
    from oxrl.commands.dry_run import dry_run as take_one_step

    described = take_one_step(cfg)
    _say(f"dry run done: one step on {described}; nothing was kept")


@app.command()
def plan(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a config and what it names; print its batch equation, memory and disk; run nothing."""
    from oxrl.plan.preflight_process import examine_apart

    cfg = _load(config, overrides)
    _say(plan_text(cfg))
    wrong: dict[str, str] = {}
    for subject, state, text in examine_apart(cfg):
        if state == "wrong":  # what a later check finds under the same name follows from the first
            wrong.setdefault(text.partition(":")[0], text)
        else:
            _say(f"{state:<11}{subject}: {text}")
    if wrong:
        count = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
        raise ConfigError("\n\n".join((f"{count} in what {config} names", *wrong.values())))


@app.command("eval")
def evaluate(
    target: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|RUN|CHECKPOINT|MODEL",
            help="Config, run (its newest checkpoint), checkpoint, or model by folder or name.",
        ),
    ],
    overrides: Overrides = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Default: rollout.eval_samples.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="Default: rollout.eval_temperature.")
    ] = None,
    pick: Annotated[
        str | None, typer.Option(help="Another reward: score its favorite of each prompt's.")
    ] = None,
    out: Out = None,
) -> None:
    """Reward, pass@k and best-of-k on held-out data; of supervised runs loss and perplexity."""
    _import_model_classes()
    from oxrl.commands.evaluate import run_eval

    metrics = run_eval(
        target, overrides or [], samples=samples, temperature=temperature, pick=pick, out=out
    )
    for name, value in metrics.items():
        typer.echo(f"{name:<24}{value:.6g}")


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


@app.command()
def score(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run directory with samples.jsonl.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[reward.KEY=VALUE]...", help="Another reward, or other settings of the run's."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", callback=_writable, help="Write both scores of every sample there, as JSONL."
        ),
    ] = None,
) -> None:
    """Score the samples of a run with another reward; say what would have changed."""
    _import_model_classes()
    from oxrl.commands.rescore import report, run_score

    _say(report(run_score(run, overrides or [], out)))


@app.command()
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
    _import_model_classes()
    from oxrl.types import Sampling

    given = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    if env is not None:
        from oxrl.commands.play import option_overrides, run_play, transcript

        limits = {"rollout.max_tokens": max_tokens, "environment.max_turns": max_turns}
        overrides = option_overrides(env_option or [], limits)
        asked = _to_play(prompt or [], prompts_file)
        played = run_play(model, env, asked, overrides, samples=n, sampling=given, seed=seed)
        _show([transcript(episode) for episode in played], played, out)
        return
    for name, value in (("--env-option", env_option), ("--max-turns", max_turns)):
        if value:
            raise typer.BadParameter("is for episodes: add --env", param_hint=name)
    prompts = [*(prompt or []), *(_read_prompts(prompts_file) if prompts_file else [])]
    if not prompts:
        raise DataError("no prompt: give --prompt TEXT (repeatable) or --prompts-file FILE")
    from oxrl.commands.evaluate import run_generate

    sampling = replace(given, max_tokens=max_tokens or 256)
    records = run_generate(
        model, prompts, samples=n, sampling=sampling, seed=seed, images=image or [], engine=engine
    )
    _show([_told(record) for record in records], records, out)


def _import_model_classes() -> None:
    """What every model is made of, before anything imports it together with more."""
    from oxrl.models.lazy_transformers import import_model_classes

    import_model_classes()


def _check_together(
    top_p: float, image: list[str] | None, engine: SamplingEngineName, env: str | None
) -> None:
    """Options of `generate` that do not go together, or have no meaning."""
    if top_p == 0:
        text = "must be above 0; --top-k 1 takes the most likely token"
        raise typer.BadParameter(text, param_hint="--top-p")
    if engine != "local" and (env is not None or image):
        text = "is for questions of text alone: leave out --env and --image"
        raise typer.BadParameter(text, param_hint="--engine")
    if env is not None and image:
        raise typer.BadParameter("environments show their own images", param_hint="--image")


def _told(record: Mapping[str, object]) -> str:
    """A response under its prompt."""
    end = f"[{record['finish_reason']}, {record['tokens']} tokens]"
    return f"> {record['prompt']}\n{record['response']}\n{end}"


def _show(texts: Sequence[str], records: Sequence[Mapping[str, object]], out: Path | None) -> None:
    """Print what was sampled, and write its records."""
    for text in texts:
        _say(f"{text}\n")
    if out is not None:
        out.write_bytes(b"".join(encode_line(record) for record in records))


def _to_play(prompts: Sequence[str], file: Path | None) -> Sequence[str] | Path:
    """The prompts of episodes: texts, or a file of rows with answers and other columns."""
    if file is None or file.suffix not in (".jsonl", ".parquet"):
        return [*prompts, *(_read_prompts(file) if file is not None else [])]
    if prompts:
        raise typer.BadParameter(
            "with --env, not beside a --prompts-file of rows", param_hint="--prompt"
        )
    return file


def _read_prompts(path: Path) -> list[str]:
    """One prompt per line that is not blank, or the field "prompt" of each row of a .jsonl file."""
    from oxrl.data.rows import read_rows

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


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    out: Annotated[
        Path | None,
        typer.Option(callback=_writable, help="The file; default: report.html in the first run."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page to this machine while runs go on.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --live; 0: any.")] = 0,
) -> None:
    """Write runs as one HTML page that opens offline: curves, health, samples, configuration."""
    if live:
        from oxrl.report.live import serve

        serve(runs, port, lambda url: _say(f"serving {url} until Ctrl-C"))
        return
    from oxrl.report.page import write_report

    _say(f"wrote {write_report(runs, out)}")


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")],
    step: Annotated[
        int,
        typer.Option(help="Optimizer step, as in metrics.jsonl and samples.jsonl."),
    ],
    sample: Annotated[
        int | None, typer.Option(help="Only this one of the step's samples, from 0.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, help="Relative, of sums; default: 1e-5.")
    ] = None,
) -> None:
    """Make an update, or draw a sample, once more and compare it with the record.

    It begins at the nearest checkpoint before and writes nothing. Exit code 0: equal, 1: different.
    """
    _import_model_classes()
    from oxrl.commands.replay import TOLERANCE
    from oxrl.commands.replay import replay as go_through_again

    limit = TOLERANCE if tolerance is None else tolerance
    findings = go_through_again(run, step, sample, tolerance=limit)
    for finding in findings:
        _say(str(finding))
    raise typer.Exit(0 if all(finding.equal for finding in findings) else 1)


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|MODEL",
            help="Run (its newest checkpoint), checkpoint, or model by folder or name.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to write to: not there yet, or empty; outside of runs.")
    ],
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights.")
    ] = "float32",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export there, nothing else.")
    ] = False,
) -> None:
    """Write a whole model in Hugging Face format, adapters merged into its weights."""
    from oxrl.commands.export import run_export

    _say(f"wrote {run_export(source, out, dtype=dtype, overwrite=overwrite)}")


def _complete_dataset(incomplete: str) -> list[str]:
    from oxrl.data.prepare import PREPARERS

    return [name for name in PREPARERS if name.startswith(incomplete)]


@app.command()
def prepare(
    dataset: Annotated[
        str,
        typer.Argument(
            help="Name of a dataset oxRL can prepare.", autocompletion=_complete_dataset
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="The dataset's own.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            help="Raw file or folder, or hf://datasets/OWNER/NAME/FILE; default: the dataset's own."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many rows.")] = None,
    test: Annotated[
        float | None,
        typer.Option(
            min=0, help="Rows put aside in test.jsonl, below 1 their share; no prompt is in both."
        ),
    ] = None,
) -> None:
    """Turn a raw dataset into JSONL or Parquet in oxRL's format."""
    from oxrl.data.prepare import PREPARERS

    try:
        preparer = PREPARERS[known(dataset, PREPARERS)]
    except ValueError as error:
        raise DataError(f"dataset {dataset!r} {error}") from None
    extra: dict[str, str] = {}
    for option in options or []:
        key, equals, value = option.partition("=")
        if not equals or not key.isidentifier():
            raise DataError(f"{option!r}: an option of {dataset} is written key=value")
        if key in ("source", "out", "seed", "limit", "test"):
            raise DataError(f"{option!r} is for every dataset: write --{key} {value}")
        extra[key] = value
    report = preparer(source, out, seed=seed, limit=limit, test=test, **extra)
    typer.echo(json.dumps(report, indent=2, ensure_ascii=False, default=str))


def _complete_algorithm(incomplete: str) -> list[str]:
    return [name for name in ROWS if name.startswith(incomplete)]


@app.command()
def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Print this one in full: cells, equations, numbers, source, deviation.",
            autocompletion=_complete_algorithm,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Prove every row: gradients, identities, limits.")
    ] = False,
    family: Annotated[
        str, typer.Option(metavar="NAME", help="Rows of a recipe, or with a cell or a need.")
    ] = "",
) -> None:
    """Print the table of algorithms, or one in full; with --check, run every row's proofs."""
    if (check and (name or family)) or (name and family):
        raise typer.BadParameter("give one of NAME, --family and --check")
    if name is not None:
        from oxrl.commands.algorithm_page import describe

        typer.echo(describe(name))
        return
    if not check:
        typer.echo(algorithm_table(family))
        return
    from oxrl_proofs.rows import check_all

    reports = check_all()
    for name, report in reports.items():
        notes = [f"FAILED {proof}: {why}" for proof, why in report.failed.items()]
        notes += [f"exempt from {proof}: {why}" for proof, why in report.exempt.items()]
        typer.echo(f"{name:<30}{len(report.passed):>3} proofs  {'; '.join(notes)}".rstrip())
    passed = sum(len(report.passed) for report in reports.values())
    failed = sum(len(report.failed) for report in reports.values())
    typer.echo(f"{len(reports)} rows, {passed} proofs passed, {failed} failed")
    raise typer.Exit(1 if failed else 0)


HEADER = (
    "algorithm",
    "recipe",
    "advantage",
    "ratio",
    "loss",
    "correction",
    "kl",
    "weights",
    "needs",
)


def algorithm_table(family: str = "") -> str:
    """The table as text: a line of cells per algorithm, then a line of words per algorithm.

    Args:
        family: a recipe, or the name of a cell or need: only rows with it.

    Raises:
        ConfigError: no row has it.
    """
    rows = [row for row in ROWS.values() if not family or family in (*_cells(row), *row.needs)]
    if not rows:
        raise ConfigError(f"no algorithm has a recipe, cell or need {family!r}: try preference")
    table = [HEADER, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
    words = [f"{row.name}: {row.summary} ({row.source})" for row in rows]
    return "\n".join([*lines, "", *words])


def _cells(row: Row) -> tuple[str, ...]:
    cells = ("-",) * 5
    if row.recipe == "rl":
        ratio = row.ratio if row.ratio == "none" else f"{row.ratio}/{row.denominator}"
        cells = (row.advantage, ratio, row.gate, row.correction, row.kl)
    return (row.name, row.recipe, *cells, row.weights, ", ".join(row.needs))


@app.command()
def doctor(
    runs: Annotated[Path, typer.Option(help="Where runs will be written.")] = Path("runs"),
) -> None:
    """Say what works on this machine, what does not and how to fix it."""
    from oxrl.commands.doctor import examine

    findings = examine(runs)
    for title in ("needed by every run", "optional"):
        typer.echo(title)
        for state, subject, text, fix, optional in findings:
            if optional == (title == "optional"):
                before = "; " if optional else f"\n{'':<26}fix: "
                typer.echo(f"  {state:<8}{subject:<16}{text}{before + fix if fix else ''}")
    raise typer.Exit(1 if any(finding.state == "FAIL" for finding in findings) else 0)


@app.command()
def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="Your shell.")],
) -> None:
    """Print what completes commands in a shell; --install-completion puts it in place."""
    from typer.completion import get_completion_script

    script = get_completion_script(prog_name="oxrl", complete_var="_OXRL_COMPLETE", shell=shell)
    typer.echo(script)


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration: every field that the run reads."""
    _say(dump_config(_load(config, overrides)).removesuffix("\n"))


@config_app.command("schema")
def config_schema_command() -> None:
    """Print the JSON schema of the YAML file."""
    typer.echo(json.dumps(config_schema(), indent=2))


@config_app.command("diff")
def config_diff_command(
    a: Annotated[Path, typer.Argument(help="YAML file.")],
    b: Annotated[Path, typer.Argument(help="YAML file.")],
) -> None:
    """Print the fields in which two configurations differ, defaults included."""
    differences = config_diff(_load(a, None), _load(b, None))
    for path, (left, right) in differences.items():
        _say(f"{path}: {json.dumps(left)} -> {json.dumps(right)}")


@config_app.command("convert")
def config_convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML of verl, or of TRL's names.")],
) -> None:
    """Print a configuration of TRL or verl as ours; what has no counterpart as comments."""
    from oxrl.config.convert import converted

    _say(converted(file))


def _load(path: Path, overrides: Sequence[str] | None) -> Config:
    """Load a config and print its warnings as lines of our own."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cfg = load_config(path, overrides or [])
    for warning in caught:
        _say(f"warning: {warning.message}", err=True)
    return cfg


def main() -> None:
    """Entry point of `oxrl`."""
    _run(app)


def script(kind: Literal["rl", "sl"]) -> None:
    """Entry point of `main_rl.py` and `main_sl.py`: `--config FILE [key=value ...]`.

    Args:
        kind: of algorithm that the script takes; the other kind is refused.
    """
    kinds = {"rl": "reinforcement learning", "sl": "learning from given answers"}

    def train_kind(
        config: Annotated[Path, typer.Option(help="YAML file.")],
        overrides: Overrides = None,
        resume: Resume = False,
        accept: Accept = None,
        dry_run: DryRun = False,
    ) -> None:
        cfg = _load(config, overrides)
        found = "rl" if cfg.train.row.recipe == "rl" else "sl"
        if found != kind:
            command = f"python main_{found}.py --config {config}"
            why = f"train.alg_name={cfg.train.alg_name} is {kinds[found]}; use: {command}"
            raise ConfigError(why)
        _train(cfg, resume=resume, accept=accept or [], dry_run=dry_run)

    program = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    program.command(help=f"Train by {kinds[kind]}; the same as `oxrl train CONFIG`.")(train_kind)
    _run(program)


def _run(program: Callable[[], object]) -> None:
    """Turn our own errors into a message and an exit code; a bug keeps its traceback."""
    _open_streams()
    try:
        with explained():
            program()
    except OxrlError as error:
        _say(f"error: {error}", err=True)
        _leave_refusing_output()
        sys.exit(error.exit_code)


def _say(text: str, *, err: bool = False) -> None:
    """Print what may hold the words of others: no secret, and nothing that a terminal obeys."""
    typer.echo(shown(text), err=err)


def _open_streams() -> None:
    """Send a standard stream that was closed to nowhere: the next file would get its number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")


def _leave_refusing_output() -> None:
    """Drop what standard output does not take, which would fail once more at the very end."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())
