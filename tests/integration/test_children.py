"""Supervised children: the real scripts where they serve, and one that misbehaves on request."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner import children
from tuner.children import Child, ChildFailure
from tuner.config import Config
from tuner.errors import MachineError
from tuner.target import named
from tuner.workload import Workload

ROOT = Path(__file__).parents[2]
LONG_S = 120.0  # never reached, however slow the machine

MISCHIEF = """
import json, os, subprocess, sys, time
sys.path.insert(0, {root!r})
from tuner import _child_io

def handle(request, say):
    match request["do"]:
        case "events":
            for n in range(request["count"]):
                say({{"event": "step", "n": n}})
            time.sleep(0.5)
        case "talk":
            print(json.dumps({{"answer": "not this one"}}), flush=True)
            os.write(1, b"x" * 200_000 + b"\\n")
            os.write(2, b"ptxas fatal : the last words\\n")
        case "grandchild":
            code = "import sys, time; held = b'x' * (int(sys.argv[1]) << 20); print(1, flush=True); time.sleep(1e6)"
            command = [sys.executable, "-c", code, str(request.get("mib", 0))]
            started = subprocess.Popen(command, stdout=subprocess.PIPE, close_fds=False)
            started.stdout.readline()
            return {{"pid": started.pid}}
        case "fds":
            return {{"pipes": [os.readlink(f"/proc/self/fd/{{fd}}") for fd in sys.argv[1:3]]}}
        case "exit":
            os._exit(7)
        case "abort":
            os.abort()
        case "hang":
            time.sleep(1e6)
    return {{"answer": request["do"], "payload": request.get("payload")}}

_child_io.serve(handle)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    """Make children of a real script, or of the one above; they end with the test."""
    made: list[Child] = []

    def make(script: str = "") -> Child:
        child = Child(script or "_sandbox_child.py", {"PYTHONUNBUFFERED": "1"}, tmp_path / f"{len(made)}" / "child.log")
        if not script:
            child._script = tmp_path / "mischief.py"
            child._script.write_text(MISCHIEF.format(root=str(ROOT)))
        made.append(child)
        return child

    yield make
    for child in made:
        child.kill()


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    """Wait for a process to end."""
    end = time.monotonic() + LONG_S
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def compile_request(tmp_path: Path, does: str) -> dict[str, Any]:
    return {
        "config": Config.make("fake", 1, variant=0).to_dict(),
        "workload": Workload(batch=1, heads_q=1, heads_kv=1, seqlen_q=1, seqlen_k=1, head_dim=8).to_dict(),
        "target": named("fake").to_dict(),
        "cache_dir": str(tmp_path),
        "script": f'{{"outcomes": {{"0": {{"does": "{does}"}}}}}}',
    }


def failure(child: Child, request: dict[str, Any], timeout_s: float = LONG_S, **more: Any) -> ChildFailure:
    with pytest.raises(ChildFailure) as caught:
        child.request(request, timeout_s=timeout_s, **more)
    return caught.value


def test_the_real_scripts_answer(start: Callable[..., Child], tmp_path: Path) -> None:
    measuring, compiling = start("_sandbox_child.py"), start("_compile_child.py")
    assert not measuring.running
    assert measuring.request({"op": "close", "bench": "none"}, timeout_s=LONG_S) == {"ok": True}
    answer = compiling.request(compile_request(tmp_path, "ok"), timeout_s=LONG_S)
    assert (answer["ok"], answer["resources"]["registers"]) == (True, 168)
    answer = compiling.request(compile_request(tmp_path, "compile_error"), timeout_s=LONG_S)
    assert (answer["ok"], answer["error"]) == (False, "ValueError: unable to partition input (scripted)")
    assert (measuring.starts, compiling.starts, compiling.running) == (1, 1, True)


def test_requests_are_answered_in_order_by_one_process(start: Callable[..., Child]) -> None:
    child, payload = start(), "\N{SNOWMAN}\n" * 20_000
    for n in range(3):
        answer = child.request({"do": "echo", "payload": [n, payload]}, timeout_s=LONG_S)
        assert answer == {"answer": "echo", "payload": [n, payload]}
    assert child.starts == 1


