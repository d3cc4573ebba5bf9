"""Who is a neighbour, how near, and what its trials say."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from tuner import priors
from tuner.config import Config
from tuner.pattern import parse
from tuner.priors import Neighbour, likeness, log_gains, nearest
from tuner.target import Target, named
from tuner.trial import Measurement, Trial, TrialStatus
from tuner.workload import Workload

H200 = named("sm_90a")
H100 = Target("NVIDIA H100", "sm_90a", 132)
W = Workload(batch=2, heads_q=16, heads_kv=16, seqlen_q=8192, seqlen_k=8192, head_dim=128, pattern=parse("causal"))


def alike(other: Workload, there: Target = H200) -> float:
    return likeness(W, H200, other, there)


def test_likeness_by_hand() -> None:
    assert alike(W) == 1.0
    assert alike(W.with_(batch=8)) == pytest.approx(math.exp(-0.05 * 2))
    assert alike(W.with_(seqlen_q=1024, seqlen_k=1024, batch=16)) == pytest.approx(math.exp(-0.05 * 9))
    assert alike(W.with_(head_dim=64, head_dim_v=64)) == pytest.approx(math.exp(-0.6 - 0.3))
    assert alike(W.with_(pattern=parse("full"))) == pytest.approx(math.exp(-0.3))
    assert alike(W.with_(pattern=parse("sliding_window(64) + softcap(30)"))) == pytest.approx(math.exp(-0.9))
    assert alike(W.with_(heads_kv=4)) == pytest.approx(math.exp(-0.3 * 2))
    assert alike(W, H100) == pytest.approx(math.exp(-0.3))
    capped, other = (replace(H200, power_cap_w=watts) for watts in (700, 500))
    assert likeness(W, capped, W, other) == pytest.approx(math.exp(-0.05))
    assert likeness(W, capped, W, H200) == 1.0  # its cap is not known


@pytest.mark.parametrize(
    "other",
    [W.with_(op="bwd"), W.with_(deterministic=True)],
)
def test_what_says_nothing(other: Workload) -> None:
    assert alike(other) == 0.0
    assert likeness(W, H200, W, named("sm_100a")) == 0.0


def test_it_is_symmetric_and_a_windows_size_counts_only_between_windows() -> None:
    workloads = [W.with_(pattern=parse(p)) for p in ("causal", "full", "sliding_window(64)", "sliding_window(4096)")]
    workloads += [W.with_(head_dim=d, head_dim_v=64) for d in (64, 96, 192)]
    for a, b in itertools.product(workloads, repeat=2):
        assert likeness(a, H200, b, H100) == pytest.approx(likeness(b, H100, a, H200))
    assert likeness(workloads[2], H200, workloads[3], H200) == pytest.approx(math.exp(-0.05 * 6))
    assert likeness(workloads[0], H200, workloads[2], H200) == likeness(workloads[0], H200, workloads[3], H200)


def test_the_nearest_come_first_whatever_the_order_and_remote_ones_not_at_all() -> None:
    found = [Neighbour(W.with_(batch=2**i), H200, ()) for i in range(16)]
    found += [Neighbour(W.with_(head_dim=8, head_dim_v=8), H200, ()), Neighbour(W.with_(op="bwd"), H200, ())]
    chosen = nearest(W, H200, found)
    assert chosen == nearest(W, H200, found[::-1])
    assert len(chosen) == priors.MAX_NEIGHBOURS
    assert [n.workload.batch for n in chosen[:5]] == [2, 1, 4, 8, 16]
    assert all(n.workload.head_dim == 128 and n.workload.op == "fwd" for n in chosen)


def trial(config: Config, ratio: float | None) -> Trial:
    if ratio is None:
        return Trial(config, TrialStatus.RUN_CRASH, "died")
    return Trial(config, TrialStatus.OK, measurement=Measurement("graph", (1.0,), (ratio,), ratio, 1.0))


def test_gains_are_relative_to_the_familys_own_stock() -> None:
    one, two = Config.make("fam", 1, a=1), Config.make("fam", 1, a=2)
    trials = [
        trial(Config.make("rival", 1), 1.6),
        trial(one, 1.5),
        trial(two, None),
        trial(Config.make("fam", 2, a=1), 9.0),
        trial(Config.make("fam", 1), 1.25),
    ]
    assert log_gains(trials, "fam", 1) == [(trials[1], pytest.approx(math.log(1.2))), (trials[2], None)]
    kept = Trial(two, TrialStatus.INCORRECT, "NaN", measurement=trial(two, 3.0).measurement)
    odd = [kept, *(trial(two, r) for r in (math.nan, math.inf, 0.0, -1.0))]
    assert [g for _, g in log_gains(odd, "fam", 1)] == [None] * 5
    assert log_gains(trials[:3], "fam", 1)[0][1] == pytest.approx(math.log(1.5))  # its stock was not measured
