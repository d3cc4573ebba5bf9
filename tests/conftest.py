"""What every test relies on: nobody's own data is touched, and what could not run is said."""

import os
import subprocess
import tempfile
from collections.abc import Generator, Iterator

import pytest

_FOR_TESTS = ("FLASHTUNE_REQUIRE_SERVICES", "FLASHTUNE_TEST_")
REQUIRE_SERVICES = os.environ.get("FLASHTUNE_REQUIRE_SERVICES") == "1"


@pytest.fixture(autouse=True, scope="session")
def own_home() -> Iterator[None]:
    """Point flashtune at an empty folder, so that no test reads or writes a person's own database."""
    with tempfile.TemporaryDirectory(prefix="flashtune-test-") as home, pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("FLASHTUNE_") and not n.startswith(_FOR_TESTS)]:
            patch.delenv(name)
        patch.setenv("FLASHTUNE_HOME", home)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing and not _has_gpu():
        for item in needing:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU: nvidia-smi -L lists none"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where services are promised, a `service` test that skips has lost its service: fail it."""
    report = yield
    if REQUIRE_SERVICES and report.skipped and item.get_closest_marker("service") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"FLASHTUNE_REQUIRE_SERVICES=1, but this service test was skipped: {report.longrepr}"
    return report


def _has_gpu() -> bool:
    try:
        return "GPU" in subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return False
