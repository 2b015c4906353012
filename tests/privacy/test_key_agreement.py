"""Keys that sites mask with: what two of them share, and which lists of keys are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from oneround.errors import DataError, ProtocolError
from oneround.privacy import key_agreement

NAMES = [f"client_00{number}" for number in range(3)]
KEYS = {name: bytes([number] * 31 + [1]).hex() for number, name in enumerate(NAMES, start=10)}
RUN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("change_to", "reason"),
    [
        ({NAMES[1]: KEYS[NAMES[1]][:-2]}, "the key of client_001 is no usable public key"),
        ({NAMES[1]: ""}, "the key of client_001 is no usable public key"),
        ({NAMES[1]: KEYS[NAMES[2]].upper()}, "the key of client_001 is no usable public key"),
        ({NAMES[1]: "z" * 64}, "the key of client_001 is no usable public key"),
        ({NAMES[0]: None}, "the list of keys does not have this site; start over"),
        ({NAMES[0]: bytes([99] * 31 + [1]).hex()}, "the list of keys has another key for this site"),
        ({NAMES[1]: KEYS[NAMES[2]]}, "two sites in the list have the same key"),
        ({NAMES[1]: "00" * 32}, "the key of client_001 is no usable public key"),
        ({NAMES[1]: None, NAMES[2]: None}, "the list of keys has one site only"),
    ],
)
def test_a_site_masks_with_no_bad_key(tmp_path: Path, change_to: dict[str, str | None], reason: str) -> None:
    folder = tmp_path / "site"
    good = {**KEYS, NAMES[0]: key_agreement.public_key(folder, RUN)}
    assert {len(secret) for secret in key_agreement.secrets_of(NAMES[0], folder, good, "digest").values()} == {32}
    bad = {name: key for name, key in {**good, **change_to}.items() if key is not None}
    with pytest.raises(ProtocolError, match=reason):
        key_agreement.secrets_of(NAMES[0], folder, bad, "digest")


def test_two_sites_share_what_no_other_pair_and_no_other_recipe_does(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in NAMES}
    roster = {name: key_agreement.public_key(folder, RUN) for name, folder in folders.items()}
    shared = {name: key_agreement.secrets_of(name, folder, roster, "digest") for name, folder in folders.items()}
    for one in NAMES:
        for other in NAMES:
            assert one == other or shared[one][other] == shared[other][one]
    every = {secret for each in shared.values() for secret in each.values()}
    assert len(every) == 3 and not every & set(
        key_agreement.secrets_of(NAMES[0], folders[NAMES[0]], roster, "another").values()
    )
    (tmp_path / NAMES[1] / "masks" / f"{RUN}.json").unlink()
    renewed = {**roster, NAMES[1]: key_agreement.public_key(folders[NAMES[1]], RUN)}
    assert not every & set(key_agreement.secrets_of(NAMES[1], folders[NAMES[1]], renewed, "digest").values()), (
        "it takes the private key"
    )


def test_a_key_is_bound_on_disk_to_its_first_broadcast(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    roster = {**KEYS, NAMES[0]: key_agreement.public_key(folder, RUN)}
    path = tmp_path / "site" / "masks" / f"{RUN}.json"
    key_agreement.bind(key_agreement.SiteKey.read(path), "first", roster)
    assert json.loads(path.read_text())["binding"] == {"context": "first", "sites": NAMES}
    key_agreement.bind(key_agreement.SiteKey.read(path), "first", roster)
    with pytest.raises(ProtocolError, match=r"bound to another broadcast of client_000, client_001, client_002"):
        key_agreement.bind(key_agreement.SiteKey.read(path), "second", roster)
    key_agreement.SiteKey.read(path).write({"first": "fingerprint"})
    assert key_agreement.SiteKey.read(path).binding == key_agreement.Binding("first", tuple(NAMES)), (
        "what was masked is noted beside it"
    )
    content = json.loads(path.read_text())
    del content["binding"]
    path.write_text(json.dumps(content))  # as written before keys were bound
    key_agreement.bind(key_agreement.SiteKey.read(path), "first", roster)
    path.write_text(json.dumps(content))
    with pytest.raises(
        ProtocolError, match="bound to another broadcast, and a second total would reveal what masks hide"
    ):
        key_agreement.bind(key_agreement.SiteKey.read(path), "second", roster)


def test_a_site_warns_when_it_masks_in_another_set_of_sites(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "site"
    with caplog.at_level(logging.WARNING, "oneround"):
        for run, names in ((RUN, NAMES), (RUN[::-1], NAMES), (RUN[::2] * 2, NAMES[:2])):
            assert not caplog.records
            own = key_agreement.public_key(folder, run)
            roster = {name: KEYS[name] for name in names} | {NAMES[0]: own}
            key = key_agreement._own_key(NAMES[0], folder, roster)
            key_agreement._warn_of_difference(folder, key_agreement.bind(key, run, roster))
    assert (
        "masked with client_000, client_001, client_002 before and now masks with client_000, client_001" in caplog.text
    )


def test_a_key_is_kept_for_its_owner_alone_and_for_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    public, secret = key_agreement.public_key(folder, RUN), tmp_path / "site" / "masks" / f"{RUN}.json"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert key_agreement.public_key(folder, RUN) == public != key_agreement.public_key(folder, RUN[::-1])
    with pytest.raises(ProtocolError, match=r"'../../elsewhere' is no id of a run"):
        key_agreement.public_key(folder, "../../elsewhere")
    for torn in (b"torn", b"{}", b'{"private": "00", "masked": {}}'):
        secret.write_bytes(torn)
        with pytest.raises(DataError, match=rf"{RUN}.json: damaged; remove it and start over with another --out"):
            key_agreement.public_key(folder, RUN)
    with pytest.raises(DataError, match="this site has no folder to keep its key in"):
        key_agreement.public_key(None, RUN)
