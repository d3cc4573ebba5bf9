"""The search for one workload on one target: ask, compile, verify, measure, finals, publish.

Reads top to bottom as a trial goes. Everything it learns is in the memory before the next step, so
a study that is killed goes on where it stood; a config's failure is a trial, never an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from tuner import families, stats
from tuner.children import ChildFailure
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.errors import DefaultError, InputError, MachineError
from tuner.sandbox import Bench, FinalistFailed, Sandbox
from tuner.search import Search
from tuner.spec import StudyMemory, StudySettings, StudySpec
from tuner.target import Target, Toolchain
from tuner.trial import Trial, TrialStatus, TunedConfig
from tuner.workload import Workload

_FINALIST_REACH = 0.95  # a tuned config more than this behind the best tuned one is no finalist
_FINALS_RETRIES = 3
_REFINE_UP_TO = 300  # samples of one config: beyond, the screening is as good as it gets


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
        lookahead: int = 8,
        say: Say = lambda event: None,
    ) -> None:
        self._spec, self._settings, self._memory = spec, settings, memory
        self._pool, self._sandbox, self._say = pool, sandbox, say
        self._incumbent, self._lookahead = incumbent, lookahead
        members = [families.load(name.partition("/")[0]) for name in spec.families]
        self.stocks = [f.stock(spec.workload) for f in members]
        self.default = self.stocks[0]
        self._trials: dict[str, Trial] = {t.config.key: t for t in memory.trials()}
        self._searches = [
            Search(f, spec.workload, spec.target, budget=settings.max_trials, seed=settings.seed)
            for f in members
            if f.space(spec.workload)
        ]
        for search in self._searches:
            for trial in self._trials.values():
                search.tell(trial)
        self._known_before = len(self._trials)
        self._total = len(self._trials) + len(self._new_stocks()) + sum(s.left for s in self._searches)
        self._outstanding: dict[Future[Compiled], Config] = {}
        self._bench: Bench | None = None
        self._busy_s = 0.0
        self._begun = time.monotonic()
        self.tuned: TunedConfig | None = None

    def begin(self) -> None:
        """Queue the default and the first configs for compiling."""
        self._begun = time.monotonic()
        self._default_compiled = self._compile(self.default, priority=0)
        self._submit(self._new_stocks(), priority=1)
        self._fill()
        self._say(Event("start", len(self._trials), self._total))

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
            self._say(Event("trial", len(self._trials), self._total, self._trials[config.key], self._best()))
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
        leaders = sorted(self._measured(), key=lambda t: -(t.ratio or 0.0))[: self._settings.finalists + 2]
        few = [t for t in leaders if t.measurement and len(t.measurement.samples_us) < _REFINE_UP_TO]
        if not few:
            return False
        trial = min(few, key=lambda t: len(t.measurement.samples_us) if t.measurement else 0)
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
        self._trials[trial.config.key] = trial
        for search in self._searches:
            search.tell(trial)

    def _fill(self) -> None:
        """Ask for as many configs as may be compiled ahead."""
        for search in self._searches:
            ahead = sum(c.family == search.family.name for c in self._outstanding.values())
            self._submit(search.ask(max(0, self._lookahead - ahead)), priority=2)

    def _submit(self, configs: list[Config], priority: int) -> None:
        for config in configs:
            self._outstanding[self._compile(config, priority)] = config

    def _compile(self, config: Config, priority: int) -> Future[Compiled]:
        timeout_s = self._settings.compile_timeout_s
        return self._pool.submit(config, self._spec.workload, timeout_s=timeout_s, priority=priority)

    def _new_stocks(self) -> list[Config]:
        return [c for c in self.stocks if c.key not in self._trials]

    def _measured(self) -> list[Trial]:
        return [t for t in self._trials.values() if t.status is TrialStatus.OK and t.ratio is not None]

    def _finish(self, tuned: TunedConfig) -> None:
        wall, new = time.monotonic() - self._begun, len(self._trials) - self._known_before
        stats = {
            "wall_s": wall,
            "device_s": self._busy_s,  # the measuring child worked on this study
            "trials_new": new,
            "trials_per_s": new / wall,
            "compile_s_total": sum(t.compile_s or 0.0 for t in self._trials.values()),
            "notes": sorted({n for t in self._trials.values() for n in t.notes}),
        }
        self._memory.finish(tuned, stats)
        self.tuned = tuned
        self._say(Event("done", len(self._trials), self._total, best=self._best(), tuned=tuned))

    def _best(self) -> Trial | None:
        return max(self._measured(), key=lambda t: t.ratio or 0.0, default=None)

    def _finals(self) -> TunedConfig:
        assert self._bench is not None
        failures = 0
        while True:
            configs = self._finalists()
            self._say(Event("finals", 0, self._settings.max_rounds))
            try:
                self._bench.start_finals(configs)
                return self._decide(configs)
            except FinalistFailed as e:
                if e.config == self.default:
                    raise DefaultError(f"the default {e.config.family} failed in the finals: {e.error}") from None
                self._keep(replace(self._trials[e.config.key], status=e.status, error=e.error, measurement=None))
            except ChildFailure as e:
                failures += 1
                if failures == _FINALS_RETRIES:
                    raise MachineError(f"the finals did not end after {failures} tries: {e}") from None

    def _finalists(self) -> list[Config]:
        """Return the default, the other stock configs that work, and the best tuned ones."""
        works = {t.config for t in self._measured()}
        stocks = [c for c in self.stocks if c in works and c != self.default]
        tuned = sorted(
            (t for t in self._measured() if not t.config.is_stock),
            key=lambda t: (-(t.ratio or 0.0), t.config.key),
        )
        near = [t.config for t in tuned if (t.ratio or 0.0) >= _FINALIST_REACH * (tuned[0].ratio or 0.0)]
        chosen = near[: self._settings.finalists]
        if self._incumbent in works and self._incumbent not in (*chosen, *stocks, self.default):
            assert self._incumbent is not None
            chosen.append(self._incumbent)
        return [self.default, *stocks, *chosen]

    def _decide(self, configs: list[Config]) -> TunedConfig:
        """Run rounds until the decision is settled; each look doubles them."""
        assert self._bench is not None
        s = self._settings
        looks = 1
        while s.min_rounds * 2**looks <= s.max_rounds:
            looks += 1
        rules = stats.Rules(s.margin, s.tie_margin, s.confidence, looks)
        times: list[list[float]] = []
        dropped, wanted = 0, s.min_rounds
        while True:
            rounds = self._bench.rounds(wanted - len(times), seed=s.seed + len(times))
            times += rounds.times
            dropped += rounds.dropped
            decision = stats.decide(configs, times, self.default, rules, self._incumbent)
            self._say(Event("finals", len(times), s.max_rounds))
            if decision.settled or wanted * 2 > s.max_rounds:
                break
            wanted *= 2
        family = families.load(decision.winner.family)
        verified = {key: trial.verification for key, trial in self._trials.items()}
        finalists = tuple(
            replace(f, error=v.error if (v := verified.get(f.config.key)) else None) for f in decision.finalists
        )
        return TunedConfig(
            config=decision.winner,
            default=self.default,
            verdict=decision.verdict,
            speedup=decision.interval.speedup,
            low=decision.interval.low,
            high=decision.interval.high,
            confidence=s.confidence,
            margin=s.margin,
            ties=decision.ties,
            finalists=finalists,
            verification=verified.get(decision.winner.key),
            reason=decision.reason,
            rounds=len(times),
            rounds_dropped=dropped,
            extras=family.extras(decision.winner, self._spec.workload),
        )
