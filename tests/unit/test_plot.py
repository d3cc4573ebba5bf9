"""What a plot of a study shows, and the files that come of it."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from api import plot, replay_plot
from api.picture import MAX_FINALS, Picture, prepare
from tuner.config import Config
from tuner.errors import InputError
from tuner.replay import Replay
from tuner.trial import Finalist, Measurement, Trial, TrialStatus, TunedConfig, Verdict

STOCK = Config.make("fa4_fwd_sm90", 1)
RIVAL = Config.make("cudnn", 1)
ERROR = "ValueError: <bad> </script><script>alert(1)</script>"


def tile(n: int) -> Config:
    return Config.make("fa4_fwd_sm90", 1, tile_m=128, tile_n=n)


def ok(config: Config, ratio: float) -> Trial:
    return Trial(config, TrialStatus.OK, measurement=Measurement("graph", (1.0,), (1.0,), ratio, 100.0 / ratio))


TRIALS = [
    Trial(tile(240), TrialStatus.COMPILE_ERROR, ERROR),
    ok(STOCK, 1.0),
    ok(RIVAL, 0.9),
    ok(tile(96), 1.2),
    Trial(tile(48), TrialStatus.RUN_CRASH, "died of SIGSEGV"),
    ok(tile(112), 1.1),
    ok(tile(128), 1.3),
    Trial(tile(256), TrialStatus.INCORRECT, "NaN"),
]


def finalist(config: Config, speedup: float) -> Finalist:
    return Finalist(config, 100.0 / speedup, speedup, speedup - 0.01, speedup + 0.02, (1.0,))


TUNED = TunedConfig(
    config=tile(128),
    default=STOCK,
    verdict=Verdict.PUBLISHED,
    speedup=1.3,
    low=1.29,
    high=1.32,
    confidence=0.95,
    margin=0.02,
    ties=(),
    finalists=(finalist(STOCK, 1.0), finalist(RIVAL, 0.9), finalist(tile(96), 1.2), finalist(tile(128), 1.3)),
    verification=None,
    reason="faster",
    rounds=20,
    rounds_dropped=0,
)


def picture(trials: list[Trial], tuned: TunedConfig | None = None) -> Picture:
    return prepare(trials, tuned, title="causal $x_1$ b2", subtitle="study 1")


def test_the_best_so_far_starts_at_the_first_measured_trial_and_never_falls() -> None:
    assert picture(TRIALS).best == ((2, 1.0), (3, 1.0), (4, 1.2), (5, 1.2), (6, 1.2), (7, 1.3), (8, 1.3))


def test_points_keep_the_order_of_the_search_and_part_into_families_and_failures() -> None:
    p = picture(TRIALS)
    assert [x.number for x in p.points] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [(x.number, x.speedup) for x in p.measured("fa4_fwd_sm90")] == [(2, 1.0), (4, 1.2), (6, 1.1), (7, 1.3)]
    assert [(x.number, x.speedup) for x in p.measured("cudnn")] == [(3, 0.9)]
    assert {status: [x.number for x in found] for status, found in p.failed().items()} == {
        TrialStatus.COMPILE_ERROR: [1],
        TrialStatus.RUN_CRASH: [5],
        TrialStatus.INCORRECT: [8],
    }
    assert p.colors["cudnn"] != p.colors["fa4_fwd_sm90"]


def test_failures_lie_below_everything_measured_and_inside_the_panel() -> None:
    p = picture(TRIALS)
    low, high = p.y_range
    assert low < p.floor < 0.9
    assert high > 1.3


@pytest.mark.parametrize("ratio", [float("nan"), float("inf")])
def test_a_time_that_is_no_number_counts_as_a_failure(ratio: float) -> None:
    p = picture([ok(STOCK, ratio), ok(RIVAL, 0.9)])
    assert p.best == ((2, 0.9),)
    assert [x.number for x in p.failed()[TrialStatus.OK]] == [1]


def test_finals_are_fastest_first_with_winner_and_default_named() -> None:
    p = picture(TRIALS, TUNED)
    assert [(f.config, p.role(f.config)) for f in p.finals] == [
        (tile(128), "winner"),
        (tile(96), "finalist"),
        (STOCK, "default"),
        (RIVAL, "finalist"),
    ]
    kept = picture(TRIALS, replace(TUNED, config=STOCK, verdict=Verdict.KEPT_DEFAULT))
    assert kept.role(STOCK) == "winner and default"


def test_too_many_finalists_leave_the_fastest_the_winner_and_the_default() -> None:
    many = tuple(finalist(tile(16 * i), 1.3 + i / 100) for i in range(1, 31))
    tuned = replace(TUNED, config=tile(16), finalists=(*many, finalist(STOCK, 1.0)))
    p = picture(TRIALS, tuned)
    fastest = [tile(16 * i) for i in range(30, 30 - (MAX_FINALS - 2), -1)]
    assert [f.config for f in p.finals] == [*fastest, tile(16), STOCK]
    assert f"{MAX_FINALS} of 31" in p.finals_title


STUDIES = {
    "done": picture(TRIALS, TUNED),
    "running": picture(TRIALS),
    "one trial": picture(TRIALS[1:2]),
    "nothing ok": picture([TRIALS[0]]),
    "every status": picture([Trial(tile(16 * i), s) for i, s in enumerate(TrialStatus, start=3)]),
    "no trial": picture([]),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_png_has_the_stated_size(name: str, tmp_path: Path) -> None:
    path = tmp_path / "study.PNG"
    plot.write(path, STUDIES[name])
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">4sII", data[12:24]) == (b"IHDR", 1200, 600)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", STUDIES)
def test_a_page_holds_every_config_and_needs_no_network(name: str, tmp_path: Path) -> None:
    path = tmp_path / "study.html"
    plot.write(path, STUDIES[name])
    page = path.read_text()
    assert "<script src" not in page
    # plotly writes these three characters as JavaScript escapes, so that no text can end the script
    shown = page.replace("\\u002f", "/").replace("\\u003c", "<").replace("\\u003e", ">")
    for point in STUDIES[name].points:
        assert f"<b>{point.trial.config.key}</b>" in shown
        assert str(point.trial.status) in shown
    for f in STUDIES[name].finals:
        assert f"{f.speedup:.4f}x [{f.low:.4f}, {f.high:.4f}]" in shown


def test_an_error_text_in_a_page_is_text_and_not_markup(tmp_path: Path) -> None:
    page = plot.html(picture([TRIALS[0]]))
    assert "alert(1)" in page
    assert "<script>alert(1)" not in page
    assert "\\u003cscript\\u003ealert(1)" not in page  # what plotly would show as markup


@pytest.mark.parametrize("name", ["study.svg", "study", "png"])
def test_another_suffix_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=rf"{name}'.*\.png or \.html"):
        plot.write(tmp_path / name, STUDIES["running"])
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken.png").mkdir()
    for path in (tmp_path / "none" / "x.png", tmp_path / "taken.png"):
        with pytest.raises(InputError, match=path.name):
            plot.write(path, STUDIES["running"])
    assert [p.name for p in tmp_path.rglob("*")] == ["taken.png"]


def test_an_existing_plot_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    path.write_bytes(b"old" * 100_000)
    plot.write(path, STUDIES["running"])
    assert path.read_bytes().endswith(b"IEND\xaeB`\x82")


@pytest.mark.parametrize("suffix", [".png", ".html"])
def test_a_plot_of_replays_is_written_also_where_nothing_worked_at_first(tmp_path: Path, suffix: str) -> None:
    inf = float("inf")
    found = {
        "ours": [Replay("a", "ours", 0, (1.2, 1.0), ("x", "y")), Replay("a", "ours", 1, (1.1,), ("x",))],
        "random": [Replay("a", "random", 0, (inf, inf, 1.5), ("x", "y", "z"))],
    }
    path = tmp_path / f"regret{suffix}"
    replay_plot.write(path, found, 3, "<title>")
    data = path.read_bytes()
    if suffix == ".png":
        assert struct.unpack(">II", data[16:24]) == (plot.WIDTH_PX, plot.HEIGHT_PX)
    else:
        assert b"&lt;title&gt;" in data
    assert replay_plot._curves(found["ours"], 3) == (pytest.approx([1.15, 1.05, 1.05]), [1.2, 1.1, 1.1])
    assert replay_plot._curves(found["random"], 3)[0] == [inf, inf, 1.5]
