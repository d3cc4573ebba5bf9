"""The measuring half of a worker: claims compiled configs, verifies and measures them, holds finals.

Owns the one child that owns the GPU. While a rival that only compiles on a GPU does so, others are
measured; a few studies are open at a time, each with its inputs and references in the child.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

from db.store import Store
from db.values import Claim, WorkerInfo
from tuner import families, finals
from tuner.artifact import Artifact
from tuner.compile import Compiled, CompilePool
from tuner.config import Config
from tuner.errors import DefaultError, FlashtuneError, MachineError, StaleClaim
from tuner.plan import Plan
from tuner.sandbox import Bench, Sandbox
from tuner.trial import Trial, TrialStatus
from workers.artifacts import Artifacts
from workers.device_lock import lock_device
from workers.heart import Heart
from workers.patience import patiently
from workers.planner import Planner
from workers.settings import Settings
from workers.studies import KnownStudy, Studies

_OPEN_STUDIES = 4  # each holds inputs and references in device memory
_AHEAD = 4  # claims whose kernels compile here while others are measured
_TURN_S = 0.2
_DEFAULT_TRIES = 3  # times that a study's default may fail on this machine before the study does

log = logging.getLogger("flashtune.worker")


@dataclass(frozen=True)
class _Held:
    """A claim, what it waits for, and what it needs: the finalists, or the one config."""

    claim: Claim
    study: KnownStudy
    needs: dict[str, Future[Compiled]]  # by config key
    plan: Plan | None = None  # of finals

    @property
    def ready(self) -> bool:
        return all(f.done() for f in self.needs.values())


class MeasureSide:
    """Measures on one device. ``step`` until it returns False; then there is nothing to do now.

    Holds ``begun`` while it has begun something: not at the same time as a suspect compiles.
    Making one locks the device and starts its child; raises InputError if another process has it.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        info: WorkerInfo,
        heart: Heart,
        artifacts: Artifacts,
        ring: Callable[[str], None],
        begun: threading.Lock,
    ) -> None:
        assert info.target is not None
        self._settings, self._store, self._info, self._target = settings, store, info, info.target
        self._heart, self._artifacts, self._ring, self._begun = heart, artifacts, ring, begun
        settings.cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock_device(settings.cache_dir, self._target)
        script = settings.fake_script.read_text() if settings.fake_script else ""
        visible = self._target.uuid or (str(self._target.device_index) if self._target.is_gpu else "")
        self._sandbox = Sandbox(self._target, settings.cache_dir, script=script, visible_devices=visible)
        self._pool = CompilePool(  # for rivals that compile on a GPU, and for objects that did not arrive
            self._target, settings.cache_dir, workers=1, script=script, visible_devices=visible
        )
        self._sandbox.start()
        self._studies, self._planner = Studies(store), Planner(store, keep=_OPEN_STUDIES)
        self._benches: OrderedDict[str, Bench] = OrderedDict()
        self._held: list[_Held] = []
        self._default_failures: Counter[str] = Counter()  # by study

    def step(self) -> bool:
        """Measure one config, hold one study's finals, or claim something. False if there is nothing."""
        ready = next((h for h in self._held if h.ready), None)
        claimed = False
        if ready is None and len(self._held) < _AHEAD:
            claimed = self._claim()
            ready = next((h for h in self._held if h.ready), None)
        if ready is not None:
            if not self._begun.acquire(timeout=_TURN_S):
                return False
            try:
                self._held.remove(ready)
                self._run(ready)
            finally:
                self._begun.release()
            return True
        if self._held:
            waiting = [f for h in self._held for f in h.needs.values() if not f.done()]
            wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            return True
        return claimed or self._refine()

    def give_back(self) -> None:
        """Return what was not begun."""
        for held in self._held:
            self._heart.drop(held.claim.id)
            try:
                self._store.work.give_back(held.claim)
            except FlashtuneError as e:
                log.warning("%s", e)
        self._held.clear()

    def close(self) -> None:
        self._pool.close()
        self._sandbox.close()
        if self._lock is not None:
            os.close(self._lock)  # closing lets the flock go
            self._lock = None

    def _claim(self) -> bool:
        claims = patiently(
            lambda: self._store.work.claim(
                self._info.id, stage="measure", keys=[self._info.class_key], open_studies=list(self._benches)
            )
        )
        for claim in claims:
            self._heart.hold(claim.id)
            try:
                self._held.append(self._prepare(claim))
            except FlashtuneError as e:
                self._spoiled(claim, e)
            except BaseException:
                self._heart.drop(claim.id)  # or its lease would be kept for ever, and nobody would do it
                raise
        return bool(claims)

    def _prepare(self, claim: Claim) -> _Held:
        """Bring together what a claim needs here: objects made elsewhere, and compiles that only happen here."""
        study = self._studies.get(claim.study_id)
        if claim.config is not None:
            ours = {claim.config.key: (claim.compiled, claim.artifacts)} if claim.compiled else {}
            configs, plan = [claim.config], None
        else:
            study = KnownStudy.read(study.handle)  # decided under the settings of now, not of the first look
            plan = _plan(study)
            configs = finals.finalists(plan, study.settings, study.handle.incumbent())
            ours = patiently(lambda: self._store.planning.compiled(claim.study_id))
        default = families.load(study.spec.families[0].partition("/")[0]).stock(study.spec.workload)
        if claim.study_id not in self._benches and default not in configs:
            configs.append(default)
            if default.key not in ours and claim.config is not None:
                ours |= patiently(lambda: self._store.planning.compiled(claim.study_id))
        return _Held(claim, study, {c.key: self._compiled(c, study, ours.get(c.key)) for c in configs}, plan)

    def _compiled(
        self, config: Config, study: KnownStudy, there: tuple[Compiled, tuple[Artifact, ...]] | None
    ) -> Future[Compiled]:
        """Return what the compilers made of a config, or have it compiled here."""
        if there is not None:
            compiled, artifacts = there
            try:
                self._artifacts.fetch(self._settings.cache_dir, artifacts)
                future: Future[Compiled] = Future()
                future.set_result(compiled)
                return future
            except MachineError as e:
                log.warning("%s; compiling %s here", e, config.label)
        return self._pool.submit(config, study.spec.workload, timeout_s=study.settings.compile_timeout_s)

    def _run(self, held: _Held) -> None:
        claim = held.claim
        what = claim.config.label if claim.config else "finals"
        self._heart.alive(f"{held.study.spec.workload.label}: {what}")
        try:
            patiently(lambda: self._store.work.begin(claim))
            if held.plan is None:
                self._trial(held)
            else:
                self._finals(held, held.plan)
            self._planner.advance(claim.study_id)
        except StaleClaim as e:
            log.warning("%s", e)
        except DefaultError as e:
            self._benches.pop(claim.study_id, None)
            self._default_failures[claim.study_id] += 1
            if self._default_failures[claim.study_id] >= _DEFAULT_TRIES:
                error = str(e)
                patiently(lambda: self._store.planning.fail_study(claim.study_id, error))
                del self._default_failures[claim.study_id]  # a later job may begin it again
            self._spoiled(claim, e)
        except FlashtuneError as e:
            self._spoiled(claim, e)
        finally:
            self._heart.drop(claim.id)
            self._heart.alive("")

    def _refine(self) -> bool:
        """Measure a leader of an open study once more while the compilers work; close studies that are over."""
        if not self._benches or not self._target.overlaps:
            return False
        searching = {s.id: not s.finals for s in self._store.planning.progress()}
        for study_id, bench in list(self._benches.items()):
            study = self._studies.get(study_id)
            if study_id not in searching:
                self._forget(study_id)
            elif searching[study_id]:
                plan = _plan(study)
                trial = plan.to_refine(study.settings.finalists)
                if trial is not None and self._is_here(trial.config, study):
                    compiled = Compiled(TrialStatus.OK, trial.compile_s or 0.0)
                    refined = trial.refined(bench.attempt(trial.config, compiled, verify=False))
                    return study.handle.refine(trial, refined)
        return False

    def _is_here(self, config: Config, study: KnownStudy) -> bool:
        """Tell whether a config that another worker may have measured can run here now; fetch what it needs."""
        there = patiently(lambda: self._store.planning.compiled(study.handle.id))
        future = self._compiled(config, study, there.get(config.key))
        return future.done() and future.result().status is TrialStatus.OK

    def _trial(self, held: _Held) -> None:
        claim, busy = held.claim, self._sandbox.busy_s
        assert claim.config is not None
        compiled = held.needs[claim.config.key].result()
        if compiled.status is TrialStatus.OK:
            trial = self._bench(held).attempt(claim.config, compiled)
        else:
            trial = Trial(claim.config, compiled.status, compiled.error, compiled.seconds)
        spent = self._sandbox.busy_s - busy
        patiently(lambda: self._store.work.commit_trial(claim, trial, spent))

    def _finals(self, held: _Held, plan: Plan) -> None:
        claim, study, start = held.claim, held.study, time.monotonic()
        handle = study.handle

        def keep(trial: Trial) -> None:
            patiently(lambda: handle.add_trial(trial))

        def say(done: int, total: int) -> None:
            self._heart.alive(f"{study.spec.workload.label}: finals, round {done} of at most {total}")

        tuned = finals.hold(self._bench(held), plan, study.spec, study.settings, handle.incumbent(), keep=keep, say=say)
        stats = {
            "wall_s": time.time() - handle.created_at.timestamp(),
            "device_s": self._store.planning.busy_s(claim.study_id) + time.monotonic() - start,
            "trials_new": len(plan.trials),
            "compile_s_total": sum(t.compile_s or 0.0 for t in plan.trials.values()),
            "notes": sorted({n for t in plan.trials.values() for n in t.notes}),
            "finals_on": self._target.uuid or self._info.host,
        }
        patiently(lambda: self._store.work.commit_finals(claim, tuned, stats))
        self._forget(claim.study_id)
        self._ring("control")

    def _bench(self, held: _Held) -> Bench:
        """Return the study's bench in the child, opened if it is not, the oldest one closed for it."""
        study_id, spec = held.claim.study_id, held.study.spec
        if study_id not in self._benches:
            while len(self._benches) >= _OPEN_STUDIES:
                self._forget(next(iter(self._benches)))
            default = families.load(spec.families[0].partition("/")[0]).stock(spec.workload)
            needed = held.needs.get(default.key)
            if needed is None:  # the study was open when this was claimed, and was closed for others since
                there = patiently(lambda: self._store.planning.compiled(study_id))
                needed = self._compiled(default, held.study, there.get(default.key))
            compiled = needed.result()
            if compiled.status is not TrialStatus.OK:
                raise DefaultError(f"the default {default.family} does not compile here: {compiled.error}")
            self._benches[study_id] = self._sandbox.open(spec.workload, default, spec.policy)
        self._benches.move_to_end(study_id)
        return self._benches[study_id]

    def _forget(self, study_id: str) -> None:
        bench = self._benches.pop(study_id, None)
        if bench is not None:
            bench.close()
        self._pool.forget(self._studies.get(study_id).spec.workload)

    def _spoiled(self, claim: Claim, error: FlashtuneError) -> None:
        """Give back what this machine could not do: it costs a try, and says nothing about the config."""
        log.warning("study %s: %s", claim.study_id, error)
        self._heart.drop(claim.id)
        try:
            patiently(lambda: self._store.work.release(claim, str(error)))
        except StaleClaim as e:
            log.warning("%s", e)


def _plan(study: KnownStudy) -> Plan:
    """Return what is known of a study now."""
    plan = Plan(study.spec, study.settings)
    for trial in patiently(study.handle.trials):
        plan.tell(trial)
    return plan
