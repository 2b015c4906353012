"""Keys: what is made fits together, and what is there is not touched."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from oneround.errors import DataError
from oneround.federate.keys import KeyFolder


def test_keys_fit_together_and_are_made_once(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path / "keys")
    made = keys.make(["fed.example.org", "10.0.0.7"], ["hospital-a"])
    authority, server = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (keys.ca, keys.certificate))
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1"]
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(keys.certificate, keys.key)
    private = load_ssh_private_key(keys.private("hospital-a").read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert private.public_key() == load_ssh_public_key(keys.public("hospital-a").read_bytes())
    assert {path.stat().st_mode & 0o077 for path in made if path.suffix == ".key"} == {0}
    before = {path: path.read_bytes() for path in made}
    assert [path.name for path in keys.make(["10.0.0.7"], ["hospital-a", "b"])] == ["b.key", "b.pub"]
    with pytest.raises(
        DataError, match=r"--host other: .*server.crt is for fed.example.org, 10.0.0.7, localhost, 127.0.0.1"
    ):
        keys.make(["other"], ["c"])
    with pytest.raises(DataError, match="--host ' ': no name or address of a machine"):
        KeyFolder(tmp_path / "more").make([" "], [])
    assert not keys.public("c").exists() and not (tmp_path / "more").exists()
    assert {path: path.read_bytes() for path in before} == before
    keys.check_server()


def test_a_site_makes_only_its_own_pair(tmp_path: Path) -> None:
    keys = KeyFolder(tmp_path)
    assert {path.suffix for path in keys.make([], ["b"])} == {".key", ".pub"} and not keys.ca.exists()
    with pytest.raises(DataError, match=r"ca.crt: missing; make it with oneround federate keys"):
        keys.check_server()
    with pytest.raises(DataError, match=r"--site ../x: a site's name is letters"):
        keys.make([], ["../x"])


def test_an_authority_that_is_gone_or_another_is_noticed(tmp_path: Path) -> None:
    keys, other = KeyFolder(tmp_path / "keys"), KeyFolder(tmp_path / "other")
    for each in (keys, other):
        each.make(["localhost"], ["a"])
    own = keys.ca.read_bytes()
    keys.ca.write_bytes(other.ca.read_bytes())
    with pytest.raises(
        DataError, match=r"server.crt: not made with ca.crt, .* remove server.crt and server.key and make"
    ):
        keys.check_server()
    keys.ca.unlink()
    with pytest.raises(DataError, match=r"server.crt: exists, but its ca.crt is missing; remove it too"):
        keys.make(["localhost"], [])
    keys.ca.write_bytes(own)
    keys.check_server()
    old = KeyFolder(tmp_path / "old")
    old.make(["localhost"], ["a"], days=-1)
    with pytest.raises(
        DataError, match=r"ca.crt: expired on .*; remove ca.crt, ca.key, server.crt, server.key and make new"
    ):
        old.check_server()
