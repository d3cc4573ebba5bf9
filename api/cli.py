"""The command line: ``flashtune``. Parses, makes one call, prints; exit codes 0, 1, 2, 3, 4.

Every command takes ``--json``: one JSON document on standard output and nothing else there.
Progress and errors go to standard error.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from api import (
    compiling,
    doctor,
    fleeting,
    jobs,
    keeping,
    keeping_keys,
    looking,
    replaying,
    serving,
    showing,
    submitting,
    tuning,
    upping,
    verifying,
    watching,
    working,
)
from tuner import __version__
from tuner.errors import FlashtuneError, InputError, Unavailable

app = typer.Typer(
    help="Tune attention kernels on real hardware, and keep what wins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
# Typer carries its own Click, or imports it, by version, and exports this class from neither.
_UsageError: Any = typer.BadParameter.mro()[1]

app.command("tune")(tuning.tune)
app.command("lookup")(looking.lookup)
app.command("compile")(compiling.compile_configs)
app.command("doctor")(doctor.doctor)
app.command("studies")(showing.studies)
app.command("show")(showing.show)
app.command("verify")(verifying.verify)
app.command("replay")(replaying.replay)
app.command("tables")(replaying.list_tables)
app.command("submit")(submitting.submit)
app.command("jobs")(jobs.jobs)
app.command("watch")(watching.watch)
app.command("cancel")(jobs.cancel)
app.command("fleet")(fleeting.fleet)
app.command("serve")(serving.serve)
app.command("worker")(working.worker)
app.command("up")(upping.up)
app.add_typer(keeping_keys.app, name="keys")
app.command("backup")(keeping.backup)
app.command("restore")(keeping.restore)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"flashtune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Tune attention kernels on real hardware, and keep what wins."""


def main() -> None:
    """Run the command line; every expected error is one line and an exit code."""
    try:
        status = app(standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as e:
        _say_usage(e)
        sys.exit(2)
    except Unavailable as e:
        _say(str(e))
        sys.exit(3)
    except InputError as e:
        _say(str(e))
        sys.exit(2)
    except watching.WatchingEnded as e:
        _say(str(e))
        sys.exit(_INTERRUPTED)
    except FlashtuneError as e:
        _say(str(e))
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        status = _INTERRUPTED
    except (BrokenPipeError, SystemExit):  # Typer makes the one of the other
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still in the buffer
        sys.exit(0)  # the reader, as in `| head`, has what it wanted
    if status == _INTERRUPTED:  # as Typer has it, too
        _say("stopped; what was measured is kept, and the same command goes on from there")
    sys.exit(status)


def _say_usage(error: Any) -> None:
    """Say what is wrong with the options, in one line; without any command, show the help."""
    text = str(error.format_message())
    if "\n" in text:
        print(text, file=sys.stderr)
        return
    # Pydantic, which converts for Typer, knows the value that Typer's text leaves out
    found: list[Any] = getattr(error.__cause__, "errors", list)()
    value = f": {found[0]['input']!r}" if found else ""
    command = error.ctx.command_path if error.ctx else "flashtune"
    _say(f"{text.rstrip('.')}{value}; see `{command} --help`")


def _say(text: str) -> None:
    print("flashtune: " + " ".join(text.split("\n")[:1]), file=sys.stderr)


if __name__ == "__main__":
    main()
