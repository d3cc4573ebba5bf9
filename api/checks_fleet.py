"""What ``flashtune doctor`` reads in the database of a fleet: what waits, who works, and what waits for nobody."""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from api.checks import Check, Level
from db.planning import WaitingItem
from db.store import Store
from db.values import WorkerInfo
from tuner.errors import StorageError, Unavailable
from tuner.target import Target, Toolchain
from workers.identity import ROLES, arch_of, class_key

_LOOKED_AT = 1000  # waiting workloads
_CANCEL = "or cancel its job and submit it again, for what is alive"


@dataclass(frozen=True)
class Fleet:
    """The database at one moment. ``workers`` are all that ever were, the newest first."""

    embedded: bool  # on SQLite, where `flashtune up` is the whole fleet
    workers: list[WorkerInfo]
    jobs: dict[str, int]  # by state
    ready: dict[tuple[str, str], int]  # pieces of work by stage and key
    waiting: list[WaitingItem]  # workloads without a machine

    @property
    def alive(self) -> list[WorkerInfo]:
        return [w for w in self.workers if w.alive()]


def look(place: str) -> Fleet | None:
    """Read what is there; None if the database has no tables of this version yet. Raises Unavailable."""
    try:
        store = Store.open(place, create=False, read_only=True)
    except Unavailable:
        raise
    except StorageError:
        return None
    with store:
        return Fleet(
            embedded=not place.startswith("postgresql"),
            workers=store.fleet.workers(),
            jobs=store.jobs.counts(),
            ready=store.work.ready(),
            waiting=store.planning.waiting(_LOOKED_AT),
        )


def fleet(seen: Fleet) -> list[Check]:
    """Count jobs, work and workers, and find the work that waits for a worker that is not there."""
    roles = Counter(role for w in seen.alive for role in w.roles)
    workers = ", ".join(f"{role} {roles[role]}" for role in ROLES) if roles else "none"
    ready: Counter[str] = Counter()
    for (stage, _), count in seen.ready.items():
        ready[stage] += count
    jobs = f"jobs: {seen.jobs.get('queued', 0)} queued, {seen.jobs.get('running', 0)} running"
    work = f"work ready: {ready['compile']} to compile, {ready['measure']} to measure"
    return [Check("fleet", Level.OK, f"{jobs}; {work}; workers alive: {workers}"), *_unserved(seen)]


def _unserved(seen: Fleet) -> Iterator[Check]:
    if any(seen.jobs.get(s) for s in ("queued", "running")) and not any("control" in w.roles for w in seen.alive):
        yield _missing(seen, "control", "jobs wait, and no control worker is alive to hand their work out")
    least = "at least " if len(seen.waiting) == _LOOKED_AT else ""
    by_arch = Counter(item.arch for item in seen.waiting)
    measured = {arch_of(w.class_key) for w in seen.alive if "measure" in w.roles}
    for arch, count in sorted(by_arch.items()):
        if not measured if arch == "auto" else arch not in measured:
            on = "any device" if arch == "auto" else arch
            yield _missing(
                seen, f"measure.{arch}", f"{least}{count} workloads wait for {on}, and no worker that measures there"
            )
    for (stage, key), count in sorted(seen.ready.items()):
        if not any(stage in w.roles and _key(w, stage) == key for w in seen.alive):
            yield _no_class(seen, stage, key, count)


def _no_class(seen: Fleet, stage: str, key: str, count: int) -> Check:
    """Say which worker is missing: of an architecture, or of one toolchain beside others."""
    arch = arch_of(key)
    text = f"{count} pieces of work wait to {stage} for {key}, and no worker of it is alive"
    known = next((w for w in seen.workers if _key(w, stage) == key), None)
    if known is not None:
        text += f" (the last was on {known.host}: {_describe(known)})"
    rivals = [w for w in seen.alive if stage in w.roles and arch_of(_key(w, stage)) == arch]
    if rivals:
        text += f"; alive, with another toolchain: {', '.join(sorted({f'{w.host} ({_describe(w)})' for w in rivals}))}"
    return _missing(seen, f"{stage}.{arch}", text, "with that toolchain, " + _CANCEL if rivals else "")


