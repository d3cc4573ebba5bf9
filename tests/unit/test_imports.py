"""Who imports whom, and how little: proved in fresh processes, and by import-linter on planted faults."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

OURS = {"tuner", "workers", "db", "api"}


@pytest.mark.parametrize(
    "module",
    [
        "tuner",
        "tuner.errors",
        "tuner.pattern",
        "tuner.workload",
        "tuner.config",
        "tuner.trial",
        "tuner.target",
        "tuner.runtime",
        "tuner.spec",
        "workers.settings",
        "api",
    ],
)
def test_a_light_module_imports_the_standard_library_alone(module: str) -> None:
    code = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert module.partition(".")[0] in loaded
    assert loaded - OURS <= sys.stdlib_module_names


def _lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BIN / "lint-imports", "--no-cache"], cwd=folder, capture_output=True, text=True, check=False)


def test_the_import_contracts_hold() -> None:
    done = _lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "imported", "broken"),
    [
        ("tuner.search", "optuna", None),
        ("db.session", "sqlalchemy", None),
        ("workers.tasks", "celery", None),
        ("api.cli", "typer", None),
        ("api.cli", "workers.tasks", None),
        ("workers.tasks", "db.session", None),
        ("tuner.study", "optuna", "optuna only in tuner.search"),
        ("db.session", "optuna", "optuna only in tuner.search"),
        ("workers.tasks", "sqlalchemy.orm", "sqlalchemy and alembic only in db"),
        ("api.cli", "alembic", "sqlalchemy and alembic only in db"),
        ("tuner.study", "celery", "celery only in workers"),
        ("workers.tasks", "rich.table", "fastapi, typer and rich only in api"),
        ("workers.tasks", "fastapi", "fastapi, typer and rich only in api"),
        ("workers.tasks", "torch", "torch and the kernel compilers only in tuner"),
        ("tuner.study", "db.session", "imports go one way: api, workers, db, tuner"),
        ("db.session", "workers.tasks", "imports go one way: api, workers, db, tuner"),
        ("workers.tasks", "api.cli", "imports go one way: api, workers, db, tuner"),
    ],
)
def test_a_planted_import_breaks_exactly_its_contract(
    tmp_path: Path, module: str, imported: str, broken: str | None
) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("tuner.search", "tuner.study", "db.session", "workers.tasks", "api.cli"):
        package, _, file = name.partition(".")
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "__init__.py").touch()
        # inside a function, as heavy imports often are: that must count too
        body = f"def f() -> None:\n    import {imported}\n" if name == module else ""
        (tmp_path / package / f"{file}.py").write_text(body)
    done = _lint_imports(tmp_path)
    found = [line.removesuffix(" BROKEN") for line in done.stdout.splitlines() if line.endswith(" BROKEN")]
    assert found == ([broken] if broken else []), done.stdout + done.stderr
    assert done.returncode == (1 if broken else 0), done.stdout + done.stderr


@pytest.mark.parametrize("command", [[str(BIN / "flashtune")], [sys.executable, "-P", "-m", "api.cli"]])
def test_the_command_ignores_packages_of_the_same_name_in_the_working_folder(
    tmp_path: Path, command: list[str]
) -> None:
    """A project that tunes its kernels may well have a ``db`` or an ``api`` folder of its own."""
    for name in ("tuner", "workers", "db", "api"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package was imported')\n")
    environ = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run([*command, "--help"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tune" in done.stdout
    assert "lookup" in done.stdout


def test_the_command_line_starts_without_what_few_commands_need() -> None:
    code = "import sys; import api.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "sqlalchemy" in loaded
    assert not loaded & {"torch", "optuna", "celery", "fastapi", "uvicorn", "alembic", "scipy", "matplotlib"}
