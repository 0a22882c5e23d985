"""Clusters: one of several nodes that is joined, and one of our own that nobody else can reach."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, cast

import pytest
import yaml

from oxrl.assembly import ray_engines
from oxrl.assembly.assemble import build_engines
from oxrl.assembly.assembly import Assembly
from oxrl.config import Config
from oxrl.engines.ray.cluster import Cluster
from oxrl.engines.ray.head import CONNECT_S
from oxrl.errors import ConfigError
from support.small_runs import rl_config

ROOT = Path(__file__).resolve().parent.parent.parent
CLUSTER_FILES = ROOT / "experiments" / "cluster"

pytestmark = pytest.mark.timeout(300)

# A raylet and its actor, as processes: one starts the other.
ACTOR = """
    import time
    from oxrl.engines.ray.cluster import enter
    enter("/")
    print("here", flush=True)
    time.sleep(60)
"""
RAYLET = """
    import subprocess, sys, time
    actor = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
    print(actor.pid, flush=True)
    time.sleep(60)
"""


def test_an_actor_leaves_when_its_raylet_is_gone() -> None:
    command = [sys.executable, "-c", textwrap.dedent(RAYLET), textwrap.dedent(ACTOR)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as raylet:
        assert raylet.stdout is not None
        actor = int(raylet.stdout.readline())
        assert raylet.stdout.readline() == "here\n"
        raylet.kill()
    end = time.monotonic() + 10
    while Path(f"/proc/{actor}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    state = Path(f"/proc/{actor}/stat")
    # Where nobody collects it, it may be there still, as a zombie.
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


# In a process of its own: it joins the nodes by their address, as `run.ray_address` does.
JOINS = """
    import json
    from tests.engines.test_ray_rollouts import expected_samples, requests, sampler, said, weights_of
    from ray.cluster_utils import Cluster as Nodes
    import ray
    from oxrl.engines.sample.sampler import generate
    from oxrl.engines.ray.cluster import Cluster, layout
    from oxrl.engines.ray.rollouts import RayRollouts
    from oxrl.errors import ConfigError
    from oxrl.tables.watch import Deadlines

    if __name__ == "__main__":
        small = {"num_cpus": 1, "object_store_memory": 80 << 20}
        head = {**small, "include_dashboard": False}
        nodes = Nodes(initialize_head=True, head_node_args=head)
        nodes.add_node(**small)
        bundles, _, places = layout(0, 2, trainer_gpus=0, sampler_gpus=0, colocated=False)
        cluster = Cluster(2, address=nodes.address)
        cluster.reserve(bundles)
        engine = RayRollouts(cluster, places, sampler, Deadlines.alike(60))
        engine.update_weights(iter(weights_of(1)), version=3)
        samples = said(generate(engine, requests(32), deadline_s=60))
        homes = {
            ray.get(w.actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            for w in engine.workers
        }
        try:
            Cluster(2).reserve(bundles)
            refused = ""
        except ConfigError as error:
            refused = str(error)
        engine.close()
        cluster.close()
        nodes.shutdown()
        same = samples == expected_samples()
        print(json.dumps({"same": same, "homes": len(homes), "refused": refused}))
"""

# Every address on which a process of the cluster listens.
LISTENS = """
    import json, os, pathlib, signal
    for own in ("RAY_worker_niceness", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"):
        os.environ.pop(own, None)  # a run sets them
    from oxrl.engines.ray.cluster import Cluster

    def of_this_session(process):
        # It or one above it names the session: the workers have other titles.
        while process != 0:
            status = pathlib.Path(f"/proc/{process}")
            if session in (status / "cmdline").read_bytes().decode(errors="replace"):
                return True
            process = int((status / "stat").read_text().rpartition(")")[2].split()[1])
        return False

    def listening():
        inodes = set()
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if of_this_session(int(process.name)):
                    inodes |= {os.readlink(fd) for fd in (process / "fd").iterdir()}
            except (OSError, ProcessLookupError):
                continue
        found = set()
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            for line in pathlib.Path(table).read_text().splitlines()[1:]:
                field = line.split()
                if field[3] == "0A" and f"socket:[{field[9]}]" in inodes:
                    found.add(field[1].split(":")[0])
        return found

    if __name__ == "__main__":
        before = signal.getsignal(signal.SIGTERM)
        cluster = Cluster(1)
        session = cluster.ray._private.worker._global_node.get_session_dir_path()
        cluster.ray.get(cluster.ray.remote(lambda: 1).remote())
        found = sorted(listening())
        nice = cluster.ray.get(cluster.ray.remote(lambda: os.nice(0)).remote())
        dashboard = cluster.ray._private.worker._global_node.webui_url
        cluster.close()
        kept = signal.getsignal(signal.SIGTERM) is before
        print(json.dumps({"listening": found, "dashboard": dashboard, "kept": kept, "nice": nice}))
"""
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def program(text: str, folder: Path, *arguments: str) -> dict[str, object]:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    # A folder that is short, for Ray's sockets, where nobody else looks for a cluster to join.
    with tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True) as of_ray:
        own = {"RAY_ADDRESS": "127.0.0.1:1", "RAY_TMPDIR": of_ray}
        result = subprocess.run(
            [sys.executable, str(path), *arguments],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env={
                **os.environ,
                **own,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            },
        )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_actors_on_two_nodes_of_a_joined_cluster_give_the_samples_of_one_process(
    tmp_path: Path,
) -> None:
    pytest.importorskip(
        "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
    )
    found = program(JOINS, tmp_path)
    assert (found["same"], found["homes"]) == (True, 2)
    assert "Available: 0 CPU and 0 GPU of 2 CPU and 0 GPU on 2 nodes" in str(found["refused"])


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
SHIPS = """
    import json, sys
    from ray.cluster_utils import Cluster as Nodes
    from oxrl.engines.ray.cluster import Cluster, layout
    from oxrl.engines.ray.rollouts import RayRollouts
    from oxrl.errors import EngineError
    from oxrl.tables.watch import Deadlines

    def sampler():
        from oxrl.engines.sample.local import LocalSampler
        from oxrl.models.load import LoadOptions, load_policy, load_tokenizer

        policy = load_policy("builtin:tiny", LoadOptions())
        return LocalSampler(policy, load_tokenizer("builtin:tiny"), max_rows=8)

    if __name__ == "__main__":
        small = {"num_cpus": 1, "object_store_memory": 80 << 20}
        head = {**small, "num_cpus": 0, "include_dashboard": False}
        nodes = Nodes(initialize_head=True, head_node_args=head)
        nodes.add_node(**small, env_vars={"PYTHONPATH": sys.argv[1]})
        bundles, _, places = layout(0, 1, trainer_gpus=0, sampler_gpus=0, colocated=False)
        cluster = Cluster(1, address=nodes.address, ship=sys.argv[2] == "ship")
        cluster.reserve(bundles)
        try:
            found = RayRollouts(cluster, places, sampler, Deadlines.alike(60)).version
        except EngineError as error:
            found = str(error)
        cluster.close()
        nodes.shutdown()
        print(json.dumps({"found": found}))
"""


def heads_that_are_none() -> Iterator[tuple[str, str]]:
    """An address where nobody listens, one that says nothing, and a web server."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    yield f"127.0.0.1:{port}", "refused"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}", "timed out"
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{web.server_port}", "something else listens there"
        web.shutdown()


def test_an_address_without_a_ray_cluster_is_refused_in_seconds() -> None:
    pytest.importorskip(
        "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
    )
    for address, said in heads_that_are_none():
        started = time.monotonic()
        with pytest.raises(ConfigError, match=f"ray_address: no head .*{address}.*{said}"):
            Cluster(1, address=address)
        assert time.monotonic() - started < CONNECT_S + 5


@pytest.mark.parametrize("way", ["keep", "ship"])
def test_a_node_without_the_package_is_named_or_is_sent_it(tmp_path: Path, way: str) -> None:
    pytest.importorskip(
        "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
    )
    (tmp_path / "sitecustomize.py").write_text(SITE)
    found = program(SHIPS, tmp_path, str(tmp_path), way)["found"]
    if way == "ship":
        assert found == 0
    else:
        assert "has no module 'oxrl'" in str(found) and "ray_working_dir: ship" in str(found)


@pytest.mark.parametrize(
    ("device", "available", "each"), [("auto", 0, 0), ("auto", 3, 1), ("cuda", 1, 1), ("cpu", 8, 0)]
)
def test_actors_take_gpus_where_the_cluster_has_them_whatever_the_driver_has(
    device: str, available: int, each: int
) -> None:
    cfg = SimpleNamespace(run=SimpleNamespace(device=device))
    assert ray_engines.gpus_per_actor(cast(Config, cfg), available) == each


def test_a_cluster_without_gpus_is_told_where_they_are_asked_for() -> None:
    cfg = SimpleNamespace(run=SimpleNamespace(device="cuda"))
    with pytest.raises(ConfigError, match="no node of the Ray cluster has a GPU"):
        ray_engines.gpus_per_actor(cast(Config, cfg), 0)


class _Reserved(Exception):
    """Bundles were asked for."""


class _NoCluster:
    """Notes what is reserved, and goes no further."""

    bundles: Sequence[object] = ()
    closed = False

    def gpus(self) -> int:
        return 0

    def reserve(self, bundles: Sequence[object]) -> NoReturn:
        self.bundles = bundles
        raise _Reserved

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("backend", "ranks", "actors", "bundles"),
    [("local", 1, 2, 2), ("local", 1, 3, 3), ("fsdp", 2, 0, 2), ("fsdp", 2, 3, 5)],
)
def test_places_are_reserved_for_rollout_actors_and_for_ranks_where_there_are_some(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    ranks: int,
    actors: int,
    bundles: int,
) -> None:
    cfg = rl_config(
        tmp_path,
        "run",
        run={"training_gpus": ranks} if backend != "local" else {},
        train={"backend": backend},
        inference_engine={"actors": actors},
    )
    cluster = _NoCluster()
    monkeypatch.setattr(ray_engines, "open_cluster", lambda cfg: cluster)
    with pytest.raises(_Reserved), ExitStack() as stack:
        build_engines(Assembly(cfg), stack)
    assert len(cluster.bundles) == bundles and cluster.closed


@pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc to see who listens where"
)
def test_a_cluster_of_our_own_is_found_by_nobody_and_gives_way_to_nobody(
    tmp_path: Path,
) -> None:
    pytest.importorskip(
        "ray", reason="Ray is not installed: make env-scale, then run these in .venv-scale"
    )
    found = program(LISTENS, tmp_path)
    addresses = set(found["listening"])  # pyright: ignore
    assert addresses
    assert addresses <= LOOPBACK
    assert not found["dashboard"]
    assert found["kept"]
    # Ray's own actors give way to everything else, by 15.
    assert found["nice"] == os.nice(0)


def test_the_slurm_example_is_a_script_that_the_shell_accepts() -> None:
    script = CLUSTER_FILES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=20)
    options = [
        line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")
    ]
    assert {option.split("=")[0] for option in options} >= {
        "--nodes",
        "--gpus-per-node",
        "--ntasks-per-node",
    }
    assert "run.ray_address=" in script.read_text()


def test_the_kuberay_example_names_what_a_rayjob_needs() -> None:
    (job,) = yaml.safe_load_all((CLUSTER_FILES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert "run.ray_address=auto" in job["spec"]["entrypoint"]
    cluster = job["spec"]["rayClusterSpec"]
    # KubeRay submits the entrypoint to the head's dashboard.
    assert "include-dashboard" not in cluster["headGroupSpec"]["rayStartParams"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts <= {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        # Checkpoints are written by training actors and read by others: every node sees one file
        # system.
        assert "shared" in mounts
