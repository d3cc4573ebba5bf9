"""How fast does ``GET /v1/configs`` answer? One server process, one client process, keep-alive connections.

    python benchmarks/http_lookup.py --seconds 15 --out benchmarks/results/<date>-cpu/http_lookup.json

The server has 1,000 published entries in a SQLite database and runs as ``flashtune serve`` does, its
log going to a file. The client asks 1,250 different questions over and over: 1,000 exact, 250 that match
by bucket or nearest. Every connection sends its next request as soon as it has the answer
(closed loop), so with few of them the rate is bounded by the latency. While it measures, the server
looks for new answers each 2 s as always, and once in the middle of a run one is published, so that
every answer is made anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice, product
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from api.http.server import Server
from api.serving import log_to_stderr
from db.store import Store
from tuner.config import Config
from tuner.spec import StudySettings, StudySpec
from tuner.target import Target, Toolchain
from tuner.trial import Finalist, TunedConfig, Verdict
from tuner.workload import Workload

ENTRIES = 1000
PATTERNS = ("causal", "full", "sliding_window(1024)", "causal + softcap(30)", "prefix_lm(256)")
TARGET = Target("NVIDIA H200", "sm_90a", 132, power_cap_w=700)
TOOLCHAIN = Toolchain(driver="580.1", cuda="13.0", torch="2.13.0", triton="3.7.1", python="3.11")
PACKAGES = ("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic", "sqlalchemy")
P99_MS, RATE = 5.0, 2000.0


def workloads() -> list[Workload]:
    """Return the workloads that have answers."""
    sizes = product(PATTERNS, (64, 128), (1, 2, 4, 8, 16), (512, 1024, 2048, 4096, 8192), (8, 16, 32, 64))
    return [
        Workload.from_dict(
            {"pattern": p, "head_dim": d, "batch": b, "seqlen_q": s, "seqlen_k": s, "heads_q": h, "heads_kv": h}
        )
        for p, d, b, s, h in islice(sizes, ENTRIES)
    ]


def answer(tile: int) -> TunedConfig:
    """Return an answer of usual size: seven finalists of 40 samples each."""
    config = Config.make("fa4_fwd", 1, tile_m=tile, tile_n=128, num_stages=2, mma_pv_is_rs=True)
    samples = tuple(100.0 + i / 7 for i in range(40))
    finalist = Finalist(config, 100.5, 1.1, 1.08, 1.12, samples, True)
    return TunedConfig(
        config=config,
        default=Config.make("fa4_fwd", 1),
        verdict=Verdict.PUBLISHED,
        speedup=1.1,
        low=1.08,
        high=1.12,
        confidence=0.95,
        margin=0.02,
        ties=(),
        finalists=(finalist,) * 7,
        verification=None,
        reason="",
        rounds=40,
        rounds_dropped=0,
    )


def publish(store: Store, workload: Workload, tile: int) -> None:
    spec = StudySpec(workload, TARGET, TOOLCHAIN, "graph", ("fa4_fwd/1",))
    store.begin_study(spec, StudySettings(), force=True).finish(answer(tile), {})


def questions(known: list[Workload]) -> list[bytes]:
    """Return requests: every known workload, and 250 that are near one."""
    asked = known + [w.with_(batch=w.batch * 2 - 1 if i % 2 else 3) for i, w in enumerate(known[::4])]
    out = []
    for w in asked:
        fields = {k: str(v).lower() if isinstance(v, bool) else v for k, v in w.to_dict().items()}
        query = urlencode({**fields, "arch": TARGET.arch, "torch": TOOLCHAIN.torch}, quote_via=quote)
        out.append(f"GET /v1/configs?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return out


class Client(asyncio.Protocol):
    """One connection: sends a request, waits for the answer, notes the time, sends the next."""

    def __init__(self, requests: list[bytes], until: float, seed: int) -> None:
        self._requests, self._until, self._rng = requests, until, random.Random(seed)
        self._received = b""
        self.latencies_s: list[float] = []
        self.statuses: dict[str, int] = {}
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._rng.choice(self._requests))

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        if not blank:
            return
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        now = time.perf_counter()
        self.latencies_s.append(now - self._sent)
        status = head[9:12].decode()
        self.statuses[status] = self.statuses.get(status, 0) + 1
        self._received = b""
        if now < self._until:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set_result(None)


async def drive(url: str, requests: list[bytes], connections: int, seconds: float) -> dict[str, Any]:
    """Ask for that long over that many connections; latencies in milliseconds."""
    where, began = urlsplit(url), time.perf_counter()
    clients = [Client(requests, began + seconds, seed) for seed in range(connections)]
    for client in clients:
        await asyncio.get_running_loop().create_connection(lambda c=client: c, where.hostname, where.port)
    cpu = time.process_time()
    await asyncio.gather(*(client.done for client in clients))
    wall = time.perf_counter() - began
    ms = sorted(1e3 * x for client in clients for x in client.latencies_s)
    statuses = {s: sum(c.statuses.get(s, 0) for c in clients) for s in sorted({s for c in clients for s in c.statuses})}
    return {
        "connections": connections,
        "seconds": round(wall, 2),
        "requests": len(ms),
        "per_s": round(len(ms) / wall, 1),
        "p50_ms": round(ms[len(ms) // 2], 3),
        "p99_ms": round(ms[len(ms) * 99 // 100], 3),
        "max_ms": round(ms[-1], 3),
        "statuses": statuses,
        "client_cpu_share": round((time.process_time() - cpu) / wall, 2),
    }


@contextmanager
def serving(database: Path, log: Path) -> Iterator[str]:
    """Run the server in a process of its own; give its URL."""
    with log.open("w") as errors:
        command = [sys.executable, __file__, "--serve", str(database)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(timeout=30)


def serve(database: str) -> None:
    log_to_stderr()
    with Store.open(database) as store, Server(store, "127.0.0.1", 0) as server:
        print(server.url, flush=True)
        server.run()


async def measure(url: str, store: Store, known: list[Workload], seconds: float) -> list[dict[str, Any]]:
    requests, runs = questions(known), []
    await drive(url, requests, 1, 3)  # warm up
    for connections in (1, 4, 8):
        run = asyncio.create_task(drive(url, requests, connections, seconds))
        await asyncio.sleep(seconds / 2)
        await asyncio.to_thread(publish, store, known[0], 64 + connections)
        runs.append(await run)
        print(json.dumps(runs[-1]), flush=True)
    return runs


def machine() -> dict[str, Any]:
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    return {
        "cpu": model.partition(": ")[2] or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each run")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return 0
    result: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
    with tempfile.TemporaryDirectory() as folder, Store.open(f"{folder}/flashtune.db") as store:
        known = workloads()
        for workload in known:
            publish(store, workload, 128)
        with serving(Path(folder, "flashtune.db"), Path(folder, "log")) as url:
            runs = asyncio.run(measure(url, store, known, args.seconds))
    good = [r for r in runs if r["per_s"] >= RATE and r["p99_ms"] < P99_MS and set(r["statuses"]) == {"200"}]
    result["machine"]["load_after"] = os.getloadavg()[0]
    result |= {"entries": ENTRIES, "goal": {"per_s": RATE, "p99_ms": P99_MS}, "met": bool(good), "runs": runs}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