def test_what_a_library_prints_is_no_answer_and_lands_in_the_log(start: Callable[..., Child]) -> None:
    child = start()
    assert child.request({"do": "talk"}, timeout_s=LONG_S)["answer"] == "talk"
    assert child.log_tail().endswith("ptxas fatal : the last words")
    assert len(child.log_tail()) <= 4000


def test_every_event_renews_the_deadline(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own: five events 8 seconds apart, under a deadline of 10."""
    child, clock, seen = start(), SimpleNamespace(now=0.0), []
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def note(event: dict[str, Any]) -> None:
        seen.append(event["n"])
        clock.now += 8

    answer = child.request({"do": "events", "count": 5}, timeout_s=10, on_event=note)
    assert (answer["answer"], seen) == ("events", [0, 1, 2, 3, 4])


def test_without_an_event_in_time_the_deadline_holds(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    child, clock = start(), SimpleNamespace(now=0.0)

    def later() -> float:
        clock.now += 1
        return float(clock.now)

    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=later))
    found = failure(child, {"do": "hang"}, timeout_s=10)
    assert (found.kind, str(found)) == ("timeout", "no answer after 10 s; killed")
    assert clock.now < 15


def test_a_timeout_kills_the_whole_process_group(start: Callable[..., Child]) -> None:
    child = start()
    grandchild = child.request({"do": "grandchild"}, timeout_s=LONG_S)["pid"]
    pid = child.pid
    assert pid is not None
    assert alive(pid)
    assert alive(grandchild)
    assert failure(child, {"do": "hang"}, timeout_s=0.2).kind == "timeout"
    assert not child.running
    assert gone(pid)
    assert gone(grandchild)


def test_after_a_failure_the_next_request_has_a_fresh_child(start: Callable[..., Child]) -> None:
    child = start()
    for n, request in enumerate(({"do": "exit"}, {"do": "abort"}), start=1):
        assert failure(child, request).kind == "crash"
        assert child.request({"do": "echo"}, timeout_s=LONG_S)["answer"] == "echo"
        assert child.starts == n + 1


def test_a_crash_names_the_signal(start: Callable[..., Child], tmp_path: Path) -> None:
    found = failure(start("_compile_child.py"), compile_request(tmp_path, "compile_abort"))
    assert (found.kind, str(found).splitlines()[0]) == ("crash", "died of SIGABRT")


def test_a_crash_gives_the_status_and_the_end_of_the_log(start: Callable[..., Child]) -> None:
    found = failure(start("_compile_child.py"), {"not": "a request"})
    first, *log = str(found).splitlines()
    assert (found.kind, first, log[-1]) == ("crash", "exited with status 1", "KeyError: 'target'")
    child = start()
    child.request({"do": "talk"}, timeout_s=LONG_S)
    assert str(failure(child, {"do": "exit"})).endswith("ptxas fatal : the last words")


def test_the_log_is_of_the_present_child_only(start: Callable[..., Child]) -> None:
    child = start()
    child.request({"do": "talk"}, timeout_s=LONG_S)
    failure(child, {"do": "exit"})
    assert str(failure(child, {"do": "exit"})) == "exited with status 7"


def test_a_child_that_died_between_requests_is_started_again(start: Callable[..., Child]) -> None:
    child = start()
    child.request({"do": "echo"}, timeout_s=LONG_S)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    assert gone(child.pid)
    assert child.request({"do": "echo"}, timeout_s=LONG_S)["answer"] == "echo"
    assert child.starts == 2


def test_memory_over_the_limit_kills(start: Callable[..., Child], tmp_path: Path) -> None:
    child = start("_compile_child.py")
    child.request(compile_request(tmp_path, "ok"), timeout_s=LONG_S, memory_bytes=400 << 20)
    pid = child.pid
    found = failure(child, compile_request(tmp_path, "compile_memory"), memory_bytes=400 << 20)
    assert found.kind == "memory"
    assert str(found).endswith("MiB of memory, 400 MiB are allowed")
    assert int(str(found).split()[1]) > 400
    assert pid is not None
    assert gone(pid)


def test_the_memory_of_what_a_child_starts_counts(start: Callable[..., Child]) -> None:
    child = start()
    small = child.request({"do": "grandchild", "mib": 1}, timeout_s=LONG_S)["pid"]
    large = child.request({"do": "grandchild", "mib": 300}, timeout_s=LONG_S)["pid"]
    found = failure(child, {"do": "hang"}, memory_bytes=300 << 20)
    assert found.kind == "memory"
    assert gone(small)
    assert gone(large)


PARENT = """
import sys, time
from pathlib import Path
from tuner.children import Child

child = Child("_sandbox_child.py", {}, Path(sys.argv[1]))
child.request({"op": "close", "bench": "none"}, timeout_s=120)
print(child.pid, flush=True)
time.sleep(1e6)
"""


def test_a_child_dies_with_its_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "child.log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert gone(pid)


def test_a_child_whose_parent_has_gone_before_it_asked_ends(tmp_path: Path) -> None:
    """It is told the parent's process id; another one means that it was given away already."""
    reads, writes = os.pipe()
    script = ROOT / "tuner" / "_sandbox_child.py"
    command = [sys.executable, str(script), str(reads), str(writes), str(os.getpid() + 1)]
    done = subprocess.run(command, pass_fds=(reads, writes), timeout=LONG_S, capture_output=True, check=False)
    os.close(reads)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, b"")


