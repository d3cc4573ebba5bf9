"""The OpenAPI document and the server agree: schemathesis looks for 5xx and for answers outside the schema.

The app runs over a real SQLite store with jobs that have ended and one that is queued, an answer and a
worker, and asks for a key. What a schema cannot say (heads that divide, a pattern's grammar) is refused
with 422 though the schema allows it, so that one check of schemathesis is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from api.http import schemas
from api.http.app import make_app
from db.store import Store
from db.values import WorkerInfo
from tuner.config import Config
from tuner.errors import InputError
from tuner.job import JobRequest
from tuner.spec import StudySettings, StudySpec
from tuner.target import Target, Toolchain
from tuner.trial import TunedConfig, Verdict
from tuner.workload import Workload

W = {"pattern": "causal", "batch": 2, "heads_q": 8, "heads_kv": 8, "seqlen_q": 512, "seqlen_k": 512, "head_dim": 64}
EXAMPLES = 30  # for each operation
TARGET, TOOLCHAIN = Target("NVIDIA H200", "sm_90a", 132, power_cap_w=700), Toolchain(torch="2.13.0")


def fill(store: Store) -> str:
    """Put something of everything into the store; return the id of a job that has ended."""
    config = Config.make("fake", 1, tile_m=128, swap=True, mode="a")
    tuned = TunedConfig(
        **{"config": config, "default": Config.make("fake", 1), "verdict": Verdict.PUBLISHED, "speedup": 1.25},
        **{"low": 1.2, "high": float("inf"), "confidence": 0.95, "margin": 0.02, "ties": (), "finalists": ()},
        **{"verification": None, "reason": "", "rounds": 40, "rounds_dropped": 0},
    )
    spec = StudySpec(Workload.from_dict(W), TARGET, TOOLCHAIN, "graph", ("fake/1",))
    store.begin_study(spec, StudySettings()).finish(tuned, {})
    now = datetime.now(UTC)
    for name, target in (("a", TARGET), ("b", None)):
        store.fleet.register(
            WorkerInfo(name, "host", 1, ("compile",), "k", "c", target, TOOLCHAIN, started_at=now, heartbeat_at=now)
        )
    request = JobRequest.from_dict({"workloads": [W]})
    ended, _ = store.jobs.submit(request)
    store.jobs.cancel(ended.id)
    store.jobs.submit(request)
    return ended.id


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str, str]]:
    """Give the app, the text of an admin's key, and the id of a job that has ended."""
    with Store.open(str(tmp_path_factory.mktemp("openapi") / "flashtune.db")) as store:
        ended = fill(store)
        yield make_app(store, require_key=True), store.keys.create("admin", ["admin"])[1], ended


@pytest.fixture(scope="module")
def api(served: tuple[Any, str, str]) -> Any:
    app, key, _ = served
    return schemathesis.openapi.from_asgi("/openapi.json", app, headers={"X-API-Key": key})


OPERATIONS = (
    *(("/healthz", "get"), ("/readyz", "get"), ("/metrics", "get"), ("/v1/fleet", "get"), ("/v1/keys", "get")),
    *(("/v1/configs", "get"), ("/v1/jobs", "get"), ("/v1/jobs", "post"), ("/v1/keys", "post")),
    *(("/v1/jobs/{job_id}", "get"), ("/v1/jobs/{job_id}", "delete"), ("/v1/jobs/{job_id}/events", "get")),
    ("/v1/keys/{key_id}", "delete"),
)
WITHOUT_INPUT = OPERATIONS[:5]
CASES = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
CASES += [(*operation, GenerationMode.NEGATIVE) for operation in OPERATIONS if operation not in WITHOUT_INPUT]


