"""A SQLite database with everybody on it at once: no call fails, and none is held up for long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import contention
from db import engine as engines
from db.store import Store
from tests.contract.test_store import raw_connection

ROOT = Path(__file__).parents[2]


def test_nobody_is_locked_out(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "benchmarks/contention.py", "--seconds", "5", "--dir", str(tmp_path), "--out", str(out)]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["errors"] == {}
    for call in (
        "submit",
        "bind",
        "plan",
        "claim",
        "commit_trial",
        "beat",
        "events",
        "read jobs.get",
        "read published",
    ):
        assert result["calls"][call] > 0, done.stdout
    assert max(result["slowest_s"].values()) < engines.LOCK_WAIT_S


def test_a_locked_out_call_would_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "LOCK_WAIT_S", 0.05)
    url, book = f"sqlite:///{tmp_path}/x.db", contention.Book()
    with Store.open(url) as store, raw_connection(url) as raw:
        raw.exec_driver_sql("BEGIN IMMEDIATE")
        assert book.timed("submit", lambda: store.jobs.submit(contention.request(0))) is None
    assert book.calls == {"submit": 1}
    ((text, count),) = book.errors.items()
    assert "locked" in text
    assert count == 1
