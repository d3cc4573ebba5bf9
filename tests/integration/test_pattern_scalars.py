"""A pattern's numbers are inputs of FA4's kernels: other numbers find the same object, and its code holds none.

Two numbers compiled apart must give the same bytes. That the second is found where the first was compiled
would also hold if the first number were compiled in, and then the second would be computed wrongly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tuner.compile import child_env
from tuner.families import pattern_torch
from tuner.pattern import parse
from tuner.target import named, version_of
from tuner.workload import Workload

pytestmark = [
    pytest.mark.skipif(not version_of("flash-attn-4"), reason="flash-attn-4 is not installed"),
    pytest.mark.slow,
]

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
from tuner.families import fa4_cache, load
from tuner.families.base import Room
from tuner.target import named
from tuner.workload import Workload

room, family, answers = Room(named(sys.argv[2]), Path(sys.argv[1])), load(sys.argv[3]), []
for values, stock in json.loads(sys.argv[4]):
    workload, before = Workload.from_dict(values), len(fa4_cache.compiled_here)
    tuned = [c for c in family.first(workload) if not family.feasible(c, workload, room.target)]
    built = family.compile(family.stock(workload) if stock else tuned[-1], workload, room)
    answers.append([str(built.files[0]), len(fa4_cache.compiled_here) - before])
print(json.dumps(answers))
"""


def workload(pattern: str, family: str = "fa4_fwd", seqlen_k: int = 2048) -> Workload:
    op = "bwd" if "bwd" in family else "fwd"
    return Workload(
        batch=2, heads_q=8, heads_kv=8, seqlen_q=2048, seqlen_k=seqlen_k, head_dim=128, op=op, pattern=parse(pattern)
    )


def compiled(folder: Path, arch: str, family: str, *workloads: Workload, stock: bool = False) -> list[list[Any]]:
    """Return the kernel's object and the number of compiles of each workload, compiled one after the other."""
    folder.mkdir(exist_ok=True)
    jobs = json.dumps([(w.to_dict(), stock) for w in workloads])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), arch, family, jobs],
        cwd=ROOT,
        env={**os.environ, **child_env(named(arch), folder, "")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize(
    ("arch", "family", "one", "other"),
    [
        ("sm_90a", "fa4_fwd_sm90", "sliding_window(512)", "sliding_window(1024)"),
        ("sm_90a", "fa4_fwd_sm90", "prefix_lm(100) + softcap(20) + alibi", "prefix_lm(300) + softcap(30) + alibi"),
        (
            "sm_90a",
            "fa4_bwd_sm90",
            "sliding_window(512) & document(mean=300) + softcap(20)",
            "sliding_window(1000) & document(mean=500) + softcap(37)",
        ),
        ("sm_100a", "fa4_fwd_sm100", "prefix_lm(100) + softcap(20)", "prefix_lm(300) + softcap(30)"),
        ("sm_100a", "fa4_bwd_sm100", "prefix_lm(100) + softcap(20)", "prefix_lm(300) + softcap(30)"),
    ],
)
def test_other_numbers_need_no_other_kernel(arch: str, family: str, one: str, other: str, tmp_path: Path) -> None:
    first, second = (workload(p, family) for p in (one, other))
    (made, compiles), (found, again) = compiled(tmp_path / "a", arch, family, first, second)
    assert compiles >= 1
    assert (found, again) == (made, 0)
    [(apart, _)] = compiled(tmp_path / "b", arch, family, second)
    assert Path(apart).read_bytes() == Path(made).read_bytes()


def test_other_lengths_of_keys_need_no_other_kernel(tmp_path: Path) -> None:
    pair = workload("sliding_window(512) + alibi"), workload("sliding_window(512) + alibi", seqlen_k=4096)
    (made, _), (found, again) = compiled(tmp_path, "sm_90a", "fa4_fwd_sm90", *pair)
    assert (found, again) == (made, 0)


def test_a_cap_beside_fa4s_own_softcap_is_compiled_in(tmp_path: Path) -> None:
    pair = workload("prefix_lm(100) + softcap(20)"), workload("prefix_lm(300) + softcap(20)")
    (made, _), (found, again) = compiled(tmp_path, "sm_90a", "fa4_fwd_sm90", *pair, stock=True)
    assert found != made
    assert again == 1
    assert Path(found).read_bytes() != Path(made).read_bytes()


@pytest.mark.parametrize("shift", [0, 5])
@pytest.mark.parametrize(
    "pattern",
    ["causal + alibi", "sliding_window(7) + softcap(3) + alibi", "prefix_lm(9) + softcap(3)", "prefix_lm(9) + alibi"],
)
def test_the_functions_compute_what_torch_computes(pattern: str, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuner.families import pattern_cute

    w = Workload(batch=1, heads_q=4, heads_kv=4, seqlen_q=24, seqlen_k=24 + shift, head_dim=64, pattern=parse(pattern))
    call = pattern_cute.with_scalars({"mask_mod": True}, w)
    scalars = tuple(s.value for s in call.get("aux_scalars", ()))
    math = SimpleNamespace(
        tanh=lambda x, fastmath: torch.tanh(x),
        exp2=lambda x, fastmath: torch.exp2(x),
    )
    monkeypatch.setattr(pattern_cute, "cute", SimpleNamespace(math=math, where=torch.where))
    monkeypatch.setattr(pattern_cute, "cutlass", SimpleNamespace(Float32=torch.float64))
    monkeypatch.setattr(pattern_cute, "_int", lambda value: value)
    lengths = SimpleNamespace(seqlen_q=24, seqlen_k=24 + shift)
    b, h = torch.tensor(0), torch.arange(4)[:, None, None]
    q, kv = torch.arange(24)[:, None], torch.arange(24 + shift)
    score = torch.randn(4, 24, 24 + shift, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 4
    score.requires_grad_()

    keep = pattern_torch.mask_mod(w, "cpu")
    assert keep is not None
    assert torch.equal(pattern_cute.mask_mod(w)(b, h, q, kv, lengths, None, scalars), keep(b, h, q, kv))
    assert torch.equal(pattern_cute.mask_mod(w, fixed=True)(b, h, q, kv, lengths, None), keep(b, h, q, kv))

    modify, ours = pattern_torch.score_mod(w), pattern_cute.score_mod(w)
    assert modify is not None
    assert ours is not None
    others = {"q_idx": q, "kv_idx": kv, "seqlen_info": lengths, "aux_tensors": (), "aux_scalars": scalars}
    expected = modify(score, b, h, q, kv)
    torch.testing.assert_close(ours(score, b, h, **others), expected, rtol=1e-5, atol=1e-6)

    backward, dout = pattern_cute.score_mod_bwd(w), torch.ones_like(score)
    assert backward is not None
    (gradient,) = torch.autograd.grad(expected, score, dout)
    torch.testing.assert_close(backward(dout, score.detach(), b, h, **others), gradient, rtol=1e-5, atol=1e-6)
