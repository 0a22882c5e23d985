"""vLLM's own server on loopback, with a model of a test's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel

from oxrl.checkpoint.model_files import save_model
from support.samplers import TOKENIZER

START_S = 500.0


@contextmanager
def vllm_server(folder: Path, model: PreTrainedModel, *more: str) -> Iterator[str]:
    """Serve a model under the name "tiny"; yields the url of its API.

    Args:
        folder: an empty one, for the model and what the server says.
        model: with the built-in tokenizer.
        more: arguments of the server.
    """
    save_model(model, folder)
    TOKENIZER.save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "4"]
    command += ["--dtype", "float32", "--distributed-executor-backend", "uni", *more]
    here = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    here |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=here)
        try:
            deadline = time.monotonic() + START_S
            while not _answers(f"{url}/models"):
                told = (folder / "server.log").read_text(errors="replace")[-3000:]
                assert server.poll() is None and time.monotonic() < deadline, told
                time.sleep(1.0)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0):
            return True
    except (urllib.error.URLError, OSError):
        return False
