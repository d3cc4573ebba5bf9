"""Attention and its gradients in plain torch, in float32 on a GPU and float64 on a CPU, a few rows at a time.

The definition of ``tuner.pattern`` written out: scores, modifications, mask, softmax, product. The
gradients follow by the chain rule, with P = softmax(S) and S = modify(scale * Q @ K.T):

    dV = P.T @ dO    dP = dO @ V.T    dS = P * (dP - rowsum(P * dP))    dQ = scale * dS' @ K    dK = scale * dS'.T @ Q

where dS' is dS through the derivative of the modifications, which torch's autograd takes. The sequences of
a varlen workload are dense ones of a batch of one, computed one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from tuner.families import pattern_torch
from tuner.workload import Workload

_SCORE_BYTES = 1 << 29  # of one chunk of scores
_GRADIENT_COPIES = 6  # scores, modified and masked scores, P, dP and dS of a chunk live side by side

_NAMES = ("dq", "dk", "dv")

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Chunk:
    """Some rows of the query heads that share one K/V head, in the wide dtype.

    ``queries`` is (heads, rows, head_dim), ``keys`` and ``values`` (seqlen_k, head_dim or head_dim_v),
    ``scores`` (heads, rows, seqlen_k), scaled.
    """

    batch: int
    kv_head: int
    heads: slice
    rows: slice
    queries: Tensor
    keys: Tensor
    values: Tensor
    scores: Tensor
    indices: tuple[Tensor, Tensor, Tensor, Tensor]  # of batch, head, query and key


def attention(q: Tensor, k: Tensor, v: Tensor, workload: Workload) -> Tensor:
    """Return the output, (batch, seqlen_q, heads_q, head_dim_v), in float32 or better; of varlen, (total_q, ...).

    The softmax scale is head_dim ** -0.5. A row that sees nothing is zero.
    """
    w = workload
    if w.layout == "varlen":
        out = torch.zeros(w.total_q, w.heads_q, w.head_dim_v, dtype=_wide(q), device=q.device)
        for one, rows, keys in _sequences(w):
            out[rows] = attention(q[None, rows], k[None, keys], v[None, keys], one)[0]
        return out
    keep, modify = pattern_torch.mask_mod(w, q.device), pattern_torch.score_mod(w)
    out = torch.empty(w.batch, w.seqlen_q, w.heads_q, w.head_dim_v, dtype=_wide(q), device=q.device)
    for c in _chunks(q, k, v, w, _SCORE_BYTES):
        p = _softmax(_masked(_modified(c.scores, c, modify), c, keep))
        out[c.batch, c.rows, c.heads] = (p @ c.values).transpose(0, 1)
    return out


def log_sum_exp(q: Tensor, k: Tensor, v: Tensor, workload: Workload) -> Tensor:
    """Return log(sum(exp(score))) of every row, (batch, heads_q, seqlen_q); -inf where a row sees nothing.

    Of varlen it is (heads_q, total_q), as FA4 has it.
    """
    w = workload
    if w.layout == "varlen":
        lse = torch.full((w.heads_q, w.total_q), float("-inf"), dtype=_wide(q), device=q.device)
        for one, rows, keys in _sequences(w):
            lse[:, rows] = log_sum_exp(q[None, rows], k[None, keys], v[None, keys], one)[0]
        return lse
    keep, modify = pattern_torch.mask_mod(w, q.device), pattern_torch.score_mod(w)
    lse = torch.empty(w.batch, w.heads_q, w.seqlen_q, dtype=_wide(q), device=q.device)
    for c in _chunks(q, k, v, w, _SCORE_BYTES):
        lse[c.batch, c.heads, c.rows] = torch.logsumexp(_masked(_modified(c.scores, c, modify), c, keep), dim=-1)
    return lse


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, workload: Workload) -> dict[str, Tensor]:
    """Return ``dq``, ``dk`` and ``dv`` of sum(out * dout), shaped as q, k and v, in float32 or better.

    ``dout`` is (batch, seqlen_q, heads_q, head_dim_v). A row that sees nothing, and a key that no row
    sees, has zero gradients. The K/V heads' gradients are summed over the query heads that share them.

    Raises:
        PatternError: if a score modification captures a tensor that wants a gradient.
    """
    w, wide, scale = workload, _wide(q), workload.head_dim**-0.5
    if w.layout == "varlen":
        out = {
            name: torch.zeros(t.shape, dtype=wide, device=t.device) for name, t in zip(_NAMES, (q, k, v), strict=True)
        }
        for one, rows, keys in _sequences(w):
            found = gradients(q[None, rows], k[None, keys], v[None, keys], dout[None, rows], one)
            for name, side in zip(_NAMES, (rows, keys, keys), strict=True):
                out[name][side] = found[name][0]
        return out
    keep = pattern_torch.mask_mod(w, q.device)
    modify = pattern_torch.refuse_captured_gradients(pattern_torch.score_mod(w))
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    for c in _chunks(q, k, v, w, _SCORE_BYTES // _GRADIENT_COPIES):
        scores = c.scores.detach().requires_grad_(modify is not None)
        with torch.enable_grad():
            modified = _modified(scores, c, modify)
        p = _softmax(_masked(modified.detach(), c, keep))
        d_out = dout[c.batch, c.rows, c.heads].to(wide).transpose(0, 1)
        dv[c.batch, :, c.kv_head] += (p.transpose(1, 2) @ d_out).sum(0)
        dp = d_out @ c.values.T
        ds = p * (dp - (p * dp).sum(-1, keepdim=True))
        if modify is not None:
            (ds,) = torch.autograd.grad(modified, scores, ds)
        dq[c.batch, c.rows, c.heads] = (ds @ c.keys * scale).transpose(0, 1)
        dk[c.batch, :, c.kv_head] += (ds.transpose(1, 2) @ c.queries).sum(0) * scale
    return {"dq": dq, "dk": dk, "dv": dv}


def _sequences(workload: Workload) -> Iterator[tuple[Workload, slice, slice]]:
    """Yield each sequence as a dense workload, with its rows of q and of k; empty ones have nothing to compute."""
    ends_q, ends_k = accumulate(workload.lengths_q), accumulate(workload.lengths_k)
    for (n, m), end_q, end_k in zip(workload.sequences, ends_q, ends_k, strict=True):
        if n and m:
            one = workload.with_(layout="dense", batch=1, seqlen_q=n, seqlen_k=m)
            yield one, slice(end_q - n, end_q), slice(end_k - m, end_k)


def _wide(t: Tensor) -> torch.dtype:
    return torch.float64 if t.device.type == "cpu" else torch.float32


def _chunks(q: Tensor, k: Tensor, v: Tensor, workload: Workload, score_bytes: int) -> Iterator[_Chunk]:
    wide, w = _wide(q), workload
    torch.backends.cuda.matmul.allow_tf32 = False
    group = w.heads_q // w.heads_kv
    rows = max(1, min(w.seqlen_q, score_bytes // (group * w.seqlen_k * wide.itemsize)))
    kv_idx = torch.arange(w.seqlen_k, device=q.device)
    for b in range(w.batch):
        for hk in range(w.heads_kv):
            heads = slice(hk * group, (hk + 1) * group)
            keys, values = k[b, :, hk].to(wide), v[b, :, hk].to(wide)
            head_idx = torch.arange(heads.start, heads.stop, device=q.device)[:, None, None]
            batch_idx = torch.full_like(head_idx, b)
            for start in range(0, w.seqlen_q, rows):
                stop = min(start + rows, w.seqlen_q)
                q_idx = torch.arange(start, stop, device=q.device)[:, None]
                queries = q[b, start:stop, heads].to(wide).transpose(0, 1)
                scores = queries @ keys.T * w.head_dim**-0.5
                indices = (batch_idx, head_idx, q_idx, kv_idx)
                yield _Chunk(b, hk, heads, slice(start, stop), queries, keys, values, scores, indices)


def _modified(scores: Tensor, chunk: _Chunk, modify: pattern_torch.ScoreMod | None) -> Tensor:
    return scores if modify is None else modify(scores, *chunk.indices)


def _masked(scores: Tensor, chunk: _Chunk, keep: pattern_torch.MaskMod | None) -> Tensor:
    return scores if keep is None else scores.masked_fill(~keep(*chunk.indices), float("-inf"))


def _softmax(scores: Tensor) -> Tensor:
    return torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a row of -inf gives NaN
