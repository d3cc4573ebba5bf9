"""Settings: defaults, overrides, refusals that say what to do, and no password in a log."""

import os
from datetime import timedelta
from pathlib import Path

import pytest

from db.values import Keep
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
            "FLASHTUNE_BROKER_URL": "amqps://broker/ft",
            "FLASHTUNE_ARTIFACT_DIR": "/shared/ft",
            "FLASHTUNE_LEASE_S": "90",
            "FLASHTUNE_TICK_S": "0.25",
            "FLASHTUNE_KEEP_DAYS": "90",
            "FLASHTUNE_KEEP_WORKERS_DAYS": "1.5",
            "FLASHTUNE_URL": "https://ft.example:8443/api/",
            "FLASHTUNE_API_KEY": "ft_abc",
            "FLASHTUNE_FAKE_SCRIPT": "/srv/script.json",
        }
    )
    assert settings == Settings(
        home=Path("/srv/ft"),
        database_url="postgresql+psycopg://db/ft",
        cache_dir=Path("/var/cache/ft"),
        compile_workers=12,
        visible_devices="",
        broker_url="amqps://broker/ft",
        artifact_dir=Path("/shared/ft"),
        lease_s=90.0,
        tick_s=0.25,
        keep=Keep(timedelta(days=90), timedelta(days=1.5)),
        url="https://ft.example:8443/api",  # routes are appended
        api_key="ft_abc",
        fake_script=Path("/srv/script.json"),
    )


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_service_nothing_of_it_is_set(value: str | None) -> None:
    names = ("BROKER_URL", "ARTIFACT_DIR", "LEASE_S", "TICK_S", "URL", "API_KEY", "FAKE_SCRIPT")
    settings = Settings.from_env({f"FLASHTUNE_{n}": value for n in names} if value is not None else {})
    assert (settings.broker_url, settings.artifact_dir, settings.fake_script) == (None, None, None)
    assert (settings.url, settings.api_key) == (None, None)
    assert (settings.lease_s, settings.tick_s) == (45.0, 2.0)


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


@pytest.mark.parametrize("name", ["FLASHTUNE_HOME", "FLASHTUNE_CACHE_DIR", "FLASHTUNE_ARTIFACT_DIR"])
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


@pytest.mark.parametrize("scheme", ["amqp", "amqps", "redis", "rediss", "memory"])
def test_a_broker_may_be_any_that_workers_can_use(scheme: str) -> None:
    assert Settings.from_env({"FLASHTUNE_BROKER_URL": f"{scheme}://host/x"}).broker_url == f"{scheme}://host/x"


@pytest.mark.parametrize(
    "url", ["sqs://ann:hunter2@host", "amqp:ann:hunter2@host", "ann:hunter2@host", "pyamqp+x://ann:hunter2@host"]
)
def test_a_bad_broker_url_is_refused_without_telling_its_password(url: str) -> None:
    with pytest.raises(InputError, match=r"FLASHTUNE_BROKER_URL is .*; write amqp://user:password@host") as caught:
        Settings.from_env({"FLASHTUNE_BROKER_URL": url})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "least_to_most"),
    [
        ("FLASHTUNE_LEASE_S", "0.5", "from 1 to 3600"),
        ("FLASHTUNE_LEASE_S", "3601", "from 1 to 3600"),
        ("FLASHTUNE_LEASE_S", "-45", "from 1 to 3600"),
        ("FLASHTUNE_LEASE_S", "45s", "from 1 to 3600"),
        ("FLASHTUNE_LEASE_S", "nan", "from 1 to 3600"),
        ("FLASHTUNE_LEASE_S", "1_0", "from 1 to 3600"),
        ("FLASHTUNE_TICK_S", "0.04", "from 0.05 to 60"),
        ("FLASHTUNE_TICK_S", "61", "from 0.05 to 60"),
        ("FLASHTUNE_TICK_S", "1e1", "from 0.05 to 60"),
    ],
)
def test_bad_seconds_are_named(name: str, value: str, least_to_most: str) -> None:
    with pytest.raises(InputError, match=f"{name} is '{value}'; write seconds {least_to_most}"):
        Settings.from_env({name: value})


@pytest.mark.parametrize("value", ["1", "3600"])
def test_the_ends_of_a_range_belong_to_it(value: str) -> None:
    assert Settings.from_env({"FLASHTUNE_LEASE_S": value}).lease_s == float(value)


@pytest.mark.parametrize(
    ("url", "meant"),
    [
        ("http://ft", "http://ft"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("https://ft.example/tuning/", "https://ft.example/tuning"),
    ],
)
def test_a_service_url_loses_the_slash_at_its_end(url: str, meant: str) -> None:
    assert Settings.from_env({"FLASHTUNE_URL": url}).url == meant


@pytest.mark.parametrize(
    "url",
    [
        "ft.example:8000",
        "ftp://ft.example",
        "http://",
        "http:///v1",
        "http://ft example",
        "http://ft:65536",
        "http://ann:hunter2@ft.example",
        "http://ft.example?key=hunter2",
        "http://ft.example/\r\nX-Evil: 1",
    ],
)
def test_a_bad_service_url_is_refused_without_telling_its_secrets(url: str) -> None:
    with pytest.raises(InputError, match=r"FLASHTUNE_URL is .*; write http://host:port") as caught:
        Settings.from_env({"FLASHTUNE_URL": url})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["ft_hunter2 ", "ft_hunter2\r\nX-Evil: 1", "ft_hunter2é", "ft_hunter2" * 30])
def test_an_impossible_key_is_refused_without_telling_it(key: str) -> None:
    with pytest.raises(InputError, match="FLASHTUNE_API_KEY is no API key") as caught:
        Settings.from_env({"FLASHTUNE_API_KEY": key})
    assert "hunter2" not in str(caught.value)


def test_no_secret_is_in_the_repr() -> None:
    settings = Settings.from_env(
        {
            "FLASHTUNE_BROKER_URL": "amqp://ann:hunter2@broker/ft",
            "FLASHTUNE_API_KEY": "ft_hunter2",
            "FLASHTUNE_URL": "https://ft.example",
        }
    )
    assert "hunter2" not in repr(settings)
    for shown in ("broker_url='amqp://ann:***@broker/ft'", "api_key='***'", "url='https://ft.example'", "lease_s=45.0"):
        assert shown in repr(settings)


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
