"""The configuration of a run: schema, loading with errors that teach, resolved dump, and the plan
of a run.

Nothing here imports torch; recipes take a `Config`, and nothing below recipes sees one.
"""

from oxrl.config.load import check_config, load_config, load_source
from oxrl.config.reads import config_diff, dump_config
from oxrl.config.schema import Config, config_schema

__all__ = [
    "Config",
    "check_config",
    "config_diff",
    "config_schema",
    "dump_config",
    "load_config",
    "load_source",
]
