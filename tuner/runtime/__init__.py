"""The run-time client: which config a workload gets, from a snapshot.

    >>> from tuner import runtime
    >>> runtime.load("tuned.snapshot", refresh_s=60)  # doctest: +SKIP
    >>> match = runtime.find(workload)  # doctest: +SKIP
    >>> match.kind, match.config, match.distance  # doctest: +SKIP

``load(source, *, refresh_s, target, toolchain, policy, strict)`` reads a snapshot from a path or a
URL. A file that cannot be used is one warning in the log, and what was loaded before stays.
``find(workload)``, or ``find(batch=, heads_q=, seqlen_q=, head_dim=, ...)``, returns a ``Match``: it
reads no file, asks no network and takes no lock. ``current()`` is the ``Finder`` in use, or None.
``stats()`` counts the answers by kind; ``unload()`` forgets the snapshot and ends the refresh.

Only the standard library is imported, and the environment is not read.
"""

from __future__ import annotations

from tuner.lookup import Match, MatchKind
from tuner.runtime.client import current, find, load, stats, unload

__all__ = ["Match", "MatchKind", "current", "find", "load", "stats", "unload"]
