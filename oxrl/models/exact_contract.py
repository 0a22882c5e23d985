"""The contract of a run with `run.exact`: what it promises, and what that depends on, in a file
that others compare with theirs.

`exact.json`, in every checkpoint:

    format         of this file
    claims         what is promised, and what is not, in sentences
    model          the class of the model
    versions       of PyTorch, transformers and oneDNN
    instructions   the processor's kind, and the vector instructions that PyTorch uses on it
    constants      how much one product has at a time, `oxrl.models.exact`
    probe          SHA-256 of the log-probabilities of fixed rows, by a small model of the same
                   class whose weights follow from a seed
    digest         SHA-256 of all of it

Two machines with one digest compute the same bits; of two with different ones nobody can tell.
"""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from oxrl.data.batching import to_token_batch
from oxrl.errors import CheckpointError, EngineError, required
from oxrl.models.exact import KEYS, ROWS, VALUES, make_exact
from oxrl.models.network import CausalNetwork, read_tokens
from oxrl.models.self_checks import small_copy
from oxrl.runs.checkpoints import CONTRACT_FILE
from oxrl.runs.files import Json, pretty_json, read_json

FORMAT = "oxrl-exact-1"
CLAIMS = (
    "By the weights of one version the log-probability of a sampled token is the same to the last "
    "bit in the sampler, in the trainer and wherever it is computed again, whatever other rows, "
    "lengths and prompts are in a batch, and on however many threads.",
    "Not promised: gradients, and bits by other instructions, other versions or on a GPU.",
)
# Tokens of the rows of the probe: alone in a block, over one, over several, over a piece of values.
LENGTHS = (2, 17, 40, 300)
# Random weights are so small that all tokens are nearly alike, and most bits of what differs lost.
SHARPER = 3.0
# Digits of a hash that people compare.
SHOWN = 12


@dataclass(frozen=True)
class Contract:
    """A promise of bits, as one process can keep it.

    facts: of the file, all but its digest.
    """

    facts: Json

    @property
    def digest(self) -> str:
        """SHA-256 of the facts."""
        return sha256(json.dumps(self.facts, sort_keys=True).encode()).hexdigest()

    def write(self, directory: Path) -> None:
        """Write exact.json."""
        text = pretty_json({**self.facts, "digest": self.digest})
        (directory / CONTRACT_FILE).write_text(text, encoding="utf-8")

    def check_resumed(self, directory: Path) -> None:
        """Make sure that a checkpoint was written under the same contract, if under any.

        Raises:
            CheckpointError: it was written under another one.
        """
        then = read_json(directory / CONTRACT_FILE)
        if then is None or then.get("digest") == self.digest:
            return
        raise CheckpointError(
            f"{directory / CONTRACT_FILE} is of a machine that computes other bits:\n"
            f"  then  {line_of(then)}\n  now   {self.line}\n"
            "Another set of instructions, or another version, is another run. Go on where it "
            "began, begin a new run, or set run.exact: false to go on without the promise"
        )

    def check_same(self, promised: Contract | None) -> None:
        """Make sure that this process keeps what the first one of its run has promised.

        Args:
            promised: as the process found out that began the run; None: it promised nothing.

        Raises:
            EngineError: this one computes other bits.
        """
        if promised is None or promised.digest == self.digest:
            return
        raise EngineError(
            "run.exact: a process of this run computes other bits than the one that began it:\n"
            f"  first  {promised.line}\n  other  {self.line}\n"
            "Use machines with the same instructions and versions, or set run.exact: false"
        )

    @property
    def line(self) -> str:
        """All that the digest depends on, in a line."""
        return line_of({**self.facts, "digest": self.digest})


def line_of(contract: Json) -> str:
    """The facts of exact.json in a line, in which two that differ differ.

    Args:
        contract: what is in the file.
    """
    told: list[str] = []
    for group in ("versions", "constants"):
        told += [f"{name} {value}" for name, value in sorted(contract.get(group, {}).items())]
    told += [str(contract.get("instructions")), str(contract.get("model"))]
    told += [f"{name} {str(contract.get(name)):.{SHOWN}}" for name in ("probe", "digest")]
    return ", ".join(told)


def exact_copy(
    config: PreTrainedConfig, *, trust_remote_code: bool, **sizes: int
) -> PreTrainedModel:
    """Make a small random model of the same kind exact; it does not say the same of every token.

    Args:
        config: of the model.
        trust_remote_code: run Python code that the model's authors ship with it.
        sizes: as of `small_copy`.

    Raises:
        ConfigError: some part of such a model has no exact form, or PyTorch has no oneDNN.
    """
    model = small_copy(config, trust_remote_code=trust_remote_code, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(SHARPER)
    make_exact(model)
    return model


def find_contract(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> Contract:
    """Find out what this machine computes for models of a configuration.

    Args:
        config: of the model, of which a small one is made.
        trust_remote_code: run Python code that the model's authors ship with it.

    Raises:
        ConfigError: some part of such a model has no exact form, or PyTorch has no oneDNN.
    """
    model = exact_copy(config, trust_remote_code=trust_remote_code)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    rows: list[list[int]] = []
    for number, length in enumerate(LENGTHS):
        count = min(length, longest or length)
        ids = [5 * number + 7 * at * at + 3 * at for at in range(count)]
        rows.append([2 + value % 59 for value in ids])
    trained = [[at > 0 for at in range(len(row))] for row in rows]
    batch = to_token_batch(rows, trained, 0)
    with torch.no_grad():
        read = read_tokens(CausalNetwork(model), batch, frozenset({"logprobs"}), temperature=1.0)
    said = required(read.logprobs, "log-probabilities")
    facts: Json = {
        "format": FORMAT,
        "claims": [*CLAIMS],
        "model": type(model).__name__,
        "versions": {
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "oneDNN": onednn_version(),
        },
        "instructions": instructions(),
        "constants": {"rows": ROWS, "keys": KEYS, "values": VALUES},
        "probe": sha256(said.numpy().tobytes()).hexdigest(),
    }
    return Contract(facts)


def instructions() -> str:
    """The kind of processor, and which of its vector instructions PyTorch uses."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def onednn_version() -> str:
    """The version of oneDNN that PyTorch was built with, as PyTorch says it."""
    found = re.search(r"MKL-DNN v(\S+)", torch.__config__.show())
    return found[1] if found else "unknown"
