"""Options that several commands share, and the way from options to a workload, a store and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from db.store import Store
from tuner import workload_file
from tuner.errors import InputError
from tuner.workload import Workload
from tuner.workload_file import NamedWorkload
from workers.settings import Settings

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print one JSON document a line (NDJSON), one an event.")]
FakeScriptOption = Annotated[
    Path | None, typer.Option(help="Run the fake family by this script (for tests).", hidden=True)
]
DatabaseOption = Annotated[
    str | None,
    typer.Option("--db", help="Database: a SQLite file or a SQLAlchemy URL. Default: FLASHTUNE_DATABASE_URL."),
]
PatternOption = Annotated[
    str,
    typer.Option(
        "--pattern", "-p", help="As in 'causal', 'sliding_window(1024)', 'causal & document(mean=512) + softcap(30)'."
    ),
]
BatchOption = Annotated[int, typer.Option("--batch", "-b", help="Batch size.")]
HeadsOption = Annotated[int, typer.Option("--heads", help="Query heads.")]
HeadsKvOption = Annotated[int | None, typer.Option("--heads-kv", help="K/V heads; default: as many as query heads.")]
SeqlenOption = Annotated[
    int, typer.Option("--seqlen", "-s", help="Sequence length of queries, and of keys unless given.")
]
SeqlenKOption = Annotated[int | None, typer.Option("--seqlen-k", help="Sequence length of keys.")]
LengthsOption = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        help="Packed sequences (varlen), as in '512,1024*3', or 'mean=2048,seed=0' beside --batch. Replaces --seqlen.",
    ),
]
LengthsQOption = Annotated[
    str | None, typer.Option("--lengths-q", help="The same of queries alone, as '1*64'; with --lengths-k.")
]
LengthsKOption = Annotated[str | None, typer.Option("--lengths-k", help="The same of keys alone.")]
HeadDimOption = Annotated[
    int, typer.Option("--head-dim", "-d", help="Head dimension of Q and K, and of V unless given.")
]
HeadDimVOption = Annotated[int | None, typer.Option("--head-dim-v", help="Head dimension of V.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="bfloat16, float16 or float32.")]
OpOption = Annotated[str, typer.Option("--op", help="fwd, bwd, or fwd+bwd: both, with one BlockMask.")]
DeterministicOption = Annotated[bool, typer.Option("--deterministic", help="Only configs that repeat bit by bit.")]
PolicyOption = Annotated[
    str,
    typer.Option("--policy", help="graph: kernel time; eager: what a Python caller waits for; auto: graph on a GPU."),
]
FamilyOption = Annotated[
    list[str] | None, typer.Option("--family", "-f", help="Only this kernel family; give it again for more.")
]
TrialsOption = Annotated[int, typer.Option("--trials", "-n", help="Configs to try, besides the stock ones.")]
SecondsOption = Annotated[
    float | None,
    typer.Option("--seconds", help="Seconds to search one workload, finals not counted."),
]
MarginOption = Annotated[float, typer.Option(help="Publish only what is faster by this fraction.")]
FileArgument = Annotated[
    Path | None, typer.Argument(help="A TOML file of workloads; without one, the options name a workload.")
]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="The service. Default: FLASHTUNE_URL; without it, the database itself.")
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]

_WORKLOAD_OPTIONS = (
    *("pattern", "batch", "heads", "heads_kv", "seqlen", "seqlen_k", "head_dim", "head_dim_v"),
    *("dtype", "op", "deterministic", "lengths", "lengths_q", "lengths_k"),
)

stderr = Console(stderr=True)
# A pipe has no width of its own: enough for every column
stdout = Console(width=None if sys.stdout.isatty() else 160)


def workload_from(
    ctx: typer.Context,
    pattern: str,
    batch: int,
    heads: int,
    heads_kv: int | None,
    seqlen: int,
    seqlen_k: int | None,
    head_dim: int,
    head_dim_v: int | None,
    dtype: str,
    op: str = "fwd",
    deterministic: bool = False,
    lengths: str | None = None,
    lengths_q: str | None = None,
    lengths_k: str | None = None,
) -> Workload:
    """Return the workload that the options name. Raises WorkloadError or PatternError."""
    packed = {"lengths": lengths, "lengths_q": lengths_q, "lengths_k": lengths_k}
    defaulted = ("batch", "seqlen_q", "seqlen_k") if any(packed.values()) else ()
    values = {
        "pattern": pattern,
        "batch": batch,
        "heads_q": heads,
        "heads_kv": heads if heads_kv is None else heads_kv,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen if seqlen_k is None else seqlen_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
        "dtype": dtype,
        "op": op,
        "deterministic": deterministic,
    }
    left_out = [n for n in defaulted if not _given(ctx, n.removesuffix("_q"))]
    return Workload.from_dict({**{k: v for k, v in values.items() if k not in left_out}, **packed})


def _given(ctx: typer.Context, name: str) -> bool:
    """Tell whether an option was written, and is not its default."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def workloads_from(ctx: typer.Context, file: Path | None, single: Callable[[], Workload]) -> list[NamedWorkload]:
    """Return the workloads of ``file``, or the single one of the options if there is no file.

    Raises:
        InputError: if the file is wrong, or a workload option is given beside it.
    """
    if file is None:
        workload = single()
        return [NamedWorkload(workload.label, workload)]
    for name in _WORKLOAD_OPTIONS:
        if _given(ctx, name):
            option = "--" + name.replace("_", "-")
            raise InputError(f"{file} and {option} are both given; name workloads by file or by options, not both")
    return workload_file.load(file)


def check_policies(policy: str, workloads: Sequence[NamedWorkload]) -> None:
    """Raise InputError if ``--policy`` contradicts what a file says of one of its workloads."""
    for named in workloads:
        if policy != "auto" and named.policy not in ("", policy):
            raise InputError(f"--policy is {policy} and the file has {named.policy} for {named.name!r}; leave one out")


def open_store(url: str | None, *, create: bool = True, read_only: bool = False) -> Store:
    """Open the database of ``--db`` or of the environment. Raises StorageError."""
    settings = Settings.from_env()
    return Store.open(url or settings.database_url, create=create, read_only=read_only, lease_s=settings.lease_s)


def print_json(value: Any) -> None:
    """Write one JSON document to standard output, as ``plain`` has it."""
    json.dump(plain(value), sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_json_line(value: Any) -> None:
    """Write one JSON document as one line, at once: for those who follow a pipe."""
    print(json.dumps(plain(value)), flush=True)


def read_script(path: Path | None) -> str:
    """Return the text of a fake family's script. Raises InputError if it is no JSON object."""
    if path is None:
        return ""
    try:
        text = path.read_text()
        if not isinstance(json.loads(text), dict):
            raise InputError(f"{path} holds no JSON object; see tuner/families/fake.py for the format")
    except OSError as e:
        raise InputError(f"cannot read the script {path}: {e.strerror}") from e
    except json.JSONDecodeError as e:
        raise InputError(f"{path} is not JSON (line {e.lineno}: {e.msg})") from e
    return text


def plain(value: Any) -> Any:
    """Return a value of JSON's types; NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value
