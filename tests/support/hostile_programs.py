"""Programs that try to get out of the sandbox, to harm it, or to be judged right without being it.

Each has a name, the program and the tests. Every one has to get 0: where a program tries to escape,
the tests hold only if it did.
"""

from __future__ import annotations

from typing import Any

ESCAPED: dict[str, Any] = {"tests": ["assert attempt() == 'escaped'"], "setup": ""}
ADD: dict[str, Any] = {"tests": ["assert add(1, 2) == 3", "assert add(20, 22) == 42"], "setup": ""}
CHECK: dict[str, Any] = {
    "prompt": "def add(a: int, b: int) -> int:\n    '''Add two numbers.'''\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(20, 22) == 42\n",
    "entry_point": "add",
}
SUM: dict[str, Any] = {
    "cases": [{"input": "1 2\n", "output": "3\n"}, {"input": "20 22\n", "output": "42\n"}]
}


def attempt(*lines: str) -> str:
    """A function that says that it escaped if it can do something."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"import os, sys\ndef attempt():\n{body}\n    return 'escaped'\n"


def connect(address: str, port: str = "PORT") -> str:
    return attempt(
        "import socket", f"socket.create_connection(({address!r}, {port}), timeout=1).close()"
    )


# Calls of x86_64 that change what is known of a file, by number, with the path where PATH stands:
# the families of chmod, utime, chown, setxattr, removexattr, truncate and link.
CHANGES = (
    (90, "PATH, 0o777"), (268, "-100, PATH, 0o777"), (452, "-100, PATH, 0o777, 0"),
    (132, "PATH, None"), (235, "PATH, None"), (261, "-100, PATH, None"), (280, "-100, PATH, None, 0"),
    (92, "PATH, -1, -1"), (94, "PATH, -1, -1"), (260, "-100, PATH, -1, -1, 0"),
    (188, "PATH, b'user.x', b'x', 1, 0"), (189, "PATH, b'user.x', b'x', 1, 0"),
    (197, "PATH, b'user.there'"), (198, "PATH, b'user.there'"), (76, "PATH, 0"),
    (86, "PATH, b'linked'"), (265, "-100, PATH, -100, b'linked', 0"),
)  # fmt: skip

# OUTSIDE, HOME and PORT are replaced: a folder outside, the home folder, a port that is listened to.
ESCAPES: dict[str, str] = {
    "connect to loopback": connect("127.0.0.1"),
    "connect to the world": connect("1.1.1.1", "53"),
    "udp": attempt(
        "import socket",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    ),
    "unix socket": attempt("import socket", "socket.socket(socket.AF_UNIX).connect('\\0oxrl')"),
    "raw socket by ctypes": attempt(
        "import ctypes", "assert ctypes.CDLL(None).socket(2, 1, 0) >= 0"
    ),
    "io_uring": attempt(
        "import ctypes",
        "assert ctypes.CDLL(None).syscall(425, 8, ctypes.create_string_buffer(200)) >= 0",
    ),
    "read passwords": attempt("open('/etc/passwd').read()"),
    "read the home folder": attempt("os.listdir('HOME')"),
    "read a file outside": attempt("open('OUTSIDE/secret').read()"),
    "write a file outside": attempt("open('OUTSIDE/written', 'w').write('x')"),
    "write by a link": attempt(
        "os.symlink('OUTSIDE', 'link')", "open('link/written', 'w').write('x')"
    ),
    "files: a mode": attempt("os.chmod('OUTSIDE/secret', 0o777)"),
    "files: the mode of a folder": attempt("os.chmod('OUTSIDE', 0o700)"),
    "files: a mode by a descriptor": attempt(
        "os.fchmod(os.open('OUTSIDE/secret', os.O_WRONLY | os.O_RDWR), 0o777)"
    ),
    "files: the times": attempt("os.utime('OUTSIDE/secret', (1, 1))"),
    "files: the length": attempt("os.truncate('OUTSIDE/secret', 0)"),
    "files: opened in no known way": attempt("os.open('OUTSIDE/secret', os.O_WRONLY | os.O_RDWR)"),
    "files: emptied when opened": attempt(
        "os.open('OUTSIDE/secret', os.O_WRONLY | os.O_RDWR | os.O_TRUNC)"
    ),
    "files: locked": attempt(
        "import fcntl", "fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)"
    ),
    "files: moved": attempt("os.rename('OUTSIDE/secret', 'moved')"),
    "files: removed": attempt("os.unlink('OUTSIDE/secret')"),
    "files: by number": attempt(
        "import ctypes",
        "call = ctypes.CDLL(None).syscall",
        "PATH = b'OUTSIDE/secret'",
        f"done = [{', '.join(f'call({number}, {given})' for number, given in CHANGES)}]",
        "assert 0 in done",
    ),
    "write into the standard library": attempt("open(os.__file__, 'a').write('x')"),
    "read processes": attempt("[p for p in os.listdir('/proc') if p.isdigit()][0]"),
    "read the parent's environment": attempt("open(f'/proc/{os.getppid()}/environ').read()"),
    "read own maps": attempt("open('/proc/self/mem', 'rb').close()"),
    "inherit secrets": attempt("assert os.environ['OXRL_TEST_SECRET']"),
    "kill the parent": attempt("os.kill(os.getppid(), 9)"),
    "kill everything": attempt("os.kill(-1, 9)"),
    "kill the group": attempt("os.killpg(0, 9)"),
    "kill siblings": attempt(
        "done = 0",
        "for pid in [*range(1, 400), *range(os.getpid() - 50, os.getpid() + 50)]:",
        "    try:",
        "        if pid != os.getpid(): os.kill(pid, 9); done += 1",
        "    except OSError: pass",
        "assert done",
    ),
    "limits of the parent": attempt(
        "import resource", "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))"
    ),
    "trace the parent": attempt(
        "import ctypes", "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0"
    ),
    "read the parent's memory": attempt(
        "import ctypes",
        "buffer = ctypes.create_string_buffer(8)",
        "local = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)",
        "remote = (ctypes.c_void_p * 2)(id(None), 8)",
        "call = ctypes.CDLL(None).process_vm_readv",
        "assert call(os.getppid(), local, 1, remote, 1, 0) > 0",
    ),
    "signals by fcntl": attempt("import fcntl", "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())"),
    "start a process": attempt("if os.fork() == 0: os._exit(0)"),
    "start a shell": attempt("assert os.system('true') == 0"),
    "become another program": attempt("os.execv('/bin/true', ['true'])"),
    "new namespaces": attempt("import ctypes", "assert ctypes.CDLL(None).unshare(0x10000000) == 0"),
    "mount": attempt(
        "import ctypes",
        "assert ctypes.CDLL(None).mount(b'none', b'/', b'tmpfs', 0, None) == 0",
    ),
    "leave the root": attempt("os.chroot('.')"),
    "become root": attempt("os.setuid(0) if os.getuid() else 1/0"),
    "make a device": attempt("import stat", "os.mknod('disk', 0o600 | stat.S_IFBLK, 0x800)"),
    "higher priority": attempt("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)"),
    "raise a limit": attempt("import resource", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "surviving daemon": attempt(
        "if os.fork() == 0:",
        "    os.setsid()",
        "    if os.fork() == 0:",
        "        import time; time.sleep(60)",
        "    os._exit(0)",
    ),
}

FILL = "for number in range(250): open(str(number), 'wb').write(bytes(1 << 20))\n"
HARM: dict[str, str] = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
    "thread bomb": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    ),
    "memory bomb": "held = []\nwhile True: held.append(bytearray(64 << 20))\n",
    "10 GB file": (
        "with open('big', 'wb') as file:\n    for _ in range(10240): file.write(bytes(1 << 20))\n"
    ),
    "10 GB in many files": (
        "for number in range(10240):\n    open(str(number), 'wb').write(bytes(1 << 20))\n"
    ),
    "deep folders": (
        "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')\n"
        "def add(a, b): return 0\n"
    ),
    "closed folders": (
        "import os\nos.makedirs('a/b'); open('a/b/c', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)\n"
        "def add(a, b): return 0\n"
    ),
    "files: a closed folder that is filled": (
        "import os, time\nos.mkdir('d', 0o300); os.chdir('d')\n" + FILL + "time.sleep(60)\n"
    ),
    "files: a folder that is closed and filled": (
        "import os, time\ntry: os.chmod('.', 0o300)\nexcept OSError: pass\n"
        + FILL
        + "time.sleep(60)\n"
    ),
    "files: long names that are filled": (
        "import os, time\nfor _ in range(20): os.mkdir('n' * 250); os.chdir('n' * 250)\n"
        + FILL
        + "time.sleep(60)\n"
    ),
    "endless loop": "while True: pass\n",
    "endless loop in C": "import itertools\nsum(itertools.count())\n",
    "endless number": "print(10 ** 10 ** 10)\n",
    "catastrophic regular expression": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')\n",
    "sleep": "import time\ntime.sleep(1000)\n",
    "ignore signals": (
        "import signal\n[signal.signal(n, signal.SIG_IGN) for n in range(1, 32) if n not in (9, 19)]\n"
        "while True: pass\n"
    ),
    "1 GB of output": "for _ in range(1024): print('x' * (1 << 20))\n",
    "1 GB of errors": "import sys\nfor _ in range(1024): sys.stderr.write('x' * (1 << 20))\n",
    "crash": "import ctypes\nctypes.string_at(0)\n",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()\n",
    "deep syntax": "x = " + "(" * 5000 + ")" * 5000 + "\n",
    "huge result": "def add(a, b): return 'x' * (200 << 20)\n",
    "endless result": "import itertools\ndef add(a, b): return itertools.count()\n",
    "nested result": (
        "def add(a, b):\n    value = []\n    for _ in range(100000): value = [value]\n    return value\n"
    ),
    "own result": "def add(a, b):\n    value = []\n    value.append(value)\n    return value\n",
}

TAMPERING: dict[str, str] = {
    "exit at once": "import sys\nsys.exit(0)\n",
    "exit hard at once": "import os\nos._exit(0)\n",
    "exit in the function": "import sys\ndef add(a, b): sys.exit(0)\n",
    "exit hard in the function": "import os\ndef add(a, b): os._exit(0)\n",
    "exit later": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): return 0\n",
    "equal to everything": (
        "class Any:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 0\ndef add(a, b): return Any()\n"
    ),
    "a number equal to everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def add(a, b): return Any(7)\n"
    ),
    "a list equal to everything": (
        "class Any(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Any([7])\n"
    ),
    "other built-ins": (
        "import builtins\nbuiltins.AssertionError = SystemExit\nbuiltins.abs = lambda x: 0\n"
        "def add(a, b): return 0\n"
    ),
    "print the expected words": "print('3\\n42\\nok\\nAll tests passed')\ndef add(a, b): return 0\n",
    "write to every descriptor": (
        "import json, os\nsaid = json.dumps({'graded': {'held': 2, 'run': 2}}).encode()\n"
        "for fd in range(64):\n"
        "    try: os.write(fd, len(said).to_bytes(4, 'big') + said)\n"
        "    except OSError: pass\ndef add(a, b): return 0\n"
    ),
    "define the tests": (
        "def check(candidate): pass\n__counted__ = None\ndef add(a, b): return 0\n"
    ),
    "read the tests in the stack": (
        "import sys\nframe = sys._getframe()\ntext = ''\nwhile frame:\n"
        "    text += repr(frame.f_locals) + repr(frame.f_globals)\n    frame = frame.f_back\n"
        "found = '=' + '= 42' in text\n"
        "def add(a, b): return a + b if found else 0\n"
    ),
    "read the tests in memory": (
        "import gc\nfound = any(isinstance(o, dict) and ('tests' in o or 'test' in o) "
        "and '=' + '= 42' in str(o) for o in gc.get_objects())\n"
        "def add(a, b): return a + b if found else 0\n"
    ),
    "read the tests in files": (
        "import os\nfound = any('assert' in open(os.path.join(d, n), errors='ignore').read()\n"
        "    for d, _, names in os.walk('.') for n in names)\n"
        "def add(a, b): return a + b if found else 0\n"
    ),
    "edit the modules of the grader": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "    if 'grader' in name or 'plain' in name:\n"
        "        for key in list(vars(module)):\n"
        "            if callable(vars(module)[key]): setattr(module, key, lambda *a, **k: True)\n"
        "def add(a, b): return 0\n"
    ),
    "end loops early": "def add(a, b): raise StopIteration\n",
    "claim the assertion": "def add(a, b): raise AssertionError\n",
    "not defined": "def plus(a, b): return a + b\n",
    "nothing": "\n",
}
# Programs that print, against what they have to print.
PRINTING: dict[str, str] = {
    "print nothing and exit well": "import os\nos._exit(0)\n",
    "print one answer always": "print(3)\n",
    "print right and fail": "print(sum(map(int, input().split())))\nraise SystemExit(1)\n",
    "print right and never end": (
        "print(sum(map(int, input().split())), flush=True)\nwhile True: pass\n"
    ),
    "print right and close": (
        "import os, time\nprint(sum(map(int, input().split())), flush=True)\nos.close(1)\ntime.sleep(60)\n"
    ),
    "print everything": "while True: print(3)\n",
    "print 1 GB": "for _ in range(1024): print('x' * (1 << 20))\n",
    "find the answers": (
        "import gc\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'output' in o]\n"
        "print(found[0]['output'] if found else 0)\n"
    ),
}


def programs() -> list[tuple[str, str, dict[str, Any]]]:
    """Name, program and tests of all."""
    found = [(name, code, ESCAPED) for name, code in ESCAPES.items()]
    found += [(name, code, ADD) for name, code in {**HARM, **TAMPERING}.items()]
    found += [(f"{name}, by check", code, CHECK) for name, code in TAMPERING.items()]
    found += [(name, code, SUM) for name, code in PRINTING.items()]
    return found
