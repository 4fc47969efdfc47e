"""A server that is killed at any moment of any change has lost nothing that it answered, and shows nothing by half."""

import contextlib
import copy
import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from peftkit_serve.tenants.database import Database

# Servers that begin without importing anything: each is a fork of this process. SIGUSR1 makes one count its steps
# towards disk and database down, and kill itself by SIGKILL at the last.
LAUNCHER = """
import json, os, signal, sys
import peftkit_serve.http.app, peftkit_serve.http.server
from peftkit.cli.main import run
from sqlalchemy import Engine, event

FILES = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.utime", "shutil.rmtree", "tempfile.mkdtemp"}
left = None

def step(*_):
    global left
    if left is not None:
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

for line in sys.stdin:
    asked = json.loads(line)
    if (pid := os.fork()) == 0:
        def arm(*_):
            global left
            left = asked["steps"]
        signal.signal(signal.SIGUSR1, arm)
        sys.addaudithook(lambda name, _: step() if name in FILES else None)
        for moment in ("before_cursor_execute", "after_cursor_execute", "commit"):
            event.listen(Engine, moment, step)
        if asked["early"]:
            arm()
        os._exit(run(asked["command"]))
    print(json.dumps({"pid": pid}), flush=True)  # behind or before the server's own line
    print(json.dumps({"ended": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)
"""


STEPS = {
    "add_tenant": 24,
    "rotate": 24,
    "revoke": 24,
    "remove_tenant": 32,
    "upload": 80,
    "flip": 24,
    "roll_back": 24,
    "remove": 40,
    "remove_version": 40,
}
"""About how many steps each kind of change takes: a server is killed at any one of them."""
KINDS = sorted(STEPS)


