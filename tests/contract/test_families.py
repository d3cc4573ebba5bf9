"""What every kernel family promises, asked of all of them: ``tuner.families.base`` is the contract."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tuner import families
from tuner.config import Config
from tuner.errors import ConfigError
from tuner.families import INSTRUMENTS, ONLY_NAMED, REGISTRY
from tuner.families.base import Enumerates, KernelFamily, Room
from tuner.families.joint import Joint
from tuner.pattern import parse
from tuner.target import Target, named
from tuner.workload import Workload

ROOT = Path(__file__).parents[2]
ALL = list(REGISTRY | INSTRUMENTS)

TARGETS = [
    named("sm_90a"),
    named("sm_100a"),
    named("cpu"),
    named("fake"),
    Target("NVIDIA A100-SXM4-80GB", "sm_80", 108, 400),
    Target("NVIDIA L4", "sm_89", 58, 72),
    Target("NVIDIA GeForce RTX 5090", "sm_120a", 170),
    Target("Tesla T4", "sm_75", 40),
]
PATTERNS = [
    "full",
    "causal",
    "sliding_window(200)",
    "prefix_lm(100)",
    "document(mean=128)",
    "causal & document(mean=128)",
    "causal + softcap(30)",
    "full + alibi",
    "document(mean=128) + softcap(20) + alibi",
]
SHAPES: list[dict[str, Any]] = [
    {},
    {"dtype": "float32"},
    {"dtype": "float16", "head_dim": 128, "heads_kv": 1},
    {"head_dim": 192, "head_dim_v": 128, "heads_kv": 2},
    {"head_dim": 256},
    {"head_dim": 512},
    {"head_dim": 8, "deterministic": True},
    {"op": "bwd"},
    {"op": "bwd", "head_dim": 128, "heads_kv": 1, "deterministic": True},
    {"op": "bwd", "head_dim": 256, "head_dim_v": 256},
    {"op": "fwd+bwd"},
    {"op": "fwd+bwd", "head_dim": 128, "heads_kv": 1, "deterministic": True},
    {"op": "fwd+bwd", "head_dim": 256, "head_dim_v": 256},
    {"layout": "varlen", "batch": 3, "lengths_q": (77, 0, 512), "lengths_k": (77, 0, 512)},
    {"layout": "varlen", "batch": 2, "lengths_q": (9, 512), "lengths_k": (9, 512), "op": "bwd", "heads_kv": 1},
    {"layout": "varlen", "batch": 64, "seqlen_q": 1, "lengths_q": (1,) * 64, "lengths_k": (512,) + (60,) * 63},
    {"layout": "varlen", "batch": 2, "lengths_q": (9, 512), "lengths_k": (9, 512), "op": "fwd+bwd"},
    {"seqlen_q": 1, "batch": 64, "heads_kv": 1},
]
BASE: dict[str, Any] = {"batch": 2, "heads_q": 4, "heads_kv": 4, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64}


def _workloads() -> Iterator[Workload]:
    for pattern, shape in itertools.product(PATTERNS, SHAPES):
        if "document" in pattern and "seqlen_q" in shape:  # packed documents are as long as the keys
            continue
        if not ("layout" in shape and ("document" in pattern or "prefix_lm" in pattern)):  # refused by Workload
            yield Workload(**{**BASE, **shape}, pattern=parse(pattern))


GRID = list(itertools.product(_workloads(), TARGETS))


@pytest.fixture(params=ALL)
def family(request: pytest.FixtureRequest) -> KernelFamily:
    return families.load(request.param)


@cache
def accepted(name: str) -> list[tuple[Workload, Target]]:
    return [(w, t) for w, t in GRID if not families.load(name).refuses(w, t)]


MOST_POINTS = 4000  # of one space that are all looked at; of a larger one, as many drawn


@cache
def points(name: str, workload: Workload) -> list[Config]:
    """Return the points of the family's space; building them proves that each has a canonical form."""
    family = families.load(name)
    space = family.space(workload)
    if not space:
        return []
    if isinstance(family, Enumerates):
        target = next(t for w, t in accepted(name) if w == workload)
        found = list(family.points(workload, target))
        return found[:: len(found) // MOST_POINTS + 1]
    if math.prod(map(len, space.values())) <= MOST_POINTS:
        values = list(itertools.product(*space.values()))
    else:
        rng = random.Random(workload.key)
        values = list(dict.fromkeys(tuple(rng.choice(v) for v in space.values()) for _ in range(MOST_POINTS)))
    return [Config.make(family.name, family.version, **dict(zip(space, v, strict=True))) for v in values]


def test_names_and_versions_agree_with_the_registry() -> None:
    assert set(REGISTRY) & set(INSTRUMENTS) == set()
    for name in ALL:
        family = families.load(name)
        assert family.name == name
        assert family.version >= 1
        assert families.load(name) is family
    with pytest.raises(ConfigError, match=r"'fa5'.*flex_cpu"):
        families.load("fa5")


def test_it_says_where_it_compiles(family: KernelFamily) -> None:
    assert family.compile_in in ("cpu", "device", "nowhere")


@pytest.mark.parametrize("name", ALL)
def test_deciding_imports_nothing_heavy(name: str) -> None:
    code = f"""
import sys
from tuner import families
from tuner.pattern import parse
from tuner.target import named
from tuner.workload import Workload

family = families.load({name!r})
w = Workload(batch=1, heads_q=4, heads_kv=4, seqlen_q=512, seqlen_k=512, head_dim=64, pattern=parse("causal"))
for arch in ("sm_90a", "cpu", "fake"):
    family.refuses(w, named(arch))
    for config in (family.stock(w), *family.first(w)):
        family.feasible(config, w, named(arch)), family.extras(config, w)
family.space(w)
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {module.partition(".")[0] for module in done.stdout.split()}
    assert loaded - {"tuner", "__main__"} <= sys.stdlib_module_names | {"sitecustomize"} | site_hooks()


@cache
def site_hooks() -> frozenset[str]:
    """Return what this environment loads into every Python by itself, as editable installs do."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    return frozenset(module.partition(".")[0] for module in done.stdout.split())


def test_it_refuses_with_a_reason_or_accepts_and_never_raises(family: KernelFamily) -> None:
    answers = [family.refuses(w, t) for w, t in GRID]
    assert all(reason == reason.strip() and "\n" not in reason for reason in answers)
    assert 0 < answers.count("") < len(GRID)  # something to do, and something left to others


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
def test_every_family_is_either_able_or_says_why_not(target: Target) -> None:
    for workload in _workloads():
        able, refused = families.able(workload, target)
        names = [f.name for f in able]
        assert sorted([*names, *refused]) == sorted(set(REGISTRY) - set(ONLY_NAMED))  # and no instrument
        assert names == [n for n in REGISTRY if n in names]
        assert all(refused.values())


def test_an_instrument_competes_if_named() -> None:
    able, _ = families.able(Workload(**BASE), named("sm_90a"), ["decoy"])
    assert [f.name for f in able] == ["decoy"]


@pytest.mark.parametrize(
    ("arch", "pattern", "dtype", "default"),
    [
        ("sm_90a", "causal", "bfloat16", "flex_flash_stock"),
        ("sm_100a", "document(mean=128) + alibi", "float16", "flex_flash_sm100_stock"),
        ("sm_90a", "causal", "float32", "flex_triton_stock"),
        ("sm_80", "sliding_window(200)", "bfloat16", "flex_triton_stock"),
        ("cpu", "causal", "float32", "flex_cpu"),
        ("fake", "full", "bfloat16", "fake"),
    ],
)
def test_the_default_is_what_pytorch_ships(arch: str, pattern: str, dtype: str, default: str) -> None:
    target = next(t for t in TARGETS if t.arch == arch)
    able, _ = families.able(Workload(**BASE, dtype=dtype, pattern=parse(pattern)), target)
    assert able[0].name == default


@pytest.mark.parametrize(
    ("arch", "pattern", "op", "able"),
    [
        ("sm_90a", "sliding_window(200)", "fwd", ["torch_varlen", "fa4_fwd_sm90"]),
        ("sm_90a", "causal", "bwd", ["torch_varlen", "fa4_bwd_sm90"]),
        ("sm_90a", "causal + softcap(20) + alibi", "fwd", ["fa4_fwd_sm90"]),  # PyTorch ships nothing for it
        ("sm_100a", "causal", "fwd", ["torch_varlen"]),
        ("sm_80", "full", "bwd", ["torch_varlen"]),
        ("cpu", "causal", "bwd", ["sdpa_cpu"]),
        ("fake", "causal", "fwd", ["fake"]),
    ],
)
def test_who_computes_packed_sequences(arch: str, pattern: str, op: str, able: list[str]) -> None:
    target = next(t for t in TARGETS if t.arch == arch)
    workload = Workload(**BASE, pattern=parse(pattern), op=op).with_(lengths_q=[512, 9], lengths_k=[512, 9])
    found, refused = families.able(workload, target)
    assert [f.name for f in found] == able
    assert all("varlen" in refused[n] for n in ("cudnn", "flex_triton") if arch in ("sm_80", "sm_90a", "sm_100a"))


def test_packed_sequences_take_no_block_mask() -> None:
    workload = Workload(**BASE, pattern=parse("causal")).with_(lengths_q=[512, 9], lengths_k=[512, 9])
    family = families.load("fa4_fwd_sm90")
    assert family.space(workload)["mask"] == ("native",)
    assert family.space(workload.with_(layout="dense"))["mask"] == ("native", "block")
    config = Config.make("fa4_fwd_sm90", 1, **{**dict(family.first(workload)[0].params), "mask": "block"})
    assert "a BlockMask is of sequences of one length" in family.feasible(config, workload, named("sm_90a"))


def test_stock_is_one_config_of_the_family_that_always_runs(family: KernelFamily) -> None:
    for workload, target in accepted(family.name):
        stock = family.stock(workload)
        assert (stock.family, stock.version, stock.is_stock) == (family.name, family.version, True)
        assert family.feasible(stock, workload, target) == ""


def test_every_point_of_the_space_is_a_config_with_a_key_of_its_own(family: KernelFamily) -> None:
    for workload in {w: None for w, _ in accepted(family.name)}:
        configs = points(family.name, workload)
        assert len({c.key for c in configs}) == len({c.params for c in configs}) == len(configs)
        assert [
            c for c in configs[:: len(configs) // 50 + 1] if Config.from_dict(json.loads(json.dumps(c.to_dict()))) != c
        ] == []
        assert not any(c.is_stock for c in configs)


def test_feasible_answers_for_every_point_and_lets_some_through(family: KernelFamily) -> None:
    for workload, target in accepted(family.name):
        configs = points(family.name, workload)
        reasons = [family.feasible(c, workload, target) for c in configs]
        assert all(isinstance(reason, str) for reason in reasons)
        if configs and workload.seqlen_q > 1:  # one row is shorter than any tile
            assert "" in reasons, f"{workload.label} on {target.arch}: {set(reasons)}"


def test_what_to_try_first_lies_in_the_space(family: KernelFamily) -> None:
    for workload in {w: None for w, _ in accepted(family.name)}:
        first, space = family.first(workload), family.space(workload)
        for config in first:
            assert set(dict(config.params)) == set(space)
            assert all(value in space[name] for name, value in config.params)
        assert len(set(first)) == len(first)


def runnable(family: KernelFamily) -> Iterator[tuple[Workload, Config]]:
    for workload, target in accepted(family.name):
        yield workload, family.stock(workload)
        for config in points(family.name, workload)[::7]:
            if not family.feasible(config, workload, target):
                yield workload, config


def test_extras_are_plain_json_and_size_a_block_mask_only_where_something_is_masked(family: KernelFamily) -> None:
    for workload, config in runnable(family):
        extras = family.extras(config, workload)
        assert json.loads(json.dumps(extras)) == extras
        if "block_size" in extras:
            assert workload.pattern.masks
            q, kv = extras["block_size"]
            assert (type(q), type(kv)) == (int, int)
            assert min(q, kv) >= 1


def test_block_sizes_follow_the_tiles() -> None:
    """FA4 wants kv equal to tile_n and q a multiple of tile_m; FlexAttention's blocks are its tiles."""
    seen = set()
    for workload, config in runnable(families.load("fa4_fwd_sm90")):
        extras = families.load("fa4_fwd_sm90").extras(config, workload)
        if config.get("mask") == "block":
            rows = int(config["tile_m"]) * int(config["q_blocks"])
            assert extras["block_size"] == [rows, config["tile_n"]]
        elif not config.is_stock:
            assert extras == {}
        seen.add(config.get("mask", "stock"))
    assert seen == {"block", "native", "stock"}
    for workload, config in runnable(families.load("flex_cpu")):
        wanted = [config.get("q_block", 128), config.get("kv_block", 128)]
        extras = families.load("flex_cpu").extras(config, workload)
        assert extras == ({"block_size": wanted} if workload.pattern.masks else {})


@pytest.mark.parametrize("name", ["fa4_joint_sm90", "fa4_joint_sm100"])
def test_one_block_mask_serves_both_directions(name: str) -> None:
    """A block's keys are one tile of either direction (whole ones on Blackwell), its queries whole tiles of both."""
    family, seen = families.load(name), set()
    assert isinstance(family, Joint)
    for workload, config in runnable(family):
        extras = family.extras(config, workload)
        forward, backward = (Config.from_dict(extras[direction]) for direction in ("fwd", "bwd"))
        assert (forward, backward) == family.split(config, workload)
        assert family.join(forward, backward, workload) == config
        seen.add("block_size" in extras)
        if "block_size" in extras and not config.is_stock:
            q, kv = extras["block_size"]
            if name == "fa4_joint_sm90":
                assert kv == forward["tile_n"] == backward["n_block_size"]
                assert q % int(forward["tile_m"]) == q % int(backward["m_block_size"]) == 0
            else:
                assert kv % int(forward["tile_n"]) == kv % int(backward["tile_n"]) == 0
                assert q % (128 * int(forward["q_stage"])) == 0
                assert (forward["mask"], backward["mask"]) == ("block", "block")
    assert seen == {True, False}


@pytest.mark.parametrize("name", ["fa4_fwd_sm100", "fa4_bwd_sm100"])
def test_block_sizes_follow_the_tiles_of_blackwell(name: str) -> None:
    """Whole tiles of Q, as many as a thread block has, and whole tiles of K/V: FA4 refuses anything else."""
    seen = set()
    for workload, config in runnable(families.load(name)):
        extras = families.load(name).extras(config, workload)
        if config.get("mask") in ("block", "partial"):
            q, kv = extras["block_size"]
            assert q == 128 * int(config.get("q_stage", 1)) * int(config["q_blocks"])
            assert kv == int(config["tile_n"]) * int(config["kv_blocks"])
            assert extras.get("full_blocks", True) is (config["mask"] == "block")
        elif not config.is_stock:
            assert extras == {}
        elif extras:
            assert extras["block_size"][0] % 256 == extras["block_size"][1] % 128 == 0
        seen.add(config.get("mask", "stock"))
    assert seen - {"partial"} == {"block", "native", "stock"}
    assert ("partial" in seen) is (name == "fa4_bwd_sm100")


def test_blocks_of_triton_divide_the_block_mask() -> None:
    for workload, config in runnable(families.load("flex_triton")):
        extras = families.load("flex_triton").extras(config, workload)
        options = extras["kernel_options"]
        assert options["BACKEND"] == "TRITON"
        if config.is_stock:
            assert options == {"BACKEND": "TRITON"}
            assert extras.get("block_size", [128, 128]) == [128, 128]
        elif workload.pattern.masks:
            tiles = {name.partition("_BLOCK_")[2]: size for name, size in options.items() if "_BLOCK_" in name}
            assert set(tiles) == ({"M", "N"} if workload.op == "fwd" else {"M1", "N1", "M2", "N2"})
            assert all(name.startswith(f"{workload.op}_") for name in options if name != "BACKEND")
            for name, size in tiles.items():
                assert extras["block_size"][name[0] == "N"] % size == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120a"])
@pytest.mark.parametrize("pattern", ["full", "causal", "document(mean=128) + softcap(20) + alibi"])
def test_on_neither_hopper_nor_blackwell_triton_is_what_can_be_tuned(arch: str, pattern: str) -> None:
    target = next(t for t in TARGETS if t.arch == arch)
    workload = Workload(**BASE, pattern=parse(pattern))
    able, refused = families.able(workload, target)
    assert [f.name for f in able if f.space(workload)] == ["flex_triton"]
    assert all(f"needs sm_{n}" in refused[f"fa4_fwd_sm{n}"] for n in (90, 100))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_where_fa4_can_be_tuned_triton_competes_only_if_named(arch: str) -> None:
    """Its configs compile on the GPU, one by one: a study would take minutes longer to say what is known."""
    fa4 = f"fa4_fwd_{arch.rstrip('a').replace('_', '')}"
    able, refused = families.able(Workload(**BASE), named(arch))
    assert [f.name for f in able if f.space(Workload(**BASE))] == [fa4]
    assert refused["flex_triton"] == f"competes only if named where {fa4} can"
    able, _ = families.able(Workload(**BASE), named(arch), [fa4, "flex_triton"])
    assert [f.name for f in able] == [fa4, "flex_triton"]
    able, _ = families.able(Workload(**BASE, dtype="float32"), named(arch))
    assert "flex_triton" in [f.name for f in able]


@pytest.mark.parametrize("name", [n for n in ALL if families.load(n).compile_in == "nowhere"])
def test_what_is_compiled_nowhere_gives_no_files(name: str, tmp_path: Path) -> None:
    family = families.load(name)
    for workload, target in accepted(family.name)[:3]:
        assert family.compile(family.stock(workload), workload, Room(target, tmp_path)).files == ()
    assert list(tmp_path.iterdir()) == []


def test_its_lab_can_be_imported(family: KernelFamily) -> None:
    module, _, attribute = family.lab.partition(":")
    if module == "tuner.lab_torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    lab = getattr(importlib.import_module(module), attribute)
    methods = ("draw", "reference", "build", "run", "timer", "conditions", "healthy", "faults")
    assert [m for m in methods if not callable(getattr(lab, m, None))] == []
