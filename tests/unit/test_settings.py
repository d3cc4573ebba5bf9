"""Settings: defaults, overrides, refusals that say what to do, and no password in a log."""

import os
from pathlib import Path

import pytest

from tuner.errors import InputError
from workers.settings import Settings, without_secrets


def test_everything_hangs_off_home_by_default() -> None:
    settings = Settings.from_env({"FLASHTUNE_HOME": "/srv/ft"})
    assert settings.home == Path("/srv/ft")
    assert settings.database_url == "sqlite:////srv/ft/flashtune.db"
    assert settings.cache_dir == Path("/srv/ft/artifacts")
    assert settings.visible_devices is None


@pytest.mark.parametrize(
    ("environ", "home"),
    [
        ({"HOME": "/home/ann"}, "/home/ann/.local/share/flashtune"),
        ({"HOME": "/home/ann", "XDG_DATA_HOME": "/data"}, "/data/flashtune"),
        ({"HOME": "/home/ann", "XDG_DATA_HOME": "data"}, "/home/ann/.local/share/flashtune"),  # XDG: ignore relative
        ({"HOME": "/home/ann", "XDG_DATA_HOME": "/data", "FLASHTUNE_HOME": ""}, "/data/flashtune"),
        ({"HOME": "/home/ann", "FLASHTUNE_HOME": "~/tuned"}, "/home/ann/tuned"),
    ],
)
def test_home_follows_the_xdg_specification(environ: dict[str, str], home: str) -> None:
    assert Settings.from_env(environ).home == Path(home)


def test_a_relative_home_does_not_move_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.from_env({"FLASHTUNE_HOME": "ft"})
    monkeypatch.chdir("/")
    assert settings.home == tmp_path / "ft"
    assert settings.database_url == f"sqlite:///{tmp_path}/ft/flashtune.db"


def test_each_variable_overrides_its_default() -> None:
    settings = Settings.from_env(
        {
            "FLASHTUNE_HOME": "/srv/ft",
            "FLASHTUNE_DATABASE_URL": "postgresql+psycopg://db/ft",
            "FLASHTUNE_CACHE_DIR": "/var/cache/ft",
            "FLASHTUNE_COMPILE_WORKERS": "12",
            "CUDA_VISIBLE_DEVICES": "",  # for CUDA, empty means no GPU at all
        }
    )
    assert settings == Settings(Path("/srv/ft"), "postgresql+psycopg://db/ft", Path("/var/cache/ft"), 12, "")


def test_the_process_environment_is_the_default_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert Settings.from_env().visible_devices == "3,1"


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (16, 15)])
def test_compile_workers_leave_one_core_free(monkeypatch: pytest.MonkeyPatch, cores: int, workers: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert Settings.from_env({"HOME": "/"}).compile_workers == workers


@pytest.mark.parametrize("value", ["0", "-2", "1.5", "all", "²", "1_0", "99999"])
def test_a_bad_worker_count_is_named(value: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings.from_env({"FLASHTUNE_COMPILE_WORKERS": value})
    assert "FLASHTUNE_COMPILE_WORKERS" in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "from 1 to 9999" in str(caught.value)


@pytest.mark.parametrize("name", ["FLASHTUNE_HOME", "FLASHTUNE_CACHE_DIR"])
def test_a_file_is_no_folder(tmp_path: Path, name: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match=f"{name} is '{file}', which is not a folder; name a folder"):
        Settings.from_env({name: str(file)})


@pytest.mark.parametrize(
    "url",
    [
        "mysql://ann:hunter2@db/ft",
        "postgres://ann:hunter2@db/ft",  # SQLAlchemy dropped this spelling
        "ann:hunter2@db",
        "hunter2@db",
        "psql:host=db password=hunter2",
    ],
)
def test_a_bad_database_url_is_refused_without_telling_its_password(url: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings.from_env({"FLASHTUNE_DATABASE_URL": url})
    assert "FLASHTUNE_DATABASE_URL" in str(caught.value)
    assert "write sqlite:////folder/file.db or postgresql://" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_reading_the_settings_makes_nothing(tmp_path: Path) -> None:
    Settings.from_env({"FLASHTUNE_HOME": str(tmp_path / "ft")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////srv/ft.db", "sqlite:////srv/ft.db"),
        ("postgresql://db/ft", "postgresql://db/ft"),
        ("postgresql://ann@db:5432/ft", "postgresql://ann@db:5432/ft"),
        ("postgresql://ann:hunter2@db/ft", "postgresql://ann:***@db/ft"),
        ("postgresql://ann:hunter2@x@db/ft", "postgresql://ann:***@db/ft"),
        ("postgresql://ann:hunter2/?=@db/ft", "postgresql://ann:***@db/ft"),
        ("postgresql://db/ft?user=ann&password=hunter2", "postgresql://db/ft?user=***&password=***"),
        ("postgresql://db/ft?password=hunter2@x", "postgresql://***@x"),
    ],
)
def test_a_shown_url_keeps_the_place_and_hides_the_password(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    assert "hunter2" not in repr(Settings.from_env({"FLASHTUNE_DATABASE_URL": url}))
    assert "hunter2" not in f"{Settings.from_env({'FLASHTUNE_DATABASE_URL': url})}"