def _missing(seen: Fleet, queue: str, text: str, more: str = "") -> Check:
    role, _, arch = queue.partition(".")
    command = f"flashtune worker --role {role}" + (f" --arch {arch}" if role == "compile" else "")
    where = f" on a node with {arch}" if role == "measure" and arch != "auto" else ""
    start = "start `flashtune up`" if seen.embedded else f"start `{command}`{where}"
    return Check(f"worker [{queue}]", Level.FAIL, text, f"{start} {more}".strip())


def versions(seen: Fleet, target: Target, toolchain: Toolchain) -> list[Check]:
    """Compare the toolchains of those that measure on one architecture, and of those that compile for it.

    ``target`` and ``toolchain`` are this machine's, which counts as one more if no worker here measures.
    """
    measuring = [(w.host, w.target, w.toolchain) for w in seen.alive if w.target is not None]
    if not measuring:
        return [Check("versions", Level.OK, "not compared: no other worker measures now")]
    here = socket.gethostname()
    if not any(host == here for host, *_ in measuring):
        measuring.append((f"{here} (this machine)", target, toolchain))
    by_arch: dict[str, list[tuple[str, Target, Toolchain]]] = defaultdict(list)
    for host, its, versions in measuring:
        by_arch[its.arch].append((host, its, versions))
    checks = [c for arch, members in sorted(by_arch.items()) for c in _classes(arch, members)]
    checks += _useless_compilers(seen)
    return checks or [Check("versions", Level.OK, f"one class of machines for each of {', '.join(sorted(by_arch))}")]


def _classes(arch: str, members: list[tuple[str, Target, Toolchain]]) -> Iterator[Check]:
    hosts: dict[str, set[str]] = defaultdict(set)
    traits: dict[str, dict[str, str]] = {}
    for host, target, toolchain in members:
        key = class_key(target, toolchain)
        hosts[key].add(host)
        traits[key] = _traits(target, toolchain)
    if len(hosts) < 2:
        return
    differ = _differing(traits.values())
    texts = [f"{', '.join(sorted(hosts[k]))}: {_values(traits[k], differ)}" for k in sorted(hosts)]
    seen = f"{len(hosts)} classes, tuned apart from each other: {'; '.join(texts)}"
    yield Check(f"versions [{arch}]", Level.WARN, seen, f"give these machines the same {', '.join(differ)}")


def _useless_compilers(seen: Fleet) -> Iterator[Check]:
    """Find those who compile what nobody alive of that architecture can load."""
    wanted: dict[str, dict[str, Toolchain]] = defaultdict(dict)
    for w in seen.alive:
        if "measure" in w.roles:
            wanted[arch_of(w.compile_key)][w.compile_key] = w.toolchain
    for w in seen.alive:
        keys = wanted[arch_of(w.compile_key)] if "compile" in w.roles else {}
        if keys and w.compile_key not in keys:
            theirs = _compiler(next(iter(keys.values())))
            seen_here = f"{w.host} compiles with {_describe(w)}, and nobody who measures there can load that"
            next_step = f"install what those have ({theirs}, the same Python and processor) and start it again"
            yield Check(f"versions [{arch_of(w.compile_key)}]", Level.WARN, seen_here, next_step)


def _traits(target: Target, toolchain: Toolchain) -> dict[str, str]:
    cap = "" if target.power_cap_w is None else f"{target.power_cap_w} W"
    about = {"model": target.model, "SMs or cores": str(target.num_sms), "power cap": cap}
    return about | asdict(toolchain)


def _differing(traits: Iterable[dict[str, str]]) -> list[str]:
    every = list(traits)
    return [name for name in every[0] if len({t[name] for t in every}) > 1]


def _values(traits: dict[str, str], names: Iterable[str]) -> str:
    return ", ".join(f"{name} {traits[name] or 'none'}" for name in names)


def _describe(worker: WorkerInfo) -> str:
    if worker.target is None:
        return _compiler(worker.toolchain)
    t = worker.toolchain
    return _values({"driver": t.driver, "torch": t.torch, "FA4": t.flash_attn_4}, ("driver", "torch", "FA4")) + (
        f" on {worker.target.model}"
    )


def _compiler(t: Toolchain) -> str:
    return f"flash-attn-4 {t.flash_attn_4 or 'none'}, cutlass-dsl {t.cutlass_dsl or 'none'}, Python {t.python}"


def _key(worker: WorkerInfo, stage: str) -> str:
    return worker.class_key if stage == "measure" else worker.compile_key
