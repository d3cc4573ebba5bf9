"""Configs, trials and answers: keys that tell them apart, and round trips through JSON."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.config import Config
from tuner.errors import ConfigError
from tuner.trial import Finalist, Measurement, Resources, Trial, TrialStatus, TunedConfig, Verdict, Verification

_NAMES = st.sampled_from(["tile_m", "tile_n", "mma_pv_is_rs", "layout"])
_WORDS = st.text("ab1-._", min_size=1, max_size=3).filter(lambda w: not w.lstrip("-").isdecimal())
_PARAMS = st.dictionaries(_NAMES, st.integers(-2, 200) | st.booleans() | _WORDS)
_CONFIGS = st.builds(
    lambda f, v, p: Config.make(f, v, **p), st.sampled_from(["fake", "fa4_fwd_sm90"]), st.integers(1, 12), _PARAMS
)
_TIMES = st.floats(0.01, 1e6)
_SAMPLES = st.lists(_TIMES, max_size=4).map(tuple)
_COUNTS = st.none() | st.integers(0, 1 << 20)
_RESOURCES = st.builds(Resources, _COUNTS, _COUNTS, _COUNTS, _COUNTS)
_VERIFICATIONS = st.builds(
    Verification, _TIMES, _TIMES, _TIMES, _TIMES, st.integers(1, 9), st.integers(0), st.booleans(), st.text()
)
_MEASUREMENTS = st.builds(Measurement, st.sampled_from(["graph", "eager"]), _SAMPLES, _SAMPLES, _TIMES, _TIMES)
_TRIALS = st.builds(
    Trial,
    config=_CONFIGS,
    status=st.sampled_from(TrialStatus),
    error=st.text(),
    compile_s=st.none() | _TIMES,
    run_s=st.none() | _TIMES,
    resources=_RESOURCES,
    verification=st.none() | _VERIFICATIONS,
    measurement=st.none() | _MEASUREMENTS,
    notes=st.lists(st.text(), max_size=2).map(tuple),
)
_FINALISTS = st.builds(Finalist, _CONFIGS, _TIMES, _TIMES, _TIMES, _TIMES, _SAMPLES, st.booleans())
_ANSWERS = st.builds(
    TunedConfig,
    config=_CONFIGS,
    default=_CONFIGS,
    verdict=st.sampled_from(Verdict),
    speedup=_TIMES,
    low=_TIMES,
    high=_TIMES,
    confidence=st.floats(0.5, 0.99),
    margin=st.floats(0, 0.1),
    ties=st.lists(_CONFIGS, max_size=3).map(tuple),
    finalists=st.lists(_FINALISTS, max_size=3).map(tuple),
    verification=st.none() | _VERIFICATIONS,
    reason=st.text(),
    rounds=st.integers(0, 99),
    rounds_dropped=st.integers(0, 99),
    extras=st.dictionaries(st.text(), st.integers() | st.text() | st.lists(st.integers(), max_size=2), max_size=3),
)


def through_json(value: dict[str, Any]) -> Any:
    return json.loads(json.dumps(value))


@given(_CONFIGS)
def test_config_round_trip(config: Config) -> None:
    back = Config.from_dict(through_json(config.to_dict()))
    assert back == config
    assert back.key == config.key


@given(_TRIALS)
def test_trial_round_trip(trial: Trial) -> None:
    assert Trial.from_dict(through_json(trial.to_dict())) == trial


@given(_ANSWERS)
def test_tuned_config_round_trip(tuned: TunedConfig) -> None:
    assert TunedConfig.from_dict(through_json(tuned.to_dict())) == tuned


@given(st.lists(_CONFIGS, min_size=2, max_size=6))
def test_config_keys_are_equal_exactly_for_equal_configs(configs: list[Config]) -> None:
    for a, b in itertools.combinations(configs, 2):
        assert (a.key == b.key) == (a == b)


def test_config_key_does_not_depend_on_the_order_of_parameters() -> None:
    a = Config.make("fake", 2, tile_n=96, tile_m=128, mma_pv_is_rs=True)
    b = Config.make("fake", 2, mma_pv_is_rs=True, tile_m=128, tile_n=96)
    assert a == b
    assert a.key == b.key == "fake/2:mma_pv_is_rs=1,tile_m=128,tile_n=96"
    assert a.label == "128x96 rs"


def test_a_config_without_parameters_is_stock() -> None:
    stock, tuned = Config.make("fake", 1), Config.make("fake", 1, tile_m=64)
    assert (stock.is_stock, stock.label, stock.key) == (True, "stock", "fake/1:")
    assert (tuned.is_stock, tuned["tile_m"], tuned.get("tile_n", 7)) == (False, 64, 7)


@pytest.mark.parametrize(
    "value",
    [1.5, None, "", "two words", "a,b", "a=b", "128", "-3", [1]],
)
def test_a_value_without_canonical_text_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        Config.make("fake", 1, tile_m=value)
    assert f"tile_m={value!r}" in str(error.value)


def test_a_parameter_name_cannot_imitate_another_parameter() -> None:
    with pytest.raises(ConfigError, match="a=1,b"):
        Config.from_dict({"family": "fake", "version": 1, "params": {"a=1,b": 2}})


@pytest.mark.parametrize("value", [{}, {"family": "fake", "version": 1}, {"family": "f", "version": 1, "params": 3}])
def test_what_is_not_a_config_is_shown(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_dict(value)
    assert repr(value) in str(error.value)


def test_trial_ratio_is_the_measurement_s() -> None:
    config = Config.make("fake", 1)
    measured = Measurement("graph", (1.0,), (1.5,), ratio=1.5, median_us=1.0)
    assert Trial(config, TrialStatus.OK, measurement=measured).ratio == 1.5
    assert Trial(config, TrialStatus.RUN_CRASH).ratio is None


def test_a_finalist_is_found_by_its_config() -> None:
    a, b, c = (Config.make("fake", 1, tile_m=m) for m in (64, 128, 192))
    finals = tuple(Finalist(x, 1.0, s, s, s, (1.0,)) for x, s in ((a, 1.1), (b, 1.2)))
    tuned = TunedConfig(b, a, Verdict.PUBLISHED, 1.2, 1.1, 1.3, 0.95, 0.02, (), finals, None, "faster", 20, 0)
    found = tuned.finalist(b)
    assert found is not None and found.speedup == 1.2
    assert tuned.finalist(c) is None
