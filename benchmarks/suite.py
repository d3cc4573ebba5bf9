"""Run a pattern suite: tune every cell, compare the answers with every rival, verify what is published.

    python benchmarks/suite.py examples/suite.toml --db suite.db --out results --seconds 540
    python benchmarks/suite.py examples/suite.toml --db suite.db --out results --report-only

Goes on where the database stands; cells go in turn over the patterns, small ones first, so that a run
that is cut off has measured some of each. Writes to ``--out``: ``suite.json.gz`` (every cell with the raw
samples of its finals), ``trials-POLICY.jsonl.gz`` (every trial), ``suite.md``, ``suite.png``, ``verify.json``.

Rivals are as shipped. ``--autotune GLOB`` adds, in the cells of these names, FlexAttention's Triton kernel
under torch.compile's max-autotune, which compiles many candidates a cell. Exit code 1: a published config
failed verification, or a cell could not be tuned; 3: time was up before everything was done.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import suite_report as report
from db.store import Published, Store
from tuner import families, workload_file
from tuner.errors import InputError
from tuner.spec import StudySettings
from tuner.study import Event
from tuner.workload_file import NamedWorkload
from workers.runner import Place, Runner
from workers.settings import Settings
from workers.verifying import Verdict, verify

AUTOTUNE = "flex_triton_autotune"
# Ties and gains near to nothing are decided at half a percent: an answer that keeps the default where a
# rival gains 2% would be 2% below the best rival.
MARGIN = TIE_MARGIN = 0.005


class OutOfTime(Exception):
    """The seconds of this run are used up; what was measured is in the database."""


def in_turn(cells: Sequence[NamedWorkload]) -> list[NamedWorkload]:
    """Return the cells in turn over patterns, the smallest of each first."""
    groups: dict[str, list[NamedWorkload]] = {}
    for cell in sorted(cells, key=lambda c: (c.workload.flops(), c.policy)):
        groups.setdefault(str(cell.workload.pattern), []).append(cell)
    rounds = zip_longest(*groups.values())
    return [cell for cell in chain.from_iterable(rounds) if cell is not None]


def tune(args: argparse.Namespace, store: Store, places: Sequence[tuple[Place, list[NamedWorkload]]]) -> list[str]:
    """Tune what has no answer yet; return the errors. Raises OutOfTime."""
    settings, study_settings, errors = _settings(args), _study_settings(args), []

    def say(named: NamedWorkload, event: Event) -> None:
        if time.monotonic() > args.deadline:
            raise OutOfTime

    for place, cells in places:
        if not cells:
            continue
        with Runner(settings, store, place) as runner:
            for outcome in runner.tune(cells, study_settings, say=say):
                came = outcome.error or (outcome.tuned.verdict if outcome.tuned else "")
                print(f"{outcome.named.name}: {came}{' (known)' if outcome.from_database else ''}", flush=True)
                errors += [f"{outcome.named.name}: {outcome.error}"] if outcome.error else []
            if runner.wall_s:
                print(f"{runner.trials} configs in {runner.wall_s:.0f} s, device idle "
                      f"{1 - runner.busy_s / runner.wall_s:.0%}", flush=True)  # fmt: skip
    return errors


def check(args: argparse.Namespace, store: Store, place: Place, answers: Sequence[Published]) -> list[str]:
    """Verify published configs that were not verified before; return the failures. Raises OutOfTime."""
    path = args.out / "verify.json"
    done: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    todo = [a for a in answers if done.get(_id(a), {}).get("verdict") != Verdict.PASSED]
    try:
        with Runner(_settings(args), store, place) as runner:
            for checked in verify(runner, store, place, todo, draws=args.draws):
                done[_id(checked.answer)] = checked.to_dict()
                print(f"verify {checked.answer.workload.label} {checked.answer.policy}: {checked.verdict}", flush=True)
                if time.monotonic() > args.deadline and len(done) < len(answers):
                    raise OutOfTime
    finally:
        _write(path, json.dumps(done, indent=1).encode())
    return [f"{k}: {v['verdict']}: {v['reason']}" for k, v in done.items() if v["verdict"] in ("failed", "unjudged")]


def write(args: argparse.Namespace, store: Store, cells: Sequence[NamedWorkload], policy: str) -> list[Published]:
    """Write the tables, the picture and the raw samples; return the answers."""
    found, missing = report.collect(store, cells, policy)
    head = {
        "program": "benchmarks/suite.py",
        "suite": str(args.file),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "margin": args.margin,
        "targets": sorted({c.answer.target.key for c in found}),
        "toolchains": sorted({c.answer.toolchain.key for c in found}),
    }
    _write(args.out / "suite.json.gz", gzip.compress(json.dumps({**head, **report.document(found, missing)}).encode()))
    if not found:
        return []
    where = found[0].answer
    tools = ", ".join(f"{k} {v}" for k, v in where.toolchain.to_dict().items() if v)
    first, last = (f(c.answer.published_at for c in found).date() for f in (min, max))
    title = f"{where.target.model} ({where.target.arch}); {tools}; {first}" + (f" to {last}" if last != first else "")
    text = report.markdown(found, missing)
    _write(args.out / "suite.md", f"{title}\n\n{text}".encode())
    report.draw(args.out / "suite.png", found, f"{where.target.model}, {first}")
    for p in sorted({c.policy for c in found}):
        lines = [
            json.dumps({"workload": c.answer.workload.key, **t.to_dict()})
            for c in found
            if c.policy == p
            for t in store.study(c.answer.study_id).trials()
        ]
        _write(args.out / f"trials-{p}.jsonl.gz", gzip.compress("\n".join(lines).encode()))
    print(text)
    return [c.answer for c in found]


def main() -> int:
    """Tune, report and verify, as far as the time goes."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    cells = in_turn(workload_file.load(args.file))
    script = args.fake_script.read_text() if args.fake_script else ""
    errors: list[str] = []
    with Store.open(str(args.db)) as store:
        if args.report_only:
            write(args, store, cells, args.policy)
            return 0
        place = Place.find(_settings(args), device=args.device, only=args.family, script=script)
        cells = [c if c.policy else replace(c, policy=place.policy) for c in cells]
        late = False
        try:
            errors += tune(args, store, _places(args, place, cells))
        except OutOfTime:
            late = True
        answers = write(args, store, cells, place.policy)
        if not late and not args.no_verify:
            try:
                failures = check(args, store, place, answers)
                errors += failures
                if failures:  # what failed was withdrawn: the tables change
                    write(args, store, cells, place.policy)
            except OutOfTime:
                late = True
    for error in errors:
        print(f"ERROR {error}", file=sys.stderr)
    if late:
        print("time was up: run again with the same database and folder to go on", file=sys.stderr)
    return 1 if errors else 3 if late else 0


