"""What a user submits: workloads, where to tune them, and how hard to try.

Pure values; a job becomes studies once a machine is found that can measure it. Names and numbers
only: no field of it is ever evaluated, imported or unpickled.

    >>> JobRequest.from_dict({"workloads": [{"pattern": "causal", "batch": 1, "heads_q": 8, "heads_kv": 8,
    ...                                      "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64}]}).arch
    'auto'
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tuner import families
from tuner.errors import InputError
from tuner.spec import POLICIES, StudySettings
from tuner.workload import Workload
from tuner.workload_file import NamedWorkload

MAX_WORKLOADS = 1000
MAX_NAME = 200
MAX_STEP_S = 900  # of one compile or run: a worker without progress for longer counts as stuck
ARCHS = r"auto|cpu|fake|sm_[0-9]{2,3}a?"
# What a client may set; how long a compiler may run and how much memory it gets is the worker's business too.
_SETTINGS = tuple(f.name for f in fields(StudySettings))


@dataclass(frozen=True)
class JobRequest:
    """One submission. ``priority`` goes from -100 to 100; higher is served first, equal ones share."""

    workloads: tuple[NamedWorkload, ...]
    arch: str = "auto"  # auto: any measuring machine that can
    policy: str = "auto"
    families: tuple[str, ...] = ()  # empty: all that can compute a workload
    settings: StudySettings = field(default_factory=StudySettings)
    priority: int = 0
    force: bool = False  # measure again even if the answer is known
    name: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.workloads) <= MAX_WORKLOADS:
            raise InputError(f"a job has 1 to {MAX_WORKLOADS} workloads, this one {len(self.workloads)}; split it")
        seen: set[str] = set()
        for named in self.workloads:
            if not named.name or len(named.name) > MAX_NAME or not named.name.isprintable():
                raise InputError(
                    f"workload name {named.name[:60]!r} is no printable text of up to {MAX_NAME} characters"
                )
            if named.name in seen:
                raise InputError(f"workload name {named.name!r} is there twice; give each its own")
            seen.add(named.name)
            if named.policy not in ("", self.policy):
                raise InputError(
                    f"workload {named.name!r} is to be measured by {named.policy}, and the policy of this job is "
                    f"{self.policy}: a job has one policy; submit the workloads of each policy by themselves"
                )
        if not re.fullmatch(ARCHS, self.arch):
            raise InputError(f"arch is {self.arch!r}; it must be auto, cpu, or an architecture as sm_90a")
        if self.policy not in ("auto", *POLICIES):
            raise InputError(f"policy is {self.policy!r}; it must be auto, {' or '.join(POLICIES)}")
        for name in self.families:
            families.load(name)
        for limit in ("compile_timeout_s", "run_timeout_s"):
            if getattr(self.settings, limit) > MAX_STEP_S:
                raise InputError(f"settings.{limit} is {getattr(self.settings, limit)}; a job may have {MAX_STEP_S} s")
        if not -100 <= self.priority <= 100:
            raise InputError(f"priority is {self.priority}; it must be from -100 to 100")
        if len(self.name) > MAX_NAME or (self.name and not self.name.isprintable()):
            raise InputError(f"name {self.name[:60]!r} is not 1 to {MAX_NAME} printable characters")

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; ``from_dict`` reads them back."""
        return {
            "name": self.name,
            "arch": self.arch,
            "policy": self.policy,
            "families": list(self.families),
            "settings": self.settings.to_dict(),
            "priority": self.priority,
            "force": self.force,
            "workloads": [{"name": n.name, **n.workload.to_dict()} for n in self.workloads],
        }

    @classmethod
    def from_dict(cls, v: Mapping[str, Any]) -> JobRequest:
        """Read a request strictly: an unknown field or a value of another type is an error.

        A workload without a name is called by its label.

        Raises:
            InputError: naming the field, its value and what to write instead.
        """
        known = tuple(f.name for f in fields(cls))
        _only(v, known, "job")
        workloads = v.get("workloads")
        if not isinstance(workloads, (list, tuple)):
            raise InputError(f"workloads is {workloads!r:.80}; write a list of workloads")
        if len(workloads) > MAX_WORKLOADS:
            raise InputError(f"a job has 1 to {MAX_WORKLOADS} workloads, this one {len(workloads)}; split it")
        names = _typed(v, "families", list, [])
        if not all(isinstance(n, str) for n in names):
            raise InputError(f"families is {names!r:.80}; write a list of names")
        return cls(
            workloads=tuple(_named(w, i) for i, w in enumerate(workloads)),
            arch=_typed(v, "arch", str, "auto"),
            policy=_typed(v, "policy", str, "auto"),
            families=tuple(names),
            settings=_settings(_typed(v, "settings", dict, {})),
            priority=_typed(v, "priority", int, 0),
            force=_typed(v, "force", bool, False),
            name=_typed(v, "name", str, ""),
        )


def _named(v: Any, position: int) -> NamedWorkload:
    if not isinstance(v, Mapping):
        raise InputError(f"workloads[{position}] is {v!r:.80}; write a table of a workload's fields")
    values = dict(v)
    name = values.pop("name", None)
    try:
        workload = Workload.from_dict(values)
    except InputError as e:
        raise type(e)(f"workloads[{position}]: {e}") from None
    if name is not None and not isinstance(name, str):
        raise InputError(f"workloads[{position}]: name is {name!r:.80}; it must be a text")
    return NamedWorkload(workload.label if name is None else name, workload)


def _settings(v: Mapping[str, Any]) -> StudySettings:
    _only(v, _SETTINGS, "settings")
    for name, value in v.items():
        if name == "max_seconds" and value is None:
            continue
        kind = float if name == "max_seconds" else type(getattr(StudySettings, name))
        # not isinstance: a bool is an int to Python, not to a person
        if type(value) is not kind and not (kind is float and type(value) is int):
            wanted = "number" if kind is float else "whole number"
            raise InputError(f"settings.{name} is {value!r:.80}; it must be a {wanted}")
    return StudySettings(**v)


def _only(v: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for key in v:
        if key not in known:
            raise InputError(f"{what} has no field {key!r:.80}; known: {', '.join(known)}")


def _typed(v: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = v.get(name, default)
    if type(value) is not kind:
        raise InputError(f"{name} is {value!r:.80}; it must be of type {kind.__name__}")
    return value
