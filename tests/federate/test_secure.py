"""Sums under masks between sites: the model of plain sums, nothing to read in an upload, and no mask used twice."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from flwr.app import Context, Message

from commands import oneround
from conftest import labelled
from federation import NOW, log_of
from inprocess import InProcess
from noise import ignores
from oneround import sums
from oneround.config.load import change, load
from oneround.data import Dataset
from oneround.data.augment import preprocessing
from oneround.errors import ProtocolError, RecipeError, RunError
from oneround.federate.client_app import app as client_app
from oneround.federate.intake import UploadIntake
from oneround.federate.messages import KEY, TRAIN, fields_of, pack_message
from oneround.federate.server_app import serve
from oneround.global_model import GlobalModel
from oneround.models.encoders import encoders
from oneround.models.prototype import initialise
from oneround.privacy import key_agreement
from oneround.protocol import Broadcast, Upload, blob
from oneround.runs.result import Result
from oneround.server.plan import DealtPlan
from oneround.simulate import run as simulate
from oneround.sums import Moments
from oneround.sums.moments import triangle_of
from site_process import in_a_process
from tampering import repacked

NAMES = [f"client_00{number}" for number in range(3)]


PLAIN = load(
    "ridge",
    {
        "sums.features": {"kind": "patches", "size": 96, "patch": 4}, "partition.clients": 3, "partition.alpha": 0.3,
        "local.workers": 1,
    }.items(),
)  # fmt: skip


SECURE = change(PLAIN, {"sums.secure": True, "reveal.class_counts": False, "deadline": 60.0})  # rather than for ever


def site_files(folder: Path) -> dict[int, dict[str, Any]]:
    """Three sites, each with a folder for its key."""
    nodes = {}
    for number, name in enumerate(NAMES):
        (folder / name).mkdir(parents=True)
        (folder / name / "site.yaml").write_text(f"name: {name}\nshare: {number}\nfolder: {folder / name}\n")
        nodes[10 + number] = {"site": str(folder / name / "site.yaml")}
    return nodes


def predictions(folder: Path, data: Dataset) -> torch.Tensor:
    return GlobalModel.load(folder / "model").predict(data.test.pixels)


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation under masks: `run` is the server's folder, `sites` are theirs."""
    folder = tmp_path_factory.mktemp("secure")
    serve(InProcess(site_files(folder / "sites")), SECURE, folder / "run", NOW)
    return folder


