"""Does the tuner make winners of noise, and does it find small wins that are there?

Three scenarios: every config is the default under another name (nothing may be published), one
config is 3% faster (it must be published), one is 0.5% faster (a declared tie, default kept).

    python benchmarks/honesty.py                     # 20 studies each, fake family, virtual clock
    python benchmarks/honesty.py --gpu --studies 1   # FA4's stock forward on this machine's GPU

The virtual clock's noise is as seen on an H200 without pairing: 0.6% a sample, correlated, with a
slow drift of 2% and 2% of outliers. Writes every sample of every finals as JSON; exits 1 if a
scenario's expectation fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from db.store import Store
from tuner.pattern import parse
from tuner.spec import StudySettings
from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload
from tuner.workload_file import NamedWorkload
from workers.runner import Place, Runner
from workers.settings import Settings

PLANTED = 7  # the variant with the win
NOISE = {"sigma": 0.006, "ar": 0.5, "drift": 0.02, "outliers": 0.02}
SCENARIOS = {"all the default": 0.0, "3% planted": 0.03, "0.5% planted": 0.005}
FAKE_WORKLOAD = Workload(batch=1, heads_q=12, heads_kv=1, seqlen_q=128, seqlen_k=128, head_dim=64)
GPU_WORKLOAD = Workload(
    batch=2, heads_q=16, heads_kv=16, seqlen_q=8192, seqlen_k=8192, head_dim=128, pattern=parse("sliding_window(1024)")
)


def script(gain: float, seed: int, gpu: bool) -> str:
    """Return the script of one study: variant PLANTED is faster than all others by ``gain``."""
    if gpu:
        return json.dumps({"slower": {"stock": gain, "default": gain, str(PLANTED): 0.0}})
    outcomes = {str(PLANTED): {"speedup": 1 + gain}}
    return json.dumps({"base_us": 250.0, "seed": seed, "noise": NOISE, "outcomes": outcomes})


def one_study(gain: float, seed: int, gpu: bool, cache: Path | None) -> tuple[TunedConfig, Place]:
    """Run one study in a database of its own."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.from_env({"FLASHTUNE_HOME": folder})
        if cache is not None:
            settings = replace(settings, cache_dir=cache)
        workload = GPU_WORKLOAD if gpu else FAKE_WORKLOAD
        place = Place.find(
            settings,
            device="cuda" if gpu else "fake",
            only=("decoy",) if gpu else (),
            script=script(gain, seed, gpu),
        )
        with Store.open(settings.database_url) as store, Runner(settings, store, place) as runner:
            (outcome,) = runner.tune([NamedWorkload("honesty", workload)], StudySettings(seed=seed))
    if outcome.tuned is None:
        raise SystemExit(f"the study failed: {outcome.error}")
    return outcome.tuned, place


def as_expected(gain: float, tuned: TunedConfig) -> bool:
    """Tell whether a study came to the right answer."""
    planted = tuned.config.get("variant") == PLANTED
    if gain >= 0.03:
        return tuned.verdict is Verdict.PUBLISHED and planted
    finalists = [f.config for f in tuned.finalists if f.config.get("variant") == PLANTED]
    return tuned.verdict is Verdict.KEPT_DEFAULT and bool(tuned.ties) and all(c in tuned.ties for c in finalists)


def main() -> int:
    """Run the scenarios, print a line each, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gpu", action="store_true", help="FA4's stock forward with planted delays, on the GPU")
    parser.add_argument("--studies", type=int, default=20)
    parser.add_argument("--out", type=Path, help="where to write the results, JSON")
    parser.add_argument("--cache", type=Path, help="folder of compiled kernels, to share between studies")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    where: Place | None = None
    for name, gain in SCENARIOS.items():
        right = 0
        for seed in range(args.studies):
            tuned, where = one_study(gain, seed, args.gpu, args.cache)
            good = as_expected(gain, tuned)
            right += good
            results.append({"scenario": name, "seed": seed, "as_expected": good, "tuned": tuned.to_dict()})
            print(f"{name}, seed {seed}: {tuned.verdict}: {tuned.reason}; {len(tuned.ties)} tie(s)")
        print(f"== {name}: {right} of {args.studies} as expected", flush=True)
    if args.out and where is not None:
        document = {
            "program": "benchmarks/honesty.py",
            "date": time.strftime("%Y-%m-%d"),
            "target": where.target.to_dict(),
            "toolchain": where.toolchain.to_dict(),
            "studies": args.studies,
            "as_expected": sum(r["as_expected"] for r in results),
            "of": len(results),
            "results": results,
        }
        args.out.write_text(json.dumps(document))
    return 0 if all(r["as_expected"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