def test_the_operations_are_all_there_are(api: Any) -> None:
    found = {(path, method) for path, item in api.raw_schema["paths"].items() for method in item}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_no_request_gets_a_5xx_or_an_answer_outside_the_schema(
    served: tuple[Any, str, str], api: Any, path: str, method: str, mode: GenerationMode
) -> None:
    _, key, ended = served
    answers: set[int] = set()

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode), known=st.booleans())
    def ask(case: Any, known: bool) -> None:
        if "job_id" in case.path_parameters and known:
            case.path_parameters["job_id"] = ended  # or all would be 404
        headers = {"Authorization": f"Bearer {key}"}
        response = case.call_and_validate(headers=headers, excluded_checks=[positive_data_acceptance])
        answers.add(response.status_code)

    ask()
    assert max(answers) < 500
    if mode is GenerationMode.POSITIVE and path not in ("/v1/configs", "/v1/keys/{key_id}"):
        assert min(answers) < 300  # not everything was refused


# -- the schema of a job says what JobRequest does


def accepts(body: dict[str, Any]) -> tuple[bool, bool]:
    """Tell whether the schema, and whether the validator takes a body."""
    taken = []
    for take, error in ((schemas.JobBody.model_validate, ValidationError), (JobRequest.from_dict, InputError)):
        try:
            take(body)
            taken.append(True)
        except error:
            taken.append(False)
    return taken[0], taken[1]


def test_the_schema_and_the_validator_know_the_same_fields_and_defaults() -> None:
    described = schemas.JobBody.model_validate({"workloads": [W]}).model_dump()
    read = JobRequest.from_dict({"workloads": [W]}).to_dict()
    (mine,), (theirs,) = described.pop("workloads"), read.pop("workloads")
    assert described == read
    assert [mine.pop(name) for name in ("lengths", "lengths_q", "lengths_k")] == [None] * 3  # of packed sequences alone
    assert mine | {"name": None, "head_dim_v": 0} == theirs | {"name": None, "head_dim_v": 0}


def test_the_schema_and_the_validator_draw_the_same_borders() -> None:
    document = schemas.JobBody.model_json_schema()
    parts = {"settings": document["$defs"]["SettingsBody"], "workload": document["$defs"]["WorkloadBody"], "": document}
    borders = 0
    for part, described in parts.items():
        for name, field in described["properties"].items():
            for low, step in (("minimum", -1), ("maximum", 1)):
                if low not in field:
                    continue
                for value in (field[low], field[low] + step * (8 if "head" in name else 1)):
                    change = {name: value} | ({"max_rounds": 100_000} if name == "min_rounds" else {})
                    change |= {"min_rounds": 5} if name == "max_rounds" else {}
                    change |= (
                        {"heads_q": value} if name == "heads_kv" else {"heads_kv": 1} if part == "workload" else {}
                    )
                    job = {"workloads": [{**W, "pattern": "full", **(change if part == "workload" else {})}]}
                    job |= {"settings": change} if part == "settings" else change if not part else {}
                    by_schema, by_validator = accepts(job)
                    assert by_schema == by_validator == (value == field[low]), (part, name, value)
                    borders += 1
    assert borders >= 50


VALUES = st.one_of(
    *(st.none(), st.booleans(), st.integers(-2, 600), st.floats(-2, 600), st.text(max_size=9)),
    *(st.sampled_from(["fwd", "bf16", "dense", "varlen", "auto", "eager", "cpu", "sm_90a", "fake", "causal"]),),
    *(st.just([]), st.just({}), st.just(["fake"]), st.just([W]), st.just({"seed": 3})),
)
FIELDS = [
    *((name,) for name in schemas.JobBody.model_fields),
    *(("settings", name) for name in schemas.SettingsBody.model_fields),
    *(("workloads", 0, name) for name in schemas.WorkloadBody.model_fields),
]


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(where=st.sampled_from(FIELDS), value=VALUES)
def test_what_the_validator_takes_the_schema_takes(where: tuple[Any, ...], value: Any) -> None:
    body: dict[str, Any] = {"workloads": [dict(W)], "settings": {}}
    at: Any = body
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    by_schema, by_validator = accepts(json.loads(json.dumps(body)))
    if where[-1] != "head_dim_v" or value != 0:  # tuner.workload takes every zero for "as head_dim", false and 0.0 too
        assert by_schema or not by_validator, (where, value)
    # a value of the wrong type is refused by both; only texts and numbers that must agree with others differ
    if by_schema and not by_validator:
        assert isinstance(value, (str, int, float, list)), (where, value)
