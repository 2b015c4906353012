"""Commands for several machines: federate server, client, local, keys."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oneround.cli.options import (
    AlphaOption,
    ClientsOption,
    DataDirOption,
    DataOption,
    DeviceOption,
    EpochsOption,
    RecipeArgument,
    SeedOption,
    SetOption,
    SiteSetOption,
    app,
    make_recipe,
    print_line,
)
from oneround.cli.running import print_result
from oneround.config.recipe import Recipe
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
    Path | None, typer.Option("--out", help="Run folder; otherwise a new one under runs/. An existing one is resumed.")
]


@federate.command()
def server(
    recipe: RecipeArgument,
    keys: KeysOption = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 9092,
    data_dir: DataDirOption = None,
    device: DeviceOption = None,
    folder: OutOption = None,
    insecure: InsecureOption = False,
    sets: SetOption = None,
) -> None:
    """Serve one federation: send the broadcast, take one upload from every site, fuse them. Started again, it resumes."""
    _need_flower()
    from oneround.federate.keys import KeyFolder
    from oneround.federate.launch import run_server

    resolved = make_recipe(recipe, data_dir=data_dir, device=device, sets=sets)
    run_folder = folder or _new_folder(resolved)
    if (keys is None) != insecure:
        raise RecipeError(
            "give --keys FOLDER (make it with oneround federate keys FOLDER), or --insecure to try it on this machine"
        )
    run_server(resolved, run_folder, host, port, KeyFolder(keys) if keys else None, _print_indented)
    _print_result(run_folder)


@federate.command()
def client(
    server: Annotated[str, typer.Option("--server", help="Address of the server.", metavar="HOST:PORT")],
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
    """Take part with this machine's own images: train once, upload once. Started again after a kill, it resumes."""
    _need_flower()
    from oneround.federate.keys import KeyFolder
    from oneround.federate.launch import run_client

    if (keys is None) != insecure:
        raise RecipeError("give --keys FOLDER (ca.crt and this site's key), or --insecure for a server on this machine")
    key_folder = KeyFolder(keys) if keys else None
    options = {"data": data, "name": name or _only_key(key_folder, site), "folder": folder, "local.device": device}
    site_file = _site_file(site, options, sets)
    run_client(site_file, server, key_folder, _print_indented)
    print_line(f"{site_file.name}: done")


@federate.command()
def local(
    recipe: RecipeArgument,
    data: DataOption = None,
    data_dir: DataDirOption = None,
    clients: ClientsOption = None,
    alpha: AlphaOption = None,
    epochs: EpochsOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    folder: OutOption = None,
    sets: SetOption = None,
) -> None:
    """Try a whole federation on this machine: a server and several sites, each in processes of its own."""
    _need_flower()
    from oneround.federate.launch import run_local

    short = {"clients": clients, "alpha": alpha, "epochs": epochs, "device": device}
    resolved = make_recipe(recipe, data=data, data_dir=data_dir, seed=seed, sets=sets, **short)
    run_folder = folder or _new_folder(resolved)
    run_local(resolved, run_folder, _print_indented)
    _print_result(run_folder)


@federate.command(name="keys")
def make_keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write them; existing files stay.")],
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
    written = KeyFolder(folder).make(hosts or [], sites or [], days)
    for path in written:
        print_line(f"{path}   secret" if path.suffix == ".key" else str(path))
    explanation = "ca.key stays with whoever runs the federation; a site needs ca.crt and its own key."
    print_line(explanation if written else "all of them exist already", wrap=True)


def _print_indented(line: str) -> None:
    print_line(f"  {line}")


def _new_folder(recipe: Recipe) -> Path:
    return Path("runs") / time.strftime(f"{recipe.method}-federated-%Y%m%d-%H%M%S")


def _print_result(run_folder: Path) -> None:
    from oneround.runs.result import Result

    print_result(Result.read(run_folder))
    print_line(f"Everything is in {run_folder}/")


def _only_key(keys: KeyFolder | None, site: Path | None) -> str | None:
    """The name of the only private key in the folder: the site's, unless another name is given."""
    own = sorted(file.stem for file in (keys.path / "sites").glob("*.key")) if keys and not site else []
    return own[0] if len(own) == 1 else None


def _site_file(path: Path | None, options: dict[str, Any], sets: list[str] | None) -> SiteFile:
    """The site file with the command line on top."""
    from oneround.config.load import assign, checked, parse_override, read_mapping
    from oneround.federate.sites import SiteFile

    if path is not None and not path.is_file():
        raise DataError(f"--site {path}: no such file")
    raw = {} if path is None else read_mapping(path, "a site file is a YAML mapping (name: …, data: …)")
    for key, value in options.items():
        if value is not None:
            assign(raw, key, str(value))
    for text in sets or []:
        assign(raw, *parse_override(text))
    if "name" not in raw:
        raise DataError("give this site a name: --name NAME, the one its key is registered for")
    raw["folder"] = str(Path(raw.get("folder", Path("sites") / str(raw["name"]))).resolve())
    if "data" in raw and Path(str(raw["data"])).exists():
        raw["data"] = str(Path(str(raw["data"])).resolve())
    return checked(SiteFile, raw, "site")


def _need_flower() -> None:
    if find_spec("flwr") is None:
        raise RecipeError("oneround federate needs Flower: pip install 'oneround[flower]'")