@pytest.fixture(scope="module")
def plain(digits: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "run"
    simulate(PLAIN, folder, data=digits)
    return folder


def test_masked_sums_give_the_model_of_plain_ones(carried: Path, plain: Path, digits: Dataset) -> None:
    found, wanted = Result.read(carried / "run"), Result.read(plain)
    assert found.rules == wanted.rules and found.rules["ridge"] > 0.9
    apart = predictions(carried / "run", digits) - predictions(plain, digits)
    assert float(apart.abs().max()) < 1e-5
    assert found.clients == {} and wanted.clients.keys() == set(NAMES), "nobody is scored alone"


def test_a_simulation_gives_the_same_model_and_says_that_it_has_no_secrets(
    carried: Path, digits: Dataset, tmp_path: Path
) -> None:
    simulate(SECURE, tmp_path / "run", data=digits)
    assert torch.equal(predictions(tmp_path / "run", digits), predictions(carried / "run", digits))
    simulated, federated = Result.read(tmp_path / "run"), Result.read(carried / "run")
    assert any("a simulation has no secrets" in remark for remark in simulated.remarks)
    assert simulated.rules == federated.rules and not any("secrets" in remark for remark in federated.remarks)


def moments_of(name: str, data: Dataset) -> Moments:
    """What a client's sums are without masks."""
    plan = DealtPlan.of(PLAIN, data)
    broadcast = plan.prepare()
    constants = sums.constants_of(broadcast.recipe, broadcast.shape, broadcast.extras)
    features = sums.features_of(broadcast.recipe, broadcast.shape, constants)
    mine = data.train.take(plan.split.clients[plan.clients[name]])
    return sums.gather(features, mine, broadcast.classes, *preprocessing(broadcast.recipe))


def test_no_file_at_the_server_tells_of_one_client(carried: Path, digits: Dataset) -> None:
    """Each upload, and any two of three together, look like noise that ignores the data; nor do words tell of it."""
    numbers = {}
    for name in NAMES:
        manifest, tensors = blob.read(carried / "run" / "uploads" / f"{name}.safetensors", "upload")
        assert manifest["class_counts"] == [] and set(manifest["history"][0]) == {"epoch"}
        assert manifest["roster"] == NAMES and {value.dtype for value in tensors.values()} == {torch.int64}
        numbers[name] = tensors["sums.triangle"].numpy()
        small = torch.cat([tensors["sums.total"], tensors["sums.counts"]])
        assert int(small.abs().min()) > 2**40, "what is not masked would have fewer bits"
    for name in NAMES:
        hidden = triangle_of(moments_of(name, digits).gram, torch.float64).numpy()
        assert ignores(numbers[name], hidden)
        for other in NAMES:
            assert other == name or ignores(numbers[name] + numbers[other], hidden)
    assert not ignores(numbers[NAMES[0]] + numbers[NAMES[1]] + numbers[NAMES[2]], hidden), "only the total does"
    keys = json.loads((carried / "run" / "keys.json").read_text())["keys"]
    for name in NAMES:
        (secret,) = (carried / "sites" / name / "masks").iterdir()
        private = json.loads(secret.read_text())["private"]
        assert secret.stat().st_mode & 0o777 == 0o600 and len(private) == 64 and private != keys[name]
        for file in (path for path in (carried / "run").rglob("*") if path.is_file()):
            assert private.encode() not in file.read_bytes() and bytes.fromhex(private) not in file.read_bytes(), file


def test_other_commands_cope_with_what_is_not_told(carried: Path) -> None:
    folder = str(carried / "run")
    for words in (["report", folder], ["diagnose", folder], ["fuse", folder], ["compare", folder, folder]):
        done = oneround(*words, cwd=carried)
        assert done.returncode == 0, (words, done.stderr)
    left_out = oneround("fuse", folder, "--rule", "ridge", "--without", "client_001", cwd=carried)
    assert left_out.returncode == 2 and left_out.stderr.count("\n") == 1
    assert "--without client_001: these sums are under masks" in left_out.stderr
    assert "masks hide each client's sums" in " ".join(
        oneround("methods", "ridge", "--set", "sums.secure=true", "--set", "reveal.class_counts=false").stdout.split()
    )


def test_sites_with_images_of_their_own_mask_for_whoever_came(digits: Dataset, tmp_path: Path) -> None:
    """Nobody knows their names before: those whose keys came are the ones, and a third that comes later rests."""
    nodes = {}
    for number, name in enumerate(("north", "south", "late")):
        own = digits.train.take(torch.arange(number, len(digits.train), 2))
        np.savez(tmp_path / f"{name}.npz", x=own.pixels.numpy(), y=own.labels.numpy(), class_names=digits.class_names)
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"name: {name}\ndata: {tmp_path / f'{name}.npz'}\nfolder: {tmp_path / name}\n")
        nodes[number] = {"site": str(file)}
    data = {"kind": "sites", "classes": list(digits.class_names), "size": 8, "grey": True}
    (tmp_path / "server").mkdir()
    given = {"data": data, "partition.clients": 2, "local.data_path": str(tmp_path / "server")}
    serve(InProcess(nodes), change(SECURE, given), tmp_path / "run", NOW)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (
        sorted(result["uploads"])
        == sorted(json.loads((tmp_path / "run" / "keys.json").read_text())["keys"])
        == ["north", "south"]
    )
    right = predictions(tmp_path / "run", digits).argmax(1) == digits.test.labels
    assert float(right.double().mean()) > 0.9


def messages_of(grid: InProcess, kind: str) -> list[Message]:
    return [message for message in grid.sent if message.metadata.message_type == kind]


def test_a_client_killed_after_the_keys_goes_on_with_the_same_masks(carried: Path, tmp_path: Path) -> None:
    """Its sums fall into the place the others have masked for: the answer is the one it would have given undisturbed."""
    sent, name = (carried / "run" / "broadcast.safetensors").read_bytes(), NAMES[0]
    shutil.copytree(carried / "sites" / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / name / "site.yaml").write_text(f"name: {name}\nshare: 0\nfolder: {tmp_path / name}\n")
    node = {"site": str(tmp_path / name / "site.yaml")}
    assert in_a_process(node, TRAIN, sent, tmp_path / "none", killed=True) == -signal.SIGKILL
    assert not (tmp_path / "none").exists()
    run = json.loads((carried / "run" / "keys.json").read_text())["run"]
    assert in_a_process(node, KEY, run.encode(), tmp_path / "key") == 0
    assert (tmp_path / "key").read_text() == Broadcast.unpack(sent).roster[name]
    assert in_a_process(node, TRAIN, sent, tmp_path / "again") == 0
    first = Upload.unpack(
        (carried / "run" / "uploads" / f"{name}.safetensors").read_bytes(), Broadcast.unpack(sent), {}
    )
    again = Upload.unpack((tmp_path / "again").read_bytes(), Broadcast.unpack(sent), {})
    assert again.content == first.content


