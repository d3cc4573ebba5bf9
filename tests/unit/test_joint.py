"""Forward and backward as one family: how configs join and split, one BlockMask, priors from either direction."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.config import Config, Param
from tuner.families import fa4_bwd_tiles, fa4_tiles, load
from tuner.families.base import Built, Room
from tuner.families.joint import Direction, Joint, JointKernel
from tuner.pattern import parse
from tuner.priors import MAX_OF_A_DIRECTION, Neighbour, added
from tuner.search import Search
from tuner.target import named
from tuner.trial import Measurement, Resources, Trial, TrialStatus
from tuner.workload import Workload

H200 = named("sm_90a")
W = Workload(
    batch=2, heads_q=16, heads_kv=4, seqlen_q=4096, seqlen_k=4096, head_dim=128, op="fwd+bwd", pattern=parse("causal")
)
DOCUMENTS = W.with_(pattern=parse("document(mean=512)"))


def sm90() -> Joint:
    family = load("fa4_joint_sm90")
    assert isinstance(family, Joint)
    return family


JOINT = sm90()


def forward(tile_m: int = 128, tile_n: int = 128, mask: str = "native", **changes: Param) -> Config:
    params: dict[str, Param] = {"mma_pv_is_rs": True, "intra_wg_overlap": True, "num_stages": 2, "q_blocks": 1}
    tiles: dict[str, Param] = {"mask": mask, "tile_m": tile_m, "tile_n": tile_n, "pack_gqa": True}
    return Config.make("fa4_fwd_sm90", 1, **params | tiles | changes)


def backward(m: int = 64, n: int = 128, **changes: Param) -> Config:
    first = next(c for c in load("fa4_bwd_sm90").first(W.with_(op="bwd")) if c["m_block_size"] == 64)
    return Config.make("fa4_bwd_sm90", 1, **dict(first.params) | {"m_block_size": m, "n_block_size": n} | changes)


def joined(mine: Config, theirs: Config, workload: Workload = W) -> Config:
    config = JOINT.join(mine, theirs, workload)
    assert config is not None
    return config


def test_a_joint_config_holds_both_and_gives_them_back() -> None:
    config = joined(forward(192), backward())
    assert config["fwd_tile_m"] == 192
    assert config["bwd_m_block_size"] == 64
    assert JOINT.split(config, W) == (forward(192), backward())
    assert config.label.startswith("fwd 192x128 overlap native rs stages=2 pack_gqa bwd 64x128 ")
    assert Config.from_dict(config.to_dict()) == config
    assert JOINT.split(JOINT.stock(W), W) == (Config.make("fa4_fwd_sm90", 1), Config.make("fa4_bwd_sm90", 1))
    extras = JOINT.extras(config, W)
    assert extras == {"fwd": forward(192).to_dict(), "bwd": backward().to_dict()}  # no BlockMask to build


def test_both_directions_read_one_block_mask() -> None:
    config = joined(forward(128, 128, "block"), backward(64, 128), DOCUMENTS)
    assert JOINT.extras(config, DOCUMENTS)["block_size"] == [128, 128]
    assert (config["fwd_q_blocks"], config["bwd_q_blocks"]) == (1, 2)  # 128 queries are one tile here and two there
    config = joined(forward(192, 128, "block"), backward(64, 128), DOCUMENTS)
    assert JOINT.extras(config, DOCUMENTS)["block_size"] == [192, 128]
    assert JOINT.join(forward(192, 96, "block"), backward(64, 128), DOCUMENTS) is None
    assert JOINT.join(forward(128, 128, "block"), backward(80, 128), DOCUMENTS) is None  # 640 queries
    assert JOINT.join(forward(192, 96), backward(64, 128), W) is not None  # causal needs no BlockMask


def test_a_block_mask_that_one_direction_cannot_read_is_refused_with_both_sizes() -> None:
    params = {f"fwd_{k}": v for k, v in forward(128, 96, "block").params}
    params |= {f"bwd_{k}": v for k, v in backward(64, 128).params}
    config = Config.make(JOINT.name, JOINT.version, **params)
    assert JOINT.feasible(config, DOCUMENTS, H200) == (
        "the forward wants a BlockMask of 128 queries by 96 keys and the backward one of 64 queries by 128 keys"
    )


def test_what_a_direction_refuses_is_refused_with_its_name() -> None:
    too_wide = joined(forward(192, 256), backward())
    assert JOINT.feasible(too_wide, W, H200).startswith("fwd: accumulators take")
    stages = joined(forward(), backward(num_stages_dO=3))
    assert JOINT.feasible(stages, W, H200).startswith("bwd: num_stages_dO is 3")
    assert JOINT.refuses(W.with_(op="fwd"), H200) == "computes fwd+bwd, not fwd"
    assert JOINT.refuses(W.with_(dtype="float32"), H200) == "computes bfloat16 and float16, not float32"
    strict = DOCUMENTS.with_(deterministic=True)
    assert "not deterministic with a BlockMask" in JOINT.refuses(strict, H200)
    wide = DOCUMENTS.with_(head_dim=192, head_dim_v=192)
    assert JOINT.refuses(wide, H200).endswith("the backward one of 128 queries by 96 keys, as FA4 ships them")
    assert JOINT.refuses(wide.with_(pattern=parse("causal")), H200) == ""


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("pattern", ["causal", "document(mean=512) + softcap(30)"])
def test_what_is_searched_is_feasible_and_few(head_dim: int, pattern: str) -> None:
    w = W.with_(head_dim=head_dim, head_dim_v=head_dim, pattern=parse(pattern))
    points, space = JOINT.points(w, H200), JOINT.space(w)
    assert 500 < len(points) < 10_000
    assert len(set(points)) == len(points)
    for config in points[::50]:
        assert JOINT.feasible(config, w, H200) == ""
        assert dict(config.params).keys() == space.keys()
        assert all(value in space[name] for name, value in config.params)
        mine, theirs = JOINT.split(config, w)
        if w.pattern.mask("document"):
            one, other = fa4_tiles.block_size(mine), fa4_bwd_tiles.block_size(theirs, w.with_(op="bwd"))
            assert one == other
            assert one[1] == mine["tile_n"] == theirs["n_block_size"]
        else:
            assert mine["mask"] == "native"
    first = JOINT.first(w)
    assert set(first) <= set(points)
    halves = [JOINT.split(c, w) for c in first]
    assert len({h[0] for h in halves}) > 2
    assert len({h[1] for h in halves}) > 2


def measured(config: Config, time_us: float, default_us: float) -> Trial:
    ratio = default_us / time_us
    return Trial(config, TrialStatus.OK, measurement=Measurement("graph", (time_us,), (default_us,), ratio, time_us))


def study(op: str, default_us: float, *trials: Trial, workload: Workload = W) -> Neighbour:
    family = "fa4_fwd_sm90" if op == "fwd" else "fa4_bwd_sm90"
    stock = measured(Config.make(family, 1), default_us, default_us)
    return Neighbour(workload.with_(op=op), H200, (stock, *trials))


def test_a_study_of_each_direction_counts_as_one_of_both() -> None:
    mine = study("fwd", 100.0, measured(forward(192), 90.0, 100.0), Trial(forward(64), TrialStatus.INCORRECT, "wrong"))
    theirs = study("bwd", 250.0, measured(backward(), 230.0, 250.0))
    sum_ = added(mine, theirs, JOINT.join)
    assert sum_.workload == W
    by_key = {t.config.key: t for t in sum_.trials}
    assert len(by_key) == len(sum_.trials) == 3
    stock = by_key[JOINT.stock(W).key].measurement
    assert stock is not None
    assert (stock.median_us, stock.ratio) == (350.0, 1.0)
    pair = by_key[joined(forward(192), backward()).key].measurement
    assert pair is not None
    assert (pair.median_us, pair.default_us, pair.ratio) == (320.0, (350.0,), 350 / 320)
    failed = by_key[joined(forward(64), backward()).key]
    assert (failed.status, failed.error, failed.measurement) == (TrialStatus.INCORRECT, "wrong", None)


def test_of_large_studies_the_fastest_are_added() -> None:
    tiles = list(itertools.product((64, 128, 192), range(64, 257, 16)))
    mine = study("fwd", 100.0, *(measured(forward(m, n), 100.0 + m + n, 100.0) for m, n in tiles))
    others = [(m, n) for m in (64, 80, 96, 112, 128) for n in (64, 80, 96, 112, 128)]
    theirs = study("bwd", 250.0, *(measured(backward(m, n), 250.0 + m + n, 250.0) for m, n in others))
    found = [t for t in added(mine, theirs, JOINT.join).trials if not t.config.is_stock]
    assert len(found) == MAX_OF_A_DIRECTION**2
    slowest = max(m + n for m, n in sorted(tiles, key=sum)[:MAX_OF_A_DIRECTION])
    assert max(int(t.config["fwd_tile_m"]) + int(t.config["fwd_tile_n"]) for t in found) == slowest


def test_configs_of_an_older_version_of_a_direction_do_not_join() -> None:
    older = Config("fa4_fwd_sm90", 0, forward().params)
    assert JOINT.join(older, backward(), W) is None
    assert JOINT.join(backward(), forward(), W) is None
    assert JOINT.join(JOINT.forward.family.stock(W), backward(), W) is None  # one direction as shipped is no point


def landscape(config: Config) -> float:
    """Microseconds of both directions of a config: the best tiles are 192x96 forward and 64x96 backward."""
    far = abs(int(config["fwd_tile_m"]) - 192) / 64 + abs(int(config["fwd_tile_n"]) - 96) / 16
    back = abs(int(config["bwd_m_block_size"]) - 64) / 16 + abs(int(config["bwd_n_block_size"]) - 96) / 16
    slow = 4.0 * (not config["fwd_mma_pv_is_rs"]) + 9.0 * (not config["bwd_dKV_swapAB"])
    return 90.0 + 4 * far + 230.0 + 9 * back + slow


def test_a_search_after_both_directions_begins_with_the_best_of_each() -> None:
    mine = [c for c in JOINT.forward.points(W, H200)][::4]
    theirs = [c for c in JOINT.backward.points(W, H200)][::2]

    def joint_us(f: Config, b: Config) -> float:
        return landscape(joined(f, b))

    fs = study("fwd", 100.0, *(measured(f, joint_us(f, theirs[0]) - 240.0, 100.0) for f in mine))
    bs = study("bwd", 250.0, *(measured(b, joint_us(mine[0], b) - 90.0, 250.0) for b in theirs))
    neighbour = added(fs, bs, JOINT.join)
    best = min(map(landscape, JOINT.points(W, H200)))
    search = Search(JOINT, W, H200, budget=48, seed=0, priors=[neighbour], margin=0.02)
    search.tell(measured(JOINT.stock(W), 350.0, 350.0))
    informed = search.ask(3)
    assert min(landscape(c) for c in informed) < 1.02 * best
    plain = Search(JOINT, W, H200, budget=48, seed=0, margin=0.02)
    assert plain.ask(3) == list(JOINT.first(W)[:3])


class Half:
    """A family whose kernels write down what they are called with."""

    version = 1

    def __init__(self, name: str, resources: Resources) -> None:
        self.name, self._resources = name, resources

    def compile(self, config: Config, workload: Workload, room: Room) -> Built:
        return Built(self._resources, (room.cache_dir / workload.op, room.cache_dir / "shared"))


def test_objects_of_both_directions_travel_and_the_larger_figures_are_told(tmp_path: Path) -> None:
    halves = (Half("f", Resources(168, 0, 100, 4000)), Half("b", Resources(160, 8, None, 9000)))
    family = Joint("j", "sm_90a", *(Direction(n, h, frozenset()) for n, h in zip(("fwd", "bwd"), halves, strict=True)))  # type: ignore[arg-type]
    built = family.compile(Config.make("j", 1, fwd_a=1, bwd_b=2), W, Room(H200, tmp_path))
    assert built.resources == Resources(168, 8, 100, 13_000, None)
    assert built.files == (tmp_path / "fwd", tmp_path / "shared", tmp_path / "bwd")


def test_the_backward_reads_what_its_own_forward_wrote() -> None:
    calls: list[str] = []

    def run_forward(inputs: Any) -> str:
        calls.append("fwd")
        inputs.out = f"out of {inputs.q}"
        return str(inputs.out)

    def run_backward(inputs: Any) -> tuple[str, ...]:
        calls.append("bwd")
        return tuple(f"{name} of {inputs.out}" for name in ("dq", "dk", "dv"))

    kernel, inputs = JointKernel(run_forward, run_backward), SimpleNamespace(q="q", out="poison")
    assert kernel(inputs) == ("out of q", "dq of out of q", "dk of out of q", "dv of out of q")
    assert calls == ["fwd", "bwd"]
    calls.clear()
    fresh = SimpleNamespace(q="r", out="poison")
    kernel.parts["bwd"].prepare(fresh)  # type: ignore[attr-defined]
    assert kernel.parts["bwd"](fresh)[0] == "dq of out of r"
    assert kernel.parts["fwd"](fresh) == "out of r"
    assert calls == ["fwd", "bwd", "fwd"]


def test_flops_and_label_of_both_directions() -> None:
    assert W.flops() == 3.5 * W.with_(op="fwd").flops() == W.with_(op="fwd").flops() + W.with_(op="bwd").flops()
    assert W.label == "causal b2 h16/4 s4096 d128 fwd+bwd"
    assert Workload.from_dict(W.to_dict()) == W
    assert W.key.startswith("w1|fwd+bwd|")
