"""Print the result of `flashtune tune --json` as a Markdown table: rivals, winner, interval, verdict.

python benchmarks/table.py benchmarks/results/2026-12-01-h200/tune-run3.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload

RIVALS = {"flex_flash_stock": "FLASH", "flex_triton_stock": "Triton", "cudnn": "cuDNN", "fa4_fwd_sm90": "FA4 stock"}


def row(outcome: dict[str, Any]) -> str:
    """Return one workload's line; times are microseconds, the median of paired rounds."""
    workload, tuned = Workload.from_dict(outcome["workload"]), TunedConfig.from_dict(outcome["tuned"])
    times = {f.config.family: f.median_us for f in tuned.finalists if f.config.is_stock}
    cells = [f"{times[name]:.1f}" if name in times else "" for name in RIVALS]
    winner = tuned.finalist(tuned.config)
    assert winner is not None
    if tuned.verdict is Verdict.KEPT_DEFAULT:
        answer = ["**keep the default**", "1"]
    else:
        name = RIVALS[tuned.config.family] if tuned.config.is_stock else f"FA4 {tuned.config.label}"
        answer = [f"**{name}** {winner.median_us:.1f}", f"{tuned.speedup:.3f} [{tuned.low:.3f}, {tuned.high:.3f}]"]
    error = "" if winner.error is None else f"{winner.error:.1e}"
    shape = f"d{workload.head_dim} S={workload.seqlen_q}"
    return " | ".join(["", shape, str(workload.pattern), *cells, *answer, str(len(tuned.ties)), error, ""]).strip()


def main() -> None:
    """Print the table of one file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    document = json.loads(parser.parse_args().file.read_text())
    head = ["", "shape", "pattern", *RIVALS.values(), "answer", "speedup over FLASH", "ties", "error", ""]
    print(" | ".join(head).strip())
    print("|" + "---|" * (len(head) - 2))
    for outcome in document["outcomes"]:
        if outcome["tuned"]:
            print(row(outcome))


if __name__ == "__main__":
    main()
