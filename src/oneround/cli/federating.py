"""Commands for several machines: federate server, client, local, keys."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from oneround.cli.options import (
    AlphaOption,
    ClientsOption,
    DataDirOption,
    DataOption,
    DeviceOption,
    RecipeArgument,
    SeedOption,
    SetOption,
    SiteSetOption,
    app,
    make_recipe,
    out,
)
from oneround.errors import DataError, RecipeError

if TYPE_CHECKING:
    from oneround.federate.keys import KeyFolder
    from oneround.federate.sites import SiteFile

federate = typer.Typer(
    help="A real federation on Flower: one server, several sites, encrypted and authenticated.", no_args_is_help=True
)
app.add_typer(federate, name="federate")

KeysOption = Annotated[Path | None, typer.Option("--keys", help="Folder of keys (oneround federate keys).")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Neither encrypted nor authenticated; this machine only.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Run folder; otherwise a new one under runs/. An old one goes on.")
]


@federate.command()
def server(
    recipe: RecipeArgument,
    keys: KeysOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Where sites reach it.")] = 9092,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    folder: OutOption = None,
    insecure: InsecureOption = False,
    sets: SetOption = None,
) -> None:
    """Serve one federation: send the broadcast, take one upload from every site, fuse them. Started again it goes on."""
    _need_flower()
    from oneround.federate.keys import KeyFolder
    from oneround.federate.operating import be_server

    resolved = make_recipe(recipe, data_dir=data_dir, changes={"local.device": device}, sets=sets)
    place = folder or Path("runs") / time.strftime(f"{resolved.method}-federated-%Y%m%d-%H%M%S")
    if (keys is None) != insecure:
        raise RecipeError(
            "give --keys FOLDER (make it with oneround federate keys FOLDER), or --insecure to try it on this machine"
        )
    be_server(resolved, place, host, port, KeyFolder(keys) if keys else None, _say)
    _show(place)


@federate.command()
def client(
    server: Annotated[str, typer.Option("--server", help="Where the server listens.", metavar="HOST:PORT")],
    data: Annotated[
        str | None, typer.Option("--data", help="A folder of images by class, an .npz file, or module:function.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of this site; otherwise that of its only key.")
    ] = None,
    keys: KeysOption = None,
    site: Annotated[
        Path | None, typer.Option("--site", help="A site file (YAML) with name, data, labels, local settings.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="Where this site keeps its state; otherwise sites/NAME.")
    ] = None,
    device: DeviceOption = None,
    insecure: InsecureOption = False,
    sets: SiteSetOption = None,
) -> None:
    """Take part with this machine's own images: train once, upload once. Killed and started again it goes on."""
    _need_flower()
    from oneround.federate.keys import KeyFolder
    from oneround.federate.operating import Admission, be_client

    if (keys is None) != insecure:
        raise RecipeError("give --keys FOLDER (ca.crt and this site's key), or --insecure for a server on this machine")
    known = KeyFolder(keys) if keys else None
    described = _site(
        site, {"data": data, "name": name or _only_key(known, site), "folder": folder, "device": device}, sets
    )
    admission = Admission(known.ca, known.private(described.name)) if known else None
    be_client(described, server, admission, _say)
    out.print(f"{described.name}: done", highlight=False)


@federate.command()
def local(
    recipe: RecipeArgument,
    data: DataOption = None,
    data_dir: DataDirOption = None,
    clients: ClientsOption = None,
    alpha: AlphaOption = None,
    epochs: Annotated[int | None, typer.Option("--epochs", help="Local epochs before the one upload.")] = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    folder: OutOption = None,
    sets: SetOption = None,
) -> None:
    """Try a whole federation on this machine: a server and several sites, each in processes of its own."""
    _need_flower()
    from oneround.federate.operating import be_local

    changes = {
        "partition.clients": clients,
        "partition.alpha": alpha,
        "training.epochs": epochs,
        "local.device": device,
    }
    resolved = make_recipe(recipe, data=data, data_dir=data_dir, seed=seed, changes=changes, sets=sets)
    place = folder or Path("runs") / time.strftime(f"{resolved.method}-federated-%Y%m%d-%H%M%S")
    be_local(resolved, place, _say)
    _show(place)


@federate.command(name="keys")
def make_keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write them; what is there stays.")],
    hosts: Annotated[list[str] | None, typer.Option("--host", help="Name or address sites reach the server by: makes CA and certificate.")] = None,
    sites: Annotated[list[str] | None, typer.Option("--site", help="Name of a site: makes its key pair.")] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=36500, help="How long certificates are valid.")] = 825,
) -> None:  # fmt: skip
    """Make a CA, a server certificate and key pairs of sites."""
    _need_flower()
    from oneround.federate.keys import KeyFolder

    if not hosts and not sites:
        raise RecipeError(
            "name what to make: --host SERVER-NAME for CA and certificate, --site NAME for a site's key pair"
        )
    made = KeyFolder(folder).make(hosts or [], sites or [], days)
    for path in made:
        secret = path.suffix == ".key"
        out.print(f"{path}{'   secret' if secret else ''}", highlight=False, soft_wrap=True)
    out.print(
        "ca.key stays with whoever runs the federation; a site needs ca.crt and its own key."
        if made
        else "all there already",
        highlight=False,
    )


def _say(line: str) -> None:
    out.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


def _show(place: Path) -> None:
    """The table of a finished run, as `oneround run` shows it."""
    from oneround.observe.tables import score_table
    from oneround.runs import Result

    result = Result.read(place)
    if result.rules:
        out.print(score_table(result.rules, result.clients))
    for remark in result.remarks:
        out.print(f"note: {escape(remark)}", highlight=False)
    out.print(f"Everything is in {place}/", highlight=False, soft_wrap=True)


def _only_key(keys: KeyFolder | None, site: Path | None) -> str | None:
    """A site with one private key need not say its name twice."""
    own = sorted(file.stem for file in (keys.path / "sites").glob("*.key")) if keys and not site else []
    return own[0] if len(own) == 1 else None


def _site(file: Path | None, given: dict[str, Any], sets: list[str] | None) -> SiteFile:
    """The site file with the command line on top."""
    from oneround.federate.sites import SiteFile
    from oneround.reading import assign, checked, parse_override, read_yaml

    raw: dict[str, Any] = {}
    if file is not None:
        if not file.is_file():
            raise DataError(f"--site {file}: no such file")
        try:
            raw = read_yaml(file.read_text(encoding="utf-8"), str(file)) or {}
        except UnicodeDecodeError:
            raise DataError(f"--site {file}: not text; a site file is YAML (images are named in it, data:)") from None
        if not isinstance(raw, dict):
            raise DataError(f"--site {file}: must be a mapping of keys to values")
    device = given.pop("device")
    raw |= {key: str(value) for key, value in given.items() if value is not None}
    if device is not None:
        assign(raw, "local.device", device)
    for text in sets or []:
        assign(raw, *parse_override(text))
    if "name" not in raw:
        raise DataError("give this site a name: --name NAME, the one its key is registered for")
    raw.setdefault("folder", str(Path("sites") / str(raw["name"])))
    raw["folder"] = str(Path(raw["folder"]).resolve())
    if "data" in raw and Path(str(raw["data"])).exists():
        raw["data"] = str(Path(str(raw["data"])).resolve())
    return checked(SiteFile, raw, "site")


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise RecipeError("oneround federate needs Flower: pip install 'oneround[flower]'")
