"""Keys that sites mask with: what two of them share, and which lists of keys are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from oneround.errors import DataError, ProtocolError
from oneround.federate import pairing
from oneround.federate.roster import Roster
from oneround.federate.sites import SiteFile
from oneround.folder import RunFolder

NAMES = [f"client_00{number}" for number in range(3)]
KEYS = {name: bytes([number] * 31 + [1]).hex() for number, name in enumerate(NAMES, start=10)}
RUN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("change_to", "reason"),
    [
        ({NAMES[1]: KEYS[NAMES[1]][:-2]}, "the key of client_001 is none of 32 bytes that keeps a secret"),
        ({NAMES[1]: ""}, "the key of client_001 is none of 32 bytes that keeps a secret"),
        ({NAMES[1]: KEYS[NAMES[2]].upper()}, "the key of client_001 is none of 32 bytes"),
        ({NAMES[1]: "z" * 64}, "the key of client_001 is none of 32 bytes that keeps a secret"),
        ({NAMES[0]: None}, "the list of keys does not have this site; begin anew"),
        ({NAMES[0]: bytes([99] * 31 + [1]).hex()}, "the list of keys has another key for this site"),
        ({NAMES[1]: KEYS[NAMES[2]]}, "two sites in the list have the same key"),
        ({NAMES[1]: "00" * 32}, "the key of client_001 is none of 32 bytes that keeps a secret"),
        ({NAMES[1]: None, NAMES[2]: None}, "there is nobody else in the list"),
    ],
)
def test_a_site_masks_with_no_bad_key(tmp_path: Path, change_to: dict[str, str | None], reason: str) -> None:
    site = SiteFile(name=NAMES[0], share=0, folder=tmp_path / "site")
    good = {**KEYS, NAMES[0]: pairing.public_key(site, RUN)}
    assert {len(secret) for secret in pairing.secrets_of(site, good, "digest").values()} == {32}
    bad = {name: key for name, key in {**good, **change_to}.items() if key is not None}
    with pytest.raises(ProtocolError, match=reason):
        pairing.secrets_of(site, bad, "digest")


def test_two_sites_share_what_no_other_pair_and_no_other_recipe_does(tmp_path: Path) -> None:
    sites = {name: SiteFile(name=name, share=0, folder=tmp_path / name) for name in NAMES}
    roster = {name: pairing.public_key(site, RUN) for name, site in sites.items()}
    shared = {name: pairing.secrets_of(site, roster, "digest") for name, site in sites.items()}
    for one in NAMES:
        for other in NAMES:
            assert one == other or shared[one][other] == shared[other][one]
    every = {secret for each in shared.values() for secret in each.values()}
    assert len(every) == 3 and not every & set(pairing.secrets_of(sites[NAMES[0]], roster, "another").values())
    (tmp_path / NAMES[1] / "masks" / f"{RUN}.json").unlink()
    renewed = {**roster, NAMES[1]: pairing.public_key(sites[NAMES[1]], RUN)}
    assert not every & set(pairing.secrets_of(sites[NAMES[1]], renewed, "digest").values()), "it takes the private key"


def test_a_server_takes_only_good_keys_of_those_who_take_part(tmp_path: Path) -> None:
    roster = Roster(RunFolder(tmp_path), NAMES, 3)
    roster.take(NAMES[0], KEYS[NAMES[0]], "node 1")
    for name, key, registered, reason in (
        (NAMES[1], "short", "", "'short' is no public key of 32 bytes"),
        (NAMES[1], "01" + 31 * "00", "", "is no public key of 32 bytes that keeps a secret"),
        (NAMES[1], KEYS[NAMES[0]].upper(), "", "is no public key of 32 bytes"),
        ("nobody", KEYS[NAMES[1]], "", "nobody takes no part"),
        (NAMES[0], KEYS[NAMES[1]], "", "another key of client_000 is here already"),
        (NAMES[1], KEYS[NAMES[0]], "", "the key of client_001 is another site's"),
        (NAMES[1], KEYS[NAMES[1]], NAMES[2], "it speaks for client_001 but its key is registered for client_002"),
    ):
        with pytest.raises(ProtocolError, match=reason):
            roster.take(name, key, "node 1", registered)
    assert Roster(RunFolder(tmp_path), NAMES, 3).keys == {NAMES[0]: KEYS[NAMES[0]]}


def test_a_key_is_kept_for_its_owner_alone_and_for_one_run(tmp_path: Path) -> None:
    site = SiteFile(name=NAMES[0], share=0, folder=tmp_path / "site")
    told, secret = pairing.public_key(site, RUN), tmp_path / "site" / "masks" / f"{RUN}.json"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert pairing.public_key(site, RUN) == told != pairing.public_key(site, RUN[::-1])
    with pytest.raises(ProtocolError, match=r"'../../elsewhere' is no name of a run"):
        pairing.public_key(site, "../../elsewhere")
    for torn in (b"torn", b"{}", b'{"private": "00", "masked": {}}'):
        secret.write_bytes(torn)
        with pytest.raises(DataError, match=rf"{RUN}.json: damaged; remove it and begin anew with another --out"):
            pairing.public_key(site, RUN)
    with pytest.raises(DataError, match="this site has no folder to keep its key in"):
        pairing.public_key(SiteFile(name=NAMES[0], share=0), RUN)