class Launcher:
    """Starts servers, one at a time, of one store and database."""

    def __init__(self, base: Path, store: Path, database: str) -> None:
        self._command = ["serve", "--base", str(base), "--port", "0", "--json", "--store", str(store), "--db", database]
        self._said: dict[str, Any] = {}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def start(self, steps: int, *, early: bool = False) -> tuple[int, str | None]:
        """A server's process and its address; None for one that was killed before it could say it."""
        assert self.process.stdin is not None
        asked = {"command": self._command, "steps": steps, "early": early}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        self._said = {}
        while not {"pid", "url"} <= self._said.keys() and "ended" not in self._said:
            self._read()
        return self._said["pid"], self._said.get("url")

    def wait(self) -> int:
        """How the server ended."""
        while "ended" not in self._said:
            self._read()
        return self._said["ended"]

    def close(self) -> None:
        """Ends what runs."""
        if "pid" in self._said and "ended" not in self._said:
            os.kill(self._said["pid"], signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._said |= json.loads(self.process.stdout.readline())


@dataclass
class Adapter:
    versions: dict[int, str] = field(default_factory=dict[int, str])
    """Number → which folder it came from."""
    weights: dict[int, float] = field(default_factory=dict[int, float])
    history: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    last: int = 0

    def route(self, weights: dict[int, float]) -> None:
        self.history = [*self.history, *([self.weights] if self.weights else [])][-16:]
        self.weights = weights

    def shown(self) -> Any:
        return sorted(self.versions.items()), {number: pytest.approx(one) for number, one in self.weights.items()}


@dataclass
class State:
    """What a server should know."""

    keys: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Tenant → its keys' ids; "?" is one that its asker was never told."""
    adapters: dict[str, Adapter] = field(default_factory=dict[str, Adapter])


class Administrator:
    """Changes a server's state at random and keeps the books of what it answered."""

    def __init__(self, rng: random.Random, folders: dict[str, Path], admin: str) -> None:
        self._rng, self._folders = rng, folders
        self.headers = {"authorization": f"Bearer {admin}"}
        self.state, self.after = State(), State()
        """What was answered, and what the change that is under way makes of it."""
        self.texts: dict[str, str] = {}
        """Key id → the key."""
        self.revoked: list[str] = []
        self._num_tenants = 0

    def change(self, http: httpx.Client, kind: str | None = None) -> None:
        """One change, of a kind or any, booked when it is answered."""
        self.after = copy.deepcopy(self.state)
        getattr(self, f"_{kind or self._rng.choice(KINDS)}")(http)
        self.state = self.after

    def _add_tenant(self, http: httpx.Client) -> None:
        self._num_tenants += 1
        name = f"t{self._num_tenants}"
        self.after.keys[name] = ["?"]
        key = self._done(http.post("/v1/tenants", json={"name": name}))["key"]
        self.after.keys[name] = [self._know(key)]

    def _rotate(self, http: httpx.Client) -> None:
        if name := self._one(self.state.keys):
            self.after.keys[name].append("?")
            self.after.keys[name][-1] = self._know(self._done(http.post(f"/v1/tenants/{name}/keys"))["key"])

    def _revoke(self, http: httpx.Client) -> None:
        if (name := self._one(self.state.keys)) and (key := self._one(self.state.keys[name])) not in (None, "?"):
            self.after.keys[name].remove(key)
            self._done(http.delete(f"/v1/tenants/{name}/keys/{key}"))
            self.revoked.append(self.texts[key])

    def _remove_tenant(self, http: httpx.Client) -> None:
        if len(self.state.keys) > 3 and (name := self._one(self.state.keys)):
            gone = self.after.keys.pop(name)
            self._done(http.delete(f"/v1/tenants/{name}"))
            self.revoked += [self.texts[key] for key in gone if key != "?"]

    def _upload(self, http: httpx.Client) -> None:
        name, source = self._rng.choice("ab"), self._rng.choice(sorted(self._folders))
        adapter = self.after.adapters.setdefault(name, Adapter())
        adapter.last += 1
        adapter.versions[adapter.last] = source
        adapter.route({adapter.last: 1.0})
        files = [("files", (path.name, path.read_bytes())) for path in sorted(self._folders[source].iterdir())]
        made = self._done(http.post("/v1/adapters", data={"name": name}, files=files))
        assert made["version"] == adapter.last

    def _flip(self, http: httpx.Client) -> None:
        if name := self._named():
            numbers = sorted(self.after.adapters[name].versions)
            shares = {number: self._rng.uniform(0.1, 1) for number in numbers}
            self.after.adapters[name].route({number: one / sum(shares.values()) for number, one in shares.items()})
            given = {str(number): one for number, one in shares.items()}
            self._done(http.post(f"/v1/adapters/{name}/aliases", json={"weights": given}))

    def _roll_back(self, http: httpx.Client) -> None:
        if (name := self._named()) and self.after.adapters[name].history:
            self.after.adapters[name].weights = self.after.adapters[name].history.pop()
            self._done(http.post(f"/v1/adapters/{name}/rollback"))

    def _remove(self, http: httpx.Client) -> None:
        if name := self._named():
            self.after.adapters[name] = Adapter(last=self.state.adapters[name].last)
            self._done(http.delete(f"/v1/adapters/{name}"))

    def _remove_version(self, http: httpx.Client) -> None:
        if name := self._named():
            adapter = self.after.adapters[name]
            unused = [number for number in adapter.versions if number not in adapter.weights]
            if number := self._one(unused):
                del adapter.versions[number]
                adapter.history = [weights for weights in adapter.history if number not in weights]
                self._done(http.delete(f"/v1/adapters/{name}@{number}"))

    def check(self, http: httpx.Client, sources: dict[str, str], answers: dict[str, str]) -> None:
        """What a new server knows is what was answered, with the change under way whole or not at all."""
        tenants = {one["name"]: one for one in http.get("/v1/tenants").json()["data"]}
        cards = {one["name"]: one["versions"] for one in http.get("/v1/adapters").json()["data"]}
        adapters = {
            name: (
                [(one["version"], sources[one["uid"]]) for one in versions],
                {one["version"]: one["weight"] for one in versions if one["weight"]},
            )
            for name, versions in cards.items()
        }
        seen: list[Any] = []
        for state in (self.state, self.after):
            wanted = {name: one.shown() for name, one in state.adapters.items() if one.versions}
            known = {name: {key for key in keys if key != "?"} for name, keys in state.keys.items()}
            found = {name: {key["id"] for key in one["keys"]} for name, one in tenants.items()}
            same = adapters == wanted and found.keys() == known.keys()
            same = same and all(
                known[name] <= found[name] and len(found[name]) == len(state.keys[name]) for name in found
            )
            if same:
                self.state = copy.deepcopy(state)
                break
            seen.append((wanted, state.keys))
        else:
            raise AssertionError(f"{adapters} and {tenants} are neither of {seen}")
        for keys in self.state.keys.values():
            for key in keys:
                assert key == "?" or self._may_ask(http, self.texts[key])
        assert not any(self._may_ask(http, text) for text in self.revoked)
        for name, one in self.state.adapters.items():
            for number, source in one.versions.items():
                body = {"model": f"{name}@{number}", "prompt": "abc", "max_tokens": 8, "temperature": 0}
                answer = http.post("/v1/completions", json=body | {"ignore_eos": True})
                assert answer.json()["choices"][0]["text"] == answers[source], "a version is not what came in"

    def _may_ask(self, http: httpx.Client, key: str) -> bool:
        status = http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code
        assert status in (200, 401)
        return status == 200

    def _know(self, key: str) -> str:
        key_id = key.split("_")[1]
        self.texts[key_id] = key
        return key_id

    def _one(self, items: Any) -> Any:
        return self._rng.choice(sorted(items)) if items else None

    def _named(self) -> Any:
        return self._one([name for name, one in self.after.adapters.items() if one.versions])

    def _done(self, answer: httpx.Response) -> Any:
        assert answer.status_code in (200, 201, 204), answer.text
        return answer.json() if answer.content else None


def probe(http: httpx.Client, folders: dict[str, Path]) -> tuple[dict[str, str], dict[str, str]]:
    """Of each folder, by uid its name, and by name what it answers."""
    sources: dict[str, str] = {}
    answers: dict[str, str] = {}
    for source, folder in folders.items():
        files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
        sources[http.post("/v1/adapters", data={"name": "probe"}, files=files).json()["uid"]] = source
        body = {"model": "probe", "prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answers[source] = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert http.delete("/v1/adapters/probe").status_code == 200 and len(set(answers.values())) == len(folders)
    return sources, answers


def test_a_killed_server_has_lost_nothing_and_shows_nothing_by_half(
    base_folder: Path, adapter_folders: dict[str, Path], tmp_path: Path, database_url: str, seed: int
) -> None:
    rng, store = random.Random(seed), tmp_path / "store"
    database = Database(database_url)
    admin = database.add_key(None).text
    database.close()
    folders = {name: adapter_folders[name] for name in ("red", "blue", "soft")}
    administrator = Administrator(rng, folders, admin)
    launcher = Launcher(base_folder, store, database_url)

    def client(url: str) -> httpx.Client:
        return httpx.Client(base_url=url, headers=administrator.headers, timeout=20)

    kinds = rng.sample(KINDS, len(KINDS))
    try:
        pid, url = launcher.start(rng.randrange(STEPS[kinds[-1]]))
        assert url is not None
        with client(url) as http:
            sources, answers = probe(http, folders)
        for _ in range(int(os.environ.get("PEFTKIT_TEST_KILLS", "4"))):
            with client(url) as http, contextlib.suppress(httpx.TransportError):
                for kind in (None, "add_tenant", "upload", "upload"):
                    administrator.change(http, kind)
                os.kill(pid, signal.SIGUSR1)
                administrator.change(http, kinds.pop())
                while True:
                    administrator.change(http)
            assert launcher.wait() == -signal.SIGKILL
            if rng.random() < 0.3:  # the next one doesn't come far
                pid, url = launcher.start(rng.randrange(100), early=True)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                assert launcher.wait() == -signal.SIGKILL
            kinds = kinds or rng.sample(KINDS, len(KINDS))
            pid, url = launcher.start(rng.randrange(STEPS[kinds[-1]]))
            assert url is not None
            with client(url) as http:
                administrator.check(http, sources, answers)
        os.kill(pid, signal.SIGTERM)
        assert launcher.wait() == 0
        (root,) = (store / "adapters").iterdir()
        for left in (*(root / "incoming").iterdir(), *(root / "unsettled").iterdir()):
            os.utime(left, (0, 0))  # of another day
        _, url = launcher.start(0)
        assert url is not None
        with client(url) as http:
            administrator.check(http, sources, answers)
            versions = [one for card in http.get("/v1/adapters").json()["data"] for one in card["versions"]]
        assert len(list((root / "content").iterdir())) == len({one["uid"] for one in versions})
        assert not list((root / "incoming").iterdir()) and not list((root / "unsettled").iterdir())
    finally:
        launcher.close()
