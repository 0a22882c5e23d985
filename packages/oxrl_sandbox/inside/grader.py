"""The process that runs the tests. It trusts them, and nothing that the judged process says.

Functions under test are called over a socket: arguments go there as plain data, and plain data
comes back, whose equality is Python's own. What is no plain data is a `Reference`; comparing one
with anything fails the test.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from oxrl_sandbox.inside import plain
from oxrl_sandbox.inside.plain import Json, Wire

MOST_SHOWN = 120
# Longest output of a program, in bytes.
MOST_OUTPUT = 4 << 20
# Of an output that is told and not compared, bytes from its beginning and as many from its end.
MOST_TOLD = 1900


class Lost(BaseException):
    """The judged process ended or said what is no reply. Not an Exception: no test may catch it."""


class BadTests(Exception):
    """The tests cannot be run, whatever the program does."""


class Raised(Exception):
    """Judged code raised something that is no exception of Python's own."""


class Judged:
    """The other end of the socket.

    Args:
        fd: the socket.
        progress: one byte that others read, and this sets while it waits for the judged process;
            a second one once that has answered.
    """

    def __init__(self, fd: int, progress: Wire) -> None:
        self._fd = fd
        self._progress = progress
        self.last = ""

    def wait(self) -> Json:
        """The next message."""
        self._progress[0] = 1
        try:
            message = plain.receive(self._fd)
        except (plain.Closed, plain.TooLong, ValueError, RecursionError) as error:
            raise Lost(str(error)) from error
        self._progress[:2] = b"\0\1"
        if not isinstance(message, dict):
            raise Lost("sent what is no reply")
        return message

    def ask(
        self, do: str, reference: Reference | None, *arguments: object, **named: object
    ) -> Wire:
        """Have something done there, and return its result; arguments that it changed are changed
        here.

        Args:
            do: the name of the action, such as "call".
            reference: what it is done to; None: the program as a whole.
            arguments: plain data or references, by position; a list, dict or set among them is
                changed in place.
            named: the same, by name; these are not changed.

        Returns:
            Plain data, or a reference.

        Raises:
            Lost: there is no reply, or none that can be read.
            BadTests: an argument cannot be sent.
            Exception: what the judged code raised, as `exception_of` has it.
        """
        request: Json = {"do": do, "of": _number(reference)}
        request["arguments"] = [self._encode(value) for value in arguments]
        request["named"] = {name: self._encode(value) for name, value in named.items()}
        reply = self._exchange(request)
        self._apply(reply.get("changed", []), arguments)
        value = self._decode(reply.get("value"))
        self.last = shown(value)
        return value

    def names(self, names: Sequence[str]) -> dict[str, Wire]:
        """Those of some names that the program defines, with their values.

        Args:
            names: to look for.

        Returns:
            Name -> plain data, or a reference; in the order of `names`.

        Raises:
            Lost: there is no reply, or none that can be read.
        """
        reply = self._exchange({"do": "names", "names": list(names)})
        found = reply.get("names")
        if not isinstance(found, dict):
            raise Lost("sent what is no reply")
        return {name: self._decode(found[name]) for name in names if name in found}

    def _exchange(self, request: Json) -> Json:
        try:
            plain.send(self._fd, request)
        except plain.Closed as error:
            raise Lost from error
        reply = self.wait()
        if "raised" in reply:
            raise exception_of(reply["raised"])
        return reply

    def _apply(self, changed: Wire, arguments: Sequence[object]) -> None:
        """Change arguments in place as the function there changed its copies."""
        try:
            for index, data in changed:
                replace_contents(arguments[index], self._decode(data))
        except (TypeError, ValueError, IndexError) as error:
            raise Lost("sent arguments that are none") from error

    def _encode(self, value: object) -> Wire:
        def keep(other: object) -> list[Wire]:
            if isinstance(other, Reference):
                return ["object", *_number(other)]
            return plain.refuse(other)

        try:
            return plain.encode(value, keep)
        except plain.NotPlain as error:
            raise BadTests(f"a test passes an argument that cannot be sent: {error}") from error

    def _decode(self, data: Wire) -> Wire:
        try:
            return plain.decode(data, self._reference)
        except (ValueError, TypeError, KeyError, IndexError, ArithmeticError) as error:
            raise Lost(f"sent what is no plain data: {error}") from error

    def _reference(self, rest: list[Wire]) -> Reference:
        return Reference(self, int(rest[0]), str(rest[1])[:MOST_SHOWN])


