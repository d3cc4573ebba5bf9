"""Attention in plain torch, in float32 on a GPU and float64 on a CPU, a few rows at a time.

The definition of ``tuner.pattern`` written out: scores, modifications, mask, softmax, product.
"""

from __future__ import annotations

import torch

from tuner.families import pattern_torch
from tuner.workload import Workload

_SCORE_BYTES = 1 << 29  # of one chunk of scores


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, workload: Workload) -> torch.Tensor:
    """Return the output, (batch, seqlen_q, heads_q, head_dim_v), in float32 or better.

    The softmax scale is head_dim ** -0.5. A row that sees nothing is zero.
    """
    wide = torch.float64 if q.device.type == "cpu" else torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    w = workload
    keep, modify = pattern_torch.mask_mod(w, q.device), pattern_torch.score_mod(w)
    group = w.heads_q // w.heads_kv
    out = torch.empty(w.batch, w.seqlen_q, w.heads_q, w.head_dim_v, dtype=wide, device=q.device)
    rows = max(1, min(w.seqlen_q, _SCORE_BYTES // (group * w.seqlen_k * wide.itemsize)))
    kv_idx = torch.arange(w.seqlen_k, device=q.device)
    for b in range(w.batch):
        for hk in range(w.heads_kv):
            heads = slice(hk * group, (hk + 1) * group)
            keys, values = k[b, :, hk].to(wide), v[b, :, hk].to(wide)
            head_idx = torch.arange(heads.start, heads.stop, device=q.device)[:, None, None]
            for start in range(0, w.seqlen_q, rows):
                q_idx = torch.arange(start, min(start + rows, w.seqlen_q), device=q.device)[:, None]
                queries = q[b, start : start + rows, heads].to(wide).transpose(0, 1)
                scores = queries @ keys.T * w.head_dim**-0.5
                batch_idx = torch.full_like(head_idx, b)
                if modify is not None:
                    scores = modify(scores, batch_idx, head_idx, q_idx, kv_idx)
                if keep is not None:
                    scores = scores.masked_fill(~keep(batch_idx, head_idx, q_idx, kv_idx), float("-inf"))
                p = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a row of -inf gives NaN
                out[b, start : start + rows, heads] = (p @ values).transpose(0, 1)
    return out
