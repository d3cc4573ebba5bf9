"""Studies as workers and dispatchers need them, read once from the database and kept for a while."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from db.store import Store, StudyHandle
from tuner.errors import InputError, Unreadable
from tuner.spec import StudySettings, StudySpec

_KEEP = 64


@dataclass(frozen=True)
class KnownStudy:
    """One study; ``settings`` are those that it had when it was first looked at."""

    handle: StudyHandle
    spec: StudySpec
    settings: StudySettings

    @classmethod
    def read(cls, handle: StudyHandle) -> KnownStudy:
        """Return a study. Raises Unreadable if its settings are none of this version's."""
        spec = StudySpec(handle.workload, handle.target, handle.toolchain, handle.policy, handle.families)
        try:
            settings = StudySettings(**handle.settings)
        except (InputError, TypeError) as e:
            raise Unreadable(f"study {handle.id} has settings of another flashtune ({e}); upgrade this one") from e
        return cls(handle, spec, settings)


class Studies:
    """The studies that were looked at last."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, KnownStudy] = OrderedDict()

    def get(self, study_id: str) -> KnownStudy:
        """Return a study. Raises what ``Store.study`` raises."""
        if study_id not in self._known:
            self._known[study_id] = KnownStudy.read(self._store.study(study_id))
        self._known.move_to_end(study_id)
        while len(self._known) > _KEEP:
            self._known.popitem(last=False)
        return self._known[study_id]