def _asking(do: str) -> Callable[..., Wire]:
    """A method that has something done to a reference there; see `Judged.ask`."""

    def method(self: Reference, *arguments: object, **named: object) -> Wire:
        return self._oxrl_judged.ask(do, self, *arguments, **named)  # pyright: ignore

    return method


class Reference:
    """Something of the judged process that is no plain data: it can be called and looked into.

    It equals nothing and differs from nothing: a test that compares it fails.

    Args:
        judged: the other end.
        number: of the object there.
        kind: name of its class there, which is not believed.
    """

    __slots__ = ("_oxrl_judged", "_oxrl_kind", "_oxrl_number")
    __hash__ = None  # pyright: ignore

    def __init__(self, judged: Judged, number: int, kind: str) -> None:
        object.__setattr__(self, "_oxrl_judged", judged)
        object.__setattr__(self, "_oxrl_number", number)
        object.__setattr__(self, "_oxrl_kind", kind)

    __call__ = _asking("call")
    __setattr__ = _asking("set")  # pyright: ignore
    __getitem__ = _asking("item")
    __len__ = _asking("len")
    __int__ = _asking("int")
    __float__ = _asking("float")
    __str__ = _asking("str")  # pyright: ignore

    def __getattr__(self, name: str) -> Wire:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._oxrl_judged.ask("attribute", self, name)

    def __iter__(self) -> Iterator[Wire]:
        return iter(self._oxrl_judged.ask("items", self))

    def __bool__(self) -> bool:
        return self._oxrl_judged.ask("bool", self) is True

    def __repr__(self) -> str:
        return f"<{self._oxrl_kind} of the judged program>"

    def _oxrl_refuse(self, other: object) -> bool:
        raise AssertionError(f"{self!r} is no plain data, and equal to nothing")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _oxrl_refuse  # pyright: ignore


def _number(reference: Reference | None) -> list[int]:
    return [] if reference is None else [object.__getattribute__(reference, "_oxrl_number")]


def replace_contents(argument: Wire, now: Wire) -> None:
    """Give a list, dict, set or the like the contents of another.

    Args:
        argument: changed in place; of a tuple, nothing is.
        now: of the same type.

    Raises:
        TypeError: it is of another type.
    """
    if type(argument) is not type(now):
        raise TypeError("an argument changed its type")
    if isinstance(argument, dict | set):
        argument.clear()
        argument.update(now)
    # Of a tuple nothing changes: what it holds is a copy there and here.
    elif hasattr(argument, "extend") and hasattr(argument, "clear"):
        argument.clear()
        argument.extend(now)


def exception_of(told: Wire) -> Exception:
    """The closest exception of Python's own to what judged code raised.

    Args:
        told: names of the exception's classes, the nearest first, and what it says.

    Returns:
        One of a built-in class, or `Raised`; never one that ends a loop in silence.

    Raises:
        Lost: `told` is no exception.
    """
    try:
        names, text = told
        kinds = [getattr(builtins, str(name), None) for name in names]
    except (TypeError, ValueError) as error:
        raise Lost("sent what is no exception") from error
    for kind in kinds:
        if kind in (Exception, StopIteration, StopAsyncIteration):
            break  # the latter two would end loops of the tests early, in silence
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(str(text)[:MOST_SHOWN])
            except TypeError:
                break  # UnicodeError takes more
    return Raised(f"{names[0]}: {text}"[:MOST_SHOWN])


def shown(value: object) -> str:
    """A value, shortened; never long to compute.

    Args:
        value: anything that is plain data or a reference.

    Returns:
        At most some MOST_SHOWN characters, for reasons.
    """
    if isinstance(value, list | tuple | dict | set | frozenset | str | bytes) and len(value) > 1000:
        return f"{type(value).__name__} of {len(value)} items"
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to show"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class Counted:
    """Counter of the asserts that were run, and of those that held.

    Args:
        partial: go on after one that failed.
    """

    def __init__(self, partial: bool) -> None:
        self.partial = partial
        self.run = 0
        self.held = 0
        self.first = ""
        self._counted: BaseException | None = None

    @contextlib.contextmanager
    def __call__(self, text: str) -> Iterator[None]:
        """Used as `with counted("text of the assert"): assert ...`.

        Args:
            text: of the assert, for the reason where it fails.
        """
        self.run += 1
        try:
            yield
        except BadTests:
            raise
        except Exception as error:
            self._counted = error
            self._note(error, text)
            if not self.partial:
                raise
        else:
            self.held += 1

    def failed(self, error: Exception) -> None:
        """Count what a test raised outside of its asserts; one that an assert raised is counted.

        Args:
            error: what ended the tests, or one of them.
        """
        if error is not self._counted:
            self.run += 1
            self._note(error, "the tests")

    def _note(self, error: Exception, where: str) -> None:
        kind = "" if isinstance(error, Raised) else type(error).__name__
        verb = "raised "
        if isinstance(error, AssertionError):
            kind = "failed"
            verb = ""
        said = ": ".join(filter(None, (kind, str(error)[:MOST_SHOWN])))
        self.first = self.first or f"{where} {verb}{said}"


