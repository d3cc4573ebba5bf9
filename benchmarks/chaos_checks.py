"""What must be true after a chaos run, read with plain SQL and compared with the script, not with flashtune.

A job has workloads of the fake family that differ in their number of query heads, which is the number of
variants; so everything that has to be tried, and how it ends, and the winner are known beforehand.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, create_engine, text

_STATUS = {
    "nan": "incorrect",
    "wrong": "incorrect",
    "fault": "run_crash",
    "exit": "run_crash",
    "run_error": "run_error",
    "compile_error": "compile_error",
    "compile_abort": "compile_crash",
    "kill_worker": "run_crash",
    "compile_kill_worker": "compile_crash",
}
_JSON = ("workload", "trial", "tuned", "data")
_POISON = ("kill_worker", "compile_kill_worker")


@dataclass(frozen=True)
class Script:
    """A job and what its configs do; ``heads`` names the workloads."""

    heads: tuple[int, ...]
    outcomes: Mapping[str, Mapping[str, Any]]
    compile_s: float = 0.0
    sample_s: float = 0.0

    def document(self) -> dict[str, Any]:
        """Return the script of the fake family."""
        slow = {"compile_s": self.compile_s, "sample_s": self.sample_s}
        names = ["stock", *map(str, range(max(self.heads)))]
        outcomes = {name: {**slow, **self.outcomes.get(name, {})} for name in names}
        return {"seed": 7, "objects": True, "noise": {"sigma": 0.002}, "outcomes": outcomes}

    def request(self) -> dict[str, Any]:
        """Return the job."""
        shape = {"batch": 1, "heads_kv": 1, "seqlen_q": 16, "seqlen_k": 16, "head_dim": 8}
        return {
            "arch": "fake",
            "name": "chaos",
            "settings": {"max_trials": max(self.heads)},
            "workloads": [{"name": f"heads {n}", "heads_q": n, **shape} for n in self.heads],
        }

    def statuses(self, heads: int) -> dict[str, str]:
        """Return how each config of one workload has to end."""
        names = ["stock", *map(str, range(heads))]
        return {name: _STATUS.get(self.outcomes.get(name, {}).get("does", "ok"), "ok") for name in names}

    def winner(self, heads: int) -> str:
        return max(map(str, range(heads)), key=lambda n: float(self.outcomes.get(n, {}).get("speedup", 1.0)))

    def poisonous(self, heads: int) -> set[str]:
        return {n for n in map(str, range(heads)) if self.outcomes.get(n, {}).get("does") in _POISON}

    @property
    def trials(self) -> int:
        return sum(1 + n for n in self.heads)


@contextmanager
def reading(url: str) -> Iterator[Connection]:
    engine = create_engine(url)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def rows(connection: Connection, query: str, **values: Any) -> list[dict[str, Any]]:
    """Run plain SQL; JSON columns are texts on SQLite."""
    return [
        {k: json.loads(v) if k in _JSON and isinstance(v, str) else v for k, v in row.items()}
        for row in connection.execute(text(query), values).mappings()
    ]


@dataclass(frozen=True)
class Result:
    """What a run left behind; ``faults`` is empty if nothing was lost."""

    faults: list[str]
    winners: dict[int, str]
    trials: int
    deaths: int  # of workers that had begun a piece of work


def look(url: str, job_id: str, script: Script, followed: Sequence[Mapping[str, Any]] | None = None) -> Result:
    """Check everything about a job that has ended. ``followed`` is what a follower saw meanwhile."""
    with reading(url) as c:
        studies = rows(c, "SELECT id, workload, state FROM studies")
        trials = rows(c, "SELECT study_id, config_key, status, trial FROM trials")
        work = rows(c, "SELECT study_id, kind, config_key, state, deaths FROM work")
        tuned = rows(c, "SELECT study_id, verdict, tuned FROM tuned_configs")
        items = rows(c, "SELECT name, state, error FROM job_items WHERE job_id = :job", job=job_id)
        states = [r["state"] for r in rows(c, "SELECT state FROM jobs WHERE id = :job", job=job_id)]
        query = "SELECT id, xid, kind, data FROM events WHERE job_id = :job ORDER BY xid, id"
        events = rows(c, query, job=job_id)
    faults = [] if states == ["done"] else [f"the job is {states}"]
    faults += [f"item {i['name']} is {i['state']}: {i['error']}" for i in items if i["state"] != "done"]
    faults += [f"work {w['config_key']} is left {w['state']}" for w in work if w["state"] != "done"]
    if sorted(s["workload"]["heads_q"] for s in studies) != sorted(script.heads):
        faults.append(f"there are {len(studies)} studies for {len(script.heads)} workloads")
    winners = {}
    for study in studies:
        heads = study["workload"]["heads_q"]
        mine = {k: [r for r in table if r["study_id"] == study["id"]] for k, table in (("t", trials), ("w", work))}
        answers = [t for t in tuned if t["study_id"] == study["id"]]
        faults += [f"heads {heads}: {f}" for f in _of_study(script, heads, mine["t"], mine["w"], answers)]
        winners[heads] = "/".join(_name(a["tuned"]["config"]) for a in answers)
    faults += _of_events(events, trials, items, followed)
    return Result(faults, winners, len(trials), sum(w["deaths"] for w in work))


def _of_study(
    script: Script, heads: int, trials: list[dict[str, Any]], work: list[dict[str, Any]], answers: list[dict[str, Any]]
) -> Iterator[str]:
    expected = script.statuses(heads)
    names = Counter(_name(t["trial"]["config"]) for t in trials)
    for name in expected.keys() | names.keys():
        if names[name] != (name in expected):
            yield f"config {name} has {names[name]} trials"
    for t in trials:
        name = _name(t["trial"]["config"])
        if t["status"] != expected.get(name):
            yield f"config {name} ended {t['status']}, not {expected.get(name)}: {t['trial']['error'][:300]}"
        if t["trial"]["error"].startswith("quarantined") != (name in script.poisonous(heads)):
            yield f"config {name} is quarantined, or should be: {t['trial']['error'][:300]!r}"
    kinds = Counter((w["kind"], w["config_key"]) for w in work)
    wanted = {("trial", t["config_key"]) for t in trials} | {("finals", "finals")}
    if kinds != Counter(wanted):
        yield f"its work is not one piece a trial and the finals: {kinds - Counter(wanted)}, {Counter(wanted) - kinds}"
    if [(a["verdict"], _name(a["tuned"]["config"])) for a in answers] != [("published", script.winner(heads))]:
        yield f"it has {len(answers)} answers, of which one has to be {script.winner(heads)}: {answers!r:.300}"


def _of_events(
    events: list[dict[str, Any]],
    trials: list[dict[str, Any]],
    items: list[dict[str, Any]],
    followed: Sequence[Mapping[str, Any]] | None,
) -> Iterator[str]:
    told = Counter(
        (e["data"]["study"], e["data"]["config"], e["data"]["status"])
        for e in events
        if e["kind"] in ("trial", "quarantined")
    )
    stored = Counter((t["study_id"], _label(t["trial"]["config"]), t["status"]) for t in trials)
    if told != stored:
        yield f"trials and their events differ: {told - stored} {stored - told}"
    kinds = Counter(e["kind"] for e in events)
    for kind, count in (("submitted", 1), ("bound", len(items)), ("item_done", len(items)), ("done", 1)):
        if kinds[kind] != count:
            yield f"there are {kinds[kind]} events {kind}, not {count}"
    if events and events[-1]["kind"] != "done":
        yield f"the last event is {events[-1]['kind']}"
    if followed is not None:
        cursors = [f"{e['xid']}-{e['id']}" for e in events]
        seen = [str(e["cursor"]) for e in followed]
        if seen != cursors:
            yield f"the follower saw {len(seen)} events, {len(set(seen))} different ones, of {len(cursors)}"


def _name(config: Mapping[str, Any]) -> str:
    return str(config["params"].get("variant", "stock"))


def _label(config: Mapping[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in config["params"].items()) or "stock"
