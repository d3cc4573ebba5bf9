"""What comes next in a study: more configs, the finals, or nothing yet.

Called by the dispatcher for every study, and by a measuring worker when its study runs low, so that
no GPU waits for the dispatcher's next look. Any number may call it: the database lets one succeed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection

from db.planning import NewWork, Planned
from db.store import Store
from tuner import families
from tuner.config import Config
from tuner.plan import Plan
from workers.studies import KnownStudy

_KEEP = 16  # plans in memory; one holds a family's feasible points and Optuna's study: 1 to 3 MB
AHEAD = 8  # configs of a study on the list for each measuring worker of its class


class Planner:
    """Plans studies of one database, and remembers the searches of ``keep`` of them between two calls."""

    def __init__(self, store: Store, *, keep: int = _KEEP) -> None:
        self._store, self._keep = store, keep
        self._plans: OrderedDict[str, tuple[int, Plan]] = OrderedDict()

    def advance(self, study_id: str, measuring: int = 1) -> bool:
        """Put more work of a study on the list if it runs low; return whether something was put there."""
        planned = self._store.planning.planned(study_id)
        ahead = AHEAD * max(1, measuring)
        if planned.finals or planned.open > ahead // 2:
            return False
        known = KnownStudy.read(self._store.study(study_id))
        plan = self._plan(study_id, known, planned)
        outstanding = Counter(c.family for c in planned.configs if c.key not in plan.trials)
        configs = plan.new_stocks()
        if not self._out_of_time(study_id, known):
            configs += plan.ask(ahead, outstanding)
        if not configs and planned.open:
            return False
        work = [_work(c, plan) for c in configs]
        done = self._store.planning.plan(study_id, planned.guard, work, finals=not configs)
        if not done or not configs:
            self._plans.pop(study_id, None)  # somebody else was faster, or it is over
        return done

    @property
    def remembered(self) -> tuple[str, ...]:
        """The studies whose searches are in memory, the one planned last at the end."""
        return tuple(self._plans)

    def forget_all_but(self, study_ids: Collection[str]) -> None:
        """Free what is remembered of other studies: they are over."""
        for study_id in self._plans.keys() - set(study_ids):
            del self._plans[study_id]

    def _out_of_time(self, study_id: str, known: KnownStudy) -> bool:
        """Tell whether a study has had its seconds: of a device, since in a fleet studies share them."""
        limit = known.settings.max_seconds
        return limit is not None and self._store.planning.busy_s(study_id) > limit

    def _plan(self, study_id: str, known: KnownStudy, planned: Planned) -> Plan:
        budget, plan = self._plans.pop(study_id, (0, None))
        if plan is None or budget != known.settings.max_trials:
            plan = Plan(known.spec, known.settings, self._store.neighbours(known.spec))
        for trial in known.handle.trials():
            if plan.trials.get(trial.config.key) != trial:
                plan.tell(trial)
        for config in planned.configs:
            plan.reserve(config)
        self._plans[study_id] = known.settings.max_trials, plan
        while len(self._plans) > self._keep:
            self._plans.popitem(last=False)
        return plan


def _work(config: Config, plan: Plan) -> NewWork:
    stage = "compile" if families.load(config.family).compile_in == "cpu" else "measure"
    rank = 0 if config == plan.default else 1 if config.is_stock else 2
    return NewWork(config, stage, rank)