class _CountAsserts(ast.NodeTransformer):
    """Puts every assert into `with __counted__("its text"):`."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        if isinstance(node.test, ast.Constant):
            return node  # `assert True` says nothing of the program
        text = ast.unparse(node.test)[:MOST_SHOWN]
        counted = ast.Call(ast.Name("__counted__", ast.Load()), [ast.Constant(text)], [])
        block = ast.With([ast.withitem(counted)], [node])
        return ast.fix_missing_locations(ast.copy_location(block, node))


def compiled(source: str, what: str) -> Wire:
    """Tests, ready to run and with their asserts counted.

    Args:
        source: of the tests.
        what: it is called in messages, such as "test".

    Returns:
        A code object for `exec`, in a namespace with `__counted__`.

    Raises:
        BadTests: they are no Python.
    """
    try:
        return compile(_CountAsserts().visit(ast.parse(source)), f"<{what}>", "exec")
    except (SyntaxError, ValueError) as error:
        raise BadTests(f"the {what} is no Python: {error}") from error


def wanted_names(sources: Sequence[str]) -> list[str]:
    """The names that tests take from the program: what they load and nothing else defines.

    Built-in names and modules of the standard library are the grader's own: a program that defines
    `set` or `math` does not get to define what the tests mean by them. Only where tests use no
    other name is a built-in one that they call taken from the program.

    Args:
        sources: of the tests and what sets them up; Python.

    Returns:
        Names, in the order in which they are first used.
    """
    loaded: list[str] = []
    bound: set[str] = set()
    called: set[str] = set()
    statements = [part for text in sources for part in ast.parse(text).body]
    for node in ast.walk(ast.Module(statements, [])):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                loaded.append(name)
            case (
                ast.Name(id=name)
                | ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.arg(arg=name)
            ):
                bound.add(name)
            case ast.alias():
                bound.add((node.asname or node.name).partition(".")[0])
            case ast.Call(func=ast.Name(id=name)):
                called.add(name)
            case _:
                pass
    names = [name for name in dict.fromkeys(loaded) if name not in bound]
    modules = [name for name in names if name in sys.stdlib_module_names and name not in called]
    own = [name for name in names if not hasattr(builtins, name) and name not in modules]
    return own or [name for name in names if name in called]


class _Names(dict[str, Wire]):
    """Names of tests; a module of the standard library that they do not import is imported."""

    def __missing__(self, name: str) -> Wire:
        if hasattr(builtins, name) or name not in sys.stdlib_module_names:
            raise KeyError(name)
        return __import__(name)


def run_check(judged: Judged, tests: Json, counted: Counted) -> None:
    """Tests of a function by its name: `test` defines `check(candidate)`.

    What the prompt defines beside the function is the grader's own copy.

    Args:
        judged: the process with the program.
        tests: `test`, `entry` (the function's name), and perhaps `prompt`.
        counted: is told of every assert.

    Raises:
        BadTests: the prompt cannot be run, or the test defines no check.
        Exception: what the tests raise, an assert that failed included.
    """
    names = _Names(__name__="tests", __counted__=counted)
    entry = tests["entry"]
    if "prompt" in tests:
        try:
            exec(compile(tests["prompt"], "<prompt>", "exec"), names)
        except Exception as error:
            raise BadTests(f"the prompt cannot be run: {type(error).__name__}: {error}") from error
    code = compiled(tests["test"], "test")
    candidate = judged.names([entry]).get(entry)
    if candidate is None:
        counted.first = f"the program defines no {entry}"
        return
    names[entry] = candidate
    exec(code, names)
    if not callable(names.get("check")):
        raise BadTests("the test defines no check(candidate)")
    names["check"](candidate)


def run_asserts(judged: Judged, tests: Json, counted: Counted) -> None:
    """Tests that are statements, after some that set up what they use.

    Args:
        judged: the process with the program.
        tests: `tests`, sources that are run one after the other, and `setup`.
        counted: is told of every assert; says by `partial` whether to go on after one that failed.

    Raises:
        BadTests: a source is no Python, or passes what cannot be sent.
        Exception: what `setup` raises.
    """
    names = _Names(__name__="tests", __counted__=counted)
    code = [compiled(source, "test") for source in tests["tests"]]
    setup = compiled(tests["setup"], "setup")
    names.update(judged.names(wanted_names([tests["setup"], *tests["tests"]])))
    exec(setup, names)
    for part in code:
        try:
            exec(part, names)
        except BadTests:
            raise
        except Exception as error:  # noqa: BLE001 - the test failed on what the program did
            counted.failed(error)
            if not counted.partial:
                return


def compare_output(fd: int, expected: str) -> Json:
    """Read what a program prints, and say whether it is what is expected.

    White space at the ends of lines, and empty lines at the end, are nothing.

    Args:
        fd: descriptor of the output, which is read to its end, or up to MOST_OUTPUT bytes.
        expected: the whole output that is right.

    Returns:
        `held` and `run`, 1 of 1 if it is right, else 0 of 1 and a `reason` with the first line that
        differs.
    """
    output = bytearray()
    while chunk := os.read(fd, 1 << 16):
        output += chunk
        if len(output) > MOST_OUTPUT:
            return _failed(f"printed more than {MOST_OUTPUT >> 20} MB")
    found = output.decode(errors="replace").rstrip().splitlines()
    wanted = expected.rstrip().splitlines()
    for number, (line, right) in enumerate(zip(found, wanted, strict=False), start=1):
        if line.rstrip() != right.rstrip():
            return _failed(f"printed {shown(line)} in line {number}, not {shown(right)}")
    if len(found) != len(wanted):
        return _failed(f"printed {len(found)} lines, not {len(wanted)}")
    return {"held": 1, "run": 1}


def read_output(fd: int) -> Json:
    """Read what a program prints, for somebody to see; the middle of much is left out.

    Args:
        fd: descriptor of the output, which is read to its end.

    Returns:
        `output`, the text; `held` and `run` are 1, for nothing is compared.
    """
    head = bytearray()
    tail = bytearray()
    cut = 0
    while chunk := os.read(fd, 1 << 16):
        room = MOST_TOLD - len(head)
        head += chunk[:room]
        tail += chunk[room:]
        cut += max(0, len(tail) - MOST_TOLD)
        tail = tail[-MOST_TOLD:]
    between = f"\n... ({cut:,} bytes are left out) ...\n" if cut else ""
    text = (head + between.encode() + tail).decode(errors="replace")
    return {"held": 1, "run": 1, "output": text}


def _failed(how: str) -> Json:
    return {"held": 0, "run": 1, "reason": f"the program {how}"}


def asserts_in(tests: Json) -> int:
    """Count the asserts in the source of some tests; one of a constant, as `assert True`, is left
    out.

    Args:
        tests: with `test`, or with `tests`.

    Raises:
        SyntaxError, ValueError: they are no Python.
    """
    sources = [tests["test"]] if "test" in tests else tests["tests"]
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    return sum(
        isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant) for node in nodes
    )


def grade(judged: Judged, tests: Json, *, partial: bool) -> Json:
    """Run tests, and say how many asserts held.

    Args:
        judged: the program.
        tests: `test` and `entry`, perhaps `prompt`; or `tests` and `setup`.
        partial: run them all, also after one that failed.

    Returns:
        `held` and `run`, and a `reason` where not all held; or `bad`, why the tests cannot be run.
    """
    counted = Counted(partial)
    try:
        started = judged.wait()
        if "failed" in started:
            names, text = started["failed"]
            return _failed(f"raised {names[0]}: {text}")
        follow = run_check if "test" in tests else run_asserts
        follow(judged, tests, counted)
    except BadTests as error:
        return {"bad": str(error)}
    except Lost as error:
        run = max(counted.run, asserts_in(tests), 1)
        return {"held": counted.held, "run": run, "lost": str(error)}
    except Exception as error:  # noqa: BLE001 - the tests failed on what the program did
        counted.failed(error)
    if counted.first:
        run = max(counted.run, asserts_in(tests), 1)
        returned = f"; the program last returned {judged.last}" if judged.last else ""
        return {"held": counted.held, "run": run, "reason": counted.first + returned}
    if not counted.run:
        return {"bad": "the tests hold no assert"}
    return {"held": counted.held, "run": counted.run}
