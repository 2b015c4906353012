"""The site file: a site's name, its data and its machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from oneround.config.load import checked, read_yaml
from oneround.config.parts import Strict
from oneround.config.recipe import Local
from oneround.errors import DataError, RecipeError, refused

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"
OUTCOME = "outcome.json"
"""In a run folder once the ServerApp has ended: {"ok": true}, or {"error": why}."""
REFUSED = "refused.json"
"""In a site's folder when it could not take part: {"error": why}."""


class SiteFile(Strict):
    """A site's own settings; none of them leaves it, except the name."""

    name: Annotated[str, Field(pattern=NAME)]
    """Name of its upload: letters, digits, `_`, `.` and `-`."""
    data: str | None = None
    """Its images: a folder of images by class, an .npz file, or `module:function` that returns images and labels."""
    share: Annotated[int, Field(ge=0)] | None = None
    """Instead of data, for a test on one machine: the number of its share in the partition of the recipe's data set."""
    labels: dict[str, str] = Field(default={})
    """This site's name of a class → the recipe's name of it; classes of the same name need no entry."""
    folder: Annotated[Path | None, Field(strict=False)] = None
    """Folder of its state and its upload; without one nothing is kept and a restart starts over."""
    local: Local = Local()
    """Settings of this machine: device, threads, plug-ins, and with `share` the path of the data set."""

    @model_validator(mode="after")
    def _one_source(self) -> SiteFile:
        if (self.data is None) == (self.share is None):
            raise ValueError("give data (a folder, an .npz file or module:function) or, for a test, share; not both")
        return self


def read_site(path: Path) -> SiteFile:
    """A site from its YAML file; DataError if it cannot be read or is not valid."""
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
    """Refuse a name that no site can have, and one that the sender's key is not registered for, if that is known."""
    if not re.fullmatch(NAME, name):
        raise refused(sender, f"{name[:80]!r} is no name for a site (letters, digits, _ . -)")
    if registered and name != registered:
        raise refused(sender, f"it speaks for {name} but its key is registered for {registered}")


def site_of(node_config: Mapping[str, Any]) -> SiteFile:
    """The site of a Flower node: its `site` file, or the `partition-id` that Flower's simulation gives it."""
    if "site" in node_config:
        return read_site(Path(str(node_config["site"])))
    try:
        share, count = (int(node_config[key]) for key in ("partition-id", "num-partitions"))
    except KeyError:
        raise DataError(
            "this node does not know its site; give it --node-config 'site=\"/path/to/site.yaml\"'"
        ) from None
    from oneround.runs.folder import client_name  # imports PyTorch, for which a node with a file need not wait

    return SiteFile(name=client_name(share, count), share=share)
