"""Every command, in the order in which `oxrl --help` lists them."""

from __future__ import annotations

import typer

from oxrl.cli.algorithms import algorithms
from oxrl.cli.completion import completion
from oxrl.cli.config import config_convert, config_diff_command, config_schema_command, config_show
from oxrl.cli.doctor import doctor
from oxrl.cli.evaluate import evaluate
from oxrl.cli.export import export
from oxrl.cli.generate import generate
from oxrl.cli.plan import plan
from oxrl.cli.prepare import prepare
from oxrl.cli.replay import replay
from oxrl.cli.report import report
from oxrl.cli.train import train

config_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show, describe or compare configurations."
)
config_app.command("show")(config_show)
config_app.command("schema")(config_schema_command)
config_app.command("diff")(config_diff_command)
config_app.command("convert")(config_convert)

every = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
COMMANDS = {
    "train": train,
    "plan": plan,
    "eval": evaluate,
    "generate": generate,
    "report": report,
    "replay": replay,
    "export": export,
    "prepare": prepare,
    "algorithms": algorithms,
    "doctor": doctor,
    "completion": completion,
}
for name, command in COMMANDS.items():
    every.command(name)(command)
every.add_typer(config_app, name="config")
