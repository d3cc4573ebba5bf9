"""Recorded tables in T4, the results format of Kernel Tuner and others: one JSON file a cell.

Format: https://github.com/odgaard/TuningSchema, results-schema.json 1.0.0, as kernel_tuner 1.5.0 ships it.
Times are milliseconds, as Kernel Tuner writes them. What T4 has no field for is in
``metadata.flashtune`` (workload, target, family, policy, the stock config's time) and in a measurement
``flashtune_status``, so that reading back what was written gives the same cell. A file without them, as
other tuners write, is a cell without a workload: it can be replayed, and has no neighbours.

==============  ============================================
invalidity      trial statuses
==============  ============================================
correct         ok
constraints     infeasible
compile         compile_error, compile_crash
runtime         run_error, run_crash
timeout         compile_timeout, run_timeout
correctness     incorrect
==============  ============================================
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tuner.config import Config
from tuner.errors import FlashtuneError, InputError
from tuner.tables import Cell, Row, finite_us
from tuner.target import Target, named
from tuner.trial import TrialStatus
from tuner.workload import Workload

SCHEMA_VERSION = "1.0.0"
_INVALIDITY = {
    TrialStatus.OK: "correct",
    TrialStatus.INFEASIBLE: "constraints",
    TrialStatus.COMPILE_ERROR: "compile",
    TrialStatus.COMPILE_CRASH: "compile",
    TrialStatus.RUN_ERROR: "runtime",
    TrialStatus.RUN_CRASH: "runtime",
    TrialStatus.COMPILE_TIMEOUT: "timeout",
    TrialStatus.RUN_TIMEOUT: "timeout",
    TrialStatus.INCORRECT: "correctness",
}
_STATUS = {text: status for status, text in reversed(_INVALIDITY.items())}  # the first of each
_STATUS_NAME, _ERROR_NAME = "flashtune_status", "flashtune_error"
_FOREIGN = ("t4", 1)  # family and version of configs that another tuner wrote


def dumps(cell: Cell) -> str:
    """Return a cell as the text of a T4 file."""
    family, version = cell.family
    about = {
        "workload": cell.workload.to_dict() if cell.workload else None,
        "target": cell.target.to_dict(),
        "family": family,
        "version": version,
        "policy": cell.policy,
        "name": cell.name,
        "default_ms": cell.default_us / 1e3 if cell.default_us is not None else None,
    }
    document = {
        "schema_version": SCHEMA_VERSION,
        "metadata": {"timeunit": "milliseconds", "flashtune": about},
        "results": [_result(row) for row in cell.rows],
    }
    return json.dumps(document, indent=1, allow_nan=False)


def loads(text: str, name: str) -> Cell:
    """Read the text of a T4 file; ``name`` is the cell's if the file names none.

    Raises:
        InputError: naming the result, what is wrong with it, and what to do.
    """
    try:
        document = json.loads(text)
    except json.JSONDecodeError as e:
        raise InputError(f"is not JSON (line {e.lineno}: {e.msg}); write T4, or name rows of JSON .jsonl") from None
    if not isinstance(document, dict) or not isinstance(document.get("results"), list):
        raise InputError("has no list of results; T4 is an object with results and schema_version")
    if not document["results"]:
        raise InputError("results is empty; record some configs")
    if not str(document.get("schema_version", "")).startswith("1."):
        raise InputError(f"schema_version is {document.get('schema_version')!r}; this reads {SCHEMA_VERSION}")
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise InputError(f"metadata is {metadata!r:.60}; it must be an object")
    scale = _scale(metadata)
    about = metadata.get("flashtune")
    try:
        family, version = (about["family"], about["version"]) if about else _FOREIGN
        rows = tuple(_row(v, i, family, version, scale) for i, v in enumerate(document["results"]))
        if about is None:
            return Cell(name, None, named("sm_90a"), rows)
        default_ms = about["default_ms"]
        return Cell(
            name=about["name"],
            workload=Workload.from_dict(about["workload"]) if about["workload"] else None,
            target=Target(**about["target"]),
            rows=rows,
            default_us=None if default_ms is None else finite_us(default_ms, "default_ms", 1e3),
            policy=about["policy"],
        )
    except (KeyError, TypeError) as e:
        raise InputError(f"metadata.flashtune cannot be read ({e!r:.80}); leave it out, or export it again") from None


def _result(row: Row) -> dict[str, Any]:
    measurements: list[dict[str, Any]] = [{"name": _STATUS_NAME, "value": str(row.status), "unit": ""}]
    if row.time_us is not None:
        measurements.insert(0, {"name": "time", "value": row.time_us / 1e3, "unit": "ms"})
    if row.error:
        measurements.append({"name": _ERROR_NAME, "value": row.error, "unit": ""})
    times: dict[str, Any] = {"runtimes": [s / 1e3 for s in row.samples_us]}
    if row.compile_s is not None:
        times["compilation_time"] = row.compile_s * 1e3
    return {
        "configuration": dict(row.config.params),
        "objectives": ["time"],
        "times": times,
        "invalidity": _INVALIDITY[row.status],
        "correctness": 0 if row.status is TrialStatus.INCORRECT else 1,
        "measurements": measurements,
    }


def _row(value: Any, position: int, family: str, version: int, scale: float) -> Row:
    if not isinstance(value, dict):
        raise InputError(f"results[{position}] is {value!r:.60}; write an object")
    for name in ("configuration", "times", "invalidity"):
        if name not in value:
            raise InputError(f"results[{position}] lacks the field {name}; T4 requires it")
    try:
        config = Config.make(family, version, **value["configuration"])
        named_values = {m["name"]: m["value"] for m in value.get("measurements", ())}
        times = value["times"]
        if value["invalidity"] not in _STATUS:
            raise InputError(f"invalidity is {value['invalidity']!r}; it must be one of {', '.join(_STATUS)}")
        status = TrialStatus(named_values.get(_STATUS_NAME, _STATUS[value["invalidity"]]))
        samples = tuple(finite_us(s, "times.runtimes", scale) for s in times.get("runtimes", ()))
        compile_ms = times.get("compilation_time", times.get("compilation"))
        time_us = None
        if status is TrialStatus.OK:
            objective = (value.get("objectives") or ["time"])[0]
            if objective not in named_values:
                raise InputError(f"measurements have no {objective}, the objective; add it")
            time_us = finite_us(named_values[objective], str(objective), scale)
        compile_s = None if compile_ms is None else float(compile_ms) * scale / 1e6
        return Row(config, status, time_us, samples, compile_s, str(named_values.get(_ERROR_NAME, "")))
    except FlashtuneError as e:
        raise InputError(f"results[{position}]: {e}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InputError(f"results[{position}] cannot be read ({e!r:.80}); see the T4 results schema") from None


def _scale(metadata: Mapping[str, Any]) -> float:
    """Return how many microseconds the file's unit of time has; milliseconds where it names none."""
    units = {"seconds": 1e6, "milliseconds": 1e3, "microseconds": 1.0, "nanoseconds": 1e-3}
    unit = metadata.get("timeunit", "milliseconds")
    if not isinstance(unit, str) or unit not in units:
        raise InputError(f"metadata.timeunit is {unit!r:.60}; it must be one of {', '.join(units)}")
    return units[unit]
