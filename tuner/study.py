"""The search for one workload on one target: ask, compile, verify, measure, finals, publish.

Reads top to bottom as a trial goes. Everything it learns is in the memory before the next step, so
a study that is killed goes on where it stood; a config's failure is a trial, never an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace

from tuner import families, stats
from tuner.children import ChildFailure
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.errors import DefaultError, InputError, MachineError
from tuner.sandbox import FinalistFailed, Sandbox
from tuner.search import Search
from tuner.spec import StudyMemory, StudySettings, StudySpec
from tuner.target import Target, Toolchain
from tuner.trial import Trial, TrialStatus, TunedConfig
from tuner.utilization import Utilization
from tuner.workload import Workload

_FINALIST_REACH = 0.95  # a tuned config more than this behind the best tuned one is no finalist
_FINALS_RETRIES = 3


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
    """One run of one study, on a compile pool and a sandbox that outlive it."""

    def __init__(
        self,
        spec: StudySpec,
        settings: StudySettings,
        memory: StudyMemory,
        pool: CompilePool,
        sandbox: Sandbox,
        *,
        incumbent: Config | None = None,
        say: Say = lambda event: None,
    ) -> None:
        self._spec, self._settings, self._memory = spec, settings, memory
        self._pool, self._sandbox, self._say = pool, sandbox, say
        self._incumbent = incumbent
        self._families = [families.load(name.partition("/")[0]) for name in spec.families]
        self.stocks = [f.stock(spec.workload) for f in self._families]
        self.default = self.stocks[0]
        self._trials: dict[str, Trial] = {t.config.key: t for t in memory.trials()}
        self._searches = [
            Search(f, spec.workload, spec.target, budget=settings.max_trials, seed=settings.seed)
            for f in self._families
            if f.space(spec.workload)
        ]
        for search in self._searches:
            for trial in self._trials.values():
                search.tell(trial)
        self._outstanding: dict[Future[Compiled], Config] = {}

    def prefetch(self) -> None:
        """Queue the first configs for compiling, behind whatever else is being compiled."""
        self._submit(self._new_stocks(), priority=1)
        for search in self._searches:
            self._submit(search.ask(_share(search.left)), priority=2)

    def run(self) -> TunedConfig:
        """Run to the answer, and store it.

        Raises:
            DefaultError: if the default does not work here.
            MachineError: if the machine fails.
        """
        start, busy = time.monotonic(), self._sandbox.busy_s
        before = len(self._trials)
        total = len(self.stocks) + sum(s.left for s in self._searches) + before
        self._say(Event("start", before, total))
        with Utilization(self._spec.target) as utilization:
            self._open()
            self._search(total)
            tuned = self._finals()
        wall, busy = time.monotonic() - start, self._sandbox.busy_s - busy
        new = len(self._trials) - before
        stats = {
            "wall_s": wall,
            "device_idle_share": max(0.0, 1 - busy / wall),  # the measuring child had nothing to do
            "gpu_utilization": utilization.share,  # some kernel ran, as the driver counts
            "trials_new": new,
            "trials_per_s": new / wall,
            "compile_s_total": sum(t.compile_s or 0.0 for t in self._trials.values()),
            "notes": sorted({n for t in self._trials.values() for n in t.notes}),
        }
        self._memory.finish(tuned, stats)
        self._say(Event("done", len(self._trials), len(self._trials), best=self._best(), tuned=tuned))
        return tuned

    def _open(self) -> None:
        compiled = self._pool.submit(
            self.default, self._spec.workload, timeout_s=self._settings.compile_timeout_s, priority=-1
        ).result()
        if compiled.status is not TrialStatus.OK:
            raise DefaultError(f"the default {self.default.family} does not compile here: {compiled.error}")
        self._sandbox.open(self._spec.workload, self.default, self._spec.policy)

    def _search(self, total: int) -> None:
        """Compile ahead and measure what is ready, until the budget is spent."""
        self._submit(self._new_stocks(), priority=0)
        while True:
            for search in self._searches:
                busy = sum(c.family == search.family.name for c in self._outstanding.values())
                self._submit(search.ask(max(0, self._lookahead() - busy)), priority=1)
            if not self._outstanding:
                return
            # A CPU that compiles is no place to measure: there, all wait for all
            when = FIRST_COMPLETED if self._spec.target.is_gpu else ALL_COMPLETED
            done, _ = wait(self._outstanding, return_when=when)
            for future in sorted(done, key=lambda f: self._outstanding[f].key):
                config = self._outstanding.pop(future)
                self._keep(self._trial(config, future.result()))
                self._say(Event("trial", len(self._trials), total, self._trials[config.key], self._best()))

    def _trial(self, config: Config, compiled: Compiled) -> Trial:
        if compiled.status is not TrialStatus.OK:
            return Trial(config, compiled.status, compiled.error, compiled.seconds)
        return self._sandbox.attempt(config, compiled)

    def _keep(self, trial: Trial) -> None:
        self._memory.add_trial(trial)
        self._trials[trial.config.key] = trial
        for search in self._searches:
            search.tell(trial)

    def _submit(self, configs: list[Config], priority: int) -> None:
        for config in configs:
            future = self._pool.submit(
                config, self._spec.workload, timeout_s=self._settings.compile_timeout_s, priority=priority
            )
            self._outstanding[future] = config

    def _new_stocks(self) -> list[Config]:
        waiting = {c.key for c in self._outstanding.values()}
        return [c for c in self.stocks if c.key not in self._trials and c.key not in waiting]

    def _lookahead(self) -> int:
        return self._pool.workers * 2

    def _best(self) -> Trial | None:
        ok = [t for t in self._trials.values() if t.ratio is not None]
        return max(ok, key=lambda t: t.ratio or 0.0, default=None)

    def _finals(self) -> TunedConfig:
        for _ in range(_FINALS_RETRIES):
            configs = self._finalists()
            self._say(Event("finals", 0, self._settings.max_rounds))
            try:
                self._sandbox.start_finals(configs)
                return self._decide(configs)
            except FinalistFailed as e:
                if e.config == self.default:
                    raise DefaultError(f"the default {e.config.family} failed in the finals: {e.error}") from None
                self._keep(replace(self._trials[e.config.key], status=e.status, error=e.error, measurement=None))
            except ChildFailure as e:
                last = str(e)
                self._sandbox.close()
        raise MachineError(f"the finals did not end after {_FINALS_RETRIES} tries: {last}")

    def _finalists(self) -> list[Config]:
        """Return the default, the other stock configs that work, and the best tuned ones."""
        works = {t.config for t in self._trials.values() if t.status is TrialStatus.OK}
        stocks = [c for c in self.stocks if c in works and c != self.default]
        tuned = sorted(
            (t for t in self._trials.values() if t.ratio is not None and not t.config.is_stock),
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
        s = self._settings
        looks = 1
        while s.min_rounds * 2**looks <= s.max_rounds:
            looks += 1
        rules = stats.Rules(s.margin, s.tie_margin, s.confidence, looks)
        times: list[list[float]] = []
        dropped, wanted = 0, s.min_rounds
        while True:
            rounds = self._sandbox.rounds(wanted - len(times), seed=s.seed + len(times))
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


def _share(left: int) -> int:
    return max(0, min(left, 16))