def test_children_work_under_process_1(tmp_path: Path) -> None:
    """As in a container whose command is the tuner."""
    own_ids = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
    if not shutil.which("unshare") or subprocess.run([*own_ids, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no process namespaces (unshare --user --pid)")
    code = PARENT.replace("child.pid", "__import__('os').getpid()").replace("time.sleep(1e6)", "child.kill()")
    command = [*own_ids, sys.executable, "-c", code, str(tmp_path / "child.log")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_nothing_else_holds_a_childs_pipes(start: Callable[..., Child]) -> None:
    """Neither what it starts, with every file left open, nor a child started after it."""
    first, second = start(), start()
    pipes = first.request({"do": "fds"}, timeout_s=LONG_S)["pipes"]
    assert len(set(pipes)) == 2
    assert first.pid is not None
    assert set(pipes) <= set(open_files(first.pid))
    grandchild = first.request({"do": "grandchild"}, timeout_s=LONG_S)["pid"]
    second.request({"do": "echo"}, timeout_s=LONG_S)
    assert second.pid is not None
    for pid in (grandchild, second.pid):
        assert open_files(pid)
        assert not set(pipes) & set(open_files(pid))


def open_files(pid: int) -> list[str]:
    return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]


def test_a_crash_is_noticed_while_what_the_child_started_lives_on(start: Callable[..., Child]) -> None:
    child = start()
    grandchild = child.request({"do": "grandchild"}, timeout_s=LONG_S)["pid"]
    found = failure(child, {"do": "exit"})
    assert (found.kind, str(found)) == ("crash", "exited with status 7")
    assert gone(grandchild)


def test_a_parent_that_closes_ends_its_child_and_leaks_no_files(start: Callable[..., Child]) -> None:
    child = start()
    child.request({"do": "echo"}, timeout_s=LONG_S)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        child.kill()
        child.request({"do": "echo"}, timeout_s=LONG_S)
    assert len(os.listdir("/proc/self/fd")) == before
    pid = child.pid
    child.kill()
    child.kill()
    assert pid is not None
    assert gone(pid)
    assert (child.running, len(os.listdir("/proc/self/fd"))) == (False, before - 2)


def test_a_persons_own_modules_do_not_shadow_ours(start: Callable[..., Child], tmp_path: Path) -> None:
    folder = tmp_path / "0"  # where the child runs
    folder.mkdir()
    for name in ("db", "tuner", "json", "select"):
        (folder / f"{name}.py").write_text("raise SystemExit('shadowed')")
    child = start("_sandbox_child.py")
    assert child.request({"op": "close", "bench": "none"}, timeout_s=LONG_S) == {"ok": True}


def test_a_child_that_cannot_be_started_is_the_machines_trouble(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(MachineError, match=r"cannot start mischief\.py"):
        start().request({"do": "echo"}, timeout_s=LONG_S)


def test_a_child_that_somebody_else_killed_is_told_from_one_that_crashed(start: Callable[..., Child]) -> None:
    """As the kernel does to it when memory runs out."""
    child = start()
    child.request({"do": "echo"}, timeout_s=LONG_S)
    assert child.pid is not None
    threading.Timer(0.3, os.killpg, (child.pid, signal.SIGKILL)).start()
    found = failure(child, {"do": "hang"})
    assert (found.kind, str(found)) == ("killed", "died of SIGKILL")
