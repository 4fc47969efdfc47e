"""The time of an answer tells nothing of another tenant's adapters: they go through the code as absent ones do."""

import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from peftkit_serve.http.access import Caller
from peftkit_serve.http.errors import ApiError
from peftkit_serve.tenants.records import Limits

ROUTES: dict[str, Callable[[str], dict[str, Any]]] = {
    "completions": lambda name: {"model": name, "prompt": "a"},
    "chat/completions": lambda name: {"model": name, "messages": [{"role": "user", "content": "a"}]},
}


@pytest.fixture
def served(
    make_engine: Callable[..., Any], serve: Callable[..., Any], adapter_folders: dict[str, Path], tmp_path: Path
) -> Iterator[Any]:
    """A server with an adapter of acme's, `hidden-1`, one that is closed to rival, `closed-1`, and one open to it."""
    with serve(make_engine(), store=tmp_path / "store", poll_s=3600.0) as server:
        for name, adapters in (("acme", ["*"]), ("rival", ["open"])):
            server.database.add_tenant(name, Limits(), adapters)
        admin = {"authorization": f"Bearer {server.database.add_key(None).text}"}
        for name, tenant in (("hidden-1", {"tenant": "acme"}), ("closed-1", {}), ("open", {})):
            folder = adapter_folders["red"]
            files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
            made = httpx.post(
                f"{server.url}/v1/adapters", data={"name": name, **tenant}, files=files, headers=admin, timeout=30
            )
            assert made.status_code == 201, made.text
        yield server


def way(action: Callable[[], object]) -> list[str]:
    """The functions that an action goes through, in order."""
    seen: list[str] = []

    def note(frame: FrameType, kind: str, _: object) -> None:
        if kind == "call":
            seen.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("form", ["{}", "{}@1", "tiny:{}"])
@pytest.mark.parametrize(("there", "absent"), [("hidden-1", "hidden-2"), ("closed-1", "closed-2")])
def test_another_tenants_name_goes_the_same_way_as_an_absent_one(
    served: Any, form: str, there: str, absent: str
) -> None:
    rival = Caller(served.database.snapshot.tenants["rival"])

    def ask(name: str) -> None:
        with pytest.raises(ApiError, match="does not exist"):
            served.service.model(rival, form.format(name))

    ask("another")  # what is compiled once is
    ways = [way(lambda one=name: ask(one)) for name in (there, absent)]
    assert ways[0] == ways[1] and any("model_not_found" in step for step in ways[0])


def test_no_answer_about_a_name_asks_the_database(served: Any) -> None:
    key = served.database.add_key("rival").text
    headers = {"authorization": f"Bearer {key}"}
    statements: list[str] = []
    sa.event.listen(
        served.database._engine, "before_cursor_execute", lambda *arguments: statements.append(arguments[2])
    )
    served.database.refresh()
    assert statements, "queries are counted"
    statements.clear()
    for name in ("hidden-1", "hidden-2", "closed-1", "closed-2"):
        for path, body in ROUTES.items():
            assert httpx.post(f"{served.url}/v1/{path}", json=body(name), headers=headers).status_code == 404
        assert httpx.get(f"{served.url}/v1/models/{name}", headers=headers).status_code == 404
    assert not statements


def test_times_of_the_two_cant_be_told_apart(served: Any, seed: int) -> None:
    rng, times = random.Random(seed), {"hidden-1": [], "hidden-2": []}
    num = int(os.environ.get("PEFTKIT_TEST_TIMINGS", "300"))
    headers = {"authorization": f"Bearer {served.database.add_key('rival').text}"}
    with httpx.Client(base_url=f"{served.url}/v1", headers=headers) as http:
        for _ in range(num):
            for name in rng.sample(sorted(times), 2):
                begin = time.perf_counter()
                assert http.post("/completions", json=ROUTES["completions"](name)).status_code == 404
                times[name].append(time.perf_counter() - begin)
    for name, taken in times.items():
        print(f"{name}: median {statistics.median(taken) * 1e6:.0f} us of {num}")
    share = share_above(*times.values())
    print(f"{share:.3f} of all pairs have another tenant's above the absent one's")
    deviation = math.sqrt((2 * num + 1) / (12 * num * num))  # of that share where both are of one distribution
    assert abs(share - 0.5) < 5 * deviation


def share_above(first: list[float], second: list[float]) -> float:
    """In how many of all pairs the first is larger (Mann and Whitney's statistic, as a share)."""
    ranked = sorted([(one, 1) for one in first] + [(one, 0) for one in second])
    ranks = sum(rank for rank, (_, of_first) in enumerate(ranked) if of_first)
    return (ranks - len(first) * (len(first) - 1) / 2) / (len(first) * len(second))