def asked(site: Path, sent: bytes) -> dict[str, str]:
    """What the site in that folder answers to a broadcast."""
    grid = InProcess({10: {"site": str(site / "site.yaml")}})
    (reply,) = grid.send_and_receive([Message(pack_message({}, sent), 10, TRAIN)])
    return fields_of(reply)


@pytest.mark.parametrize("left", ["masks", "nothing but masks"])
def test_a_site_never_masks_other_images_with_the_same_masks(carried: Path, tmp_path: Path, left: str) -> None:
    """Whatever else of its folder was removed, and in whatever words the same broadcast comes again."""
    sent, name = (carried / "run" / "broadcast.safetensors").read_bytes(), NAMES[0]
    keep = (
        shutil.ignore_patterns("upload.safetensors") if left == "masks" else shutil.ignore_patterns("????????????????")
    )
    shutil.copytree(carried / "sites" / name, tmp_path / name, ignore=keep)
    (tmp_path / name / "site.yaml").write_text(f"name: {name}\nshare: 1\nfolder: {tmp_path / name}\n")
    assert "masks are used once" in asked(tmp_path / name, sent)["refused"]
    length = int.from_bytes(sent[:8], "little")
    reworded = (length + 8).to_bytes(8, "little") + sent[8 : 8 + length] + b" " * 8 + sent[8 + length :]
    assert reworded != sent and "bound to another broadcast" in asked(tmp_path / name, reworded)["refused"]
    shutil.rmtree(tmp_path / name / "masks")
    assert "another key for this site than its folder" in asked(tmp_path / name, sent)["refused"]


