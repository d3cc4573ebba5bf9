"""The search for one workload on one target: ask, compile, verify, measure, finals, publish.

Reads top to bottom as a trial goes. Everything it learns is in the memory before the next step, so
a study that is killed goes on where it stood; a config's failure is a trial, never an exception.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tuner import families, finals
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.errors import DefaultError, InputError
from tuner.plan import Plan
from tuner.priors import Neighbour
from tuner.sandbox import Bench, Sandbox
from tuner.spec import StudyMemory, StudySettings, StudySpec
from tuner.target import Target, Toolchain
from tuner.trial import Trial, TrialStatus, TunedConfig
from tuner.workload import Workload


@dataclass(frozen=True)
class Event:
    """Something to show: ``kind`` is start, trial, finals or done."""

    kind: str
    done: int = 0
    total: int = 0
    trial: Trial | None = None
    best: Trial | None = None
    tuned: TunedConfig | None = None


Say = Callable[[Event], None]


def spec_for(
    workload: Workload, target: Target, toolchain: Toolchain, policy: str, only: Sequence[str] = ()
) -> StudySpec:
    """Return the identity of the study of a workload here, over all families or ``only`` some.

    Raises:
        InputError: if no family can compute the workload on the target, with each one's reason.
        ConfigError: if ``only`` names an unknown family.
    """
    able, refused = families.able(workload, target, only)
    if not able:
        reasons = "; ".join(f"{name} {why}" for name, why in refused.items())
        raise InputError(f"no kernel family computes {workload.label} on {target.arch}: {reasons}")
    return StudySpec(workload, target, toolchain, policy, tuple(f"{f.name}/{f.version}" for f in able))


class Study:
    """One run of one study, on a compile pool and a sandbox that several studies share.

    Whoever runs it calls ``step`` while ``ready``, and waits for ``waiting`` otherwise, until
    ``tuned`` is there. Each step keeps the device busy for a moment and leaves nothing half-done.
    """

    def __init__(
        self,
        spec: StudySpec,
        settings: StudySettings,
        memory: StudyMemory,
        pool: CompilePool,
        sandbox: Sandbox,
        *,
        incumbent: Config | None = None,
        priors: Sequence[Neighbour] = (),
        lookahead: int = 8,
        say: Say = lambda event: None,
    ) -> None:
        self._spec, self._settings, self._memory = spec, settings, memory
        self._pool, self._sandbox, self._say = pool, sandbox, say
        self._incumbent, self._lookahead = incumbent, lookahead
        self._plan = plan = Plan(spec, settings, priors)
        for trial in memory.trials():
            plan.tell(trial)
        self.stocks, self.default = plan.stocks, plan.default
        self._known_before = len(plan.trials)
        self._total = len(plan.trials) + len(plan.new_stocks()) + plan.left
        self._outstanding: dict[Future[Compiled], Config] = {}
        self._bench: Bench | None = None
        self._busy_s = 0.0
        self._begun = time.monotonic()
        self.tuned: TunedConfig | None = None

    def begin(self) -> None:
        """Queue the default and the first configs for compiling."""
        self._begun = time.monotonic()
        self._default_compiled = self._compile(self.default, priority=0)
        self._submit(self._plan.new_stocks(), priority=1)
        self._fill()
        self._say(Event("start", len(self._plan.trials), self._total))

    @property
    def waiting(self) -> list[Future[Compiled]]:
        """What the next step waits for; empty if there is nothing to compile any more."""
        if self._bench is None:
            return [self._default_compiled]
        return list(self._outstanding)

    @property
    def ready(self) -> bool:
        """Tell whether ``step`` has something to do now."""
        waiting = self.waiting
        if self._bench is None or self._spec.target.overlaps:
            return not waiting or any(f.done() for f in waiting)
        return all(f.done() for f in waiting)  # a CPU that compiles is no place to measure

    def step(self) -> None:
        """Open the workload, or measure one compiled config, or hold the finals.

        Raises:
            DefaultError: if the default does not work here.
            MachineError: if the machine fails.
        """
        busy = self._sandbox.busy_s
        if self._bench is None:
            self._open()
        elif self._outstanding:
            future = next(f for f in self._outstanding if f.done())
            config = self._outstanding.pop(future)
            self._keep(self._try(config, future.result()))
            self._say(
                Event("trial", len(self._plan.trials), self._total, self._plan.trials[config.key], self._plan.best())
            )
            if self._spec.target.overlaps or not self._outstanding:
                self._fill()
        else:
            tuned = self._finals()
            self._busy_s += self._sandbox.busy_s - busy
            self._finish(tuned)
            return
        self._busy_s += self._sandbox.busy_s - busy

    def refine(self) -> bool:
        """Measure the most promising config once more, while the compilers work. False if none needs it."""
        if self._bench is None:
            return False
        trial = self._plan.to_refine(self._settings.finalists)
        if trial is None:
            return False
        busy = self._sandbox.busy_s
        again = self._bench.attempt(trial.config, Compiled(TrialStatus.OK, trial.compile_s or 0.0), verify=False)
        self._busy_s += self._sandbox.busy_s - busy
        self._keep(trial.refined(again))
        return True

    def close(self) -> None:
        """Free the device memory and drop what is queued."""
        if self._bench is not None:
            self._bench.close()
        self._pool.forget(self._spec.workload)

    def _open(self) -> None:
        compiled = self._default_compiled.result()
        if compiled.status is not TrialStatus.OK:
            raise DefaultError(f"the default {self.default.family} does not compile here: {compiled.error}")
        self._bench = self._sandbox.open(self._spec.workload, self.default, self._spec.policy)

    def _try(self, config: Config, compiled: Compiled) -> Trial:
        assert self._bench is not None
        if compiled.status is not TrialStatus.OK:
            return Trial(config, compiled.status, compiled.error, compiled.seconds)
        return self._bench.attempt(config, compiled)

    def _keep(self, trial: Trial) -> None:
        self._memory.add_trial(trial)
        self._plan.tell(trial)

    def _fill(self) -> None:
        """Ask for as many configs as may be compiled ahead; when time is up, drop those that nobody compiles yet."""
        limit = self._settings.max_seconds
        if limit is not None and time.monotonic() - self._begun > limit:
            for future in [f for f, c in self._outstanding.items() if not c.is_stock and f.cancel()]:
                del self._outstanding[future]
            return
        outstanding = Counter(c.family for c in self._outstanding.values())
        self._submit(self._plan.ask(self._lookahead, outstanding), priority=2)

    def _submit(self, configs: list[Config], priority: int) -> None:
        for config in configs:
            self._outstanding[self._compile(config, priority)] = config

    def _compile(self, config: Config, priority: int) -> Future[Compiled]:
        timeout_s = self._settings.compile_timeout_s
        return self._pool.submit(config, self._spec.workload, timeout_s=timeout_s, priority=priority)

    def _finish(self, tuned: TunedConfig) -> None:
        wall, new = time.monotonic() - self._begun, len(self._plan.trials) - self._known_before
        stats = {
            "wall_s": wall,
            "device_s": self._busy_s,  # the measuring child worked on this study
            "trials_new": new,
            "trials_per_s": new / wall,
            "compile_s_total": sum(t.compile_s or 0.0 for t in self._plan.trials.values()),
            "notes": sorted({n for t in self._plan.trials.values() for n in t.notes}),
        }
        self._memory.finish(tuned, stats)
        self.tuned = tuned
        self._say(Event("done", len(self._plan.trials), self._total, best=self._plan.best(), tuned=tuned))

    def _finals(self) -> TunedConfig:
        assert self._bench is not None
        return finals.hold(
            self._bench,
            self._plan,
            self._spec,
            self._settings,
            self._incumbent,
            self._memory.add_trial,
            lambda done, total: self._say(Event("finals", done, total)),
        )
