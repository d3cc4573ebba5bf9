"""Workload files: shorthands, lists, defaults, and one-line errors that name file, workload and value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tuner.errors import InputError, WorkloadError
from tuner.workload import Workload
from tuner.workload_file import NamedWorkload, load

_FULL = """
batch = 2
heads_q = 8
heads_kv = 2
seqlen_q = 1
seqlen_k = 4096
lengths_q = [1, 1]
lengths_k = "4096,70"
head_dim = 192
head_dim_v = 128
op = "fwd"
dtype = "fp16"
pattern = "causal & sliding_window(512) + softcap(20)"
layout = "varlen"
deterministic = true
"""
_SHORT = "batch = 2\nheads = 8\nseqlen = 1024\nhead_dim = 64\n"


def loaded(folder: Path, text: str) -> list[NamedWorkload]:
    path = folder / "w.toml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def shapes(workloads: list[NamedWorkload]) -> dict[str, str]:
    return {w.name: w.workload.label for w in workloads}


def test_every_field_arrives(tmp_path: Path) -> None:
    (only,) = loaded(tmp_path, f'[[workload]]\nname = "decode"\n{_FULL}')
    assert only.name == "decode"
    assert only.workload.key == (
        "w1|fwd|float16|b2|hq8|hkv2|sq1|sk4096|d192|dv128|varlen(1*2;4096,70)|det1|"
        "sliding_window(window=512) + softcap(cap=20.0)"
    )


def test_shorthands_stand_for_both_fields(tmp_path: Path) -> None:
    (only,) = loaded(tmp_path, f'[[workload]]\nname = "w"\n{_SHORT}')
    assert only.workload == Workload(2, 8, 8, 1024, 1024, 64)


@pytest.mark.parametrize(("tokens", "seqlen", "batch"), [(16384, 1024, 16), (5000, 1024, 4), (100, 1024, 1)])
def test_tokens_fill_the_batch(tmp_path: Path, tokens: int, seqlen: int, batch: int) -> None:
    text = f'[[workload]]\nname = "w"\ntokens = {tokens}\nheads = 8\nseqlen = {seqlen}\nhead_dim = 64\n'
    assert loaded(tmp_path, text)[0].workload.batch == batch


def test_tokens_count_queries(tmp_path: Path) -> None:
    text = '[[workload]]\nname = "w"\ntokens = 64\nheads = 8\nseqlen_q = 2\nseqlen_k = 4096\nhead_dim = 64\n'
    assert loaded(tmp_path, text)[0].workload.batch == 32


def test_lists_expand_to_their_product_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = '[[workload]]\nname = "w"\ntokens = 4096\nheads = 4\nhead_dim = [64, 128]\nseqlen = [512, 4096]\n'
    assert shapes(loaded(tmp_path, text)) == {
        "w[head_dim=64,seqlen=512]": "full b8 h4 s512 d64",
        "w[head_dim=64,seqlen=4096]": "full b1 h4 s4096 d64",
        "w[head_dim=128,seqlen=512]": "full b8 h4 s512 d128",
        "w[head_dim=128,seqlen=4096]": "full b1 h4 s4096 d128",
    }


def test_lists_of_pattern_batch_and_dtype(tmp_path: Path) -> None:
    text = (
        '[[workload]]\nname = "w"\nheads = 4\nhead_dim = 64\nseqlen = 512\nbatch = [1, 3]\ndtype = ["bf16", "fp32"]\n'
        'pattern = ["causal", "document(lengths=[200,312])"]\n'
    )
    found = loaded(tmp_path, text)
    assert len({w.name for w in found}) == 8
    assert {(w.workload.batch, w.workload.dtype, str(w.workload.pattern)) for w in found} == {
        (b, d, p)
        for b in (1, 3)
        for d in ("bfloat16", "float32")
        for p in ("causal", "document(lengths=[200,312])")
    }  # fmt: skip


def test_several_tables_keep_their_order(tmp_path: Path) -> None:
    tables = "".join(f'[[workload]]\nname = "{n}"\nhead_dim = {d}\n' for n, d in (("z", 64), ("a", 72), ("m", 80)))
    assert [w.name for w in loaded(tmp_path, f"[defaults]\nbatch = 1\nheads = 1\nseqlen = 64\n{tables}")] == list("zam")


@pytest.mark.parametrize(
    ("defaults", "own", "label"),
    [
        ("head_dim = 128", "head_dim = 64", "full b2 h8 s1024 d64"),
        ("seqlen = 512", "seqlen = 1024", "full b2 h8 s1024 d64"),
        ("seqlen_q = 1\nseqlen_k = 9", "seqlen = 1024", "full b2 h8 s1024 d64"),
        ("seqlen = 512", "seqlen_q = 1", "full b2 h8 s1x512 d64"),
        ("seqlen = 512", "seqlen_q = 1\nseqlen_k = 7", "full b2 h8 s1x7 d64"),
        ("heads = 4", "heads_kv = 2", "full b2 h4/2 s1024 d64"),
        ("heads_q = 4\nheads_kv = 1", "heads = 16", "full b2 h16 s1024 d64"),
        ("tokens = 4096", "batch = 3", "full b3 h8 s1024 d64"),
        ("batch = 3", "tokens = 4096", "full b4 h8 s1024 d64"),
        ("batch = [3, 4]", "batch = 5", "full b5 h8 s1024 d64"),
        ("batch = [3, 4]", "tokens = 4096", "full b4 h8 s1024 d64"),
        ("seqlen = [512, 256]", "seqlen = 64", "full b2 h8 s64 d64"),
        ('pattern = "causal"', 'pattern = "full"', "full b2 h8 s1024 d64"),
    ],
)
def test_a_workload_overrides_the_defaults(tmp_path: Path, defaults: str, own: str, label: str) -> None:
    groups = {"head_dim": "head_dim = 64", "seqlen": "seqlen = 1024", "heads": "heads = 8", "batch": "batch = 2"}
    touched = defaults.replace("tokens", "batch")
    rest = "\n".join(line for name, line in groups.items() if name not in touched)
    (only,) = loaded(tmp_path, f'[defaults]\n{defaults}\n{rest}\n[[workload]]\nname = "w"\n{own}\n')
    assert only.workload.label == label


def test_a_default_list_expands_in_each_workload(tmp_path: Path) -> None:
    text = f'[defaults]\ndtype = ["bf16", "fp16"]\n[[workload]]\nname = "a"\n{_SHORT}'
    text += '[[workload]]\nname = "b"\nheads = 2\nbatch = 1\nseqlen_q = 1\nseqlen_k = 64\nhead_dim = 64\n'
    assert [w.name for w in loaded(tmp_path, text)] == [
        "a[dtype=bf16]",
        "a[dtype=fp16]",
        "b[dtype=bf16]",
        "b[dtype=fp16]",
    ]


def test_the_same_workload_twice_names_both(tmp_path: Path) -> None:
    text = f'[[workload]]\nname = "one"\n{_SHORT}\n[[workload]]\nname = "two"\ntokens = 2048\n'
    text += 'heads = 8\nseqlen = 1024\nhead_dim = 64\ndtype = "bf16"\n'
    with pytest.raises(WorkloadError, match=r"workloads 'one' and 'two' are the same \(full b2 h8 s1024 d64\)"):
        loaded(tmp_path, text)


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    other = _SHORT.replace("1024", "2048")
    with pytest.raises(WorkloadError, match="two workloads have the name 'w'"):
        loaded(tmp_path, f'[[workload]]\nname = "w"\n{_SHORT}\n[[workload]]\nname = "w"\n{other}')


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('patern = "causal"', "'patern' is unknown; did you mean pattern?"),
        ("zzz = 1", "'zzz' is unknown; known: batch"),
        ("seqlen_q = 64", "seqlen = 1024 and seqlen_q = 64 contradict each other"),
        ("heads_kv = 4", "heads = 8 and heads_kv = 4 contradict each other"),
        ("tokens = 64", "tokens = 64 and batch = 2 contradict each other"),
        ('head_dim_v = "64"', "head_dim_v is '64'; it must be a whole number"),
        ("head_dim_v = 64.0", "head_dim_v is 64.0; it must be a whole number"),
        ("head_dim_v = true", "head_dim_v is True; it must be a whole number"),
        ("pattern = 5", "pattern is 5; it must be a text in quotes"),
        ("deterministic = 1", "deterministic is 1; it must be true or false"),
        ('op = ["fwd", "bwd"]', "op is ['fwd', 'bwd']; it must be a text in quotes; a list may stand for seqlen"),
        ('dtype = ["bf16", 16]', "dtype is 16; it must be a text in quotes"),
        ("pattern = []", "pattern is an empty list"),
        ('pattern = "casual"', "unknown pattern 'casual'; did you mean causal?"),
        ('pattern = "causal(\\n1)"', "cannot read '1'"),
        ('dtype = "int8"', "dtype is 'int8'"),
        ("head_dim_v = 65", "head_dim_v is 65"),
    ],
)
def test_errors_name_file_workload_and_value_in_one_line(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(WorkloadError) as error:
        loaded(tmp_path, f'[[workload]]\nname = "prefill"\n{_SHORT}{line}\n')
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'w.toml'}: workload 'prefill'")
    assert says in message
    assert "\n" not in message


def test_an_error_in_one_of_a_list_names_which(tmp_path: Path) -> None:
    text = '[[workload]]\nname = "w"\nbatch = 1\nheads = 8\nseqlen = 64\nhead_dim = [64, 65]\n'
    with pytest.raises(WorkloadError, match=r"workload 'w\[head_dim=65\]': head_dim is 65"):
        loaded(tmp_path, text)


@pytest.mark.parametrize(
    ("left_out", "says"),
    [
        ("heads = 8\n", "heads_q is missing"),
        ("seqlen = 1024\n", "seqlen_q is missing"),
        ("batch = 2\n", "batch is mis"),
    ],
)
def test_a_missing_field_is_named(tmp_path: Path, left_out: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=f"workload 'w'.* {says}"):
        loaded(tmp_path, f'[[workload]]\nname = "w"\n{_SHORT.replace(left_out, "")}')


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("tokens = 64", "seqlen_q is missing"),
        ("tokens = 64\nseqlen = 0", "seqlen_q is 0"),
        ("tokens = 0\nseqlen = 64", "tokens is 0"),
    ],
)
def test_tokens_do_not_hide_what_is_wrong(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        loaded(tmp_path, f'[[workload]]\nname = "w"\nheads = 8\nhead_dim = 64\n{line}\n')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "there is no workload"),
        ("[defaults]\nbatch = 1\n", "there is no workload"),
        ("workload = []", "there is no workload"),
        ('[workload]\nname = "w"\n', r"write each one as a table under \[\[workload\]\]"),
        ("workload = [1]", r"workload is \[1\]"),
        ("defaults = 3\n[[workload]]\n", r"defaults is 3; write it as a table under \[defaults\]"),
        ("[[workloads]]\n", "key 'workloads' is unknown; did you mean workload?"),
        ("[default]\n", "key 'default' is unknown; did you mean defaults?"),
        ('[defaults]\nname = "x"\n[[workload]]\n', r"\[defaults\] key 'name' is unknown"),
        (
            "[defaults]\nseqlen = 1\nseqlen_k = 2\n[[workload]]\n",
            r"\[defaults\]: seqlen = 1 and seqlen_k = 2 contradict",
        ),
        (f"[[workload]]\n{_SHORT}", "workload number 1 has the name None"),
        (f'[[workload]]\nname = " "\n{_SHORT}', "workload number 1 has the name ' '"),
        (f"[[workload]]\nname = 7\n{_SHORT}", "workload number 1 has the name 7"),
    ],
)
def test_a_file_of_the_wrong_form(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says) as error:
        loaded(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "w.toml"))


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no\.toml does not exist"):
        load(tmp_path / "no.toml")


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"cannot read workload file {tmp_path}: Is a directory"):
        load(tmp_path)


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "w.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(InputError, match=r"w\.toml is not UTF-8 at byte 5"):
        load(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[workload]]\nname = "w"\nbatch = \n', "line 3"),
        ("[[workload]]\nname = 'a'\nname = 'b'\n", "line 3"),
        (f"x = {'9' * 5000}\n", "integer"),
        (f"x = {'[' * 5000}\n", "recursion"),
    ],
)
def test_a_file_that_is_not_toml(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=f"w.toml is not TOML: .*{says}") as error:
        loaded(tmp_path, text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "lengths"),
    [
        ("lengths = [512, 0, 7]", (512, 0, 7)),
        ('lengths = "512,7*2"', (512, 7, 7)),
        ('batch = 3\nlengths = "mean=512,seed=1"', (393, 320, 517)),
    ],
)
def test_packed_sequences_by_their_lengths(tmp_path: Path, line: str, lengths: tuple[int, ...]) -> None:
    defaults = "[defaults]\nseqlen = 4096\ntokens = 8192\nheads = 4\nhead_dim = [64, 128]\n"
    found = loaded(tmp_path, f'{defaults}[[workload]]\nname = "w"\n{line}\n')
    assert [w.name for w in found] == ["w[head_dim=64]", "w[head_dim=128]"]
    for w in found:
        assert (w.workload.layout, w.workload.lengths_q, w.workload.lengths_k) == ("varlen", lengths, lengths)
        assert (w.workload.batch, w.workload.seqlen_q) == (3, max(lengths))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lengths = 5", "lengths is 5; it must be a text in quotes"),
        ("lengths = [5, 2.5]", "lengths_q has a length of 2.5; lengths are whole numbers"),
        ("lengths = [5]\nseqlen = 9", "seqlen_q is 9, and the longest of lengths_q is 5"),
        ("lengths = [5]\ntokens = 9", "tokens and lengths contradict each other"),
        ("lengths = [5]\nlengths_q = [5]", "lengths and lengths_q contradict each other"),
        ("batch = 2\nlengths = [5]", "lengths_q has 1 lengths and batch is 2"),
        ('lengths = "mean=4"', "draws a length for each of batch, which is None"),
    ],
)
def test_what_is_wrong_with_lengths_is_said(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says) as caught:
        loaded(tmp_path, f'[[workload]]\nname = "w"\nheads = 4\nhead_dim = 64\n{line}\n')
    assert "\n" not in str(caught.value)


def test_a_policy_belongs_to_a_group_and_a_list_of_them_makes_one_of_each(tmp_path: Path) -> None:
    text = (
        f'[[workload]]\nname = "a"\n{_SHORT}policy = ["graph", "eager"]\n'
        f'[[workload]]\nname = "b"\n{_SHORT}pattern = "causal"\npolicy = "eager"\n'
        f'[[workload]]\nname = "c"\n{_SHORT}pattern = "alibi"\n'
    )
    found = loaded(tmp_path, text)
    assert [(w.name, w.policy) for w in found] == [
        ("a[policy=graph]", "graph"), ("a[policy=eager]", "eager"), ("b", "eager"), ("c", ""),
    ]  # fmt: skip
    assert found[0].workload == found[1].workload


def test_a_policy_of_the_defaults_holds_where_a_group_says_none(tmp_path: Path) -> None:
    text = f'[defaults]\npolicy = "eager"\n[[workload]]\nname = "a"\n{_SHORT}\n'
    text += f'[[workload]]\nname = "b"\n{_SHORT}pattern = "causal"\npolicy = "graph"\n'
    assert [w.policy for w in loaded(tmp_path, text)] == ["eager", "graph"]


@pytest.mark.parametrize(
    ("policy", "said"),
    [('"fast"', "policy is 'fast'; it must be graph or eager"), ("3", "policy is 3; it must be a text"),
     ('["graph", "auto"]', "policy is 'auto'; it must be graph or eager"),
     ('["eager", "eager"]', "are the same")],
)  # fmt: skip
def test_a_wrong_policy_is_refused(tmp_path: Path, policy: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=re.escape(said)):
        loaded(tmp_path, f'[[workload]]\nname = "w"\n{_SHORT}policy = {policy}\n')
