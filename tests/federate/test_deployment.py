"""A real federation on loopback: SuperLink, SuperNodes and apps as processes of their own, with real kills and real liars."""

from __future__ import annotations

import json
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from commands import bad, good
from conftest import small_recipe
from oneround import acts
from oneround.config.recipe import Local, Recipe
from oneround.data import Dataset
from oneround.federate.keys import KeyFolder
from oneround.federate.launch import write_site
from oneround.federate.processes import Child, SuperLink, free_port, supernode, write_app
from oneround.federate.sites import SiteFile
from oneround.protocol import Upload, blob
from oneround.runs.folder import RunFolder
from oneround.runs.result import Result
from oneround.server.plan import DealtPlan
from oneround.simulate import run as simulate
from oneround.site import Site
from puppets import Puppet

PATIENCE = 200.0  # a busy machine takes its time; nothing here waits longer than it must


def wait_for(what: Callable[[], object], why: Callable[[], object] = str) -> None:
    until = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < until, why()
        time.sleep(0.1)


@pytest.fixture(scope="module", autouse=True)
def quick_processes() -> Iterator[None]:
    """Flower's processes look often for work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.3")
        yield


@dataclass
class Federation:
    """A SuperLink that several tests share, and what one of them started."""

    link: SuperLink
    folder: Path
    started: list[Child | Puppet] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.link.port}"

    def puppet(self, answer: bytes, ready: bool = True, rude: bool = False, half: bool = False) -> Puppet:
        """A site that sends these bytes."""
        self.started.append(puppet := Puppet(self.address, answer, ready, rude, half))
        return puppet

    def site(self, name: str, share: int) -> Child:
        """A SuperNode with the real ClientApp, which saves its state every epoch."""
        folder = self.folder / name
        site = SiteFile(name=name, share=share, folder=folder, local=Local(checkpoint_seconds=0.0))
        self.started.append(node := supernode(self.address, write_site(site)).start())
        return node

    def serve(self, recipe: Recipe, out: Path) -> Child:
        """Start a run; it ends when the child does."""
        asked = out.with_suffix(".yaml")
        asked.write_text(recipe.to_yaml())
        pace: dict[str, str | float] = {"farewell": 0.0, "patience": 5.0}
        return self.link.run(write_app(self.folder / "app"), {"recipe": str(asked), "out": str(out), **pace})


@pytest.fixture(scope="module")
def open_link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    with SuperLink(tmp_path_factory.mktemp("link") / "flower", "127.0.0.1", free_port()) as link:
        yield link


@pytest.fixture
def federation(open_link: SuperLink, tmp_path: Path) -> Iterator[Federation]:
    federation = Federation(open_link, tmp_path)
    yield federation
    for one in federation.started:
        one.stop()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `oneround federate …`; what is left of it when a test fails ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "oneround.cli", "federate", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        heeds_hang_up = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
        started.append(subprocess.Popen(command, **pipes, text=True, cwd=tmp_path, preexec_fn=heeds_hang_up))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()  # which ends Flower's processes too
            process.wait(30)


def ended(run: Child) -> None:
    wait_for(lambda: run.ended, run.read_output)


def log_of(out: Path) -> str:
    return (out / "run.log").read_text() if (out / "run.log").exists() else ""


def trained(recipe: Recipe, digits: Dataset, clients: list[int]) -> dict[str, Upload]:
    """What honest sites would upload, made here without any network."""
    plan = DealtPlan.of(recipe, digits)
    broadcast = plan.prepare()
    return {
        name: acts.train(broadcast, Site(name, digits.train.take(plan.split.clients[number])))
        for name, number in plan.clients.items()
        if number in clients
    }


def assert_same(uploads: Iterable[Upload], expected: Iterable[Upload]) -> None:
    """Equal within floating-point tolerance: a process that Flower starts may add numbers in another order."""
    for upload, wanted in zip(uploads, expected, strict=True):
        assert (upload.client, upload.epoch) == (wanted.client, wanted.epoch)
        assert torch.equal(upload.class_counts, wanted.class_counts)
        torch.testing.assert_close(upload.weights, wanted.weights, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(upload.statistics, wanted.statistics, rtol=1e-3, atol=1e-3)


def result(out: Path) -> dict[str, object]:
    return json.loads((out / "result.json").read_text())


# --- encrypted and authenticated -----------------------------------------------------------------------------------------


def test_commands_keys_and_the_same_uploads_as_a_simulation(
    digits: Dataset, tmp_path: Path, commands: Callable[..., subprocess.Popen[str]]
) -> None:
    """`oneround federate` with TLS and keys: both sites are counted, a stranger and an impostor are not."""
    recipe = small_recipe(
        partition__clients=2,
        partition__alpha=0.3,
        training__epochs=2,
        snapshots=0,
        local__workers=1,
        fusion=["typicality-gated", "iffi"],
    )
    names = ["client_000", "client_001"]
    keys, stranger = KeyFolder(tmp_path / "keys"), KeyFolder(tmp_path / "stranger")
    sites = [word for name in [*names, "mallory"] for word in ("--site", name)]
    assert "secret" in good("federate", "keys", str(keys.path), "--host", "localhost", *sites)
    stranger.make([], ["client_009"])
    stranger.ca.write_bytes(keys.ca.read_bytes())
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    port, out = free_port(), tmp_path / "out"

    def client(name: str, share: int, folder: KeyFolder) -> subprocess.Popen[str]:
        words = ["--server", f"localhost:{port}", "--keys", str(folder.path), "--name", name]
        return commands("client", *words, "--folder", f"{folder.path}-{name}", "--set", f"share={share}")

    server = commands("server", "recipe.yaml", "--keys", str(keys.path), "--port", str(port), "--out", str(out))
    impostor = KeyFolder(tmp_path / "impostor")  # mallory's own key, under another's name
    impostor.make([], ["client_000"])
    impostor.ca.write_bytes(keys.ca.read_bytes())
    impostor.private("client_000").write_bytes(keys.private("mallory").read_bytes())
    wait_for(lambda: "waiting for 2 of 2" in log_of(out))
    plain = ["--insecure", "--server", f"localhost:{port}", "--name", "a", "--set", "share=0"]
    assert "it is encrypted and asks for keys; give --keys" in bad("federate", "client", *plain, cwd=tmp_path)
    odd = [word if word != "a" else "a[b]" for word in plain]
    assert 'name = "a[b]": must be at most 64 letters' in bad("federate", "client", *odd, cwd=tmp_path)
    mallory, refused = client("client_000", 0, impostor), client("client_009", 0, stranger)
    clients = [client(names[0], 0, keys)]
    wait_for(lambda: "key is registered for mallory" in log_of(out), lambda: log_of(out))
    clients.append(client(names[1], 1, keys))
    assert refused.wait(PATIENCE) == 2
    assert "client_009: the server does not know this key" in refused.stderr.read()
    assert mallory.wait(PATIENCE) == 1
    assert "speaks for client_000 but its key is registered for mallory" in " ".join(mallory.stderr.read().split())
    for process in clients:
        output, wrong = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, wrong
        assert re.search(
            r"the server's verdict: client_00\d: upload of .* counted \(\d of 2\)", " ".join(output.split())
        ), output
        assert "done" in output.splitlines()[-1]
    output, wrong = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0, wrong
    assert "encrypted, for the keys of client_000, client_001, mallory" in " ".join(output.split())
    simulate(recipe, tmp_path / "simulated", data=digits)
    assert_same(RunFolder(out).uploads(), RunFolder(tmp_path / "simulated").uploads())
    simulated, federated = result(tmp_path / "simulated"), result(out)
    assert [simulated[key] for key in ("recipe_digest", "partition")] == [
        federated[key] for key in ("recipe_digest", "partition")
    ]
    for rule, score in Result.read(out).rules.items():
        assert score == pytest.approx(Result.read(tmp_path / "simulated").rules[rule], abs=0.006), rule  # two images
    assert [path.name.partition(".")[0] for path in (out / "quarantine").iterdir()] == ["mallory"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGTERM, marks=pytest.mark.release),
        pytest.param(signal.SIGHUP, marks=pytest.mark.release),
        signal.SIGKILL,
    ],
    ids=lambda how: how.name,
)
def test_a_server_that_ends_leaves_no_process_behind_and_can_be_started_again(
    tmp_path: Path, commands: Callable[..., subprocess.Popen[str]], how: signal.Signals
) -> None:
    """Asked to by a service manager, by a closed terminal, or not asked at all."""
    (tmp_path / "recipe.yaml").write_text(small_recipe(partition__clients=2).to_yaml())
    words = ["--insecure", "--host", "127.0.0.1", "--port", str(free_port()), "--out", str(tmp_path / "out")]
    server = commands("server", "recipe.yaml", *words)
    wait_for(lambda: "waiting for 2 of 2" in log_of(tmp_path / "out"))
    assert len(processes_at(tmp_path)) > 1
    server.send_signal(how)
    _, wrong = server.communicate(timeout=PATIENCE)
    if how != signal.SIGKILL:
        assert server.returncode == 130 and "uploads are kept, continue with" in " ".join(wrong.split())
        assert processes_at(tmp_path) == []
        return
    again = commands("server", "recipe.yaml", *words)
    wait_for(lambda: log_of(tmp_path / "out").count("waiting for 2 of 2") == 2, lambda: log_of(tmp_path / "out"))
    again.terminate()
    again.communicate(timeout=PATIENCE)
    wait_for(lambda: processes_at(tmp_path) == [], lambda: processes_at(tmp_path))


def processes_at(folder: Path) -> list[str]:
    """Command lines of processes that name this folder."""
    found = subprocess.run(["ps", "-eo", "stat=,args=", "-ww"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(folder) in line and not line.startswith("Z")]


# --- faults --------------------------------------------------------------------------------------------------------------


def test_liars_are_refused_and_the_quorum_is_fused_without_the_silent_one(
    digits: Dataset, federation: Federation, tmp_path: Path
) -> None:
    recipe = small_recipe(partition__clients=3, partition__alpha=0.3, quorum=2, fusion=["iffi"])
    honest = trained(recipe, digits, [0, 1])
    one, two = honest.values()
    prototypes = one.weights["prototypes"]
    raw = two.pack()
    sent = {
        "honest": (one.pack(), "counted (1 of 3)"),
        "again": (one.pack(), "client_000: the same upload again, it is counted already"),
        "nan": (replace(two, weights={**two.weights, "prototypes": prototypes * torch.nan}).pack(), "not finite"),
        "shape": (
            replace(two, weights={**two.weights, "prototypes": prototypes[:-1].clone()}).pack(),
            "expected torch.float32",
        ),
        "recipe": (replace(two, recipe_digest="0" * 64).pack(), "answers another recipe"),
        "norm": (
            replace(two, weights={**two.weights, "prototypes": prototypes * 100}).pack(),
            "upload.largest_norm = 10",
        ),
        "truncated": (raw[: len(raw) // 2], "damaged or truncated"),
        "pickle": (pickle.dumps({"weights": [1, 2]}), "a pickle or zip file"),
    }
    out = tmp_path / "out"
    run = federation.serve(recipe, out)
    for content, _ in sent.values():
        federation.puppet(content)
    federation.puppet(b"", rude=True)
    federation.puppet(b"", ready=False)  # never answers
    last = federation.puppet(raw, ready=False)
    for name, (_, words) in sent.items():
        wait_for(
            lambda words=words: words in log_of(out), lambda name=name: f"{name}: {log_of(out)} {run.read_output()}"
        )
    last.ready.set()
    ended(run)
    log = log_of(out)
    assert "the quorum is here: 2 of 3 uploads, quorum 2" in log
    assert result(out)["uploads"] == {name: upload.content for name, upload in honest.items()}
    assert result(out)["remarks"] == ["1 of 3 sites are missing: no upload in time"]
    assert len(list((out / "quarantine").iterdir())) == log.count("(kept in quarantine/") == 6


def test_a_reply_that_is_announced_and_never_sent_holds_nobody_up(
    digits: Dataset, federation: Federation, tmp_path: Path
) -> None:
    """The SuperLink gives its sender up after 180 s; the others are counted meanwhile."""
    recipe = small_recipe(partition__clients=3, partition__alpha=0.3, quorum=2, fusion=["iffi"])
    honest = trained(recipe, digits, [0, 1, 2])
    out = tmp_path / "out"
    run = federation.serve(recipe, out)
    half = federation.puppet(honest.pop("client_002").pack(), half=True)
    others = [federation.puppet(upload.pack(), ready=False) for upload in honest.values()]
    wait_for(half.announced.is_set, lambda: log_of(out) + run.read_output())
    time.sleep(2)  # the server has looked at it
    began = time.monotonic()
    for each in others:
        each.ready.set()
    ended(run)
    assert time.monotonic() - began < 60
    assert "the quorum is here: 2 of 3 uploads, quorum 2" in log_of(out)
    assert list(result(out)["uploads"]) == sorted(honest)


def test_a_killed_client_and_a_killed_server_lose_nothing(
    digits: Dataset, federation: Federation, tmp_path: Path
) -> None:
    recipe = small_recipe(
        partition__clients=3,
        partition__alpha=0.3,
        training__epochs=10,
        training__batch_size=16,
        snapshots=0,
        fusion=["iffi"],
    )
    expected = trained(recipe, digits, [0, 1, 2])
    out, site_dir = tmp_path / "out", tmp_path / "client_002"
    run = federation.serve(recipe, out)
    for name in ("client_000", "client_001"):
        federation.puppet(expected[name].pack())
    node = federation.site("client_002", share=2)
    wait_for(
        lambda: "(2 of 3)" in log_of(out) and list(site_dir.glob("*/state.safetensors")),
        lambda: log_of(out) + run.read_output(),
    )
    node.kill()
    _kill_trainers(site_dir)
    (state,) = site_dir.glob("*/state.safetensors")
    reached = blob.peek(state, "state")["epoch"]
    assert 1 <= reached < 10, "killed too late to show anything"
    federation.link.child.kill()
    federation.link.start()
    run = federation.serve(recipe, out)
    node.start()
    ended(run)
    log, site = log_of(out), (site_dir / "site.log").read_text()
    assert "2 uploads are here already: client_000, client_001" in log
    assert_same(RunFolder(out).uploads(), expected.values())
    assert list(result(out)["uploads"].items())[:2] == [(name, expected[name].content) for name in sorted(expected)[:2]]
    assert site.count(" epoch 1:") == 1 and site.count(" epoch 10:") == 1


def _kill_trainers(site_dir: Path) -> None:
    """The training process ends with its SuperNode; be sure that it has."""
    before = -1
    while True:
        size = (site_dir / "site.log").stat().st_size
        if size == before:
            return
        before = size
        time.sleep(1)


@pytest.mark.release
def test_a_federation_on_one_machine_ends_when_its_last_site_has_failed_and_goes_on_when_that_is_put_right(
    tmp_path: Path,
) -> None:
    """One site's log cannot be written, so that its app fails whatever it is asked."""
    out = tmp_path / "out"
    broken = out / "sites" / "client_001" / "site.log"
    broken.mkdir(parents=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(small_recipe(partition__clients=2, training__epochs=1, partition__kind="iid").to_yaml())
    command = ("federate", "local", str(recipe), "--out", str(out))
    error = bad(*command, code=1)
    assert error.count("1 of 2 uploads when no site was left to wait for (node ") == 1
    assert "no answer after 3 attempts), quorum = 2; nothing is fused, they are kept: put that right" in error
    assert [path.stem for path in (out / "uploads").iterdir()] == ["client_000"]
    kept = (out / "uploads" / "client_000.safetensors").read_bytes()
    assert "client_000 alone" in good("fuse", str(out), "--rule", "iffi")
    broken.rmdir()
    good(*command)
    assert sorted(result(out)["uploads"]) == ["client_000", "client_001"]
    assert (out / "uploads" / "client_000.safetensors").read_bytes() == kept


def test_the_deadline_fuses_what_is_there_and_a_late_upload_is_kept(
    digits: Dataset, federation: Federation, tmp_path: Path
) -> None:
    recipe = small_recipe(partition__clients=3, partition__alpha=0.3, quorum=2, deadline=3.0, fusion=["iffi"])
    uploads = trained(recipe, digits, [0, 1, 2])
    out = tmp_path / "out"
    for name in ("client_000", "client_001"):
        uploads[name].write(RunFolder(out).upload(name))
    ended(federation.serve(recipe, out))
    assert "the deadline of 3 s passed: 2 of 3 uploads, quorum 2" in log_of(out)
    before = result(out)
    assert list(before["uploads"]) == ["client_000", "client_001"]
    federation.puppet(uploads["client_002"].pack())
    for _ in range(10):  # each waits until the deadline
        if "client_002: upload of" in log_of(out):
            break
        ended(federation.serve(recipe, out))
    assert "kept for oneround fuse, the model is made already (3 of 3)" in log_of(out)
    assert result(out) == before
    assert "client_002 alone" in good("fuse", str(out), "--rule", "iffi")


def test_an_expired_certificate_is_refused_at_both_ends(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    keys.make(["localhost"], ["a"])
    keys.certificate.unlink()
    keys.make(["localhost"], [], days=-1)
    out = str(tmp_path / "out")
    assert "server.crt: expired on" in bad("federate", "server", "demo", "--keys", str(keys.path), "--out", out)
    with SuperLink(tmp_path / "flower", "127.0.0.1", free_port(), keys) as link:
        words = ["--server", f"localhost:{link.port}", "--keys", str(keys.path), "--set", "share=0"]
        assert "certificate has expired" in bad("federate", "client", *words, cwd=tmp_path)