def _places(
    args: argparse.Namespace, place: Place, cells: Sequence[NamedWorkload]
) -> list[tuple[Place, list[NamedWorkload]]]:
    """Return which families compete in which cells: those with Triton's autotuning go last."""
    named = [c for c in cells if args.autotune and fnmatch.fnmatchcase(c.name, args.autotune)]
    usual = [n for n in families.REGISTRY if n not in (*families.SECOND_CHOICE, AUTOTUNE)]
    more = replace(place, only=(*(args.family or usual), AUTOTUNE))
    return [(place, [c for c in cells if c not in named]), (more, named)]


def _settings(args: argparse.Namespace) -> Settings:
    settings = Settings.from_env()
    return replace(settings, cache_dir=args.cache) if args.cache else settings


def _study_settings(args: argparse.Namespace) -> StudySettings:
    return StudySettings(
        max_trials=args.trials, max_seconds=args.search_seconds, margin=args.margin, tie_margin=args.tie_margin
    )


def _id(answer: Published) -> str:
    return f"{answer.study_id} v{answer.version}"


def _write(path: Path, data: bytes) -> None:
    half = path.with_name(path.name + ".tmp")
    half.write_bytes(data)
    half.replace(path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="a TOML file of workloads")
    parser.add_argument("--db", type=Path, required=True, help="SQLite file; a run goes on where it stands")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="of the whole run")
    parser.add_argument("--trials", type=int, default=32, help="configs to try in each cell, besides the rivals")
    parser.add_argument("--search-seconds", type=float, help="of the search of each cell")
    parser.add_argument("--margin", type=float, default=MARGIN)
    parser.add_argument("--tie-margin", type=float, default=TIE_MARGIN)
    parser.add_argument("--autotune", metavar="GLOB", help="names of cells where Triton's max-autotune competes, too")
    parser.add_argument("--family", action="append", default=[], help="only these families")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--policy", default="graph", help="with --report-only: of cells whose file says none")
    parser.add_argument("--draws", type=int, default=3, help="sets of inputs in the verification at the end")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--report-only", action="store_true", help="measure nothing: needs no GPU")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels")
    parser.add_argument("--fake-script", type=Path, help="run the fake family by this script, for tests")
    args = parser.parse_args()
    args.deadline = time.monotonic() + args.seconds
    return args


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as e:
        print(f"suite.py: {e}", file=sys.stderr)
        sys.exit(2)
