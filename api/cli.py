"""The command line: ``flashtune``. Parses, makes one call, prints; exit codes 0, 1, 2, 3, 4.

Every command takes ``--json``: one JSON document on standard output and nothing else there.
Progress and errors go to standard error.
"""

from __future__ import annotations

import sys

import typer

from api import compiling, doctor, looking, showing, tuning
from tuner import __version__
from tuner.errors import FlashtuneError, InputError

app = typer.Typer(
    help="Tune attention kernels on real hardware, and keep what wins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("tune")(tuning.tune)
app.command("lookup")(looking.lookup)
app.command("compile")(compiling.compile_configs)
app.command("doctor")(doctor.doctor)
app.command("studies")(showing.studies)
app.command("show")(showing.show)


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
        app()
    except InputError as e:
        _say(str(e))
        sys.exit(2)
    except FlashtuneError as e:
        _say(str(e))
        sys.exit(1)
    except KeyboardInterrupt:
        _say("stopped; what was measured is kept, and the same command goes on from there")
        sys.exit(130)
    except BrokenPipeError:  # the reader, as in `| head`, has what it wanted
        sys.exit(0)


def _say(text: str) -> None:
    print("flashtune: " + " ".join(text.split("\n")[:1]), file=sys.stderr)


if __name__ == "__main__":
    main()
