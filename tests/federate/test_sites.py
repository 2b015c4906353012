"""A site is described by its file; a mistake in it is one line that names the file, the key and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from oneround.errors import DataError, OneroundError, ProtocolError
from oneround.federate.sites import check_name, read_site, site_of


def written(tmp_path: Path, text: str) -> Path:
    (tmp_path / "site.yaml").write_text(text)
    return tmp_path / "site.yaml"


def test_a_file_is_read_with_paths_and_labels(tmp_path: Path) -> None:
    file = written(tmp_path, "name: hospital-b\ndata: /scans\nlabels: {lung infection: pneumonia}\nfolder: /state\n")
    site = read_site(file)
    assert (site.name, site.data, site.folder) == ("hospital-b", "/scans", Path("/state"))
    assert site.labels == {"lung infection": "pneumonia"} and site.share is None
    assert site_of({"site": str(file)}) == site


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: a", "give data .* or, for a test, share"),
        ("name: a\ndata: x\nshare: 1", "not both"),
        ("name: a/b\ndata: x", "name = .*a/b"),
        ("name: a\nshare: -1", "share = -1"),
        ("name: a\nshare: 0\nlocal: {thread: 1}", "local.thread = 1.*did you mean 'threads'"),
        ("name: [", "not valid YAML"),
    ],
)
def test_a_mistake_names_the_file_and_the_key(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(OneroundError, match=f"site.yaml: .*{reason}"):
        read_site(written(tmp_path, text))


def test_a_file_that_is_not_there_says_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.yaml: cannot be read .* it describes the site"):
        read_site(tmp_path / "gone.yaml")


def test_a_simulated_node_is_a_share_of_the_partition() -> None:
    site = site_of({"partition-id": 3, "num-partitions": 5})
    assert (site.name, site.share, site.data) == ("client_003", 3, None)
    with pytest.raises(DataError, match="does not know its site"):
        site_of({})


def test_nobody_speaks_for_another_site() -> None:
    check_name("a", "a", "node 1")
    check_name("a", "", "node 1")
    with pytest.raises(ProtocolError, match="it speaks for a but its key is registered for b"):
        check_name("a", "b", "node 1")
    for name in ("../a", "a\n", ""):
        with pytest.raises(ProtocolError, match="is no name for a site"):
            check_name(name, "", "node 1")
