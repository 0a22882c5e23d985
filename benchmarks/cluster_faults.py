"""What a run says and does when its Ray cluster fails: whole runs, real faults, exit codes.

    python benchmarks/cluster_faults.py [CASE ...] [--logs FOLDER]

Every case is `oxrl train` in a process of its own, mostly on raylets that are started for it on the
loopback device: two nodes of the same machine. `seconds` are from the fault to the end of the run,
or to the next step of a run that goes on; `left` counts processes that the run left behind, looked
for over ten seconds. Needs Ray (`make env-scale`); nothing else on the machine is touched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Ray's own switch for a cluster of one machine, read when Ray is imported: loopback alone.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_worker_niceness"] = "0"

# In the environment of every process of a case, so that those that are left are found.
MARK = "OXRL_CLUSTER_FAULT"
OF_RUN = ("ray::RankActor", "ray::RolloutActor", "ray::RewardModelActor")
LIMIT_S = 400.0
STARTS_S = 200.0
LEFT_S = 10.0
SAID_S = 5.0
MB = 1 << 20
REWARD = '''
import time

def digits(prompt, completion):
    """Share of digits; slow enough for something to happen meanwhile."""
    time.sleep({pause_s})
    text = completion[:6]
    return sum(character.isdigit() for character in text) / 6
'''


# What a node without oxRL does: only what Ray itself unpacked there can be imported.
SITE = """
import os, sys

class Without:
    def find_spec(self, name, path=None, target=None):
        unpacked = any(os.path.isdir(p + "/oxrl") for p in sys.path if "runtime_resources" in p)
        if name == "oxrl" and not unpacked:
            raise ModuleNotFoundError("No module named 'oxrl'", name="oxrl")
        return None

sys.meta_path.insert(0, Without())
"""
# A disk of 40 kB/s.
SLOW = """
import os, time

write = os.pwrite

def slowly(descriptor, data, offset):
    data = data[:8000]
    time.sleep(len(data) / 40_000)
    return write(descriptor, data, offset)

os.pwrite = slowly
"""
# How much less memory is free when Ray's monitor begins to kill, and what is taken at a time.
MARGIN = 4_000 * MB
PIECE = 200 * MB
MOST_PIECES = 28

Sections = dict[str, dict[str, Any]]
NO_CHANGES: Mapping[str, str] = MappingProxyType({})


def processes(mark: str) -> dict[int, str]:
    """Process id -> command line, of everything that has the mark in its environment."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(folder.name)] = command.strip()
        except OSError:
            continue  # it has ended
    return found


def parent_of(pid: int) -> int:
    """Of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until(found: Callable[[], Any], what: str, limit_s: float = STARTS_S) -> Any:
    """What `found` returns, once that is anything.

    Raises:
        TimeoutError: it was nothing for too long.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if seen := found():
            return seen
        time.sleep(0.05)
    raise TimeoutError(f"no {what} within {limit_s:g} s")