@pytest.mark.parametrize("state", ["uploaded", "killed before its sums"])
def test_one_key_serves_one_list_of_sites(
    carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """After {A, B, C} the server asks {A, B}: the difference of the totals would be C's sums, so both refuse."""
    whole = Broadcast.read(carried / "run" / "broadcast.safetensors")
    fewer = replace(whole, roster={name: whole.roster[name] for name in NAMES[:2]}).pack()
    shutil.copytree(carried / "sites", tmp_path / "sites")
    for number, name in enumerate(NAMES[:2]):
        site = tmp_path / "sites" / name
        (site / "site.yaml").write_text(f"name: {name}\nshare: {number}\nfolder: {site}\n")
        if state != "uploaded":
            (kept,) = (site / "masks").iterdir()
            content = json.loads(kept.read_text())
            kept.write_text(json.dumps({**content, "masked": {}}))
            assert content["binding"]["sites"] == NAMES
        with monkeypatch.context() as patch:
            patch.setattr(sums, "gather", lambda *_, **__: pytest.fail("an image was looked at"))
            words = asked(site, fewer)
        assert "bound to another broadcast of client_000, client_001, client_002" in words.get("refused", "")
        again = asked(site, whole.pack())
        assert "refused" not in again, "the broadcast it is bound to is answered as ever"


def test_another_run_with_the_same_sites_has_other_keys_and_sums_anew(carried: Path, tmp_path: Path) -> None:
    shutil.copytree(carried / "sites", tmp_path / "sites")
    nodes = {}
    for number, name in enumerate(NAMES):
        file = tmp_path / "sites" / name / "site.yaml"
        file.write_text(f"name: {name}\nshare: {(number + 1) % 3}\nfolder: {file.parent}\n")  # other images now
        nodes[10 + number] = {"site": str(file)}
    serve(InProcess(nodes), SECURE, tmp_path / "run", NOW)
    first, again = (Broadcast.read(folder / "run" / "broadcast.safetensors") for folder in (carried, tmp_path))
    assert not set(first.roster.values()) & set(again.roster.values()) and first.context != again.context
    assert "trained before" not in (tmp_path / "sites" / NAMES[0] / "site.log").read_text()
    assert Result.read(tmp_path / "run").rules == Result.read(carried / "run").rules, "the total is the same"


def test_small_features_lose_nothing_under_masks(digits: Dataset, tmp_path: Path) -> None:
    """What is summed is brought to a size of about 1 first: whole numbers are fine against it, whatever the features."""
    frozen = {"kind": "encoder", "encoder": {"kind": "cnn", "width": 4}}
    net = initialise(encoders.parse(frozen["encoder"]), 1, 2, seed=1)
    tensors = {name: value.clone() for name, value in net.encoder.state_dict().items()}
    last = max(name for name in tensors if name.endswith("running_var")).removesuffix("running_var")
    for name in ("weight", "bias"):
        tensors[last + name] *= 1e-4
    safetensors.torch.save_file(tensors, tmp_path / "small.safetensors")
    here = {"sums.features": frozen, "local.frozen_encoder": str(tmp_path / "small.safetensors")}
    simulate(change(PLAIN, here), tmp_path / "plain", data=digits)
    simulate(change(SECURE, here), tmp_path / "masked", data=digits)
    apart = predictions(tmp_path / "masked", digits) - predictions(tmp_path / "plain", digits)
    assert float(apart.abs().max()) < 1e-3
    assert int(Broadcast.read(tmp_path / "masked" / "broadcast.safetensors").extras["sums.exponent"]) < -10


def test_keys_are_not_waited_for_when_every_site_has_answered_and_one_refused(tmp_path: Path) -> None:
    def answer(message: Message, context: Context) -> Message | None:
        if context.node_id != 12:
            return client_app(message, context)
        return Message(pack_message({"name": NAMES[2], "refused": f"{NAMES[2]}: no room for a key"}), reply_to=message)

    with pytest.raises(
        RunError, match=r"2 of 3 keys when no site was left to wait for \(client_002: no room"
    ) as caught:
        serve(InProcess(site_files(tmp_path / "sites"), answer=answer), SECURE, tmp_path / "run", NOW, num_nodes=3)
    assert "oneround fuse" not in str(caught.value), "sums under masks cannot be fused without the others"


def test_a_server_killed_before_the_uploads_goes_on_with_the_same_keys(
    tmp_path: Path, digits: Dataset, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First in the middle of the keys, then between keys and uploads."""
    nodes, run_dir = site_files(tmp_path / "sites"), tmp_path / "run"

    def stop(kind: str, nodes: dict[int, dict[str, Any]]) -> InProcess:
        """Time is over when the server has asked the last site, which does not answer this."""

        def answer(message: Message, context: Context) -> Message | None:
            last = context.node_id == 12 and message.metadata.message_type == kind
            return None if last else client_app(message, context)

        grid = InProcess(nodes, answer=answer)
        monkeypatch.setattr(
            UploadIntake, "waited", property(lambda intake: 1e9 if len(messages_of(grid, kind)) > 3 else 0.0)
        )
        return grid

    with pytest.raises(RunError, match=r"2 of 3 keys when the deadline of 60 s passed; they are kept"):
        serve(stop(KEY, nodes), SECURE, run_dir, NOW)
    two = json.loads((run_dir / "keys.json").read_text())["keys"]
    assert sorted(two) == NAMES[:2] and not (run_dir / "uploads").exists()
    with pytest.raises(RunError, match=r"2 of 3 uploads when the deadline"):
        serve(stop(TRAIN, nodes), SECURE, run_dir, NOW)
    sent = (run_dir / "broadcast.safetensors").read_bytes()
    assert two.items() < Broadcast.unpack(sent).roster.items()
    monkeypatch.undo()
    (run_dir / "keys.json").unlink()  # what was sent is what counts now
    grid = InProcess(nodes)
    serve(grid, SECURE, run_dir, NOW)
    assert not messages_of(grid, KEY) and (run_dir / "broadcast.safetensors").read_bytes() == sent
    assert float((predictions(run_dir, digits) - predictions(plain, digits)).abs().max()) < 1e-5


def test_an_upload_masked_with_another_secret_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = key_agreement.secrets_of

    def other(name: str, folder: Path, roster: dict[str, str], digest: str) -> dict[str, bytes]:
        return honest(name, folder, roster, "another recipe" if name == "client_001" else digest)

    monkeypatch.setattr(key_agreement, "secrets_of", other)
    with pytest.raises(ProtocolError, match="the masks do not cancel: a client masked with another secret"):
        serve(InProcess(site_files(tmp_path / "sites")), SECURE, tmp_path / "run", NOW)
    assert "ERROR the masks do not cancel" in log_of(tmp_path / "run")
    assert not (tmp_path / "run" / "result.json").exists() and len(list((tmp_path / "run" / "uploads").iterdir())) == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"class_counts": [5] * 10}, "it has class_counts, which the masks should hide"),
        ({"roster": NAMES[:2]}, "it is masked for another broadcast than this one, or not with client_000, client_001"),
        ({"context": "0" * 64}, "it is masked for another broadcast"),
        ({"client": "client_007"}, "client_007 is not one of client_000, client_001, client_002, who mask"),
        ({"recipe_digest": "0" * 64}, "it answers another recipe"),
    ],
)
def test_an_upload_that_is_not_masked_as_agreed_is_refused(carried: Path, changes: dict[str, Any], reason: str) -> None:
    broadcast = Broadcast.read(carried / "run" / "broadcast.safetensors")
    raw = (carried / "run" / "uploads" / "client_000.safetensors").read_bytes()
    Upload.unpack(repacked(raw), broadcast, {})
    with pytest.raises(ProtocolError, match=reason):
        Upload.unpack(repacked(raw, **changes), broadcast, {})


def test_numbers_of_another_kind_are_refused(carried: Path) -> None:
    broadcast = Broadcast.read(carried / "run" / "broadcast.safetensors")
    raw = (carried / "run" / "uploads" / "client_000.safetensors").read_bytes()
    cross = blob.unpack(raw, "upload", "upload")[1]["sums.cross"]
    with pytest.raises(ProtocolError, match=r"sums.cross is torch.float64 \(96, 10\), expected torch.int64"):
        Upload.unpack(repacked(raw, {"sums.cross": cross.double()}), broadcast, {})


def test_masks_for_one_list_of_keys_serve_no_other(carried: Path) -> None:
    broadcast = Broadcast.read(carried / "run" / "broadcast.safetensors")
    assert Broadcast.unpack(broadcast.pack()).context == broadcast.context
    assert replace(broadcast, roster={**broadcast.roster, NAMES[2]: "00" * 32}).context != broadcast.context


def test_a_name_that_stands_twice_is_refused(carried: Path) -> None:
    manifest, tensors = blob.read(carried / "run" / "broadcast.safetensors", "broadcast")
    twice = {**manifest, "roster": [*manifest["roster"], manifest["roster"][0]]}
    with pytest.raises(ProtocolError, match="a name stands twice in the roster"):
        Broadcast.unpack(blob.pack("broadcast", tensors, twice))


def test_a_site_without_a_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes: dict[int, dict[str, Any]] = {10 + k: {"partition-id": k, "num-partitions": 3} for k in range(3)}
    monkeypatch.setattr(
        UploadIntake, "waited", property(lambda intake: 1e9 if "no folder" in log_of(intake.folder.path) else 0.0)
    )
    with pytest.raises(RunError, match="0 of 3 keys"):
        serve(InProcess(nodes), SECURE, tmp_path / "run", NOW)
    assert "client_000: sums.secure: this site has no folder to keep its key in; name one" in log_of(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reveal.class_counts": True}, "class counts are under the masks too; set reveal.class_counts: false"),
        ({"reveal.class_counts": {"epsilon": 1.0}}, "class counts are under the masks too"),
        ({"sums.precision": "fp16"}, r"precision = fp16: sums under masks are whole numbers of 64 bits"),
        ({"sums.rank": 8}, r"rank = 8: sums under masks are whole numbers of 64 bits"),
        ({"partition.clients": 1}, r"partition.clients = 1: sums.secure needs at least two"),
        ({"rounds": 2}, r"rounds = 2: sums.secure is for one round"),
        ({"quorum": 2}, r"quorum = 2: with sums.secure masks cancel only in the sum of all 3 clients"),
        ({"objective.terms": {"cross-entropy": {}}}, r"sums.secure: networks disclose what masks hide"),
    ],
)
def test_recipes_that_masks_cannot_serve(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RecipeError, match=reason):
        change(SECURE, changes)


def test_a_partition_that_leaves_nobody_to_mask_with_is_refused() -> None:
    two = change(SECURE, {"partition.clients": 2, "partition.alpha": 1e-6})
    with pytest.raises(RecipeError, match=r"only one client of .* has samples, and masks need two"):
        DealtPlan.of(two, labelled([0] * 50))  # one class, which goes to one of them
