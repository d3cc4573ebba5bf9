"""Every exception that flashtune raises on purpose.

FlashtuneError
├── InputError            a value that a person gave is wrong (exit code 2)
│   ├── PatternError
│   ├── WorkloadError
│   ├── ConfigError
│   ├── TargetError
│   ├── SnapshotError   a snapshot is foreign, damaged or too new
│   ├── NotFound          nothing has that id
│   ├── Conflict          it contradicts what was accepted before
│   └── StorageError      the database cannot be opened, read or written
│       ├── Unavailable   it cannot be reached now, or is busy: worth a retry (exit code 3)
│       └── Unreadable    one value in it is of another version, or damaged
├── StaleClaim            work was given to another worker meanwhile: drop the result
└── MachineError          the machine failed, not a config: worth a retry, never told to the search
    └── DefaultError      the stock kernel itself does not run or is wrong here

Failures *of a config* are not exceptions: they are trial statuses (``tuner.trial``).
"""


class FlashtuneError(Exception):
    """Base of everything flashtune raises on purpose."""


class InputError(FlashtuneError):
    """A value given from outside is wrong; the message names it and says what to do next."""


class PatternError(InputError):
    """A pattern is unknown, malformed or contradicts itself."""


class WorkloadError(InputError):
    """A workload has an impossible shape or names something that does not exist."""


class ConfigError(InputError):
    """A config names an unknown family or an unknown tunable."""


class TargetError(InputError):
    """A target does not exist, or is not on this machine."""


class StorageError(InputError):
    """The database cannot be opened, read or written as asked."""


class SnapshotError(InputError):
    """A snapshot is foreign, newer than this program, truncated or damaged, or cannot be had."""


class NotFound(InputError):
    """Nothing has that id, or it begins several."""


class Conflict(InputError):
    """A request contradicts one that was accepted before."""


class Unavailable(StorageError):
    """The database cannot be reached now, or stays locked: the same call may succeed later."""


class Unreadable(StorageError):
    """One stored value is not what this version writes: the others may well be."""


class StaleClaim(FlashtuneError):
    """The lease on a piece of work ran out and another worker has it: the result is not taken."""


class MachineError(FlashtuneError):
    """The machine failed (lost child, full disk, no GPU left): retry; says nothing about a config."""


class DefaultError(MachineError):
    """The stock kernel does not run, or is wrong, on this machine: there is nothing to compare with."""