@dataclass
class Scene:
    """One run, the nodes it is on, and when something was done to them."""

    folder: Path
    nodes: Any = None
    driver: subprocess.Popen[bytes] | None = None
    at: float = 0.0
    # Whatever a fault needs to keep.
    held: list[Any] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    begun: float = field(default_factory=time.monotonic)

    @property
    def directory(self) -> Path:
        """Of the run."""
        return self.folder / "run"

    @property
    def steps(self) -> int:
        """That the run has recorded."""
        path = self.directory / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    @property
    def steps_taken(self) -> int:
        """That the run has told of, those that were taken twice included."""
        return sum(line.startswith("step ") for line in self.said.splitlines())

    @property
    def said(self) -> str:
        """What the run printed so far."""
        path = self.folder / "out.txt"
        return path.read_text(errors="replace") if path.is_file() else ""

    def start(self, sections: Sections, environment: Mapping[str, str] = NO_CHANGES) -> None:
        """Start the run."""
        config = self.folder / "config.yaml"
        config.write_text(yaml.safe_dump(sections))
        command = [sys.executable, "-m", "oxrl", "train", str(config), "--resume"]
        self.execute(command, environment)

    def execute(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Start a program that runs the run."""
        env = {**os.environ, **environment, MARK: self.mark}
        with (self.folder / "out.txt").open("ab") as out:
            self.driver = subprocess.Popen(
                command,
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_step(self, step: int) -> None:
        """Wait until the run has recorded so many steps."""
        assert self.driver is not None
        driver = self.driver
        until(lambda: self.steps >= step or driver.poll() is not None, f"step {step}")
        if driver.poll() is not None:
            raise RuntimeError(f"the run ended before step {step}: {self.said[-2000:]}")

    def actors(self, kind: str) -> list[int]:
        """Process ids of actors, in the order of their start."""
        found = processes(self.mark)
        return sorted(pid for pid, command in found.items() if command.startswith(f"ray::{kind}"))

    def now(self) -> None:
        """This is when it happens."""
        self.at = time.monotonic()

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a process of this scene."""
        self.now()
        os.kill(pid, number)

    def of_nodes(self, words: str) -> list[int]:
        """Process ids of Ray's own processes."""
        return sorted(pid for pid, command in processes(self.mark).items() if words in command)


def nodes_of(scene: Scene, *each: dict[str, Any]) -> None:
    """Start raylets, the first with the head of the cluster."""
    from ray.cluster_utils import Cluster as Nodes  # pyright: ignore[reportMissingImports]

    first, *others = each
    small = {"object_store_memory": 80 * MB, "include_dashboard": False}
    scene.nodes = Nodes(initialize_head=True, head_node_args={**small, **first})
    for other in others:
        add_node(scene, other)


def add_node(scene: Scene, node: Mapping[str, Any]) -> None:
    """Start one more raylet."""
    scene.nodes.add_node(object_store_memory=80 * MB, **node)


def config_of(scene: Scene, *parts: Sections, pause_s: float = 0.02) -> Sections:
    """A small RL run; sections of the parts over it."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2, 8) for b in range(3, 7)]
    (scene.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (scene.folder / "reward.py").write_text(REWARD.format(pause_s=pause_s))
    sections: Sections = {
        "run": {
            "name": "faults",
            "dir": str(scene.directory),
            "steps": 8,
            "checkpoint_every": 2,
            "mlflow": False,
            "threads": 1,
            "deadline_s": 60,
            "console": "plain",
        },
        "model": {"name": "builtin:tiny"},
        "data": {"train": str(scene.folder / "prompts.jsonl"), "prompts_per_step": 4},
        "reward": {"name": f"{scene.folder / 'reward.py'}:digits", "workers": 1},
        "rollout": {"max_tokens": 6, "n_samples": 4},
        "train": {"alg_name": "sgrpo", "lr": 1e-3},
    }
    if scene.nodes is not None:
        sections["run"]["ray_address"] = scene.nodes.address
    for part in parts:
        for name, section in part.items():
            sections[name] = sections.get(name, {}) | section
    return sections


def of_run(**fields: Any) -> Sections:
    """The section `run`."""
    return {"run": fields}


SAMPLER: Sections = {"inference_engine": {"actors": 1}}


def ranks(count: int, restarts: int = 0) -> Sections:
    """Training ranks."""
    run = {"training_gpus": count, "max_restarts": restarts}
    return {"train": {"backend": "fsdp"}, "run": run}


# ---- the faults -------------------------------------------------------------------------------


def nobody(scene: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    scene.now()
    scene.start(config_of(scene, of_run(ray_address=f"127.0.0.1:{port}"), SAMPLER))


def silent(scene: Scene) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    scene.held.append(server)
    address = f"127.0.0.1:{server.getsockname()[1]}"
    scene.now()
    scene.start(config_of(scene, of_run(ray_address=address), SAMPLER))


def gpus_asked(scene: Scene) -> None:
    nodes_of(scene, {"num_cpus": 2})
    scene.now()
    scene.start(config_of(scene, ranks(2), of_run(device="cuda")))


def fake_gpus(scene: Scene) -> None:
    """The driver's node has none; another says that it has two. Each actor takes one."""
    nodes_of(scene, {"num_cpus": 1}, {"num_cpus": 2, "num_gpus": 2})
    scene.now()
    scene.start(config_of(scene, ranks(1), SAMPLER))
    scene.await_step(1)
    left = scene.nodes.global_state.available_resources_per_node().values()
    gpus = sum(node.get("GPU", 0.0) for node in left)
    if gpus:
        raise RuntimeError(f"{gpus:g} of the 2 GPUs are left to nobody")


def no_room(scene: Scene) -> None:
    nodes_of(scene, {"num_cpus": 1})
    scene.now()
    scene.start(config_of(scene, {"inference_engine": {"actors": 3}}))


def site(scene: Scene, text: str) -> str:
    """A folder for PYTHONPATH, with what Python runs first."""
    folder = scene.folder / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(text)
    return str(folder)


def bare_node(scene: Scene, way: str) -> None:
    """Where actors live, oxRL is not installed."""
    bare = {"num_cpus": 1, "env_vars": {"PYTHONPATH": site(scene, SITE)}}
    nodes_of(scene, {"num_cpus": 0}, bare)
    scene.now()
    scene.start(config_of(scene, of_run(ray_working_dir=way, steps=2), SAMPLER))


def sampler_killed(scene: Scene) -> None:
    nodes_of(scene, {"num_cpus": 1})
    scene.start(config_of(scene, SAMPLER))
    scene.await_step(2)
    scene.kill(scene.actors("RolloutActor")[0])


def rank_killed(scene: Scene, restarts: int, number: signal.Signals = signal.SIGKILL) -> None:
    nodes_of(scene, {"num_cpus": 2})
    waits = of_run(deadlines={"step": 15.0})
    scene.start(config_of(scene, ranks(2, restarts), waits))
    scene.await_step(3)
    scene.kill(scene.actors("RankActor")[1], number)


def short_of_memory(scene: Scene, kind: str, *, always: bool = False) -> None:
    """This process takes memory until Ray's monitor kills an actor; always: it kills each."""
    total = memory("MemTotal")
    allowed = 1 - (memory("MemAvailable") - MARGIN) / total
    of_monitor = {
        "RAY_memory_usage_threshold": "0.01" if always else f"{allowed:.4f}",
        "RAY_memory_monitor_refresh_ms": "100",
    }
    calm = {"RAY_memory_monitor_refresh_ms": "0"}
    nodes_of(scene, {"num_cpus": 0, "env_vars": calm}, {"num_cpus": 1, "env_vars": of_monitor})
    part = SAMPLER if kind == "RolloutActor" else ranks(1, 1)
    if always:
        scene.now()
    scene.start(config_of(scene, part, of_run(steps=20), pause_s=0.1))
    if always:
        return
    scene.await_step(2)
    victim = scene.actors(kind)[0]
    scene.now()
    taken = []
    while victim in scene.actors(kind):
        if len(taken) > MOST_PIECES:
            raise RuntimeError("Ray's memory monitor killed nobody")
        taken.append(b"1" * PIECE)
        scene.now()
        time.sleep(0.3)
    taken.clear()


def memory(name: str) -> int:
    """Of this machine, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the system does not say {name}")


def store_full(scene: Scene) -> None:
    """Weights for two object stores, and a disk that Ray takes to be full."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from oxrl.checkpoint.model_files import save_model
    from oxrl.modelfiles.builtin import BUILTIN_DIMS, builtin_tokenizer

    dims: dict[str, Any] = {**BUILTIN_DIMS["builtin:tiny"], "intermediate_size": 32768}
    dims |= {"hidden_size": 256, "num_hidden_layers": 6}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    model = Qwen3ForCausalLM(Qwen3Config(**dims, tie_word_embeddings=True, **special))
    save_model(model, scene.folder / "model")
    builtin_tokenizer().save_pretrained(scene.folder / "model")
    full = {"RAY_local_fs_capacity_threshold": "0.001"}
    nodes_of(scene, {"num_cpus": 1, "env_vars": full})
    scene.now()
    scene.start(config_of(scene, SAMPLER, {"model": {"name": str(scene.folder / "model")}}), full)


def head_killed(scene: Scene, process: str, *, own: bool) -> None:
    """The GCS, or the raylet of the driver's machine."""
    if not own:
        nodes_of(scene, {"num_cpus": 1})
    scene.start(config_of(scene, SAMPLER, of_run(steps=99), pause_s=0.2))
    scene.await_step(2)
    scene.kill(scene.of_nodes(process)[0])


def node_lost(scene: Scene, *, room: bool) -> None:
    """Of the sampler; another node has room, or none has."""
    nodes_of(scene, {"num_cpus": 0}, {"num_cpus": 1})
    # In both, Ray needs a while to see it.
    scene.start(config_of(scene, SAMPLER, of_run(steps=30, deadlines={"load": 60.0}), pause_s=0.1))
    scene.await_step(2)
    if room:
        add_node(scene, {"num_cpus": 1})
    scene.kill(parent_of(scene.actors("RolloutActor")[0]))


def rank_node_lost(scene: Scene, *, room: bool) -> None:
    """Of one rank of two."""
    nodes_of(scene, {"num_cpus": 1}, {"num_cpus": 1})
    lost = scene.nodes.worker_nodes.copy().pop()
    scene.start(config_of(scene, ranks(2, 1), of_run(steps=20), pause_s=0.1))
    scene.await_step(3)
    if room:
        add_node(scene, {"num_cpus": 1})
    scene.kill(lost.all_processes["raylet"][0].process.pid)


def slow_disk(scene: Scene) -> None:
    """Ranks write checkpoints at 40 kB/s: one takes three times as long as a hung disk may."""
    slow = {"PYTHONPATH": f"{site(scene, SLOW)}:{ROOT}"}
    nodes_of(scene, {"num_cpus": 2, "env_vars": slow})
    scene.now()
    part = of_run(steps=2, deadlines={"checkpoint": 15.0}, seconds_per_gb=1.0)
    scene.start(config_of(scene, ranks(2), part), slow)


# `ray start` joins no head on the loopback device: a raylet is started as Ray's own tests do.
RAY_START = """#!/bin/bash
if [[ $1 == start && $* == *--address=* ]]; then exec {python} {folder}/raylet.py "$@"; fi
exec {ray} "$@"
"""
RAYLET_OF_SLURM = """
import argparse, signal
from ray._private.node import Node
from ray._private.parameter import RayParams

parser = argparse.ArgumentParser()
for name, kind in (("--address", str), ("--num-cpus", int), ("--num-gpus", int)):
    parser.add_argument(name, type=kind, required=True)
asked, _ = parser.parse_known_args()
parameters = RayParams(
    gcs_address=asked.address,
    num_cpus=asked.num_cpus,
    num_gpus=asked.num_gpus,
    object_store_memory=80 << 20,
    min_worker_port=0,
    max_worker_port=0,
)
Node(parameters, head=False, shutdown_at_exit=True, spawn_reaper=True)
signal.pause()
"""
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done
exec "$@"
"""


def slurm(scene: Scene) -> None:
    """experiments/cluster/slurm.sh on an allocation of two nodes with two GPUs, all made up."""
    binaries = scene.folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    there = Path(sys.executable).parent
    (binaries / "activate").write_text(f'PATH="{binaries}:{there}:$PATH"\n')
    programs = {
        "srun": SRUN,
        "scontrol": "#!/bin/sh\nprintf 'one\\ntwo\\n'\n",
        "hostname": "#!/bin/sh\necho 127.0.0.1\n",
        "oxrl": f'#!/bin/sh\nexec {sys.executable} -m oxrl "$@"\n',
        "ray": RAY_START.format(python=sys.executable, folder=binaries, ray=there / "ray"),
        "raylet.py": RAYLET_OF_SLURM,
    }
    for name, text in programs.items():
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    allocation = {
        "RAY_PORT": str(port),
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "2",
        "SLURM_GPUS_ON_NODE": "2",
    }
    config = scene.folder / "config.yaml"
    config.write_text(yaml.safe_dump(config_of(scene, ranks(2), SAMPLER, of_run(steps=2))))
    scene.now()
    script = ROOT / "experiments" / "cluster" / "slurm.sh"
    scene.execute(["bash", str(script), str(config)], allocation)


def rayjob(scene: Scene) -> None:
    """The entrypoint of experiments/cluster/rayjob.yaml, on nodes that have what it asks for."""
    job = yaml.safe_load((ROOT / "experiments" / "cluster" / "rayjob.yaml").read_text())["spec"]
    groups = job["rayClusterSpec"]
    head = groups["headGroupSpec"]["rayStartParams"]
    (workers,) = groups["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    worker = {"num_cpus": 2, "num_gpus": int(limits["nvidia.com/gpu"])}
    others = [worker] * workers["replicas"]
    nodes_of(scene, {"num_cpus": 1, "num_gpus": int(head["num-gpus"])}, *others)
    sections = config_of(scene, ranks(2), SAMPLER, of_run(steps=2))
    del sections["run"]["ray_address"]
    (scene.folder / "rl.yaml").write_text(yaml.safe_dump(sections))
    words = job["entrypoint"].replace("/shared/runs/rl", str(scene.directory))
    words = words.replace("/shared", str(scene.folder)).split()
    scene.now()
    command = [sys.executable, "-m", *words]
    scene.execute(command, {"RAY_ADDRESS": scene.nodes.address})


def driver_ended(scene: Scene, number: signal.Signals, *, own: bool) -> None:
    if not own:
        nodes_of(scene, {"num_cpus": 1})
    scene.start(config_of(scene, SAMPLER, of_run(steps=99), pause_s=0.1))
    scene.await_step(2)
    assert scene.driver is not None
    scene.kill(scene.driver.pid, number)


Fault = Callable[[Scene], None]


@dataclass(frozen=True)
class Case:
    """A fault and what has to come of it.

    code: how the run ends. says: some of what it prints.
    """

    fault: Fault
    code: int
    says: str = ""


HEAD = "no head of a Ray cluster answers"
AGAIN = "Starting the whole group again"
NO_PROCESS = "was ended from outside"
GCS = "gcs_server"
RAYLET = "raylet/raylet"

CASES: dict[str, Case] = {
    "nobody": Case(nobody, 2, HEAD),
    "silent": Case(silent, 2, HEAD),
    "gpus asked": Case(gpus_asked, 2, "no node of the Ray cluster has a GPU"),
    "fake gpus": Case(fake_gpus, 0),
    "no room": Case(no_room, 2, "has no room for this run"),
    "bare": Case(partial(bare_node, way="keep"), 1, "has no module 'oxrl'"),
    "shipped": Case(partial(bare_node, way="ship"), 0),
    "slow disk": Case(slow_disk, 0, "writing the checkpoint: "),
    "sampler killed": Case(sampler_killed, 0, "replaced within"),
    "sampler memory": Case(partial(short_of_memory, kind="RolloutActor"), 0, "low on memory"),
    "no memory": Case(partial(short_of_memory, kind="RolloutActor", always=True), 1, "memory"),
    "rank killed": Case(partial(rank_killed, restarts=0), 1, "is ended"),
    "rank restarted": Case(partial(rank_killed, restarts=1), 0, AGAIN),
    "rank stopped": Case(partial(rank_killed, restarts=1, number=signal.SIGSTOP), 0, AGAIN),
    "rank memory": Case(partial(short_of_memory, kind="RankActor"), 0, "low on memory"),
    "store full": Case(store_full, 1, "object store"),
    "gcs": Case(partial(head_killed, process=GCS, own=False), 1, "has not answered for"),
    "own gcs": Case(partial(head_killed, process=GCS, own=True), 1, "has not answered for"),
    "raylet": Case(partial(head_killed, process=RAYLET, own=False), 1, NO_PROCESS),
    "own raylet": Case(partial(head_killed, process=RAYLET, own=True), 1, NO_PROCESS),
    "node": Case(partial(node_lost, room=True), 0, "replaced within"),
    "placement": Case(partial(node_lost, room=False), 1, "no other had room"),
    "rank node": Case(partial(rank_node_lost, room=True), 0, AGAIN),
    "rank placement": Case(
        partial(rank_node_lost, room=False), 1, "starting again: the Ray cluster has no room"
    ),
    "slurm": Case(slurm, 0),
    "rayjob": Case(rayjob, 0),
    "SIGTERM": Case(partial(driver_ended, number=signal.SIGTERM, own=True), 75),
    "SIGKILL": Case(partial(driver_ended, number=signal.SIGKILL, own=True), -9, NO_PROCESS),
    "SIGKILL joined": Case(partial(driver_ended, number=signal.SIGKILL, own=False), -9, NO_PROCESS),
}


def left_of(scene: Scene) -> list[str]:
    """Command lines of what the run has left behind, after LEFT_S seconds at most."""

    def found() -> list[str]:
        alive = processes(scene.mark)
        if scene.nodes is None:
            return list(alive.values())
        return [command for command in alive.values() if command.startswith(OF_RUN)]

    end = time.monotonic() + LEFT_S
    while found() and time.monotonic() < end:
        time.sleep(0.2)
    return found()


@contextlib.contextmanager
def scene_of(folder: Path) -> Iterator[Scene]:
    """A scene; every process of it is ended afterwards."""
    scene = Scene(folder)
    os.environ[MARK] = scene.mark
    # Where no other program of this machine looks for a cluster to join.
    os.environ["RAY_TMPDIR"] = str(folder)
    try:
        yield scene
    finally:
        if scene.driver is not None and scene.driver.poll() is None:
            scene.driver.kill()
            scene.driver.wait(30)
        if scene.nodes is not None:
            scene.nodes.shutdown()
        del os.environ[MARK]
        for pid in processes(scene.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def after_fault(scene: Scene) -> float:
    """Seconds from the fault until the run has taken a whole new step, or ended."""
    assert scene.driver is not None
    driver = scene.driver
    before = scene.steps_taken

    def over() -> bool:
        # The step after the one that was going on.
        return scene.steps_taken >= before + 2 or driver.poll() is not None

    until(over, "next step and no end", LIMIT_S)
    return time.monotonic() - scene.at


def outcome_of(name: str, folder: Path) -> dict[str, Any]:
    """Make a fault and look at what comes of it."""
    case = CASES[name]
    with scene_of(folder) as scene:
        assert scene.begun
        case.fault(scene)
        assert scene.driver is not None
        recovered_s = after_fault(scene)
        code = scene.driver.wait(LIMIT_S)
        ended_s = time.monotonic() - scene.at
        left = left_of(scene)
        end = time.monotonic() + SAID_S
        while case.says not in scene.said and time.monotonic() < end:
            time.sleep(0.1)  # who speaks for a run that cannot, speaks after its end
        said = scene.said
        steps = scene.steps
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    as_expected = code == case.code and case.says in said and not left
    return {
        "case": name,
        "exit_code": code,
        "answer_s": round(recovered_s, 1),
        "end_s": round(ended_s, 1),
        "steps": steps,
        "left": len(left),
        "left_commands": [line[:80] for line in left],
        "traceback": "Traceback (most recent call last)" in said,
        "as_expected": as_expected,
        "error": errors[-1] if errors else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all where none is named")
    parser.add_argument("--logs", type=Path, help="folder to keep what every run printed")
    options = parser.parse_args()
    for name in options.cases or CASES:
        with tempfile.TemporaryDirectory(prefix="faults_") as folder:
            try:
                found = outcome_of(name, Path(folder))
            except (TimeoutError, RuntimeError, subprocess.TimeoutExpired) as error:
                found = {"case": name, "problem": str(error)}
            if options.logs is not None:
                options.logs.mkdir(parents=True, exist_ok=True)
                said = Path(folder) / "out.txt"
                kept = options.logs / f"{name.replace(' ', '_')}.txt"
                kept.write_text(said.read_text(errors="replace") if said.is_file() else "")
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
