"""What installing flashtune brings: nothing at all, or exactly what an extra promises."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import tuner

ROOT = Path(__file__).parents[2]
PACKAGES = ("tuner", "workers", "db", "api")


def _closure(extra: str) -> set[str]:
    """Return every distribution that ``flashtune[extra]`` needs here, from the installed metadata."""
    seen: set[tuple[str, str]] = set()
    todo = [("flashtune", extra)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        for text in _requires(name):
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": wanted}):
                todo += [(canonicalize_name(need.name), e) for e in ("", *need.extras)]
    return {name for name, _ in seen} - {"flashtune"}


def _requires(name: str) -> list[str]:
    """Return what a distribution asks for; nothing if it belongs to an extra that is not installed here."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def test_the_base_installation_needs_nothing() -> None:
    assert _closure("") == set()


def test_a_service_node_gets_its_libraries_and_neither_torch_nor_cuda() -> None:
    needed = _closure("service")
    assert {"optuna", "sqlalchemy", "alembic", "psycopg", "psycopg-binary", "typer", "rich", "celery"} <= needed
    gpu_only = ("torch", "triton", "nvidia", "cuda", "flash-attn", "quack", "cupy")
    assert [name for name in needed if name.startswith(gpu_only)] == []


def test_a_compile_node_gets_the_compilers_on_top_of_the_service() -> None:
    compilers = {"torch", "triton", "nvidia-cutlass-dsl", "flash-attn-4", "quack-kernels"}
    assert _closure("service") | compilers <= _closure("compile")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel, offline, from a copy of the sources."""
    folder = tmp_path_factory.mktemp("packaging")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package)
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, source], check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_the_installed_client_runs_on_the_standard_library_alone(wheel: Path) -> None:
    code = "import tuner.workload, tuner.spec; print(tuner.__version__, tuner.__file__)"
    # -S leaves out site-packages: only the standard library and the wheel, which Python reads as a zip, are there
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env={"PYTHONPATH": str(wheel)},
        cwd=wheel.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [tuner.__version__, str(wheel / "tuner" / "__init__.py")]


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    sources = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == sources
