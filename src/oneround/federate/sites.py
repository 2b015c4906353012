"""Who a client is: the file that describes a site, and what it brings to a federation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from oneround.errors import DataError, ProtocolError, RecipeError
from oneround.parts import Strict
from oneround.reading import checked, read_yaml
from oneround.recipe import Local

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
Name = Annotated[str, Field(pattern=NAME)]
Where = Annotated[Path | None, Field(strict=False)]


class SiteFile(Strict):
    """A site's own settings; none of them leaves it, except the name."""

    name: Name
    """Under which its upload is counted: letters, digits, `_`, `.` and `-`."""
    data: str | None = None
    """Its images: a folder of images by class, an .npz file, or `module:function` that returns images and labels."""
    share: Annotated[int, Field(ge=0)] | None = None
    """Instead of data, for a try-out: the share this client has in the partition of the recipe's own data set."""
    labels: dict[str, str] = Field(default={})
    """What this site calls a class → what the recipe calls it; classes of the same name need no entry."""
    folder: Where = None
    """Where it keeps its state and its upload; left out: nothing is kept and a restart begins anew."""
    local: Local = Local()
    """How this machine works: device, threads, plug-ins, and the data path of a try-out."""

    @model_validator(mode="after")
    def _one_source(self) -> SiteFile:
        if (self.data is None) == (self.share is None):
            raise ValueError(
                "give data (a folder, an .npz file or module:function), or for a try-out share, one of both"
            )
        return self


def read_site(path: Path) -> SiteFile:
    """A site from its YAML file."""
    try:
        raw = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); it describes the site (name, data, folder)"
        ) from None
    try:
        return checked(SiteFile, raw)
    except RecipeError as error:
        raise DataError(f"{path}: {error}") from None


def check_name(name: str, registered: str, sender: str) -> None:
    """Whoever speaks for a site has a name, and the one its key is registered for, if that is known."""
    if not re.match(NAME, name):
        raise ProtocolError(f"{sender}: refused, {name[:80]!r} is no name for a site (letters, digits, _ . -)")
    if registered and name != registered:
        raise ProtocolError(f"{sender}: refused, it speaks for {name} but its key is registered for {registered}")


def site_of(node_config: Mapping[str, Any]) -> SiteFile:
    """The site a Flower node is: its `site` file, or the `partition-id` Flower's simulation gives it."""
    if "site" in node_config:
        return read_site(Path(str(node_config["site"])))
    try:
        share, count = (int(node_config[key]) for key in ("partition-id", "num-partitions"))
    except KeyError:
        raise DataError(
            "this node does not know its site; give it --node-config 'site=\"/path/to/site.yaml\"'"
        ) from None
    from oneround.folder import client_name  # brings PyTorch along, which a node with a file need not wait for

    return SiteFile(name=client_name(share, count), share=share)
